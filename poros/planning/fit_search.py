"""Fills a ``FitReport``: one planner, evaluated for several lengths, cards and layouts."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from poros.config import budget_of
from poros.planning.cards import CONTEXT_NUM_BYTES, SIZES_GIB
from poros.planning.fit_report import Device, FitReport, Host, Scenario
from poros.planning.formula import MemoryPlan
from poros.planning.planner import Planner
from poros.planning.request import PlanRequest

LENGTH_STEP = 256
"""The longest rows that fit are reported in multiples of this many tokens."""
MOST_TOKENS = 2**20
"""The longest rows to try for a model whose configuration has no number of positions."""
TOGETHER = (8, 4, 2)
"""Micro-batches that are tried, in case the link is what a step waits for."""
WORTH_SAYING = 1.15
_EVERYTHING = 10**6  # slots and kept layers: more than there are means all


def report_fit(
    planner: Planner,
    request: PlanRequest,
    device: Device,
    host: Host | None = None,
    num_tokens: int | None = None,
) -> FitReport:
    """Plan the requested step and its alternatives: about 20 plans, some seconds for 72B.

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
    from poros.gates.registry import OUTCOMES, read_registry

    host = host or Host()
    search = _Search(planner, request, device, host)
    scenario = search.scenario(request.seq_len)
    record = read_registry().family(planner.model_type)
    longest = None if request.budget is None else search.longest()
    return FitReport(
        request=request,
        device=device,
        host=host,
        scenario=scenario,
        plan=scenario.plan or search.least(),
        remedies=() if scenario.plan else planner.remedies(request),
        resident_num_bytes=search.resident(request.seq_len, _EVERYTHING).total_num_bytes,
        longest=longest,
        max_seq_len=planner.max_seq_len,
        lengths=[search.scenario(length) for length in search.lengths(longest)],
        cards=[search.on_card(gib) for gib in SIZES_GIB],
        together=search.together(scenario),
        record=(record.outcome, record.reason or OUTCOMES[record.outcome]),
        model_type=planner.model_type,
        num_tokens=num_tokens,
    )


class _Search:
    """Plans one model at other lengths and budgets."""

    def __init__(self, planner: Planner, request: PlanRequest, device: Device, host: Host) -> None:
        self._planner, self._request, self._rates = planner, request, device.rates
        # If the base alone is too much for the host, what is on a disk is nobody's limit here.
        self._host = host if host.holds(self.least(offload_boundaries=False)) else Host()

    def scenario(self, seq_len: int, **changes: Any) -> Scenario:
        """Plan a step of that length, with other fields changed."""
        request = self._at(seq_len, **changes)
        plan = self._planner.find(request)
        if plan is None:
            return Scenario(seq_len, None)
        found = Scenario(seq_len, plan, fits_host=self._host.holds(plan))
        if plan.step_ms is None:
            return found
        whole, checkpointed = (self.resident(seq_len, kept) for kept in (_EVERYTHING, 0))
        return replace(
            found,
            tokens_per_s=1e3 * request.batch_size * seq_len / plan.step_ms,
            times_resident=plan.step_ms / (whole.step_ms or 1.0),
            times_checkpointed=plan.step_ms / (checkpointed.step_ms or 1.0),
        )

    def on_card(self, gib: int) -> Scenario:
        """Plan the requested step on a card of that memory."""
        budget = budget_of(gib * 2**30 - CONTEXT_NUM_BYTES, gib * 2**30)
        return replace(self.scenario(self._request.seq_len, vram_budget=budget), card_gib=gib)

    def together(self, scenario: Scenario) -> Scenario | None:
        """Plan micro-batches that go together; None unless that is much faster."""
        if scenario.tokens_per_s is None or self._request.micro_batches > 1:
            return None
        found = [
            self.scenario(scenario.seq_len, micro_batches=number, accumulation=number)
            for number in TOGETHER
        ]
        best = max(found, key=lambda each: each.tokens_per_s or 0.0)
        gain = (best.tokens_per_s or 0.0) / scenario.tokens_per_s
        return best if gain >= WORTH_SAYING else None

    def resident(self, seq_len: int, keep_last: int) -> MemoryPlan:
        """Plan a run with everything on the device that keeps so many graphs."""
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

    def least(self, **changes: Any) -> MemoryPlan:
        """Plan the requested step with the least memory, with other fields changed."""
        least = {"vram_budget": None, "micro_batches": 1, "without_recordings": True}
        request = self._at(self._request.seq_len, **least, **changes)
        offload = request.policy.offload_boundaries
        plans = (
            self._planner.plan(request.override(offload_boundaries=choice))
            for choice in ((False, True) if offload is None else (offload,))
        )
        return min(plans, key=lambda plan: plan.total_num_bytes)

    def lengths(self, longest: int | None) -> Iterator[int]:
        """List the lengths to compare: doubling from 512 to the longest, and the requested one."""
        most = self._planner.max_seq_len or (2**15 if longest is None else MOST_TOKENS)
        if longest is not None:
            most = min(most, longest)
        doubling = [512 * 2**power for power in range(12) if 512 * 2**power <= most]
        last = [longest] if longest else []
        yield from sorted({*doubling, *last, self._request.seq_len})

    def longest(self) -> int:
        """Find the longest rows that fit: a multiple of ``LENGTH_STEP``, or all positions; or 0."""
        limit = self._planner.max_seq_len or MOST_TOKENS
        if self._fits(limit):
            return limit
        # Halving powers of two meets lengths that are compared anyway, whose costs are known then.
        steps = range(1, 2 ** (-(-limit // LENGTH_STEP) - 1).bit_length())
        fitting = bisect_left(steps, True, key=lambda step: not self._fits(step * LENGTH_STEP))
        return fitting * LENGTH_STEP

    def _fits(self, seq_len: int) -> bool:
        is_possible = seq_len <= (self._planner.max_seq_len or MOST_TOKENS)
        plan = self._planner.find(self._at(seq_len)) if is_possible else None
        return plan is not None and self._host.holds(plan)

    def _at(self, seq_len: int, **changes: Any) -> PlanRequest:
        speeds = self._rates and self._rates(seq_len * self._request.batch_size)
        return self._request.override(**{"seq_len": seq_len, "speeds": speeds, **changes})
