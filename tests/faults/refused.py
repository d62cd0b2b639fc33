"""Models that ``prepare`` refuses: what the message says it found, where, and what to do."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bitsandbytes as bnb
import torch
import transformers
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from peft import (
    CartridgeConfig,
    LoraConfig,
    PrefixTuningConfig,
    PveraConfig,
    VeloraConfig,
    get_peft_model,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from poros.errors import PorosError, UnsupportedModelError
from poros.gates import tiny
from tests.snapshots import build, layers_of

Make = Callable[[], Any]
LORA: dict[str, Any] = {"r": 4, "init_lora_weights": False}


def base(architecture: str = "qwen2", **options: Any) -> Any:
    """A small model without adapters, as ``from_pretrained`` gives it."""
    return build(architecture, dropout=0.0, **options).unload()


def with_lora(model: Any, target: str = "q_proj", **options: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=[target], **LORA), **options)


def small_config() -> Any:
    return tiny.small_config("qwen2", num_layers=2, hidden_size=32)


def bert(head: str) -> Make:
    def make() -> Any:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.BertConfig(vocab_size=64, intermediate_size=32, **sizes)
        return with_lora(getattr(transformers, head)(config), "query")

    return make


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=64, **sizes)
    return with_lora(transformers.T5ForConditionalGeneration(config), "q")


def classifier() -> Any:
    return with_lora(transformers.Qwen2ForTokenClassification(small_config()))


def not_transformers() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


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


def offload(model: Any) -> None:
    cpu_offload(model.get_base_model(), execution_device=torch.device("cpu"))


def hook_a_module(model: Any) -> None:
    add_hook_to_module(layers_of(model)[1].mlp, AlignDevicesHook(execution_device="cpu"))


def merge_one(model: Any) -> None:
    layers_of(model)[2].mlp.up_proj.merge()


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


def said_to_be(settings: dict[str, Any]) -> Make:
    """Dense, and its configuration says that it was quantized by some library."""
    return changed(
        lambda model: setattr(model.get_base_model().config, "quantization_config", settings),
        quantize=False,
    )


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


def use_a_layer_twice(model: Any) -> None:
    layers_of(model)[2] = layers_of(model)[0]


def inference_tensors() -> Any:
    with torch.inference_mode():
        return build()


def partition(model: Any) -> None:
    layers_of(model)[0].input_layernorm.weight.ds_id = 0


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
    error: type[PorosError] = UnsupportedModelError
    works: bool = True
    """Whether the model can run at all."""
    mend: Callable[[Any], object] | None = None
    """What it takes for the model to be prepared."""
    has_plain_tensors: bool = True
    """Whether its bytes can be looked at."""


METHODS = ("gptq", "awq", "torchao", "compressed-tensors", "fp8")
LAYER_1 = r"layers\.1\."
CASES = {
    "encoder": Case(bert("BertModel"), "BertModel", "AutoModelForCausalLM"),
    "encoder with an LM head": Case(bert("BertLMHeadModel"), "BertLMHeadModel", "CausalLM"),
    "encoder-decoder": Case(t5, "T5ForConditionalGeneration", "CausalLM", works=False),
    "classifier of tokens": Case(
        classifier, "Qwen2ForTokenClassification", "CausalLM", works=False
    ),
    "not transformers": Case(not_transformers, "Sequential", "transformers model", works=False),
    "not a module": Case(lambda: {"model": 1}, "dict", "module", works=False),
    "no adapters": Case(base, "none", "get_peft_model", "layers"),
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
    "offloaded": Case(changed(offload, quantize=False), "Accelerate", "device_map"),
    "hook on one module": Case(
        changed(hook_a_module),
        "Accelerate",
        "device_map",
        LAYER_1 + "mlp",
        mend=lambda model: remove_hook_from_module(model, recurse=True),
    ),
    "merged 4-bit": Case(
        changed(lambda model: model.merge_adapter()),
        "merged",
        "unmerge_adapter",
        r"layers\.0\.self_attn\.q_proj",
    ),
    "one merged": Case(
        changed(merge_one, quantize=False),
        "merged",
        "unmerge_adapter",
        r"layers\.2\.mlp\.up_proj",
        mend=lambda model: model.unmerge_adapter(),
    ),
    "unquantized 4-bit": Case(
        unquantized_4bit, "not quantized", "load_in_4bit", LAYER_1 + r"mlp\.up_proj", works=False
    ),
    "8-bit": Case(eight_bit, "by bitsandbytes in 8 bit", "poros.load", "its quantization_config"),
    **{
        f"quantized by {method}": Case(
            said_to_be({"quant_method": method}), f"quantized by {method} "
        )
        for method in METHODS
    },
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
    "layer used twice": Case(changed(use_a_layer_twice), "several times", "", "layers"),
    "inference tensors": Case(inference_tensors, "inference_mode", "outside", r"\w+\.weight"),
    "DataParallel": Case(lambda: nn.DataParallel(build()), "DataParallel", "before"),
    "DeepSpeed engine": Case(wrapped("DeepSpeedEngine"), "DeepSpeedEngine", "before"),
    "FSDP 1": Case(wrapped("FullyShardedDataParallel"), "FullyShardedDataParallel", "before"),
    "ZeRO-3 parameters": Case(changed(partition), "DeepSpeed", "without DeepSpeed"),
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
