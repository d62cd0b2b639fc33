"""A plan of a deep model from four of its layers is the plan of all of them."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from poros.gates import tiny
from poros.planning.cost_model import CostModel
from poros.planning.meta_model import Recipe
from poros.planning.request import PlanRequest
from tests.covers import with_slow

ALIKE = ("qwen2", "llama", "mistral", "phi3", "mixtral", "qwen3_moe", "starcoder2")
FP4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "bfloat16"}
REQUESTS = (
    PlanRequest.of(seq_len=48, batch_size=2, loss="reference", adapter_kernels="peft", keep_last=2),
    PlanRequest.of(seq_len=32, block_size=2, vram_budget="3MB", optimizer="sgd"),
)


def recipe_of(name: str, num_layers: int = 9, **options: object) -> Recipe:
    config = tiny.small_config(name, num_layers=num_layers, hidden_size=64, dropout=0.0)
    lora = LoraConfig(**{"r": 4, "target_modules": "all-linear", **options})
    return Recipe.of(config, "nf4", torch.bfloat16, lora)


SLOW = ("llama", "mistral", "phi3", "qwen3_moe", "starcoder2", "gemma3", "gemma4")


@pytest.mark.parametrize("name", with_slow((*ALIKE, "gemma3", "gemma4", "gemma4_shared_kv"), SLOW))
def test_four_layers_are_enough(name: str) -> None:
    recipe = recipe_of(name, num_layers=6)
    found, expected = CostModel(recipe), CostModel(replace(recipe, is_whole=True))
    assert len(expected.layers) == 6 and len(found.layers) == (4 if name in ALIKE else 6)
    for request in REQUESTS:
        assert found.plan(request).as_dict() == expected.plan(request).as_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": {"layers.1.self_attn.q_proj": 8}},
        {"layers_to_transform": [2, 7], "target_modules": ["q_proj"]},
        {"target_modules": r".*\.5\..*q_proj"},
        {"modules_to_save": ["input_layernorm"]},
    ],
)
def test_adapters_that_differ_by_layer_need_all_layers(options: dict[str, object]) -> None:
    assert len(CostModel(recipe_of("qwen2", **options)).layers) == 9


@pytest.mark.cover("values")
@pytest.mark.parametrize("use_dora", [False, True], ids=["", "dora"])
@pytest.mark.parametrize("kernels", ["fused", "peft"])
@pytest.mark.parametrize("seq_len", [16, 256])
def test_beside_dense_weights_a_layer_takes_what_it_does_with_a_dense_base(
    kernels: str, seq_len: int, use_dora: bool
) -> None:
    recipe = recipe_of("qwen2", use_dora=use_dora)
    quantized, dense = CostModel(recipe), CostModel(replace(recipe, quantization=None))
    (found, *_), (expected, *_) = (
        model.cost(1, seq_len, "chunked", kernels).layers for model in (quantized, dense)
    )
    assert found.peak - found.dense == pytest.approx(expected.peak, rel=0.02)
    assert expected.dense == 0
    if kernels == "fused":
        assert found.dense > 0 or seq_len > 16, "of few tokens the dense weight is most of it"
    config = recipe.config
    largest = config.hidden_size * config.intermediate_size * 2
    assert (quantized.shapes.dense_weight, dense.shapes.dense_weight) == (largest, 0)
    in_fp4 = CostModel(replace(recipe_of("qwen2"), quantization=BitsAndBytesConfig(**FP4)))
    assert in_fp4.shapes.dense_weight == 0, "made dense in memory of their own"
