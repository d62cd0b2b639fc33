"""What decides what a layer computes, besides its arguments and the state around it, at one time.

Its modules, which adapters act and how, its tensors that do not stream, hooks, plain attributes and
training flags. A call notes it; its backward, and whatever is recorded of it, has to find the same:
a change in between raises, as PEFT keeps which adapters act in many places, and training on after
such a change is hardly ever meant.

Note: Edits of what stays
    Between steps they are nobody's business. A layer that is recomputed must find what its forward
    has seen, so a write, a cast or a replacement between a forward and its backward raises. And a
    layer whose own forward writes (a running statistic) would write twice; it is refused.
    bitsandbytes' cast of a bias to the dtype of its input is no such write: the recomputation finds
    the bias as the forward has left it, cast. PyTorch does not count every edit, and frozen
    adapters are edited as training goes on, so the values of those that act are compared as well.
"""

from collections.abc import Sequence
from itertools import compress, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.errors import PreparedModelError, RematerializationError
from poros.io.digests import checksum
from poros.stream.adapters import Place, User
from poros.stream.layer_index import LayerIndex
from poros.stream.marks import Marks

_training = attrgetter("training")
_OTHER_ADAPTERS = (
    "expected the adapters that were active at the forward, found another choice (or scaling, or "
    "merge) at its backward; call backward first"
)


class Condition:
    """Of one layer, of that qualified ``name``, now; or of several (``poros.stream.stack``).

    Attributes:
        marks: Its tensors that do not stream, but for frozen adapters that do not act.
        trained: Its trained parameters.
        parameters: These, each once.
        values: A checksum of the frozen adapters that act; None if there are none.
        hooks: Keys of the hooks inside the layer.
        code: That of its modules.
        has_hooks: Whether code of the user may see tensors inside the layer.
        adapter_state: Which adapters act, and how.
        attributes: A reading of its plain attributes.
        training: The training flag of each module.
    """

    def __init__(self, name: str, contents: LayerIndex, bindings: object) -> None:
        self._name, self._bindings = name, bindings
        self.contents = contents
        self.marks = contents.marks()
        self.trained = contents.adapters(self.marks)
        self.parameters = self.trained.parameters
        self._numbers: list[int] | None = None
        self._frozen: list[int] = []
        are_trained = self.marks.are_trained
        frozen = [number for number in contents.of_adapters if not are_trained[number]]
        if frozen:
            users = [contents.places[number].users for number in frozen]
            acts = [any(map(User.acts, each)) for each in users]
            self._frozen = list(compress(frozen, acts))
            if not all(acts):
                idle = set(frozen).difference(self._frozen)
                self._numbers = [each for each in range(len(contents.places)) if each not in idle]
                self.marks = contents.marks(self._numbers)
        self.values = self._values_now()
        self.hooks, self.code = contents.hooks(), contents.code()
        self.has_hooks = bool(self.hooks) or not self.code.is_known
        self.adapter_state = AdapterState.of(contents.adapter_modules)
        self.attributes = contents.attributes.read()
        self.training = tuple(map(_training, contents.modules()))
        self._same: tuple[Condition, Marks] | None = None

    def reads_as(self, other: "Condition") -> bool:
        """Whether the layer does the same in both with the same tensors, whatever these hold."""
        return self is other or (self.is_like(other) and self._bindings == other._bindings)

    def is_like(self, other: "Condition") -> bool:
        """Whether the layer does the same in both, but for where what streams lies."""
        return (
            self.contents is other.contents
            and self.code == other.code
            and self.adapter_state == other.adapter_state
            and self.marks.where == other.marks.where
            and self.marks.are_trained == other.marks.are_trained
            and not self.contents.attributes.changed(self.attributes, other.attributes)
        )

    def equals(self, other: "Condition", wherever: bool = False) -> bool:
        """Whether the layer computes the same in both; ``wherever``: with its block elsewhere."""
        return (
            (self.is_like(other) if wherever else self.reads_as(other))
            and self.hooks == other.hooks
            and self.has_hooks == other.has_hooks
            and self.training == other.training
            and self.marks.versions == other.marks.versions
            and _are_equal(self.values, other.values)
        )

    def marks_now(self) -> Marks:
        """What lies by now where ``marks`` were."""
        return self.contents.marks(self._numbers)

    def _values_now(self) -> torch.Tensor | None:
        if not self._frozen:
            return None
        tensors = self.contents.marks(self._frozen).tensors
        return checksum([each for each in tensors if each is not None])

    def require_unedited(self) -> None:
        """Raise ``RematerializationError`` if the layer's own forward has edited its adapters."""
        edited = [
            self._place(number).name
            for number, version in enumerate(self.marks_now().versions)
            if version != self.marks.versions[number]
        ]
        if edited:
            raise RematerializationError(
                f"{self._name}: expected adapters that only training changes, found that its "
                f"own forward edits {', '.join(edited)}, as OFT does with coft=True. The "
                "recomputation in backward would edit it a second time, so it cannot be streamed. "
                "Use an adapter that does not (coft=False), or call poros.restore(model) and train "
                "this one resident"
            )

    def require_as(self, before: "Condition", marks: Marks) -> None:
        """Raise ``RematerializationError`` unless the layer is as it was at a forward.

        Args:
            before: Its condition then.
            marks: What lay in the places of ``before`` at the end of the forward.
        """
        if self._same is not None and self._same[0] is before and self._same[1] is marks:
            return
        change = self._change_since(before, marks)
        if change is not None:
            raise RematerializationError(f"{self._name}: {change}")
        self._same = before, marks

    def require_same_tensors(self, marks: Marks) -> None:
        """Raise ``RematerializationError`` unless the same adapters act, on the same tensors.

        A recording reads nothing else of the layer: other changes are as if a graph were kept.

        Args:
            marks: What lay in its places at the end of the forward.
        """
        now = AdapterState.of(self.contents.adapter_modules)
        change = _OTHER_ADAPTERS if now != self.adapter_state else self._edited_since(marks)
        if change is not None:
            raise RematerializationError(f"{self._name}: {change}")

    def _change_since(self, before: "Condition", marks: Marks) -> str | None:
        if self.contents is not before.contents:
            return (
                "expected the modules of the forward, found others at its backward; add and remove "
                "adapters between steps, not within one"
            )
        if self.hooks != before.hooks:
            return (
                "expected the module hooks of the forward (of the modules in it, and of all "
                "modules), found others at its backward; register and remove hooks between steps, "
                "not within one: the recomputation would run with other hooks"
            )
        if self.code != before.code:
            return (
                "expected the code of its modules (forwards, attention) as at the forward, found "
                "some replaced at its backward; do so between steps"
            )
        if self.adapter_state != before.adapter_state:
            return _OTHER_ADAPTERS
        is_alike = self._numbers == before._numbers and self._frozen == before._frozen
        edited = before._edited_since(marks, self if is_alike else None)
        if edited is not None:
            return edited
        attributes = self.contents.attributes
        changed = attributes.changed(before.attributes, self.attributes)
        if changed:
            return (
                "expected the modules in it as they were at the forward, found others at its "
                f"backward: {', '.join(map(attributes.name_of, changed))}; change them between "
                "steps, not within one"
            )
        return None

    def _edited_since(self, marks: Marks, now: "Condition | None" = None) -> str | None:
        """Which of its tensors is not as it was; ``now``: its condition now, if that is known."""
        number = (now.marks if now else self.marks_now()).changed(marks)
        if number is not None:
            return (
                f"expected {self._name}.{self._place(number).name} as it was at the forward, "
                "found it edited, cast, moved or replaced before the backward of its layer (an "
                "optimizer step in between?); do so between steps"
            )
        if not _are_equal(now.values if now else self._values_now(), self.values):
            return (
                "expected a frozen adapter as it was at the forward, found it edited before the "
                "backward of its layer; do so between steps"
            )
        return None

    def _place(self, number: int) -> Place:
        """Where the tensor of this number among ``marks`` lies."""
        numbers = self._numbers
        return self.contents.places[number if numbers is None else numbers[number]]


def require_unwritten(name: str, contents: LayerIndex, before: Marks) -> None:
    """Raise ``PreparedModelError`` if a layer's own forward has written to its base.

    ``before``: what lay in the places of tensors of its base that do not stream.
    """
    now = contents.marks(contents.of_base)
    if now.changed(before) is None:
        return
    facts = zip(before.facts(), now.facts(), before.are_trained, strict=True)
    for number, (old, new, is_trained) in zip(contents.of_base, facts, strict=True):
        place = contents.places[number]
        if old == new or is_trained or _is_cast_bias(place, old, new):
            continue
        raise PreparedModelError(
            f"{name}.{place.name}: expected the layer's forward to only read it, found it "
            "written or replaced (a counter, a running statistic?). Recomputing the layer "
            "would do so twice; call poros.restore(model) to train this model resident"
        )


def _is_cast_bias(place: Place, old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """Whether the same object, never written, has another dtype: see "Edits of what stays"."""
    before, _, form, version = old
    after, _, new_form, new_version = new
    return (
        place.key == "bias"
        and isinstance(place.owner[place.key], nn.Parameter)
        and (before, version) == (after, new_version)
        and form is not None
        and new_form is not None
        and form[0] != new_form[0]
        and form[1] == new_form[1]
    )


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether checksums are; the host waits for the device."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


class AdapterState(NamedTuple):
    """Which adapters act in modules of PEFT, and how; equal values mean equal arithmetic."""

    active: tuple[Any, ...]
    merged: tuple[tuple[str, ...], ...]
    scalings: tuple[Any, ...]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "AdapterState":
        choices = list(map(_choice, modules))
        scalings = map(getattr, modules, repeat("scaling"), repeat({}))
        return cls(
            tuple(
                (each if isinstance(each, str) else tuple(each), *rest) for each, *rest in choices
            ),
            tuple(map(tuple, map(_merged, modules))),
            tuple(map(tuple, map(dict.items, scalings))),
        )


_choice = attrgetter("active_adapter", "disable_adapters")
_merged = attrgetter("merged_adapters")
