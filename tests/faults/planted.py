"""Every fault of streaming that the suite plants: how it is made, and what has to notice it.

Each stands here once. ``test_planted.py`` crosses it with what must catch it: the parity gate, the
gate while every read is watched, the self-check, and the self-check where attention does not repeat
itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import poros
from poros.errors import RematerializationError
from poros.slots.schedule import Phase
from tests.faults import planting as how
from tests.snapshots import build
from tools.adversary import AdversarialStreams


@dataclass(frozen=True)
class Cell:
    """What is trained."""

    architecture: str = "qwen2"
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None

    def build(self) -> Any:
        return build(self.architecture, num_layers=how.NUM_LAYERS, dtype=self.dtype)


QWEN2 = Cell()
AUTOCAST = Cell(dtype=torch.float32, autocast=torch.bfloat16)
SHARED_STATES = Cell("gemma4_shared_kv")


@dataclass(frozen=True)
class Fault:
    """How it is made, and what each that looks at it has to say: a pattern, or None.

    Attributes:
        plant: Change the code, before the model is prepared.
        spoil: Change the prepared model.
        user: Change a model as a user would: the resident arm gets it too.
        streams: Under which the model is prepared.
        cell: What is trained.
        gate: What the gate says first with the check off: a difference, or an error.
        differing: Quantities that have to differ for the gate.
        watched: What the gate says while every read is watched.
        self_check: What the self-check says, before the first step.
        unsteady: The same where attention does not repeat itself.
        error: What the self-check raises.
        num_steps: Of the training.
    """

    plant: how.Plant | None = None
    spoil: how.Spoil | None = None
    user: Callable[[Any], None] | None = None
    streams: type[AdversarialStreams] = AdversarialStreams
    cell: Cell = QWEN2
    gate: str | None = None
    differing: frozenset[str] = field(default_factory=frozenset)
    watched: str | None = None
    self_check: str | None = None
    unsteady: str | None = None
    error: type[Exception] = poros.ParityError
    num_steps: int = 1


FIRST_LOSS, FIRST_GRADIENT = "step 0, loss of micro-batch 0", "step 0, gradient of"
LAYER = r"layers\.\d: "
GRADIENT = LAYER + r"gradient of .* elements differ, by at most \S+; first at \["
OUTPUT = LAYER + r"output: \d+ of \d+ elements differ"
OTHERS_SAVED = "expected the recomputation to save the tensors that the forward saved"
TRACE = "its backward has to leave no trace of random draws"
STEADY_GRADIENT = "gradient of .*deterministic attention on both sides"
LOSS_AND_RANDOM = frozenset({"loss", "gradients", "RNG end state"})
LOSS = frozenset({"loss"})

FAULTS = {
    "random state not restored": Fault(
        how.restore_no_random_state, gate="RematerializationError.*random numbers"
    ),
    "random state not restored, unguarded": Fault(
        how.unguarded(how.restore_no_random_state),
        num_steps=2,
        gate=FIRST_GRADIENT,
        differing=LOSS_AND_RANDOM | {"adapter weights"},
        self_check=r"layers\.0: " + TRACE,
    ),
    "random state not set": Fault(
        how.unguarded(how.set_no_random_state), gate=FIRST_GRADIENT, self_check=GRADIENT
    ),
    # The first step is right; the second one starts from the random state of the first.
    "random state of the recomputation left behind": Fault(
        how.leave_the_random_state,
        num_steps=2,
        gate="step 1, loss of micro-batch 0",
        differing=LOSS_AND_RANDOM,
        self_check=LAYER + TRACE,
    ),
    # Without autocast, or in evaluation mode, a layer saves other tensors.
    "autocast lost": Fault(
        how.lose_autocast,
        cell=AUTOCAST,
        gate=OTHERS_SAVED,
        self_check=OTHERS_SAVED,
        error=RematerializationError,
    ),
    "training flags lost": Fault(
        how.lose_training_flags,
        gate=OTHERS_SAVED,
        self_check=OTHERS_SAVED,
        error=RematerializationError,
    ),
    "slot poisoned": Fault(spoil=how.at_acquire(how.poison), gate=FIRST_LOSS),
    "slot refilled by the book, early": Fault(
        spoil=how.at_acquire(how.refill), gate=FIRST_LOSS + r"(?!.*\bnan\b)", differing=LOSS
    ),
    "slot refilled early, forward": Fault(
        spoil=how.refill_early(Phase.FORWARD),
        gate=FIRST_LOSS,
        self_check=r"layers\.1: output: \d+ of \d+ elements differ",
    ),
    "slot refilled early, backward": Fault(
        spoil=how.refill_early(Phase.BACKWARD),
        gate=FIRST_GRADIENT,
        self_check=r"layers\.1: gradient of input 0: \d+ of \d+",
    ),
    "slot read without its block": Fault(
        how.ask_for_no_block,
        how.poison_what_is_released,
        gate=FIRST_GRADIENT,
    ),
    "slot released early": Fault(
        how.release_at_acquire,
        watched="arm raised SlotHazard.*overwrite a slot while it is read",
    ),
    "slot in use overwritten": Fault(
        spoil=how.at_acquire(how.overwrite),
        gate="arm raised SlotHazard.*overwrite a slot while it is read",
    ),
    "blocks 0 and 1 exchanged": Fault(
        spoil=how.exchange_slabs(0, 1), gate=FIRST_LOSS, differing=LOSS
    ),
    "blocks 1 and 3 exchanged": Fault(
        spoil=how.exchange_slabs(1, 3), gate=FIRST_LOSS, differing=LOSS
    ),
    "nibble flipped in a slot": Fault(
        spoil=how.flip_in_the_slot(), gate=FIRST_LOSS, self_check=r"layers\.1: output: "
    ),
    "nibble flipped in a forward": Fault(
        spoil=how.flip_in_the_slot(Phase.FORWARD, 1), unsteady=r"layers\.1: output: "
    ),
    "nibble flipped in every backward": Fault(
        spoil=how.flip_in_the_slot(Phase.BACKWARD), unsteady=STEADY_GRADIENT
    ),
    "nibble flipped in a slab": Fault(
        spoil=how.flip_in_the_slab,
        gate=FIRST_LOSS,
        self_check=r"layers\.1: the host bytes of block 1 are not",
    ),
    "wait removed": Fault(how.remove_the_wait, gate=FIRST_LOSS, self_check=OUTPUT, unsteady=OUTPUT),
    "prefetched slot not waited for": Fault(
        streams=how.NeverWaitsForPrefetched,
        gate=FIRST_LOSS,
        watched="arm raised SlotHazard.*without waiting for copy",
    ),
    "prefetch into the slot in use": Fault(
        how.prefetch_into_the_slot_in_use, gate="arm raised SlotStateError.*block 2.*slot 0"
    ),
    "saved values exchanged": Fault(
        how.exchange_saved_values,
        gate=FIRST_GRADIENT,
        self_check=GRADIENT,
        unsteady=STEADY_GRADIENT,
    ),
    "shared key-value states dropped": Fault(
        how.detach_what_is_beside,
        cell=SHARED_STATES,
        gate=FIRST_GRADIENT,
        self_check=r"layers\.0: shared_kv_states\['sliding_attention'\]\[0\] needs a gradient: "
        "resident has True",
    ),
    "router loss dropped": Fault(
        how.detach_what_is_beside,
        cell=Cell("mixtral"),
        gate=FIRST_GRADIENT,
        self_check=r"layers\.3: recorded router_logits\[0\] needs a gradient: resident has True",
    ),
    "input edited inside": Fault(
        user=how.edit_an_input_inside,
        gate="",
        self_check=r"layers\.1: expected the recomputation to save the values that the forward",
        error=RematerializationError,
    ),
    "input edited afterwards": Fault(user=how.edit_an_input_afterwards, gate=""),
}
