"""CUDA streams that stall at the wrong moments, for tests on a real GPU.

A race shows only if its loser is late. Half of the copies are held up by a sleep on the copy stream
and half of the visits by one on the compute stream, at random but with a seed. A sleep is far
longer than the host takes to queue a layer, so whichever side does not wait for the other overtakes
it. The waits are those of ``CudaStreams``, called unchanged; each can be left out, as a control.
"""

import random
from collections.abc import Collection, Sequence
from typing import Any

import torch

from poros.cuda_streams import CudaStreams
from poros.streams import Event

POISON = 0xFF
MEGA = 1_000_000  # cycles of a GPU's clock: about half a millisecond

COPY_AFTER_RELEASE = "a copy waits until the slot is no longer read"
COMPUTE_AFTER_COPY = "compute waits for the copy"
STREAMS_JOINED = "a new compute stream waits for the old one"
ALLOCATOR_TOLD = "the allocator knows of the copy stream"


class HostileStreams(CudaStreams):
    """See the module's docstring.

    Args:
        device: A GPU.
        is_poisoning: Fill a slot with 0xFF as soon as nothing reads it any more, before each copy.
            The fill waits for the release by itself, so that the wait of ``copy`` is not tested.
        copy_cycles: Sleep on the copy stream, before half of the copies.
        compute_cycles: Sleep on the compute stream, at half of the visits.
        always: Sleep before every copy and at every visit.
        without: The orderings to leave out.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        is_poisoning: bool = False,
        copy_cycles: int = 20 * MEGA,
        compute_cycles: int = 20 * MEGA,
        always: bool = False,
        without: Collection[str] = (),
    ) -> None:
        super().__init__(device)
        self._is_poisoning = is_poisoning
        self._copy_cycles = copy_cycles
        self._compute_cycles = compute_cycles
        self._chance = 1.0 if always else 0.5
        self._without = without
        self._random = random.Random(0)
        self._passed = torch.cuda.Event()
        self._passed.record(torch.cuda.current_stream(device))
        self._passed.synchronize()

    def beside(self) -> "HostileStreams":
        return HostileStreams(
            self.device,
            is_poisoning=self._is_poisoning,
            copy_cycles=self._copy_cycles,
            compute_cycles=self._compute_cycles,
            always=self._chance == 1.0,
            without=self._without,
        )

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if ALLOCATOR_TOLD in self._without:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return super().allocate(num_bytes)

    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        memory = super().borrow(shape, dtype)
        if self._is_poisoning:
            memory.flatten().view(torch.uint8).fill_(POISON)
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        if COPY_AFTER_RELEASE in self._without:
            after = self._passed
        copies = self._copies()
        if self._is_poisoning:
            copies.wait_event(after)
        with torch.cuda.stream(copies):
            if self._is_poisoning and target.is_cuda:
                target.flatten().view(torch.uint8).fill_(POISON)
            self._sleep(self._copy_cycles)
        return super().copy(target, source, after=after)

    def wait(self, event: Event) -> None:
        super().wait(self._passed if COMPUTE_AFTER_COPY in self._without else event)
        self._sleep(self._compute_cycles)

    def _sleep(self, cycles: int) -> None:
        """On the current stream, if it is its turn."""
        if cycles and self._random.random() < self._chance:
            torch.cuda._sleep(cycles)

    def _compute(self) -> Any:
        if STREAMS_JOINED in self._without:
            return torch.cuda.current_stream(self.device)
        return super()._compute()
