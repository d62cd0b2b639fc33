"""What decides what a layer computes, besides its arguments and the state around it, at one time.

Its modules, which adapters act and how, its parameters, hooks, plain attributes, training flags and
what of it stays on the device, frozen adapters among it. A call notes it; its backward, and
whatever is recorded of it, has to find the same.
"""

from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from poros.errors import RematerializationError
from poros.stream.state import adapter_state
from poros.stream.staying import StayingState

if TYPE_CHECKING:
    from poros.stream.body import LayerBody

_training, _version = attrgetter("training"), attrgetter("_version")


class Condition:
    """Of one layer, now.

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

    def __init__(self, layer: "LayerBody") -> None:
        self._layer = layer
        self.contents = contents = layer.contents()
        self.trained = trained = contents.adapters()
        self.parameters = trained.parameters
        self.versions = list(map(_version, self.parameters))
        self.frozen = [place for place in trained.frozen if place.acts()]
        self.hooks = contents.hooks()
        self.adapter_state = adapter_state(contents.adapter_modules)
        self.attributes = contents.attributes.read()
        self.training = tuple(map(_training, contents.modules()))
        self._same: tuple[Condition, StayingState | None] | None = None

    @cached_property
    def has_hooks(self) -> bool:
        """Whether code of the user may see tensors from inside the layer."""
        return not self.contents.has_fixed_graph()

    @cached_property
    def staying(self) -> StayingState:
        """What stays on the device, and the frozen adapters that act."""
        return self._layer.staying(self.frozen)

    @cached_property
    def addresses(self) -> Any:
        """Where what it reads lies, besides its arguments."""
        return (
            self.trained.ids,
            self.trained.where,
            [mark and (*mark[:2], mark[2][1:]) for mark in self.staying.marks],
            id(self._layer.weights.bindings),
        )

    def require_adapters_unedited(self, name: str) -> None:
        """Raise if the forward of the layer of this ``name`` has edited its adapters.

        Raises:
            RematerializationError: If it has.
        """
        versions = dict(zip(map(id, self.parameters), self.versions, strict=True))
        edited = (
            ", ".join(
                parameter_name
                for parameter_name, parameter in self.contents.modules()[0].named_parameters()
                if versions.get(id(parameter), parameter._version) != parameter._version
            )
            if self.versions != list(map(_version, self.parameters))
            else ""
        )
        if edited:
            raise RematerializationError(
                f"{name}: expected adapters that only training changes, found that its "
                f"own forward edits {edited}, as OFT does with coft=True. The "
                "recomputation in backward would edit it a second time, so it cannot be streamed. "
                "Use an adapter that does not (coft=False), or call poros.restore(model) and train "
                "this one resident"
            )

    def note(self) -> "Condition":
        """The same, with all that is looked up late looked up now."""
        _ = self.has_hooks, self.addresses
        return self

    def equals(self, other: "Condition") -> bool:
        """Whether the layer computes the same in both; both ``note``d, if another time has come."""
        return self is other or (
            self.contents is other.contents
            and self.hooks == other.hooks
            and self.has_hooks == other.has_hooks
            and self.adapter_state == other.adapter_state
            and not self.contents.attributes.differ(self.attributes, other.attributes)
            and self.training == other.training
            and self.versions == other.versions
            and self.addresses == other.addresses
            and self.staying.marks == other.staying.marks
            and self.staying.has_values_of(other.staying)
        )

    def is_known_as(self, other: "Condition", staying: StayingState | None) -> bool:
        """Whether it was found to be as ``other``, with ``staying``."""
        same = self._same
        return same is not None and same[0] is other and same[1] is staying

    def know_as(self, other: "Condition", staying: StayingState | None) -> None:
        """It was found to be as ``other``, with ``staying``."""
        self._same = other, staying
