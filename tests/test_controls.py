"""Negative controls: each fault that would make training wrong is put in, and must be reported.

A gate that passes shows something only if it fails for these. Each control says what differs first,
so that a gate which fails for another reason does not count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import AdversarialPrepare

import poros
from poros.gates import tiny
from poros.gates.adversary import AdversarialStreams
from poros.gates.parity import run_parity
from poros.gates.reference import TrainingSpec
from poros.gates.report import ParityReport
from poros.layer.rng import RngStash
from poros.layer.state import AmbientState
from poros.slots import manager as manager_module
from poros.slots.manager import BlockManager
from poros.slots.ring import Slot
from poros.slots.schedule import Phase, count, missing, predict, training_visits, walk
from poros.streams import Event

NUM_LAYERS = 4


def gate(
    prepare: Callable[..., Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    autocast_dtype: torch.dtype | None = None,
    num_slots: int = 2,
) -> ParityReport:
    """The parity gate on a small model with dropout; two steps."""
    used = prepare or AdversarialPrepare()
    return run_parity(
        lambda: tiny.make_model(
            "qwen2", num_layers=NUM_LAYERS, hidden_size=64, dropout=0.05, dtype=dtype
        ),
        tiny.make_batches(2, num_tokens=8),
        TrainingSpec(num_steps=2, autocast_dtype=autocast_dtype),
        lambda model: used(model, slots=num_slots),
        repeat_resident=False,
    )


def watched_gate(prepare: AdversarialPrepare) -> ParityReport:
    with prepare.watching():
        return gate(prepare)


def differing(report: ParityReport) -> set[str]:
    """The quantities that differ; the gate must have failed."""
    assert not report.exact and report.error is None, report.verdict()
    return {name for name, tally in report.tallies.items() if tally.num_differing_tensors}


def first(report: ParityReport) -> str:
    """What differs first; the gate must have failed, and by a difference."""
    assert differing(report)
    return report.differences[0].name


@pytest.fixture
def no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of what the recomputation drew: the gate alone has to notice."""
    monkeypatch.setattr(RngStash, "equals", lambda *_: True)


def test_without_a_fault_the_gate_passes(no_guard: None) -> None:
    prepare = AdversarialPrepare()
    assert watched_gate(prepare).exact
    assert gate(dtype=torch.float32, autocast_dtype=torch.bfloat16).exact
    plan = list(walk(training_visits(NUM_LAYERS, 2), NUM_LAYERS, 2))
    assert prepare.journal == plan and prepare.streams.num_copies == 6 + 4


# The state around a layer.


def test_no_rng_restore_is_refused_by_the_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RngStash, "replay", lambda self: nullcontext())
    report = gate()
    assert not report.exact
    assert "RematerializationError" in (report.error or "")
    assert "random numbers" in (report.error or "")


def test_no_rng_restore_is_seen_by_the_gate(
    monkeypatch: pytest.MonkeyPatch, no_guard: None
) -> None:
    monkeypatch.setattr(RngStash, "replay", lambda self: nullcontext())
    report = gate()
    assert {"gradients", "adapter weights", "loss", "RNG end state"} <= differing(report)
    assert first(report).startswith("step 0, gradient of")


def test_no_fork_is_seen_by_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are set for the recomputation, and nobody puts the caller's back."""

    @contextmanager
    def replay(self: RngStash) -> Iterator[None]:
        torch.set_rng_state(self.cpu)
        yield

    monkeypatch.setattr(RngStash, "replay", replay)
    report = gate()
    assert {"loss", "gradients", "RNG end state"} <= differing(report)
    # The first step is right; the second one starts from the random state of the first.
    assert first(report) == "step 1, loss of micro-batch 0"


def test_autocast_not_restored_is_seen_by_the_gate(
    monkeypatch: pytest.MonkeyPatch, no_guard: None
) -> None:
    genuine = AmbientState.replay
    monkeypatch.setattr(
        AmbientState, "replay", lambda self, modules: genuine(replace(self, autocast=()), modules)
    )
    report = gate(dtype=torch.float32, autocast_dtype=torch.bfloat16)
    assert {"gradients", "adapter weights", "exp_avg", "exp_avg_sq"} <= differing(report)
    assert first(report).startswith("step 0, gradient of")
    assert gate(dtype=torch.float32).exact  # where there is no autocast, nothing is missed


def test_training_flags_not_restored_are_seen(
    monkeypatch: pytest.MonkeyPatch, no_guard: None
) -> None:
    """Recomputed in evaluation mode, a layer drops nothing out."""
    genuine = AmbientState.replay
    monkeypatch.setattr(
        AmbientState,
        "replay",
        lambda self, modules: genuine(replace(self, training=(False,) * len(modules)), modules),
    )
    report = gate()
    assert first(report).startswith("step 0, gradient of")


# The bytes in a slot.


def after_acquire(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[BlockManager, Slot, int], None]
) -> None:
    genuine = BlockManager.acquire

    def acquire(self: BlockManager, block: int, phase: Phase) -> Slot:
        slot = genuine(self, block, phase)
        act(self, slot, block)
        return slot

    monkeypatch.setattr(BlockManager, "acquire", acquire)


def test_a_slot_poisoned_after_acquire_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(manager: BlockManager, slot: Slot, block: int) -> None:
        slot.buffer.fill_(0xFF)

    after_acquire(monkeypatch, poison)
    report = gate()
    assert first(report) == "step 0, loss of micro-batch 0"


def test_a_slot_refilled_with_another_block_after_acquire_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copied and waited for by the book, but too early."""

    def refill(manager: BlockManager, slot: Slot, block: int) -> None:
        other = manager._host.slabs[(block + 2) % NUM_LAYERS].bytes
        now = manager._streams.record()
        done = manager._streams.copy(slot.buffer[: other.numel()], other, after=now)
        manager._streams.wait(done)

    after_acquire(monkeypatch, refill)
    report = gate()
    assert "loss" in differing(report)
    assert first(report) == "step 0, loss of micro-batch 0"
    assert "nan" not in report.differences[0].found


def test_a_slot_released_early_is_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Released by acquire itself: the slot goes to another block while its own is computed."""
    genuine = BlockManager.release
    after_acquire(monkeypatch, lambda manager, slot, block: genuine(manager, block))
    monkeypatch.setattr(BlockManager, "release", lambda *_, **__: None)
    report = watched_gate(AdversarialPrepare())
    assert "streamed arm raised SlotHazard" in (report.error or "")
    assert "overwrite a slot while it is read" in (report.error or "")


@pytest.mark.parametrize("pair", [(0, 1), (1, 3)])
def test_the_wrong_block_in_a_slot_is_seen(pair: tuple[int, int]) -> None:
    prepare = AdversarialPrepare()

    def prepare_wrongly(model: Any, **policy: Any) -> Any:
        prepare(model, **policy)
        slabs = poros.runtime(model).host.slabs
        left, right = pair
        slabs[left], slabs[right] = slabs[right], slabs[left]
        return model

    report = gate(prepare_wrongly)
    assert "loss" in differing(report)
    assert first(report) == "step 0, loss of micro-batch 0"


# The order of copies.


class NeverWaitsForPrefetched(AdversarialStreams):
    """Waits only for a copy that has just been queued, as one on demand is."""

    is_on_demand = False

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        self.is_on_demand = True
        return super().copy(target, source, after=after)

    def wait(self, event: Event) -> None:
        if self.is_on_demand:
            super().wait(event)

    def record(self) -> Event:
        self.is_on_demand = False
        return super().record()


def test_a_prefetched_slot_not_waited_for_is_a_hazard() -> None:
    report = watched_gate(AdversarialPrepare(NeverWaitsForPrefetched))
    assert "streamed arm raised SlotHazard" in (report.error or "")
    assert "without waiting for copy" in (report.error or "")


def test_a_prefetched_slot_not_waited_for_changes_bits() -> None:
    report = gate(AdversarialPrepare(NeverWaitsForPrefetched))
    assert first(report) == "step 0, loss of micro-batch 0"


def test_a_prefetch_into_the_slot_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        manager_module,
        "missing",
        lambda contents, in_use, expected: missing(contents, -1, expected),
    )
    report = gate(poros.prepare)
    assert "streamed arm raised SlotStateError" in (report.error or "")
    assert "slot 0" in (report.error or "") and "block 2" in (report.error or "")


def test_a_prefetch_into_the_slot_in_use_is_a_hazard_if_nobody_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next block but one is copied into the slot of the block that computes."""

    def overwrite(manager: BlockManager, slot: Slot, block: int) -> None:
        other = manager._host.slabs[(block + 2) % NUM_LAYERS].bytes
        manager._streams.copy(slot.buffer[: other.numel()], other, after=slot.released)

    after_acquire(monkeypatch, overwrite)
    report = gate()
    assert "streamed arm raised SlotHazard" in (report.error or "")
    assert "overwrite a slot while it is read" in (report.error or "")


def backwards(*visit: Any) -> Any:
    return reversed(list(predict(*visit)))


def never_turning(block: int, phase: Phase, num_blocks: int) -> Any:
    return predict(block, Phase.INFERENCE, num_blocks)


def one_too_far(*visit: Any) -> Any:
    return list(predict(*visit))[1:]


@pytest.mark.parametrize(
    ("wrong", "loads"), [(backwards, 17), (never_turning, 14), (one_too_far, 10)]
)
def test_a_wrong_prefetch_order_is_seen_by_the_counts_and_changes_no_bit(
    wrong: Callable[..., Any], loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "predict", wrong)
    prepare = AdversarialPrepare()
    report = watched_gate(prepare)
    assert report.num_differences == 0
    plan = list(walk(training_visits(NUM_LAYERS, 2), NUM_LAYERS, 2))
    assert prepare.journal != plan
    assert prepare.streams.num_copies == loads
    if loads != count(plan, "prefetch"):
        assert f"loaded {loads} blocks, the walk 10" in (report.error or "")
