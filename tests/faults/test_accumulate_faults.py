"""Faults of micro-batches that go through the blocks together: each one shows, or is made good."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poros
from poros.accumulation import group, surroundings
from poros.accumulation.draws import Draws, later
from poros.accumulation.group import Group
from poros.accumulation.micro_batch import MicroBatch
from poros.gates.adversary import SlotHazard
from poros.slots.manager import BlockManager
from poros.stream.rng import RngStash
from tests.exact.arms import Bases
from tests.exact.together import num_groups, reasons, same, train
from tests.support import AdversarialPrepare, prepare_plain

Model = Any
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


def build(bases: Bases) -> Model:
    return bases.build("qwen2", num_layers=4).train()


@pytest.fixture(scope="module")
def expected(bases: Bases) -> list[torch.Tensor]:
    return train(build(bases), together=False)


def one_too_many(state: RngStash, draws: Draws) -> RngStash:
    return later(state, Draws(draws.cpu + 1, draws.device))


def unseen(patch: Patch) -> None:
    """Nobody compares random states with the planned ones."""
    patch.setattr(Group, "_check", lambda self, index, batch: None)


def wrong_plan(patch: Patch) -> None:
    patch.setattr(group, "later", one_too_many)


def test_a_wrong_random_plan_is_made_good(
    bases: Bases, expected: list[torch.Tensor], monkeypatch: Patch
) -> None:
    wrong_plan(monkeypatch)
    model = prepare_plain(build(bases), slots=2)
    assert same(train(model), expected)
    (reason,) = reasons(model)
    assert "drawn at random" in reason and num_groups(model) == 0


def unplanned(patch: Patch) -> None:
    unseen(patch)
    wrong_plan(patch)


def descending(patch: Patch) -> None:
    """The order of sums."""
    genuine = Group.backward

    def backward(self: Group) -> None:
        self._batches = [*reversed(self._batches[: self.num_done])]
        genuine(self)

    patch.setattr(Group, "backward", backward)


def last_group_first(patch: Patch) -> None:
    """The order of groups: of micro-batches that go together in twos."""
    genuine = poros.accumulate

    def accumulate(model: Model, batches: Any, **options: Any) -> list[torch.Tensor]:
        later_ones = genuine(model, batches[2:], **options)
        return [*genuine(model, batches[:2], **options), *later_ones]

    patch.setattr(poros, "accumulate", accumulate, raising=False)


def without_autocast(patch: Patch) -> None:
    patch.setattr(surroundings, "autocast_of", lambda device: ())


def no_gradients_below(patch: Patch) -> None:
    patch.setattr(MicroBatch, "backward_below", lambda self, way: None)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "a wrong random plan that nobody checks": unplanned,
    "sums in descending order": descending,
    "the last group first": last_group_first,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_the_comparison_sees(
    fault: str, bases: Bases, expected: list[torch.Tensor], monkeypatch: Patch
) -> None:
    FAULTS[fault](monkeypatch)
    model = prepare_plain(build(bases), slots=2, self_check="off")
    assert not same(train(model), expected) and num_groups(model) > 0


def autocast_loss(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss


def test_control_autocast(bases: Bases, monkeypatch: Patch) -> None:
    def make() -> Model:
        return bases.build("qwen2", num_layers=4, dtype=torch.float32).train()

    wanted = train(make(), together=False, loss=autocast_loss)
    assert same(train(prepare_plain(make(), slots=2), loss=autocast_loss), wanted)
    without_autocast(monkeypatch)
    model = prepare_plain(make(), slots=2, self_check="off")
    assert not same(train(model, loss=autocast_loss), wanted)


def test_control_a_trained_embedding_without_its_gradient(bases: Bases, monkeypatch: Patch) -> None:
    def make() -> Model:
        return bases.build("qwen2", num_layers=4, adapter="prompt_tuning").train()

    wanted = train(make(), together=False)
    no_gradients_below(monkeypatch)
    assert not same(train(prepare_plain(make(), slots=2, self_check="off")), wanted)


@pytest.mark.parametrize("policy", [{}, {"offload_boundaries": True}, {"keep_last": 1, "slots": 3}])
def test_adversarial_streams(
    policy: dict[str, Any], bases: Bases, expected: list[torch.Tensor]
) -> None:
    model = build(bases)
    with AdversarialPrepare().watching() as prepare:
        prepare(model, **{"slots": 2, **policy})
        assert same(train(model), expected) and num_groups(model) == 3


def test_control_a_slot_that_is_overwritten_too_early(bases: Bases, monkeypatch: Patch) -> None:
    genuine = BlockManager.release

    def release(self: BlockManager, block: int) -> None:
        before = self._ring.slot(block).released
        genuine(self, block)
        self._ring.slot(block).released = before  # so the last reads are not waited for

    monkeypatch.setattr(BlockManager, "release", release)
    model = build(bases)
    with pytest.raises(SlotHazard), AdversarialPrepare().watching() as prepare:
        prepare(model, slots=2)
        train(model)
