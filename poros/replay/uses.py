"""What a layer's graph must look like for its recomputation to be exact, checked where it shows.

Note: No strangers
    Nothing trainable may take part in a layer except through its inputs and its adapters: a
    gradient for anything else would be lost without an error. Walking the graph of a forward finds
    such a leaf. The same walk tells where each input and each adapter is used, and in which order a
    resident run would hand over their gradients.

Note: When it is walked
    The graph of a layer without hooks is the same at every call of the same form, so one walk per
    form is enough. Hooks, a forward that was set on a module's instance and adapters that no
    operator used (experts without a token) may make another graph at any call, so there every
    graph is walked.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch

from poros.errors import UnsupportedModelError
from poros.kernels.adapters import note_last
from poros.replay.early_casts import EarlyCasts
from poros.replay.order import Path, Use, arrivals

_MAX_FORMS = 32
"""Forms that a layer is remembered in; more come only from a loop that changes it at each step."""


class Place(NamedTuple):
    """One use of a source."""

    path: Path
    """The way to the operator that uses it."""
    edge: int | None
    """Which of the gradients that the operator gives is the source's; None if the source is a
    result itself."""


def place_of(use: Use) -> Place:
    """Where it is."""
    return Place(use.path, None if use.node is None else use.edge)


class Uses(NamedTuple):
    """How one graph of a layer uses its sources: its inputs, then its trainable parameters."""

    order: tuple[int, ...]
    """The numbers of the sources, one for each use, as their gradients arrive."""
    several: Mapping[int, tuple[Place, ...]]
    """Where those are used that are used more than once, in that order."""
    casts: tuple[int, ...]
    """The places in ``order`` of the uses through a cast."""
    are_early: bool = False
    """Whether a proxy leaf was cast before the cast that the graph shows."""


class GraphAudit:
    """The audit of one layer. Remembers what it has seen.

    Args:
        name: The layer's qualified name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._uses: dict[Hashable, Uses] = {}
        self.early = EarlyCasts()

    def uses(
        self,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        proxies: Sequence[torch.Tensor],
        form: Hashable,
        first_casts: Mapping[int, int] | None = None,
    ) -> Uses:
        """How the graph of ``results`` uses ``inputs`` and ``proxies``.

        Args:
            results: What the layer gave.
            inputs: What it was given.
            proxies: Its trainable parameters.
            form: Equal forms of call have equal graphs; None if nothing is known of that.
            first_casts: As ``arrivals`` takes them; not those of a known form.

        Raises:
            UnsupportedModelError: If a leaf is neither an input nor a proxy leaf.
        """
        ends = [tensor.requires_grad for tensor in (*inputs, *results)]
        key = (tuple(ends), len(inputs), tuple(map(id, proxies)), form)
        known = self._uses.get(key) if form is not None else None
        if known is None:
            known = self._walk(results, inputs, proxies, first_casts or {})
            used = {number for number in known.order if number >= len(inputs)}
            if form is not None and len(used) == len(proxies):
                if len(self._uses) >= _MAX_FORMS:
                    del self._uses[next(iter(self._uses))]
                self._uses[key] = known
        return known

    def _walk(
        self,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        proxies: Sequence[torch.Tensor],
        first_casts: Mapping[int, int],
    ) -> Uses:
        note_last(results)
        numbers = {id(source): number for number, source in enumerate((*inputs, *proxies))}
        order: list[int] = []
        casts: list[int] = []
        places: dict[int, list[Place]] = {}
        are_early = False
        for use in arrivals(results, (*inputs, *proxies), first_casts):
            number = numbers.get(id(use.leaf))
            if number is None:
                raise self._stranger(use)
            if use.is_cast:
                casts.append(len(order))
                made = use.node._sequence_nr()
                are_early |= first_casts.get(id(use.leaf), made) != made
            order.append(number)
            places.setdefault(number, []).append(place_of(use))
        several = {number: tuple(uses) for number, uses in places.items() if len(uses) > 1}
        return Uses(tuple(order), several, tuple(casts), are_early)

    def _stranger(self, use: Use) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._name}: expected only its inputs and its own adapters to be trainable, found a "
            f"tensor of shape {tuple(use.leaf.shape)} from elsewhere in its graph (from a hook?); "
            "its gradient would be lost"
        )
