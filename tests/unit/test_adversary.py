"""The stand-in has power: its poison, and the operators whose reads it sees.

That each broken protocol is caught: ``faults/test_missing_waits``.
"""

from collections.abc import Callable

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
