"""One call of one layer: its arguments taken apart, the state around it, and running it again.

What may change between a forward and its backward:

- training flags, random states, autocast, settings that pick kernels: replayed;
- active adapters, their scaling, disabling or merging: ``RematerializationError``;
- an adapter edited in place, replaced, moved or deleted: ``RematerializationError``;
- the layer's input or any other tensor it was given edited in place: ``RematerializationError``;
- a frozen tensor that stays on the device (a norm, a bias, a buffer) edited, cast or replaced:
  ``RematerializationError``;
- the layer's modules, or hooks that have come: ``RematerializationError``;
- a plain attribute of a module inside it or of its configuration: ``RematerializationError``.

An edit that PyTorch does not count (a fused optimizer's step, a write through ``.data``) between a
forward and its backward is seen in frozen adapters alone, by their values; of what is trained, or
stays on the device, it is not seen, here or by autograd.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.errors import RematerializationError
from poros.replay.casts import SharedCasts, confines_autocast
from poros.replay.early_casts import first_casts
from poros.replay.facts import CallFacts
from poros.replay.forms import CHECK, Form, Kind
from poros.replay.routing import Repeated, leaves
from poros.replay.uses import GraphAudit, Uses
from poros.slots.schedule import Phase
from poros.stream.args import tree_flatten, tree_unflatten
from poros.stream.body import LayerBody
from poros.stream.condition import Condition
from poros.stream.offload import OffloadedInput
from poros.stream.rng import RngStash
from poros.stream.side_outputs import recorded_outputs
from poros.stream.state import AmbientState
from poros.stream.staying import StayingState
from poros.stream.unchanged import require_unchanged

if TYPE_CHECKING:
    from poros.replay.captures import Captures


class LayerCall:
    """One call of one layer: its arguments taken apart, and the state around it."""

    def __init__(
        self,
        layer: LayerBody,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        condition: Condition,
        audit: GraphAudit,
        captures: "Captures",
    ) -> None:
        self.layer = layer
        self.captures = captures
        self._audit = audit
        self.condition = condition
        tensors: list[torch.Tensor] = []
        self._args = [
            tree_flatten(value, f"argument {index} of {layer.name}", tensors)
            for index, value in enumerate(args)
        ]
        self._kwargs = {
            key: tree_flatten(value, f"argument {key!r} of {layer.name}", tensors)
            for key, value in kwargs.items()
        }
        self.tensors: Sequence[torch.Tensor] = tensors
        """Distinct tensors among the arguments. Empty once autograd keeps them."""
        self.wanted: Sequence[bool] = ()
        """Which of these, and of the parameters, get a gradient; known after the forward."""
        self.offloaded: OffloadedInput | None = None
        """The first of the tensors, if it waits for the backward on the host."""
        self.uses = Uses((), {}, ())
        """How its graph uses the tensors and the parameters; known after the forward."""
        self.repeated: dict[int, Repeated] = {}
        """By number among the tensors and parameters, for those that are used more than once."""
        self._contents = condition.contents
        self._module = layer.module()  # lives as long as its graph, as the parameters do
        self.adapters = condition.adapters
        self.parameters = condition.parameters
        self.proxies = condition.proxies
        self.ambient = AmbientState.capture(layer.device, condition.training)
        self.shared_casts = (
            SharedCasts(layer.name)
            if self.ambient.is_autocast and torch.is_autocast_cache_enabled()
            else None
        )
        self._adapter_state = condition.adapter_state
        self._attributes = condition.attributes
        self._result: Any = None
        self.result_forms: list[tuple[torch.Size, torch.dtype, bool]] = []
        self.form: Form | None = None
        """What is recorded of such calls, if they may be replayed."""
        self._rng_end: RngStash | None = None
        self._staying: StayingState | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of the first of its tensors."""
        return self.tensors[0].numel() // self.tensors[0].shape[-1] if self.tensors else 0

    @property
    def needs_gradient(self) -> bool:
        return bool(self.parameters) or any(tensor.requires_grad for tensor in self.tensors)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the layer on ``tensors`` instead of the captured ones; the tensors it returns."""
        args = tuple(tree_unflatten(template, tensors) for template in self._args)
        kwargs = {key: tree_unflatten(template, tensors) for key, template in self._kwargs.items()}
        returned = self.layer.run(args, kwargs)
        results: list[torch.Tensor] = []
        self._result = tree_flatten(returned, f"result of {self.layer.name}", results)
        return results

    def offload_input(self) -> Sequence[torch.Tensor]:
        """Have the layer's input wait on the host if it can; what autograd has to keep."""
        tensors = self.tensors
        if tensors and self._args and tree_unflatten(self._args[0], tensors) is tensors[0]:
            self.offloaded = self.layer.offload(tensors[0])
        return tensors[1:] if self.offloaded is not None else tensors

    def with_input(self, kept: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Its tensors, from what autograd has kept; what waits on the host is brought back."""
        return kept if self.offloaded is None else (self.offloaded.fetch(), *kept)

    def obstacle(self, kind: Kind) -> str | None:
        """Why this call is not to be replayed, as far as that can be seen before it."""
        if self.layer.is_compiled:
            return "compiled layers"
        if self.condition.has_hooks:
            return "hooks"
        if recorded_outputs():
            return "what layers return aside is recorded"
        shares_casts = self.shared_casts is not None and kind != "recomputed"
        if shares_casts and not confines_autocast(self.layer.context):
            return "casts that an autocast region shares"
        if self.layer.context.watching_graph() is not None:
            return CHECK
        if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in self.tensors):
            return "tensors of other classes"
        return None

    def _casting_state(self) -> Hashable:
        """What decides which of its adapters autocast casts first."""
        return tuple(map(id, self.parameters)), self._adapter_state, self.ambient.training

    def conditions(self) -> Hashable:
        """What is fixed in what this call does, but for addresses; equal ones do the same."""
        return (
            tuple(self._args),
            tuple(self._kwargs.items()),
            tuple(
                (
                    *(tensor.shape, tensor.stride(), tensor.dtype, tensor.device),
                    *(tensor.requires_grad, tensor.is_leaf),
                )
                for tensor in self.tensors
            ),
            torch.is_autocast_cache_enabled(),
            self.ambient.autocast,
            self.ambient.settings,
            self.ambient.training,
            self._adapter_state,
        )

    @property
    def result_template(self) -> Any:
        """Its result, with places instead of tensors."""
        return self._result

    @property
    def attributes(self) -> Any:
        """The plain attributes of its modules, as they were when it was made."""
        return self._attributes

    def attributes_since(self, before: Any) -> bool:
        """Whether plain attributes of its modules are not as they were ``before``."""
        return bool(self._contents.attributes.changes(before))

    def without_tensors(self) -> "LayerCall":
        """The same call, which holds nothing of what it was given or has made."""
        found = copy.copy(self)
        found.tensors, found.offloaded, found.form = (), None, None
        found.repeated, found._staying, found._module = {}, None, None
        return found

    def is_current(self) -> bool:
        """Whether the layer has the modules, settings and choice of adapters that it had."""
        now = self.layer.condition()
        return (
            now.contents is self._contents
            and now.adapter_state == self._adapter_state
            and not self.attributes_since(self._attributes)
        )

    def ends_with(self, state: RngStash) -> bool:
        """Whether its forward has left the random state like this."""
        return self._rng_end is not None and state.equals(self._rng_end)

    def surroundings(self) -> AbstractContextManager[object]:
        """The state around its forward but for random numbers; everything is put back."""
        return self.ambient.but_random(self._contents.modules())

    def take_over(self, facts: CallFacts) -> None:
        """Its forward was replayed: note what one that runs has found before."""
        self.uses = facts.uses
        self.result_forms, self._result = facts.forms, facts.result
        self._rng_end = RngStash.capture(self.layer.device)
        self._staying = self.condition.staying

    def note_inference(self, template: Any, results: Sequence[torch.Tensor]) -> None:
        """Its forward has run without a graph and has given ``template`` of ``results``."""
        self._result, self.result_forms = template, _forms(results)
        self._rng_end = RngStash.capture(self.layer.device)

    def terms(self) -> list[torch.Tensor | None]:
        """The terms of what is used several times, one after the other."""
        return [term for repeated in self.repeated.values() for term in repeated.terms]

    def without_terms(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[Any]:
        """``gradients`` but for the terms at their end, which go where ``terms`` has them from."""
        place = len(gradients) - sum(each.num_terms for each in self.repeated.values())
        outgoing = gradients[:place]
        for repeated in self.repeated.values():
            repeated.terms = list(gradients[place : place + repeated.num_terms])
            place += repeated.num_terms
        return outgoing

    def require_same_end(self) -> None:
        """Raise unless random states now are those that the forward has left."""
        if not self.ends_with(RngStash.capture(self.layer.device)):
            raise RematerializationError(
                f"{self.layer.name}: the recomputation drew other random numbers than the forward; "
                "the layer draws depending on state that is not its input"
            )

    def forward(self) -> list[torch.Tensor]:
        """The forward. What the recomputation must reproduce is kept."""
        inputs, proxies = leaves(self.tensors), self.proxies
        versions = [tensor._version for tensor in inputs]
        early = self._audit.early
        shares_casts = self.shared_casts is not None
        state: Hashable = None
        is_watched = False
        if shares_casts:
            state = self._casting_state()
            is_watched = early.are_possible(state)
        num_nodes = -torch._C._autograd._get_sequence_nr()
        with (
            self.layer.visit(Phase.FORWARD, self.adapters),
            self.ambient.without_autocast_cache(),
            torch.enable_grad(),
            first_casts(proxies if is_watched else ()) as firsts,
        ):
            results = self.run(inputs)
        num_nodes += torch._C._autograd._get_sequence_nr()
        if versions != [tensor._version for tensor in inputs]:
            raise RematerializationError(
                f"{self.layer.name}: expected its arguments to be left alone, found one edited in "
                "place by the layer itself; the recomputation would edit it again"
            )
        self.condition.require_adapters_unedited(self.layer.name)
        # What the layer has changed now it will change again.
        self._contents.attributes.disregard(self._attributes)
        self._contents.note_names()
        form = (num_nodes, self.ambient.is_autocast, shares_casts, self._adapter_state)
        self.uses = self._audit.uses(results, inputs, proxies, form, firsts)
        if is_watched:
            used = [number - len(inputs) for number in self.uses.order]
            early.learn(state, len(proxies), used, are_early=self.uses.are_early)
        self.result_forms = _forms(results)
        self._rng_end = RngStash.capture(self.layer.device)
        # Now, not before: bitsandbytes casts a bias for good at its first use.
        self._staying = self.layer.staying(self.condition.frozen)
        return results

    def recompute(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The recomputation, with its graph; only inside a visit."""
        with self.ambient.replay(self._contents.modules()), torch.enable_grad():
            results = self.run(inputs)
            if _forms(results) != self.result_forms:
                raise RematerializationError(
                    f"{self.layer.name}: forward gave tensors of form {self.result_forms}, the "
                    f"recomputation {_forms(results)}; the layer depends on state that is not its "
                    "input"
                )
            self.require_same_end()
        return results

    def shares_casts(self) -> bool:
        """Whether a cast of its adapters may be used again: in it, or in this autocast region."""
        cast = [self.uses.order[place] for place in self.uses.casts]
        return (
            len(set(cast)) < len(cast)
            or bool(self.layer.context.tied_adapters)
            or not confines_autocast(self.layer.context)
        )

    def unpack_results(self, values: Sequence[Any]) -> Any:
        """The layer's result in its own form, with ``values`` in the places of its tensors."""
        return tree_unflatten(self._result, values)

    def require_unchanged(self) -> None:
        """Raise unless the layer is as it was at the forward."""
        require_unchanged(self.layer, self.condition, self._staying)


def _forms(results: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype, bool]]:
    return [(result.shape, result.dtype, result.requires_grad) for result in results]
