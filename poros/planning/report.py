"""The report of ``poros plan``: does a step fit, how long may rows be, how long does it take.

Nothing is measured, so every figure is a forecast. Times leave the optimizer's own step, evaluation
and data loading out.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poros.errors import quoted
from poros.host.limits import RESERVE_NUM_BYTES
from poros.planning.formula import MemoryPlan
from poros.planning.planner import Planner, format_remedies
from poros.planning.request import PlanRequest, Speeds
from poros.utils.formatting import counted, size, two_digits

if TYPE_CHECKING:
    from rich.console import Group

LENGTH_STEP = 256
"""The longest rows that fit are reported in multiples of this many tokens."""
MOST_TOKENS = 2**20
"""The longest rows that are tried for a model whose configuration has no number of positions."""
TOGETHER = (8, 4, 2)
"""Numbers of micro-batches that are tried, for what they would gain together."""
WORTH_SAYING = 1.15
"""The least speed-up for which they are advised."""
_EVERYTHING = 10**6  # a number of slots and kept layers that means all of them

_FIGURES = {
    "total_num_bytes": "memory on the card",
    "longest_seq_len": "longest rows that fit, in tokens",
    "max_seq_len": "longest rows of the model, in tokens",
    "step_ms": "time of a micro-batch, in ms",
    "times_checkpointed": "x the time with gradient checkpointing",
    "resident_num_bytes": "a resident run needs",
    "forecast": "forecast from",
    "copy_gb_per_s": "PCIe copies, in GB/s",
    "tflop_per_s": "matrix products, in TFLOP/s",
}
"""Titles of values of ``fit_report`` in the printed table."""


@dataclass(frozen=True)
class Device:
    """The device that a step is planned for."""

    title: str
    """Its name with an article, for sentences: "an RTX 4090 (24 GB)"."""
    rates: Callable[[int], Speeds] | None = None
    """Returns the rates for a micro-batch of so many tokens; None forecasts no time."""
    rates_from: str = ""
    """Source of the rates, for the label of the forecast."""


def fit_report(
    planner: Planner, request: PlanRequest, device: Device, ram: int | None = None
) -> dict[str, Any]:
    """Answer ``poros plan``: the values of the step's plan, and of plans of other runs.

    It plans the step and searches the longest rows, which takes some seconds for 72B.

    Args:
        request: The step; without a budget it is planned with as little as there may be, and
            nothing is said about what fits.
        ram: Host memory in bytes that the plan is compared with; None compares nothing.

    Returns:
        Plain values, as ``poros plan --json`` prints them. If the step does not fit, those of the
        plan are of the one that needs the least memory. ``resident`` is a run with everything on
        the device and every graph kept, ``checkpointed`` one that recomputes every layer.
        ``longest_seq_len`` is None without a budget, 0 if no rows fit, a multiple of
        ``LENGTH_STEP`` if the step fits; rows have to fit host memory
        too, unless the base alone does not.

    Raises:
        PolicyError: If the request makes no sense for the model.
        UnsupportedModelError: If the model cannot be streamed.
    """
    from poros.gates.registry import OUTCOMES, read_registry

    if device.rates is not None:
        request = request.override(speeds=device.rates(request.seq_len * request.batch_size))
    found = planner.find(request)
    plan = found or planner.least(request)
    fits_host = _holds(ram, plan)
    resident, checkpointed = (_resident(planner, request, kept) for kept in (_EVERYTHING, 0))
    tokens_per_s = None if found is None else _tokens_per_s(found)

    def times(other: MemoryPlan) -> float | None:
        if tokens_per_s is None or not plan.step_ms or not other.step_ms:
            return None
        return plan.step_ms / other.step_ms

    record = read_registry().family(planner.model_type)
    values = {
        **plan.as_dict(),
        "fits": found is not None and fits_host,
        "fits_device": found is not None,
        "fits_host": fits_host,
        "forecast": device.rates_from,
        "tokens_per_s": tokens_per_s,
        "times_resident": times(resident),
        "times_checkpointed": times(checkpointed),
        "resident_num_bytes": resident.total_num_bytes,
        "ram_num_bytes": ram,
        "longest_seq_len": None
        if request.budget is None
        else _longest(planner, request, ram, is_exact=found is None),
        "max_seq_len": planner.max_seq_len,
        "model_type": planner.model_type,
        "registry": {
            "outcome": record.outcome,
            "reason": record.reason or OUTCOMES[record.outcome],
        },
    }
    advice = [] if request.budget is not None else ["Give --vram or --card to see what fits."]
    if found is None:
        advice.append(format_remedies(planner.remedies(request)))
    else:
        together = _together(planner, request, found)
        advice += _advice(values, request.micro_batches, together)
    return {**values, "verdict": _verdict(values, device.title), "advice": "\n".join(advice)}


def _verdict(values: Mapping[str, Any], title: str) -> str:
    """Say in one sentence whether the step fits, what lies on the card and the host, its rate."""
    needed, budget = f"at least {size(values['total_num_bytes'])}", values["vram_budget"]
    if budget is None:
        begin = f"Needs {needed} on the card"
    elif not values["fits_device"]:
        return (
            f"Does not fit {title}: the step needs {needed}, and the budget for training is "
            f"{size(budget)}."
        )
    else:
        begin = f"Fits {title}" + ("" if values["fits_host"] else ", but not the host memory")
    host = "" if values["ram_num_bytes"] is None else f" (of {size(values['ram_num_bytes'])})"
    kept = values["keep_last"]
    parts = [
        f"{values['num_slots']} of {values['num_blocks']} blocks stay on the card",
        f"{counted(kept, 'layer')} not recomputed" if kept else "",
        f"{size(values['host_num_bytes'])} of host memory{host}",
    ]
    if values["tokens_per_s"] is not None:
        parts += [
            f"about {two_digits(values['tokens_per_s'])} tokens/s",
            f"{values['times_resident']:.1f} x the time of a resident run",
        ]
    return f"{begin}: {', '.join(filter(None, parts))}."


def _advice(values: Mapping[str, Any], wanted: int, together: MemoryPlan | None) -> Iterator[str]:
    """Yield changes of a step that fits the device, a sentence each, that make it faster or fit."""
    if not values["fits_host"]:
        if values["offload_boundaries"]:
            yield "Shorter rows, fewer rows or fewer micro-batches need less host memory."
        yield "Part of the base can stay on disk: poros.load(..., store=DIR, host_budget=...)."
    if values["tokens_per_s"] is None:
        yield "Time is not forecast without --card."
    number = values["micro_batches"]
    if number == 1 < wanted and values["keep_last"]:
        yield (
            f"The {wanted} micro-batches of a step run one after the other, which is faster "
            "here: most layers keep their activations, so that nothing is recomputed for them."
        )
    elif number < wanted:
        yield f"{number} of {wanted} micro-batches share each block; more do not fit."
    if together is not None:
        yield (
            f"--accumulate {together.micro_batches} would reach about "
            f"{two_digits(_tokens_per_s(together) or 0.0)} tokens/s: micro-batches share PCIe "
            "copies and dequantized weights."
        )


def _holds(ram: int | None, plan: MemoryPlan) -> bool:
    """Whether host memory holds what a plan leaves there, and all else that runs."""
    return ram is None or plan.host_num_bytes + RESERVE_NUM_BYTES <= ram


def _tokens_per_s(plan: MemoryPlan) -> float | None:
    if plan.step_ms is None:
        return None
    num_tokens: int = plan.options["batch_size"] * plan.options["seq_len"]
    return 1e3 * num_tokens / plan.step_ms


def _resident(planner: Planner, request: PlanRequest, keep_last: int) -> MemoryPlan:
    """Plan a run with everything on the device that keeps so many graphs."""
    everything = request.override(
        vram_budget=None,
        num_slots=_EVERYTHING,
        keep_last=keep_last,
        offload_boundaries=False,
        stream_head=False,
        stream_embedding=False,
        micro_batches=1,
        self_check=False,
        cuda_graphs=False,
    )
    return planner.plan(everything)


def _together(planner: Planner, request: PlanRequest, found: MemoryPlan) -> MemoryPlan | None:
    """Plan micro-batches that go together; None unless that is much faster."""
    if not found.step_ms or request.micro_batches > 1:
        return None
    several = (request.override(micro_batches=each, accumulation=each) for each in TOGETHER)
    plans = [plan for plan in map(planner.find, several) if plan and plan.micro_batches > 1]
    best = min(plans, key=lambda plan: plan.step_ms or 0.0, default=None)
    is_worth_it = best and found.step_ms >= WORTH_SAYING * (best.step_ms or 0.0)
    return best if is_worth_it else None


def _longest(planner: Planner, request: PlanRequest, ram: int | None, *, is_exact: bool) -> int:
    """Find the longest rows that fit: all positions, a multiple of ``LENGTH_STEP``, or 0.

    Args:
        is_exact: Find the number itself, as the advice about a step that does not fit has it.
    """
    # If the base alone does not fit the host, part of it is on a disk, and the host is no limit.
    if not _holds(ram, planner.least(request.override(offload_boundaries=False))):
        ram = None

    def fits(seq_len: int) -> bool:
        plan = planner.find(request.override(seq_len=seq_len))
        return plan is not None and _holds(ram, plan)

    limit = planner.max_seq_len or MOST_TOKENS
    if fits(limit):
        return limit
    steps = range(LENGTH_STEP, limit, LENGTH_STEP)
    longest = LENGTH_STEP * bisect_left(steps, True, key=lambda length: not fits(length))
    rest = range(longest + 1, longest + LENGTH_STEP if is_exact else longest)
    return longest + bisect_left(rest, True, key=lambda length: not fits(length))


def format_report(values: Mapping[str, Any], *, with_terms: bool = False) -> "Group":
    """Format a report for ``rich``: verdict, advice, and the figures that are known.

    Args:
        with_terms: Also show the plan's memory term by term.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(figures: Mapping[str, str]) -> Table:
        grid = Table.grid(padding=(0, 2))
        for title, text in figures.items():
            if text:
                grid.add_row(Text(title), Text(text))
        return grid

    color = "" if values["vram_budget"] is None else "green" if values["fits"] else "red"
    figures = {title: _text(name, values[name]) for name, title in _FIGURES.items()}
    record = values["registry"]
    reason = quoted(record["reason"], is_bare=True)
    figures[values["model_type"]] = f"{record['outcome']} ({reason})"
    parts: list[Any] = [
        Text(values["verdict"], style=f"bold {color}"),
        *map(Text, values["advice"].splitlines()),
        "\nAll figures are forecasts:\n",
        table(figures),
    ]
    if with_terms:
        terms = {name: _text("num_bytes", each) for name, each in values["terms"].items()}
        parts += ["\nMemory on the card:\n", table(terms)]
    return Group(*parts)


def _text(name: str, value: Any) -> str:
    """Format a figure in the unit that its name implies."""
    if value is None:
        return ""
    if name.endswith("num_bytes"):
        return size(value)
    if isinstance(value, float):
        return f"{value:.2f}" if name.startswith("times") else two_digits(value)
    return f"{value:,}" if isinstance(value, int) else quoted(value, is_bare=True)
