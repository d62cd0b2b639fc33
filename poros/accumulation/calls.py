"""Whether calls of layers can go together with those of other micro-batches, and why not."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from poros.errors import UnsupportedModelError
from poros.kernels.forwards import has_hooks
from poros.replay.pending import OF_FORM
from poros.stream.args import PLAIN, is_empty_mapping, is_shared_mapping, recorded_outputs
from poros.stream.body import LayerBody
from poros.stream.settings import Surroundings

ADVICE = (
    "Call backward for each micro-batch, without poros.accumulate or block-major trainers, or "
    "report it: such a loss was not seen at the first micro-batch of its kind"
)


class NotGrouped(BaseException):
    """These micro-batches have to run one after the other; says why.

    Passes through code of users and of models, which catch errors at times: so it is none.
    """


Watchers = tuple[int, int, bool]


def watchers() -> Watchers:
    """How many modes see operators and functions, and whether somebody packs saved tensors."""
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
    )


class HiddenStates(torch.Tensor):
    """What a layer has returned, in the hands of the model's code, which passes it on.

    Any use of it but a look at its form is noted by ``used``.
    """

    used: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in OF_FORM:
            _note_uses(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class WithoutValues(HiddenStates):
    """The same of a layer that is yet to run: no operator may see it, by whatever way."""

    @staticmethod
    def like(
        shape: torch.Size, dtype: torch.dtype, device: torch.device, used: Callable[[], None]
    ) -> "WithoutValues":
        """One of that form; ``used`` raises."""
        made: WithoutValues = torch.Tensor._make_wrapper_subclass(
            WithoutValues, shape, dtype=dtype, device=device, requires_grad=True
        )
        made.used = used
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _note_uses(args, kwargs)
        raise UnsupportedModelError("expected hidden states that are passed on, found an operator")


def _note_uses(*arguments: Any) -> None:
    for each in pytree.tree_leaves(arguments):
        if isinstance(each, HiddenStates):
            each.used()


class Calls:
    """The calls of layers by one run of a model's code, each required to be as it must be.

    Each layer is called once, in order, with gradients enabled, and is handed the very tensor that
    the layer before it has returned, all in one state of autocast and of kernel choices; nothing
    that layers are given can be changed but by editing a tensor; nobody hooks into a layer, or
    watches operators.

    Args:
        looks_at_all: Whether autocast and settings are compared at each layer, and not as the first
            and the last one are called. Between them is code of libraries.

    Attributes:
        latest: What the layer before has returned.
        kind: Of the latest call: equal for those with the very same arguments but for the hidden
            states.
    """

    def __init__(
        self, layers: Sequence[LayerBody], around: Watchers, looks_at_all: bool = False
    ) -> None:
        self.num_calls = 0
        self._looks_at_all = looks_at_all
        self._layers = layers
        self._around = around
        self.kind = -1
        self._kinds: list[tuple[Any, ...]] = []
        self._surroundings: Surroundings | None = None
        self.latest: torch.Tensor | None = None
        self._given: dict[int, tuple[torch.Tensor, int]] = {}
        """What layers were given besides hidden states, and its version then, by its id."""
        self._mappings: dict[int, Any] = {}
        """Through which layers may share tensors, by id; empty."""

    def require(
        self, layer: LayerBody, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Its hidden states, of a call of ``layer``; raises ``NotGrouped`` if it is otherwise."""
        index, given = self.num_calls, input_of(args, kwargs)
        if index == len(self._layers):
            raise NotGrouped("the model runs more than once with gradients for one loss")
        if layer is not self._layers[index] or given is None:
            raise NotGrouped("the model does not call its layers once each, in order")
        if index == 0 and recorded_outputs():
            raise NotGrouped("outputs of layers are recorded")
        module = layer.module()
        if module is not None and has_hooks(module):
            raise NotGrouped("hooks on whole layers, or on all modules")
        if watchers() != self._around:
            raise NotGrouped("somebody watches operators or packs saved tensors within the loss")
        self._require_arguments(args, kwargs, given)
        if index and given is not self.latest:
            raise NotGrouped("the model computes with hidden states between its layers")
        if self._looks_at_all or index in (0, len(self._layers) - 1):
            surroundings = Surroundings.capture(layer.device)
            if index and surroundings != self._surroundings:
                raise NotGrouped("the model changes autocast or settings between its layers")
            self._surroundings = surroundings
        self.require_unedited()
        return given

    def require_unedited(self) -> None:
        """Raise ``NotGrouped`` if tensors were edited since layers were first given them."""
        if any(_version(each) != version for each, version in self._given.values()):
            raise NotGrouped("tensors that layers are given, edited in place behind a call")
        if not all(map(is_empty_mapping, self._mappings.values())):
            raise NotGrouped("layers share tensors")

    def note(self, handed: torch.Tensor | None) -> None:
        """The layer was called, and its caller is ``handed`` that."""
        self.num_calls += 1
        self.latest = handed

    def _require_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: torch.Tensor
    ) -> None:
        values = [_GIVEN if each is given else each for each in (*args, *kwargs.values())]
        objects = (len(args), *kwargs, *values)
        for kind, known in enumerate(self._kinds):  # hardly ever more than two
            if len(objects) == len(known) and all(map(is_, objects, known)):
                self.kind = kind
                return
        tensors = list(tensors_of(tuple(values)))
        if any(isinstance(each, HiddenStates) for each in tensors):
            raise NotGrouped("layers are given what other layers than the latest have returned")
        if any(each.requires_grad for each in tensors):
            raise NotGrouped("layers are given other tensors that need gradients")
        self._mappings |= {id(each): each for each in values if is_shared_mapping(each)}
        if not all(_is_fixed(each) or is_shared_mapping(each) for each in values):
            raise NotGrouped("layers are given objects that may change")
        self.kind = len(self._kinds)
        self._kinds.append(objects)
        for each in tensors:
            self._given.setdefault(id(each), (each, _version(each)))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_GIVEN = "hidden states"


def _is_fixed(value: Any) -> bool:
    """Whether nobody can change ``value``, but for what tensors in it hold, or it is not read."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (torch.Tensor, Cache, *PLAIN))


def require_hidden_states(result: Any) -> torch.Tensor:
    """The ``result`` of a layer; raises ``NotGrouped`` if it has returned more than a tensor."""
    if not isinstance(result, torch.Tensor):
        raise NotGrouped("layers return more than hidden states")
    return result


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


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Hashable:
    """Equal for calls of the first layer by micro-batches that draw alike."""
    tensors = tensors_of((*args, *kwargs.values()))
    is_autocast = torch.is_autocast_enabled(device.type)
    return tuple((each.shape, each.dtype) for each in tensors), is_autocast
