"""A plan needs a configuration only, and says what the model and the runtime then have."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import BitsAndBytesConfig

import poros
from poros.errors import PolicyError, UnsupportedModelError
from poros.gates import tiny
from poros.planning import cost_model
from poros.planning.cost_model import CostModel
from poros.planning.formula import StepCost
from poros.planning.meta_model import Recipe, shapes_of
from poros.planning.planner import Planner, plan
from poros.planning.request import PlanRequest
from tests.covers import with_slow
from tests.loops import narrow_slices
from tests.lora_kinds import KINDS as TRAINED
from tests.lora_kinds import REPEATED
from tests.planning.cells import lora
from tests.support import make_model, prepare_plain

ARCHITECTURES = ["qwen2", "llama", "phi3", "gemma3", "gemma4", "mixtral", "qwen3_moe"]


def base_of(architecture: str = "qwen2", **options: Any) -> Any:
    return make_model(architecture, **{"num_layers": 3, "hidden_size": 64, **options}).unload()


def config_of(architecture: str = "qwen2", num_layers: int = 2) -> Any:
    return tiny.small_config(architecture, num_layers=num_layers, hidden_size=64, dropout=0.0)


def recipe_of(config: Any, **options: Any) -> Recipe:
    return Recipe.of(config, lora=lora(**options))


def trained_in(model: Any) -> tuple[int, int]:
    """Numbers and bytes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = (parameter.numel() * parameter.element_size() for parameter in trained)
    return sum(parameter.numel() for parameter in trained), sum(sizes)


# Those that training is tested with, some that only change what is drawn, and fused experts.
OTHERS_HAVE = ("plain", "gaussian", "rank pattern", "experts of mixtral", "everything of mixtral")
SLOW = {*tiny.ARCHITECTURES} - {"qwen2", "gemma4_shared_kv", "mixtral"}
FP4: Any = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_compute_dtype": "bfloat16",
}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: ("qwen2", options) for kind, options in TRAINED.items()},
    "plain": ("qwen2", {}),
    "rank pattern": ("qwen2", {"rank_pattern": {"v_proj": 7}}),
    "gaussian": ("qwen2", {"init_lora_weights": "gaussian"}),
    "tied head": ("qwen2", {"target_modules": ["q_proj", "lm_head"]}),
    "experts of mixtral": ("mixtral", EXPERTS),
    "experts of qwen3_moe": ("qwen3_moe", EXPERTS),
    "everything of mixtral": ("mixtral", {"target_modules": "all-linear"}),
    "everything of qwen3_moe": ("qwen3_moe", {"target_modules": "all-linear"}),
}


@pytest.mark.parametrize("case", with_slow(ADAPTERS, {*REPEATED, *OTHERS_HAVE}))
def test_adapters_planned_are_the_models(case: str) -> None:
    architecture, options = ADAPTERS[case]
    base = base_of(architecture)
    found = plan(base.config, seq_len=8, lora=lora(**options))
    model = get_peft_model(base, lora(**options))
    assert (found.num_adapter_parameters, found.terms["adapters"]) == trained_in(model) > (0, 0)
    has_experts = any(
        "experts" in name for name, each in model.named_parameters() if "lora" in name
    )
    assert has_experts == (architecture != "qwen2")
    assert plan(model, seq_len=8).as_dict() == found.as_dict()


@pytest.mark.cover("values")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("block_size", "on_host"), [(1, False), (2, True)])
def test_planned_sizes_are_those_of_the_prepared_model(
    architecture: str, block_size: int, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow_slices(monkeypatch)
    model = get_peft_model(base_of(architecture), lora())
    layout: dict[str, Any] = {"block_size": block_size, "stream_embedding": on_host}
    if on_host:
        layout |= {"loss": "chunked", "stream_head": True}
    expected = plan(model, seq_len=8, **layout)
    real = shapes_of(model)
    on_meta = plan(model.config, seq_len=8, **layout, lora=lora())
    assert on_meta.terms == expected.terms
    outside = real.embedding + real.head + real.other
    moved = sum(num_bytes for _, num_bytes in real.on_host) if on_host else 0
    head = real.sliced_head
    assert head is not None and head.is_tied == (real.head == 0)
    if on_host:
        moved += head.matrix - head.buffers
    assert sum(expected.terms[name] for name in ("embedding", "head", "other")) == outside - moved
    prepare_plain(model, device="cpu", **layout, self_check="off")
    runtime = poros.runtime(model)
    assert shapes_of(model).on_host == real.on_host
    assert expected.host_num_bytes == runtime.stats()["host_num_bytes"]
    assert expected.num_blocks == runtime.num_blocks
    assert expected.num_adapter_parameters == trained_in(model)[0]
    assert (runtime.head.num_bytes if runtime.head else 0) == (head.buffers if on_host else 0)
    blocks = [runtime.host_slab(block).numel() for block in range(runtime.num_blocks)]
    slots = [max(blocks[slot :: runtime.num_slots]) for slot in range(runtime.num_slots)]
    assert expected.terms["slots"] == sum(slots)
    batch = tiny.make_batches(1, num_tokens=8)[0]
    for _ in range(2):
        before = runtime.stats()
        model.train()(**batch).loss.backward()
    after = runtime.stats()
    crossed = sum(after[key] - before[key] for key in ("h2d_num_bytes", "head_num_bytes"))
    assert crossed == expected.bytes_per_step


def test_inputs_are_the_batch_and_what_all_layers_are_given() -> None:
    """Too small to be seen in a step: tokens and labels, rotary embeddings and positions."""
    config = config_of()
    head_dim = config.hidden_size // config.num_attention_heads
    found = plan(config, seq_len=8, batch_size=2).terms["inputs"]
    assert found == 2 * 2 * 8 * 8 + 2 * 2 * 8 * head_dim + 8 * 8


def test_bad_requests_are_refused() -> None:
    config = config_of()
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
            plan(config, seq_len=8, optimizer=name)  # type: ignore[arg-type]


def test_a_model_that_looks_at_values_is_refused() -> None:
    class Curious(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * hidden.nonzero().shape[0]

    class Wrong(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            raise ValueError("expected numbers")

    for source in (config_of(), prepare_plain(make_model("qwen2"), device="cpu")):
        for module in (Curious(), Wrong()):
            planner = Planner(source)
            planner._cost_model().layers[0].mlp = module
            with pytest.raises(UnsupportedModelError, match="'qwen2' that can be run on shapes al"):
                planner.plan(PlanRequest.of(seq_len=8))


# What layers cost on the meta device.


@pytest.mark.parametrize("architecture", with_slow(tiny.ARCHITECTURES, SLOW))
def test_leaving_layers_out_changes_no_figure(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []

    def note(own: Any, /, *args: Any, **kwargs: Any) -> Any:
        ran.append(own)
        return own(*args, **kwargs)

    def cost() -> StepCost:
        ran.clear()
        costs = CostModel(recipe_of(config_of(architecture, num_layers=6)))
        for layer in costs.layers:
            layer.forward = partial(note, layer.forward)
        asked = {"loss": "reference", "adapter_kernels": "peft"}
        return costs.cost(PlanRequest.of(seq_len=32, batch_size=2, **asked))

    some, num_some = cost(), len(ran)
    monkeypatch.setattr(cost_model, "_has_side_channels", lambda kwargs: True)
    assert cost() == some
    # Each kind once more, for its cost; where nothing passes aside, one of each kind.
    passes_aside = ("gemma4", "gemma4_shared_kv", "mixtral", "qwen3_moe")
    assert num_some == len(ran) if architecture in passes_aside else num_some < len(ran) - 2


@pytest.mark.cover("values")
@pytest.mark.parametrize("use_dora", [False, True], ids=["", "dora"])
@pytest.mark.parametrize("kernels", ["fused", "peft"])
@pytest.mark.parametrize("seq_len", [16, 256])
def test_beside_dense_weights_a_layer_takes_what_it_does_with_a_dense_base(
    kernels: str, seq_len: int, use_dora: bool
) -> None:
    recipe = recipe_of(config_of(), r=4, target_modules="all-linear", use_dora=use_dora)
    quantized, dense = CostModel(recipe), CostModel(replace(recipe, quantization=None))
    request = PlanRequest.of(seq_len=seq_len, loss="chunked", adapter_kernels=kernels)
    (found, *_), (expected, *_) = (model.cost(request).layers for model in (quantized, dense))
    assert found.peak - found.dense == pytest.approx(expected.peak, rel=0.02)
    assert expected.dense == 0
    if kernels == "fused":
        assert found.dense > 0 or seq_len > 16, "of few tokens the dense weight is most of it"
    config = recipe.config
    largest = config.hidden_size * config.intermediate_size * 2
    assert (quantized.shapes.dense_weight, dense.shapes.dense_weight) == (largest, 0)
    in_fp4 = CostModel(replace(recipe, quantization=BitsAndBytesConfig(**FP4)))
    assert in_fp4.shapes.dense_weight == 0, "made dense in memory of their own"
