"""A model from ``poros.load`` is the model from ``from_pretrained``, bit for bit, laid in slabs.

And the memory of the host that a load takes.
"""

import ctypes
import gc
import json
import re
from collections.abc import Callable
from itertools import product, starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit
from transformers import BitsAndBytesConfig

import poros.loaders.load
from poros.errors import HostMemoryError, UnsupportedModelError
from poros.gates import tiny
from poros.gates.registry import read_registry
from poros.gates.tiny import MULTIMODAL
from poros.host.disk import DiskStore
from poros.host.store import attached_store
from poros.loaders import slab_writer
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.load import load
from tests.covers import with_slow
from tests.loading.loaded import (
    DOWN,
    EMBED,
    NORM,
    Kinds,
    budget_for,
    copy_of,
    described,
    differences,
    quantization,
    standard,
    tensors,
    unplaced,
    wanted,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = (True, False)
QUANTIZED = pytest.mark.parametrize("is_quantized", BOTH, ids=["nf4", "dense"])
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


def packed(name: str, architecture: str = "qwen2", is_said: bool = False, **how: Any) -> Row:
    """Quantized already; it is loaded as it is, also if just that is asked for."""
    source = lambda kinds: kinds.packed(architecture, **how)  # noqa: E731
    options = {"quantization": quantization(**how)} if is_said else {}
    return f"4-bit already, {architecture} {name}", source, None, BF16, options


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
DOUBLE = FORMATS["nf4 double"]
ALIKE = ("llama", "mistral", "qwen3", "gemma3", "phi3", "gemma4", "qwen3_moe", "tied")
"""What others have that are dense, and these quantized."""
ROWS_IN_TURN = [
    # For every architecture that the gates promise; a tied head has no tensor of its own.
    *(row for name in tiny.ARCHITECTURES for row in either(name, architecture=name)),
    *either("tied", tie_word_embeddings=True),
    *either("untied", tie_word_embeddings=False),
    *(quantized(name, how) for name, how in FORMATS.items()),
    # Weights are cast to the dtype to load in before they are quantized.
    *(quantized(f"{source} to nf4 double", DOUBLE, dtype=source) for source in (FP16, FP32)),
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
    *(packed(name, **how) for name, how in FORMATS.items()),
    *(packed("nf4 double", architecture, **DOUBLE) for architecture in ("mixtral", "phi3")),
    packed("as is asked for", is_said=True, bnb_4bit_use_double_quant=False),
    *(
        packed(f"stored as {storage}", bnb_4bit_quant_storage=storage)
        for storage in ("bfloat16", "float16", "float32")
    ),
]
ROWS = {row[0]: row[1:] for row in ROWS_IN_TURN}


@pytest.mark.parametrize("name", with_slow(ROWS, [f"{name} dense" for name in ALIKE]))
def test_it_is_the_model_of_from_pretrained(kinds: Kinds, name: str) -> None:
    """Bytes, forms, classes, configuration; and every layer lies in its slab."""
    source, config, dtype, options = ROWS[name]
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
@QUANTIZED
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


# Options that are honoured.


@pytest.mark.cover("values")
@QUANTIZED
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
    assert differences(model, standard(path, how, "auto")) == []


def test_options_of_from_pretrained(kinds: Kinds) -> None:
    """Those of the model class pass through."""
    config = quantization(bnb_4bit_use_double_quant=False)
    model = load(kinds.dense(), quantization_config=config)
    assert differences(model, kinds.expected(kinds.dense(), config)) == []
    assert config.to_dict() == quantization(bnb_4bit_use_double_quant=False).to_dict()
    options = {"use_safetensors": True, "low_cpu_mem_usage": True, "local_files_only": True}
    model = load(kinds.dense(), dtype="float16", output_attentions=True, revision="main", **options)
    assert model.dtype == FP16 and model.config.output_attentions is True


@pytest.mark.parametrize("how", ["memory", "store"])
@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("openai-gpt", "expected exactly one ModuleList"),  # no list of checkpointable layers
        ("bert", "expected a decoder-only causal language model"),  # its layers see both ways
    ],
)
def test_what_cannot_be_streamed_is_not_loaded(
    family: str, why: str, how: str, kinds: Kinds, tmp_path: Path
) -> None:
    """``poros.prepare`` would refuse it; nothing of it is left."""
    options = {"store": tmp_path / "store"} if how == "store" else {}
    with pytest.raises(UnsupportedModelError, match=why):
        load(kinds.dense(family, num_layers=2), **options)
    assert list(tmp_path.iterdir()) == []


# Host memory.


def test_too_little_host_memory_is_refused_before_anything_is_read(
    kinds: Kinds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store on disk takes less: what lies outside the layers."""
    asked = list[int]()

    def require(num_bytes: int, what: str) -> None:
        asked.append(num_bytes)
        if len(asked) == 1:
            raise HostMemoryError(f"{what}: no")

    def fail(*_: Any) -> None:
        raise RuntimeError("read")

    path, model = kinds.dense(), standard(kinds.dense(), quantization())
    monkeypatch.setattr(slab_writer, "require_host_memory", require)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "fetch", fail)
        with pytest.raises(HostMemoryError, match="no"):
            load(path)
    monkeypatch.setattr(poros.loaders.load, "_open", lambda *_, **__: model)
    load(path, store=tmp_path / "store")
    stays = ("norm.weight", ".bias", ".nested_absmax")
    sizes = {name: tensor.nbytes for name, tensor in tensors(model).items()}
    outside = [
        size for name, size in sizes.items() if ".layers." not in name or name.endswith(stays)
    ]
    assert asked[0] > asked[1] == sum(outside)


class Peak:
    """The most memory of this process inside the body, over what it had before."""

    def __enter__(self) -> "Peak":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide as much of what is taken
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
        self._before = self._most()
        self.num_bytes = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.num_bytes = self._most() - self._before

    @staticmethod
    def _most() -> int:
        (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(line) * 1024


@pytest.mark.parametrize("is_quantized", with_slow(BOTH, [False]), ids=["nf4", "dense"])
def test_host_memory_while_loading(kinds: Kinds, is_quantized: bool) -> None:
    """The model as it will be, one tensor, and what pieces of it take."""
    # Of a quantized base fewer layers are enough for the control, and they take their time.
    sizes = {"num_layers": 3 if is_quantized else 8}
    sizes |= {"hidden_size": 1024, "vocab_size": 4096, "intermediate_size": 4096}
    path, ours = kinds.dense(**sizes), wanted(is_quantized)[0]
    load(kinds.dense(), quantization=ours)  # whatever libraries allocate once
    with Peak() as peak:
        model = load(path, quantization=ours)
    store = attached_store(model)
    parts = tensors(model).items()
    outside = sum(tensor.nbytes for name, tensor in parts if ".layers." not in name)
    largest = 1024 * 4096 * 2
    bound = store.num_bytes + outside + largest + 128 * 2**20  # pieces, and what allocators hold
    assert 0.9 * store.num_bytes < peak.num_bytes <= bound
    del model, store, parts
    with Peak() as control:  # twice as much and more, held until the end: seen for certain
        held = load(path, quantization=None, dtype=torch.float32)
    assert sum(tensor.nbytes for tensor in tensors(held).values()) > bound
    assert control.num_bytes > bound


def test_a_host_budget(kinds: Kinds) -> None:
    """The first layers lie in memory, the others are the file's, unwritten."""
    path = kinds.dense("gemma4_shared_kv")
    store, expected = kinds.store(path), kinds.expected(path, quantization())
    starts = [budget_for(store, index) for index in range(4)]
    for num_layers, budget in ((0, 0), (0, starts[1] - 1), (1, starts[1]), (3, str(starts[3]))):
        model = load(path, store=store, host_budget=budget)
        assert differences(model, expected) == [] and unplaced(model) == []
        host = attached_store(model)
        assert isinstance(host, DiskStore)
        on_disk = [slab.arena is host.behind.arena for slab in host.slabs]
        assert on_disk == [index >= num_layers for index in range(4)]
        assert all(host.is_untouched(slab) for slab in host.slabs)
    assert not isinstance(attached_store(load(path, store=store, host_budget="1 GiB")), DiskStore)
