"""One pass over a head in host memory for all micro-batches of a group.

The loss is computed slice by slice of the head (``poros.head.loss``), and each micro-batch would
bring all slices to the device for itself. So the code of each parks as it comes to the head; the
slices come once, each for all of them; and as its code goes on, what it would compute is there.

Done only for a loss that was seen to come to the head once.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from poros.accumulation.micro_batch import MicroBatch
from poros.head.loss import LossInputs, SlicedLossState
from poros.head.slices import SliceReader


class _Note(NamedTuple):
    micro_batch: MicroBatch
    width: int
    online: SlicedLossState


class SharedHead:
    """The head of one group, whose slices ``reader`` brings."""

    def __init__(self, reader: SliceReader) -> None:
        self._reader = reader
        self._notes: list[_Note] = []
        self._coming: MicroBatch | None = None
        """Whose code is on its way to the head."""

    def read(
        self,
        micro_batches: Sequence[MicroBatch],
        go_on: Callable[[MicroBatch], None],
    ) -> None:
        """Have their code ``go_on`` to the head, and compute it for all of them."""
        for each in micro_batches:
            self._coming = each
            try:
                go_on(each)
            finally:
                self._coming = None
        alike: dict[Any, list[_Note]] = defaultdict(list)
        for note in self._notes:
            alike[note.width, note.micro_batch.code.regions].append(note)
        self._notes = []
        for (width, _), notes in alike.items():
            with notes[0].micro_batch.code.inside(), torch.no_grad():
                for first, rows in self._reader(width):
                    for _, _, online in notes:
                        online.add(first, rows)

    def __call__(self, asked: LossInputs) -> SlicedLossState | None:
        """In place of reading the head: what it gives, or None if it has to be read."""
        coming = self._coming
        if coming is None or not coming.code.is_running:
            return None
        note = _Note(coming, asked.width, SlicedLossState(asked))
        self._notes.append(note)
        coming.code.park()
        return note.online
