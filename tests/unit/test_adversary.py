"""The stand-in has power: each broken protocol is caught."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from poros.errors import PorosError
from poros.streams import Event
from tools.adversary import POISON, AdversarialStreams, SlotHazard

SIZE = 64


def source(value: int = 7, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def is_all(tensor: torch.Tensor, value: int) -> bool:
    """Looked at through numpy, which no dispatch mode sees."""
    found: bool = (tensor.numpy() == value).all().item()
    return found


def ready(streams: AdversarialStreams, value: int = 7) -> tuple[torch.Tensor, Event]:
    """A slot that holds ``value`` and has been waited for, and the event before its reads."""
    slot = streams.allocate(SIZE)
    done = streams.copy(slot, source(value), after=streams.record())
    streams.wait(done)
    return slot, streams.record()


# Late bytes, early poison.


def test_bytes_arrive_at_the_wait_for_their_copy_and_not_earlier() -> None:
    streams = AdversarialStreams()
    slot = streams.allocate(SIZE)
    assert is_all(slot, POISON)
    first = streams.copy(slot[:32], source(1, 32), after=streams.record())
    assert is_all(slot, POISON)
    streams.wait(streams.record())
    streams.wait(None)
    assert is_all(slot, POISON)
    streams.wait(first)
    assert is_all(slot[:32], 1) and is_all(slot[32:], POISON)
    streams.wait(streams.copy(slot[:16], source(1, 16), after=streams.record()))
    assert (streams.num_copies, streams.num_bytes) == (2, 48)


def test_poison_comes_when_the_copy_is_queued_and_host_bytes_are_read_at_the_wait() -> None:
    """Who changes or frees them before, changes what arrives."""
    streams = AdversarialStreams()
    slot, event = ready(streams)
    assert is_all(slot, 7)
    bytes_on_host = source(8)
    done = streams.copy(slot, bytes_on_host, after=event)
    assert is_all(slot, POISON) and is_all(slot.clone(), POISON)
    assert slot[:2].view(torch.bfloat16).isnan().all()
    assert slot[:4].view(torch.float32).isnan().all()
    bytes_on_host.fill_(2)
    streams.wait(done)
    assert is_all(slot, 2)


# A read before the wait.


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "whole": lambda s: s.clone(),
    "a part": lambda s: s[8:16].sum(),
    "a matmul": lambda s: s.view(torch.float32).view(4, 4) @ torch.ones(4, 4),
    "in a list": lambda s: torch.cat([torch.zeros(1, dtype=torch.uint8), s]),
    "second argument": lambda s: torch.equal(source(), s),
    "out=": lambda s: torch.add(source(), 1, out=s),
    "in place": lambda s: s.add_(1),
    "in a condition": lambda s: torch.where(s > 0, s, s),
    "as a parameter": lambda s: torch.nn.functional.linear(
        torch.ones(1, 4, dtype=torch.bfloat16),
        torch.nn.Parameter(s[:32].view(torch.bfloat16).view(4, 4), requires_grad=False),
    ),
}


@pytest.mark.parametrize("name", READS)
def test_any_operator_that_reads_before_the_wait_is_caught(name: str) -> None:
    streams, read = AdversarialStreams(), READS[name]
    slot, _ = ready(streams)
    with streams.watch():
        read(slot)  # waited for: allowed
        done = streams.copy(slot, source(8), after=streams.record())
        with pytest.raises(SlotHazard, match="read without waiting for copy 2") as caught:
            read(slot)
        assert isinstance(caught.value, PorosError) and isinstance(caught.value, RuntimeError)
        streams.wait(done)
        read(slot)


# An overwrite of what is still read.


EARLY = ("no event", "before the allocation", "before a read", "before a wait", "of a copy")


@pytest.mark.parametrize("which", EARLY)
def test_an_overwrite_behind_no_event_or_one_before_the_last_read_is_caught(which: str) -> None:
    """Memory counts as read until an event after its allocation; the event of a copy covers none.

    Where nobody watches, reads are taken from the waits.
    """
    streams = AdversarialStreams()
    with streams.watch() if which == "before a read" else nullcontext():
        events: dict[str, Event] = {"no event": None, "before the allocation": streams.record()}
        slot = streams.allocate(SIZE)
        if which not in events:
            events["before a wait"] = streams.record()
            events["of a copy"] = streams.copy(slot, source(), after=streams.record())
            streams.wait(events["of a copy"])
            events["before a read"] = streams.record()
        if which == "before a read":
            slot.sum()
        num_copies, before = streams.num_copies, slot.numpy().copy()
        with pytest.raises(SlotHazard, match=r"while it is read|up to time"):
            streams.copy(slot, source(8), after=events[which])
        assert streams.num_copies == num_copies and (slot.numpy() == before).all()
        streams.copy(slot, source(8), after=streams.record())
