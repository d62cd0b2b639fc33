"""What is called in place of layers while the code of a loss runs for a micro-batch."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as all_modules

from poros.accumulation.calls import Call
from poros.accumulation.cuts import Unread
from poros.accumulation.reasons import OTHER_VALUES, NotGrouped
from poros.errors import UnsupportedModelError

if TYPE_CHECKING:
    from poros.accumulation.micro_batch import MicroBatch
    from poros.stream.boundary import StreamedLayer

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The hidden states that a layer is called with."""
    value = args[0] if args else kwargs.get("hidden_states")
    return value if isinstance(value, torch.Tensor) else None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """In an argument of a layer; what else it may hold is refused when the layer runs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors_of(each)


def require_unheard(layer: "StreamedLayer") -> None:
    """Raise ``NotGrouped`` if somebody listens at the layer's own door."""
    own = vars(layer.module())
    if any(map(own.get, _HOOKS)) or any(map(vars(all_modules).get, _GLOBAL_HOOKS)):
        raise NotGrouped("hooks on whole layers, or on all modules")


@contextmanager
def watching(layers: Sequence["StreamedLayer"], watcher: "Collector | Passer") -> Iterator[None]:
    """Have ``watcher`` called in place of layers. It is held here alone: with this it goes."""
    context = layers[0].context
    if context.in_place is not None and context.in_place() is not None:
        raise NotGrouped("micro-batches within micro-batches")
    context.in_place = weakref.ref(watcher)
    try:
        yield
    finally:
        context.in_place = None


class Collector:
    """Notes what layers are called with; see ``MicroBatch.note``."""

    begins = True

    def __init__(self, micro_batch: "MicroBatch") -> None:
        self.micro_batch = micro_batch
        self.reason: NotGrouped | None = None
        """Kept, because code of users may catch it."""

    def call(self, layer: "StreamedLayer", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.micro_batch.note(layer, args, kwargs)
        except NotGrouped as reason:
            self.reason = reason
            raise


class Passer:
    """Passes layers by, with what they were called with compared; see ``MicroBatch.hand_on``."""

    begins = False

    def __init__(
        self, micro_batch: "MicroBatch", *, is_ahead: bool = False, is_known: bool = True
    ) -> None:
        self.micro_batch = micro_batch
        self._is_ahead = is_ahead
        self._is_known = is_known
        self._given: list[torch.Tensor] = []
        self.place = 0
        self.reason: NotGrouped | UnsupportedModelError | None = None
        """Kept, because code of users may catch it."""

    def call(self, layer: "StreamedLayer", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer.drop_caches(args, kwargs)
        batch, place = self.micro_batch, self.place
        try:
            given = input_of(args, kwargs)
            plain = Call.of(args, kwargs, given).without_tensors()
            if place < batch.num_layers and not plain.is_like(batch.plain[place]):
                raise UnsupportedModelError(OTHER_VALUES)
            for value in (*args, *kwargs.values()):
                for each in tensors_of(value):
                    if not isinstance(each, Unread):
                        self._given.append(each)
            if place == batch.num_layers - 1:
                batch.compare(self._given, self._is_known)
            found = batch.hand_on(place, layer, given, self._is_ahead)
        except (NotGrouped, UnsupportedModelError) as reason:
            self.reason = reason
            raise
        self.place += 1
        return found
