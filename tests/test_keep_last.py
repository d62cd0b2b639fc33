"""Layers that keep their graph: the same bits, fewer loads, and at the end the resident step."""

from typing import Any

import pytest
import torch
from snapshots import layers_of
from support import AdversarialPrepare, same_bits

import poros
from poros.config import MIN_SLOTS
from poros.errors import ParityError, PolicyError
from poros.gates import tiny
from poros.gates.adversary import SlotHazard
from poros.gates.parity import run_parity
from poros.gates.reference import TrainingSpec, compare_trajectories, train
from poros.host.store import HostStore
from poros.layout import BlockLayout
from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing
from poros.streams import EagerStreams

NUM_LAYERS = 5
SPEC = TrainingSpec(num_steps=3, accumulation=2)
BATCHES = tiny.make_batches(6, num_tokens=12)


def build(architecture: str = "qwen2", **options: Any) -> Any:
    wanted = {"num_layers": NUM_LAYERS, "hidden_size": 64, "dropout": 0.05, **options}
    return tiny.make_model(architecture, **wanted)


@pytest.mark.parametrize("keep_last", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_changes(keep_last: int, dtype: torch.dtype) -> None:
    report = run_parity(
        lambda: build(dtype=dtype),
        BATCHES,
        SPEC,
        lambda model: poros.prepare(model, device="cpu", slots=3, keep_last=keep_last),
    )
    assert report.exact, report.verdict()


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4", "gemma4_shared_kv", "mixtral"])
@pytest.mark.parametrize("block_size", [1, 2])
def test_no_bit_changes_in_families_with_side_channels(architecture: str, block_size: int) -> None:
    report = run_parity(
        lambda: build(architecture),
        BATCHES,
        SPEC,
        lambda model: poros.prepare(model, device="cpu", keep_last=3, block_size=block_size),
    )
    assert report.exact, report.verdict()


def test_no_bit_changes_under_adversarial_streams_and_autocast() -> None:
    spec = TrainingSpec(num_steps=3, accumulation=2, autocast_dtype=torch.bfloat16)
    with AdversarialPrepare().watching() as prepare:
        expected = train(build(dtype=torch.float32), BATCHES, spec)
        model = prepare(build(dtype=torch.float32), slots=2, keep_last=2)
        assert compare_trajectories(expected, train(model, BATCHES, spec)) == []


def test_kept_blocks_leave_the_ring() -> None:
    model = poros.prepare(build().train(), device="cpu", slots=4, keep_last=2)
    runtime = poros.runtime(model)
    assert (runtime.num_blocks, runtime.num_streamed_blocks, runtime.num_slots) == (5, 3, 2)
    visits: list[tuple[int, bool]] = []
    for index, layer in enumerate(layers_of(model)):
        layer.mlp.register_forward_hook(
            lambda *_, index=index: visits.append((index, torch.is_grad_enabled()))
        )
    for _ in range(2):
        before = runtime.stats()["num_loads"]
        visits.clear()
        model(**BATCHES[0]).loss.backward()
    assert runtime.stats()["num_loads"] - before == 2 * (3 - 2)
    again = [index for index, _ in visits]
    assert again == [0, 1, 2, 3, 4, 2, 1, 0], "kept layers run once"


def test_at_full_budget_nothing_is_loaded_and_nothing_recomputed() -> None:
    model = poros.prepare(build().train(), device="cpu", keep_last=NUM_LAYERS)
    runtime = poros.runtime(model)
    assert (runtime.num_streamed_blocks, runtime.num_slots) == (0, 0)
    calls: list[int] = []
    layers_of(model)[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    expected = train(build(), BATCHES, SPEC)
    assert compare_trajectories(expected, train(model, BATCHES, SPEC)) == []
    assert len(calls) == SPEC.num_steps * SPEC.accumulation
    assert runtime.stats()["num_loads"] == 0
    assert runtime.self_check["status"] == "passed"
    with torch.no_grad():
        found = model.eval()(**BATCHES[0]).logits
        assert same_bits(found, poros.restore(model)(**BATCHES[0]).logits)


def test_the_self_check_sees_a_kept_block_that_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = poros.prepare(build().train(), device="cpu", keep_last=2)
    poros.runtime(model).ring.slot(3).buffer[77] ^= 1
    with pytest.raises(ParityError, match=r"layers\.3: block 3 on the device"):
        model(**BATCHES[0]).loss.backward()


def test_control_a_kept_block_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "acquire", lambda self, block, phase: self._ring.slot(block))
    with AdversarialPrepare().watching() as prepare:
        # Copies are queued in order: a wait for a later block of the ring would hide it.
        model = prepare(build(), slots=2, keep_last=NUM_LAYERS)
        with pytest.raises(SlotHazard, match="read without waiting"):
            train(model, BATCHES, SPEC)


@pytest.mark.parametrize("value", [-1, True, 1.5, "2"])
def test_bad_values_are_refused(value: Any) -> None:
    with pytest.raises(PolicyError, match="keep_last"):
        poros.StreamingPolicy(keep_last=value)


def test_the_copy_waits_for_the_memorys_last_owner() -> None:
    """As for the slots that blocks pass through: fresh memory may be read by what is queued."""
    waited: list[object] = []

    class Recording(EagerStreams):
        def record(self) -> object:
            return "allocated"

        def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: object) -> object:
            waited.append(after)
            return super().copy(target, source, after=after)

    layouts = [BlockLayout.pack([("w", torch.empty(64))])] * 2
    streams = Recording(torch.device("cpu"))
    ring = DeviceRing(layouts, MIN_SLOTS, streams, num_pinned=2)
    BlockManager(HostStore.allocate(layouts), ring, streams)
    assert waited == ["allocated"] * 2
