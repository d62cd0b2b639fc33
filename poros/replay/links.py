"""Copies and sums that pass tensors on between recordings that are joined."""

from collections.abc import Callable, Hashable, Sequence
from weakref import WeakValueDictionary

import torch

from poros.kernels.copies import copy_all
from poros.replay.call import total
from poros.replay.graphs import Recorder, Recording


class Links:
    """What passes tensors on between recordings that are joined: each copy is recorded once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: WeakValueDictionary[Hashable, Recording] = WeakValueDictionary()
        """What several have in common; they hold the tensors of it."""

    def join(
        self, recordings: Sequence[Recording], behind: Sequence[Sequence[int]] | None = None
    ) -> Recording | None:
        """As ``Recorder.join``."""
        return self._recorder.join(recordings, behind)

    def copies(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Recording:
        """Of ``sources`` to their places."""
        return self._once(lambda: copy_all(places, sources), "copy", *places, *sources)

    def add(self, place: torch.Tensor, term: torch.Tensor) -> Recording:
        """Of a term to the sum in its place."""

        def run() -> None:
            place.add_(term)

        return self._once(run, "sum", place, term)

    def copy_of_sum(self, place: torch.Tensor, terms: Sequence[torch.Tensor]) -> Recording:
        """Of the sum of ``terms``, one after the other."""

        def run() -> None:
            found = total(terms)
            if found is not None:
                place.copy_(found)

        return self._once(run, "copy of a sum", place, *terms)

    def _once(self, run: Callable[[], None], what: str, *tensors: torch.Tensor) -> Recording:
        """Record what is done with these tensors, once for all layers."""
        key = what, *[(each.data_ptr(), each.shape, each.dtype) for each in tensors]
        found = self._known.get(key)
        if found is None:
            with torch.no_grad():
                found = self._known[key] = self._recorder.record(run)
        return found
