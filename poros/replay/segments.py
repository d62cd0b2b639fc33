"""Which kept layers are replayed together: see ``poros.replay.segment``."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from poros.kernels.forwards import foreign_code, is_of_library
from poros.replay.forms import Form
from poros.replay.graphs import SharedMemory
from poros.replay.links import Links
from poros.replay.routing import OF_ADAPTERS
from poros.replay.segment import Owner, Segment
from poros.stream.body import LayerBody
from poros.utils.formatting import first_line

logger = logging.getLogger(__name__)

_MOST_LAYERS = 8
"""Of a segment. All its gradients of adapters are there at a time, in memory of their own."""


class Segments:
    """Those of one prepared model.

    Attributes:
        is_behind: Whether more recordings have given the right bits since they were joined.
    """

    def __init__(self, memory: SharedMemory, links: Links, owner: Owner) -> None:
        self.is_behind = False
        self._memory, self._links, self._owner = memory, links, owner
        self._of_layers: dict[int, Segment] = {}
        self._is_within = False

    def begin_pass(self, holder: nn.Module | None, layers: Sequence[LayerBody]) -> None:
        """The code of what holds the layers begins; None has no call wait for others."""
        first = layers[0].module() if layers else None
        self._is_within = holder is not None and first is not None and _is_known(holder, first)

    def end_pass(self) -> None:
        """It has ended: whoever calls layers from now on is not known."""
        self._is_within = False
        for each in self._of_layers.values():
            each.forget_waiting()

    def of_layer(self, index: int) -> Segment | None:
        """The one that a layer is in whose call comes now, if any."""
        return self._of_layers.get(index) if self._is_within else None

    def forget(self) -> None:
        """Their recordings are released."""
        self._of_layers, self.is_behind = {}, False

    def join(self, layers: Sequence[LayerBody], forms: Mapping[int, Mapping[Any, Form]]) -> None:
        """Join what is recorded of layers in a row, as a pass begins.

        ``forms``: those of each layer.
        """
        is_current = all(each.is_current() for each in self._of_layers.values())
        if is_current and not self.is_behind:
            return
        self._of_layers, self.is_behind = {}, True
        found = [_joinable(layer, forms) for layer in layers]
        for layer, form in zip(layers, found, strict=True):
            if form is not None and not form.is_for(layer.condition()):
                return  # perhaps as another pass begins
        self.is_behind = False
        for first, run in _runs_of(found):
            of_run = layers[first : first + len(run)]
            try:
                segment = Segment(of_run, run, self._memory, self._links, self._owner)
            except LookupError:
                return
            except RuntimeError as error:
                about = of_run[0].name, first_line(error)
                logger.warning("poros: %s and others are not joined: %s", *about)
                continue
            self._of_layers |= dict.fromkeys((each.index for each in of_run), segment)


def _is_known(holder: nn.Module, first: nn.Module) -> bool:
    """Whether known libraries have written all that runs from one call of a layer to the next."""
    calls = type(first).__call__, nn.Module._wrapped_call_impl, nn.Module._call_impl
    lists = [each for each in holder._modules.values() if type(each) is nn.ModuleList]
    return (
        foreign_code([holder]) is None
        and all(map(is_of_library, calls))
        and any(next(iter(each), None) is first for each in lists)
    )


def _joinable(layer: LayerBody, forms: Mapping[int, Mapping[Any, Form]]) -> Form | None:
    """Of the layer, what is recorded with its graph, if it may be joined."""
    of_layer = forms.get(layer.index, {}).values() if layer.weights.is_pinned else ()
    return next((form for form in of_layer if _may_be_joined(form)), None)


def _may_be_joined(form: Form) -> bool:
    """Whether its calls can be replayed with those of other layers: see "Which" there."""
    if form.shown is None or form.forward is None or form.backward is None:
        return False
    facts, uses = form.facts, form.facts.uses
    return (
        form.kind == "kept"
        and form.dense_address is None
        and form.forward.is_proved
        and form.backward.is_proved
        and not form.forward.has_drawn
        and facts.gives_hidden_alone
        and uses.has_single_parameters
        and bool(uses.of_parameters)
        and not any(0 < each.number < len(facts.specs) for each in uses.sources)
        and form.backward.gives.piece_of(OF_ADAPTERS) is not None
    )


def _runs_of(forms: Sequence[Form | None]) -> list[tuple[int, list[Form]]]:
    """Layers in a row that can be joined: the number of the first, and the form of each.

    ``forms``: of each layer of the model, that which keeps its graph and may be joined.
    """
    rows: list[tuple[int, list[Form]]] = []
    for number, form in enumerate(forms):
        row = rows[-1] if rows else (0, [])
        if form is None:
            continue
        if row[1] and row[0] + len(row[1]) == number and _is_behind(row[1][-1], form):
            row[1].append(form)
        else:
            rows.append((number, [form]))
    found: list[tuple[int, list[Form]]] = []
    for first, forms in rows:
        # The shortest one first: the device waits for it.
        ends = range(len(forms), 0, -_MOST_LAYERS)
        parts = [(max(end - _MOST_LAYERS, 0), end) for end in reversed(ends)]
        found += [(first + begin, forms[begin:end]) for begin, end in parts if end - begin > 1]
    return found


def _is_behind(before: Form, form: Form) -> bool:
    """Whether ``form`` can be joined with the one before it.

    A recording overwrites what those hold that the same recorder has made behind it.
    """
    return (
        form.facts.specs[0] == before.facts.specs[0]
        and form.facts.has_gradient_of_hidden
        and form.around == before.around
        and before.held is not None
        and form.held is not None
        and form.held.links is before.held.links
        and form.held.order > before.held.order
    )
