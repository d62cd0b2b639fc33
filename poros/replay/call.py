"""One call of one layer that is replayed: its arguments taken apart, and the state around it.

Between its forward and its backward, adapters that act and tensors must not change: neither the
layer's nor those it was given. What else changes (an attribute, a module that is replaced) raises
the errors of ``poros.stream.condition`` and ``poros.stream.settings`` if the layer is recomputed by
its own code. A recording does what it did at the forward, like a graph that was kept.

Its arguments and results are taken apart into tensors and a template, since a recording is made of
one call and replayed for others. ``CallFacts`` is what is known of such calls once one has run, and
makes such a call again for those that record it: its tensors lie elsewhere then.

An edit that PyTorch does not count (a fused optimizer's step, a write through ``.data``) between a
forward and its backward is seen in frozen adapters alone, by their values; of what is trained, or
stays on the device, it is not seen, here or by autograd.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.errors import RematerializationError, UnsupportedModelError
from poros.kernels.adapters import recomputing
from poros.kernels.lazy_tensor import forget
from poros.replay.graphs import Spec
from poros.replay.routing import Gradients, differentiate
from poros.replay.uses import Around, Uses
from poros.stream.adapters import proxy_leaves
from poros.stream.args import (
    PLAIN,
    RESULTS,
    as_result,
    is_empty_mapping,
    is_shared_mapping,
    like,
    recorded_outputs,
)
from poros.stream.body import Call, LayerBody
from poros.stream.condition import Condition
from poros.stream.context import Kind
from poros.stream.namespaces import OF_MODULES, bound, contents_of
from poros.stream.offload import OffloadedInput
from poros.stream.rng import RngStash
from poros.stream.within import Within

LEAVES = "it leaves values in its modules, or for other layers"


class LeafSpec(NamedTuple):
    """Stands for tensor number ``number`` in a template."""

    number: int


class EmptySpec(NamedTuple):
    """Stands for a mapping through which layers may share tensors, and in which none are."""

    kind: type


def tree_flatten(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """``value`` with each distinct tensor moved to ``tensors`` and its place left behind.

    Raises:
        UnsupportedModelError: If there is more than tensors in tuples and plain values.
    """
    if isinstance(value, torch.Tensor):
        for number, known in enumerate(tensors):
            if known is value:
                return LeafSpec(number)
        tensors.append(value)
        return LeafSpec(len(tensors) - 1)
    if isinstance(value, tuple):
        return like(
            value, [tree_flatten(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        )
    if isinstance(value, PLAIN):
        return value
    raise UnsupportedModelError(
        f"{where}: expected tensors, tuples of them or plain values, found a "
        f"{type(value).__qualname__}. What a layer reads from or writes to such an object by the "
        "side would be lost when it is recomputed, so streaming it is refused"
    )


def tree_unflatten(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that ``template`` was made of, with ``tensors`` in the places."""
    if isinstance(template, LeafSpec):
        return tensors[template.number]
    if isinstance(template, EmptySpec):
        return template.kind()
    if isinstance(template, tuple):
        return like(template, [tree_unflatten(item, tensors) for item in template])
    return template


NUM_OF_FORM = 4
"""Of a tensor: shape, strides, dtype and device; what follows is of its graph."""


class LayerCall(Call):
    """One call of one layer: its arguments taken apart, and the state around it.

    Attributes:
        tensors: Distinct tensors among the arguments. Empty once autograd keeps them.
        others: These but for the first.
        mappings: Through which layers share tensors, until it has run.
        offloaded: The first of them, if it waits for the backward on the host.
    """

    def __init__(
        self,
        layer: LayerBody,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        condition: Condition,
    ) -> None:
        super().__init__(layer, condition)
        tensors: list[torch.Tensor] = []
        self.mappings: Sequence[Any] = list(filter(is_shared_mapping, (*args, *kwargs.values())))

        def flatten(value: Any, where: str) -> Any:
            if self.mappings and is_empty_mapping(value):
                return EmptySpec(type(value))
            return tree_flatten(value, f"{where} of {layer.name}", tensors)

        self._args = [flatten(value, f"argument {index}") for index, value in enumerate(args)]
        self._kwargs = {key: flatten(value, f"argument {key!r}") for key, value in kwargs.items()}
        self.tensors: Sequence[torch.Tensor] = tensors
        self.others: Sequence[torch.Tensor] = tensors[1:]
        self.offloaded: OffloadedInput | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of the first of its tensors."""
        return self.tensors[0].numel() // self.tensors[0].shape[-1] if self.tensors else 0

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The layer's trained ones."""
        return self.condition.parameters

    @property
    def needs_gradient(self) -> bool:
        return bool(self.parameters) or any(tensor.requires_grad for tensor in self.tensors)

    @cached_property
    def has_casts(self) -> bool:
        """Whether autocast makes casts of parameters and keeps them in its region."""
        return self.surroundings.is_autocast and torch.is_autocast_cache_enabled()

    @cached_property
    def shares_casts(self) -> bool:
        """Whether others may use casts of its adapters too."""
        context, used = self.layer.context, self.condition.trained.ids
        return self.has_casts and not context.confines_casts(self.layer.name, used)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the layer on ``tensors`` instead of the captured ones; the tensors it returns."""
        args = tuple(tree_unflatten(template, tensors) for template in self._args)
        kwargs = {key: tree_unflatten(template, tensors) for key, template in self._kwargs.items()}
        returned = self.layer.run(args, kwargs)
        if not all(map(is_empty_mapping, filter(is_shared_mapping, (*args, *kwargs.values())))):
            raise UnsupportedModelError(LEAVES)
        return self.taken_apart(returned)[1]

    def taken_apart(self, returned: Any) -> tuple[Any, list[torch.Tensor]]:
        """What the layer has returned, as ``tree_flatten`` takes it apart; and its tensors."""
        results: list[torch.Tensor] = []
        return tree_flatten(returned, f"result of {self.layer.name}", results), results

    def seen(self, run: Callable[[], Any]) -> tuple[Any, set[str]]:
        """What ``run`` gives, and names of what it leaves behind: a replay leaves nothing."""
        spaces = list(map(vars, self.condition.contents.modules()))

        def contents() -> list[dict[str, Any]]:
            return [contents_of(each, without=OF_MODULES) for each in spaces]

        before, were_empty = contents(), all(map(is_empty_mapping, self.mappings))
        returned = run()
        left = {name for _, name in bound(before, contents())}
        if were_empty and not all(map(is_empty_mapping, self.mappings)):
            left.add("what it was given to share")
        self.mappings = ()
        return returned, left

    def offload_input(self) -> Sequence[torch.Tensor]:
        """Have the layer's input wait on the host if it can; what autograd has to keep."""
        tensors = self.tensors
        if self._args[:1] == [LeafSpec(0)]:
            self.offloaded = self.layer.offload(tensors[0])
        return tensors[1:] if self.offloaded is not None else tensors

    def with_input(self, kept: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Its tensors, from what autograd has kept; what waits on the host is brought back."""
        return kept if self.offloaded is None else (self.offloaded.fetch(), *kept)

    def obstacle(self) -> str | None:
        """Why this call is not to be replayed, as far as that can be seen before it."""
        if self.condition.has_hooks:
            return "hooks" if self.condition.hooks else "code of no library that is known"
        if recorded_outputs() - {RESULTS}:
            return "what layers return aside is recorded"
        if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in self.tensors):
            return "tensors of other classes"
        if any(tensor.is_inference() for tensor in self.tensors):
            return "tensors made in inference mode, whose edits are not counted"
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            return "operators that are watched"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "saved tensors that are packed"
        return None

    @cached_property
    def _forms(self) -> tuple[tuple[Hashable, ...], ...]:
        return tuple(
            (
                *(tensor.shape, tensor.stride(), tensor.dtype, tensor.device),
                *(tensor.requires_grad, tensor.is_leaf),
            )
            for tensor in self.tensors
        )

    def is_like(self, other: "LayerCall") -> bool:
        """Whether both were given hidden states, of a graph or of none, and tensors of one form."""
        hidden, *others = self._forms
        same_hidden, *same_others = other._forms
        return (
            hidden[:NUM_OF_FORM] == same_hidden[:NUM_OF_FORM]
            and others == same_others
            and self._args == other._args
            and self._kwargs == other._kwargs
            and self._args[:1] == [LeafSpec(0)]
        )

    def again(self, tensors: Sequence[torch.Tensor], rng: RngStash) -> "LayerCall":
        """The same call with other ``tensors`` of that form, from other random states."""
        found = object.__new__(LayerCall)
        found.__dict__.update(self.__dict__)
        found.tensors, found.others, found.offloaded = tensors, tensors[1:], None
        found.rng, found.start, found._end = rng, rng, None
        return found

    def of_layer(self, layer: LayerBody) -> "LayerCall":
        """A call of another layer with the same arguments, which has not changed since."""
        found = object.__new__(LayerCall)
        found.__dict__.update(self.__dict__)
        found.layer, found.condition, found._module = layer, layer.condition(), layer.module()
        found.note_end_as(self.rng)
        return found

    def let_go(self) -> None:
        """Keep the layer no longer, which may hold this call."""
        self._module = None

    @property
    def is_plain(self) -> bool:
        """Whether it is given hidden states first, and no mapping that layers share."""
        return self._args[:1] == [LeafSpec(0)] and not self.mappings

    def conditions(self) -> Hashable:
        """What is fixed in what this call does, but for addresses; equal ones do the same."""
        return *self.arguments(), self.condition.training, self.condition.adapter_state

    def arguments(self) -> tuple[Hashable, ...]:
        """As far as it is not of the layer."""
        return (
            tuple(self._args),
            tuple(self._kwargs.items()),
            self._forms,
            self.has_casts,
            self.shares_casts,
            self.surroundings,
        )

    def without_tensors(self) -> "LayerCall":
        """The same call, which holds nothing of what it was given or has made."""
        found = copy.copy(self)
        found.tensors, found.others, found.offloaded, found._module = (), (), None, None
        found.mappings = ()
        return found

    def require_unchanged(self) -> None:
        """Raise unless the layer is as it was at the forward."""
        self.layer.condition().require_as(self.condition, self.condition.marks)

    def require_same_tensors(self) -> None:
        """Raise unless what a recording of the layer reads is as it was at the forward."""
        self.condition.require_same_tensors(self.condition.marks)


class CallFacts:
    """What a call that has run in the graph around it has shown of its form; none of its tensors.

    Attributes:
        leaves: What stands in for its trained parameters, of which a visit has to know.
        specs: Of its tensors.
        forms: Shape, dtype and whether it needs a gradient, of each result.
        rng: The random states that it began with.
        tally: Counts calls of its adapters; None if they run as PEFT has them.
        uses: How its graph uses its tensors and adapters; empty until a backward has shown it.
        gives_casts: Whether gradients of adapters that autocast casts are those of the casts.
    """

    def __init__(self, call: LayerCall, template: Any, results: Sequence[torch.Tensor]) -> None:
        self._template = template
        self.forms = _forms(results)
        self._call = call.without_tensors()
        # Of its own, so that its graph meets no other one in them.
        self.leaves, own = proxy_leaves(call.condition.trained.places)
        self._own = list(own.values())
        self.specs = [Spec.of(tensor) for tensor in call.tensors]
        self._need_gradients = [tensor.requires_grad for tensor in call.tensors]
        self._are_leaves = [tensor.is_leaf for tensor in call.tensors]
        self.rng, self.tally = call.rng, call.layer.context.tally
        self.uses, self.gives_casts = Uses((), (), 0), False

    def found_as(self, condition: Condition) -> None:
        """Hold the layer's tensors of now, not those that lay in memory it had before."""
        self._call.condition = condition

    def learn(self, uses: Uses) -> None:
        """A backward has shown the ``uses``."""
        self.uses = uses
        self.gives_casts = self._call.shares_casts or uses.has_meeting_casts

    @property
    def may_be_apart(self) -> bool:
        """Whether gradients need no graph around it: it gives one result, and none of casts."""
        has_one_result = len(self.forms) == 1 and self.forms[0][2]
        return has_one_result and len(self.uses.of_tensors) <= 1 and not self.gives_casts

    @property
    def gives_hidden_alone(self) -> bool:
        """Whether it gives one tensor, with a graph, of the form of its hidden states."""
        return len(self.forms) == 1 and (
            self.forms[0] == (*self.specs[0], True) and self._template == LeafSpec(0)
        )

    @property
    def has_gradient_of_hidden(self) -> bool:
        """Whether the first of its tensors needs a gradient."""
        return bool(self._need_gradients) and self._need_gradients[0]

    def result_of(self, values: Sequence[Any]) -> Any:
        """A layer's result in its own form, with ``values`` in the places of its tensors."""
        return tree_unflatten(self._template, values)

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors over these, which need gradients, and are leaves, as those of the call."""
        return [
            tensor.detach().requires_grad_(needs) if is_leaf else as_result(tensor)
            for tensor, needs, is_leaf in zip(
                tensors, self._need_gradients, self._are_leaves, strict=True
            )
        ]

    def run(self, inputs: Sequence[torch.Tensor], has_graph: bool = True) -> list[torch.Tensor]:
        """The layer on ``inputs``, in the state of the call, from the random states of now."""
        with self._call.around(), torch.set_grad_enabled(has_graph):
            results = self._call.run(inputs)
        if any(each._backward_hooks for each in inputs):
            raise UnsupportedModelError("it registers hooks on what it is given")
        return results

    def recompute(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same as a recomputation.

        Raises:
            RematerializationError: If it gives tensors of another form than the forward.
        """
        # A mode that sees operators would see tensors without values.
        with recomputing(self.tally, not torch._C._len_torch_dispatch_stack()):
            results = self.run(inputs)
        forget(results)
        if _forms(results) != self.forms:
            raise RematerializationError(
                f"{self._call.layer.name}: forward gave tensors of form {self.forms}, the "
                f"recomputation {_forms(results)}; the layer depends on state that is not its input"
            )
        return results

    def differentiate(
        self,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        gradients: Gradients,
        around: Around,
        keeps_graph: bool = False,
    ) -> list[torch.Tensor | None]:
        """The gradients of ``results`` of ``inputs``, one for each use of a source."""
        with Within(around.surroundings.enter):
            return differentiate(
                *(self._call.layer.name, results, gradients, inputs, self._own, self.uses),
                has_casts=self._call.has_casts,
                through_casts=self.gives_casts,
                keeps_graph=keeps_graph,
            )

    def uncounted(self) -> AbstractContextManager[object]:
        """Nothing of what runs in the body is kept or counted."""
        return nullcontext() if self.tally is None else self.tally.recording()


def total(terms: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of those that are there, one after the other."""
    found = None
    for each in terms:
        if each is not None:
            found = each if found is None else found + each
    return found


def _forms(results: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype, bool]]:
    return [(each.shape, each.dtype, each.requires_grad) for each in results]


def is_checked(layer: LayerBody, kind: Kind) -> bool:
    """Whether the self-check looks at the call that comes, so that it is not replayed."""
    check = layer.context.check
    return kind != "inference" and check is not None and layer.index in check.unchecked
