"""Holds a CUDA stream back until the host lets it go.

A sleep on a stream is long enough on one card and too short on another. A stream that waits for a
word in host memory stands still for as long as the test needs it to.
"""

import ctypes
import threading
from typing import Any

import torch

from poros.cuda_streams import CudaStreams
from poros.streams import Event
from tests.hostile_streams import COMPUTE_AFTER_COPY, POISON

_EQUAL_OR_GREATER = 0
PATIENCE_S = 10.0


class Gate:
    """Closed until ``open``; whatever is queued behind ``hold`` waits."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def hold(self, stream: Any) -> None:
        """Let everything that is queued on ``stream`` from now on wait for ``open``."""
        driver = ctypes.CDLL("libcuda.so.1")
        code = driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream.cuda_stream),
            ctypes.c_uint64(self._word.data_ptr()),
            ctypes.c_uint32(1),
            ctypes.c_uint(_EQUAL_OR_GREATER),
        )
        assert code == 0, f"cuStreamWaitValue32 failed with code {code}"

    def open(self) -> None:
        self._word[0] = 1


class OutOfOrder(CudaStreams):
    """CUDA streams without one of their waits, where that certainly does harm, once.

    The block that comes second in the first forward is read too late or too early:

    - without ``COPY_AFTER_RELEASE``, its layer stands still until the copy of the slot's next block
      is done, which nothing keeps from running;
    - without ``COMPUTE_AFTER_COPY``, its copy stands still until the layer is done, or until the
      host has waited for it for ``PATIENCE_S``: the layer's kernels are past it by then.
    """

    def __init__(self, device: torch.device, without: str) -> None:
        super().__init__(device)
        self._without = without
        self._gate = Gate()
        self._num_copies = 0
        self._victim: Any = None
        """Address of the slot, or the event of the copy, that the second block is in."""
        self._is_held = self._is_over = False
        self._passed = torch.cuda.Event()
        self._passed.record(torch.cuda.current_stream(device))
        self._passed.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        self._num_copies += 1
        is_second = self._num_copies == 2
        if self._without == COMPUTE_AFTER_COPY:
            if is_second:
                with torch.cuda.stream(self._copies()):
                    target.fill_(POISON)
                self._copies().synchronize()
                self._gate.hold(self._copies())
            event = super().copy(target, source, after=after)
            self._victim = event if is_second else self._victim
            return event
        event = super().copy(target, source, after=self._passed)
        if is_second:
            self._victim = (target.data_ptr(), event)
        elif self._is_held and target.data_ptr() == self._victim[0]:
            event.synchronize()
            self.release()
        return event

    def wait(self, event: Event) -> None:
        if self._without == COMPUTE_AFTER_COPY:
            if event is self._victim:
                self._is_held = True
                # A check of the layer may wait for the copy before its visit has ended. The layer
                # before it has loaded all kernels by now: this one's are past the copy in time.
                opener = threading.Timer(PATIENCE_S, self._gate.open)
                opener.daemon = True
                opener.start()
            return
        super().wait(event)
        if self._victim is not None and event is self._victim[1] and not self._is_over:
            self._gate.hold(self._compute())
            self._is_held = True

    def record(self) -> Event:
        event = super().record()
        if self._without == COMPUTE_AFTER_COPY and self._is_held:
            event.synchronize()
            self.release()
        return event

    def release(self) -> None:
        self._gate.open()
        self._is_held, self._is_over = False, True
