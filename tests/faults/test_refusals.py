"""What is refused, by a typed error that says what to do: models, policies and calls.

Whatever was asked for, the model is as it was, and trains as if nobody had asked.
"""

import re
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from peft import (
    CartridgeConfig,
    LoraConfig,
    PrefixTuningConfig,
    PveraConfig,
    VeloraConfig,
    get_peft_model,
)
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache

import poros
from poros.errors import PolicyError, PreparedModelError, UnsupportedModelError
from poros.gates import tiny
from tests.comparing import assert_same_run, changes, digest, picture
from tests.loops import batches, build, layers_of, resident_run, run
from tests.support import prepare_plain, same_bits

# Models.

Make = Callable[[], Any]
LORA: dict[str, Any] = {"r": 4, "init_lora_weights": False}


def base(architecture: str = "qwen2", **options: Any) -> Any:
    """A small model without adapters, as ``from_pretrained`` gives it."""
    return build(architecture, dropout=0.0, **options).unload()


def with_lora(model: Any, target: str = "q_proj", **options: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=[target], **LORA), **options)


def small_config() -> Any:
    return tiny.small_config("qwen2", num_layers=2, hidden_size=32)


def bert() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=64, intermediate_size=32, **sizes)
    return with_lora(transformers.BertLMHeadModel(config), "query")


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=64, **sizes)
    return with_lora(transformers.T5ForConditionalGeneration(config), "q")


def changed(change: Callable[[Any], object], **options: Any) -> Make:
    """A model after something was done to it."""

    def make() -> Any:
        model = build(**options)
        change(model)
        return model

    return make


def train_a_linear(model: Any, is_trained: bool = True) -> None:
    layers_of(model)[2].mlp.up_proj.base_layer.weight.requires_grad_(is_trained)


def on_meta() -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config())
    return with_lora(model, low_cpu_mem_usage=True)


def unquantized_4bit() -> Any:
    model = base(quantize=False)
    mlp = model.model.layers[1].mlp
    fresh = bnb.nn.Linear4bit(64, 128, bias=False, quant_type="nf4")
    fresh.load_state_dict({"weight": mlp.up_proj.weight.detach()})
    mlp.up_proj = fresh
    return with_lora(model)


def eight_bit() -> Any:
    with TemporaryDirectory() as folder:
        config = tiny.small_config("qwen2", num_layers=2, hidden_size=64)
        tiny.write_checkpoint(config, Path(folder), dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
            device_map={"": "cpu"},
        )
    return with_lora(model)


def pack(dtype: torch.dtype) -> Make:
    """Packed weights of nobody in particular."""
    packed = torch.zeros(4, 4).to(dtype)
    return changed(
        lambda model: layers_of(model)[2].self_attn.register_buffer("qweight", packed),
        quantize=False,
    )


def patch_a_forward(model: Any) -> None:
    layer = layers_of(model)[1]
    layer.forward = layer.forward


def inference_tensors() -> Any:
    with torch.inference_mode():
        return build()


def shard(model: Any) -> None:
    for layer in layers_of(model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))


def wrapped(name: str) -> Make:
    """A wrapper of this class name, for libraries that are not installed or need several GPUs."""

    def make() -> Any:
        wrapper = type(name, (nn.Module,), {"forward": lambda self, **kw: self.module(**kw)})()
        wrapper.module = build()
        return wrapper

    return make


@dataclass(frozen=True)
class Case:
    """A model that is refused: what the message says it found, where, and what to do."""

    make: Make
    found: str
    advice: str = ""
    where: str = ""
    works: bool = True
    """Whether the model can run at all."""
    mend: Callable[[Any], object] | None = None
    """What it takes for the model to be prepared."""
    has_plain_tensors: bool = True
    """Whether its bytes can be looked at."""


LAYER_1 = r"layers\.1\."
CASES = {
    "encoder with an LM head": Case(bert, "BertLMHeadModel", "CausalLM"),
    "encoder-decoder": Case(t5, "T5ForConditionalGeneration", "CausalLM", works=False),
    "classifier of tokens": Case(
        lambda: with_lora(transformers.Qwen2ForTokenClassification(small_config())),
        *("Qwen2ForTokenClassification", "CausalLM"),
        works=False,
    ),
    "not transformers": Case(
        lambda: nn.Sequential(nn.Linear(8, 8)), "Sequential", "transformers model", works=False
    ),
    "not a module": Case(lambda: {"model": 1}, "dict", "module", works=False),
    "prepare before PEFT": Case(
        lambda: base(quantize=False), "none", "prepare_model_for_kbit_training"
    ),
    "a variant of LoRA": Case(
        lambda: get_peft_model(
            base(quantize=False),
            LoraConfig(target_modules=["k_proj"], velora_config=VeloraConfig(num_groups=8)),
        ),
        r"velora \(PEFT's LORA, VeloraLinearVariant\)",
        "refused on record.*--registered velora",
    ),
    "a generator of its own": Case(
        lambda: get_peft_model(
            base(quantize=False), PveraConfig(target_modules=["k_proj"], r=4, generator_seed=1)
        ),
        "generator of its own",
        "generator_seed=None",
        r"layers\.0\.self_attn\.k_proj",
    ),
    **{
        name: Case(
            lambda config=config: get_peft_model(
                base(), config(task_type="CAUSAL_LM", num_virtual_tokens=2)
            ),
            rf"{kind} \(PEFT's {kind.upper()}, {config.__name__}\).* KV cache",
            "Prompt tuning and p-tuning .* can be streamed",
        )
        for name, kind, config in (
            ("prefix tuning", "prefix_tuning", PrefixTuningConfig),
            ("cartridge", "cartridge", CartridgeConfig),
        )
    },
    "trainable linear": Case(
        changed(train_a_linear, quantize=False),
        "trainable",
        "requires_grad_",
        r"layers\.2\.mlp\.up_proj\.base_layer\.weight",
        mend=lambda model: train_a_linear(model, False),
    ),
    "meta model": Case(on_meta, "meta device", "load the weights", r"\w+\.weight", works=False),
    "hook on one module": Case(
        changed(lambda m: add_hook_to_module(layers_of(m)[1].mlp, AlignDevicesHook("cpu"))),
        "Accelerate",
        "device_map",
        LAYER_1 + "mlp",
        mend=lambda model: remove_hook_from_module(model, recurse=True),
    ),
    "one merged": Case(
        changed(lambda model: layers_of(model)[2].mlp.up_proj.merge(), quantize=False),
        "merged",
        "unmerge_adapter",
        r"layers\.2\.mlp\.up_proj",
        mend=lambda model: model.unmerge_adapter(),
    ),
    "unquantized 4-bit": Case(
        unquantized_4bit, "not quantized", "load_in_4bit", LAYER_1 + r"mlp\.up_proj", works=False
    ),
    "8-bit": Case(eight_bit, "found a Int8Params", "poros.load", r"layers\.0\.self_attn\.q_proj"),
    **{
        f"packed in {dtype}": Case(
            pack(dtype), r"packed weights of torch\.", "", r"layers\.2\.self_attn\.qweight"
        )
        for dtype in (torch.int32, torch.float8_e4m3fn)
    },
    "compiled layer": Case(
        changed(lambda m: layers_of(m)[1].compile(backend="eager")),
        "compiled",
        "before",
        r"layers\.1",
        works=False,
    ),
    "compiled model": Case(
        lambda: torch.compile(build(), backend="eager"), "OptimizedModule", "before", works=False
    ),
    "forward on an instance": Case(changed(patch_a_forward), "instance", "remove", r"layers\.1"),
    "layer used twice": Case(
        changed(lambda model: layers_of(model).insert(2, layers_of(model)[0])),
        *("several times", "", "layers"),
    ),
    "inference tensors": Case(inference_tensors, "inference_mode", "outside", r"\w+\.weight"),
    "DataParallel": Case(lambda: nn.DataParallel(build()), "DataParallel", "before"),
    "DeepSpeed engine": Case(wrapped("DeepSpeedEngine"), "DeepSpeedEngine", "before"),
    "FSDP 1": Case(wrapped("FullyShardedDataParallel"), "FullyShardedDataParallel", "before"),
    "ZeRO-3 parameters": Case(
        changed(lambda m: setattr(layers_of(m)[0].input_layernorm.weight, "ds_id", 0)),
        *("DeepSpeed", "without DeepSpeed"),
    ),
    # In a process group of one.
    "DDP": Case(
        lambda: nn.parallel.DistributedDataParallel(build()), "DistributedDataParallel", "before"
    ),
    "FSDP 2": Case(
        changed(shard, quantize=False, dtype=torch.float32),
        "FSDPModule",
        "before",
        r"layers\.0",
        has_plain_tensors=False,
    ),
}


IDS = {"input_ids": torch.arange(3, 11).view(1, 8)}


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def look_at(model: Any, has_plain_tensors: bool) -> dict[str, object]:
    if not isinstance(model, nn.Module):
        return {}
    if has_plain_tensors:
        return picture(model)
    classes = {name: type(module) for name, module in model.named_modules()}
    return classes | {f"{name} id": id(each) for name, each in model.named_parameters()}


def outputs(model: Any, has_plain_tensors: bool) -> object:
    """What the model gives in evaluation mode, as digests."""
    if not has_plain_tensors:
        model(**batches()[0]).loss.backward()
        return None
    with torch.no_grad():
        return digest(model.eval()(**IDS)[0])


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_refused_with_a_reason_and_left_untouched(name: str) -> None:
    case = CASES[name]
    model = case.make()
    expected = outputs(model, True) if case.works and case.has_plain_tensors else None
    before = look_at(model, case.has_plain_tensors)
    with pytest.raises(UnsupportedModelError) as caught:
        prepare_plain(model)
    # The builtin too, so that existing except clauses keep working.
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "expected" in message and "found" in message
    for pattern in (case.found, case.where, case.advice):
        assert re.search(pattern, message, re.DOTALL), f"{pattern!r} not in {message!r}"
    assert changes(before, look_at(model, case.has_plain_tensors)) == {}
    if case.works:
        assert outputs(model, case.has_plain_tensors) == expected
    with pytest.raises(PreparedModelError):
        poros.runtime(model)
    if case.mend is not None:
        case.mend(model)
        assert torch.isfinite(prepare_plain(model)(**batches()[0]).loss)


def test_control_tensors_decide_and_masks_are_taken() -> None:
    """Not what a configuration says."""
    assert build().get_base_model().config.quantization_config is not None
    model = build(quantize=False)
    model.get_base_model().config.quantization_config = {"quant_method": "fp8", "dequantize": True}
    layers_of(model)[0].mlp.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))
    run(prepare_plain(model))
    poros.restore(model)


# Policies.

POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "one slot": ({"slots": 1}, "slots: expected .*at least 2.*found 1"),
    "slots of a wrong type": ({"slots": True}, "slots: expected an integer.*found True"),
    "block size 0": ({"block_size": 0}, "block_size: expected .*at least 1.*found 0"),
    "unknown field": (
        {"evict": 1},
        "'evict' is not a policy field.*block_size, vram_budget, slots",
    ),
    "no such device": ({"device": "cuda:99"}, "device: expected a usable.*found 'cuda:99'"),
    "meta device": ({"device": "meta"}, "device: expected a usable.*found 'meta'"),
    "graphs on a CPU": ({"device": "cpu", "cuda_graphs": True}, "cuda_graphs: expected a GPU"),
    "unknown check": ({"self_check": "sometimes"}, "self_check"),
    **{
        f"{field} {value!r}": ({field: value}, field)
        for field, values in {
            "offload_boundaries": ("yes", 1, 0.5),
            "keep_last": (-1, True, 1.5, "2"),
            **dict.fromkeys(("loss", "stream_head"), ("fast",)),
            "vram_budget": ("8 apples", -1, 0, float("nan"), True, "GiB"),
        }.items()
        for value in values
    },
    **{
        f"vram_budget {value!r}": (
            {"vram_budget": value},
            rf"vram_budget: .* did you mean '{meant}'\?",
        )
        for value, meant in ((8, "8GiB"), (24.5, "24.5GiB"), ("8", "8GiB"), (8192, "8192MiB"))
    },
}


@pytest.fixture(scope="module")
def unprepared() -> Iterator[Any]:
    """Everything is asked of one model, which trains exactly in the end."""
    model = build()
    yield model
    assert_same_run(resident_run(), run(prepare_plain(model)))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_cannot_work_is_refused_and_the_model_left_alone(
    name: str, unprepared: Any
) -> None:
    options, message = POLICIES[name]
    before = picture(unprepared)
    with pytest.raises(PolicyError, match=message) as caught:
        prepare_plain(unprepared, **options)
    assert isinstance(caught.value, ValueError)
    assert changes(before, picture(unprepared)) == {}
    with pytest.raises(PreparedModelError):
        poros.runtime(unprepared)
    if "device" not in options and "evict" not in options:
        with pytest.raises(PolicyError, match=message):
            poros.StreamingPolicy(**options)
    if "did you mean" in message:
        with pytest.raises(PolicyError, match=message):
            poros.plan(unprepared.config, batch_size=1, seq_len=16, **options)
        meant = message.split("'")[1]
        assert poros.StreamingPolicy(vram_budget=meant).vram_budget == meant


# Calls, while gradients are enabled.

CONTAINERS: dict[str, Callable[[], object]] = {
    "set": set,
    "deque": deque,
    "subclass of UserDict": type("Marked", (UserDict,), {"__module__": __name__}),
    "bytearray": bytearray,
    "object": type("Notes", (), {}),
    "set in a tuple": lambda: (1, {2}),
}
NOTES = r"argument 'notes'.*layers\.0.*expected.*found"


def filled_cache(model: Any) -> dict[str, Any]:
    cache = DynamicCache(config=model.get_base_model().config)
    with torch.no_grad():
        model(batches()[0]["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 12
    return {"past_key_values": cache}


Options = Callable[[Any], dict[str, Any]]
CALLS: dict[str, tuple[Options, str]] = {
    **{
        f"a mutable container: {kind}": (lambda model, make=make: {"notes": make()}, NOTES)
        for kind, make in CONTAINERS.items()
    },
    "a cache with contents": (filled_cache, r"layers\.0.*cache.*torch\.no_grad"),
}


@pytest.fixture(scope="module")
def called() -> Iterator[Any]:
    """Every call is made of one prepared model, which trains exactly in the end."""
    model, twin = (build() for _ in "ab")
    prepare_plain(model)(**batches()[0]).loss.backward()
    model.zero_grad()
    yield model
    assert_same_run(run(twin), run(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused_by_name_and_exact_without_gradients(name: str, called: Any) -> None:
    make, message = CALLS[name]
    called.train()
    options = make(called)
    before, stats = picture(called), poros.runtime(called).stats()
    batch = {"input_ids": batches()[1]["input_ids"]} if "cache" in name else batches()[1]
    with pytest.raises(UnsupportedModelError, match=message):
        called(**batch, **options)
    assert changes(before, picture(called)) == {}
    assert poros.runtime(called).stats() == stats
    if "cache" in name:
        assert options["past_key_values"].get_seq_length() == 12
        return
    with torch.no_grad():
        expected, found = (model.eval()(**batch, **options) for model in (build(), called))
    assert same_bits(expected.logits, found.logits)


def test_control_what_can_be_copied_passes(called: Any) -> None:
    plain = (1, "two", (torch.float32, None), torch.zeros(2), 3.0, torch.device("cpu"))
    shared = UserDict(states=torch.zeros(2), notes=[])
    for notes in (plain, [], [1, (torch.zeros(2), [2])], {}, {"states": torch.zeros(2)}, shared):
        called.train()(**batches()[0], notes=notes).loss.backward()
    called.zero_grad()
