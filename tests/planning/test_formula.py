"""Plans from numbers alone: what a budget becomes, what is counted when, and time."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.config import parse_num_bytes
from poros.errors import PolicyError, VRAMBudgetError
from poros.host.layout import BlockLayout
from poros.planning import formula
from poros.planning.formula import LayerCost, MemoryPlan, Shapes, StepCost, plan_for
from poros.planning.request import PlanRequest, Speeds, optimizer_cost
from tests.planning.cells import OperatorBytes, num_bytes, optimizer_of, state_of

_TENSOR = torch.empty(1000, dtype=torch.uint8, device="meta")
SHAPES = Shapes(
    [BlockLayout.pack([("w", _TENSOR)])] * 8, [5] * 8, [(10, 40)], 500, 500, 10, 10**6, 10**5
)
COST = StepCost([LayerCost(300, 16, 600)] * 8, 16, 4, 700, 160)


def plan(shapes: Shapes = SHAPES, cost: StepCost = COST, **options: Any) -> MemoryPlan:
    if "vram_budget" in options:
        options["vram_budget"] = f"{options['vram_budget']}B"  # few bytes, and meant as such
    return plan_for(shapes, cost, PlanRequest.of(seq_len=10, **{"cuda_graphs": False, **options}))


@given(st.integers(1, 60_000), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_more_budget_never_gives_less_and_is_never_exceeded(budget: int, block_size: int) -> None:
    try:
        less = plan(vram_budget=budget, block_size=block_size)
    except VRAMBudgetError:
        return
    more = plan(vram_budget=budget + 1500, block_size=block_size)
    assert less.total_num_bytes <= budget
    assert less.offload_boundaries >= more.offload_boundaries
    if less.offload_boundaries and not more.offload_boundaries:
        return  # the room that offloading frees becomes slots
    assert more.num_slots >= less.num_slots and more.keep_last >= less.keep_last
    assert more.bytes_per_step <= less.bytes_per_step
    assert less.keep_last == 0 or less.num_slots == less.num_blocks


def test_boundaries_are_offloaded_when_not_even_two_slots_fit_otherwise() -> None:
    kept_here, offloaded = plan(), plan(offload_boundaries=True)
    assert not kept_here.offload_boundaries and offloaded.offload_boundaries
    floor = kept_here.total_num_bytes
    assert not plan(vram_budget=floor).offload_boundaries
    assert plan(vram_budget=floor - 1).as_dict() == {
        **offloaded.as_dict(),
        "vram_budget": floor - 1,
    }
    with pytest.raises(VRAMBudgetError):
        plan(vram_budget=floor - 1, offload_boundaries=False)
    # Eight layers: two of eight inputs on the device, eight more on the host and twice on the wire.
    assert kept_here.terms["boundaries"] == 8 * COST.boundary
    assert offloaded.terms["boundaries"] == 2 * COST.boundary
    assert offloaded.host_num_bytes - kept_here.host_num_bytes == 8 * COST.boundary
    assert offloaded.bytes_per_step - kept_here.bytes_per_step == 16 * COST.boundary


def test_time_is_the_larger_of_wire_and_compute_in_each_phase() -> None:
    tokens = COST.inputs / 16
    products = 2e-9 * tokens * SHAPES.num_linear_parameters  # ms at one TFLOP per second
    head = 2e-9 * tokens * SHAPES.num_head_parameters
    block, boundary = 1024 / 1e6, COST.boundary / 1e6  # ms at one GB per second

    def step_ms(copy: float, compute: float, cost: StepCost = COST, **options: Any) -> float:
        found = plan(cost=cost, speeds=Speeds(copy, compute), **options).step_ms
        assert found is not None
        return found

    endless = 1e12
    half: dict[str, Any] = {"num_slots": 8, "keep_last": 4}
    with_attention = replace(COST, layers=[replace(COST.layers[0], attention_flop=10**6)] * 8)
    # Forward eight times, again in backward four times, and two and a half times that for each.
    attention = (8 + 4 + 2.5 * 8) * 1e6 * 1e-9
    found = step_ms(endless, 1, with_attention, **half)
    assert found == pytest.approx(2.5 * products + 2 * head + attention)
    assert step_ms(endless, 1) == pytest.approx(3 * products + 2 * head)
    assert step_ms(endless, 1, **half) == pytest.approx(2.5 * products + 2 * head)
    # Graphs of micro-batches that go together are copied, if visits are replayed.
    for replays, number in ((True, 2.5 + 0.5 / 3), (False, 2.5)):
        together: dict[str, Any] = {**half, "micro_batches": 4, "cuda_graphs": replays}
        assert step_ms(endless, 1, **together) == pytest.approx(number * products + 2 * head)
    assert step_ms(1, endless) == pytest.approx(2 * 6 * block)
    # Out against the blocks, whose 6 take longer than the 8 boundaries; back behind them.
    offloaded = step_ms(1, endless, offload_boundaries=True)
    assert offloaded == pytest.approx(2 * 6 * block + 8 * boundary)
    # The wire takes longer than the forward's products, and shorter than the backward's.
    rate = (1.5 * products + head) / (6 * block)
    assert step_ms(1, rate) == pytest.approx(6 * block + (2 * products + head) / rate)


def test_recorded_graphs_of_micro_batches_together_are_copies_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the optimizer's temporaries too. Two change places by way of one more.

    Every other one is replayed by a second recording.
    """
    shapes = replace(SHAPES, adapter_sizes=[(10**6, 4 * 10**6)])
    room: dict[str, Any] = {"shapes": shapes, "optimizer": "adamw_torch", "num_slots": 8}
    room |= {"micro_batches": 4, "accumulation": 4}
    layer, graphs = COST.layers[0], 4 * 4 * (COST.layers[0].saved + COST.layers[0].kept_input)
    recomputed, recorded, ran = (
        plan(**room, keep_last=kept, cuda_graphs=replays).terms
        for kept, replays in ((0, True), (4, True), (4, False))
    )
    assert (recorded["kept graphs"], ran["kept graphs"]) == (graphs, 0)
    one_more, inputs = layer.saved + COST.boundary, 4 * 4 * COST.boundary
    second = max(each.peak for each in COST.layers)
    found = [each["copies"] for each in (recomputed, recorded, ran)]
    assert found == [second, second + one_more, 0]
    monkeypatch.setattr(formula, "MOST_JOINED", 4 * COST.boundary - 1)
    long = plan(**room, keep_last=4, cuda_graphs=True)
    assert (long.joins, long.terms["copies"]) == (False, one_more)
    three = plan(**{**room, "micro_batches": 3, "accumulation": 3}, keep_last=4, cuda_graphs=True)
    assert (three.joins, three.terms["copies"]) == (True, second + one_more)
    assert recorded["recordings"] - recomputed["recordings"] == inputs


def test_sizes_and_rates_are_read_or_refused() -> None:
    sizes = {"8GiB": 8 * 2**30, "8 GB": 8 * 10**9, "1.5gib": 3 * 2**29, 512: 512, "100": 100}
    sizes |= {"24G": 24 * 10**9, "24Gi": 24 * 2**30, "24 gib": 24 * 2**30, "3m": 3 * 10**6}
    sizes |= {"1T": 10**12, "1 TiB": 2**40, "7k": 7000, "7KiB": 7168, "9b": 9}
    for value, expected in sizes.items():
        assert parse_num_bytes(value, "vram_budget") == expected
    bad: list[Any] = ["8 apples", "", "-1GiB", "GiB", "nan", math.nan, math.inf, 0, -5, True, None]
    for value in bad:
        with pytest.raises(PolicyError, match="vram_budget"):
            parse_num_bytes(value, "vram_budget")
    for speeds in (Speeds(0.0, 1.0), Speeds(1.0, -2.0), Speeds(math.nan, 1.0)):
        with pytest.raises(PolicyError, match="expected a rate above zero"):
            PlanRequest.of(seq_len=8, speeds=speeds)


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "sgd"])
def test_an_optimizer_keeps_and_needs_what_is_planned(name: str) -> None:
    """Counted while a real one steps, over parameters above and below the size of 8 bits."""
    sizes = [(64, 256), (16, 100), (64, 64), (63, 65)]
    trained = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    adapter_sizes = [(each.numel(), 4 * each.numel()) for each in trained]
    request = PlanRequest.of(seq_len=1, optimizer=name)
    expected = optimizer_cost(request, adapter_sizes)
    optimizer = optimizer_of(name, trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # Steps are scalars, and the code books of 8-bit states, which all share, 2 kB in all.
    kept = [each for each in state_of(optimizer) if each.dim() and each.shape != (256,)]
    assert expected.state == num_bytes(kept)
    with OperatorBytes() as counted:
        optimizer.step()
    assert expected.temporaries == pytest.approx(counted.peak, abs=64)


def test_a_given_state_is_that_of_an_optimizer_that_is_not_known() -> None:
    assert plan(optimizer="mine", optimizer_num_bytes=77).terms["optimizer"] == 77
    with pytest.raises(PolicyError, match="optimizer_num_bytes"):
        plan(optimizer="mine")


def test_recorded_visits_are_counted_and_given_up_where_there_is_no_room() -> None:
    without = plan(num_slots=2)
    recorded = plan(num_slots=2, cuda_graphs=True)
    libraries = without.terms["libraries"]
    assert recorded.terms["recordings"] == 600 + libraries and recorded.replays
    assert recorded.total_num_bytes == without.total_num_bytes + 600 + libraries
    # Of those that keep their graph, the inputs too.
    kept = plan(num_slots=8, keep_last=3, cuda_graphs=True)
    assert kept.terms["recordings"] == 600 + 3 * 16 + libraries
    enough = plan(num_slots=2, vram_budget=recorded.total_num_bytes, cuda_graphs=None)
    assert enough.replays
    tight: Any = {"vram_budget": recorded.total_num_bytes - 1, "offload_boundaries": False}
    less = plan(num_slots=2, **tight, cuda_graphs=None)
    assert not less.replays and less.terms["recordings"] == 0
    with pytest.raises(VRAMBudgetError, match="recordings"):
        plan(num_slots=2, **tight, cuda_graphs=True)


def test_micro_batches_that_go_together() -> None:
    """Their inputs wait at every layer, and a block is loaded once for all of them."""
    one, four = plan(accumulation=4), plan(accumulation=4, micro_batches=4)
    # 8 layers' inputs of 16 bytes for each, and what three others have in hand.
    assert four.terms["boundaries"] - one.terms["boundaries"] == 3 * 8 * 16 + 3 * 16
    assert four.terms["inputs"] == 4 * one.terms["inputs"]
    assert (one.micro_batches, four.micro_batches) == (1, 4)
    assert four.bytes_per_step == one.bytes_per_step / 4
    kept = plan(num_slots=8, keep_last=8, micro_batches=4)
    assert kept.terms["kept graphs"] == 4 * plan(num_slots=8, keep_last=8).terms["kept graphs"]


def test_as_many_go_together_as_fit() -> None:
    def needs(number: int) -> int:
        return plan(micro_batches=number, offload_boundaries=False).total_num_bytes

    for budget, number in ((needs(8), 8), (needs(8) - 1, 4), (needs(4) - 1, 2), (needs(1), 1)):
        found = plan(vram_budget=budget, micro_batches=8, offload_boundaries=False)
        assert found.micro_batches == number and found.total_num_bytes <= budget
    with pytest.raises(VRAMBudgetError):
        plan(vram_budget=needs(1) - 1, micro_batches=8, offload_boundaries=False)
