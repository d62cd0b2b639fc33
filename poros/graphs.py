"""Device work that is recorded once and then done again by one call: CUDA graphs.

Only this module records. What is recorded reads and writes fixed addresses, and holds fixed values:
who replays it has to know that both are still right. The random state is read when it is replayed,
and advances then as it did when it was recorded.
"""

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 64
"""Bytes: so that no tensor begins in another's."""


class Recording(ABC):
    """Work that was recorded."""

    @abstractmethod
    def replay(self) -> None:
        """Queue it on the current stream."""


class Recorder(ABC):
    """Records work on one device."""

    sees_operators: bool
    """Whether it records operators one by one, and not what they start on the device."""

    @abstractmethod
    def record(self, run: Callable[[], None], is_held: bool = False) -> Recording:
        """Record what ``run`` does. It may be done as it is recorded, or not.

        Whatever it reads and writes besides its own temporary tensors has to stay where it is.

        Args:
            run: Does it.
            is_held: Whether a later recording reads what this one has made and still holds.

        Raises:
            Exception: Whatever ``run`` raises, or the device because it cannot record that. Nothing
                is recorded then.
        """

    @abstractmethod
    def forget(self) -> None:
        """What comes from now on shares no memory with what was recorded before."""


class CudaRecorder(Recorder):
    """Records CUDA graphs, whose temporary tensors share memory: they run one after the other."""

    sees_operators = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, run: Callable[[], None], is_held: bool = False) -> Recording:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _without_collector():
            # Other threads may use CUDA meanwhile: loaders do, to lock pages.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return _CudaRecording(graph)

    def forget(self) -> None:
        self._stream = self._pool = None


@contextmanager
def _without_collector() -> Iterator[None]:
    """What Python's collector would free may wait for the device, which cannot be recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _CudaRecording(Recording):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class Spec(NamedTuple):
    """Of a tensor: what memory it takes. Contiguous."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Spec":
        return cls(tensor.shape, tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Fixed:
    """Tensors at one address, side by side in one piece of memory.

    Args:
        specs: What they are.
        device: Where.
    """

    def __init__(self, specs: Sequence[Spec], device: torch.device) -> None:
        self._specs = specs
        self._offsets: list[int] = []
        size = 0
        for spec in specs:
            self._offsets.append(size)
            size += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._memory)
        self.filled: object = None
        """What whoever fills them knows of what is in them."""

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def copies(self) -> list[torch.Tensor]:
        """What is in them now, in memory of its own: one copy for all."""
        return self._views(self._memory.clone())

    def _views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [
            memory[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)
            for spec, offset in zip(self._specs, self._offsets, strict=True)
        ]


class FixedMemory:
    """The ``Fixed`` of one device: one for each list of specs, for as long as somebody has it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: weakref.WeakValueDictionary[tuple[str, tuple[Spec, ...]], Fixed] = (
            weakref.WeakValueDictionary()
        )

    def of(self, role: str, specs: Sequence[Spec]) -> Fixed:
        """Those for ``role``, the same for equal specs."""
        key = role, tuple(specs)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Fixed(specs, self._device)
        return known

    @property
    def num_bytes(self) -> int:
        return sum(fixed.num_bytes for fixed in self._known.values())
