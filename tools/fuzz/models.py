"""The models of drawn programs: built once each, then copied, so that thousands run in an hour."""

import copy
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from poros.gates import tiny
from poros.kernels.nf4 import own
from tools.fuzz.program import Subject

HIDDEN_SIZE = 32
ARCHITECTURES = ("qwen2", "gemma3", "gemma4_shared_kv", "mixtral", "prophetnet")

_MAX_BASES = 24
_MAX_MODELS = 48
_RANK = 4
# VBLoRA cuts every width into vectors of this length.
_VECTOR_LENGTH = 16


class Models:
    """Makes models of equal bytes for equal subjects."""

    def __init__(self) -> None:
        self._bases: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._models: OrderedDict[Subject, Any] = OrderedDict()

    def make(self, subject: Subject) -> Any:
        """A model of ``subject`` with its adapters, that nobody else holds."""
        if subject not in self._models:
            self._models[subject] = attach(copy.deepcopy(self._base(subject)), subject)
            while len(self._models) > _MAX_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(subject)
        return _copied(self._models[subject])

    def warm(self) -> None:
        """Build every base, so that processes forked from this one find it built."""
        for architecture in ARCHITECTURES:
            for dtype in ("float32", "bfloat16"):
                for quantize in (True, False):
                    self._base(Subject(architecture, dtype, quantize))

    def _base(self, subject: Subject) -> Any:
        num_layers = num_layers_of(subject)
        # Dropout inside the layers where the architecture has it, at rates that can be changed.
        key = (subject.architecture, subject.dtype, subject.quantize, num_layers, subject.dropout)
        if key not in self._bases:
            dtype = getattr(torch, subject.dtype)
            config = tiny.small_config(
                subject.architecture,
                num_layers=num_layers,
                hidden_size=HIDDEN_SIZE,
                dropout=subject.dropout,
            )
            with TemporaryDirectory(prefix="poros-fuzz-") as directory:
                tiny.write_checkpoint(config, Path(directory), dtype=dtype)
                base = tiny.load_base(directory, dtype=dtype, quantize=subject.quantize)
            base.name_or_path = base.config.name_or_path = ""
            self._bases[key] = base
            while len(self._bases) > _MAX_BASES:
                self._bases.popitem(last=False)
        self._bases.move_to_end(key)
        return self._bases[key]


def num_layers_of(subject: Subject) -> int:
    """Shared keys and values need a layer of each kind below the two that share."""
    return max(subject.num_layers, 4 if subject.architecture == "gemma4_shared_kv" else 1)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def attach(base: Any, subject: Subject) -> Any:
    """``base`` with the adapters of ``subject``, none of them zero."""
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model = get_peft_model(base, adapter_config(base, subject))
        if subject.frozen == "reference":
            config = adapter_config(base, replace(subject, train_head=False), seed=3)
            config.target_modules = set(model.peft_config["default"].target_modules)
            model.add_adapter("reference", config)
            model.base_model.set_adapter(["default", "reference"])
    draw_adapters(model, "", seed=2)
    for name, parameter in model.named_parameters():
        if subject.frozen and subject.frozen in name:
            parameter.requires_grad_(False)
    return model


def adapter_config(base: Any, subject: Subject, *, seed: int = 0) -> Any:
    """The configuration of the adapters; ``seed`` makes a second one differ from the first."""
    from peft import LoraConfig, VBLoRAConfig

    common: dict[str, Any] = {"target_modules": _targets(base, subject), "task_type": "CAUSAL_LM"}
    if subject.train_head:
        common["modules_to_save"] = ["lm_head"]
    if subject.kind == "vblora":
        return VBLoRAConfig(
            r=2,
            num_vectors=8,
            vector_length=_VECTOR_LENGTH,
            topk=2,
            vblora_dropout=subject.dropout,
            **common,
        )
    return LoraConfig(
        r=_RANK + seed,
        lora_alpha=2 * _RANK,
        lora_dropout=subject.dropout,
        use_rslora=subject.kind == "rslora",
        use_dora=subject.kind == "dora",
        lora_bias=subject.kind == "lora_bias",
        **common,
    )


def draw_adapters(model: nn.Module, name: str, *, seed: int) -> None:
    """Give every trainable parameter whose name has ``name`` in it a value that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad and name in key and "lora_magnitude" not in key:
                scale = parameter.shape[-1] ** -0.5 if "lora_A" in key else 0.05
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.add_(scale * drawn.to(parameter.dtype))


def _targets(base: Any, subject: Subject) -> list[str]:
    chosen = []
    layers = {id(layer): index for index, layer in enumerate(layers_of(base))}
    where = {
        id(inner): (layers[id(layer)], name)
        for layer in layers_of(base)
        for name, inner in layer.named_modules()
    }
    for name, module in base.named_modules():
        if not isinstance(module, nn.Linear) or "outer" in type(module).__name__.lower():
            continue
        if id(module) not in where or where[id(module)][0] < subject.lowest:
            continue
        inside = where[id(module)][1]
        wanted = {
            "all": True,
            "attention": "attn" in inside,
            "mlp": "attn" not in inside,
            "one": inside.split(".")[-1].startswith("q"),
            "qv": inside.split(".")[-1].startswith(("q", "v")),
        }[subject.targets]
        # Without any there is nothing to train: mixtures of experts have no linear layer there.
        if wanted or (subject.architecture == "mixtral" and subject.targets == "mlp"):
            chosen.append(name)
    return chosen


def _copied(model: Any) -> Any:
    copied = copy.deepcopy(model)
    for module in copied.modules():
        weight = module._parameters.get("weight")
        if "quant_state" in module.__dict__ and weight is not None:
            own(module, weight)  # a deep copy has two states, and refers to the other module
    return tiny.without_repacking(copied)
