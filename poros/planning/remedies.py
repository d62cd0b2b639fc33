"""Finds the least change of each setting that makes a step fit.

Every figure is that of a plan, at a fraction of a second each. Another rank needs another model on
the meta device.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from poros.planning.cost_model import CostModel
from poros.planning.request import PlanRequest
from poros.utils.formatting import size

_LEAST_TOKENS = 64
"""Of a row that is advised; what fits in less is no training."""


@dataclass(frozen=True)
class Remedy:
    """A setting at a value, and what the step needs then."""

    knob: str
    """A field of the request or of its policy, or ``rank``."""
    value: int | bool
    num_bytes: int
    saved_num_bytes: int
    """How much less that is."""
    fits: bool


class Remedies:
    """Tries settings for a step that does not fit.

    Args:
        cost_model: Of the model.
        request: The step, with the budget that is too small.
    """

    def __init__(self, cost_model: CostModel, request: PlanRequest) -> None:
        self._cost_model = cost_model
        self._budget = request.budget or 0
        # With as few slots, kept layers and recordings as there may be, and boundaries where a
        # budget that is too small would have them.
        self._request = request.override(
            vram_budget=None,
            offload_boundaries=request.policy.offload_boundaries is not False,
            without_recordings=True,
        )
        self._before = cost_model.plan(self._request)

    def __iter__(self) -> Iterator[Remedy]:
        """Yield for each setting the least change that fits, or the largest saving."""
        return (found for found in self._tries() if found.saved_num_bytes > 0)

    def _tries(self) -> Iterator[Remedy]:
        policy = self._request.policy
        if not policy.offload_boundaries:
            yield self._changed("offload_boundaries", True)
        if policy.block_size > 1:
            sizes = range(policy.block_size - 1, 0, -1)
            smaller = [self._changed("block_size", size) for size in sizes]
            yield next((found for found in smaller if found.fits), smaller[-1])
        for knob, lowest in (("seq_len", _LEAST_TOKENS), ("batch_size", 1)):
            most = getattr(self._request, knob)
            if most > lowest:
                least = self._changed(knob, lowest)
                change = partial(self._changed, knob)
                yield self._largest(change, lowest, most) if least.fits else least
        highest = self._cost_model.recipe.rank or 1
        terms = self._before.terms
        spent = sum(terms[name] for name in ("adapters", "optimizer", "gradients"))
        none = self._remedy("rank", 0, self._before.total_num_bytes - spent)
        if highest > 1 and none.fits:
            least = self._with_rank(1)
            if least.fits:
                yield self._largest(self._with_rank, 1, highest)

    def _changed(self, knob: str, value: int | bool) -> Remedy:
        plan = self._cost_model.plan(self._request.override(**{knob: value}))
        return self._remedy(knob, value, plan.total_num_bytes)

    def _with_rank(self, value: int) -> Remedy:
        plan = CostModel(self._cost_model.recipe.with_rank(value)).plan(self._request)
        return self._remedy("rank", value, plan.total_num_bytes)

    def _remedy(self, knob: str, value: int | bool, num_bytes: int) -> Remedy:
        saved = self._before.total_num_bytes - num_bytes
        return Remedy(knob, value, num_bytes, saved, num_bytes <= self._budget)

    def _largest(self, make: Callable[[int], Remedy], lowest: int, most: int) -> Remedy:
        """Find the largest value that fits, from ``lowest``, which does, up to below ``most``."""
        values = range(lowest + 1, most)
        number = bisect_left(values, True, key=lambda value: not make(value).fits)
        return make(lowest + number)


def format_remedies(remedies: Sequence[Remedy]) -> str:
    """Format remedies: a line of those that make it fit, and a line of the others."""
    fitting = [f"{found.knob}={found.value}" for found in remedies if found.fits]
    saving = [
        f"{found.knob}={found.value} ({size(found.saved_num_bytes)})"
        for found in remedies
        if not found.fits
    ]
    line = f"What would make it fit, each change alone: {'; '.join(fitting) or 'only more memory'}"
    if not saving:
        return line
    return f"{line}\nWhat would save memory, but not enough alone: {'; '.join(saving)}"
