"""Casts of a layer's adapters for its recordings, once for all micro-batches that are together.

Autocast multiplies in 16 bits, and adapters are float32. Micro-batches whose visits of a layer are
one behind the other read the same adapters, so what is recorded of a visit reads casts that were
made before the first of them. They lie in memory that all layers share: a recording that is not
right behind another one of its layer makes them anew.
"""

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from poros.kernels.copies import copy_all
from poros.replay.graphs import Fixed, Recorder, Recording, SharedMemory, Spec


class AdapterCasts:
    """Those that one recording reads: see ``poros.kernels.grouped.Casts``.

    Args:
        memory: Has their places.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._fixed: list[Fixed] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._recording: Recording | None = None

    def places(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return fixed memory for the casts of the next node."""
        specs = [Spec(torch.Size(shape), dtype) for shape in shapes]
        with _disable_current_modes():  # it is no temporary tensor of what is recorded
            self._fixed.append(self._memory.of(f"casts of node {len(self._fixed)}", specs))
        return self._fixed[-1].tensors

    def add(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Have the second of each pair copied into the first before each replay."""
        self._pairs += [(place.detach(), source.detach()) for place, source in pairs]

    def record(self, recorder: Recorder) -> "AdapterCasts | None":
        """Record the casts themselves; None if there are none."""
        if not self._pairs:
            return None
        places, sources = zip(*self._pairs, strict=True)
        with torch.no_grad():
            self._recording = recorder.record(lambda: copy_all(places, sources))
        return self

    def replay(self) -> None:
        """Make the casts, on the current stream."""
        if self._recording is not None:
            self._recording.replay()
