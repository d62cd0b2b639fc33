"""Every fault of streaming that the suite plants: how it is made, and what has to notice it.

Each stands here once: made in the code, in a prepared model, or by a user. ``test_planted.py``
crosses it with what must catch it: the parity gate, the self-check, and the self-check where
attention does not repeat itself. Slots that are given up early: ``test_missing_waits``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from transformers.utils.output_capturing import _active_collector

import poros
from poros.errors import RematerializationError
from poros.slots.ring import Slot
from poros.slots.schedule import Phase
from poros.stream.args import is_shared_mapping
from poros.stream.body import Call
from poros.stream.general import RecomputedCall
from poros.stream.rng import RngStash
from poros.stream.settings import Settings, Surroundings
from poros.stream.visit import BlockVisit
from tests.loops import at, before, behind, build, halve_in_place
from tests.replaced import Patch, Plant, in_place_of
from tests.support import poison_what_is_released

Spoil = Callable[[Any], None]

NUM_LAYERS = 4

# The state around a layer.


def unguarded(plant: Plant | None = None) -> Plant:
    """Without the recomputation's own check of what was drawn: others have to notice."""

    def blind(patch: Patch) -> None:
        patch.setattr(RngStash, "equals", lambda *_: True)
        if plant is not None:
            plant(patch)

    return blind


replaying_by = in_place_of(RngStash, "replay")
restore_no_random_state = replaying_by(lambda genuine, self: nullcontext())


@replaying_by
@contextmanager
def leave_the_random_state(genuine: Any, self: RngStash) -> Iterator[None]:
    """It is set for the recomputation, and nobody puts the caller's back."""
    torch.set_rng_state(self.cpu)
    yield


@unguarded
@in_place_of(Call, "around")
def lose_autocast(genuine: Any, self: Call) -> Any:
    """The recomputation replays another state."""
    self.surroundings = Surroundings((), Settings.capture())
    return genuine(self)


# The bytes in a slot.


def at_acquire(act: Callable[[Any, Slot, int, Phase], None]) -> Spoil:
    """Do something to a slot as soon as a layer has it."""

    def spoil(model: Any) -> None:
        runtime = poros.runtime(model)
        genuine = runtime.manager.acquire

        def acquire(block: int, phase: Phase) -> Slot:
            slot = genuine(block, phase)
            act(runtime, slot, block, phase)
            return slot

        runtime.manager.acquire = acquire  # type: ignore[method-assign]

    return spoil


def flip_in_the_slot(only: Phase | None = None, times: float = float("inf")) -> Spoil:
    def spoil(model: Any) -> None:
        numbers = count()

        def act(_: Any, slot: Slot, block: int, phase: Phase) -> None:
            if block == 1 and only in (None, phase) and next(numbers) < times:
                slot.buffer[1000] ^= 0x0F

        at_acquire(act)(model)

    return spoil


def refill_early(only: Phase) -> Spoil:
    """The next block of the slot comes too early: the copy does not wait for the release."""

    def act(runtime: Any, slot: Slot, block: int, phase: Phase) -> None:
        if phase is only and block == 1:
            other = runtime.host_slab(2)
            slot.buffer[: other.numel()].copy_(other)

    return at_acquire(act)


@in_place_of(BlockVisit, "lease")
def ask_for_no_block(genuine: Any, self: BlockVisit, *_: Any) -> Any:
    """What a backward reads of a slot it reads whatever lies there by then."""
    return self._manager._ring.slot(self.block).buffer


# Gradients and what layers hand on.


@in_place_of(RecomputedCall, "_recompute")
def exchange_saved_values(genuine: Any, self: RecomputedCall) -> Any:
    """What the recomputation saves goes to the wrong operators; its outputs are right."""
    values, alike = genuine(self), defaultdict(list)
    for number in values:
        alike[self._forms[number]].append(number)
    return {
        number: values[other]
        for numbers in alike.values()
        for number, other in zip(numbers, numbers[1:] + numbers[:1], strict=True)
    }


def detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tuple(map(detached, value)) if isinstance(value, tuple) else value


@in_place_of(RecomputedCall, "forward")
def detach_what_is_beside(genuine: Any, self: RecomputedCall, args: Any, kwargs: Any) -> Any:
    """What layers hand on by the side, in mappings and records, carries no gradient."""
    result = genuine(self, args, kwargs)
    for mapping in filter(is_shared_mapping, kwargs.values()):
        mapping.update({key: detached(value) for key, value in mapping.items()})
    for record in (_active_collector.get() or {}).values():
        record[:] = map(detached, record)
    return result


@dataclass(frozen=True)
class Cell:
    """What is trained."""

    architecture: str = "qwen2"
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None

    def build(self) -> Any:
        return build(self.architecture, num_layers=NUM_LAYERS, dtype=self.dtype)


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
        cell: What is trained.
        gate: What the gate says first with the check off: a difference, or an error.
        differing: Quantities that have to differ for the gate.
        self_check: What the self-check says, before the first step.
        unsteady: The same where attention does not repeat itself.
        error: What the self-check raises.
        num_steps: Of the training.
    """

    plant: Plant | None = None
    spoil: Spoil | None = None
    user: Callable[[Any], None] | None = None
    cell: Cell = QWEN2
    gate: str | None = None
    differing: frozenset[str] = field(default_factory=frozenset)
    self_check: str | None = None
    unsteady: str | None = None
    error: type[Exception] = poros.ParityError
    num_steps: int = 1


FIRST_LOSS, FIRST_GRADIENT = "step 0, loss of micro-batch 0", "step 0, gradient of"
LAYER = r"layers\.\d: "
GRADIENT = LAYER + r"gradient of .* elements differ, by at most \S+; first at \["
OTHERS_SAVED = "expected the recomputation to save the tensors that the forward saved, found others"
TRACE = "its backward has to leave no trace of random draws"
STEADY_GRADIENT = "gradient of .*deterministic attention on both sides"
LOSS_AND_RANDOM = frozenset({"loss", "gradients", "RNG end state"})

SAVED_EXCHANGED = Fault(
    exchange_saved_values, gate=FIRST_GRADIENT, self_check=GRADIENT, unsteady=STEADY_GRADIENT
)

FAULTS = {
    "random state not restored": Fault(
        restore_no_random_state, gate="RematerializationError.*random numbers"
    ),
    "random state not restored, unguarded": Fault(
        unguarded(restore_no_random_state),
        num_steps=2,
        gate=FIRST_GRADIENT,
        differing=LOSS_AND_RANDOM | {"adapter weights"},
        self_check=r"layers\.0: " + TRACE,
    ),
    # The first step is right; the second one starts from the random state of the first.
    "random state of the recomputation left behind": Fault(
        leave_the_random_state,
        num_steps=2,
        gate="step 1, loss of micro-batch 0",
        differing=LOSS_AND_RANDOM,
        self_check=LAYER + TRACE,
    ),
    # Without autocast a layer saves other tensors.
    "autocast lost": Fault(
        lose_autocast,
        cell=AUTOCAST,
        gate=OTHERS_SAVED,
        self_check=OTHERS_SAVED,
        error=RematerializationError,
    ),
    "slot refilled early, forward": Fault(
        spoil=refill_early(Phase.FORWARD),
        gate=FIRST_LOSS,
        self_check=r"layers\.1: output: \d+ of \d+ elements differ",
    ),
    "slot refilled early, backward": Fault(
        spoil=refill_early(Phase.BACKWARD),
        gate=FIRST_GRADIENT,
        self_check=r"layers\.1: gradient of input 0: \d+ of \d+",
    ),
    "slot read without its block": Fault(
        ask_for_no_block, poison_what_is_released, gate=FIRST_GRADIENT
    ),
    "nibble flipped in a slot": Fault(
        spoil=flip_in_the_slot(), gate=FIRST_LOSS, self_check=r"layers\.1: output: "
    ),
    "nibble flipped in a forward": Fault(
        spoil=flip_in_the_slot(Phase.FORWARD, 1), unsteady=r"layers\.1: output: "
    ),
    "nibble flipped in every backward": Fault(
        spoil=flip_in_the_slot(Phase.BACKWARD), unsteady=STEADY_GRADIENT
    ),
    "nibble flipped in a slab": Fault(
        spoil=lambda model: poros.runtime(model).host_slab(1)[1000].bitwise_xor_(0x0F),
        gate=FIRST_LOSS,
        self_check=r"layers\.1: the host bytes of block 1 are not",
    ),
    "saved values exchanged": SAVED_EXCHANGED,
    "saved values exchanged, beside hooks": replace(
        SAVED_EXCHANGED,
        user=at(lambda mlp: mlp.register_full_backward_hook(lambda *_: None), ".mlp"),
    ),
    "shared key-value states dropped": Fault(
        detach_what_is_beside,
        cell=SHARED_STATES,
        gate=FIRST_GRADIENT,
        self_check=r"layers\.0: shared_kv_states\['sliding_attention'\]\[0\] needs a gradient: "
        "resident has True",
    ),
    "router loss dropped": Fault(
        detach_what_is_beside,
        cell=Cell("mixtral"),
        gate=FIRST_GRADIENT,
        self_check=r"layers\.3: recorded router_logits\[0\] needs a gradient: resident has True",
    ),
    # Past PyTorch's count of edits; forward and recomputation both do it.
    "input edited inside": Fault(
        user=before(halve_in_place, "layers.1.input_layernorm"),
        gate="",
        self_check=r"layers\.1: expected the recomputation to save the values that the forward",
        error=RematerializationError,
    ),
    # Only the recomputation starts from the edited input.
    "input edited afterwards": Fault(
        user=behind(lambda module, given, result: halve_in_place(module, given), "layers.1"),
        gate="",
    ),
}
