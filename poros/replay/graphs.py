"""Device work that is recorded once and then done again by one call: CUDA graphs.

Only this module records. What is recorded reads and writes fixed addresses, and holds fixed values:
who replays it has to know that both are still right. The random state is read when it is replayed,
and advances then as it did when it was recorded.

Source:
    NVIDIA, CUDA Driver API, "Graph Management": ``cuGraphAddChildGraphNode``. PyTorch has no way to
    join graphs; the driver takes copies of them as nodes of another one.
"""

import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch

from poros.cuda_streams import recording_stream
from poros.kernels.copies import copy_all, prepare_to_record
from poros.stream.within import without_collector

MOST_FLOP = 2.5e12
"""Of the products of one layer's forward. With more, a device is busy with one layer for longer
than the host with the next, and recordings take memory for nothing: on an H200 a step of a 7B model
took 0.7 of its time with 2048 tokens (0.95e12 for each layer), and all of it with 8192 (3.8e12);
eight micro-batches of 2048 tokens through 8 layers of a 32B model (2.0e12), 0.93 of it."""

SAVED_TOGETHER = 2 / 3
"""Part of the time of a recomputation that a kept graph saves if micro-batches go together: it is
copied out and back. An estimate: on an H200 the kernels of eight micro-batches of 512 tokens took
286 ms instead of 336 in a 7B model, and some 25 of these may be for the copies."""

MOST_JOINED = 2**26
"""Bytes of hidden states of micro-batches that are replayed in one go: see "Which" in
``poros.replay.rows``. There is memory for these twice."""

_ALIGNMENT = 64
"""Bytes: so that no tensor begins in another's."""


class Recording(Protocol):
    """Work that was recorded, as a ``torch.cuda.CUDAGraph`` is."""

    def replay(self) -> None:
        """Queue it on the current stream."""


class Recorder(ABC):
    """Records work on one device."""

    @abstractmethod
    def record(self, run: Callable[[], None], is_held: bool = False) -> Recording:
        """Record what ``run`` does, which may be done meanwhile; its tensors have to stay there.

        Args:
            run: Does it.
            is_held: Whether what it has made is read later, by another recording. No replay
                overwrites that, but of a recording that is held too and was made before this one.

        Raises:
            Exception: Whatever ``run`` raises, or the device because it cannot record that. Nothing
                is recorded then.
        """

    @abstractmethod
    def memory_of(self, recording: Recording) -> list[torch.Tensor]:
        """All that one which is held has left for another to read: flat, of one dtype."""

    @abstractmethod
    def join(
        self, recordings: Sequence[Recording], behind: Sequence[Sequence[int]] | None = None
    ) -> Recording | None:
        """Make one of several that draw no random numbers; None if nothing can.

        Args:
            recordings: These.
            behind: For each, the numbers of those before it that it waits for; what waits for
                nothing in common may run at the same time. None: each waits for the one before it.

        Raises:
            RuntimeError: If the device cannot.
        """

    @abstractmethod
    def beside(self) -> "Recorder | None":
        """One whose recordings may run at the same time as those of this one, if they can."""

    @abstractmethod
    def forget(self) -> None:
        """What comes from now on shares no memory with what was recorded before."""


class CudaRecorder(Recorder):
    """Records CUDA graphs, whose temporary tensors share memory: they run one after the other.

    A graph writes to what was free when it was recorded, also where a later one has since put what
    it holds. So those that are held have a pool of their own.
    """

    def __init__(self, device: torch.device, other: "CudaRecorder | None" = None) -> None:
        self._device, self._other = device, other
        self._stream: torch.cuda.Stream | None = None
        self._pools = {is_held: _Pool() for is_held in (False, True)}
        self._left: weakref.WeakKeyDictionary[Recording, dict[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        """Of those that are held: addresses and sizes of memory that each has left allocated."""

    def record(self, run: Callable[[], None], is_held: bool = False) -> Recording:
        if self._stream is None:
            # cuBLAS has a workspace for each stream, which its recorded products use.
            others = [self._other._stream] if self._other and self._other._stream else []
            self._stream = recording_stream(self._device, others)
            prepare_to_record(self._device)
            with torch.cuda.stream(self._stream):  # cuBLAS's workspace is in no graph's memory then
                torch.ones(1, 1, device=self._device) @ torch.ones(1, 1, device=self._device)
        pool = self._pools[is_held]
        if not pool.recordings:
            # Memory whose recordings are all gone cannot be recorded into again.
            pool.handle = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        before = pool.allocated() if is_held else {}
        graph = torch.cuda.CUDAGraph(keep_graph=can_join())
        self._stream.wait_stream(current)
        # What Python's collector would free may wait for the device, which cannot be recorded.
        with torch.cuda.stream(self._stream), without_collector():
            try:
                # Other threads may use CUDA meanwhile: loaders do, to lock pages.
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                self._recover(pool)
                raise
            graph.capture_end()
            if can_join():
                graph.instantiate()
        current.wait_stream(self._stream)
        pool.recordings.add(graph)
        if is_held:
            left = pool.allocated()
            self._left[graph] = {each: left[each] for each in sorted(left.keys() - before.keys())}
        return graph

    def memory_of(self, recording: Recording) -> list[torch.Tensor]:
        places = self._left[recording].items()
        return [torch.as_tensor(_Memory(*each), device=self._device) for each in places]

    def join(
        self, recordings: Sequence[Recording], behind: Sequence[Sequence[int]] | None = None
    ) -> Recording | None:
        graphs = [each for each in recordings if isinstance(each, torch.cuda.CUDAGraph)]
        if not can_join() or len(graphs) < len(recordings):
            return None
        return JoinedGraph(graphs, behind or in_order(len(graphs)), self._device)

    def beside(self) -> "CudaRecorder | None":
        return CudaRecorder(self._device, other=self) if can_join() else None

    def _recover(self, pool: "_Pool") -> None:
        """After a recording that has failed.

        If the device has ended it, or it could not begin, PyTorch takes memory and random numbers
        for recorded ones from then on (its issue 171263), the latter until one ends well.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, pool.handle)
        nothing = torch.cuda.CUDAGraph()
        nothing.capture_begin(
            pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"
        )
        torch.empty(1, device=self._device).zero_()
        nothing.capture_end()

    def forget(self) -> None:
        if self._stream is not None:
            self._stream = None
            # PyTorch keeps those of cuBLAS for each stream, in memory of the recordings.
            torch._C._cuda_clearCublasWorkspaces()


class _Pool:
    """Memory that recordings share."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.recordings: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def allocated(self) -> dict[int, int]:
        """Of all that is allocated there now: each address, and the bytes behind it."""
        blocks = (each["blocks"] for each in torch.cuda.memory_snapshot(self.handle))
        return {
            block["address"]: block["size"]
            for block in chain.from_iterable(blocks)
            if block["state"] == "active_allocated"
        }


class _Memory:
    """Memory of the device, for PyTorch to make a tensor of: a multiple of four bytes."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes // 4,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


class Spec(NamedTuple):
    """Of a tensor: what memory it takes. Contiguous."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Spec":
        return cls(tensor.shape, tensor.dtype)


class Fixed:
    """Tensors at one address each.

    Those of one number of ``groups`` and one dtype lie side by side, and so do their copies; no
    memory is held for others by keeping one.
    """

    def __init__(
        self, specs: Sequence[Spec], device: torch.device, groups: Sequence[int] = ()
    ) -> None:
        sizes: dict[tuple[int, torch.dtype], int] = {}
        self._places = []
        for spec, group in zip(specs, groups or [0] * len(specs), strict=True):
            key = group, spec.dtype
            offset = sizes.get(key, 0)
            step = _ALIGNMENT // spec.dtype.itemsize
            sizes[key] = offset + -(-spec.shape.numel() // step) * step
            stride = torch.empty(spec.shape, device="meta").stride()
            self._places.append((list(sizes).index(key), spec.shape, stride, offset))
        self._pieces = [
            # Valid indices, where what is recorded is also done.
            torch.zeros(size, dtype=dtype, device=device)
            for (_, dtype), size in sizes.items()
        ]
        self.tensors = self._views(self._pieces)
        self._groups = [group for group, _ in sizes]
        self.forget()

    def piece_of(self, group: int) -> torch.Tensor | None:
        """The memory of all tensors of a group; None if they are of several dtypes."""
        if self._groups.count(group) != 1:
            return None
        return self._pieces[self._groups.index(group)]

    def forget(self) -> None:
        """Take nothing to be there already."""
        self._filled: list[tuple[Any, int] | None] = [None] * len(self.tensors)

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy ``sources`` in, but for those that are there: masks and tables of a whole pass."""
        missing = [
            number
            for number, (source, last) in enumerate(zip(sources, self._filled, strict=True))
            if last is None or last[0]() is not source or last[1] != source._version
        ]
        if missing:
            copy_all(
                [self.tensors[number] for number in missing],
                [sources[number].detach() for number in missing],
            )
        for number in missing:
            self._filled[number] = weakref.ref(sources[number]), sources[number]._version

    def copies(self) -> list[torch.Tensor]:
        """What is in them now, in memory of its own: one copy for each piece.

        An edit of one is not counted as one of those beside it.
        """
        return [each.data for each in self._views([piece.clone() for piece in self._pieces])]

    def _views(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            pieces[number].as_strided(shape, stride, offset)
            for number, shape, stride, offset in self._places
        ]


class SharedMemory:
    """The ``Fixed`` of one device: one for each list of specs, for as long as somebody has it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: weakref.WeakValueDictionary[Hashable, Fixed] = weakref.WeakValueDictionary()

    def of(self, role: str, specs: Sequence[Spec], groups: Sequence[int] = ()) -> Fixed:
        """Those for ``role``, the same for equal specs and groups."""
        key = role, tuple(specs), tuple(groups)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Fixed(specs, self._device, groups)
        return known

    def begin_pass(self) -> None:
        """From now on nothing is taken to be there already: some edits are not counted."""
        for fixed in self._known.values():
            fixed.forget()


def in_order(number: int) -> list[list[int]]:
    """For each of so many recordings that it waits for the one before it."""
    return [[each - 1] if each else [] for each in range(number)]


class JoinedGraph:
    """Graphs that were captured with ``keep_graph=True`` as one; ``behind``: see ``join``.

    Raises:
        RuntimeError: If the driver cannot join them.
    """

    def __init__(
        self,
        graphs: Sequence[torch.cuda.CUDAGraph],
        behind: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self._graphs = graphs  # they hold the memory of their tensors
        self._device = device
        whole, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        nodes: list[ctypes.c_void_p] = []
        with torch.cuda.device(device):
            _call("cuGraphCreate", ctypes.byref(whole), ctypes.c_uint(0))
            try:
                for graph, waited in zip(graphs, behind, strict=True):
                    node, child = ctypes.c_void_p(), ctypes.c_void_p(graph.raw_cuda_graph())
                    before = (ctypes.c_void_p * len(waited))(
                        *[nodes[each].value for each in waited]
                    )
                    about = whole, before, ctypes.c_size_t(len(waited)), child
                    _call("cuGraphAddChildGraphNode", ctypes.byref(node), *about)
                    nodes.append(node)
                made = ctypes.byref(self._executable)
                _call("cuGraphInstantiateWithFlags", made, whole, ctypes.c_ulonglong(0))
            finally:
                _call("cuGraphDestroy", whole)
        # At the end of the process the driver may be gone before.
        weakref.finalize(self, _call, "cuGraphExecDestroy", self._executable).atexit = False

    def replay(self) -> None:
        """Queue them on the current stream of the device."""
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
            _call("cuGraphLaunch", self._executable, stream)


def can_join() -> bool:
    """Whether the driver is NVIDIA's."""
    return torch.version.cuda is not None


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_driver(), name)(*arguments)
    if error:
        raise RuntimeError(f"expected {name} to work, found that it fails with CUDA error {error}")
