"""The report of ``poros plan``: does a step fit, how long may rows be, how long does it take.

Nothing is measured, so every figure is a forecast. Times leave the optimizer's own step, evaluation
and data loading out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poros.host.limits import RESERVE_NUM_BYTES
from poros.planning.formula import MemoryPlan
from poros.planning.remedies import Remedy, format_remedies
from poros.planning.request import PlanRequest, Speeds
from poros.utils.formatting import size, two_digits


@dataclass(frozen=True)
class Device:
    """The device that a step is planned for."""

    title: str
    """As a sentence has it: "an RTX 4090 (24 GB)"."""
    rates: Callable[[int], Speeds] | None = None
    """For a micro-batch of so many tokens; None forecasts no time."""
    rates_from: str = ""
    """Where those come from, for the label of the forecast."""


@dataclass(frozen=True)
class Host:
    """Host memory, in bytes; None is not known."""

    whole: int | None = None
    left: int | None = None

    def holds(self, plan: MemoryPlan) -> bool:
        """Whether what a plan leaves in host memory fits there, and all else that runs."""
        return self.whole is None or plan.host_num_bytes + RESERVE_NUM_BYTES <= self.whole


@dataclass(frozen=True)
class Scenario:
    """A step with rows of one length on one budget."""

    seq_len: int
    plan: MemoryPlan | None
    """None if it does not fit."""
    tokens_per_s: float | None = None
    times_resident: float | None = None
    """How long it takes beside a run with everything on the device and every graph kept, whether
    that would fit or not."""
    times_checkpointed: float | None = None
    """The same where that run recomputes every layer."""
    card_gib: int | None = None
    """Whose memory the budget is part of, in a comparison of cards."""
    fits_host: bool = True
    """Whether what waits in host memory fits there, as far as that is known."""

    @property
    def fits(self) -> bool:
        """Whether it fits the device and the host."""
        return self.plan is not None and self.fits_host

    @property
    def rates(self) -> dict[str, float | None]:
        """Its rates."""
        names = ("tokens_per_s", "times_resident", "times_checkpointed")
        return {name: getattr(self, name) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        found = {name: getattr(self.plan, name, None) for name in _OF_PLAN}
        card = {} if self.card_gib is None else {"card_gib": self.card_gib}
        return {"seq_len": self.seq_len, **card, "fits": self.fits, **found, **self.rates}


_OF_PLAN = ("total_num_bytes", "num_slots", "keep_last", "offload_boundaries", "host_num_bytes")


@dataclass(frozen=True)
class FitReport:
    """The result of ``poros plan`` for one request.

    Attributes:
        request: What was asked for, with the budget.
        device: On what.
        host: This machine's memory, or the given one.
        scenario: The step that was asked for.
        plan: Its plan; if it does not fit, the least that there may be.
        remedies: What would make it fit, if it does not, or save something at least.
        resident_num_bytes: What a run with everything on the device needs there.
        longest: The longest rows that fit, in tokens; None without a budget, 0 if none does. The
            host counts too, unless the base alone is too much for it.
        max_seq_len: Positions of the model, if its configuration has them.
        lengths: The same step over other lengths.
        cards: The same step over other memories, at the rates of ``device``.
        together: The step with several micro-batches going together, where that is worth it.
        record: Of the family, in the registry: its outcome, and the reason of that.
        model_type: The family.
        num_tokens: To train on, if given.
    """

    request: PlanRequest
    device: Device
    host: Host
    scenario: Scenario
    plan: MemoryPlan
    remedies: Sequence[Remedy]
    resident_num_bytes: int
    longest: int | None
    max_seq_len: int | None
    lengths: Sequence[Scenario]
    cards: Sequence[Scenario]
    together: Scenario | None
    record: tuple[str, str]
    model_type: str
    num_tokens: int | None = None

    @property
    def fits_device(self) -> bool:
        """Whether the step fits the budget."""
        return self.scenario.plan is not None

    @property
    def fits_host(self) -> bool:
        """Whether the base and what else waits there fit the host memory, as far as it is known."""
        return self.host.holds(self.plan)

    @property
    def fits(self) -> bool:
        """Whether both do."""
        return self.fits_device and self.fits_host

    @property
    def seconds(self) -> float | None:
        """Seconds for all tokens."""
        if self.num_tokens is None or self.scenario.tokens_per_s is None:
            return None
        return self.num_tokens / self.scenario.tokens_per_s

    @property
    def verdict(self) -> str:
        """One sentence: whether it fits, with what on the card and the host, and how fast it is."""
        plan, title, budget = self.plan, self.device.title, self.request.budget
        needed = f"at least {size(plan.total_num_bytes)}"
        if budget is None:
            begin = f"Needs {needed} on the card"
        elif not self.fits_device:
            return (
                f"Does not fit {title}: the step needs {needed}, and the budget for training is "
                f"{size(budget)}."
            )
        else:
            begin = f"Fits {title}" + ("" if self.fits_host else ", but not the host memory")
        whole = self.host.whole
        host = "" if whole is None else f" (of {size(whole)})"
        parts = [
            f"{plan.num_slots} of {plan.num_blocks} blocks stay on the card",
            f"{plan.keep_last} layers are not recomputed" if plan.keep_last else "",
            f"{size(plan.host_num_bytes)} of host memory{host}",
        ]
        if self.scenario.tokens_per_s is not None:
            parts += [
                f"about {two_digits(self.scenario.tokens_per_s)} tokens/s",
                f"{self.scenario.times_resident:.1f} x the time of a resident run",
            ]
        return f"{begin}: {', '.join(filter(None, parts))}."

    @property
    def advice(self) -> str:
        """Changes that make it fit or faster, a sentence per line."""
        return "\n".join(self._advice())

    def _advice(self) -> Iterator[str]:
        plan, wanted, together = self.plan, self.request.micro_batches, self.together
        if self.request.budget is None:
            yield "Give --vram or --card to see what fits."
        if not self.fits_device:
            yield format_remedies(self.remedies)
            return
        if not self.fits_host:
            if plan.offload_boundaries:
                yield "Shorter rows, fewer rows or fewer micro-batches need less host memory."
            yield "Part of the base can stay on disk: poros.load(..., store=DIR, host_budget=...)."
        if self.scenario.tokens_per_s is None:
            yield "Time is not forecast without --card."
        if plan.micro_batches == 1 < wanted and plan.keep_last:
            yield (
                f"The {wanted} micro-batches of a step run one after the other, which is faster "
                "here: most layers keep their activations, so that nothing is recomputed for them."
            )
        elif plan.micro_batches < wanted:
            number = plan.micro_batches
            yield f"{number} of {wanted} micro-batches share each block; more do not fit."
        if together is not None and together.plan is not None:
            yield (
                f"PCIe copies limit the step: --accumulate {together.plan.micro_batches} would "
                f"reach about {two_digits(together.tokens_per_s or 0.0)} tokens/s."
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``poros plan --json`` prints them: the plan's, and what is beside it."""
        return {
            **self.plan.as_dict(),
            "verdict": self.verdict,
            "fits": self.fits,
            "fits_device": self.fits_device,
            "fits_host": self.fits_host,
            "advice": self.advice,
            "forecast": self.device.rates_from,
            **self.scenario.rates,
            "resident_num_bytes": self.resident_num_bytes,
            "ram_num_bytes": self.host.whole,
            "ram_left_num_bytes": self.host.left,
            "longest_seq_len": self.longest,
            "max_seq_len": self.max_seq_len,
            "num_tokens": self.num_tokens,
            "hours": self.seconds and self.seconds / 3600,
            "model_type": self.model_type,
            "registry": dict(zip(("outcome", "reason"), self.record, strict=True)),
            "lengths": [scenario.as_dict() for scenario in self.lengths],
            "cards": [scenario.as_dict() for scenario in self.cards],
        }
