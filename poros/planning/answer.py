"""What a plan says to a person: does it fit, how long may rows be, how long will it take.

``Planner`` decides about one step on one budget. Here that is asked for other lengths, other cards
and a run with everything on the device, from the same costs; nothing is measured, so every figure
is a forecast. Times leave the optimizer's own step, evaluation and data loading out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poros.config import LEAST_BUDGET
from poros.host.limits import RESERVE_NUM_BYTES
from poros.planning.cards import CONTEXT_NUM_BYTES, SIZES_GIB, budget_of
from poros.planning.formula import MemoryPlan
from poros.planning.planner import Planner
from poros.planning.request import PlanRequest, Speeds

LENGTH_STEP = 256
"""The longest rows that fit are told in multiples of this many tokens."""
MOST_TOKENS = 2**20
"""How long rows are looked for in a model that does not say how many positions it has."""
TOGETHER = (8, 4, 2)
"""Micro-batches that are tried, in case the link is what a step waits for."""
WORTH_SAYING = 1.15
_ROUGH = 2**26
"""Bytes; what a step needs grows with its rows but for less than this, which goes up and down."""
_EVERYTHING = 10**6  # slots and kept layers: more than there are means all
_LEAST = {"vram_budget": None, "micro_batches": 1}


@dataclass(frozen=True)
class Device:
    """What a step is planned for."""

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
class Standing:
    """What the registry says of a family: ``exact``, ``untested`` or ``refused``, and why."""

    word: str
    reason: str


@dataclass(frozen=True)
class Point:
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        plan = self.plan
        return {
            "seq_len": self.seq_len,
            **({} if self.card_gib is None else {"card_gib": self.card_gib}),
            "fits": self.fits,
            "total_num_bytes": plan and plan.total_num_bytes,
            "num_slots": plan and plan.num_slots,
            "keep_last": plan and plan.keep_last,
            "offload_boundaries": plan and plan.offload_boundaries,
            "host_num_bytes": plan and plan.host_num_bytes,
            "tokens_per_s": self.tokens_per_s,
            "times_resident": self.times_resident,
            "times_checkpointed": self.times_checkpointed,
        }


@dataclass(frozen=True)
class Answer:
    """All that ``poros plan`` says of one request.

    Attributes:
        request: What was asked for, with the budget.
        device: On what.
        host: This machine's memory, or what was said of it.
        point: The step that was asked for.
        plan: Its plan; if it does not fit, the least that there may be.
        advice: What would make it fit, if it does not; lines of the planner's error.
        resident_num_bytes: What a run with everything on the device needs there.
        longest: The longest rows that fit, in tokens; None without a budget, 0 if none does. The
            host counts too, unless the base alone is too much for it.
        max_seq_len: Positions of the model, if it says.
        lengths: The same step over other lengths.
        cards: The same step over other memories, at the rates of ``device``.
        together: The step with several micro-batches going together, where that is worth it.
        standing: Of the family, in the registry.
        model_type: The family.
        num_tokens: To train on, if said.
    """

    request: PlanRequest
    device: Device
    host: Host
    point: Point
    plan: MemoryPlan
    advice: str
    resident_num_bytes: int
    longest: int | None
    max_seq_len: int | None
    lengths: Sequence[Point]
    cards: Sequence[Point]
    together: Point | None
    standing: Standing
    model_type: str
    num_tokens: int | None = None

    @property
    def fits_device(self) -> bool:
        """Whether the step fits the budget."""
        return self.point.plan is not None

    @property
    def fits_host(self) -> bool:
        """Whether the base and what else waits there fit the host memory, as far as it is known."""
        return self.host.holds(self.plan)

    @property
    def fits(self) -> bool:
        """Whether both do."""
        return self.fits_device and self.fits_host

    @property
    def hours(self) -> float | None:
        """For all tokens."""
        if self.num_tokens is None or self.point.tokens_per_s is None:
            return None
        return self.num_tokens / self.point.tokens_per_s / 3600

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``poros plan --json`` prints them: the plan's, and what is beside it."""
        from poros.planning.answer_text import verdict

        return {
            **self.plan.as_dict(),
            "verdict": verdict(self),
            "fits": self.fits,
            "fits_device": self.fits_device,
            "fits_host": self.fits_host,
            "advice": self.advice,
            "forecast": self.device.rates_from,
            **{key: value for key, value in self.point.as_dict().items() if "times" in key},
            "tokens_per_s": self.point.tokens_per_s,
            "resident_num_bytes": self.resident_num_bytes,
            "ram_num_bytes": self.host.whole,
            "ram_left_num_bytes": self.host.left,
            "longest_seq_len": self.longest,
            "max_seq_len": self.max_seq_len,
            "num_tokens": self.num_tokens,
            "hours": self.hours,
            "model_type": self.model_type,
            "registry": {"outcome": self.standing.word, "reason": self.standing.reason},
            "lengths": [point.as_dict() for point in self.lengths],
            "cards": [point.as_dict() for point in self.cards],
        }


def answer(
    planner: Planner,
    request: PlanRequest,
    device: Device,
    host: Host | None = None,
    num_tokens: int | None = None,
) -> Answer:
    """Plan what was asked for, and what stands beside it: about ten plans, some seconds for 72B.

    Args:
        planner: Of the model.
        request: The step; without a budget it is planned with as little as there may be, and
            nothing is said about what fits.
        device: On what, and at which rates.
        host: Host memory, to be compared with; None compares nothing.
        num_tokens: To train on, for the time of all of them.

    Raises:
        PolicyError: If the request makes no sense for the model.
        UnsupportedModelError: If the model cannot be streamed.
    """
    host = host or Host()
    forecaster = _Forecaster(planner, request, device.rates, host)
    point = forecaster.point(request.seq_len)
    longest = None if request.budget is None else forecaster.longest()
    return Answer(
        request=request,
        device=device,
        host=host,
        point=point,
        plan=point.plan or forecaster.least(request.seq_len),
        advice="" if point.plan else planner.advice(request),
        resident_num_bytes=forecaster.resident(request.seq_len, _EVERYTHING).total_num_bytes,
        longest=longest,
        max_seq_len=planner.max_seq_len,
        lengths=[forecaster.point(length) for length in forecaster.lengths(longest)],
        cards=[forecaster.on_card(gib) for gib in SIZES_GIB],
        together=forecaster.together(point),
        standing=standing_of(planner.model_type),
        model_type=planner.model_type,
        num_tokens=num_tokens,
    )


def standing_of(model_type: str) -> Standing:
    """What the registry says of a family; whatever is not on record is untested."""
    from poros.gates.registry import read_registry

    record = read_registry().family(model_type)
    if record.outcome == "exact":
        return Standing("exact", "not one bit differs from a resident run, on record")
    if record.is_refused:
        return Standing("refused", str(record.reason))
    return Standing(
        "untested", f"{record.reason}; `poros check --architecture {model_type}` tries it"
    )


class _Forecaster:
    """Plans of one model at other lengths and budgets, all else as it was asked for."""

    def __init__(
        self,
        planner: Planner,
        request: PlanRequest,
        rates: Callable[[int], Speeds] | None,
        host: Host,
    ) -> None:
        self._planner = planner
        self._request = request
        self._rates = rates
        # Up to which length rows surely fit, and from which on they do not.
        self._fitting, self._too_long = 0, MOST_TOKENS + 1
        # If the base alone is too much for the host, what is on a disk is nobody's limit here.
        base = planner.plan(self._at(request.seq_len, **_LEAST, offload_boundaries=False))
        self._host = host if host.holds(base) else Host()

    def point(self, seq_len: int, **changes: Any) -> Point:
        """A step of that length, with other fields changed."""
        request = self._at(seq_len, **changes)
        plan = self._planner.find(request)
        if plan is None:
            return Point(seq_len, None)
        fits_host = self._host.holds(plan)
        if plan.step_ms is None:
            return Point(seq_len, plan, fits_host=fits_host)
        return Point(
            seq_len,
            plan,
            fits_host=fits_host,
            tokens_per_s=1e3 * request.batch_size * seq_len / plan.step_ms,
            times_resident=plan.step_ms / (self.resident(seq_len, _EVERYTHING).step_ms or 1.0),
            times_checkpointed=plan.step_ms / (self.resident(seq_len, 0).step_ms or 1.0),
        )

    def on_card(self, gib: int) -> Point:
        """The step that was asked for, on a card of that memory."""
        whole = gib * 2**30
        budget = budget_of(whole - CONTEXT_NUM_BYTES, whole)
        return replace(self.point(self._request.seq_len, vram_budget=budget), card_gib=gib)

    def together(self, point: Point) -> Point | None:
        """The step with micro-batches that go together, if that is much faster."""
        if point.tokens_per_s is None or self._request.micro_batches > 1:
            return None
        found = [
            self.point(point.seq_len, micro_batches=number, accumulation=number)
            for number in TOGETHER
        ]
        best = max(found, key=lambda each: each.tokens_per_s or 0.0)
        gain = (best.tokens_per_s or 0.0) / point.tokens_per_s
        return best if gain >= WORTH_SAYING else None

    def resident(self, seq_len: int, keep_last: int) -> MemoryPlan:
        """A run with everything on the device, that keeps so many graphs."""
        request = self._at(
            seq_len,
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
        return self._planner.plan(request)

    def least(self, seq_len: int) -> MemoryPlan:
        """The least that a step of that length needs."""
        offload = self._request.offload_boundaries
        plans = (
            self._planner.plan(
                self._at(
                    seq_len,
                    **_LEAST,
                    offload_boundaries=choice,
                    without_recordings=True,
                )
            )
            for choice in ((False, True) if offload is None else (offload,))
        )
        return min(plans, key=lambda plan: plan.total_num_bytes)

    def lengths(self, longest: int | None) -> Iterator[int]:
        """The lengths to compare: doubling from 512 to the longest, and the one asked for."""
        most = self._planner.max_seq_len or MOST_TOKENS
        if longest is not None:
            most = min(most, longest)
        elif self._planner.max_seq_len is None:
            most = 2**15
        doubling = [512 * 2**power for power in range(12) if 512 * 2**power <= most]
        last = [longest] if longest else []
        yield from sorted({*doubling, *last, self._request.seq_len})

    def longest(self) -> int:
        """The longest rows that fit, a multiple of ``LENGTH_STEP`` or all positions; 0 if none."""
        limit = self._planner.max_seq_len or MOST_TOKENS
        if self._fits(limit):
            return limit
        low, high = 0, -(-limit // LENGTH_STEP)  # in steps; the first is nothing, the last too much
        if self._request.micro_batches == 1:
            # Near the end is what tells most of the others.
            near = self._request.seq_len
            for _ in range(3):
                near = self._expected(near, limit)
            self._fits(near)
            self._fits(min(near + LENGTH_STEP, limit))
        while high - low > 1:
            number = (low + high) // 2
            low, high = (number, high) if self._fits(number * LENGTH_STEP) else (low, number)
        return low * LENGTH_STEP

    def _expected(self, seq_len: int, limit: int) -> int:
        """About the longest rows that fit, in whole steps, from the need of two lengths."""
        near, far = self.least(seq_len), self.least(limit)
        needs = [(near.total_num_bytes, far.total_num_bytes, self._request.budget or 0)]
        if self._host.whole is not None:
            room = self._host.whole - RESERVE_NUM_BYTES
            needs.append((near.host_num_bytes, far.host_num_bytes, room))
        share = min((room - need) / max(most - need, 1) for need, most, room in needs)
        found = seq_len + int((limit - seq_len) * share)
        return min(max(found // LENGTH_STEP, 1) * LENGTH_STEP, limit)

    def _fits(self, seq_len: int) -> bool:
        if not self._fitting < seq_len < self._too_long:
            return seq_len <= self._fitting
        request = self._at(seq_len)
        found = self._holds(request)
        # Of micro-batches fewer may go together at some length, which needs less than a shorter.
        if request.micro_batches == 1:
            budget = request.budget or 0
            roughly = max(budget - _ROUGH, LEAST_BUDGET) if found else budget + _ROUGH
            if self._holds(replace(request, vram_budget=roughly)) == found:
                if found:
                    self._fitting = seq_len
                else:
                    self._too_long = seq_len
        return found

    def _holds(self, request: PlanRequest) -> bool:
        plan = self._planner.find(request)
        return plan is not None and self._host.holds(plan)

    def _at(self, seq_len: int, **changes: Any) -> PlanRequest:
        rates = self._rates
        speeds = None if rates is None else rates(seq_len * self._request.batch_size)
        return replace(self._request, **{"seq_len": seq_len, "speeds": speeds, **changes})
