"""Faults that make streaming wrong, planted one by one: none gets as far as an optimizer step.

Each is planted under adversarial streams. The self-check, or a typed error before it, has to name
it. The same fault with the check off has to change what is trained: otherwise it would be no fault,
and catching it would show nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import mutants
import pytest
import torch
from snapshots import batches, bits_of, build, changes, layers_of
from support import AdversarialPrepare
from transformers.utils.output_capturing import _active_collector

import poros
from poros.errors import ParityError, UnsupportedModelError
from poros.gates.reference import TrainingSpec, Trajectory, compare_trajectories, train
from poros.layer.audit import GraphAudit, Uses
from poros.layer.layer_index import Adapter, LayerIndex
from poros.layer.rng import RngStash
from poros.layer.side_outputs import SideOutputs
from poros.layer.state import AmbientState
from poros.slots.manager import BlockManager
from poros.slots.ring import Slot
from poros.slots.schedule import Phase

Patch = pytest.MonkeyPatch
BF16_AUTOCAST = {"autocast_dtype": torch.bfloat16}


def blind_recomputation(patch: Patch) -> None:
    """Without the recomputation's own check of what was drawn."""
    patch.setattr(RngStash, "equals", lambda *_: True)


def restore_no_random_state(patch: Patch) -> None:
    blind_recomputation(patch)
    patch.setattr(RngStash, "replay", lambda self: nullcontext())


def set_no_random_state(patch: Patch) -> None:
    blind_recomputation(patch)
    patch.setattr(RngStash, "replay", lambda self: torch.random.fork_rng(devices=[]))


def leave_the_random_state_of_the_recomputation(patch: Patch) -> None:
    @contextmanager
    def replay(self: RngStash) -> Iterator[None]:
        torch.set_rng_state(self.cpu)
        yield

    patch.setattr(RngStash, "replay", replay)


def lose_autocast(patch: Patch) -> None:
    blind_recomputation(patch)
    genuine = AmbientState.replay
    patch.setattr(
        AmbientState, "replay", lambda self, modules: genuine(replace(self, autocast=()), modules)
    )


def lose_training_flags(patch: Patch) -> None:
    blind_recomputation(patch)
    genuine = AmbientState.replay
    patch.setattr(
        AmbientState,
        "replay",
        lambda self, modules: genuine(replace(self, training=(False,) * len(modules)), modules),
    )


def after_acquire(patch: Patch, act: Callable[[BlockManager, Slot, Phase], None]) -> None:
    genuine = BlockManager.acquire

    def acquire(self: BlockManager, block: int, phase: Phase) -> Slot:
        slot = genuine(self, block, phase)
        act(self, slot, phase)
        return slot

    patch.setattr(BlockManager, "acquire", acquire)


def refill_early(phase: Phase) -> Callable[[Patch], None]:
    """The next block of the slot comes too early: the copy does not wait for the release."""

    def act(manager: BlockManager, slot: Slot, visited: Phase) -> None:
        if visited is phase and slot.block == 1:
            other = manager._host.slabs[2].bytes
            slot.buffer[: other.numel()].copy_(other)

    return lambda patch: after_acquire(patch, act)


def flip_in_the_slot(patch: Patch) -> None:
    def act(manager: BlockManager, slot: Slot, visited: Phase) -> None:
        if slot.block == 1:
            slot.buffer[1000] ^= 0x0F

    after_acquire(patch, act)


def remove_the_wait(patch: Patch) -> None:
    found = [
        each
        for each in mutants.stream_context_mutations()
        if each.function == "BlockManager._waited_for" and each.change.endswith("removed")
    ]
    assert [each.change for each in found] == ["self._streams.wait(slot.ready) removed"]
    found[0].apply(patch)


def skip_an_adapter(patch: Patch) -> None:
    """The last trainable tensor of each layer is not seen."""
    genuine = LayerIndex.adapters

    def adapters(self: LayerIndex) -> list[Adapter]:
        return genuine(self)[:-1]

    patch.setattr(LayerIndex, "adapters", adapters)


def skip_an_adapter_unaudited(patch: Patch) -> None:
    skip_an_adapter(patch)
    patch.setattr(
        GraphAudit,
        "uses",
        lambda self, results, inputs, stand_ins, *_: Uses(
            tuple(range(len(inputs), len(inputs) + len(stand_ins))), {}, ()
        ),
    )


def publish_detached(patch: Patch) -> None:
    """What layers hand on by the side carries no gradient."""
    genuine = SideOutputs.publish

    def detached(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach()
        return tuple(map(detached, value)) if isinstance(value, tuple) else value

    def publish(self: SideOutputs, result: tuple[Any, ...]) -> Any:
        return genuine(self, (result[0], detached(result[1]), detached(result[2])))

    patch.setattr(SideOutputs, "publish", publish)


def publish_one_record_only(patch: Patch) -> None:
    """The router losses of all layers but the first are lost."""
    genuine = SideOutputs.publish

    def publish(self: SideOutputs, result: tuple[Any, ...]) -> Any:
        is_first = not (_active_collector.get() or {}).get("router_logits")
        return genuine(self, result if is_first else (*result[:2], ()))

    patch.setattr(SideOutputs, "publish", publish)


def flip_in_the_slab(model: Any) -> None:
    poros.runtime(model).host_slab(1)[1000] ^= 0x0F


def edit_an_input_inside(model: Any) -> None:
    """Past PyTorch's count of edits; the forward and the recomputation both do it."""

    def edit(module: Any, args: Any) -> None:
        args[0].data.add_(1)

    layers_of(model)[1].input_layernorm.register_forward_pre_hook(edit)


def edit_an_input_afterwards(model: Any) -> None:
    """Only the recomputation starts from the edited input."""

    def edit(module: Any, args: Any, output: Any) -> None:
        args[0].data.mul_(2)

    layers_of(model)[1].register_forward_hook(edit)


def nothing(_: Any) -> None:
    """No fault."""


@dataclass(frozen=True)
class Sabotage:
    """One fault: in the code before the model is prepared, or in the prepared model."""

    match: str
    patch: Callable[[Patch], None] = nothing
    act: Callable[[Any], None] = nothing
    architecture: str = "qwen2"
    changed: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    error: type[Exception] = ParityError
    shows: bool = True
    """Whether two steps without the check go through and end in other bits."""

    def train(self, self_check: str) -> Trajectory:
        model = AdversarialPrepare()(self.build(), self_check=self_check, allow_unvalidated=True)
        self.act(model)
        return train(model, batches(), TrainingSpec(num_steps=2, **self.spec))

    def build(self) -> Any:
        return build(self.architecture, num_layers=4, **self.changed)


LAYER = r"layers\.\d: "
GRADIENT = LAYER + r"gradient of .* elements differ, at most \d+ ULP apart; first at \["
SABOTAGES = {
    "random state not restored": Sabotage(
        r"layers\.3: its backward has to leave no trace of random draws", restore_no_random_state
    ),
    "random state not set": Sabotage(GRADIENT, set_no_random_state),
    "random state of the recomputation left behind": Sabotage(
        LAYER + "its backward has to leave no trace of random draws",
        leave_the_random_state_of_the_recomputation,
    ),
    "autocast lost": Sabotage(
        GRADIENT, lose_autocast, changed={"dtype": torch.float32}, spec=BF16_AUTOCAST
    ),
    "training flags lost": Sabotage(GRADIENT, lose_training_flags),
    "slot refilled early, forward": Sabotage(
        r"layers\.1: output: \d+ of \d+ elements differ", refill_early(Phase.FORWARD)
    ),
    "slot refilled early, backward": Sabotage(
        r"layers\.1: gradient of input 0: \d+ of \d+", refill_early(Phase.BACKWARD)
    ),
    "nibble flipped in a slot": Sabotage(r"layers\.1: output: ", flip_in_the_slot),
    "nibble flipped in a slab": Sabotage(
        r"layers\.1: the host bytes of block 1 are not", act=flip_in_the_slab
    ),
    "wait removed": Sabotage(LAYER + r"output: \d+ of \d+ elements differ", remove_the_wait),
    "adapter skipped": Sabotage(
        LAYER + "expected only its inputs and its own adapters",
        skip_an_adapter,
        error=UnsupportedModelError,
        shows=False,
    ),
    "adapter skipped, unaudited": Sabotage(
        r"layers\.3: gradient of .*: resident has a tensor of shape .*, streamed has None",
        skip_an_adapter_unaudited,
    ),
    "input edited inside": Sabotage(
        r"layers\.1: .* edits what it is given in place", act=edit_an_input_inside
    ),
    "input edited afterwards": Sabotage(r"layers\.1: output: ", act=edit_an_input_afterwards),
    "shared key-value states dropped": Sabotage(
        r"layers\.1: shared_kv_states\['full_attention'\]\[0\] needs a gradient: resident has True",
        publish_detached,
        architecture="gemma4_shared_kv",
    ),
    "router loss dropped": Sabotage(
        r"layers\.3: recorded router_logits\[0\] needs a gradient: resident has True",
        publish_detached,
        architecture="mixtral",
    ),
    "router loss of one layer only": Sabotage(
        r"layers\.3: recorded router_logits\[0\]: resident has a tensor",
        publish_one_record_only,
        architecture="qwen3_moe",
    ),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_it_is_caught_before_the_first_step(name: str, monkeypatch: Patch) -> None:
    sabotage = SABOTAGES[name]
    steps: list[None] = []
    trained: list[Any] = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: steps.append(None))
    genuine = torch.optim.AdamW.__init__

    def remember(self: Any, parameters: Any, **options: Any) -> None:
        trained.extend(parameters)
        genuine(self, trained, **options)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", remember)
    sabotage.patch(monkeypatch)
    with pytest.raises(sabotage.error, match=sabotage.match):
        sabotage.train("strict")
    assert not steps
    start = [each for each in sabotage.build().parameters() if each.requires_grad]
    assert len(start) == len(trained) > 0
    assert all(torch.equal(one, other) for one, other in zip(start, trained, strict=True))


@pytest.mark.parametrize("name", [name for name, each in SABOTAGES.items() if each.shows])
def test_it_changes_what_is_trained(name: str, monkeypatch: Patch) -> None:
    sabotage = SABOTAGES[name]
    whole = replace(sabotage, patch=nothing)
    if sabotage.act is flip_in_the_slab:
        whole = replace(whole, act=nothing)
    resident = whole.build()
    if whole.act is not nothing:
        whole.act(resident)
    expected = train(resident, batches(), TrainingSpec(num_steps=2, **sabotage.spec))
    if whole.act is nothing:
        assert compare_trajectories(expected, whole.train("strict")) == []
    sabotage.patch(monkeypatch)
    assert compare_trajectories(expected, sabotage.train("off"))


def test_a_caught_fault_leaves_a_model_that_comes_back_whole(monkeypatch: Patch) -> None:
    sabotage = SABOTAGES["shared key-value states dropped"]
    model = AdversarialPrepare()(sabotage.build(), self_check="strict", allow_unvalidated=True)
    model.train()
    with monkeypatch.context() as patch:
        sabotage.patch(patch)
        with pytest.raises(ParityError):
            model(**batches()[1]).loss.backward()
    model.zero_grad()
    twin = sabotage.build()
    assert changes(bits_of(twin), bits_of(poros.restore(model))) == {}
