"""A planner keeps what does not depend on the batch, and notices when it no longer holds."""

import gc
import re
import time
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from benchmarks.models import config_of
from poros.errors import VRAMBudgetError
from poros.gates import tiny
from poros.planning import step_cost
from poros.planning.cost_model import CostModel
from poros.planning.meta_model import Recipe
from poros.planning.planner import Planner, plan

ATTENTION = ["q_proj", "v_proj", "qkv_proj"]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **options})


def model_of(architecture: str = "qwen2", **options: Any) -> Any:
    base = tiny.make_model(architecture, num_layers=4, hidden_size=64, dropout=0.0).unload()
    return get_peft_model(base, lora(**options))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_leaving_layers_out_changes_no_figure(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.small_config(architecture, num_layers=6, hidden_size=64, dropout=0.0)
    recipe = Recipe.of(config, "nf4", torch.bfloat16, lora())
    ran: list[object] = []
    run = step_cost._Walk._run

    def count(self: Any, layer: Any, own: Any, /, *args: Any, **kwargs: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            ran.append(layer)
            return own(*args, **kwargs)

        return run(self, layer, counted, *args, **kwargs)

    monkeypatch.setattr(step_cost._Walk, "_run", count)
    some = CostModel(recipe)._cost(2, 32)
    num_some = len(ran)
    monkeypatch.setattr(step_cost, "_has_side_channels", lambda kwargs: True)
    assert CostModel(recipe)._cost(2, 32) == some
    assert len(ran) - num_some == 6
    has_side_channels = architecture in ("gemma4", "gemma4_shared_kv", "mixtral", "qwen3_moe")
    assert (num_some < 6) != has_side_channels


def test_dropout_keeps_its_result_and_a_byte_per_element() -> None:
    config = tiny.small_config("qwen2", num_layers=2, hidden_size=64, dropout=0.0)
    saved = []
    for rate in (0.0, 0.1):
        options = lora(target_modules=["q_proj", "down_proj"], lora_dropout=rate)
        cost_model = CostModel(Recipe.of(config, "nf4", torch.bfloat16, options))
        saved.append(cost_model._cost(2, 32).layers[0].saved)
    # The adapters' input in float32 is kept anyway: before dropout, or after it.
    assert saved[1] - saved[0] == 2 * 32 * (64 + 128)


def test_operations_of_attention_are_counted() -> None:
    config = tiny.small_config("qwen2", num_layers=2, hidden_size=64, dropout=0.0)
    cost_model = CostModel(Recipe.of(config, "nf4", torch.bfloat16, lora()))
    found = cost_model._cost(3, 32).layers[0].attention_flop
    # Two products of rows x heads x 32 x 32 x 16, two operations each, half of them masked.
    assert found == 3 * 4 * 32 * 32 * 16 * 2 * 2 // 2


def test_another_batch_needs_no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = Recipe.make

    def count(self: Recipe) -> Any:
        made.append(self)
        return make(self)

    monkeypatch.setattr(Recipe, "make", count)
    planner = Planner(config_of("qwen2.5-72b"))
    first = planner.plan(seq_len=256)
    start = time.process_time()
    second = planner.plan(seq_len=1024, batch_size=2, vram_budget="24GiB", self_check=True)
    assert time.process_time() - start < 1
    assert len(made) == 1
    assert second.terms["workspace"] > 4 * first.terms["workspace"] > 0
    assert second == plan(
        config_of("qwen2.5-72b"), seq_len=1024, batch_size=2, vram_budget="24GiB", self_check=True
    )


def cast(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float16)


def freeze_some(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "v_proj" in name:
            parameter.requires_grad_(False)


def use_another(model: Any) -> None:
    model.add_adapter("other", lora(r=32))
    model.set_adapter("other")


@pytest.mark.parametrize("change", [cast, freeze_some, use_another])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_changed_adapters_are_noticed(change: Any, is_prepared: bool) -> None:
    model = model_of()
    if is_prepared:
        poros.prepare(model, device="cpu", self_check="off")
    planner = Planner(model)
    before = planner.plan(seq_len=16)
    assert planner.plan(seq_len=16) == before
    change(model)
    after = planner.plan(seq_len=16)
    assert after == plan(model, seq_len=16)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert after.num_adapter_parameters == sum(each.numel() for each in trained)
    assert after.terms["adapters"] == sum(each.numel() * each.element_size() for each in trained)
    assert after.terms["adapters"] != before.terms["adapters"]


def test_a_planner_does_not_keep_its_model_alive() -> None:
    model = model_of()
    planner = Planner(model)
    expected = planner.plan(seq_len=16)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert planner.plan(seq_len=16) == expected


def test_planning_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    plan(model_of().config, seq_len=16)
    model = model_of()
    before = torch.get_rng_state()
    Planner(model).plan(seq_len=16)
    assert torch.equal(torch.get_rng_state(), before)


def test_planning_within_a_forward_leaves_what_it_records_alone() -> None:
    """Routers hand their logits to the model by the side, and the cost_model has routers too."""
    model = model_of("mixtral").train()
    ids = torch.randint(0, 500, (1, 16))
    batch = {"input_ids": ids, "labels": ids, "output_router_logits": True}
    expected = model(**batch)
    planner = Planner(model)
    layers = model.get_base_model().model.layers
    layers[0].register_forward_pre_hook(lambda *_: planner.plan(seq_len=16) and None)
    found = model(**batch)
    assert len(found.router_logits) == len(expected.router_logits) == 4
    assert torch.equal(found.aux_loss, expected.aux_loss)


SURROUNDINGS: dict[str, Any] = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "activations on the CPU": torch.autograd.graph.save_on_cpu,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_plan_is_the_same_whatever_surrounds_it(surroundings: str) -> None:
    model = model_of()
    expected = plan(model, seq_len=16)
    with SURROUNDINGS[surroundings]():
        assert plan(model, seq_len=16) == expected


# What would make it fit.


def advised(planner: Planner, **request: Any) -> dict[str, int]:
    with pytest.raises(VRAMBudgetError) as caught:
        planner.plan(**request)
    line = next(each for each in str(caught.value).splitlines() if each.startswith("What would"))
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}


@pytest.mark.parametrize("share", [0.7, 0.9, 0.99])
def test_each_advice_makes_it_fit_and_hardly_a_larger_value_does(share: float) -> None:
    config = tiny.small_config("qwen2", num_layers=4, hidden_size=64, dropout=0.0)
    planner = Planner(config, lora=lora(r=32, target_modules="all-linear"))
    request: dict[str, Any] = {"seq_len": 96, "batch_size": 5, "block_size": 2}
    least = planner.plan(**request, offload_boundaries=True).total_num_bytes
    budget = int(share * least)
    found = advised(planner, **request, vram_budget=budget)
    assert {"seq_len", "batch_size"} <= found.keys()
    for name, value in found.items():
        larger = value + 1 + value // 50
        if name == "rank":
            others = [
                Planner(config, lora=lora(r=each, target_modules="all-linear"))
                for each in (value, larger)
            ]
            plans = [each.plan(**request, offload_boundaries=True) for each in others]
        else:
            changes = [{**request, name: each} for each in (value, larger)]
            plans = [planner.plan(**each, offload_boundaries=True) for each in changes]
        fits = [each.total_num_bytes <= budget for each in plans]
        assert fits == [True, False], (name, value)


def test_offloading_is_advised_where_it_was_ruled_out() -> None:
    config = tiny.small_config("qwen2", num_layers=16, hidden_size=64, dropout=0.0)
    planner = Planner(config, lora=lora())
    kept = planner.plan(seq_len=256)
    offloaded = planner.plan(seq_len=256, offload_boundaries=True)
    budget = kept.total_num_bytes - 1
    assert planner.plan(seq_len=256, vram_budget=budget).offload_boundaries
    with pytest.raises(VRAMBudgetError, match="fit, each alone: offload_boundaries=True"):
        planner.plan(seq_len=256, vram_budget=budget, offload_boundaries=False)
    saved = (kept.total_num_bytes - offloaded.total_num_bytes) / 1e9
    text = f"too little alone: offload_boundaries=True .{saved:.2f} GB"
    with pytest.raises(VRAMBudgetError, match=text):
        planner.plan(seq_len=256, vram_budget="100kB", offload_boundaries=False)


def test_advice_at_real_shapes_is_short_and_quick() -> None:
    planner = Planner(config_of("qwen2.5-72b"))
    with pytest.raises(VRAMBudgetError) as caught:
        planner.plan(seq_len=8192, batch_size=4, block_size=4, vram_budget="12GiB")
    assert len(str(caught.value).splitlines()) < 20
