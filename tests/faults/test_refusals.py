"""What ``prepare`` refuses: a typed error that says what to do, and a model as it was before."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import (
    CartridgeConfig,
    LoraConfig,
    PolyConfig,
    PrefixTuningConfig,
    PveraConfig,
    VBLoRAConfig,
    VeloraConfig,
    get_peft_model,
)
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import poros
from poros.errors import PorosError, UnsupportedModelError, UnvalidatedArchitectureError
from poros.gates import tiny
from tests.snapshots import (
    assert_same_run,
    batches,
    build,
    changes,
    digest,
    layers_of,
    picture,
    run,
)

Make = Callable[[], Any]
IDS = {"input_ids": torch.arange(3, 11).view(1, 8)}
LORA = {"r": 4, "init_lora_weights": False}


def base(architecture: str = "qwen2", **options: Any) -> Any:
    """A small model without adapters, as ``from_pretrained`` gives it."""
    return build(architecture, dropout=0.0, **options).unload()


def bert(head: str) -> Make:
    def make() -> Any:
        import transformers

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.BertConfig(vocab_size=64, intermediate_size=32, **sizes)
        return get_peft_model(
            getattr(transformers, head)(config), LoraConfig(target_modules=["query"], **LORA)
        )

    return make


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    return get_peft_model(
        T5ForConditionalGeneration(config), LoraConfig(target_modules=["q"], **LORA)
    )


def classifier() -> Any:
    from transformers import Qwen2ForSequenceClassification

    config = tiny.small_config("qwen2", num_layers=2, hidden_size=32)
    return get_peft_model(
        Qwen2ForSequenceClassification(config), LoraConfig(target_modules=["q_proj"], **LORA)
    )


def not_transformers() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def trainable_linear() -> Any:
    model = build(quantize=False)
    layers_of(model)[2].mlp.up_proj.base_layer.weight.requires_grad_(True)
    return model


def on_meta() -> Any:
    config = tiny.small_config("qwen2", num_layers=2, hidden_size=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return get_peft_model(
        model, LoraConfig(target_modules=["q_proj"], **LORA), low_cpu_mem_usage=True
    )


def one_meta_weight() -> Any:
    model = build(quantize=False)
    norm = layers_of(model)[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight.to("meta"), requires_grad=False)
    return model


def offloaded() -> Any:
    from accelerate import cpu_offload

    model = build(quantize=False)
    cpu_offload(model.get_base_model(), execution_device=torch.device("cpu"))
    return model


def hooked() -> Any:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = build()
    add_hook_to_module(layers_of(model)[1].mlp, AlignDevicesHook(execution_device="cpu"))
    return model


def merged(quantize: bool) -> Make:
    def make() -> Any:
        model = build(quantize=quantize)
        model.merge_adapter()
        return model

    return make


def one_merged() -> Any:
    model = build(quantize=False)
    layers_of(model)[2].mlp.up_proj.merge()
    return model


def unquantized_4bit() -> Any:
    model = base(quantize=False)
    mlp = model.model.layers[1].mlp
    fresh = bnb.nn.Linear4bit(64, 128, bias=False, quant_type="nf4")
    fresh.load_state_dict({"weight": mlp.up_proj.weight.detach()})
    mlp.up_proj = fresh
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], **LORA))


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
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], **LORA))


def compiled_layer() -> Any:
    model = build()
    layers_of(model)[1].compile(backend="eager")
    return model


def compiled_model() -> Any:
    return torch.compile(build(), backend="eager")


def compiled_entry() -> Any:
    model = build()
    layers = layers_of(model)
    layers[1] = torch.compile(layers[1], backend="eager")
    return model


def patched_forward() -> Any:
    model = build()
    layer = layers_of(model)[1]
    layer.forward = layer.forward
    return model


def layer_used_twice() -> Any:
    model = build()
    layers_of(model)[2] = layers_of(model)[0]
    return model


def inference_tensors() -> Any:
    with torch.inference_mode():
        return build()


def partitioned() -> Any:
    model = build()
    layers_of(model)[0].input_layernorm.weight.ds_id = 0
    return model


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


LAYER_1 = r"layers\.1\."
CASES = {
    "encoder": Case(bert("BertModel"), "BertModel", "AutoModelForCausalLM"),
    "masked LM": Case(bert("BertForMaskedLM"), "BertForMaskedLM", "AutoModelForCausalLM"),
    "encoder with an LM head": Case(bert("BertLMHeadModel"), "BertLMHeadModel", "CausalLM"),
    "encoder-decoder": Case(t5, "T5ForConditionalGeneration", "CausalLM", works=False),
    "classifier": Case(classifier, "Qwen2ForSequenceClassification", "CausalLM", works=False),
    "not transformers": Case(not_transformers, "Sequential", "transformers model", works=False),
    "not a module": Case(lambda: {"model": 1}, "dict", "module", works=False),
    "no adapters": Case(base, "none", "get_peft_model", "layers"),
    "prepare before PEFT": Case(
        lambda: base(quantize=False), "none", "prepare_model_for_kbit_training"
    ),
    "one bank of vectors": Case(
        lambda: get_peft_model(
            base(), VBLoRAConfig(target_modules=["k_proj"], num_vectors=8, vector_length=8)
        ),
        r"vblora \(PEFT's VBLORA, Linear4?b?i?t?\)",
        r"`poros check --architecture qwen2 --adapter vblora`.*allow_unvalidated=True",
        error=UnvalidatedArchitectureError,
    ),
    "a kind that the gate cannot attach": Case(
        lambda: get_peft_model(base(), PolyConfig(target_modules=["k_proj"], r=4)),
        r"poly \(PEFT's POLY, Linear\)",
        "the gate cannot attach poly.*allow_unvalidated=True",
        error=UnvalidatedArchitectureError,
        works=False,
    ),
    "a variant of LoRA": Case(
        lambda: get_peft_model(
            base(quantize=False),
            LoraConfig(target_modules=["k_proj"], velora_config=VeloraConfig(num_groups=8)),
        ),
        r"velora \(PEFT's LORA, VeloraLinearVariant\)",
        "--adapter velora`",
        error=UnvalidatedArchitectureError,
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
        trainable_linear,
        "trainable",
        "requires_grad_",
        r"layers\.2\.mlp\.up_proj\.base_layer\.weight",
    ),
    "meta model": Case(on_meta, "meta device", "load the weights", r"\w+\.weight", works=False),
    "one meta weight": Case(
        one_meta_weight, "meta", "load", LAYER_1 + r"input_layernorm\.weight", works=False
    ),
    "offloaded": Case(offloaded, "Accelerate", "device_map"),
    "hook on one module": Case(hooked, "Accelerate", "device_map", LAYER_1 + "mlp"),
    "merged 4-bit": Case(
        merged(True), "merged", "unmerge_adapter", r"layers\.0\.self_attn\.q_proj"
    ),
    "merged dense": Case(merged(False), "merged", "unmerge_adapter"),
    "one merged": Case(one_merged, "merged", "unmerge_adapter", r"layers\.2\.mlp\.up_proj"),
    "unquantized 4-bit": Case(
        unquantized_4bit, "not quantized", "load_in_4bit", LAYER_1 + r"mlp\.up_proj", works=False
    ),
    "8-bit": Case(eight_bit, "by bitsandbytes in 8 bit", "poros.load", "its quantization_config"),
    "compiled layer": Case(compiled_layer, "compiled", "before", r"layers\.1", works=False),
    "compiled entry": Case(compiled_entry, "OptimizedModule", "before", r"layers\.1", works=False),
    "compiled model": Case(compiled_model, "OptimizedModule", "before", works=False),
    "forward on an instance": Case(patched_forward, "instance", "remove", r"layers\.1"),
    "layer used twice": Case(layer_used_twice, "several times", "", "layers"),
    "inference tensors": Case(inference_tensors, "inference_mode", "outside", r"\w+\.weight"),
    "DataParallel": Case(lambda: nn.DataParallel(build()), "DataParallel", "before"),
    "DeepSpeed engine": Case(wrapped("DeepSpeedEngine"), "DeepSpeedEngine", "before"),
    "FSDP 1": Case(wrapped("FullyShardedDataParallel"), "FullyShardedDataParallel", "before"),
    "ZeRO-3 parameters": Case(partitioned, "DeepSpeed", "without DeepSpeed"),
}


def outputs(model: Any) -> object:
    """What the model gives in evaluation mode, as digests."""
    with torch.no_grad():
        out = model.eval()(**IDS)
    return digest(out[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_reason_and_left_untouched(name: str) -> None:
    case = CASES[name]
    model = case.make()
    is_module = isinstance(model, nn.Module)
    expected = outputs(model) if case.works else None
    before = picture(model) if is_module else {}
    with pytest.raises(case.error) as caught:
        poros.prepare(model)
    # The builtin too, so that existing except clauses keep working.
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    is_unproven = case.error is UnvalidatedArchitectureError
    assert is_unproven or ("expected" in message and "found" in message)
    for pattern in (case.found, case.where, case.advice):
        assert re.search(pattern, message, re.DOTALL), f"{pattern!r} not in {message!r}"
    assert changes(before, picture(model) if is_module else {}) == {}
    if case.works:
        assert outputs(model) == expected
    with pytest.raises(poros.PreparedModelError):
        poros.runtime(model)


@pytest.mark.parametrize("repair", ["freeze", "unmerge", "unhook"])
def test_a_refused_model_can_be_prepared_once_repaired(repair: str) -> None:
    if repair == "freeze":
        model = trainable_linear()
    elif repair == "unmerge":
        model = one_merged()
    else:
        model = hooked()
    with pytest.raises(UnsupportedModelError):
        poros.prepare(model)
    if repair == "freeze":
        layers_of(model)[2].mlp.up_proj.base_layer.weight.requires_grad_(False)
    elif repair == "unmerge":
        model.unmerge_adapter()
    else:
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(model, recurse=True)
    poros.prepare(model)
    assert torch.isfinite(model(**batches()[0]).loss)


OTHERS = {"olmo2": None, "gpt_neox": None, "gemma2": "eager"}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_need_permission_then_warn_and_are_exact(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the registry had no record of it.
    monkeypatch.setattr("poros.model.inspect.validated_model_types", lambda: ("qwen2",))

    def make() -> Any:
        model = build(name, attn_implementation=OTHERS[name])
        # GPT-NeoX hands its layers the cache under another name, which is refused under grad.
        model.get_base_model().config.use_cache = name != "gpt_neox"
        return model

    model = make()
    before = picture(model)
    with pytest.raises(UnvalidatedArchitectureError, match=f"`poros check --architecture {name}`"):
        poros.prepare(model)
    assert changes(before, picture(model)) == {}
    with caplog.at_level(logging.WARNING, "poros"):
        poros.prepare(model, allow_unvalidated=True)
    assert any(name in each.getMessage() for each in caplog.records)
    assert_same_run(run(make()), run(model))


def test_a_validated_architecture_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    """The control of the test above."""
    with caplog.at_level(logging.WARNING, "poros"):
        poros.prepare(build())
    assert not caplog.records
