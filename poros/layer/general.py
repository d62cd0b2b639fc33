"""A layer whose graph stays, without the tensors in it: backward recomputes them.

The forward of a layer runs as it would in a resident model, in the same autograd graph. Only what
the operators of the layer save for their backward is left away, as in non-reentrant activation
checkpointing (Chen et al. 2016; ``torch.utils.checkpoint``). The first operator that asks for a
saved tensor has the layer recomputed: its block is brought back, random states, autocast, training
flags and the settings that pick kernels are those of the forward, and what the operators save the
second time is handed to the first graph, in the same order. So the order of gradients, their sums,
shared casts, hooks and side channels are autograd's own.

A saved tensor that lies in a slot is kept as the block and the view of the slot. Whoever asks for
it has the block acquired first, so that an operator may run whenever autograd wants it to.

Nothing is stopped early: hooks on modules inside a layer run twice per step, once in the forward
and once in the recomputation, and the random states behind both are compared.
"""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn
from weakref import WeakMethod, ref

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from poros.errors import RematerializationError, UnsupportedModelError
from poros.kernels.adapters import note_last
from poros.kernels.autocast import cached_cast
from poros.kernels.unformed import forget, values_of
from poros.layer.args import PLAIN
from poros.layer.body import LayerBody
from poros.layer.casts import require_current
from poros.layer.condition import Condition
from poros.layer.layer_index import Adapter
from poros.layer.rng import RngStash
from poros.layer.state import AmbientState
from poros.layer.unchanged import require_unchanged
from poros.slots.schedule import Phase

_Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class _Saved:
    """Stands in the graph for the saved tensor of this number."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class _InSlot(NamedTuple):
    """Stands in the graph for a saved tensor that lies in a slot."""

    tensor: torch.Tensor


class RecomputedCall:
    """One call of one layer, from its forward until its graph is gone.

    Args:
        layer: The layer.
        args: Its arguments; mutable ones are copied, and the layer gets the copies' originals.
        kwargs: Likewise.
        condition: What decides what it computes, as it is now.
        adapters: Places whose stand-ins are to be there instead of the parameters.

    Raises:
        UnsupportedModelError: If an argument may be written to by the side.
    """

    def __init__(
        self,
        layer: LayerBody,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        condition: Condition,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.layer = layer
        self._adapters = adapters
        self._condition = condition
        self._module = layer.module()  # lives as long as its graph, as the parameters do
        self._args = tuple(
            _copied(value, f"argument {index} of {layer.name}") for index, value in enumerate(args)
        )
        self._kwargs = {
            key: _copied(value, f"argument {key!r} of {layer.name}")
            for key, value in kwargs.items()
        }
        self._ambient = AmbientState.capture(layer.device, condition.training)
        self._saved: list[ref[_Saved]] = []
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._task: int | None = None
        self._values: dict[int, tuple[torch.Tensor, int]] = {}
        self._through: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The layer's result, in the caller's graph.

        Args:
            args: The arguments that ``self`` was made of.
            kwargs: Likewise.

        Streams:
            As ``LayerBody.visit``.

        Raises:
            RematerializationError: If the layer edits its arguments or its adapters in place.
        """
        layer, contents = self.layer, self._condition.contents
        self._offloaded = layer.offload(args[0]) if args and _is_tensor(args[0]) else None
        if self._offloaded is not None:
            self._args = (None, *self._args[1:])
        self._given = [
            each for each in tree_leaves((self._args, _plain(self._kwargs))) if _is_tensor(each)
        ]
        self._versions = _versions(self._given)
        first = torch._C._autograd._get_sequence_nr()
        with (
            layer.visit(Phase.FORWARD, self._adapters) as slot,
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
        ):
            self._memory = slot.untyped_storage().data_ptr()
            result = layer.run(args, kwargs)
        if self._versions != _versions(self._given):
            raise RematerializationError(
                f"{layer.name}: expected its arguments to be left alone, found one edited in "
                "place by the layer itself; the recomputation would edit it again"
            )
        self._condition.require_adapters_unedited(layer.name)
        # What the layer has changed now it will change again.
        contents.attributes.disregard(self._condition.attributes)
        contents.note_names()
        self._rng_end = RngStash.capture(layer.device)
        # Now, not before: bitsandbytes casts a bias for good at its first use.
        self._staying = layer.staying(self._condition.frozen)
        outputs = [each for each in tree_leaves(result) if _is_tensor(each) and each.requires_grad]
        note_last(outputs)
        begin, acquire = _weakly(self._begin), partial(layer.weights.lease, Phase.BACKWARD)
        for output in outputs:
            output.grad_fn.register_prehook(begin)
        readers, casts = _walk(outputs, first, self._memory)
        for node in readers:
            node.register_prehook(lambda _: acquire())
        reused = [
            (cast, parameter) for parameter in casts if (cast := cached_cast(parameter)) is not None
        ]
        require_current(layer.name, [(cast.detach(), now.detach()) for cast, now in reused])
        return result

    def _begin(self, _: object) -> None:
        """The backward begins: hooks on what the layer gave have run, those inside have not."""
        task = torch._C._current_graph_task_id()
        if task != self._task and not torch.is_grad_enabled():
            self._values = {}
            self._values = self._recompute()
            self._task = task

    def _pack(self, tensor: torch.Tensor) -> Any:
        if _lies_in(tensor, self._memory):
            return _InSlot(tensor.detach() if tensor.requires_grad else tensor)
        saved = _Saved(len(self._saved))
        self._saved.append(ref(saved))
        self._forms.append((tensor.shape, tensor.dtype))
        return saved

    def _unpack(self, kept: Any) -> torch.Tensor:
        task = torch._C._current_graph_task_id()
        if torch.is_grad_enabled() and task >= 0:
            raise RematerializationError(
                f"{self.layer.name}: expected a backward without create_graph, found one that asks "
                "for gradients of gradients, which recomputation does not give"
            )
        if isinstance(kept, _InSlot):
            self.layer.weights.lease(Phase.BACKWARD)
            return self._as_user_keeps(kept.tensor)
        if task != self._task or kept.number not in self._values:
            self._values = {}
            self._values = self._recompute()
            self._task = task
        tensor, version = self._values.pop(kept.number)
        if _versions([tensor]) != [version]:
            raise RematerializationError(
                f"{self.layer.name}: expected a layer to leave alone what its backward needs, "
                f"found a tensor of shape {tuple(tensor.shape)} written to in place after an "
                "operator had saved it; autograd refuses that in a resident model. Write to a copy"
            )
        return self._as_user_keeps(tensor)

    def _as_user_keeps(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the saved-tensor hooks around the forward make of ``tensor``, if there are any."""
        if self._through is None:
            return tensor
        pack, unpack = self._through
        kept: torch.Tensor = unpack(pack(tensor))
        return kept

    def _recompute(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Run the layer once more; what its operators save, by number, and its version then."""
        layer, contents = self.layer, self._condition.contents
        require_unchanged(layer, self._condition, self._staying)
        if self._versions != _versions(self._given):
            raise RematerializationError(
                f"{layer.name}: its input or another tensor it was given was edited in place "
                "between forward and backward, so the forward cannot be recomputed; edit it after "
                "backward"
            )
        values: dict[int, tuple[torch.Tensor, int]] = {}
        forms: list[tuple[torch.Size, torch.dtype]] = []

        def store(tensor: torch.Tensor) -> None:
            tensor = values_of(tensor)
            if _lies_in(tensor, self._memory):
                return
            number = len(forms)
            forms.append((tensor.shape, tensor.dtype))
            if number < len(self._saved) and self._saved[number]() is not None:
                values[number] = (tensor.detach(), *_versions([tensor]))

        args = self._args
        if self._offloaded is not None:
            args = (self._offloaded.fetch(), *args[1:])
        args, kwargs = _fresh(args), _fresh(self._kwargs)
        tally = layer.context.tally
        is_unwatched = not (self._condition.has_hooks or layer.is_compiled)
        try:
            if tally is not None:
                # A mode that sees operators would see tensors without values.
                tally.begin(is_unwatched and not torch._C._len_torch_dispatch_stack())
            with (
                layer.context.watching_graph() or nullcontext(),
                layer.visit(Phase.BACKWARD, self._adapters),
                self._ambient.replay(contents.modules()),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(store, _refuse_backward),
            ):
                result = layer.run(args, kwargs)
                ends_alike = self._rng_end.equals(RngStash.capture(layer.device))
            if tally is not None:
                tally.settle()
        finally:
            if tally is not None:
                tally.end()
        forget(tree_leaves(result))
        if not ends_alike:
            raise RematerializationError(
                f"{layer.name}: the recomputation drew other random numbers than the forward; "
                "the layer draws depending on state that is not its input"
            )
        if forms != self._forms:
            raise RematerializationError(
                f"{layer.name}: expected the recomputation to save the tensors that the forward "
                f"saved, found {_first_difference(self._forms, forms)}; the layer depends on state "
                "that is not its input"
            )
        # What hooks write down in it meanwhile belongs to the layer, as in its forward.
        noted = partial(contents.attributes.disregard, self._condition.attributes)
        layer.weights.lease(Phase.BACKWARD, noted if self._condition.hooks else None)
        return values


def _walk(outputs: Sequence[torch.Tensor], first: int, memory: int) -> tuple[list[Any], list[Any]]:
    """The nodes of a layer that keep a tensor of its slot as they like; parameters cast before.

    The former are of functions in Python, such as bitsandbytes' 4-bit matmul; of the latter it uses
    a cast of autocast's, or somebody's, from before it was called.

    Args:
        outputs: Of a layer, with their graph.
        first: Nodes below this number are not of the layer.
        memory: Address of the slot.
    """
    readers, casts, seen = [], [], set()
    queue: list[Any] = [output.grad_fn for output in outputs]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < first:
            if node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
                casts.append(node.next_functions[0][0].variable)
            continue
        queue += [following for following, _ in node.next_functions]
        if isinstance(node, BackwardCFunction) and _holds(node, memory):
            readers.append(node)
    return readers, casts


def _holds(node: Any, memory: int) -> bool:
    """Whether an attribute of the node, or a part of one, is a tensor of the slot."""
    for held in vars(node).values():
        for each in held if type(held) in (tuple, list) else (held,):
            if _is_tensor(each) and _lies_in(each, memory):
                return True
    return False


def _weakly(method: Any) -> Callable[[Any], None]:
    """``method``, as long as its object lives."""
    found = WeakMethod(method)

    def call(argument: Any) -> None:
        living = found()
        if living is not None:
            living(argument)

    return call


def _refuse_backward(_: object) -> NoReturn:
    raise RematerializationError(
        "expected no backward inside a layer's forward, found one while it was recomputed (a hook?)"
    )


def _first_difference(expected: Sequence[Any], found: Sequence[Any]) -> str:
    for number, (old, new) in enumerate(zip(expected, found, strict=False)):
        if old != new:
            return (
                f"tensor {number} of {tuple(new[0])}, {new[1]} instead of {tuple(old[0])}, {old[1]}"
            )
    return f"{len(found)} tensors instead of {len(expected)}"


def _lies_in(tensor: torch.Tensor, memory: int) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() == memory


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _copied(value: Any, where: str) -> Any:
    """``value`` with lists and mappings of its own, over the same tensors."""
    if isinstance(value, (torch.Tensor, *PLAIN)):
        return value
    if isinstance(value, tuple | list):
        parts = [_copied(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is dict or _is_shared_mapping(value):
        return type(value)({key: _copied(each, f"{where}[{key!r}]") for key, each in value.items()})
    raise UnsupportedModelError(
        f"{where}: expected tensors, tuples, lists and dictionaries of them or plain values, found "
        f"a {type(value).__qualname__}. What a layer writes to such an object by the side it would "
        "write twice, so streaming it is refused"
    )


def _fresh(value: Any) -> Any:
    return _copied(value, "")


def _plain(value: Any) -> Any:
    """``value`` with dictionaries instead of mappings that pytrees do not know."""
    if isinstance(value, UserDict | dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _is_shared_mapping(value: Any) -> bool:
    """A mapping of tensors and nothing else; of other classes what a copy would lose is unknown."""
    modules = ("collections", "transformers.cache_utils")
    return isinstance(value, UserDict) and type(value).__module__ in modules
