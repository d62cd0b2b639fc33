"""The worst copy engine the rules allow, on a CPU.

A missing wait then fails every time, not one run in a thousand.

On a GPU a copy may run at any moment between two points: as early as the events it waits for allow,
and as late as the waits for its own event allow. ``AdversarialStreams`` does both. The target is
filled with 0xFF (NaN for floats, the largest code for packed 4-bit weights) as soon as the copy is
queued, and the bytes arrive only when the compute stream waits for them: without that wait the
compute reads poison.

Memory that is handed back too early is found as well: a copy whose borrowed target or whose source
on the device is gone before the compute stream has waited for it raises ``SlotHazard``.

Compute on a CPU is over when Python returns, so a copy that overtakes it cannot be acted out. It is
found by order instead: every read of a slot gets a time, an event of the compute stream stands for
the reads before it, and a copy into a slot whose latest read its event does not cover raises
``SlotHazard``. Reads are taken from the slot's waits and, inside ``watch()``, from every operator
that is given memory of a slot, whoever calls it.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poros.errors import PorosError
from poros.head.host_matrix import HostMatrix
from poros.streams import Event, StreamContext

POISON = 0xFF


class SlotHazard(PorosError, RuntimeError):
    """Two accesses of a slot, one of them a write, that no event orders."""


class CopyDone(NamedTuple):
    """The event of copy number ``number``."""

    number: int


class ComputePoint(NamedTuple):
    """The event of the compute stream that stands for all reads up to ``time``."""

    time: int


@dataclass(slots=True)
class _Memory:
    """What is known of one slot, or of other device memory that copies write."""

    last_read: int
    last_copy: int = 0
    """Number of the last copy into it, 0 before the first."""
    is_pending: bool = False
    """Whether the compute stream has not waited for that copy yet."""
    copier: "AdversarialStreams | None" = None
    """Whose copy that is."""
    is_borrowed: bool = False


@dataclass
class _Compute:
    """The compute stream and the device memory, common to all copy streams."""

    time: int = 0
    memories: dict[int, _Memory] = field(default_factory=dict)
    is_copying: bool = False
    lost: str | None = None
    """Memory that was given up under a copy: raised at the next opportunity."""


class _Weak:
    """A tensor on the device that somebody else has to keep until the copy is waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._form = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def get(self) -> torch.Tensor:
        storage, (dtype, *place) = self._storage(), self._form
        if storage is None:
            raise SlotHazard("memory was given back before the copy of it was waited for")
        return torch.empty(0, dtype=dtype).set_(storage, *place)


class _Strong:
    """A tensor that stays: host memory, or memory whose allocator knows of the copy stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get(self) -> torch.Tensor:
        return self._tensor


class AdversarialStreams(StreamContext):
    """See the module's docstring.

    Attributes:
        num_copies: Copies queued so far, counted here and by nobody else.
        num_bytes: Bytes of these copies.
    """

    def __init__(
        self, device: torch.device | None = None, beside: "AdversarialStreams | None" = None
    ) -> None:
        super().__init__(device or torch.device("cpu"))
        self.num_copies = 0
        self.num_bytes = 0
        self._compute: _Compute = _Compute() if beside is None else beside._compute
        self._queue: deque[tuple[int, _Weak | _Strong, _Weak | _Strong]] = deque()

    def beside(self) -> "AdversarialStreams":
        return AdversarialStreams(self.device, beside=self)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.full((num_bytes,), POISON, dtype=torch.uint8, device=self.device)
        # As if a kernel that is still queued had read it before it was freed and handed out again.
        self._compute.memories[_address(memory)] = _Memory(last_read=self._tick())
        return memory

    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype, device=self.device)
        self._compute.memories[_address(memory)] = _Memory(self._tick(), is_borrowed=True)
        weakref.finalize(memory.untyped_storage(), _given_back, self._compute, _address(memory))
        return memory

    def abandon(self, memory: torch.Tensor, event: Event) -> None:
        self.synchronize(event)  # the allocator keeps it until then
        known = self._compute.memories.get(_address(memory))
        if known is not None:
            known.is_pending = False

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        self._require_nothing_lost()
        memory = self._compute.memories.get(_address(target))
        covered = after.time if isinstance(after, ComputePoint) else -1
        if memory is None and covered < self._compute.time:
            raise SlotHazard(f"copy {self.num_copies + 1} may read what is not computed yet")
        if memory is not None and covered < memory.last_read:
            raise SlotHazard(
                f"copy {self.num_copies + 1} may overwrite a slot while it is read: it waits for "
                f"reads up to time {covered}, the last one is at {memory.last_read}"
            )
        self.num_copies += 1
        self.num_bytes += source.numel() * source.element_size()
        if memory is not None:
            memory.last_copy, memory.is_pending, memory.copier = self.num_copies, True, self
        to = _Weak(target) if memory is not None and memory.is_borrowed else _Strong(target)
        of = _Weak(source) if memory is None else _Strong(source)
        self._queue.append((self.num_copies, to, of))
        with self._copying():
            target.flatten().view(torch.uint8).fill_(POISON)
        return CopyDone(self.num_copies)

    def wait(self, event: Event) -> None:
        self._require_nothing_lost()
        if not isinstance(event, CopyDone):
            return
        self.synchronize(event)
        for memory in self._compute.memories.values():
            if memory.copier is not self:
                continue
            if memory.last_copy == event.number:
                memory.is_pending = False
                memory.last_read = self._tick()
            elif memory.last_copy < event.number:
                memory.is_pending = False

    def record(self) -> Event:
        return ComputePoint(self._compute.time)

    def has_passed(self, event: Event) -> bool:
        pending = self._queue[0][0] if self._queue else self.num_copies + 1
        return not isinstance(event, CopyDone) or event.number < pending

    def synchronize(self, event: Event) -> None:
        while isinstance(event, CopyDone) and not self.has_passed(event):
            _, target, source = self._queue.popleft()
            with self._copying():
                target.get().copy_(source.get())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take every operator inside the body for what it reads.

        In a dispatch mode, autocast does not reach bitsandbytes' 4-bit matmul, in a resident run
        either: a comparison under autocast has to run both of its arms in here.
        """
        with _Watch(self):
            yield

    def note_read(self, tensor: torch.Tensor) -> None:
        """An operator will read ``tensor``; raises ``SlotHazard`` if its copy may still run."""
        memory = self._compute.memories.get(_address(tensor))
        if memory is None or self._compute.is_copying:
            return
        if memory.is_pending:
            raise SlotHazard(f"a slot is read without waiting for copy {memory.last_copy} into it")
        memory.last_read = self._tick()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        self._compute.is_copying = True
        try:
            yield
        finally:
            self._compute.is_copying = False

    def _require_nothing_lost(self) -> None:
        if self._compute.lost is not None:
            raise SlotHazard(self._compute.lost)

    def _tick(self) -> int:
        self._compute.time += 1
        return self._compute.time


class _Watch(TorchDispatchMode):
    """Reports the tensors that operators are given, views and metadata aside."""

    def __init__(self, streams: AdversarialStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            for tensor in tensors_in((args, kwargs)):
                # What of a matrix on the host is on the device is read where it is copied.
                if not isinstance(tensor, HostMatrix):
                    self._streams.note_read(tensor)
        return func(*args, **(kwargs or {}))


_CONTAINERS = (tuple, list, dict)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of what operators are given and give: sooner found than by PyTorch's pytree."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, _CONTAINERS):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, torch.Tensor):
                found.append(each)
            elif isinstance(each, _CONTAINERS):  # no call for each of many numbers
                found += tensors_in(each)
    return found


def _given_back(compute: _Compute, address: int) -> None:
    if compute.memories.pop(address).is_pending:
        compute.lost = "memory was given back before the copy into it was waited for"


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
