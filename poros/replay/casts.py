"""Casts of a layer's adapters for its recordings, once for all micro-batches that are together.

Autocast multiplies in 16 bits, and adapters are float32. Micro-batches whose visits of a layer are
one behind the other read the same adapters, so what is recorded of a visit reads casts that were
made before the first of them. They lie in memory that all layers share: a recording that is not
right behind another one of its layer makes them anew.
"""

import math
from collections.abc import Sequence

import torch

from poros.host.layout import align
from poros.kernels.copies import copy_all
from poros.replay.graphs import Recorder, Recording, SharedMemory, Spec


class AdapterCasts:
    """Those that one recording reads.

    There may be one for each place of ``parameters``. ``memory`` has room for them before the
    recording begins: what is allocated within one may lie where others of its tensors were before,
    and they are made before all that is recorded.
    """

    def __init__(self, memory: SharedMemory, parameters: Sequence[torch.Tensor]) -> None:
        size = sum(align(each.numel() * each.element_size()) for each in parameters)
        self._fixed = memory.of("casts", [Spec(torch.Size([size]), torch.uint8)])
        self._left = self._fixed.tensors[0]
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.recordings: list[Recording] = []
        """Of the casts themselves, once they are recorded."""

    def places(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[torch.Tensor] | None:
        """Return fixed memory for the casts of the next node; None if there is not as much."""
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        if sum(map(align, sizes)) > self._left.numel():
            return None
        found = []
        for shape, size in zip(shapes, sizes, strict=True):
            found.append(self._left[:size].view(dtype).view(*shape))
            self._left = self._left[align(size) :]
        return found

    def add(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Have the second of each pair copied into the first before each replay."""
        self._pairs += [(place.detach(), source.detach()) for place, source in pairs]

    def record(self, recorder: Recorder) -> "AdapterCasts | None":
        """Record the casts themselves; None if there are none."""
        if not self._pairs:
            return None
        places, sources = zip(*self._pairs, strict=True)
        with torch.no_grad():
            self.recordings = [recorder.record(lambda: copy_all(places, sources))]
        return self

    def replay(self) -> None:
        """Make the casts, on the current stream."""
        for each in self.recordings:
            each.replay()
