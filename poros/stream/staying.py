"""A watch over what stays on the device: a layer's small tensors, and its frozen adapters.

Note: Edits of what stays
    Between steps they are nobody's business. A layer that is recomputed must find what its forward
    has seen, so a write, a cast or a replacement between a forward and its backward raises. And a
    layer whose own forward writes (a running statistic) would write twice; it is refused.
    bitsandbytes' cast of a bias to the dtype of its input is no such write: the recomputation finds
    the bias as the forward has left it, cast.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from poros.errors import PreparedModelError
from poros.io.digests import checksum
from poros.stream.adapters import AdapterPlace


class StayingState:
    """What a layer's staying tensors were at one moment. Keeps them alive, so that ids are theirs.

    Trained ones are left out: they are looked after as adapters are.

    Args:
        tensors: These, then those of frozen adapters.
        adapters: Places of the latter.

    Attributes:
        marks: What changes with an edit that PyTorch counts, one for each.
        values: A checksum of the frozen adapters; None if there are none.
    """

    __slots__ = ("_tensors", "adapters", "marks", "values")

    def __init__(
        self, tensors: Sequence[torch.Tensor | None], adapters: Sequence[AdapterPlace] = ()
    ) -> None:
        self._tensors = tensors
        self.adapters = adapters
        # Frozen adapters may be trained again by the time of the backward.
        first_adapter = len(tensors) - len(adapters)
        try:
            facts = zip(map(id, tensors), map(_POINTER, tensors), map(_FACTS, tensors), strict=True)
            self.marks: list[Any] = [
                None if is_trained and number < first_adapter else (*where, form)
                for number, (*where, (is_trained, *form)) in enumerate(facts)
            ]
        except (AttributeError, RuntimeError, TypeError):  # one is gone, or an inference tensor
            self.marks = [
                _mark(tensor, number < first_adapter) for number, tensor in enumerate(tensors)
            ]
        # PyTorch does not count every edit, and these are edited as training goes on.
        of_adapters = tensors[len(tensors) - len(adapters) :]
        found = [tensor for tensor in of_adapters if tensor is not None]
        self.values = checksum(found) if found else None

    def has_values_of(self, other: "StayingState") -> bool:
        """Whether frozen adapters hold the same in both; the host waits for the device."""
        if self.values is None or other.values is None:
            return self.values is other.values
        return self.values is other.values or torch.equal(self.values, other.values)


# Looked up in C: this runs twice at every visit.
_POINTER: Callable[[Any], int] = torch.Tensor.data_ptr
_FACTS = attrgetter("requires_grad", "_version", "dtype", "shape")


def _mark(tensor: torch.Tensor | None, is_of_base: bool) -> Any:
    if tensor is None or (is_of_base and tensor.requires_grad):
        return None
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr(), [version, tensor.dtype, tensor.shape]


class Staying:
    """The tensors of the base that one layer reads where they are.

    Args:
        layer: The layer's qualified name.
        places: Name below the layer, owner dictionary and key of each.
    """

    def __init__(self, layer: str, places: Sequence[tuple[str, dict[str, Any], str]]) -> None:
        self._layer = layer
        self.places = places
        self._owners = [owner for _, owner, _ in places]
        self._keys = [key for *_, key in places]

    def state(self, adapters: Sequence[AdapterPlace] = ()) -> StayingState:
        """What they are now, and what lies in the places of frozen ``adapters``."""
        tensors = list(map(dict.get, self._owners, self._keys))
        return StayingState(
            [*tensors, *(place.owner.get(place.key) for place in adapters)], adapters
        )

    def changed(self, before: StayingState) -> str | None:
        """The name of one that is not as it was ``before``."""
        now = self.state(before.adapters)
        if now.marks == before.marks:
            return None if now.has_values_of(before) else f"{self._layer}, a frozen adapter"
        names = [name for name, *_ in (*self.places, *before.adapters)]
        pairs = zip(names, before.marks, now.marks, strict=True)
        return next(f"{self._layer}.{name}" for name, old, new in pairs if old != new)

    def require_unwritten(self, before: StayingState) -> None:
        """Raise ``PreparedModelError`` if the layer's own forward has written or replaced one."""
        now = self.state()
        if now.marks == before.marks:
            return
        for (name, owner, key), old, new in zip(self.places, before.marks, now.marks, strict=True):
            if old == new or _is_cast_bias(owner, key, old, new):
                continue
            raise PreparedModelError(
                f"{self._layer}.{name}: expected the layer's forward to only read it, found it "
                "written or replaced (a counter, a running statistic?). Recomputing the layer "
                "would do so twice; call poros.restore(model) to train this model resident"
            )


def _is_cast_bias(owner: dict[str, Any], key: str, old: Any, new: Any) -> bool:
    """Whether the same object, never written, has another dtype: see "Edits of what stays"."""
    if key != "bias" or old is None or new is None or not isinstance(owner[key], nn.Parameter):
        return False
    before, _, (old_version, old_dtype, old_shape) = old
    after, _, (new_version, new_dtype, new_shape) = new
    return (
        before == after
        and old_version == new_version
        and old_dtype != new_dtype
        and old_shape == new_shape
    )
