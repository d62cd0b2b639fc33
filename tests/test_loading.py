"""A model from ``poros.load`` is the model from ``from_pretrained``, bit for bit, laid in slabs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from poros.gates import tiny
from poros.gates.registry import read_registry
from poros.host.store import left_store
from poros.loaders.load import load
from tests.loaded import (
    DOWN,
    EMBED,
    NORM,
    checkpoints,
    copy_of,
    described,
    differences,
    is_mapped,
    quantization,
    standard,
    tensors,
    unplaced,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes small checkpoints, each once."""
    return checkpoints(tmp_path_factory)


@pytest.fixture(autouse=True)
def leaves_transformers_as_it_was() -> Iterator[None]:
    """No method of quantization stays behind, whatever happened."""
    before = dict(AUTO_QUANTIZER_MAPPING)
    yield
    assert dict(AUTO_QUANTIZER_MAPPING) == before


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
def test_it_is_the_model_of_from_pretrained(
    checkpoint: Any, architecture: str, is_quantized: bool
) -> None:
    """For every architecture that the gates promise: bytes, forms, classes, configuration."""
    path = checkpoint(architecture)
    config = quantization() if is_quantized else None
    model = load(path, quantization="nf4" if is_quantized else None)
    assert differences(model, standard(path, config)) == []
    assert unplaced(model) == []
    assert left_store(model).fallbacks == []


@pytest.mark.parametrize("double_quant", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_formats_and_source_dtypes(
    checkpoint: Any, quant_type: str, double_quant: bool, source: torch.dtype
) -> None:
    """Weights are cast to the dtype to load in before they are quantized."""
    path = checkpoint(dtype=source)
    config = quantization(bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=double_quant)
    model = load(path, quantization=config)
    assert differences(model, standard(path, config)) == []
    assert unplaced(model) == []


@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma4", "deepseek_v3"])
def test_other_dtypes_to_load_in(
    checkpoint: Any, architecture: str, dtype: torch.dtype, is_quantized: bool
) -> None:
    """Some families keep a few parameters in float32."""
    path = checkpoint(architecture)
    config = quantization(bnb_4bit_compute_dtype=dtype) if is_quantized else None
    model = load(path, quantization=config, dtype=dtype)
    assert differences(model, standard(path, config, dtype)) == []
    assert unplaced(model) == []


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
def test_tied_and_untied_heads(checkpoint: Any, is_tied: bool, is_quantized: bool) -> None:
    """A tied head has no tensor of its own in the checkpoint."""
    path = checkpoint(tie_word_embeddings=is_tied)
    model = load(path, quantization="nf4" if is_quantized else None)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    assert differences(model, standard(path, quantization() if is_quantized else None)) == []


@pytest.mark.parametrize("architecture", ["qwen2", "mixtral"])
@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
def test_shards(checkpoint: Any, tmp_path: Path, architecture: str, is_quantized: bool) -> None:
    """Experts that are fused as they are loaded come from several files."""
    single = checkpoint(architecture)
    dense = AutoModelForCausalLM.from_pretrained(single, dtype=torch.bfloat16)
    dense.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model = load(tmp_path, quantization="nf4" if is_quantized else None)
    assert differences(model, standard(tmp_path, quantization() if is_quantized else None)) == []
    assert unplaced(model) == []


@pytest.mark.parametrize("skipped", [["q_proj", "lm_head"], ["model.layers.1.mlp"], []], ids=str)
def test_modules_to_skip(checkpoint: Any, skipped: list[str]) -> None:
    """As BitsAndBytesConfig says; an empty list quantizes the head too, which is in no layer."""
    path = checkpoint(tie_word_embeddings=False)
    config = quantization(llm_int8_skip_modules=skipped)
    model = load(path, quantization=config)
    assert differences(model, standard(path, config)) == []
    assert unplaced(model) == []


@pytest.mark.parametrize("is_packed", [True, False], ids=["4-bit already", "dense"])
def test_offload_to_a_cpu_is_no_reason_to_stay_dense(
    checkpoint: Any, tmp_path: Path, is_packed: bool
) -> None:
    """With it, transformers quantizes nothing that it is told to put on a CPU, which is all here.

    Of packed weights it then makes others, at random.
    """
    path, config = checkpoint(), quantization(llm_int8_enable_fp32_cpu_offload=True)
    expected = standard(path, quantization())
    if is_packed:
        expected.config.quantization_config.llm_int8_enable_fp32_cpu_offload = True
        expected.save_pretrained(path := tmp_path)
        model = load(path)
    else:
        model = load(path, quantization=config)
    assert model.config.quantization_config.llm_int8_enable_fp32_cpu_offload
    ours, theirs = described(model), described(expected)
    about = {"config", "hf_quantizer", "attributes", "name_or_path", "_name_or_path"}
    assert [key for key in ours.keys() - about if ours[key] != theirs[key]] == []


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
def test_storage_dtypes(checkpoint: Any, storage: str) -> None:
    """Packed bytes under another dtype."""
    config = quantization(bnb_4bit_quant_storage=storage)
    model = load(checkpoint(), quantization=config)
    assert differences(model, standard(checkpoint(), config)) == []
    assert unplaced(model) == []


@pytest.mark.parametrize("architecture", ["qwen2", "mixtral", "phi3"])
@pytest.mark.parametrize("double_quant", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_checkpoint_that_is_4bit_already(
    checkpoint: Any, tmp_path: Path, architecture: str, double_quant: bool, quant_type: str
) -> None:
    """Is loaded as it is."""
    config = quantization(bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=double_quant)
    standard(checkpoint(architecture), config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert differences(model, standard(tmp_path, None)) == []
    assert unplaced(model) == []


def test_another_block_size(checkpoint: Any, tmp_path: Path) -> None:
    """That the configuration does not tell of: the bytes are right, the layers are not adopted."""
    model = standard(checkpoint(), quantization())
    from bitsandbytes.nn import Params4bit

    for name, module in model.named_modules():
        if "mlp" in name and hasattr(module, "quant_state"):
            dense = torch.randn(module.out_features, module.in_features).bfloat16()
            module.weight = Params4bit(
                dense, blocksize=256, quant_type="nf4", requires_grad=False, module=module
            ).to("cpu")
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert differences(ours, standard(tmp_path, None)) == []
    assert any("mlp" in name for name in unplaced(ours))
    assert any("memory of its own" in each for each in left_store(ours).fallbacks)


@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
def test_nothing_of_the_checkpoint_stays_mapped(
    checkpoint: Any, tmp_path: Path, is_quantized: bool
) -> None:
    """So that a file which is overwritten later cannot reach the model."""
    path = copy_of(checkpoint("mixtral"), tmp_path)
    model = load(path, quantization="nf4" if is_quantized else None)
    assert not is_mapped(path)
    assert sum(each.numel() for each in tensors(model).values()) > 0


def test_options_of_from_pretrained(checkpoint: Any) -> None:
    """Those of the configuration and of the model class pass through."""
    path = checkpoint()
    model = load(path, attn_implementation="eager", use_cache=False)
    assert model.config._attn_implementation == "eager" and model.config.use_cache is False
    config = quantization(bnb_4bit_use_double_quant=False)
    model = load(path, quantization_config=config)
    assert differences(model, standard(path, config)) == []
    assert config.to_dict() == quantization(bnb_4bit_use_double_quant=False).to_dict()


def test_a_generation_config_beside_the_weights(checkpoint: Any, tmp_path: Path) -> None:
    """As from_pretrained reads it."""
    copy_of(checkpoint(), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    model = load(tmp_path, quantization=None)
    assert model.generation_config.temperature == 0.25
    assert differences(model, standard(tmp_path, None)) == []


@pytest.mark.parametrize("part", ["packed", "absmax", "nested_absmax", "code", "norm", "embedding"])
def test_control_one_bit_is_seen(checkpoint: Any, part: str) -> None:
    """In any part of any kind of tensor."""
    model, same = load(checkpoint()), load(checkpoint())
    assert differences(model, same) == []
    name = {
        "packed": DOWN,
        "absmax": f"{DOWN}.absmax",
        "nested_absmax": f"{DOWN}.nested_absmax",
        "code": f"{DOWN}.code",
        "norm": NORM,
        "embedding": EMBED,
    }[part]
    tensors(model)[name].view(-1).view(torch.uint8)[3] ^= 1
    assert differences(model, same) == [name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", sorted(read_registry().exact_model_types() - set(tiny.ARCHITECTURES))
)
@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
def test_every_family_on_record(checkpoint: Any, model_type: str, is_quantized: bool) -> None:
    """All that stream exactly."""
    path = checkpoint(model_type)
    model = load(path, quantization="nf4" if is_quantized else None)
    assert differences(model, standard(path, quantization() if is_quantized else None)) == []
