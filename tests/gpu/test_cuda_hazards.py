"""Waits between CUDA streams where memory or streams change hands: bytes are wrong without each.

Those of every visit: ``test_cuda``.

Each test builds the one interleaving in which its wait matters, by holding one stream back until
the host lets it go (``held``). It runs as Poros is, and then without that wait, where the bytes
have to come out wrong, however fast the machine is.
"""

import gc

import pytest
import torch

from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing, SlotState
from poros.slots.schedule import Phase
from tests.held import Gate
from tests.hostile_streams import (
    ALLOCATOR_TOLD,
    COPY_AFTER_RELEASE,
    POISON,
    STREAMS_JOINED,
    HostileStreams,
)
from tests.slots import Slots, random_store
from tests.support import same_bits

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIZE = 8 << 20
AS_IT_IS = "as it is"


def hostile(wait: str) -> HostileStreams:
    without = () if wait == AS_IT_IS else (wait,)
    return HostileStreams(DEVICE, copy_cycles=0, compute_cycles=0, without=without)


def make_slots(streams: HostileStreams) -> Slots:
    slots = Slots(4, 2, streams, sizes=[SIZE] * 4)
    slots.host.pin(DEVICE)
    assert slots.host.pinned_num_bytes == slots.host.num_bytes, slots.host.fallbacks
    # Memory may hold what an earlier test left there: the very bytes that are to come.
    for slot in slots.ring.slots:
        slot.buffer.fill_(POISON)
    torch.cuda.synchronize()
    return slots


def held_compute() -> Gate:
    """The compute stream stands still from here on."""
    gate = Gate()
    gate.hold(torch.cuda.current_stream(DEVICE))
    return gate


def read(slots: Slots, block: int) -> torch.Tensor:
    return slots.ring.slot(block).buffer.clone()


def let_go(gate: Gate, wait: str, overtaking: torch.cuda.Event) -> None:
    """Open, without the wait only after what nothing keeps from overtaking is done."""
    if wait != AS_IT_IS:
        overtaking.synchronize()
    gate.open()
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def empty_allocator() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("wait", [AS_IT_IS, STREAMS_JOINED])
def test_a_read_on_another_stream_counts_too(wait: str) -> None:
    """The second stream reads the block without loading it, so its event alone says too little."""
    slots = make_slots(hostile(wait))
    other = torch.cuda.Stream(DEVICE)
    gate = held_compute()
    with slots.visiting(1, Phase.FORWARD) as slot:
        # Behind its copy, which the other stream would otherwise wait for as well.
        found = read(slots, 1)
    with torch.cuda.stream(other):
        assert slots.ring.slot(1).state is SlotState.READY
        with slots.visiting(1, Phase.INFERENCE):
            pass
        with slots.visiting(3, Phase.INFERENCE) as slot:
            pass
    let_go(gate, wait, slot.ready)
    assert slots.manager.num_hits == 1
    assert same_bits(found, slots.host.slabs[1].bytes) == (wait == AS_IT_IS)


@pytest.mark.parametrize("wait", [AS_IT_IS, COPY_AFTER_RELEASE])
def test_the_first_copy_waits_for_the_memorys_last_owner(wait: str) -> None:
    """A kernel that is still queued writes to memory that is free already, and now a slot."""
    host = random_store([SIZE] * 2)
    host.pin(DEVICE)
    streams = hostile(wait)
    owners = [torch.empty(SIZE, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    places = {owner.data_ptr() for owner in owners}
    gate = held_compute()
    for owner in owners:
        owner.fill_(7)
    del owners, owner
    ring = DeviceRing([slab.layout for slab in host.slabs], 2, streams)
    assert {slot.buffer.data_ptr() for slot in ring.slots} == places, "the memory is not the same"
    manager = BlockManager(host, ring, streams)
    found = []
    for block in range(2):
        slot = manager.acquire(block, Phase.FORWARD)
        found.append(slot.buffer.clone())
        manager.release(block)
    let_go(gate, wait, slot.ready)
    right = [same_bits(each, slab.bytes) for each, slab in zip(found, host.slabs, strict=True)]
    assert right == [wait == AS_IT_IS] * 2


@pytest.mark.parametrize("wait", [AS_IT_IS, ALLOCATOR_TOLD])
def test_memory_freed_under_a_copy_is_not_handed_out(wait: str) -> None:
    slots = make_slots(hostile(wait))
    host = slots.host  # it would wait for its copies, were it to go as well
    places = {slot.buffer.data_ptr() for slot in slots.ring.slots}
    gate = Gate()
    gate.hold(slots.streams._copies())
    for block in range(2):
        slots.manager.prefetch(block)
    del slots
    gc.collect()
    fresh = [torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    let_go(gate, wait, torch.cuda.current_stream(DEVICE).record_event())
    reused = {each.data_ptr() for each in fresh} & places
    if wait == AS_IT_IS:
        assert not any(bool(each.any()) for each in fresh)
    else:
        assert reused and any(bool(each.any()) for each in fresh)
    assert host.pinned_num_bytes == host.num_bytes
