"""A planner keeps what no batch changes, notices when it no longer holds, and gives advice."""

from typing import Any

import pytest
import torch
from peft import get_peft_model

import poros
from benchmarks.models import config_of
from poros.errors import UnsupportedModelError, VRAMBudgetError
from poros.finetune.liger import use_liger
from poros.gates import tiny
from poros.planning import cost_model
from poros.planning.cards import CARDS
from poros.planning.meta_model import Recipe
from poros.planning.planner import Planner, plan
from poros.planning.request import PlanRequest
from tests.covers import with_slow
from tests.liger import liger_alone
from tests.planning.cells import lora
from tests.replaced import noted
from tests.support import make_model, prepare_plain

SHORT = PlanRequest.of(seq_len=16)


def model_of(architecture: str = "qwen2", **adapters: Any) -> Any:
    base = make_model(architecture, num_layers=4, hidden_size=64, dropout=0.0).unload()
    return get_peft_model(base, lora(**adapters))


def test_another_batch_needs_no_other_model_and_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = noted(monkeypatch, Recipe, "make")
    ran = noted(monkeypatch, cost_model, "layer_cost")
    planner = Planner(config_of("qwen2.5-72b", 8))
    first = planner.plan(PlanRequest.of(seq_len=256, loss="reference"))
    shape: dict[str, Any] = {"seq_len": 1024, "batch_size": 2, "self_check": True}
    shape["loss"] = "reference"
    second = planner.plan(PlanRequest.of(**shape, vram_budget="24GiB"))
    # Of all layers one, for each shape, and one with PEFT's own modules, which the self-check runs;
    # another budget or layout takes none.
    assert (len(made), len(ran)) == (1, 3)
    planner.plan(PlanRequest.of(**shape, num_slots=6))
    assert (len(made), len(ran)) == (1, 3)
    assert second.terms["workspace"] > 4 * first.terms["workspace"] > 0
    assert second == plan(config_of("qwen2.5-72b", 8), **shape, vram_budget="24GiB")


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


@pytest.mark.cover("values")
@pytest.mark.parametrize("change", [cast, freeze_some, use_another])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_changed_adapters_are_noticed(change: Any, is_prepared: bool) -> None:
    model = model_of()
    if is_prepared:
        prepare_plain(model, device="cpu", self_check="off")
    planner = Planner(model)
    before = planner.plan(SHORT)
    assert planner.plan(SHORT) == before
    change(model)
    after = planner.plan(SHORT)
    assert after == plan(model, seq_len=16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert after.num_adapter_parameters == sum(each.numel() for each in trained)
    assert after.terms["adapters"] == sum(each.numel() * each.element_size() for each in trained)
    assert after.terms["adapters"] != before.terms["adapters"]


def test_planning_within_a_forward_leaves_what_it_records_alone() -> None:
    """Routers hand their logits to the model by the side, and the model on meta has routers too."""
    model = model_of("mixtral").train()
    ids = torch.randint(0, 500, (1, 16))
    batch = {"input_ids": ids, "labels": ids, "output_router_logits": True}
    expected = model(**batch)
    planner = Planner(model)
    layers = model.get_base_model().model.layers
    layers[0].register_forward_pre_hook(lambda *_: planner.plan(SHORT) and None)
    found = model(**batch)
    assert len(found.router_logits) == len(expected.router_logits) == 4
    assert torch.equal(found.aux_loss, expected.aux_loss)


SURROUNDINGS: dict[str, Any] = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "activations on the CPU": torch.autograd.graph.save_on_cpu,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly mode": torch.autograd.detect_anomaly,
}


@pytest.mark.parametrize("surroundings", with_slow(SURROUNDINGS, ["no gradients", "anomaly mode"]))
def test_a_plan_is_the_same_whatever_surrounds_it_and_draws_no_random_number(
    surroundings: str,
) -> None:
    model = model_of()
    before = torch.get_rng_state()
    expected = plan(model, seq_len=16)
    plan(model.config, seq_len=16)
    with SURROUNDINGS[surroundings]():
        assert plan(model, seq_len=16) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_code_that_liger_has_replaced_is_not_run_on_the_meta_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels would read at address 0: what transformers has in their place is counted."""
    from transformers.models.qwen2 import modeling_qwen2 as code

    def rotary(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it has run")

    model = model_of()
    expected = plan(model, seq_len=16)
    rotary.__module__ = "liger_kernel.transformers.rope"
    monkeypatch.setattr(code, "apply_rotary_pos_emb", rotary)
    assert plan(model, seq_len=16) == expected
    assert code.apply_rotary_pos_emb is rotary


def test_a_feed_forward_of_liger_keeps_what_its_last_projection_is_given() -> None:
    pytest.importorskip("liger_kernel")
    from transformers.models.qwen2 import modeling_qwen2

    model = model_of(target_modules=["down_proj"])
    request = PlanRequest.of(seq_len=16, num_slots=2, keep_last=2)
    more = 2 * 16 * model.config.intermediate_size * 2  # of two layers, in bf16

    def kept(planner: Planner) -> int:
        found = planner.plan(request)
        assert found.keep_last == 2
        return found.terms["kept graphs"]

    earlier = Planner(model)
    before = kept(earlier)
    assert use_liger(model)
    assert kept(Planner(model)) == kept(earlier.for_model(model)) == before  # SwiGLU is Poros's
    with liger_alone(modeling_qwen2, swiglu=True) as applied:
        applied(model)
    assert kept(Planner(model)) == kept(earlier.for_model(model)) == before + more
    poros.use_adapter_kernels(model, "grouped")
    assert kept(Planner(model)) == before + more


def test_kinds_that_a_plan_does_not_count_are_estimated_where_steps_are_measured() -> None:
    model = make_model("qwen2", num_layers=2, hidden_size=32, adapter="adalora")
    with pytest.raises(UnsupportedModelError, match="found adalora"):
        Planner(model)
    found = Planner(model, counts_all=True).plan(SHORT)
    trained = [each.numel() for each in model.parameters() if each.requires_grad]
    assert found.num_adapter_parameters == sum(trained)


# What would make it fit.


@pytest.mark.parametrize("share", with_slow((0.7, 0.99), [0.99]))
def test_each_advice_makes_it_fit_and_hardly_a_larger_value_does(share: float) -> None:
    config = tiny.small_config("qwen2", num_layers=4, hidden_size=64, dropout=0.0)
    asked: dict[str, Any] = {"seq_len": 192, "batch_size": 5, "block_size": 2}
    planner = Planner(config, lora=lora(target_modules="all-linear"))

    def needed(**changes: int) -> int:
        options = {**asked, **changes}
        request = PlanRequest.of(**options, offload_boundaries=True, without_recordings=True)
        return planner.plan(request).total_num_bytes

    budget = int(share * needed())
    remedies = planner.remedies(PlanRequest.of(**asked, vram_budget=budget))
    found = {each.knob: each.value for each in remedies if each.fits}
    assert {"seq_len", "batch_size"} <= found.keys()
    for name, value in found.items():
        larger = value + 1 + value // 50
        fits = [needed(**{name: number}) <= budget for number in (value, larger)]
        assert fits == [True, False], (name, value)


def test_offloading_is_advised_where_it_was_ruled_out() -> None:
    config = tiny.small_config("qwen2", num_layers=16, hidden_size=64, dropout=0.0)
    planner = Planner(config, lora=lora())
    kept, offloaded = (
        planner.plan(
            PlanRequest.of(seq_len=256, offload_boundaries=choice, cuda_graphs=False)
        ).total_num_bytes
        for choice in (False, True)
    )
    budget = kept - 1
    assert planner.plan(PlanRequest.of(seq_len=256, vram_budget=budget)).offload_boundaries
    for vram_budget, fits in ((budget, True), ("250kB", False)):
        request = PlanRequest.of(seq_len=256, vram_budget=vram_budget, offload_boundaries=False)
        first = planner.remedies(request)[0]
        assert (first.knob, first.value, first.fits) == ("offload_boundaries", True, fits)
        assert first.saved_num_bytes == kept - offloaded
        with pytest.raises(VRAMBudgetError) as caught:
            planner.plan(request)
        assert "each change alone: offload_boundaries=True" in str(caught.value) or not fits


@pytest.mark.slow
def test_advice_at_real_shapes_is_short_and_no_row_too_short_to_train_on() -> None:
    """Not "seq_len=1", which a hopeless budget would leave."""
    planner = Planner(config_of("qwen2.5-72b"))
    remedies = planner.remedies(PlanRequest.of(seq_len=2048, vram_budget="10MiB"))
    lengths = [each.value for each in remedies if each.knob == "seq_len"]
    assert lengths and min(lengths) >= 64
    request = PlanRequest.of(seq_len=8192, batch_size=4, block_size=4, vram_budget="12GiB")
    with pytest.raises(VRAMBudgetError) as caught:
        planner.plan(request)
    assert len(str(caught.value).splitlines()) < 20


def test_micro_batches_are_planned_alone_where_most_layers_keep_their_graph() -> None:
    planner = Planner(config_of("qwen2.5-0.5b"))
    asked: dict[str, Any] = {"seq_len": 2048, "micro_batches": 8, "accumulation": 8}
    ample = PlanRequest.of(**asked, vram_budget="24GiB")
    alone = planner.plan(ample)
    assert (alone.micro_batches, alone.num_slots) == (1, alone.num_blocks) and alone.keep_last
    assert planner.find(ample) == alone
    assert planner.estimate(ample).micro_batches == 8, "what it takes if they do go together"
    small = planner.plan(PlanRequest.of(**asked, vram_budget="1GiB"))
    assert small.micro_batches == 8 and not small.keep_last
    fixed = planner.plan(PlanRequest.of(**asked, vram_budget="24GiB", num_slots=alone.num_blocks))
    assert fixed.micro_batches == 8, "whoever gives the slots has them"
    for card in ("rtx3090", "h100"):
        speeds = CARDS[card].speeds(512)
        short = planner.plan(ample.override(seq_len=512, speeds=speeds))
        assert short.micro_batches == 8, "short ones share what makes weights dense"
        assert short.keep_last == short.num_blocks, "and keep their graphs all the same"
