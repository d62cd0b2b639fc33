"""A plan needs a configuration only, and says what the model and the runtime then have."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

import poros
from poros.config import parse_num_bytes
from poros.errors import PolicyError, UnsupportedModelError, VRAMBudgetError
from poros.gates import tiny
from poros.layout import BlockLayout
from poros.planning.cost_model import CostModel, Request, shapes_of
from poros.planning.formula import OptimizerCost, Shapes, Speeds, optimizer_cost, plan_for
from poros.planning.meta_model import Recipe
from poros.planning.planner import plan, render
from poros.planning.step_cost import LayerCost, LiveBytes, StepCost
from tests.lora_kinds import KINDS as TRAINED

ARCHITECTURES = ["qwen2", "llama", "phi3", "gemma3", "gemma4", "mixtral", "qwen3_moe"]
ATTENTION = ["q_proj", "v_proj", "qkv_proj"]


def base_of(architecture: str = "qwen2", **options: Any) -> Any:
    return tiny.make_model(architecture, **{"num_layers": 3, "hidden_size": 64, **options}).unload()


def lora(**options: Any) -> LoraConfig:
    wanted: dict[str, Any] = {"r": 4, "target_modules": ATTENTION, "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**wanted, **options})


# Those that training is tested with, and some that only change what is drawn.
KINDS: dict[str, dict[str, Any]] = {
    **TRAINED,
    "plain": {},
    "rank pattern": {"rank_pattern": {"v_proj": 7}},
    "gaussian": {"init_lora_weights": "gaussian"},
    "tied head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_planned_are_the_models(kind: str) -> None:
    base = base_of()
    found = plan(base.config, seq_len=8, lora=lora(**KINDS[kind]))
    model = get_peft_model(base, lora(**KINDS[kind]))
    trained = [each for each in model.parameters() if each.requires_grad]
    assert found.num_adapter_parameters == sum(each.numel() for each in trained) > 0
    assert found.terms["adapters"] == sum(each.numel() * each.element_size() for each in trained)
    from_model = plan(model, seq_len=8)
    assert from_model.as_dict() == found.as_dict()


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ],
)
def test_adapters_on_fused_experts_are_planned(architecture: str, options: dict[str, Any]) -> None:
    base = base_of(architecture)
    found = plan(base.config, seq_len=8, lora=lora(**options))
    model = get_peft_model(base, lora(**options))
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert any("experts" in name for name in trained)
    assert found.num_adapter_parameters == sum(each.numel() for each in trained.values())
    assert plan(model, seq_len=8).as_dict() == found.as_dict()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [1, 2])
def test_planned_sizes_are_those_of_the_prepared_model(architecture: str, block_size: int) -> None:
    model = get_peft_model(base_of(architecture), lora())
    expected = plan(model, seq_len=8, block_size=block_size)
    real = shapes_of(model)
    on_meta = plan(model.config, seq_len=8, block_size=block_size, lora=lora())
    assert on_meta.terms == expected.terms
    assert real.other == expected.terms["other"] and real.head == expected.terms["head"]
    poros.prepare(model, device="cpu", block_size=block_size, self_check="off")
    runtime = poros.runtime(model)
    stats = runtime.stats()
    assert expected.host_num_bytes == stats["host_num_bytes"]
    assert expected.num_blocks == runtime.num_blocks
    assert expected.num_adapter_parameters == sum(
        each.numel() for each in model.parameters() if each.requires_grad
    )
    slots = sum(len(slot.buffer) for slot in runtime.ring.slots)
    assert expected.terms["slots"] == slots
    batch = tiny.make_batches(1, num_tokens=8)[0]
    for _ in range(2):
        before = runtime.stats()["h2d_num_bytes"]
        model.train()(**batch).loss.backward()
    assert runtime.stats()["h2d_num_bytes"] - before == expected.bytes_per_step


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("sizes", [(2, 32), (1, 128)])
def test_the_rise_of_a_step_is_the_planned_one(accumulation: int, sizes: tuple[int, int]) -> None:
    """Against storages counted while a real model trains."""
    batch_size, seq_len = sizes
    model = tiny.make_model("qwen2", num_layers=6, hidden_size=128, dropout=0.0).train()
    batch = {
        name: each
        for name, each in tiny.make_batches(
            1, batch_size=batch_size, num_tokens=seq_len, padded=False
        )[0].items()
        if name != "attention_mask"
    }
    found = plan(model, seq_len=seq_len, batch_size=batch_size, accumulation=accumulation)
    poros.prepare(model, device="cpu", self_check="off")
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)

    def step() -> None:
        for _ in range(accumulation):
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    slots = [slot.buffer for slot in poros.runtime(model).ring.slots]
    with LiveBytes() as live:
        live.know(*model.parameters(), *model.buffers(), *slots, *batch.values())
        for state in optimizer.state.values():
            live.know(*(each for each in state.values() if isinstance(each, torch.Tensor)))
        step()
    planned = sum(found.terms[each] for each in ("gradients", "boundaries", "workspace"))
    # On a CPU a layer keeps random states of 5 kB until its backward.
    random_states = 2 * 6 * torch.get_rng_state().numel()
    assert 0.95 * planned < live.peak < 1.05 * planned + random_states
    # Control: the boundaries or the gradients alone would be noticed.
    assert found.terms["workspace"] > 0.05 * planned


# A plan from numbers alone.


def numbers(num_layers: int = 8, layer: int = 1000, saved: int = 300) -> tuple[Shapes, StepCost]:
    tensor = torch.empty(layer, dtype=torch.uint8, device="meta")
    layers = [BlockLayout.pack([("w", tensor)])] * num_layers
    shapes = Shapes(layers, [5] * num_layers, [(10, 40)], 500, 500, 10, 10**6, 10**5)
    cost = StepCost([LayerCost(saved, 16, 2 * saved)] * num_layers, 16, 4, 700, 160)
    return shapes, cost


@given(st.integers(1, 60_000), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_more_budget_never_gives_less_and_is_never_exceeded(budget: int, block_size: int) -> None:
    shapes, cost = numbers()

    def made(budget: int) -> Any:
        try:
            return plan_for(shapes, cost, vram_budget=budget, block_size=block_size)
        except VRAMBudgetError:
            return None

    less, more = made(budget), made(budget + 1500)
    if less is None:
        return
    assert less.total_num_bytes <= budget
    assert less.offload_boundaries >= more.offload_boundaries
    if less.offload_boundaries and not more.offload_boundaries:
        return  # the room that offloading frees becomes slots
    assert more.num_slots >= less.num_slots and more.keep_last >= less.keep_last
    assert more.bytes_per_step <= less.bytes_per_step
    assert less.keep_last == 0 or less.num_slots == less.num_blocks


def test_at_full_budget_nothing_moves_and_nothing_is_recomputed() -> None:
    found = plan_for(*numbers(), vram_budget=10**9, speeds=Speeds(50.0, 100.0))
    assert (found.num_slots, found.keep_last, found.bytes_per_step) == (8, 8, 0)
    assert found.terms["slots"] == 0 and found.terms["kept blocks"] >= 8 * 1000
    streamed = plan_for(*numbers(), num_slots=2, speeds=Speeds(50.0, 100.0))
    assert streamed.bytes_per_step == 2 * 6 * 1024
    assert streamed.step_ms is not None and found.step_ms is not None
    assert streamed.step_ms > found.step_ms > 0


def test_below_the_floor_the_floor_and_the_terms_are_named() -> None:
    floor = plan_for(*numbers(), offload_boundaries=True).total_num_bytes
    assert plan_for(*numbers(), vram_budget=floor).num_slots == 2
    with pytest.raises(VRAMBudgetError, match=r"the floor for 2 slots(.|\n)*slots(.|\n)*workspace"):
        plan_for(*numbers(), vram_budget=floor - 1)


def test_boundaries_are_offloaded_when_not_even_two_slots_fit_otherwise() -> None:
    shapes, cost = numbers()
    kept_here = plan_for(shapes, cost)
    offloaded = plan_for(shapes, cost, offload_boundaries=True)
    assert not kept_here.offload_boundaries and offloaded.offload_boundaries
    floor = kept_here.total_num_bytes
    assert not plan_for(shapes, cost, vram_budget=floor).offload_boundaries
    assert plan_for(shapes, cost, vram_budget=floor - 1).as_dict() == {
        **offloaded.as_dict(),
        "vram_budget": floor - 1,
    }
    with pytest.raises(VRAMBudgetError):
        plan_for(shapes, cost, vram_budget=floor - 1, offload_boundaries=False)
    # Eight layers: two of eight inputs on the device, eight more on the host and twice on the wire.
    assert kept_here.terms["boundaries"] == 8 * cost.boundary
    assert offloaded.terms["boundaries"] == 2 * cost.boundary
    assert offloaded.host_num_bytes - kept_here.host_num_bytes == 8 * cost.boundary
    assert offloaded.bytes_per_step - kept_here.bytes_per_step == 16 * cost.boundary


def test_inputs_of_kept_layers_stay_in_their_graphs() -> None:
    shapes, cost = numbers()
    found = plan_for(shapes, cost, num_slots=8, keep_last=3, offload_boundaries=True)
    assert found.terms["boundaries"] == 2 * cost.boundary
    assert found.terms["kept graphs"] == 3 * (cost.layers[0].saved + cost.boundary)
    assert found.host_num_bytes == plan_for(shapes, cost).host_num_bytes + 5 * cost.boundary
    everything = plan_for(shapes, cost, num_slots=8, keep_last=8, offload_boundaries=True)
    assert everything.bytes_per_step == 0
    assert everything.terms == plan_for(shapes, cost, num_slots=8, keep_last=8).terms


@pytest.mark.parametrize("num_layers", [6, 7])
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("keep_last", range(9))
def test_kept_layers_are_those_that_the_runtime_keeps(
    num_layers: int, block_size: int, keep_last: int
) -> None:
    model = tiny.make_model("qwen2", num_layers=num_layers, hidden_size=16, dropout=0.0)
    poros.prepare(model, device="cpu", block_size=block_size, keep_last=keep_last, slots=3)
    takeover = poros.runtime(model)
    num_streamed = takeover.manager.num_blocks
    shapes, cost = numbers(num_layers)
    found = plan_for(shapes, cost, block_size=block_size, keep_last=keep_last, num_slots=3)
    num_kept = num_layers - min(num_streamed * block_size, num_layers)
    assert found.terms["kept graphs"] == num_kept * (cost.layers[0].saved + cost.boundary)
    assert found.num_slots == len(takeover.ring.slots) + found.num_blocks - num_streamed
    takeover.resize(found.num_slots, found.keep_last)
    assert takeover.manager.num_blocks == num_streamed


def test_time_is_the_larger_of_wire_and_compute_in_each_phase() -> None:
    shapes, cost = numbers()
    tokens = cost.inputs / 16
    products = 2e-9 * tokens * shapes.num_linear_parameters  # ms at one TFLOP per second
    head = 2e-9 * tokens * shapes.num_head_parameters
    block, boundary = 1024 / 1e6, cost.boundary / 1e6  # ms at one GB per second

    def step_ms(copy: float, compute: float, **options: Any) -> float:
        found = plan_for(shapes, cost, speeds=Speeds(copy, compute), **options).step_ms
        assert found is not None
        return found

    endless = 1e12
    with_attention = replace(cost, layers=[replace(cost.layers[0], attention_flop=10**6)] * 8)
    found = plan_for(shapes, with_attention, speeds=Speeds(endless, 1), num_slots=8, keep_last=4)
    # Forward eight times, again in backward four times, and two and a half times that for each.
    attention = (8 + 4 + 2.5 * 8) * 1e6 * 1e-9
    assert found.step_ms == pytest.approx(2.5 * products + 2 * head + attention)
    assert step_ms(endless, 1) == pytest.approx(3 * products + 2 * head)
    half = {"num_slots": 8, "keep_last": 4}
    assert step_ms(endless, 1, **half) == pytest.approx(2.5 * products + 2 * head)
    assert step_ms(1, endless) == pytest.approx(2 * 6 * block)
    # Out against the blocks, whose 6 take longer than the 8 boundaries; back behind them.
    offloaded = step_ms(1, endless, offload_boundaries=True)
    assert offloaded == pytest.approx(2 * 6 * block + 8 * boundary)
    # The wire takes longer than the forward's products, and shorter than the backward's.
    rate = (1.5 * products + head) / (6 * block)
    assert step_ms(1, rate) == pytest.approx(6 * block + (2 * products + head) / rate)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("8GiB", 8 * 2**30), ("8 GB", 8 * 10**9), ("1.5gib", 3 * 2**29), (512, 512), ("100", 100)],
)
def test_sizes_are_read(value: Any, expected: int) -> None:
    assert parse_num_bytes(value, "vram_budget") == expected


BAD_SIZES = ["8 apples", "", "-1GiB", "GiB", "nan", float("nan"), float("inf"), 0, -5, True, None]


@pytest.mark.parametrize("value", BAD_SIZES, ids=map(repr, BAD_SIZES))
def test_bad_sizes_are_refused(value: Any) -> None:
    with pytest.raises(PolicyError, match="vram_budget"):
        parse_num_bytes(value, "vram_budget")


def test_bad_requests_are_refused() -> None:
    config = base_of().config
    for options in ({"seq_len": 0}, {"seq_len": 8, "batch_size": -1}, {"seq_len": 8, "rank": 0}):
        with pytest.raises(PolicyError, match="positive whole number"):
            plan(config, **options)
    limit = config.max_position_embeddings
    with pytest.raises(PolicyError, match=f"at most the model's {limit} positions"):
        plan(config, seq_len=limit + 1)
    with pytest.raises(PolicyError, match="quantization"):
        plan(config, seq_len=8, quantization="int3")
    with pytest.raises(UnsupportedModelError, match="PEFT adapters"):
        plan(base_of(), seq_len=8)
    for name in ("adamw", "", None):
        with pytest.raises(PolicyError, match=r"optimizer: expected one of adamw_torch_fused, .*"):
            plan(config, seq_len=8, optimizer=name)


def test_a_model_that_looks_at_values_is_refused() -> None:
    class Curious(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * hidden.nonzero().shape[0]

    cost_model = CostModel(Recipe.of(base_of().config, "nf4", torch.bfloat16, lora()))
    layer = cost_model.model.get_base_model().model.layers[0]
    layer.mlp = Curious()
    with pytest.raises(UnsupportedModelError, match=r"operators run on shapes alone.*'qwen2'"):
        cost_model.plan(Request(8), None)


def test_a_plan_is_plain_values_and_a_table() -> None:
    found = plan(base_of().config, seq_len=8, speeds=Speeds(50.0, 100.0))
    again = json.loads(json.dumps(found.as_dict()))
    assert again["total_num_bytes"] == sum(again["terms"].values())
    assert render(found).row_count > len(found.terms)


# What optimizers keep.


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "sgd"])
def test_an_optimizer_keeps_and_needs_what_is_planned(name: str) -> None:
    """Counted while a real one steps, over parameters above and below the size of 8 bits."""
    import bitsandbytes as bnb

    made: dict[str, Any] = {
        "adamw_torch_fused": lambda each: torch.optim.AdamW(each, fused=True),
        "adamw_torch": lambda each: torch.optim.AdamW(each, foreach=True),
        "adamw_bnb_8bit": bnb.optim.AdamW8bit,
        "sgd": lambda each: torch.optim.SGD(each, lr=0.1, foreach=True),
    }
    sizes = [(64, 256), (16, 100), (64, 64), (63, 65)]
    trained = [torch.nn.Parameter(torch.ones(each)) for each in sizes]
    shapes = replace(numbers()[0], adapter_sizes=[(e.numel(), 4 * e.numel()) for e in trained])
    planned = optimizer_cost(name, shapes)
    optimizer = made[name](trained)
    for each in trained:
        each.grad = torch.ones_like(each)
    optimizer.step()
    distinct = {
        id(tensor): tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for key, tensor in state.items()
        # Steps are scalars, and the code books of 8-bit states 2 kB in all.
        if isinstance(tensor, torch.Tensor) and tensor.dim() and not key.startswith("qmap")
    }
    assert planned.state == sum(distinct.values())
    with LiveBytes() as live:
        for state in optimizer.state.values():
            live.know(*(each for each in state.values() if isinstance(each, torch.Tensor)))
        live.know(*trained, *(each.grad for each in trained if each.grad is not None))
        optimizer.step()
    assert planned.temporaries == pytest.approx(live.peak, abs=64)


def test_temporaries_of_the_optimizer_count_at_its_step_only() -> None:
    shapes, cost = numbers()
    small = replace(cost, layers=[LayerCost(0, 0, 0)] * 8, loss_peak=0)
    for temporaries in (0, 10**6):
        found = plan_for(shapes, small, optimizer=OptimizerCost(0, temporaries))
        assert found.terms["workspace"] == temporaries
    found = plan_for(shapes, cost, optimizer=OptimizerCost(0, 100))
    assert found.terms == plan_for(shapes, cost, optimizer=OptimizerCost(0)).terms
