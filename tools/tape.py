"""A stand-in for CUDA graphs on a CPU: operators are recorded, and replayed at fixed addresses.

As with a graph, a replay sees nothing of Python: values are those of the recording, tensors are
read and written where they lay, and random numbers come from the generator's state of now. What a
recording has computed in between is poisoned as soon as somebody else may have its memory.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poros.replay.graphs import Recorder, Recording, in_order
from tools.adversary import tensors_in

_READ_BY_THE_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class TapeRecorder(Recorder):
    """Records tapes.

    Attributes:
        num_replays: Of all tapes.
        tapes: Those that are alive.
    """

    def __init__(self) -> None:
        self.num_replays = 0
        self.num_recorded = 0
        self._last: Tape | None = None
        self.tapes: weakref.WeakSet[Tape] = weakref.WeakSet()

    def record(self, run: Callable[[], None], is_held: bool = False) -> Recording:
        tape = Tape(self, self.num_recorded, is_held)
        with tape:
            run()
        if not is_held:  # its backward is recorded over it
            tape.poison()  # a capture computes nothing
        self.num_recorded += 1
        self.tapes.add(tape)
        return _TapeRecording(tape)

    def memory_of(self, recording: Recording) -> list[torch.Tensor]:
        made = recording.tape._made if isinstance(recording, _TapeRecording) else ()
        storages = {_place_of(each): each.untyped_storage() for each in made if not each.is_meta}
        return [torch.empty(0, dtype=torch.uint8).set_(each) for each in storages.values()]

    def join(
        self, recordings: Sequence[Recording], behind: Sequence[Sequence[int]] | None = None
    ) -> Recording:
        tapes = [each.tape for each in recordings if isinstance(each, _TapeRecording)]
        return _Joined(tapes, behind or in_order(len(tapes)))

    def beside(self) -> "TapeRecorder":
        return TapeRecorder()

    def forget(self) -> None:
        self._last = None

    def replay(self, tape: "Tape", kept: Collection[int] = ()) -> None:
        """Replay one, after poisoning what it may overwrite.

        That is what the one before has left, unless it holds it; and of a held one, what was
        recorded after it.

        Args:
            tape: The tape.
            kept: Where there is what is not overwritten.
        """
        self.num_replays += 1
        if self._last is not None and not self._last.is_held:
            self._last.poison(kept)
        self._last = tape
        for other in self.tapes:
            if tape.is_held and other.is_held and other.number > tape.number:
                other.poison()
        tape.replay()


class _TapeRecording:
    def __init__(self, tape: "Tape") -> None:
        self.tape = tape

    def replay(self) -> None:
        self.tape.recorder.replay(self.tape)


class _Joined:
    """Tapes, which may read what those have made that they wait for.

    Of those that may run, the last and the first that were given run in turn.

    Raises:
        RuntimeError: If some of one recorder, whose temporary tensors share memory, are not in
            order.
    """

    def __init__(self, tapes: Sequence["Tape"], behind: Sequence[Sequence[int]]) -> None:
        before: list[set[int]] = []
        for number, (tape, waited) in enumerate(zip(tapes, behind, strict=True)):
            before.append({*waited}.union(*(before[each] for each in waited)))
            own = {each for each in range(number) if tapes[each].recorder is tape.recorder}
            if own - before[number]:
                raise RuntimeError("recordings that share memory may run at the same time")
        self._tapes, left = list[Tape](), list(range(len(tapes)))
        while left:
            ready = [each for each in left if not any(waited in left for waited in behind[each])]
            chosen = ready[len(self._tapes) % 2 - 1]
            left.remove(chosen)
            self._tapes.append(tapes[chosen])
        self._read = {_place_of(tensor) for each in tapes for tensor in each.given()}

    def replay(self) -> None:
        for each in self._tapes:
            each.recorder.replay(each, self._read)


class Tape(TorchDispatchMode):
    """Operators in order, each with what it was called with and what it gave."""

    def __init__(self, recorder: TapeRecorder, number: int, is_held: bool) -> None:
        super().__init__()
        self.number = number
        self.is_held = is_held
        self.recorder = recorder
        self._steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_BY_THE_HOST:
            raise RuntimeError(f"expected nothing that the host waits for, found {func}")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = tensors_in(result)
        self._steps.append((func, args, kwargs, results))
        if not func.is_view:
            known = {id(each) for each in tensors_in((args, kwargs))}
            self._made += [each for each in results if id(each) not in known]
        return result

    def given(self) -> list[torch.Tensor]:
        """What it reads and has not made itself."""
        made = set(map(_place_of, self._made))
        read = [each for _, args, kwargs, _ in self._steps for each in tensors_in((args, kwargs))]
        return [each for each in read if _place_of(each) not in made]

    def replay(self) -> None:
        # Operators below autograd and autocast, which have had their say.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, results in self._steps:
                if func.is_view:
                    continue
                again = tensors_in(func(*args, **kwargs))
                for place, value in zip(results, again, strict=True):
                    if place is not value:
                        place.copy_(value)

    def poison(self, kept: Collection[int] = ()) -> None:
        """Overwrite all that the tape itself has made, but what is ``kept``."""
        with torch.no_grad():
            for tensor in self._made:
                if _place_of(tensor) not in kept:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
