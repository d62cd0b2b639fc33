"""The streams of a device that has none, which is a CPU."""

import time

import torch

from poros.streams import Event, StreamContext


class EagerStreams(StreamContext):
    """Streams of a CPU: one queue, every copy done before ``copy`` returns."""

    def beside(self) -> "EagerStreams":
        return EagerStreams(self.device)

    def abandon(self, memory: torch.Tensor, event: Event) -> None:
        pass

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        begin = time.perf_counter()
        target.copy_(source)
        took_ms = (time.perf_counter() - begin) * 1e3
        self._timings.num_bytes += source.numel() * source.element_size()
        self._timings.copy_ms += took_ms
        self._timings.stall_ms += took_ms
        return None

    def wait(self, event: Event) -> None:
        pass

    def record(self) -> Event:
        return None

    def has_passed(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event) -> None:
        pass
