"""The manager when the device refuses, and at the end: no slot is held, no copy is left behind."""

import pytest
import torch

from poros.gates.adversary import AdversarialStreams
from poros.host.store import HostStore
from poros.layout import BlockLayout
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase
from poros.streams import Event
from tests.slots import Slots

FREE, LOADING, IN_USE = SlotState.FREE, SlotState.LOADING, SlotState.IN_USE


# Copies that fail.


class CopyFails(AdversarialStreams):
    """The copy with this number (from 1) is refused, once: before or after it has been queued."""

    def __init__(self, number: int, is_queued: bool = False) -> None:
        super().__init__()
        self.countdown = number
        self.is_queued = is_queued

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        self.countdown -= 1
        if self.countdown == 0:
            if self.is_queued:
                super().copy(target, source, after=after)
            raise OSError("the copy was refused")
        return super().copy(target, source, after=after)


def test_a_copy_that_fails_leaves_its_slot_free() -> None:
    slots = Slots(4, 2, CopyFails(1))
    with pytest.raises(OSError, match="refused"):
        slots.manager.acquire(0, Phase.FORWARD)
    assert slots.states() == [(FREE, None), (FREE, None)]
    assert slots.manager.num_loads == 0 and slots.journal == []
    slots.train(2)
    assert slots.manager.num_loads == 6 + 4


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("number", range(1, 11))
def test_training_goes_on_after_any_copy_failed(number: int, is_queued: bool) -> None:
    """Whether it was wanted now or ahead of time; and no slot says that it holds what it lost."""
    slots = Slots(4, 2, CopyFails(number, is_queued))
    with pytest.raises(OSError, match="refused"):
        slots.train(2)
    assert not any(state is IN_USE for state, _ in slots.states()), slots.states()
    slots.check_ready_bytes()
    slots.train(2)


def test_a_wait_that_fails_does_not_hold_the_slot() -> None:
    class WaitFails(AdversarialStreams):
        is_broken = True

        def wait(self, event: Event) -> None:
            if self.is_broken:
                raise OSError("the wait was refused")
            super().wait(event)

    streams = WaitFails()
    slots = Slots(4, 2, streams)
    with pytest.raises(OSError, match="refused"):
        slots.manager.acquire(0, Phase.FORWARD)
    streams.is_broken = False
    slots.train(2)


def test_a_block_without_frozen_bytes_takes_part_like_any_other() -> None:
    """All of its tensors may be shared with other blocks and stay on the device."""
    full = BlockLayout.pack([("weight", torch.empty(256, dtype=torch.uint8))])
    host = HostStore.allocate([full, BlockLayout.pack([]), full])
    assert [slab.bytes.numel() for slab in host.slabs] == [256, 0, 256]
