"""The table of damages to whole checkpoints and stores; see ``tests.damage``.

Damages to single files (headers, indexes, what is no regular file) are in ``tests.test_malformed``.
"""

import json
from typing import Any

import torch

from poros.errors import PorosError, UnsupportedModelError
from tests.damage import (
    CONFIG,
    GENERATION,
    WEIGHTS,
    Damage,
    both,
    config,
    document,
    drop,
    flip,
    kept_config,
    manifest,
    put,
    quantized,
    renamed,
    rest,
    sparse,
    state,
    tensor,
    tensors,
)

ADAPTER = "adapter_config.json"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
DEEP = b"[" * 100_000 + b"]" * 100_000
DEEP_CONFIG = b'{"model_type": "qwen2", "x": ' + b"[" * 200 + b"]" * 200 + b"}"
ROPE = {"rope_theta": 1e4, "rope_type": "default"}
UNFIT = "that transformers (knows|builds a model from), found"
NAN, INF = float("nan"), float("inf")


def dense(name: str, break_it: Any, says: str | None, **options: Any) -> Damage:
    return Damage(name, "dense", break_it, says, **options)


def planned(name: str, break_it: Any, says: str, **options: Any) -> Damage:
    """A configuration that ``poros.plan`` refuses as well."""
    return Damage(name, "dense", break_it, says, planned=True, **options)


def packed(name: str, break_it: Any, says: str | None, base: str = "4bit", **more: Any) -> Damage:
    return Damage(name, base, break_it, says, **more)


def moe(name: str, break_it: Any, says: str | None, **options: Any) -> Damage:
    return Damage(name, "moe", break_it, says, **options)


def stored(name: str, break_it: Any, says: str | None, **options: Any) -> Damage:
    return Damage(name, "store", break_it, says, **options)


def part(suffix: str) -> str:
    return f"{DOWN}.{suffix}"


def spoil(value: float) -> Any:
    """One entry of a tensor."""

    def change(found: torch.Tensor) -> torch.Tensor:
        found.view(-1)[3] = value
        return found

    return change


def about(**changes: Any) -> Any:
    return manifest(lambda store: store["about"].update(changes))


CONFIGS = [
    planned("unknown activation", config(hidden_act="nonsense"), "nonsense"),
    planned("activation is a list", config(hidden_act=["silu"]), UNFIT),
    planned("unknown rope type", config(rope_parameters={**ROPE, "rope_type": "odd"}), "odd"),
    planned("rope theta is a text", config(rope_parameters={**ROPE, "rope_theta": "x"}), UNFIT),
    planned("a billion layers", config(num_hidden_layers=10**9), r"Limits\(num_layers=\.\.\.\)"),
    planned("endless layers", config(num_hidden_layers=1e300), r"num_layers=\.\.\."),
    planned("a billion labels", config(num_labels=10**9), r"Limits\(num_labels=\.\.\.\)"),
    planned("a billion experts", config(num_experts=10**9), r"Limits\(num_experts=\.\.\.\)"),
    planned(
        "many experts of many layers",
        config(num_hidden_layers=4000, layer_types=..., num_experts=4000),
        "layers times experts of at most 200000, found 16000000",
    ),
    planned("layers in a text config", config(text_config={"n_layer": 10**9}), "n_layer of at m"),
    planned("negative layers", config(num_hidden_layers=-1), UNFIT),
    planned("layers are a text", config(num_hidden_layers="many"), UNFIT),
    planned("hidden size zero", config(hidden_size=0), UNFIT),
    planned("hidden size negative", config(hidden_size=-64), UNFIT),
    planned("hidden size a float", config(hidden_size=64.5), UNFIT),
    planned("no heads", config(num_attention_heads=0), UNFIT),
    planned("vocabulary is a list", config(vocab_size=[512]), UNFIT),
    planned("no model type", config(model_type=...), UNFIT),
    planned("model type is a number", config(model_type=3), UNFIT),
    planned("unknown model type", config(model_type="no_such"), "no_such"),
    planned("model type of images", config(model_type="vit"), "vit", error=UnsupportedModelError),
    planned("config nested too deeply", put(CONFIG, DEEP), "too deeply"),
    planned("config 200 levels deep", put(CONFIG, DEEP_CONFIG), "at most 64 levels|too deeply"),
    planned("config is a list", put(CONFIG, b"[]"), "found a list"),
    planned("config is a pickle", put(CONFIG, b"\x80\x04."), "text that is none"),
    planned("config of zeros", sparse(CONFIG, 2**20), "text that is none"),
    planned("config without end", sparse(CONFIG, 10**12), r"Limits\(config_num_bytes=\.\.\.\)"),
    planned("no config", drop(CONFIG), "No such file"),
    planned(
        "code of its own", config(model_type="x", auto_map={"AutoConfig": "code.Config"}), UNFIT
    ),
    planned("model type with escapes", config(model_type="\x1b[31mred\n" * 999), r"\\x1b\[31mred"),
    dense(
        "windows without a size",
        config(layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=None),
        None,
    ),
    dense("a huge vocabulary", config(vocab_size=10**12), "GB of host memory", error=PorosError),
    dense("a wider model", config(hidden_size=128), "expected shape"),
    dense("another intermediate size", config(intermediate_size=64), "expected shape"),
    dense("fewer layers", config(num_hidden_layers=1, layer_types=...), "tensors without use"),
    dense("more layers", config(num_hidden_layers=3, layer_types=...), "none of model.layers.2"),
    dense("tied head beside a head", config(tie_word_embeddings=True), None),
    dense("an unknown field", config(nonsense={"a": [1, None]}), None),
    dense("a field twice", lambda f: _twice(f), None),
    dense(
        "gptq",
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "'gptq'",
        error=UnsupportedModelError,
    ),
    dense(
        "8 bits",
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        "8 bits of bitsandbytes",
        error=UnsupportedModelError,
    ),
    dense(
        "quantization of nothing",
        config(quantization_config={"quant_method": "bitsandbytes"}),
        "found quantization_config",
        error=UnsupportedModelError,
    ),
    dense(
        "odd 4-bit type",
        config(quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}),
        "nf5",
    ),
    dense(
        "odd compute dtype",
        config(quantization_config={"load_in_4bit": True, "bnb_4bit_compute_dtype": "x"}),
        "quantization_config, found",
    ),
    dense("quantization is a text", config(quantization_config="nf4"), UNFIT),
    dense(
        "dense weights said to be 4-bit",
        config(quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        "expected a 4-bit weight with its quantization state",
    ),
]

GENERATIONS = [
    dense("generation: odd number", document(GENERATION, max_new_tokens=-1), GENERATION),
    dense("generation: a text", document(GENERATION, max_new_tokens="x"), GENERATION),
    dense("generation: no cache", document(GENERATION, cache_implementation="odd"), GENERATION),
    dense("generation: no settings", document(GENERATION, watermarking_config=3), GENERATION),
    dense("generation: not looked at", document(GENERATION, num_beams="many"), None),
    dense("generation: a list", put(GENERATION, b"[1]"), "found a list"),
    dense("generation: broken", put(GENERATION, b"{x"), "text that is none"),
    dense("generation: deep", put(GENERATION, DEEP), "too deeply"),
    dense("generation: empty", put(GENERATION, b""), "found 0"),
    dense("generation: endless", sparse(GENERATION, 10**12), "config_num_bytes"),
    dense("generation: as it should", document(GENERATION, temperature=0.25, do_sample=True), None),
]

WEIGHT_CASES = [
    dense("int8 weights", tensor(DOWN, lambda t: (t * 9).to(torch.int8)), "floating point.*int8"),
    dense("int64 norm", tensor(NORM, lambda t: t.long()), "in floating point"),
    dense("bool embedding", tensor(EMBED, lambda t: t > 0), "in floating point"),
    dense("uint8 head", tensor(HEAD, lambda t: t.abs().byte()), "in floating point"),
    dense("fp32 weights", tensor(DOWN, lambda t: t.float()), None),
    dense("fp8 weights", tensor(DOWN, lambda t: t.to(torch.float8_e4m3fn)), None),
    dense("fp64 norm", tensor(NORM, lambda t: t.double()), None),
    dense("weights one larger", tensor(DOWN, lambda t: torch.cat([t, t[:1]])), "expected shape"),
    dense("weights as one row", tensor(DOWN, lambda t: t.reshape(1, -1)), "expected shape"),
    dense("empty weights", tensor(DOWN, lambda t: t[:0]), "expected shape"),
    dense("scalar norm", tensor(NORM, lambda t: t[0]), "expected shape"),
    dense("NaN in a weight", tensor(DOWN, spoil(NAN)), "expected finite"),
    dense("infinity in a norm", tensor(NORM, spoil(-INF)), "expected finite"),
    dense("NaN in the head", tensor(HEAD, spoil(NAN)), "expected finite"),
    dense("layers from 1", renamed("layers.0.", "layers.7."), "none of model.layers.0"),
    dense("another prefix", renamed("model.", "transformer."), "none of"),
    dense(
        "a name with escapes",
        tensors(lambda f: f.update({"model.layers.0.\x1b[2J\n.weight": torch.ones(3)})),
        r"model\.layers\.0\.\\x1b\[2J\\n\.weight",
    ),
    dense(
        "a name of a megabyte",
        tensors(lambda f: f.update({"model.layers.0." + "x" * 10**6: torch.ones(3)})),
        r"1000\d\d\d? characters|characters",
    ),
    dense("tensors of other parts", tensors(lambda f: f.update({"vision.w": torch.ones(3)})), None),
    dense("another program's manifest.json", put("manifest.json", b'{"name": "web app"}'), None),
    dense("a manifest.json without end", sparse("manifest.json", 10**12), None),
    dense("a manifest.json of garbage", put("manifest.json", b"\x00\xff" * 9), None),
    moe("expert 2 is called 99", renamed("experts.2.", "experts.99."), "found none of number 2"),
    moe("expert 0 is called 4", renamed("experts.0.", "experts.4."), "found none of number 0"),
    moe("expert 02", renamed("experts.2.", "experts.02."), "found none of number 2"),
    moe("one tensor of one expert", renamed(EXPERT, EXPERT.replace("2", "5")), "none of number 2"),
    moe("an expert is missing", lambda f: _without(f, "experts.3."), "expected shape"),
    moe("an expert too many", lambda f: _with(f, "experts.3.", "experts.4."), "expected shape"),
    moe("an expert of int8", tensor(EXPERT, lambda t: (t * 9).to(torch.int8)), "floating point"),
    moe("an expert of NaN", tensor(EXPERT, spoil(NAN)), "expected finite"),
    moe("an expert of another shape", tensor(EXPERT, lambda t: t[1:]), "could not conv"),
    moe("experts as they are", lambda f: None, None),
]

ADAPTERS = [
    dense(
        "an adapter beside the weights",
        document(ADAPTER, base_model_name_or_path="org/base", peft_type="LORA"),
        "found an adapter beside it .of the base 'org/base'.",
        error=UnsupportedModelError,
    ),
    dense(
        "an adapter alone",
        both(drop(CONFIG, WEIGHTS), document(ADAPTER, base_model_name_or_path="org/base")),
        "found an adapter alone; its base is 'org/base'",
        error=UnsupportedModelError,
        planned=True,
    ),
    dense(
        "an adapter with a config",
        both(drop(WEIGHTS), document(ADAPTER, base_model_name_or_path="org/base")),
        "found an adapter alone",
        error=UnsupportedModelError,
    ),
    dense("a broken adapter config", put(ADAPTER, b"{"), "adapter_config.json: expected a JSON"),
    dense("only GGUF", both(drop(WEIGHTS), put("m.gguf", b"GGUF")), "GGUF.*'m.gguf'"),
    dense("only GGUF, no config", both(drop(WEIGHTS, CONFIG), put("m.gguf", b"GGUF")), "GGUF"),
    dense("only a pickle", both(drop(WEIGHTS), put("pytorch_model.bin", b"x")), "never opened"),
]

STATES = [
    packed("as they should be", lambda f: None, None),
    packed("single, as they should be", lambda f: None, None, base="4bit single"),
    packed(
        "packed where the configuration is dense",
        quantized(llm_int8_skip_modules=["lm_head", "down_proj"]),
        "expected a dense weight, as config.json says",
    ),
    packed("NaN offset", state(DOWN, nested_offset=NAN), "NaN is not JSON"),
    packed("endless offset", state(DOWN, nested_offset=1e999), "Infinity is not JSON"),
    packed("offset is a text", state(DOWN, nested_offset="0"), "a finite nested_offset"),
    packed("no offset", state(DOWN, nested_offset=...), "double quantization"),
    packed("offset of single", state(DOWN, nested_offset=1.0), "single quant", base="4bit single"),
    packed("block size 0", state(DOWN, blocksize=0), "a block size among"),
    packed("block size -64", state(DOWN, blocksize=-64), "a block size among"),
    packed("block size true", state(DOWN, blocksize=True), "a block size among"),
    packed("block size 2**62", state(DOWN, blocksize=2**62), "a block size among"),
    packed("another block size", state(DOWN, blocksize=128), "expected shape"),
    packed("nested block size 64", state(DOWN, nested_blocksize=64), "blocks of 256"),
    packed("nested block size 0", state(DOWN, nested_blocksize=0), "blocks of 256"),
    packed("nested dtype", state(DOWN, nested_dtype="float16"), "blocks of 256 scales in float32"),
    packed("another type", state(DOWN, quant_type="fp4"), "quantization to nf4"),
    packed("no type", state(DOWN, quant_type=...), "double quantization"),
    packed("another dtype", state(DOWN, dtype="int8"), "a dtype among"),
    packed("dtype is code", state(DOWN, dtype="load"), "a dtype among"),
    packed("another shape", state(DOWN, shape=[1, 2]), "expected shape"),
    packed("a negative shape", state(DOWN, shape=[-64, 128]), "positive whole numbers"),
    packed("no shape", state(DOWN, shape=None), "positive whole numbers"),
    packed("a field too many", state(DOWN, extra=1), "double quantization"),
    packed(
        "state is no JSON",
        tensor(part("quant_state.bitsandbytes__nf4"), lambda t: t[:9]),
        "text that is none",
    ),
    packed(
        "state of a megabyte",
        tensor(part("quant_state.bitsandbytes__nf4"), lambda t: t.repeat(6000)),
        "at most 4096 bytes",
    ),
    packed(
        "state under another type's name",
        renamed("1.mlp.down_proj.weight.quant_state.bitsandbytes__nf4", part("x")[13:] + "__nf5"),
        "expected one quantization state",
    ),
    packed("code of 0", tensor(part("quant_map"), lambda t: t[:0]), "16 entries"),
    packed("code of 15", tensor(part("quant_map"), lambda t: t[:15]), "16 entries"),
    packed("NaN in the code", tensor(part("quant_map"), spoil(NAN)), "quant_map|code"),
    packed("code in fp16", tensor(part("quant_map"), lambda t: t.half()), "float32 in code"),
    packed("nested code of 0", tensor(part("nested_quant_map"), lambda t: t[:0]), "256 entries"),
    packed("nested code of 4", tensor(part("nested_quant_map"), lambda t: t[:4]), "256 entries"),
    packed("NaN in the nested code", tensor(part("nested_quant_map"), spoil(NAN)), "nested_code"),
    packed("NaN in nested absmax", tensor(part("nested_absmax"), lambda t: t * NAN), "finite"),
    packed("nested absmax in fp16", tensor(part("nested_absmax"), lambda t: t.half()), "float32"),
    packed("absmax in fp32", tensor(part("absmax"), lambda t: t.float()), "uint8 in absmax"),
    packed("absmax one short", tensor(part("absmax"), lambda t: t[1:]), "expected shape"),
    packed("no absmax", tensors(lambda f: f.pop(part("absmax"))), "expected the tensors"),
    packed("no code", tensors(lambda f: f.pop(part("quant_map"))), "expected the tensors"),
    packed("no nested code", tensors(lambda f: f.pop(part("nested_quant_map"))), "the tensors"),
    packed("weights one short", tensor(DOWN, lambda t: t[1:]), "expected shape"),
    packed(
        "no state at all",
        tensors(lambda f: [f.pop(n) for n in list(f) if n.startswith(f"{DOWN}.")]),
        "expected a 4-bit weight with its quantization state",
    ),
    packed("an integer norm", tensor(NORM, lambda t: t.long()), "in floating point"),
    packed(
        "NaN in single absmax",
        tensor(part("absmax"), spoil(NAN)),
        "expected finite",
        base="4bit single",
    ),
]

STORES = [
    stored("as it should be", lambda f: None, None),
    stored("no manifest", drop("manifest.json"), "manifest.json"),
    stored("manifest of zeros", sparse("manifest.json", 2**20), "text that is none"),
    stored("manifest without end", sparse("manifest.json", 10**12), "manifest_num_bytes"),
    stored("manifest cut off", lambda f: _cut(f / "manifest.json"), "text that is none"),
    stored("one bit of the manifest", flip("manifest.json", 200), "manifest.json: expected"),
    stored("another version", manifest(lambda s: s.update(version=9)), "of version 9"),
    stored("another config", config(use_cache=False), "bytes changed since"),
    stored("a config of a billion layers", kept_config(num_hidden_layers=10**9), "num_layers="),
    stored("a config of other layers", kept_config(intermediate_size=96), "expected layer 0"),
    stored("a config nested too deeply", kept_config(x=json.loads("[" * 99 + "]" * 99)), "levels"),
    stored("a source with escapes", about(source="\x1b[2J\n"), None),
    stored("a config without end", sparse(CONFIG, 10**12), "extra_num_bytes"),
    stored("no slabs", drop("slabs.safetensors"), "slabs.safetensors"),
    stored("slabs of zeros", sparse("slabs.safetensors", 10**9), "expected .* bytes, found 10"),
    stored("dtype of int8", about(dtype="int8"), "how it was made"),
    stored("dtype is code", about(dtype="load"), "how it was made"),
    stored("no quantization type", about(quantization={"load_in_4bit": True, "x": 1}), "layer 0"),
    stored("quantization is a list", about(quantization=[1]), "how it was made"),
    stored("said to be dense", about(quantization=None), "expected layer 0"),
    stored("no weights", about(weights={}), "found none of"),
    stored("weights are a list", about(weights=[1]), "the names of its tensors"),
    stored("weight of a dtype", about(weights={DOWN: ["load", 64]}), "the names of its tensors"),
    stored("weight of block size 0", lambda f: _blocksize(f, 0), "block"),
    stored("weight of block size 128", lambda f: _blocksize(f, 128), "expected shape"),
    stored(
        "a digest with escapes",
        manifest(lambda s: s["files"].update({CONFIG: "\x1b[2J\n" * 999})),
        r"digest \\x1b\[2J\\n",
    ),
    stored("no config in it", manifest(lambda s: s["files"].pop(CONFIG)), "how it was made"),
    stored(
        "nested code of 4",
        rest(lambda f: f.update({part("nested_code"): f[part("nested_code")][:4].clone()})),
        "256 entries",
    ),
    stored("no code", rest(lambda f: f.pop(part("code"))), "found it nowhere"),
    stored(
        "an integer head",
        rest(lambda f: f.update({HEAD: f[HEAD].to(torch.int8)})),
        r"expected a tensor like torch\.bfloat16",
    ),
]

CASES = [*CONFIGS, *GENERATIONS, *WEIGHT_CASES, *ADAPTERS, *STATES, *STORES]


def _twice(folder: Any) -> None:
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace("{", '{"use_cache": false,', 1))


def _without(folder: Any, of: str) -> None:
    tensors(lambda found: [found.pop(name) for name in list(found) if of in name])(folder)


def _with(folder: Any, old: str, new: str) -> None:
    tensors(
        lambda found: found.update(
            {n.replace(old, new): each.clone() for n, each in found.items() if old in n}
        )
    )(folder)


def _cut(file: Any) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _blocksize(folder: Any, size: int) -> None:
    found = json.loads((folder / "manifest.json").read_text())["store"]["about"]["weights"]
    found[DOWN][1] = size
    about(weights=found)(folder)
