"""The table of damaged checkpoints: configurations, weights, adapters and 4-bit states."""

from typing import Any

import torch

from poros.errors import PorosError, UnsupportedModelError
from tests.loading.damage import (
    CONFIG,
    GENERATION,
    WEIGHTS,
    Break,
    Case,
    added,
    both,
    config,
    document,
    drop,
    dropped,
    put,
    quantized,
    renamed,
    sparse,
    spoil,
    state,
    tensor,
    text,
)

ADAPTER = "adapter_config.json"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
ABSMAX, MAP, NESTED = f"{DOWN}.absmax", f"{DOWN}.quant_map", f"{DOWN}.nested_absmax"
NESTED_MAP = f"{DOWN}.nested_quant_map"
STATE = f"{DOWN}.quant_state.bitsandbytes__nf4"
DEEP = b"[" * 100_000 + b"]" * 100_000
DEEP_CONFIG = b'{"model_type": "qwen2", "x": ' + b"[" * 200 + b"]" * 200 + b"}"
ROPE = {"rope_theta": 1e4, "rope_type": "default"}
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
UNFIT = "that transformers (knows|builds a model from), found"
NAN, INF = float("nan"), float("inf")
UNSUPPORTED: dict[str, Any] = {"error": UnsupportedModelError}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MANY = {"num_hidden_layers": 4000, "layer_types": ..., "num_experts": 4000}
OWN_CODE = {"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}}


def planned(name: str, break_it: Break | dict[str, Any], says: str, **options: Any) -> Case:
    """A configuration, or fields of it, that ``poros.plan`` refuses as well."""
    made = config(**break_it) if isinstance(break_it, dict) else break_it
    return Case(name, "dense", made, says, planned=True, **options)


def dense(name: str, break_it: Break, says: str | None, **options: Any) -> Case:
    return Case(name, "dense", break_it, says, **options)


def either(name: str, break_it: Break, says: str) -> list[Case]:
    """Quantized as it is loaded, and dense; the error names the folder."""
    return [
        Case(f"{name}, {how}", "dense", break_it, says, file=".", options={"quantization": how})
        for how in ("nf4", None)
    ]


def moe(name: str, break_it: Break, says: str | None) -> Case:
    return Case(name, "moe", break_it, says)


def packed(name: str, break_it: Break, says: str | None, base: str = "4bit") -> Case:
    return Case(name, base, break_it, says)


def said(name: str, changes: dict[str, Any], says: str, base: str = "4bit") -> Case:
    """Of the state of one weight."""
    return Case(name, base, state(DOWN, **changes), says)


def bnb(name: str, settings: dict[str, Any], says: str, **options: Any) -> Case:
    """What the configuration of dense weights says of their quantization."""
    said = {"quant_method": "bitsandbytes", **settings}
    return Case(name, "dense", config(quantization_config=said), says, **options)


CONFIGS = [
    planned("unknown activation", {"hidden_act": "nonsense"}, "nonsense"),
    planned("activation is a list", {"hidden_act": ["silu"]}, UNFIT),
    planned("unknown rope type", {"rope_parameters": {**ROPE, "rope_type": "odd"}}, "odd"),
    planned("rope theta is a text", {"rope_parameters": {**ROPE, "rope_theta": "x"}}, UNFIT),
    planned("a billion layers", {"num_hidden_layers": 10**9}, r"Limits\(num_layers=\.\.\.\)"),
    planned("endless layers", {"num_hidden_layers": 1e300}, r"num_layers=\.\.\."),
    planned("a billion labels", {"num_labels": 10**9}, r"Limits\(num_labels=\.\.\.\)"),
    planned("a billion experts", {"num_experts": 10**9}, r"Limits\(num_experts=\.\.\.\)"),
    planned("many experts of many layers", MANY, "times experts of at most 200000, found 16000000"),
    planned("layers in a text config", {"text_config": {"n_layer": 10**9}}, "n_layer of at m"),
    planned("negative layers", {"num_hidden_layers": -1}, UNFIT),
    planned("layers are a text", {"num_hidden_layers": "many"}, UNFIT),
    planned("hidden size zero", {"hidden_size": 0}, UNFIT),
    planned("hidden size negative", {"hidden_size": -64}, UNFIT),
    planned("hidden size a float", {"hidden_size": 64.5}, UNFIT),
    planned("no heads", {"num_attention_heads": 0}, UNFIT),
    planned("vocabulary is a list", {"vocab_size": [512]}, UNFIT),
    planned("no model type", {"model_type": ...}, UNFIT),
    planned("model type is a number", {"model_type": 3}, UNFIT),
    planned("unknown model type", {"model_type": "no_such"}, "no_such"),
    planned("model type of images", {"model_type": "vit"}, "vit", **UNSUPPORTED),
    planned("config nested too deeply", put(CONFIG, DEEP), "too deeply"),
    planned("config 200 levels deep", put(CONFIG, DEEP_CONFIG), "at most 64 levels|too deeply"),
    planned("config is a list", put(CONFIG, b"[]"), "found a list"),
    planned("config is a pickle", put(CONFIG, b"\x80\x04."), "text that is none"),
    planned("config of zeros", sparse(CONFIG, 2**20), "text that is none"),
    planned("config without end", sparse(CONFIG, 10**12), r"Limits\(config_num_bytes=\.\.\.\)"),
    planned("no config", drop(CONFIG), "No such file"),
    planned("code of its own", OWN_CODE, "code of their own", **UNSUPPORTED),
    planned("model type with escapes", {"model_type": "\x1b[31mred\n" * 999}, r"\\x1b\[31mred"),
    dense("windows without a size", config(**WINDOWS, sliding_window=None), None),
    dense("a huge vocabulary", config(vocab_size=10**12), "GB of host memory", error=PorosError),
    dense("a wider model", config(hidden_size=128), "expected shape"),
    dense("another intermediate size", config(intermediate_size=64), "expected shape"),
    dense("fewer layers", config(num_hidden_layers=1, layer_types=...), "tensors without use"),
    dense("more layers", config(num_hidden_layers=3, layer_types=...), "none of model.layers.2"),
    dense("tied head beside a head", config(tie_word_embeddings=True), None),
    dense("an unknown field", config(nonsense={"a": [1, None]}), None),
    dense("a field twice", text(CONFIG, b"{", b'{"use_cache": false,'), None),
    bnb("gptq", {"quant_method": "gptq", "bits": 4}, "'gptq'", **UNSUPPORTED),
    bnb("8 bits", {"load_in_8bit": True}, "8 bits of bitsandbytes", **UNSUPPORTED),
    bnb("quantization of nothing", {}, "found quantization_config", **UNSUPPORTED),
    bnb("odd 4-bit type", {**FOUR_BITS, "bnb_4bit_quant_type": "nf5"}, "nf5"),
    bnb("odd compute dtype", {**FOUR_BITS, "bnb_4bit_compute_dtype": "x"}, "_config, found"),
    dense("quantization is a text", config(quantization_config="nf4"), UNFIT),
    bnb("dense weights said to be 4-bit", FOUR_BITS, "4-bit weight with its quantization state"),
]


def generation(name: str, break_it: Break | dict[str, Any], says: str | None) -> Case:
    made = document(GENERATION, **break_it) if isinstance(break_it, dict) else break_it
    return dense(f"generation: {name}", made, says)


GENERATIONS = [
    generation("odd number", {"max_new_tokens": -1}, GENERATION),
    generation("a text", {"max_new_tokens": "x"}, GENERATION),
    generation("no cache", {"cache_implementation": "odd"}, GENERATION),
    generation("no settings", {"watermarking_config": 3}, GENERATION),
    generation("not looked at", {"num_beams": "many"}, None),
    generation("a list", put(GENERATION, b"[1]"), "found a list"),
    generation("broken", put(GENERATION, b"{x"), "text that is none"),
    generation("deep", put(GENERATION, DEEP), "too deeply"),
    generation("empty", put(GENERATION, b""), "found 0"),
    generation("endless", sparse(GENERATION, 10**12), "config_num_bytes"),
    generation("as it should", {"temperature": 0.25, "do_sample": True}, None),
]

EXTRA, NEXT = "model.layers.1.mlp.extra.weight", "model.layers.2.mlp.up_proj.weight"

WEIGHT_CASES = [
    *either("no weight", dropped(DOWN), f"none of {DOWN}"),
    *either("no norm", dropped(NORM), f"none of {NORM}"),
    *either("no embedding", dropped(EMBED), f"none of {EMBED}"),
    *either("a row less", tensor(DOWN, lambda t: t[:-1]), f"{DOWN}: expected shape"),
    *either("transposed", tensor(DOWN, lambda t: t.T), f"{DOWN}: expected shape"),
    *either("norm one shorter", tensor(NORM, lambda t: t[:-1]), f"{NORM}.*expected shape"),
    *either("embedding one shorter", tensor(EMBED, lambda t: t[:-1]), f"{EMBED}.*expected shape"),
    *either("weight of NaN", tensor(DOWN, lambda t: t * NAN), f"{DOWN}: expected finite"),
    *either("norm of infinities", tensor(NORM, lambda t: t * INF), f"{NORM}: expected finite"),
    *either("embedding of NaN", tensor(EMBED, lambda t: t * NAN), f"{EMBED}: expected finite"),
    *either("a tensor too many", added(EXTRA), f"tensors without use: {EXTRA}"),
    *either("a layer too many", added(NEXT), f"tensors without use: {NEXT}"),
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
    dense("a name with escapes", added("model.layers.0.\x1b[2J\n"), r"layers\.0\.\\x1b\[2J\\n"),
    dense("a name of a megabyte", added("model.layers.0." + "x" * 10**6), "characters"),
    dense("tensors of other parts", added("vision.w"), None),
    dense("another program's manifest.json", put("manifest.json", b'{"name": "web app"}'), None),
    dense("a manifest.json without end", sparse("manifest.json", 10**12), None),
    dense("a manifest.json of garbage", put("manifest.json", b"\x00\xff" * 9), None),
    moe("expert 2 is called 99", renamed("experts.2.", "experts.99."), "found none of number 2"),
    moe("expert 0 is called 4", renamed("experts.0.", "experts.4."), "found none of number 0"),
    moe("expert 02", renamed("experts.2.", "experts.02."), "found none of number 2"),
    moe("one tensor of one expert", renamed(EXPERT, EXPERT.replace("2", "5")), "none of number 2"),
    moe("an expert is missing", dropped("experts.3."), "expected shape"),
    moe("one too many", renamed("experts.3.", "experts.4.", is_kept=True), "expected shape"),
    moe("an expert of int8", tensor(EXPERT, lambda t: (t * 9).to(torch.int8)), "floating point"),
    moe("an expert of NaN", tensor(EXPERT, spoil(NAN)), "expected finite"),
    moe("an expert of another shape", tensor(EXPERT, lambda t: t[1:]), "could not conv"),
    moe("experts as they are", both(), None),
]

IN_PLACE = document(ADAPTER, base_model_name_or_path="org/base", peft_type="LORA")
ALONE = "found an adapter alone; its base is 'org/base'"
GGUF = put("m.gguf", b"GGUF")

ADAPTERS = [
    dense("an adapter beside it", IN_PLACE, "beside it .of the base 'org/base'", **UNSUPPORTED),
    planned("an adapter alone", both(drop(CONFIG, WEIGHTS), IN_PLACE), ALONE, **UNSUPPORTED),
    dense("an adapter with a config", both(drop(WEIGHTS), IN_PLACE), ALONE, **UNSUPPORTED),
    dense("a broken adapter config", put(ADAPTER, b"{"), "adapter_config.json: expected a JSON"),
    dense("only GGUF", both(drop(WEIGHTS), GGUF), "GGUF.*'m.gguf'"),
    dense("only GGUF, no config", both(drop(WEIGHTS, CONFIG), GGUF), "GGUF"),
    dense("only a pickle", both(drop(WEIGHTS), put("pytorch_model.bin", b"x")), "never opened"),
]

SKIPPED = quantized(llm_int8_skip_modules=["lm_head", "down_proj"])
RENAMED = renamed(STATE, STATE.replace("nf4", "nf5"))

STATES = [
    packed("as they should be", both(), None),
    packed("single, as they should be", both(), None, "4bit single"),
    packed("packed where all is said dense", SKIPPED, "expected a dense weight, as config.json"),
    said("NaN offset", {"nested_offset": NAN}, "NaN is not JSON"),
    said("endless offset", {"nested_offset": 1e999}, "Infinity is not JSON"),
    said("offset is a text", {"nested_offset": "0"}, "a finite nested_offset"),
    said("no offset", {"nested_offset": ...}, "double quantization"),
    said("offset of single", {"nested_offset": 1.0}, "single quant", "4bit single"),
    said("block size 0", {"blocksize": 0}, "a block size among"),
    said("block size -64", {"blocksize": -64}, "a block size among"),
    said("block size true", {"blocksize": True}, "a block size among"),
    said("block size 2**62", {"blocksize": 2**62}, "a block size among"),
    said("another block size", {"blocksize": 128}, "expected shape"),
    said("nested block size 64", {"nested_blocksize": 64}, "blocks of 256"),
    said("nested block size 0", {"nested_blocksize": 0}, "blocks of 256"),
    said("nested dtype", {"nested_dtype": "float16"}, "blocks of 256 scales in float32"),
    said("another type", {"quant_type": "fp4"}, "quantization to nf4"),
    said("no type", {"quant_type": ...}, "double quantization"),
    said("another dtype", {"dtype": "int8"}, "a dtype among"),
    said("dtype is code", {"dtype": "load"}, "a dtype among"),
    said("another shape", {"shape": [1, 2]}, "expected shape"),
    said("a negative shape", {"shape": [-64, 128]}, "positive whole numbers"),
    said("no shape", {"shape": None}, "positive whole numbers"),
    said("a field too many", {"extra": 1}, "double quantization"),
    packed("state is no JSON", tensor(STATE, lambda t: t[:9]), "text that is none"),
    packed("state of a megabyte", tensor(STATE, lambda t: t.repeat(6000)), "at most 4096 bytes"),
    packed("state under another type's name", RENAMED, "expected one quantization state"),
    packed("code of 0", tensor(MAP, lambda t: t[:0]), "16 entries"),
    packed("code of 15", tensor(MAP, lambda t: t[:15]), "16 entries"),
    packed("NaN in the code", tensor(MAP, spoil(NAN)), "quant_map|code"),
    packed("code in fp16", tensor(MAP, lambda t: t.half()), "float32 in code"),
    packed("nested code of 0", tensor(NESTED_MAP, lambda t: t[:0]), "256 entries"),
    packed("nested code of 4", tensor(NESTED_MAP, lambda t: t[:4]), "256 entries"),
    packed("NaN in the nested code", tensor(NESTED_MAP, spoil(NAN)), "nested_code"),
    packed("NaN in nested absmax", tensor(NESTED, lambda t: t * NAN), f"{DOWN}.*finite"),
    packed("nested absmax in fp16", tensor(NESTED, lambda t: t.half()), "float32"),
    packed("nested absmax twice", tensor(NESTED, lambda t: torch.cat([t, t])), DOWN),
    packed("absmax in fp32", tensor(ABSMAX, lambda t: t.float()), "uint8 in absmax"),
    packed("absmax one short", tensor(ABSMAX, lambda t: t[1:]), f"{DOWN}.*expected shape"),
    packed("no absmax", dropped(ABSMAX), "expected the tensors"),
    packed("no code", dropped(MAP), "expected the tensors"),
    packed("no nested code", dropped(NESTED_MAP), "the tensors"),
    packed("weights one short", tensor(DOWN, lambda t: t[1:]), f"{DOWN}.*expected shape"),
    packed("no state", dropped(f"{DOWN}."), "expected a 4-bit weight with its quantization state"),
    packed("an integer norm", tensor(NORM, lambda t: t.long()), "in floating point"),
    packed("NaN in single absmax", tensor(ABSMAX, spoil(NAN)), "expected finite", "4bit single"),
]

MODELS = [*CONFIGS, *GENERATIONS, *WEIGHT_CASES, *ADAPTERS, *STATES]
