"""Calls of layers by the code of a loss, which goes on as if they were made; and why it may not.

What a layer is called with and in is noted, as far as two runs of the same code can be compared by
it. In place of hidden states that are not there yet the code gets what nobody may compute with.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from poros.errors import UnsupportedModelError
from poros.kernels.hooks import has_hooks
from poros.stream.args import PLAIN
from poros.stream.body import LayerBody
from poros.stream.state import Surroundings
from poros.stream.within import Within

OTHER_VALUES = (
    "expected a loss that calls the model with the same values each time it is computed for a "
    "micro-batch, found others (a loss that draws from a generator of its own, that takes the next "
    "batch by itself, or a trainer that gives the model other batches than it was handed?). Call "
    "backward for each micro-batch, without poros.accumulate or block-major trainers"
)


class NotGrouped(BaseException):
    """These micro-batches have to run one after the other; says why.

    Passes through code of users and of models, which catch errors at times: so it is none.

    Attributes:
        may_pass: Whether later ones may well go together.
    """

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


class Stopped(BaseException):
    """Raised to stop the model's code at the last layer, or at the loss."""


INPUT = object()
"""Stands for the layer's input among its arguments."""
_TENSOR = object()


class Call(NamedTuple):
    """What a layer is called with, its input left out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], given: object) -> "Call":
        """Of a call with the input ``given``."""
        return cls(
            tuple(INPUT if value is given else value for value in args),
            {key: INPUT if value is given else value for key, value in kwargs.items()},
        )

    def is_like(self, other: "Call") -> bool:
        """Whether both are given equal plain values, and the same objects otherwise."""
        return (
            self.kwargs.keys() == other.kwargs.keys()
            and _same(self.args, other.args)
            and all(_same(value, other.kwargs[key]) for key, value in self.kwargs.items())
        )

    def without_tensors(self) -> "Call":
        """The same, with a mark in the place of each tensor and of each empty KV cache."""
        return Call(
            tuple(map(_marked, self.args)),
            {key: _marked(value) for key, value in self.kwargs.items()},
        )


class NotedCall(NamedTuple):
    """A call of a layer by code that runs more than once, as far as two runs are compared by it."""

    call: Call
    plain: Call
    """The same without tensors."""
    tensors: list[torch.Tensor]
    """All of them, but for what stands for hidden states."""
    objects: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: object,
        before: "NotedCall | None",
    ) -> "NotedCall":
        """Of a call with the input ``given``.

        Args:
            args: Its arguments.
            kwargs: Likewise.
            given: Its hidden states.
            before: The call of the layer before; returned if this one is given the same objects, as
                most are.
        """
        values = [INPUT if each is given else each for each in (*args, *kwargs.values())]
        objects = (type(given), len(args), *kwargs, *values)
        known = () if before is None else before.objects
        if before is not None and len(objects) == len(known) and all(map(is_, objects, known)):
            return before
        call = Call.of(args, kwargs, given)
        tensors = tensors_of((*args, *kwargs.values()))
        read = [each for each in tensors if not isinstance(each, Unread)]
        return cls(call, call.without_tensors(), read, objects)


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    # 0.0 equals -0.0, and a NaN not itself.
    return type(left) in PLAIN and repr(left) == repr(right)


def _marked(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TENSOR
    if isinstance(value, Cache):  # a new one in each run, which stays empty
        return type(value)
    return tuple(map(_marked, value)) if isinstance(value, tuple) else value


def is_fixed(value: Any) -> bool:
    """Whether nobody can change ``value``, but for what tensors in it hold, or it is not read."""
    if isinstance(value, tuple):
        return all(map(is_fixed, value))
    return value is INPUT or isinstance(value, (torch.Tensor, Cache, *PLAIN))


class Environment(NamedTuple):
    """What is around a call of code, at one time."""

    surroundings: Surroundings
    has_cache: bool
    """Whether autocast keeps what it has cast."""
    watchers: tuple[int, int, bool]
    """How many modes see operators and functions, and whether somebody packs saved tensors."""

    @classmethod
    def capture(cls, device: torch.device) -> "Environment":
        """That of now, for work on ``device``."""
        watchers = (
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
            torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        )
        return cls(Surroundings.capture(device), torch.is_autocast_cache_enabled(), watchers)

    def entering(self, now: "Environment") -> Callable[[], AbstractContextManager[object]]:
        """What has the body in this, where ``now`` is around; watchers left out.

        Each body is an autocast region of its own, if there is none around.
        """
        if self[:2] == now[:2]:
            return nullcontext

        def fill(stack: ExitStack) -> None:
            self.surroundings.enter(stack, self.has_cache)

        return lambda: Within(fill)


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


def require_unheard(layer: LayerBody) -> None:
    """Raise ``NotGrouped`` if somebody listens at the layer's own door."""
    module = layer.module()
    if module is not None and has_hooks(module):
        raise NotGrouped("hooks on whole layers, or on all modules")


class Watcher:
    """What is called in place of layers while the code of a loss runs for a micro-batch.

    Args:
        micro_batch: It runs for.
        take: Takes the number of a call among those of one run, the layer and its arguments; gives
            the layer's result.
        begins: Whether the model makes room for the micro-batch.
        enter_model: Called as the model's own code begins.

    Attributes:
        micro_batch, begins, enter_model: Likewise.
        num_calls: So far.
        reason: What a call has raised; kept, because code of users may catch it.
    """

    def __init__(
        self,
        micro_batch: Any,
        take: Callable[[int, LayerBody, tuple[Any, ...], dict[str, Any]], Any],
        *,
        begins: bool,
        enter_model: Callable[[], None],
    ) -> None:
        self.micro_batch = micro_batch
        self.begins = begins
        self.enter_model = enter_model
        self.num_calls = 0
        self.reason: NotGrouped | UnsupportedModelError | None = None
        self._take = take

    def call(self, layer: LayerBody, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of the forward of a layer."""
        try:
            found = self._take(self.num_calls, layer, args, kwargs)
        except (NotGrouped, UnsupportedModelError) as reason:
            self.reason = reason
            raise
        self.num_calls += 1
        return found


@contextmanager
def watching(layers: Sequence[LayerBody], watcher: Watcher) -> Iterator[None]:
    """Have ``watcher`` called in place of layers. It is held here alone: with this it goes."""
    context = layers[0].context
    if context.in_place is not None and context.in_place() is not None:
        raise NotGrouped("micro-batches within micro-batches")
    context.in_place = weakref.ref(watcher)
    try:
        yield
    finally:
        context.in_place = None


class Unread(torch.Tensor):
    """Stands for what a layer would return, until it has: nobody may compute with it."""

    owner: Callable[[], Any]

    @classmethod
    def of(cls, tensor: torch.Tensor, owner: Any) -> "Unread":
        found: Unread = tensor.detach().as_subclass(cls)
        found.owner = weakref.ref(owner)
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FORMS or func in _ACCESSORS:
            return super().__torch_function__(func, types, args, kwargs)
        owners = [each.owner() for each in args if isinstance(each, Unread)]
        if any(owner is not None and owner.is_watched for owner in owners):
            raise NotGrouped("the model does something to hidden states between its layers")
        raise UnsupportedModelError(
            "expected hidden states to pass from layer to layer, found some that were kept, of "
            "micro-batches that went through the layers together. Call backward for each "
            "micro-batch, without poros.accumulate or block-major trainers"
        )


_FORMS = frozenset({torch.Tensor.size, torch.Tensor.dim, torch.Tensor.__len__})
_ACCESSORS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_leaf",
        "layout",
        "_version",
    )
)
