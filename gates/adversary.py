"""The worst copy engine the rules allow, on a CPU.

A missing wait then fails every time, not one run in a thousand.

On a GPU a copy may run at any moment between two points: as early as the events it waits for allow,
and as late as the waits for its own event allow. ``AdversarialStreams`` does both. The target is
filled with 0xFF (NaN for floats, the largest code for packed 4-bit weights) as soon as the copy is
queued, and the bytes arrive only when the compute stream waits for them: without that wait the
compute reads poison.

Compute on a CPU is over when Python returns, so a copy that overtakes it cannot be acted out. It is
found by order instead: every read of a slot gets a time, an event of the compute stream stands for
the reads before it, and a copy into a slot whose latest read its event does not cover raises
``SlotHazard``. Reads are taken from the slot's waits and, inside ``watch()``, from every operator
that is given memory of a slot, whoever calls it.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poros.errors import PorosError
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
    """What is known of one slot."""

    last_read: int
    last_copy: int = 0
    """Number of the last copy into it, 0 before the first."""
    is_pending: bool = False
    """Whether the compute stream has not waited for that copy yet."""


class AdversarialStreams(StreamContext):
    """See the module's docstring.

    Attributes:
        num_copies: Copies queued so far, counted here and by nobody else.
        num_bytes: Bytes of these copies.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))
        self.num_copies = 0
        self.num_bytes = 0
        self._time = 0
        self._memories: dict[int, _Memory] = {}
        self._queue: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._is_copying = False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.full((num_bytes,), POISON, dtype=torch.uint8, device=self.device)
        # As if a kernel that is still queued had read it before it was freed and handed out again.
        self._memories[_address(memory)] = _Memory(last_read=self._tick())
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        memory = self._memories[_address(target)]
        covered = after.time if isinstance(after, ComputePoint) else -1
        if covered < memory.last_read:
            raise SlotHazard(
                f"copy {self.num_copies + 1} may overwrite a slot while it is read: it waits for "
                f"reads up to time {covered}, the last one is at {memory.last_read}"
            )
        self.num_copies += 1
        self.num_bytes += source.numel()
        memory.last_copy, memory.is_pending = self.num_copies, True
        self._queue.append((self.num_copies, target, source))
        with self._copying():
            target.fill_(POISON)
        return CopyDone(self.num_copies)

    def wait(self, event: Event) -> None:
        if not isinstance(event, CopyDone):
            return
        self.synchronize(event)
        for memory in self._memories.values():
            if memory.last_copy == event.number:
                memory.is_pending = False
                memory.last_read = self._tick()
            elif memory.last_copy < event.number:
                memory.is_pending = False

    def record(self) -> Event:
        return ComputePoint(self._time)

    def has_passed(self, event: Event) -> bool:
        pending = self._queue[0][0] if self._queue else self.num_copies + 1
        return not isinstance(event, CopyDone) or event.number < pending

    def synchronize(self, event: Event) -> None:
        while isinstance(event, CopyDone) and not self.has_passed(event):
            _, target, source = self._queue.popleft()
            with self._copying():
                target.copy_(source)

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
        memory = self._memories.get(_address(tensor))
        if memory is None or self._is_copying:
            return
        if memory.is_pending:
            raise SlotHazard(f"a slot is read without waiting for copy {memory.last_copy} into it")
        memory.last_read = self._tick()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    def _tick(self) -> int:
        self._time += 1
        return self._time


class _Watch(TorchDispatchMode):
    """Reports the tensors that operators are given, views and metadata aside."""

    def __init__(self, streams: AdversarialStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            for each in tree_leaves((args, kwargs or {})):
                if isinstance(each, torch.Tensor):
                    self._streams.note_read(each)
        return func(*args, **(kwargs or {}))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
