"""What decides what a layer computes, besides its arguments and the state around it, at one time.

Its modules, which adapters act and how, its parameters, hooks, plain attributes, training flags and
what of it stays on the device, frozen adapters among it. A call notes it; its backward, and
whatever is recorded of it, has to find the same: a change in between raises, as PEFT keeps which
adapters act in many places, and training on after such a change is hardly ever meant.
"""

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import nn

from poros.errors import RematerializationError
from poros.stream.layer_index import LayerIndex
from poros.stream.staying import Staying, StayingState
from poros.stream.visit import BlockVisit

_training, _version = attrgetter("training"), attrgetter("_version")


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

    def still_reads_so(self) -> bool:
        """Whether the layer is now as it was then, without a new object of this class."""
        contents = self.contents
        return (
            contents.is_current()
            and contents.has_same_tensors()
            and self.trained.are_as_they_were()
            and self.versions == list(map(_version, self.parameters))
            and self._staying.changed(self.staying) is None
            and self.adapter_state == _adapter_state(contents.adapter_modules)
            and self.hooks == contents.hooks()
            and self.training == tuple(map(_training, contents.modules()))
            and not contents.attributes.differ(self.attributes, contents.attributes.read())
        )

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


def _adapter_state(modules: Sequence[nn.Module]) -> tuple[object, ...]:
    """Which adapters act in these modules, and how; equal values mean equal arithmetic."""
    tuners: Sequence[Any] = modules
    found = []
    for tuner in tuners:
        active = tuner.active_adapter
        found += [
            active if isinstance(active, str) else tuple(active),
            tuner.disable_adapters,
            tuple(tuner.merged_adapters),
            tuple(getattr(tuner, "scaling", {}).items()),
        ]
    return tuple(found)
