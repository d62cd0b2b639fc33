"""What would make a step fit a budget that is too small: each knob alone, planned again."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from poros.planning.cost_model import CostModel, Request

_MOST_TRIES = 12
_PRECISION = 0.02
"""By how much, in proportion, a larger value than the one that is named may fit too."""


class _Try(NamedTuple):
    """A knob at a value, and what the step needs then."""

    knob: str
    value: int | bool
    num_bytes: int


def advice(cost_model: CostModel, request: Request, budget: int) -> str:
    """Name the least change of each knob that makes the step fit, or what it saves if none does.

    Every figure is that of a plan, at a fraction of a second each. Another rank needs another model
    on the meta device, which takes a second or two at 72B.

    Args:
        cost_model: Of the model.
        request: What does not fit.
        budget: Bytes.
    """
    before = _need(cost_model, request)
    fitting, saving = [], []
    for knob, value, num_bytes in _tries(cost_model, request, before, budget):
        if num_bytes <= budget:
            fitting.append(f"{knob}={value}")
        elif num_bytes < before:
            saving.append(f"{knob}={value} ({(before - num_bytes) / 1e9:.2f} GB)")
    lines = ["What would make it fit, each alone: " + ("; ".join(fitting) or "only more memory")]
    if saving:
        lines.append("What would save some, but too little alone: " + "; ".join(saving))
    return "\n".join(lines)


def _tries(cost_model: CostModel, request: Request, before: int, budget: int) -> Iterator[_Try]:
    def changed(knob: str, value: int | bool) -> _Try:
        other: Request = replace(request, **{knob: value})  # type: ignore[arg-type]
        return _Try(knob, value, _need(cost_model, other))

    def rank(value: int) -> _Try:
        other = CostModel(cost_model.recipe.with_rank(value))
        return _Try("rank", value, _need(other, request))

    if request.offload_boundaries is False:
        yield changed("offload_boundaries", True)
    smaller = [changed("block_size", each) for each in range(request.block_size - 1, 0, -1)]
    if smaller:
        yield next((each for each in smaller if each.num_bytes <= budget), smaller[-1])
    for knob in ("seq_len", "batch_size"):
        most = _Try(knob, getattr(request, knob), before)
        if most.value > 1:
            least = changed(knob, 1)
            fits = least.num_bytes <= budget
            yield _largest(partial(changed, knob), least, most, budget) if fits else least
    highest = cost_model.recipe.rank
    if highest is not None and highest > 1:
        terms = cost_model.plan(_lowest(request), None).terms
        without = before - sum(terms[each] for each in ("adapters", "optimizer", "gradients"))
        if without < budget:
            low, high = _Try("rank", 0, without), _Try("rank", highest, before)
            found = _largest(rank, low, high, budget, is_linear=True)
            if found.value:
                yield found


def _largest(
    make: Callable[[int], _Try], low: _Try, high: _Try, budget: int, *, is_linear: bool = False
) -> _Try:
    """About the largest value that fits, between one that does and one that does not.

    If what is needed ``is_linear`` in it, the first that fits is taken for the largest.
    """
    for attempt in range(_MOST_TRIES):
        if high.value - low.value <= max(1, int(high.value * _PRECISION)):
            break
        # What is needed grows almost in proportion; halving helps where it does not.
        share = (budget - low.num_bytes) / (high.num_bytes - low.num_bytes)
        guess = low.value + int((high.value - low.value) * (share if attempt % 4 < 3 else 0.5))
        found = make(min(max(guess, low.value + 1), high.value - 1))
        low, high = (found, high) if found.num_bytes <= budget else (low, found)
        if is_linear and low is found:
            break
    return low


def _lowest(request: Request) -> Request:
    """With boundaries where a budget that is too small would have them."""
    if request.offload_boundaries is not None:
        return request
    return replace(request, offload_boundaries=True)


def _need(cost_model: CostModel, request: Request) -> int:
    """Bytes, with as few slots and kept layers as there may be."""
    return cost_model.plan(_lowest(request), None).total_num_bytes
