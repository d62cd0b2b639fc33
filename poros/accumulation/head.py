"""One pass over a head in host memory for all micro-batches of a group.

The loss is computed slice by slice of the head (``poros.head.loss``), and each micro-batch would
bring all slices to the device for itself. So once the layers have run, the model's code goes up to
its loss for each micro-batch, and is stopped there; the slices come once, each for all of them; and
when the code comes to its loss again, for good, what it would compute is there.

Done only for a loss that was seen to come to the head once for each micro-batch, in the group
before: code that computes its loss otherwise could not be stopped, and would note things down
twice. A head that is trained is read again in backward, so it is read for each.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from poros.accumulation.calls import Environment, Stopped
from poros.errors import RematerializationError
from poros.head.loss import LossInputs
from poros.head.online import SlicedLossState
from poros.head.slices import SliceReader


class _Note(NamedTuple):
    asked: LossInputs
    online: SlicedLossState
    environment: Environment

    @classmethod
    def of(cls, asked: LossInputs) -> "_Note":
        online = asked.given.online(asked.hidden)
        return cls(asked, online, Environment.capture(asked.hidden.device))


class SharedHead:
    """The head of one group.

    Args:
        reader: Brings its slices.
        is_ahead: Whether losses are to be computed ahead.

    Attributes:
        num_calls: How often each micro-batch's loss came to the head, in the end.
    """

    def __init__(self, reader: SliceReader, is_ahead: bool) -> None:
        self.num_calls: list[int] = []
        self.is_ahead = is_ahead and not reader.holds_all
        self._reader = reader
        self._notes: list[_Note | None] = []
        self._is_noting = False
        self._differs: list[torch.Tensor] = []

    def look_ahead(self, codes: Sequence[Callable[[], bool]]) -> None:
        """Note what losses ask of the head, and compute it for all of them.

        Args:
            codes: Run the code of each micro-batch up to here, or to its end; whether it came here.
        """
        self._notes, self._is_noting = [], True
        with self.asked(is_for_good=False):
            for number, code in enumerate(codes):
                if not code() or len(self._notes) != number + 1:
                    self._notes, self.is_ahead = [], False
                    break
        self._is_noting = False
        by_width: dict[int, list[_Note]] = defaultdict(list)
        for note in self._notes:
            if note is not None:
                by_width[note.asked.given.width].append(note)
        with torch.no_grad():
            for width, notes in by_width.items():
                now = Environment.capture(notes[0].asked.hidden.device)
                for first, rows in self._reader(width):
                    for asked, online, environment in notes:
                        with environment.entering(now)():
                            online.add(first, rows, asked.bias, asked.added, asked.given.steps)

    @contextmanager
    def asked(self, is_for_good: bool) -> Iterator[None]:
        """What losses in the body ask of the head comes here.

        Args:
            is_for_good: Whether one micro-batch's loss is computed there, with its backward.
        """
        if is_for_good:
            self.num_calls.append(0)
        self._reader.in_place = weakref.ref(self)
        try:
            yield
        finally:
            self._reader.in_place = None

    def __call__(self, asked: LossInputs) -> SlicedLossState | None:
        """In place of reading the head: what it gives, if that is known; see ``LossInputs``."""
        if self._is_noting:
            self._notes.append(None if asked.is_trained else _Note.of(asked.without_graph()))
            raise Stopped
        if not self.num_calls:
            return None
        self.num_calls[-1] += 1
        number = len(self.num_calls) - 1
        note = self._notes[number] if number < len(self._notes) else None
        if note is None or self.num_calls[-1] > 1 or not asked.is_like(note.asked):
            return None
        self._notes[number] = None
        self._differs.append(asked.differs_from(note.asked))
        return note.online

    def require_same(self) -> None:
        """Raise unless losses have asked for what they had asked for ahead.

        Streams:
            The host waits for the device.
        """
        differs, self._differs = self._differs, []
        if differs and bool(torch.stack(differs).any()):
            raise RematerializationError(
                "expected a loss that gives the head the same hidden states and labels each time "
                "it is computed for a micro-batch, found others (a loss that counts its calls, or "
                "draws random numbers of its own?). Gradients are wrong: throw them away. Call "
                "backward for each micro-batch, without poros.accumulate or block-major trainers"
            )
