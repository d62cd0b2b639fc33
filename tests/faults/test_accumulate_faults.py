"""Faults of grouped micro-batches: each one shows, or is made good."""

from typing import Any

import pytest

import poros
from poros.accumulation import group
from poros.accumulation.draws import Draws, later
from poros.accumulation.group import Group
from poros.accumulation.micro_batch import MicroBatch
from poros.errors import RematerializationError
from poros.slots.manager import BlockManager
from poros.stream.rng import RngStash
from tests.exact.arms import Bases
from tests.exact.together import (
    Control,
    build,
    ends,
    num_groups,
    program,
    same,
    train,
)
from tests.support import AdversarialPrepare
from tools.adversary import SlotHazard

Patch = pytest.MonkeyPatch
PLAIN = program(sizes=(4, 3))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


def one_too_many(state: RngStash, draws: Draws) -> RngStash:
    return later(state, Draws(draws.cpu + 1, draws.device))


def descending(self: Group, genuine: Any = Group.backward) -> None:
    """The order of sums."""
    self._batches = [*reversed(self._batches[: self.num_done])]
    genuine(self)


def last_group_first(
    model: Any, batches: Any, genuine: Any = poros.accumulate, **options: Any
) -> Any:
    """The order of groups: of micro-batches that go together in twos."""
    later_ones = genuine(model, batches[2:], **options)
    return [*genuine(model, batches[:2], **options), *later_ones]


def test_a_wrong_random_plan_is_seen_before_gradients_change(
    bases: Bases, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(group, "later", one_too_many)
    assert ends(PLAIN._replace(end=(RematerializationError, "random numbers")), bases)
    # And shows if nobody checks it.
    monkeypatch.setattr(MicroBatch, "begin_at", lambda self, now: None)
    assert not ends(PLAIN._replace(policy=(("self_check", "off"),)), bases)


PROMPTS = program(base=lambda bases: build(bases, adapter="prompt_tuning"))
CONTROLS = {
    "sums in descending order": Control(Group, "backward", descending, PLAIN),
    "the last group first": Control(poros, "accumulate", last_group_first, PLAIN),
    "no gradients below": Control(MicroBatch, "backward_below", lambda self, way: None, PROMPTS),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_controls(which: str, bases: Bases, monkeypatch: Patch) -> None:
    assert CONTROLS[which].is_seen(bases, monkeypatch)


@pytest.mark.parametrize("policy", [{}, {"offload_boundaries": True}, {"keep_last": 1, "slots": 3}])
def test_adversarial_streams(policy: dict[str, Any], bases: Bases) -> None:
    run: Any = {"sizes": (3, 3)}
    with AdversarialPrepare().watching() as prepare:
        model = prepare(build(bases, num_layers=4), **{"slots": 2, **policy})
        found = train(model, **run)
    assert same(found, train(build(bases, num_layers=4), False, **run)) and num_groups(model) == 2


def test_control_a_slot_that_is_overwritten_too_early(bases: Bases, monkeypatch: Patch) -> None:
    genuine = BlockManager.release

    def release(self: BlockManager, block: int) -> None:
        before = self._ring.slot(block).released
        genuine(self, block)
        self._ring.slot(block).released = before  # so the last reads are not waited for

    monkeypatch.setattr(BlockManager, "release", release)
    with pytest.raises(SlotHazard), AdversarialPrepare().watching() as prepare:
        train(prepare(build(bases, num_layers=4), slots=2))
