"""The small models that the tests of equal bits use, by what is special about them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import BartConfig, BartForCausalLM

from tests.loops import Model, Subject, build, fill, layers_of, small_base


def small(architecture: str = "qwen2", **options: Any) -> Subject:
    """A model with LoRA on all linear layers; ``options`` of ``build``."""
    return lambda: build(architecture, **options)


SHARED = small("gemma4_shared_kv", num_layers=4)


def adapters_on(*targets: str, dropout: float = 0.0, **options: Any) -> Subject:
    """Adapters of rank 4 on some projections; ``options`` of the base, and of the adapters."""
    of_base = {name: options.pop(name) for name in ("quantize", "dtype") if name in options}

    def make() -> Model:
        torch.manual_seed(2)
        given = {"lora_dropout": dropout, "init_lora_weights": False, **options}
        config = LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM", **given)
        return get_peft_model(small_base(dropout=dropout, **of_base), config)

    return make


few = partial(adapters_on, "q_proj", "o_proj", "up_proj")
PLAIN = few(dropout=0.05)
FP32 = few(dropout=0.05, dtype=torch.float32)
NO_DROPOUT = few()
FP32_NO_DROPOUT = few(dtype=torch.float32)
FP32_DENSE = few(dtype=torch.float32, quantize=False)
"""Of 4-bit weights in full precision tapes give other bits under autocast."""
DENSE = few(dropout=0.05, quantize=False)


def two_adapters() -> Model:
    """The first of them is active."""
    model = PLAIN()
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    return model


def partly_frozen() -> Model:
    model = build()
    layers_of(model)[1].requires_grad_(False)
    layers_of(model)[2].mlp.up_proj.lora_A["default"].weight.requires_grad_(False)
    return model


def reading(auto_class: str, architecture: str = "qwen2", **options: Any) -> Subject:
    """A model without the head of a language model: one for a score, which is trained, or none."""
    task_type = "SEQ_CLS" if "Sequence" in auto_class else "FEATURE_EXTRACTION"

    def make() -> Model:
        base = small_base(architecture, auto_class=auto_class, **options)
        torch.manual_seed(2)
        settings: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.05}
        config = LoraConfig(**settings, init_lora_weights=False, task_type=task_type)
        return get_peft_model(base, config)

    return make


class Shift(torch.nn.Module):
    """Adds two parameters, whose gradient is one tensor."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        ones = torch.ones(inner.out_features)
        self.one, self.other = (torch.nn.Parameter(ones.clone()) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + (self.one + self.other)  # type: ignore[no-any-return]


def shifted() -> Model:
    model = FP32_DENSE()
    adapter = layers_of(model)[1].mlp.up_proj.lora_B
    adapter["default"] = Shift(adapter["default"])
    return model


def inputs_require_gradients() -> Model:
    model = build()
    model.get_base_model().enable_input_require_grads()
    return model


def decoder() -> Model:
    """Its layers all read the states of an encoder, through two projections each."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64,
        d_model=32,
        decoder_layers=3,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        is_decoder=True,
        add_cross_attention=True,
    )
    options = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(BartForCausalLM(config), options)


def adapter_below_the_layers() -> Model:
    """Gemma 4 with an adapter on the projection that makes the per-layer inputs."""
    targets = ["per_layer_model_projection", "per_layer_projection", "q_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(small_base("gemma4", dropout=0.0), config)
    fill(model)
    return model


class Lost(torch.autograd.Function):
    """Hands nothing on in backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


Call = Callable[[int, Any, torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]


class Loop:
    """The model's loop over its layers, which calls them by ``call`` while ``is_on``."""

    def __init__(self, model: Model, call: Call, is_on: bool = True) -> None:
        self.is_on = is_on
        stack = layers_of(model)
        genuine: Callable[[Any], Iterator[Any]] = stack.__class__.__iter__

        def called(number: int, layer: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                return call(number, layer, hidden, args, kwargs)
            return layer(hidden, *args, **kwargs)

        class Calls(torch.nn.ModuleList):
            def __getitem__(self, places: Any) -> Any:
                return [partial(called, number, each) for number, each in enumerate(genuine(stack))]

        stack.__class__ = Calls
