"""What decides what a layer computes, besides its arguments and the state around it, at one time.

Its modules, which adapters act and how, its parameters, hooks, plain attributes, training flags and
what of it stays on the device, frozen adapters among it. A call notes it; its backward, and
whatever is recorded of it, has to find the same: a change in between raises, as PEFT keeps which
adapters act in many places, and training on after such a change is hardly ever meant.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, TypeVar

from torch import nn

from poros.errors import RematerializationError
from poros.stream.layer_index import LayerIndex, keys_of, places_of, values_of
from poros.stream.staying import Staying, StayingState
from poros.stream.visit import BlockVisit

T = TypeVar("T")
_training, _version = attrgetter("training"), attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class Condition:
    """Of one layer, now.

    Args:
        name: The layer's qualified name.
        contents: Its modules.
        staying: The tensors of its base that stay on the device.
        weights: Those that stream.

    Attributes:
        contents: Its modules.
        trained: Its trained parameters.
        parameters: These, each once.
        versions: Of these.
        frozen: Places of tensors of frozen adapters that act.
        hooks: Keys of the hooks inside the layer.
        adapter_state: Which adapters act, and how.
        attributes: A reading of its plain attributes.
        training: The training flag of each module.
    """

    def __init__(
        self, name: str, contents: LayerIndex, staying: Staying, weights: BlockVisit
    ) -> None:
        self._name, self._staying, self._weights = name, staying, weights
        self.contents = contents
        self.trained = trained = contents.adapters()
        self.parameters = trained.parameters
        self.versions = list(map(_version, self.parameters))
        self.frozen = [place for place in trained.frozen if place.acts()]
        self.hooks = contents.hooks()
        self.adapter_state = _adapter_state(contents.adapter_modules)
        self.attributes = contents.attributes.read()
        self.training = tuple(map(_training, contents.modules()))
        self._same: tuple[Condition, StayingState | None] | None = None
        self._equal: Condition | None = None

    @cached_property
    def has_hooks(self) -> bool:
        """Whether code of the user may see tensors from inside the layer."""
        return not self.contents.has_fixed_graph()

    @cached_property
    def staying(self) -> StayingState:
        """What stays on the device, and the frozen adapters that act."""
        return self._staying.state(self.frozen)

    @cached_property
    def addresses(self) -> Any:
        """Where what it reads lies, besides its arguments."""
        return (
            self.trained.ids,
            self.trained.where,
            [mark and (*mark[:2], mark[2][1:]) for mark in self.staying.marks],
            id(self._weights.bindings),
        )

    def note(self) -> "Condition":
        """The same, with all that is looked up late looked up now."""
        _ = self.has_hooks, self.addresses
        return self

    def reads_as(self, other: "Condition") -> bool:
        """Whether the layer does the same in both with the same tensors, whatever these hold.

        Both ``note``d, if another time has come.
        """
        return self is other or (self.is_like(other) and self.addresses == other.addresses)

    def is_like(self, other: "Condition") -> bool:
        """Whether the layer does the same in both, but for where what it reads lies."""
        return (
            self.contents is other.contents
            and self.adapter_state == other.adapter_state
            and not self.contents.attributes.differ(self.attributes, other.attributes)
        )

    def equals(self, other: "Condition") -> bool:
        """Whether the layer computes the same in both; both ``note``d likewise."""
        if self is other or self._equal is other:
            return True
        is_equal = (
            self.reads_as(other)
            and self.hooks == other.hooks
            and self.has_hooks == other.has_hooks
            and self.training == other.training
            and self.versions == other.versions
            and self.staying.marks == other.staying.marks
            and self.staying.has_values_of(other.staying)
        )
        self._equal = other if is_equal else None
        return is_equal

    @property
    def staying_places(self) -> Sequence[tuple[str, dict[str, Any], str]]:
        """Name, owner and key of each tensor of its base that stays on the device."""
        return self._staying.places

    def require_unedited(self) -> None:
        """Raise ``RematerializationError`` if the layer's own forward has edited its adapters."""
        if self.versions == list(map(_version, self.parameters)):
            return
        versions = dict(zip(map(id, self.parameters), self.versions, strict=True))
        edited = ", ".join(
            parameter_name
            for parameter_name, parameter in self.contents.modules()[0].named_parameters()
            if versions.get(id(parameter), parameter._version) != parameter._version
        )
        raise RematerializationError(
            f"{self._name}: expected adapters that only training changes, found that its "
            f"own forward edits {edited}, as OFT does with coft=True. The "
            "recomputation in backward would edit it a second time, so it cannot be streamed. "
            "Use an adapter that does not (coft=False), or call poros.restore(model) and train "
            "this one resident"
        )

    def require_as(self, before: "Condition", staying: StayingState | None) -> None:
        """Raise ``RematerializationError`` unless the layer is as it was at a forward.

        Args:
            before: Its condition then.
            staying: What of it stays on the device, at the end of the forward.
        """
        if self._same is not None and self._same[0] is before and self._same[1] is staying:
            return
        change = self._change_since(before, staying)
        if change is not None:
            raise RematerializationError(change)
        self._same = before, staying

    def _change_since(self, before: "Condition", staying: StayingState | None) -> str | None:
        name = self._name
        if self.contents is not before.contents:
            return (
                f"{name}: expected the modules of the forward, found others at its backward; add "
                "and remove adapters between steps, not within one"
            )
        if self.hooks != before.hooks:
            return (
                f"{name}: expected the module hooks of the forward (of the modules in it, and of "
                "all modules), found others at its backward; register and remove hooks between "
                "steps, not within one: the recomputation would run with other hooks"
            )
        if self.adapter_state != before.adapter_state:
            return (
                f"{name}: expected the adapters that were active at the forward, found another "
                "choice (or scaling, or merge) at its backward; call backward first"
            )
        if [each._version for each in before.parameters] != before.versions:
            return (
                f"{name}: expected its adapters as they were at the forward, found one edited in "
                "place between forward and backward; edit it after backward"
            )
        edited = None if staying is None else self._staying.changed(staying)
        if edited is not None:
            return (
                f"{edited}: expected it as it was at the forward, found it edited, cast or "
                "replaced before the backward of its layer; do so between steps"
            )
        # The same object says that each is in its place, and of the same bits.
        moved = None if self.trained is before.trained else before.trained.moved()
        if moved is not None:
            return (
                f"{name}: adapter parameter {moved.key!r} of shape "
                f"{tuple(moved.parameter.shape)} was replaced, moved or cast between forward "
                "and backward; do so between steps"
            )
        attributes = self.contents.attributes
        if attributes.differ(before.attributes, self.attributes):
            changes = ", ".join(attributes.changes(before.attributes))
            return (
                f"{name}: expected the modules in it as they were at the forward, found other "
                f"settings at its backward: {changes}; change them between steps, not within one"
            )
        return None


class StackConditions:
    """Of all layers of a model at one time, to be compared with now at little cost.

    Args:
        conditions: Of each layer.
    """

    def __init__(self, conditions: Sequence[Condition]) -> None:
        contents = [each.contents for each in conditions]
        self.has_hooks = any(each.has_hooks for each in conditions)
        child_tables = _joined(each.child_tables for each in contents)
        self._by_layer = [list(filter(None, each.tensor_tables)) for each in contents]
        tensor_tables = _joined(each.tensor_tables for each in contents)
        # Most are empty, and are only asked whether they still are.
        self._child_tables = list(filter(None, child_tables))
        self._tensor_tables = list(filter(None, tensor_tables))
        self._empty = [table for table in (*child_tables, *tensor_tables) if not table]
        self._hook_tables = _joined(each.hook_tables for each in contents)
        self._namespaces = list(map(vars, _joined(each.modules() for each in contents)))
        self._adapter_modules = _joined(each.adapter_modules for each in contents)
        self._parameters = _joined(each.parameters for each in conditions)
        self._attributes = [(each.contents.attributes, each.attributes) for each in conditions]
        self._staying = Staying("the layers", _joined(each.staying_places for each in conditions))
        # Held, so that ids stay theirs.
        self._children, self._tensors = self._children_now(), values_of(self._tensor_tables)
        self._ids, self._sets = list(map(id, self._tensors)), self._sets_now()
        self._staying_state = self._staying.state(_joined(each.frozen for each in conditions))
        self._rest = self._rest_now()

    def still_hold(self) -> bool:
        """Whether all layers are now as they were then."""
        ids = list(map(id, values_of(self._tensor_tables)))
        return (
            not any(self._empty)
            and self._children == self._children_now()
            and (ids == self._ids or self._sets == self._sets_now())
            and self._rest == self._rest_now()
            and self._staying.changed(self._staying_state) is None
            and not any(each.differ(then, each.read()) for each, then in self._attributes)
        )

    def _children_now(self) -> list[Any]:
        return values_of(self._child_tables)

    def _sets_now(self) -> list[set[int]]:
        """The tensors of each layer, in any order."""
        return [set(map(id, values_of(each))) for each in self._by_layer]

    def _rest_now(self) -> tuple[Any, ...]:
        return (
            list(map(_version, self._parameters)),
            places_of(self._parameters),
            list(map(_requires_grad, self._parameters)),
            keys_of(self._hook_tables),
            list(map(dict.get, self._namespaces, repeat("training"))),
            list(map(dict.get, self._namespaces, repeat("forward"))),
            _adapter_state(self._adapter_modules),
        )


def _joined(parts: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(parts))


def _adapter_state(modules: Sequence[nn.Module]) -> tuple[object, ...]:
    """Which adapters act in these modules, and how; equal values mean equal arithmetic."""
    choices = list(map(_choice, modules))
    scalings = map(getattr, modules, repeat("scaling"), repeat({}))
    return (
        tuple((each if isinstance(each, str) else tuple(each), *more) for each, *more in choices),
        tuple(map(tuple, map(_merged, modules))),
        tuple(map(tuple, map(dict.items, scalings))),
    )


_choice = attrgetter("active_adapter", "disable_adapters")
_merged = attrgetter("merged_adapters")
