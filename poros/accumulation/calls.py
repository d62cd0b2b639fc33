"""Whether calls of layers can go together with those of other micro-batches, and why not."""

from collections.abc import Hashable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from transformers.cache_utils import Cache

from poros.kernels.forwards import has_hooks
from poros.stream.args import PLAIN, is_shared_mapping, recorded_outputs
from poros.stream.body import LayerBody

ADVICE = (
    "Call backward for each micro-batch, without poros.accumulate or block-major trainers, or "
    "report it: such a loss was not seen at the first micro-batch of its kind"
)
_MOST_NODES = 64
"""Of autograd, between two layers."""


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


class Calls:
    """The calls of layers by one run of a model's code, each required to be as it must be.

    Each layer is called once, in order, with gradients enabled, and is handed what the layer before
    it has returned, or what was computed from that alone; nothing that layers are given can be
    changed but by editing a tensor; nobody hooks into a layer, or watches operators.

    Args:
        layers: Of the model, in order.
        around: The watchers around all micro-batches.

    Attributes:
        num_calls: So far.
        behind: The node of what the layer before has returned.
    """

    def __init__(self, layers: Sequence[LayerBody], around: Watchers) -> None:
        self.num_calls = 0
        self._layers = layers
        self._around = around
        self._objects: tuple[Any, ...] = ()
        self.behind: Any = None

    def require(
        self, layer: LayerBody, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Its hidden states, of a call of ``layer``.

        Raises:
            NotGrouped: If it is not as it must be.
        """
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
        if index and not _leads_only_to(given.grad_fn, self.behind):
            raise NotGrouped("the model computes hidden states from others than the latest")
        return given

    def note(self, result: Any) -> None:
        """The layer has returned this.

        Raises:
            NotGrouped: If it has returned more than hidden states.
        """
        if not isinstance(result, torch.Tensor):
            raise NotGrouped("layers return more than hidden states")
        self.num_calls += 1
        self.behind = result.grad_fn

    def _require_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: torch.Tensor
    ) -> None:
        values = [None if each is given else each for each in (*args, *kwargs.values())]
        objects = (len(args), *kwargs, *values)
        if len(objects) == len(self._objects) and all(map(is_, objects, self._objects)):
            return  # most layers are given the same objects as the one before
        if any(each.requires_grad for each in tensors_of(tuple(values))):
            raise NotGrouped("layers are given other tensors that need gradients")
        if any(map(is_shared_mapping, values)):
            raise NotGrouped("layers share tensors")
        if not all(map(_is_fixed, values)):
            raise NotGrouped("layers are given objects that may change")
        self._objects = objects


def _is_fixed(value: Any) -> bool:
    """Whether nobody can change ``value``, but for what tensors in it hold, or it is not read."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (torch.Tensor, Cache, *PLAIN))


def _leads_only_to(node: Any, target: Any) -> bool:
    """Whether the graph from ``node`` on consists of few nodes, and ends at ``target`` alone."""
    todo, seen = [node], set[Any]()
    while todo:
        each = todo.pop()
        if each is None or each is target or each in seen:
            continue
        if hasattr(each, "variable") or len(seen) == _MOST_NODES:
            return False
        seen.add(each)
        todo += [following for following, _ in each.next_functions]
    return True


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
