"""What is small stays on the device: one buffer per layer, and a watch for edits.

A norm, a bias or a buffer keeps its place, its object and its name in the model. Only its bytes
move, into a buffer that all small tensors of a layer share; from then on it is an ordinary tensor
of the device, which its owner may edit, cast, replace or train as in a resident model.

Each has a storage of its own over the buffer's memory, so that no saver takes two neighbours for
one shared tensor.

Note: Edits of what stays
    Between steps they are nobody's business. A layer that is recomputed must find what its forward
    has seen, so a write, a cast or a replacement between a forward and its backward raises. And a
    layer whose own forward writes (a running statistic) would write twice; it is refused.
    bitsandbytes' cast of a bias to the dtype of its input is no such write: the recomputation finds
    the bias as the forward has left it, cast.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from poros.digests import checksum, digest
from poros.errors import PreparedModelError
from poros.layout import BlockLayout, TensorSpec
from poros.nf4 import Part
from poros.stream.adapters import AdapterPlace
from poros.stream.frozen import FrozenTensor, constant_parts


class SmallTensors:
    """Device copies of the small tensors of all layers. Nothing of the model is changed.

    Args:
        layers: For each layer the frozen tensors that stay, and those that stream: the nested
            absmax of these stay.
        device: Where.
        digests: Whether to compare a digest of each with that of its source.

    Attributes:
        moves: What stays, with its new bytes.
        nested: Device copies of nested absmax, by the name of the part.
        damaged: For each layer the names of tensors that have not arrived as they were.

    Raises:
        torch.OutOfMemoryError: If the device has no room for them.
    """

    def __init__(
        self,
        layers: Iterable[tuple[Sequence[FrozenTensor], Sequence[FrozenTensor]]],
        device: torch.device,
        digests: bool = False,
    ) -> None:
        self.moves: list[tuple[Part, torch.Tensor]] = []
        self.nested: dict[str, torch.Tensor] = {}
        self.damaged: list[list[str]] = []
        self._buffers: list[torch.Tensor] = []
        for staying, streamed in layers:
            parts = small_parts(staying, streamed)
            layout = BlockLayout.pack((part.name, part.get()) for part in parts)
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
            self._buffers.append(buffer)
            damaged: list[str] = []
            self.damaged.append(damaged)
            for part, spec in zip(parts, layout.tensors, strict=True):
                copy = _own_view(buffer, spec)
                source = part.get()
                before = digest(source.cpu().contiguous()) if digests else b""
                with torch.no_grad():
                    copy.copy_(source)
                if digests and digest(copy.cpu()) != before:
                    damaged.append(part.name)
                if part.attribute == "data":
                    self.moves.append((part, copy))
                else:
                    self.nested[part.name] = copy

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in one of the buffers."""
        place = tensor.data_ptr()
        return any(
            buffer.device == tensor.device
            and buffer.data_ptr() <= place < buffer.data_ptr() + max(buffer.numel(), 1)
            for buffer in self._buffers
        )

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)


def small_parts(staying: Sequence[FrozenTensor], streamed: Sequence[FrozenTensor]) -> list[Part]:
    """What of a layer lies in its buffer: tensors that stay, then constants of 4-bit weights."""
    parts = [part for tensor in staying for part in tensor.parts()]
    for tensor in streamed:
        if tensor.is_4bit:
            constants = constant_parts(tensor.name, tensor.tensor)
            parts += [part for part in constants if part.attribute == "absmax"]
    return parts


def _own_view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor over part of ``buffer``, with a storage of its own that keeps the memory alive."""
    if not spec.num_bytes:
        return torch.empty(spec.shape, dtype=spec.dtype, device=buffer.device)
    flat = buffer[spec.offset : spec.offset + spec.num_bytes]
    own: torch.Tensor = from_dlpack(flat)
    return own.view(spec.dtype).view(spec.shape)


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
        self._places = places
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
        names = [name for name, *_ in (*self._places, *before.adapters)]
        pairs = zip(names, before.marks, now.marks, strict=True)
        return next(f"{self._layer}.{name}" for name, old, new in pairs if old != new)

    def require_unwritten(self, before: StayingState) -> None:
        """Raise ``PreparedModelError`` if the layer's own forward has written or replaced one."""
        now = self.state()
        if now.marks == before.marks:
            return
        for (name, owner, key), old, new in zip(self._places, before.marks, now.marks, strict=True):
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
