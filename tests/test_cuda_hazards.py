"""The waits between CUDA streams, one by one, on a GPU: bytes are right with each, wrong without.

Each test builds the one interleaving in which its wait matters, with a sleep in the right place. It
runs as Poros is, and then without that wait, where the bytes have to come out wrong.
"""

import gc

import pytest
import torch
from hostile_streams import (
    ALLOCATOR_TOLD,
    COMPUTE_AFTER_COPY,
    COPY_AFTER_RELEASE,
    MEGA,
    POISON,
    STREAMS_JOINED,
    HostileStreams,
)
from slots import Slots, random_store
from support import same_bits

from poros.manager import BlockManager
from poros.ring import DeviceRing, SlotState
from poros.walk import Phase

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIZE = 8 << 20
LONG = 200 * MEGA  # cycles, about a tenth of a second; everything else here takes far less
AS_IT_IS = "as it is"


def hostile(wait: str, copy_cycles: int = 0) -> HostileStreams:
    without = () if wait == AS_IT_IS else (wait,)
    return HostileStreams(
        DEVICE, copy_cycles=copy_cycles, compute_cycles=0, always=True, without=without
    )


def make_slots(streams: HostileStreams) -> Slots:
    slots = Slots(4, 2, streams, sizes=[SIZE] * 4)
    slots.host.pin(DEVICE)
    assert slots.host.pinned_num_bytes == slots.host.num_bytes, slots.host.fallbacks
    # Memory may hold what an earlier test left there: the very bytes that are to come.
    for slot in slots.ring.slots:
        slot.buffer.fill_(POISON)
    torch.cuda.synchronize()
    return slots


def read_late(slots: Slots, block: int) -> torch.Tensor:
    """What a kernel sees that the compute stream reaches long after it was queued."""
    torch.cuda._sleep(LONG)
    return slots.ring.slot(block).buffer.clone()


@pytest.fixture(autouse=True)
def empty_allocator() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("wait", [AS_IT_IS, COPY_AFTER_RELEASE])
def test_a_slot_is_not_overwritten_while_it_is_read(wait: str) -> None:
    slots = make_slots(hostile(wait))
    with slots.visiting(1, Phase.FORWARD):
        found = read_late(slots, 1)
    with slots.visiting(3, Phase.FORWARD):
        after = slots.ring.slot(3).buffer.clone()
    torch.cuda.synchronize()
    assert same_bits(found, slots.host.slabs[1].bytes) == (wait == AS_IT_IS)
    assert same_bits(after, slots.host.slabs[3].bytes)


@pytest.mark.parametrize("wait", [AS_IT_IS, COMPUTE_AFTER_COPY])
def test_a_slot_is_not_read_before_its_copy_is_done(wait: str) -> None:
    slots = make_slots(hostile(wait, copy_cycles=LONG))
    with slots.visiting(1, Phase.FORWARD) as slot:
        found = slot.buffer.clone()
    torch.cuda.synchronize()
    assert same_bits(found, slots.host.slabs[1].bytes) == (wait == AS_IT_IS)


@pytest.mark.parametrize("wait", [AS_IT_IS, STREAMS_JOINED])
def test_a_read_on_another_stream_counts_too(wait: str) -> None:
    """The second stream reads the block without loading it, so its event alone says too little."""
    slots = make_slots(hostile(wait))
    other = torch.cuda.Stream(DEVICE)
    with slots.visiting(1, Phase.FORWARD):
        found = read_late(slots, 1)
    with torch.cuda.stream(other):
        assert slots.ring.slot(1).state is SlotState.READY
        with slots.visiting(1, Phase.INFERENCE):
            pass
        with slots.visiting(3, Phase.INFERENCE):
            pass
    torch.cuda.synchronize()
    assert slots.manager.num_hits == 1
    assert same_bits(found, slots.host.slabs[1].bytes) == (wait == AS_IT_IS)


@pytest.mark.parametrize("wait", [AS_IT_IS, COPY_AFTER_RELEASE])
def test_the_first_copy_waits_for_the_memorys_last_owner(wait: str) -> None:
    """A kernel that is still queued writes to memory that is free already, and now a slot."""
    host = random_store([SIZE] * 2)
    host.pin(DEVICE)  # before the sleep: registering memory may wait for the device
    streams = hostile(wait)
    owners = [torch.empty(SIZE, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    places = {owner.data_ptr() for owner in owners}
    torch.cuda._sleep(LONG)
    for owner in owners:
        owner.fill_(7)
    del owners, owner
    ring = DeviceRing([slab.layout for slab in host.slabs], 2, streams)
    assert {slot.buffer.data_ptr() for slot in ring.slots} == places, "the memory is not the same"
    manager = BlockManager(host, ring, streams)
    found = []
    for block in range(2):
        found.append(manager.acquire(block, Phase.FORWARD).buffer.clone())
        manager.release(block)
    torch.cuda.synchronize()
    right = [same_bits(each, slab.bytes) for each, slab in zip(found, host.slabs, strict=True)]
    assert right == [wait == AS_IT_IS] * 2


@pytest.mark.parametrize("wait", [AS_IT_IS, ALLOCATOR_TOLD])
def test_memory_freed_under_a_copy_is_not_handed_out(wait: str) -> None:
    slots = make_slots(hostile(wait, copy_cycles=LONG))
    host = slots.host  # it would wait for its copies, were it to go as well
    places = {slot.buffer.data_ptr() for slot in slots.ring.slots}
    gc.collect()
    gc.freeze()  # so that the collection below is over long before the copies are
    try:
        for block in range(2):
            slots.manager.prefetch(block)
        del slots
        gc.collect()
    finally:
        gc.unfreeze()
    fresh = [torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    torch.cuda.synchronize()
    reused = {each.data_ptr() for each in fresh} & places
    if wait == AS_IT_IS:
        assert not any(bool(each.any()) for each in fresh)
    else:
        assert reused and any(bool(each.any()) for each in fresh)
    assert host.pinned_num_bytes == host.num_bytes
