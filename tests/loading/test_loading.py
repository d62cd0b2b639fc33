"""A model from ``poros.load`` is the model from ``from_pretrained``, bit for bit, laid in slabs."""

import copy
import gc
import json
import pickle
from collections.abc import Callable
from itertools import product, starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from poros.errors import CheckpointFormatError
from poros.gates import tiny
from poros.gates.multimodal import MULTIMODAL
from poros.gates.registry import read_registry
from poros.host.store import attached_store
from poros.loaders.load import load
from poros.loaders.slab_writer import SlabWriter
from tests.loading.loaded import (
    DOWN,
    EMBED,
    NORM,
    Kinds,
    copy_of,
    described,
    differences,
    is_mapped,
    quantization,
    standard,
    tensors,
    unplaced,
    wanted,
)
from tests.snapshots import batches
from tests.support import num_memory_files, prepare_plain, same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = (True, False)
WITH_TOWERS = {each.model_type for each in MULTIMODAL.values()}


Row = tuple[str, Callable[[Kinds], Path], BitsAndBytesConfig | None, torch.dtype, dict[str, Any]]
"""Name, checkpoint, how it is quantized as it is loaded, dtype, and options of ``poros.load``."""


def either(name: str, **kind: Any) -> list[Row]:
    """Quantized and dense, each asked for by its name."""
    source = lambda kinds: kinds.dense(**kind)  # noqa: E731
    return [
        (f"{name} nf4", source, quantization(), BF16, {"quantization": "nf4"}),
        (f"{name} dense", source, None, BF16, {"quantization": None}),
    ]


def quantized(name: str, how: dict[str, Any], **kind: Any) -> Row:
    config = quantization(**how)
    return name, lambda kinds: kinds.dense(**kind), config, BF16, {"quantization": config}


def packed(name: str, architecture: str = "qwen2", **how: Any) -> Row:
    """Quantized already; it is loaded as it is."""
    source = lambda kinds: kinds.packed(architecture, **how)  # noqa: E731
    return f"4-bit already, {architecture} {name}", source, None, BF16, {}


def in_dtype(architecture: str, dtype: torch.dtype, is_quantized: bool) -> Row:
    """Some families keep a few parameters in float32."""
    config = quantization(bnb_4bit_compute_dtype=dtype) if is_quantized else None
    name, options = f"{architecture} in {dtype} {config is not None}", {"quantization": config}
    return name, lambda kinds: kinds.dense(architecture), config, dtype, {**options, "dtype": dtype}


def shards(architecture: str, is_quantized: bool) -> Row:
    """Experts that are fused as they are loaded come from several files."""
    ours, config = wanted(is_quantized)
    name, options = f"shards of {architecture} {ours}", {"quantization": ours}
    return name, lambda kinds: kinds.sharded(architecture), config, BF16, options


FORMATS = {
    f"{kind} {'double' if is_double else 'single'}": {
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": is_double,
    }
    for kind, is_double in product(("nf4", "fp4"), BOTH)
}
ROWS = [
    # For every architecture that the gates promise; a tied head has no tensor of its own.
    *(row for name in tiny.ARCHITECTURES for row in either(name, architecture=name)),
    *either("tied", tie_word_embeddings=True),
    *either("untied", tie_word_embeddings=False),
    # Weights are cast to the dtype to load in before they are quantized.
    *(
        quantized(f"{source} to {name}", how, dtype=source)
        for source, (name, how) in product((BF16, FP16, FP32), FORMATS.items())
    ),
    *starmap(in_dtype, product(("qwen2", "gemma4", "deepseek_v3"), (FP16, FP32), BOTH)),
    *starmap(shards, product(("qwen2", "mixtral"), BOTH)),
    # An empty list quantizes the head too, which is in no layer.
    *(
        quantized(f"skip {names}", {"llm_int8_skip_modules": names}, tie_word_embeddings=False)
        for names in (["q_proj", "lm_head"], ["model.layers.1.mlp"], [])
    ),
    *(
        quantized(f"stored as {storage}", {"bnb_4bit_quant_storage": storage})
        for storage in ("uint8", "bfloat16", "float32")
    ),
    *(
        packed(name, architecture, **how)
        for architecture, (name, how) in product(("qwen2", "mixtral", "phi3"), FORMATS.items())
    ),
    *(
        packed(f"stored as {storage}", bnb_4bit_quant_storage=storage)
        for storage in ("bfloat16", "float16", "float32")
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_it_is_the_model_of_from_pretrained(kinds: Kinds, row: Row) -> None:
    """Bytes, forms, classes, configuration; and every layer lies in its slab."""
    _, source, config, dtype, options = row
    model = load(path := source(kinds), **options)
    assert differences(model, kinds.expected(path, config, dtype)) == []
    assert unplaced(model) == [] and attached_store(model).fallbacks == []
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == model.config.tie_word_embeddings


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    sorted(
        name
        for name, record in read_registry().families.items()
        # Those with towers load as the full model: see tests/loading/test_multimodal.py.
        if record.outcome == "exact" and name not in {*tiny.ARCHITECTURES, *WITH_TOWERS}
    ),
)
@pytest.mark.parametrize("is_quantized", BOTH, ids=["nf4", "dense"])
def test_every_family_on_record(kinds: Kinds, model_type: str, is_quantized: bool) -> None:
    path = kinds.dense(model_type)
    ours, theirs = wanted(is_quantized)
    assert differences(load(path, quantization=ours), kinds.expected(path, theirs)) == []


@pytest.mark.parametrize("part", ["", ".absmax", ".nested_absmax", ".code", "norm", "embedding"])
def test_control_one_bit_is_seen(kinds: Kinds, part: str) -> None:
    """In any part of any kind of tensor."""
    name = {"norm": NORM, "embedding": EMBED}.get(part, DOWN + part)
    model = load(kinds.dense())
    before = described(model)
    assert differences(before, kinds.expected(kinds.dense(), quantization())) == []
    tensors(model)[name].view(-1).view(torch.uint8)[3] ^= 1
    assert differences(model, before) == [name]


@pytest.mark.parametrize("is_packed", BOTH, ids=["4-bit already", "dense"])
def test_offload_to_a_cpu_is_no_reason_to_stay_dense(
    kinds: Kinds, tmp_path: Path, is_packed: bool
) -> None:
    """With it, transformers quantizes nothing that it is told to put on a CPU, which is all here.

    Of packed weights it then makes others, at random.
    """
    expected = standard(kinds.dense(), quantization())
    if is_packed:
        expected.config.quantization_config.llm_int8_enable_fp32_cpu_offload = True
        expected.save_pretrained(tmp_path)
        model = load(tmp_path)
    else:
        config = quantization(llm_int8_enable_fp32_cpu_offload=True)
        model = load(kinds.dense(), quantization=config)
    assert model.config.quantization_config.llm_int8_enable_fp32_cpu_offload
    about = {"config", "hf_quantizer", "attributes", "name_or_path", "_name_or_path"}
    assert set(differences(model, expected)) <= about


def test_another_block_size(kinds: Kinds, tmp_path: Path) -> None:
    """That the configuration does not tell of: the bytes are right, the layers are not adopted."""
    model = standard(kinds.dense(), quantization())
    for name, module in model.named_modules():
        if "mlp" in name and hasattr(module, "quant_state"):
            dense = torch.randn(module.out_features, module.in_features).bfloat16()
            options = {"blocksize": 256, "quant_type": "nf4", "requires_grad": False}
            module.weight = Params4bit(dense, **options, module=module).to("cpu")
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert differences(ours, standard(tmp_path, None)) == []
    assert any("mlp" in name for name in unplaced(ours))
    assert any("memory of its own" in line for line in attached_store(ours).fallbacks)


@pytest.mark.parametrize("is_quantized", BOTH, ids=["nf4", "dense"])
def test_nothing_of_the_checkpoint_stays_mapped(
    kinds: Kinds, tmp_path: Path, is_quantized: bool
) -> None:
    """So that a file which is overwritten later cannot reach the model."""
    path = copy_of(kinds.dense("mixtral"), tmp_path)
    model = load(path, quantization=wanted(is_quantized)[0])
    assert not is_mapped(path)
    assert sum(tensor.numel() for tensor in tensors(model).values()) > 0


def test_a_quantized_checkpoint_leaves_no_intake_on_the_model(kinds: Kinds) -> None:
    model = load(kinds.packed())
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, SlabWriter)]
    row = {"input_ids": batches()[0]["input_ids"]}
    with torch.no_grad():
        expected, *copies = (
            tiny.without_repacking(one)(**row).logits
            for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
        )
    assert all(same_bits(logits, expected) for logits in copies)


@pytest.mark.parametrize(
    ("spoilt", "options"), [([DOWN, NORM, EMBED], {"allow_nonfinite": True}), (["vision.w"], {})]
)
def test_controls_of_what_is_refused(
    kinds: Kinds, tmp_path: Path, spoilt: list[str], options: dict[str, Any]
) -> None:
    """Weights that are not finite, if they are allowed; tensors of other parts of a model."""

    def spoil(found: dict[str, Any]) -> None:
        for name in spoilt:
            found[name] = found.get(name, torch.ones(8, 8)).clone()
            found[name].view(-1)[7] = float("nan")

    path = copy_of(kinds.dense(), tmp_path, spoil)
    assert differences(load(path, **options), standard(path, quantization())) == []


# Options that are honoured.


def pretrained(path: Path, **options: Any) -> Any:
    """``from_pretrained`` with the same options."""
    settings = {"dtype": BF16, "quantization_config": quantization(), "device_map": {"": "cpu"}}
    return AutoModelForCausalLM.from_pretrained(path, **{**settings, **options})


def another(path: Path, to: Path, name: str = "model.safetensors") -> Path:
    """A checkpoint with another embedding, under another name or in another folder."""
    made = copy_of(path, to / "made", lambda found: found.update({EMBED: found[EMBED] + 1}))
    (made / "model.safetensors").replace(to / name)
    (made / "config.json").replace(to / "config.json")
    made.rmdir()
    return to


@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "store"])
@pytest.mark.parametrize("where", ["subfolder", "variant", "sharded variant"])
def test_the_weights_that_are_asked_for(
    kinds: Kinds, tmp_path: Path, where: str, is_stored: bool
) -> None:
    folder, options = copy_of(kinds.dense(), tmp_path / "model"), {"variant": "fp16"}
    if where == "subfolder":
        another(folder, folder / "inside")
        options = {"subfolder": "inside"}
    elif where == "variant":
        another(kinds.dense(), folder, "model.fp16.safetensors")
    else:
        model = standard(another(kinds.dense(), tmp_path / "other"), None)
        model.save_pretrained(folder, variant="fp16", max_shard_size="100KB")
        assert (folder / "model.safetensors.index.fp16.json").exists()
    expected = pretrained(folder, **options)
    model = load(folder, store=tmp_path / "store" if is_stored else None, **options)
    assert [name for name in differences(model, expected) if "name_or_path" not in name] == []
    assert differences(model, load(folder)) != []


@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "store"])
def test_the_configuration_that_is_given(kinds: Kinds, tmp_path: Path, is_stored: bool) -> None:
    config = AutoConfig.from_pretrained(kinds.dense(), attn_implementation="eager")
    config.rms_norm_eps = 0.25
    before = config.to_dict()
    model = load(kinds.dense(), config=config, store=tmp_path / "store" if is_stored else None)
    assert model.config.rms_norm_eps == 0.25 and model.model.norm.variance_epsilon == 0.25
    assert model.config._attn_implementation == "eager" and config.to_dict() == before
    assert differences(model, pretrained(kinds.dense(), config=config)) == []


@pytest.mark.parametrize("is_quantized", BOTH, ids=["nf4", "dense"])
@pytest.mark.parametrize("source", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("is_said", BOTH, ids=["config", "weights"])
def test_dtype_auto(
    kinds: Kinds, tmp_path: Path, source: torch.dtype, is_quantized: bool, is_said: bool
) -> None:
    """What the configuration says, or else the weights."""
    path = copy_of(kinds.dense(dtype=source), tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == str(source).removeprefix("torch.")
    if not is_said:
        del config["dtype"]
        (path / "config.json").write_text(json.dumps(config))
    how = quantization(bnb_4bit_compute_dtype=source) if is_quantized else None
    model = load(path, dtype="auto", quantization=wanted(is_quantized)[0])
    assert model.dtype == source
    assert differences(model, pretrained(path, dtype="auto", quantization_config=how)) == []


def test_options_of_from_pretrained(kinds: Kinds) -> None:
    """Those of the configuration and of the model class pass through."""
    model = load(kinds.dense(), attn_implementation="eager", use_cache=False)
    assert model.config._attn_implementation == "eager" and model.config.use_cache is False
    config = quantization(bnb_4bit_use_double_quant=False)
    model = load(kinds.dense(), quantization_config=config)
    assert differences(model, kinds.expected(kinds.dense(), config)) == []
    assert config.to_dict() == quantization(bnb_4bit_use_double_quant=False).to_dict()
    model = load(
        kinds.dense(),
        generation_config=GenerationConfig(max_new_tokens=7),
        dtype="float16",
        output_attentions=True,
        use_safetensors=True,
        low_cpu_mem_usage=True,
        revision="main",
        local_files_only=True,
    )
    assert model.generation_config.max_new_tokens == 7 and model.dtype == FP16
    assert model.config.output_attentions is True


def test_a_generation_config_beside_the_weights(kinds: Kinds, tmp_path: Path) -> None:
    copy_of(kinds.dense(), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    model = load(tmp_path, quantization=None)
    assert model.generation_config.temperature == 0.25
    assert differences(model, standard(tmp_path, None)) == []


def test_names_may_be_mapped(kinds: Kinds, tmp_path: Path) -> None:
    def rename(found: dict[str, Any]) -> None:
        found["model.final.weight"] = found.pop("model.norm.weight")

    path = copy_of(kinds.dense(), tmp_path, rename)
    found = tensors(load(path, key_mapping={r"^model\.final\.": "model.norm."}))
    expected = tensors(standard(kinds.dense(), quantization()))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(CheckpointFormatError, match=r"none of model\.norm\.weight"):
        load(path)


@pytest.mark.parametrize(
    "how", [{}, {"quantization": quantization(bnb_4bit_use_double_quant=False)}]
)
def test_the_quantization_that_a_checkpoint_has(kinds: Kinds, how: dict[str, Any]) -> None:
    path = kinds.packed(bnb_4bit_use_double_quant=False)
    assert differences(load(path, **how), kinds.expected(path)) == []


# What goes wrong leaves nothing behind.


def test_a_failed_load_keeps_no_memory(kinds: Kinds, tmp_path: Path) -> None:
    def spoil(found: dict[str, Any]) -> None:
        found["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")

    path = copy_of(kinds.dense(), tmp_path, spoil)
    gc.collect()
    before = num_memory_files()
    with pytest.raises(CheckpointFormatError, match=r"layers\.1\.mlp\.up_proj"):
        load(path)
    gc.collect()
    assert num_memory_files() == before


def test_a_model_loaded_under_inference_mode_can_be_trained(kinds: Kinds) -> None:
    with torch.inference_mode():
        model = load(kinds.dense())
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    adapted = prepare_plain(tiny.attach_lora(model, rank=2), device="cpu").train()
    adapted(**batches()[0]).loss.backward()
