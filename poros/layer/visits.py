"""Visits of a model's layers: noted while they last, and undone whatever interrupts them.

Note: Interruptions
    Ctrl-C may strike between any two steps of Python, those of a ``finally`` too, and once more
    while the first is on its way out. So a visit is noted before it changes anything and crossed
    off after all of it is undone. What is still noted when its frame goes, or at the latest when
    the next visit begins, is undone then. Undoing twice is undoing once.

    What is noted may also be a visit that goes on, further up the stack (a hook inside a layer that
    runs another one). It is undone all the same, since its slot may be needed now; it finds out at
    its end and raises, so that nothing it computed is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from poros.errors import SlotStateError


class _Note:
    """One visit that has begun. Compared by identity."""

    __slots__ = ("undo",)

    def __init__(self, undo: Callable[[], None]) -> None:
        self.undo = undo


class _Keeper:
    """Dies with the frame of a visit, however that was left."""

    __slots__ = ("_note", "_visits")

    def __init__(self, visits: "Visits", note: _Note) -> None:
        self._visits = visits
        self._note = note

    def __del__(self) -> None:
        self._visits.end(self._note)


class Visits:
    """The visits of one prepared model: at most one at a time."""

    def __init__(self) -> None:
        self._open: list[_Note] = []

    def end_all(self) -> None:
        """Undo what an interruption has left behind. Costs nothing if there is nothing."""
        while self._open:
            self.end(self._open[-1])

    def end(self, note: _Note) -> None:
        """Undo one visit, unless that was done; to its end even if it is interrupted."""
        interruption: KeyboardInterrupt | None = None
        while note in self._open:
            try:
                note.undo()
                self._open = [each for each in self._open if each is not note]
            except KeyboardInterrupt as error:
                interruption = error
        if interruption is not None:
            raise interruption

    @contextmanager
    def begin(self, name: str, undo: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Run the body as a visit, then ``undo`` what it has changed.

        Args:
            name: The layer's qualified name.
            undo: Undoes a visit that has come anywhere, undone or not.

        Yields:
            What raises if this is no longer the visit that goes on. Called at the end as well.

        Raises:
            SlotStateError: If another visit began before this one ended.
        """
        self.end_all()
        note = _Note(undo)

        def require_alone() -> None:
            if note not in self._open:
                raise SlotStateError(
                    f"{name}: expected one layer to run at a time, found another one that ran "
                    "before it had ended (a forward or a backward inside a hook of it?)"
                )

        keeper = _Keeper(self, note)
        try:
            try:
                self._open.append(note)
                yield require_alone
                require_alone()
            finally:
                self.end(note)
        finally:
            # An interruption may strike as the first clean-up begins.
            self.end(note)
            del keeper
