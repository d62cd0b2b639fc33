"""The tables of damage: to configurations, weights, adapters, 4-bit states, files and stores."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from poros.errors import PorosError, UnsupportedModelError
from poros.host.layout import PAGE_NUM_BYTES
from poros.loaders.store import REST, SLABS
from tests.loading.checkpoints import FIRST, INDEX, SECOND, entry, good_tensors, write_index
from tests.loading.damage import (
    CONFIG,
    GENERATION,
    WEIGHTS,
    Break,
    Case,
    about,
    added,
    both,
    config,
    cut,
    document,
    drop,
    dropped,
    header,
    instead,
    kept_config,
    manifest,
    one,
    pickled,
    put,
    quantized,
    renamed,
    rest,
    size,
    sparse,
    spoil,
    state,
    tensor,
    write_sealed,
)

ADAPTER = "adapter_config.json"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
ABSMAX, MAP = f"{DOWN}.absmax", f"{DOWN}.quant_map"
NESTED_MAP = f"{DOWN}.nested_quant_map"
STATE = f"{DOWN}.quant_state.bitsandbytes__nf4"
DEEP = b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
UNFIT = "that transformers (knows|builds a model from), found"
NAN, INF = float("nan"), float("inf")
UNSUPPORTED: dict[str, Any] = {"error": UnsupportedModelError}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MANY = {"num_hidden_layers": 4000, "layer_types": ..., "num_experts": 4000}
OWN_CODE = {"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}}


dense = partial(Case, base="dense")
moe = partial(Case, base="moe")
packed, packed_singly = partial(Case, base="4bit"), partial(Case, base="4bit single")
shard = partial(Case, base="files", file=SECOND)
stored = partial(Case, base="store")
opened = partial(stored, file=".")  # a store that is refused, and the folder is named


def planned(name: str, break_it: Break | dict[str, Any], says: str, **options: Any) -> Case:
    """A configuration, or fields of it, that ``poros.plan`` refuses as well."""
    made = config(**break_it) if isinstance(break_it, dict) else break_it
    return dense(name, made, says, planned=True, **options)


def either(name: str, break_it: Break, says: str) -> list[Case]:
    """Quantized as it is loaded, and dense; the error names the folder."""
    return [
        dense(f"{name}, {how}", break_it, says, file=".", options={"quantization": how})
        for how in ("nf4", None)
    ]


def said(name: str, changes: dict[str, Any], says: str) -> Case:
    return packed(name, state(DOWN, **changes), says)


def bnb(name: str, settings: dict[str, Any], says: str, **options: Any) -> Case:
    """What the configuration of dense weights says of their quantization."""
    said = {"quant_method": "bitsandbytes", **settings}
    return dense(name, config(quantization_config=said), says, **options)


CONFIGS = [
    planned("unknown activation", {"hidden_act": "nonsense"}, "nonsense"),
    planned("a billion layers", {"num_hidden_layers": 10**9}, "at most 4096"),
    planned("a billion labels", {"num_labels": 10**9}, "at most 100000"),
    planned("a billion experts", {"num_experts": 10**9}, "at most 200000"),
    planned("many experts of many layers", MANY, "times experts of at most 200000, found 16000000"),
    planned("layers in a text config", {"text_config": {"n_layer": 10**9}}, "n_layer of at m"),
    planned("hidden size negative", {"hidden_size": -64}, UNFIT),
    planned("no model type", {"model_type": ...}, UNFIT),
    planned("unknown model type", {"model_type": "no_such"}, "no_such"),
    planned("model type of images", {"model_type": "vit"}, "vit", **UNSUPPORTED),
    planned("config nested too deeply", put(CONFIG, DEEP), "too deeply"),
    planned("config is a list", put(CONFIG, b"[]"), "found a list"),
    planned("config without end", sparse(CONFIG, 10**12), "expected 1 to 4194304 bytes of JSON"),
    planned("no config", drop(CONFIG), "with config.json, found none"),
    planned("code of its own", OWN_CODE, "code of their own", **UNSUPPORTED),
    planned("model type with escapes", {"model_type": "\x1b[31mred\n" * 999}, r"\\x1b\[31mred"),
    dense("a huge vocabulary", config(vocab_size=10**12), "GB of host memory", error=PorosError),
    dense("fewer layers", config(num_hidden_layers=1, layer_types=...), "tensors without use"),
    dense("more layers", config(num_hidden_layers=3, layer_types=...), "none of model.layers.2"),
    dense("tied head beside a head", config(tie_word_embeddings=True), None),
    dense("an unknown field", config(nonsense={"a": [1, None]}), None),
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
    generation("not looked at", {"num_beams": "many"}, None),
    generation("endless", sparse(GENERATION, 10**12), "expected 1 to 4194304 bytes"),
    generation("as it should", {"temperature": 0.25, "do_sample": True}, None),
]

EXTRA = "model.layers.1.mlp.extra.weight"

WEIGHT_CASES = [
    *either("no weight", dropped(DOWN), f"none of {DOWN}"),
    *either("a row less", tensor(DOWN, lambda t: t[:-1]), f"{DOWN}.: expected shape"),
    *either("norm one shorter", tensor(NORM, lambda t: t[:-1]), f"{NORM}.*expected shape"),
    *either("weight of NaN", tensor(DOWN, lambda t: t * NAN), f"{DOWN}: expected finite"),
    *either("norm of infinities", tensor(NORM, lambda t: t * INF), f"{NORM}: expected finite"),
    *either("embedding of NaN", tensor(EMBED, lambda t: t * NAN), f"{EMBED}: expected finite"),
    *either("a tensor too many", added(EXTRA), f"tensors without use: {EXTRA}"),
    dense("int8 weights", tensor(DOWN, lambda t: (t * 9).to(torch.int8)), "floating point.*int8"),
    dense("fp8 weights", tensor(DOWN, lambda t: t.to(torch.float8_e4m3fn)), None),
    dense("fp64 norm", tensor(NORM, lambda t: t.double()), None),
    dense("another prefix", renamed("model.", "transformer."), "none of"),
    dense("a name with escapes", added("model.layers.0.\x1b[2J\n"), r"layers\.0\.\\x1b\[2J\\n"),
    dense("tensors of other parts", added("vision.w"), None),
    moe("expert 2 is called 99", renamed("experts.2.", "experts.99."), "found none of number 2"),
    moe("one tensor of one expert", renamed(EXPERT, EXPERT.replace("2", "5")), "none of number 2"),
    moe("an expert is missing", dropped("experts.3."), "expected shape"),
    moe("an expert of int8", tensor(EXPERT, lambda t: (t * 9).to(torch.int8)), "floating point"),
    moe("an expert of another shape", tensor(EXPERT, lambda t: t[1:]), "could not conv"),
    moe("experts as they are", both(), None),
]

IN_PLACE = document(ADAPTER, base_model_name_or_path="org/base", peft_type="LORA")
ALONE = "found an adapter alone; its base is 'org/base'"

ADAPTERS = [
    dense("an adapter beside it", IN_PLACE, "beside it .of the base 'org/base'", **UNSUPPORTED),
    planned("an adapter alone", both(drop(CONFIG, WEIGHTS), IN_PLACE), ALONE, **UNSUPPORTED),
    dense("an adapter with a config", both(drop(WEIGHTS), IN_PLACE), ALONE, **UNSUPPORTED),
    dense("a broken adapter config", put(ADAPTER, b"{"), "adapter_config.json: expected a JSON"),
]

SKIPPED = quantized(llm_int8_skip_modules=["lm_head", "down_proj"])
RENAMED = renamed(STATE, STATE.replace("nf4", "nf5"))

STATES = [
    packed("as they should be", both(), None),
    packed_singly("single, as they should be", both(), None),
    packed("packed where all is said dense", SKIPPED, "expected a dense weight, as config.json"),
    said("NaN offset", {"nested_offset": NAN}, "offset: expected finite"),
    said("offset is a word", {"nested_offset": "x"}, "could not convert string to float"),
    said("no offset", {"nested_offset": ...}, "nested_offset"),
    said("block size 0", {"blocksize": 0}, "a block size among"),
    said("another block size", {"blocksize": 128}, "expected shape"),
    said("nested block size 64", {"nested_blocksize": 64}, "size of scales among .256,"),
    said("nested dtype", {"nested_dtype": "float16"}, "dtype of scales among"),
    said("another type", {"quant_type": "fp4"}, "quantization to nf4"),
    said("another dtype", {"dtype": "int8"}, "a dtype among"),
    said("dtype is a function", {"dtype": "load"}, "a dtype among"),
    said("no shape", {"shape": None}, "expected shape"),
    said("a negative shape", {"shape": [-64, 128]}, "expected shape"),
    packed("state of a megabyte", tensor(STATE, lambda t: t.repeat(6000)), "Extra data"),
    packed("state under another type's name", RENAMED, "found neither"),
    packed("code of 0", tensor(MAP, lambda t: t[:0]), "16 entries"),
    packed("NaN in the code", tensor(MAP, spoil(NAN)), "quant_map|code"),
    packed("NaN in the nested code", tensor(NESTED_MAP, spoil(NAN)), "nested_code"),
    packed("absmax in fp32", tensor(ABSMAX, lambda t: t.float()), "uint8 in absmax"),
    packed("no absmax", dropped(ABSMAX), "'absmax'"),
    packed("no state", dropped(f"{DOWN}."), "expected a 4-bit weight with its quantization state"),
    packed("an integer norm", tensor(NORM, lambda t: t.long()), "in floating point"),
    packed_singly("NaN in single absmax", tensor(ABSMAX, spoil(NAN)), "expected finite"),
]

MODELS = [*CONFIGS, *GENERATIONS, *WEIGHT_CASES, *ADAPTERS, *STATES]


NAMES = list(good_tensors())
LAST, ANOTHER = NAMES[3], "other.safetensors"
SAME = f'{{"weight_map":{{"a":"{FIRST}","a":"{SECOND}"}}}}'.encode()
RIGHT_MAP = {name: FIRST if name in NAMES[:2] else SECOND for name in NAMES}
ALL_WEIGHTS = (FIRST, SECOND, INDEX)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def copied(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / FIRST).read_bytes())


def called(name: str) -> Break:
    return lambda folder: (folder / SECOND).replace(folder / name)


def index(name: str, break_it: Any, says: str) -> Case:
    """Or entries of the index that are changed; None leaves the tensor out."""

    def change(folder: Any) -> None:
        files = {key: file for key, file in (RIGHT_MAP | break_it).items() if file is not None}
        write_index(folder, files)

    made = change if isinstance(break_it, dict) else break_it
    return Case(f"index {name}", made, says, "files", INDEX)


def named(weights: Any) -> Break:
    return config(transformers_weights=weights)


def settings(name: str, break_it: Break, says: str) -> Case:
    return Case(f"configuration {name}", break_it, says, "files", CONFIG)


def source(name: str, break_it: Break, says: str, opened: str = ".", file: str = "") -> Case:
    return Case(name, break_it, says, "files", file or opened, source=opened)


FILES = [
    # The header, which safetensors checks.
    shard("empty file", put(SECOND, b""), "found 0 bytes"),
    shard("bare pickle", pickled(SECOND), "header too large"),
    shard("pointer of git lfs", put(SECOND, LFS), "run git lfs pull"),
    shard("nested deeply", header(DEEP), "recursion limit"),
    # What torch does not have, or cannot address.
    shard("an unknown dtype", header({"t": entry("F4", shape=[16])}), "'F4'", tensor="t"),
    shard("product over, then 0", one(shape=[2**62, 2**62, 0]), "overflow"),
    shard("65 dimensions", one(shape=[2, *[1] * 64]), "at most 64 sizes", tensor="t"),
    # Shards and index.
    shard("shard missing", drop(SECOND), "No such file"),
    shard("tensor in two shards", copied, f"found it in .*{FIRST} too", tensor=NAMES[0]),
    index("has a tensor twice", put(INDEX, SAME), "key 'a' twice"),
    index("names a parent", {"a": "../x.safetensors"}, "found '../x.safetensors'"),
    index("is absolute", {"a": "/tmp/x.safetensors"}, "found '/tmp/x.safetensors'"),
    index("with a null", {"a": "x\0.safetensors"}, r"found 'x\\x00"),
    index("names a pickle", {"a": "x.bin"}, "found 'x.bin'"),
    index("names a number", {"a": 3}, "file in this folder, found 3"),
    index("with an empty map", dict.fromkeys(RIGHT_MAP), "expected a weight_m"),
    index("too large", sparse(INDEX, 10**9), "bytes of JSON, found 1000000000"),
    # What is no regular file.
    shard("shard is a pipe", instead(SECOND, os.mkfifo), "a folder, a pipe or a device"),
    shard("shard is a device", instead(SECOND, lambda f: f.symlink_to("/dev/zero")), "a dev"),
    settings("is a pipe", instead(CONFIG, os.mkfifo), "a pipe"),
    # Configuration and source.
    settings("is missing", drop(CONFIG), "with config.json, found none"),
    settings("names weights by a number", named(3), "file in this folder, found 3"),
    settings("names weights outside", named("../a.safetensors"), "found '../a.safetensors'"),
    source("no tensors", both(header({}, b""), called(ANOTHER)), "of none", ANOTHER, "."),
    source("only a pickle", pickled("pytorch_model.bin", *ALL_WEIGHTS), "never opened"),
    source("a pickle as source", pickled("x.pt"), "another file", "x.pt"),
    source("no weights", drop(*ALL_WEIGHTS), "expected model.safetensors or"),
    source("source does not exist", drop(), "found no file", "absent/", file="absent"),
    source("source is a loop", lambda f: (f / "x").symlink_to(f / "x"), "another f", "x"),
    source("source of 5000 characters", drop(), "File name too long", "x" * 5000, file="xxx"),
]


CODE, NESTED_CODE = f"{DOWN}.code", f"{DOWN}.nested_code"
ESCAPES = "\x1b[2J\n"


def sealed(name: str, change: Callable[[dict[str, Any]], Any], says: str) -> Case:
    """What the manifest says, with a SHA-256 that fits."""
    return opened(name, manifest(change), says)


def weights(value: Any) -> Break:
    return about(weights=value)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    return rest(lambda found: found.update({name: change(found[name]).clone()}))


def bare(folder: Path) -> None:
    """The tensors without a manifest, as releases before version 4 wrote them."""
    save_file(load_file(folder / REST), folder / REST)


def _moved(store: dict[str, Any]) -> None:
    """A page of the first slab is said to be the second's."""
    store["slabs"][0][0] -= PAGE_NUM_BYTES
    store["slabs"][1][0] += PAGE_NUM_BYTES


STORES = [
    opened("no manifest", bare, "version None.*poros load"),
    opened("no slabs", drop(SLABS), SLABS),
    opened("no rest", drop(REST), REST),
    opened("no config", drop(CONFIG), CONFIG),
    opened("no JSON", lambda folder: write_sealed(folder, "{"), REST),
    opened("slabs cut off", cut(SLABS), SLABS),
    opened("rest cut off", cut(REST), REST),
    opened("slabs too long", size(SLABS, lambda found: found + 1), SLABS),
    opened("another config", put(CONFIG, b"{}"), f"{CONFIG}.*bytes changed since"),
    opened("another version", manifest(lambda s: None, version="1"), "version '1'.*poros load"),
    sealed("a negative size", lambda s: s["slabs"][0].__setitem__(0, -256), "slabs.0.0"),
    sealed("sizes beyond all bounds", lambda s: s["slabs"][0].__setitem__(0, 2**61), SLABS),
    sealed("a slab less", lambda s: s["slabs"].pop(), "of its slabs"),
    sealed("a tensor less", lambda s: s["rest"].popitem(), "of its slabs, tensors"),
    sealed("a file outside", lambda s: s["files"].update({"../a": "00"}), r"\.\./a"),
    stored("as it should be", manifest(lambda store: None), None),
    stored("rest without end", size(REST, lambda _: 10**12), "not fully covered"),
    stored(
        "a tensor twice",
        manifest(lambda s: _first(s, 1, _first(s, 0))),
        "layer 1, found another form",
    ),
    stored("another size of slabs", manifest(_moved), "bytes of layer 0, found"),
    stored("a config of a billion layers", kept_config(num_hidden_layers=10**9), "at most 4096"),
    stored("a config nested too deeply", kept_config(x=json.loads("[" * 99 + "]" * 99)), "levels"),
    stored(
        "a source with escapes",
        manifest(lambda s: s["about"]["origin"].update(fingerprint=ESCAPES)),
        None,
    ),
    stored("a config without end", sparse(CONFIG, 10**12), "expected 1 to 268435456 bytes"),
    stored("dtype of int8", about(dtype="int8"), "manifest that makes sense"),
    stored(
        "no quantization type", about(quantization={"load_in_4bit": True, "x": 1}), "layer 0, found"
    ),
    stored("said to be dense", about(quantization=None), "layer 0, found another form"),
    stored("no weights", weights({}), "found none of"),
    stored("weight of a dtype", weights({DOWN: ["load", 64]}), "manifest that makes sense"),
    stored("weight of block size 0", manifest(lambda s: _blocksize(s, 0)), "block"),
    stored("weight of block size 128", manifest(lambda s: _blocksize(s, 128)), "expected shape"),
    stored("no config in it", manifest(lambda s: s["files"].pop(CONFIG)), "how it was made"),
    stored("nested code of 4", changed(NESTED_CODE, lambda t: t[:4]), "256 entries"),
    stored("no code", rest(lambda f: f.pop(CODE)), "it in the store"),
    stored("an integer head", changed(HEAD, torch.Tensor.char), "a tensor in floating point"),
]


def _first(store: dict[str, Any], layer: int, name: str | None = None) -> str:
    """The name of its first tensor, or another one for it."""
    spec = store["layouts"][layer][0]
    spec[0] = name or spec[0]
    return str(spec[0])


def _blocksize(store: dict[str, Any], num_elements: int) -> None:
    store["about"]["weights"][DOWN][1] = num_elements
