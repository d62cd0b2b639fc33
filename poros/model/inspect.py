"""Finds what can be streamed in a model, by its structure, and refuses by name what cannot.

No family is special: the decoder layers are the one ModuleList outside vision towers whose entries
are all transformers' checkpointable layers, adapters are what PEFT's tuner layers say they added,
and everything else that is frozen inside a layer moves.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from poros.config import StreamingPolicy
from poros.errors import UnsupportedModelError
from poros.head.choice import Embedding, Head, choose_embeddings, find_head
from poros.host.layout import is_small
from poros.kernels.nf4 import is_4bit, is_params4bit, is_plain
from poros.model.adapter_kinds import IN_CACHE, adapter_kinds, require_groupable
from poros.model.vision import base_of, find_towers, is_router
from poros.stream.adapters import adapter_tensors, named_tensors
from poros.stream.frozen import FrozenTensor

logger = logging.getLogger(__name__)

_WRAPPERS = (
    "DataParallel",
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "OptimizedModule",
)

_PACKED = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)

_WRITING = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
_READING = (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES)
"""Decoders with a head for classes, and without a head. Their types are those of ``_WRITING``."""


@dataclass(frozen=True)
class Inventory:
    """The parts of a model that ``poros.prepare`` works on."""

    base: PreTrainedModel
    layers_name: str
    layers: Sequence[nn.Module]
    blocks: Sequence[Sequence[FrozenTensor]]
    """The frozen tensors of each block that stream, in slab order."""
    small: Sequence[Sequence[FrozenTensor]]
    """The frozen tensors of each layer that stay on the device."""
    tied_adapters: Sequence[str]
    """Adapter parameters used at more than one place."""
    kinds: Collection[str]
    """The kinds of adapters in the model."""
    embeddings: Sequence[Embedding]
    """Embeddings that stay in host memory."""
    head: Head | None
    """The head, if its loss is sliced or it stays in host memory."""
    untested: str
    """Text that names the family and the kinds without an exact record; "" if there are none."""

    def by_layer(self) -> list[tuple[Sequence[FrozenTensor], Sequence[FrozenTensor]]]:
        """Return for each layer the tensors that stay and those that stream."""
        streamed: list[list[FrozenTensor]] = [[] for _ in self.layers]
        for tensor in (tensor for block in self.blocks for tensor in block):
            streamed[tensor.places[0][0]].append(tensor)
        return list(zip(self.small, streamed, strict=True))

    def layer_name(self, index: int) -> str:
        return f"{self.layers_name}.{index}"


def take_inventory(
    model: nn.Module, policy: StreamingPolicy, *, goes_by_records: bool = True
) -> Inventory:
    """Check every precondition and list what moves. Changes nothing.

    Args:
        goes_by_records: Whether the registry decides; the gate that writes it passes False.

    Raises:
        UnsupportedModelError: If the model cannot be streamed exactly; the message says why.
        PolicyError: If its adapters cannot run with the policy's kernels.
    """
    _refuse_wrapped(model)
    base = _base_model(model)
    _refuse_placement(model)
    layers_name, layers = find_layers(model)
    _refuse_intercepted(layers_name, layers)
    kinds = adapter_kinds(model)
    _check_kinds(layers_name, kinds)
    if policy.adapter_kernels == "grouped":
        require_groupable(layers_name, layers)
    tied = _check_adapters(layers_name, layers)
    frozen = find_frozen(model, layers_name, layers, policy.block_size)
    untested = _check_records(base, kinds) if goes_by_records else ""
    head, in_vain = find_head(model, base, policy.loss, policy.stream_head)
    for reason in in_vain:
        logger.warning("poros: %s", reason)
    kept = head.users if head is not None and head.is_on_host else ()
    apart = [*layers, *find_towers(base).values()]
    embeddings = choose_embeddings(model, apart, policy.stream_embedding, kept)
    return Inventory(
        base, layers_name, layers, *frozen, tied, kinds.keys(), embeddings, head, untested
    )


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch module, found a {type(model).__qualname__}")
    for name, module in model.named_modules():
        names = {base.__name__ for base in type(module).__mro__} & set(_WRAPPERS)
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if names or compiled:
            raise UnsupportedModelError(
                f"expected a plain model, found {' / '.join(names) or 'a compiled module'} at "
                f"{name or 'the top'}; call poros.prepare before wrapping or sharding, not compiled"
            )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UnsupportedModelError(
            "expected whole parameters, found parameters partitioned by DeepSpeed ZeRO-3; "
            "streaming and partitioning exclude each other: load the model without DeepSpeed"
        )


def _base_model(model: nn.Module) -> PreTrainedModel:
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        raise UnsupportedModelError(
            f"expected a transformers model or a PEFT model of one, found {type(base).__qualname__}"
        )
    require_language_model(type(base).__name__, base.config)
    return base


def require_language_model(class_name: str, config: Any) -> None:
    """Refuse a class of transformers whose layers are not those of a language model.

    Raises:
        UnsupportedModelError: If it is none of a decoder, with or without a vision tower; with the
            head of a language model, one for classes, or none.
    """
    is_known = _is_in(_WRITING, class_name)
    if not is_known and any(config.model_type in names for names in _WRITING):
        is_known = _is_in(_READING, class_name)
    if (
        config.is_encoder_decoder
        or not is_known
        # Only where a model type is both: GPT-NeoX says is_decoder=False and means nothing by it.
        or (
            config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
            and getattr(config, "is_decoder", True) is False
        )
    ):
        raise UnsupportedModelError(
            "expected a decoder-only causal language model (AutoModelForCausalLM, or "
            "AutoModelForImageTextToText), or such a decoder with a head for classes or without "
            "one (AutoModelForSequenceClassification, AutoModel), found "
            f"{class_name} (model_type {config.model_type!r})"
        )


def _is_in(mappings: Sequence[Mapping[str, Any]], class_name: str) -> bool:
    return any(
        class_name in ((names,) if isinstance(names, str) else names)
        for mapping in mappings
        for names in mapping.values()
    )


def _refuse_placement(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise UnsupportedModelError(
                "expected a model in one place, found an Accelerate offload hook at "
                f"{name or 'the top'}; load it with device_map={{'': 'cpu'}} (or on one GPU) and "
                "let Poros do the offloading"
            )
    for name, tensor in named_tensors(model):
        if tensor.is_meta:
            raise UnsupportedModelError(
                f"expected tensors with bytes, found {name} on the meta device; load the weights "
                "before poros.prepare"
            )
        if tensor.is_inference():
            raise UnsupportedModelError(
                f"expected ordinary tensors, found {name} made under torch.inference_mode; load "
                "the model outside of it"
            )


def find_layers(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """The name of the list of decoder layers, and the layers.

    Raises:
        UnsupportedModelError: If there is not exactly one such list, or a layer is in it twice.
    """
    in_towers = {id(module) for tower in find_towers(model).values() for module in tower.modules()}
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and id(module) not in in_towers
        and len(module)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    if len(lists) != 1:
        raise UnsupportedModelError(
            "expected exactly one ModuleList of decoder layers, found "
            f"{', '.join(name for name, _ in lists) or 'none'}; this model cannot be streamed"
        )
    name, layers = lists[0]
    if len({id(layer) for layer in layers}) != len(layers):
        raise UnsupportedModelError(
            f"{name}: expected each layer once, found a layer that is used several times"
        )
    return name, list(layers)


def _refuse_intercepted(layers_name: str, layers: Sequence[nn.Module]) -> None:
    for index, layer in enumerate(layers):
        if "forward" in layer.__dict__:
            raise UnsupportedModelError(
                f"{layers_name}.{index}: expected the forward of its class, found one set on the "
                "instance (by a hook or a patch), which would bypass streaming; remove it first"
            )


def _check_kinds(layers_name: str, kinds: Mapping[str, str]) -> None:
    """Refuse a model without adapters, and adapters that cannot be recomputed."""
    if not kinds:
        raise UnsupportedModelError(
            f"expected PEFT adapters in {layers_name}, found none; call get_peft_model (and before "
            "it prepare_model_for_kbit_training, if you use it) and then poros.prepare"
        )
    for kind in (kinds[name] for name in IN_CACHE if name in kinds):
        raise UnsupportedModelError(
            f"expected adapters on modules or on the model's input, found {kind}: it trains keys "
            "and values that all layers are given in their KV cache, and layers are recomputed "
            "in backward without a cache (PEFT refuses it with gradient checkpointing, too). "
            "Prompt tuning and p-tuning train tokens before the first layer and can be streamed, "
            "as can adapters on modules, such as LoRA"
        )


def _check_adapters(layers_name: str, layers: Sequence[nn.Module]) -> list[str]:
    """Refuse merged adapters; name the tied ones."""
    places: dict[int, list[str]] = {}
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules(prefix=f"{layers_name}.{index}"):
            if isinstance(module, BaseTunerLayer) and getattr(module, "merged", False):
                raise UnsupportedModelError(
                    f"{name}: expected separate adapters, found {module.merged_adapters} "
                    "merged into the base; call model.unmerge_adapter() before poros.prepare"
                )
            if isinstance(module, BaseTunerLayer) and is_router(module.get_base_layer()):
                raise UnsupportedModelError(
                    f"{name}: expected adapters on modules that return one tensor, found one on a "
                    f"router, {type(module.get_base_layer()).__name__}, which PEFT cannot call; "
                    "leave it out, as in LoraConfig(target_modules='all-linear', "
                    f"exclude_modules=[{name.rpartition('.')[2]!r}])"
                )
            if _has_generator(module):
                raise UnsupportedModelError(
                    f"{name}: expected random numbers from PyTorch's default generators, whose "
                    "state is restored for the recomputation, found a generator of its own in "
                    f"{type(module).__name__}; attach it without (PVeRA: generator_seed=None)"
                )
        adapters = adapter_tensors(layer)
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            if id(parameter) in adapters:
                places.setdefault(id(parameter), []).append(f"{layers_name}.{index}.{name}")
    return [where[0] for where in places.values() if len(where) > 1]


def _has_generator(module: nn.Module) -> bool:
    return any(
        isinstance(value, torch.Generator)
        for held in vars(module).values()
        for value in (held.values() if isinstance(held, dict) else (held,))
    )


def find_frozen(
    model: nn.Module, layers_name: str, layers: Sequence[nn.Module], block_size: int
) -> tuple[list[list[FrozenTensor]], list[list[FrozenTensor]]]:
    """Find the frozen tensors of layers that stream in blocks of ``block_size``, each once.

    Tensors that modules outside the layers use too are left out, and so are matrices that several
    blocks share.

    Returns:
        The tensors that stream, by block, in slab order; those that stay on the device, by layer.
    """
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    shared_outside = {
        id(tensor)
        for module in model.modules()
        if id(module) not in in_layers
        for tensor in _own_tensors(module)
    }
    blocks: list[list[FrozenTensor]] = []
    block_of: dict[int, int] = {}
    stays: set[int] = set(shared_outside)
    for first in range(0, len(layers), block_size):
        tensors: dict[int, FrozenTensor] = {}
        for index in range(first, min(first + block_size, len(layers))):
            _collect(f"{layers_name}.{index}", index, layers[index], tensors)
        for tensor_id in tensors:
            # A tensor that two blocks share has no one slot to live in.
            if block_of.setdefault(tensor_id, len(blocks)) != len(blocks):
                stays.add(tensor_id)
        blocks.append(list(tensors.values()))
    small: list[list[FrozenTensor]] = [[] for _ in layers]
    seen = shared_outside
    for tensor in (tensor for block in blocks for tensor in block):
        if tensor.stays and id(tensor.tensor) not in seen:
            seen.add(id(tensor.tensor))
            small[tensor.places[0][0]].append(tensor)
    streamed = [
        [tensor for tensor in block if not tensor.stays and id(tensor.tensor) not in stays]
        for block in blocks
    ]
    return streamed, small


def _collect(prefix: str, index: int, layer: nn.Module, tensors: dict[int, FrozenTensor]) -> None:
    adapters = adapter_tensors(layer)
    # PEFT adapts parameters that belong to no linear layer (fused experts) directly.
    adapted = {
        id(inner.get_param()) for inner in layer.modules() if isinstance(inner, ParamWrapper)
    }
    for module_name, module in layer.named_modules(prefix=prefix):
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is None or id(tensor) in adapters:
                    continue
                name, is_buffer = f"{module_name}.{key}", owner is module._buffers
                if tensor.requires_grad and is_small(tensor, is_buffer=is_buffer):
                    continue  # trained where it is, like an adapter
                _check_streamable(name, tensor)
                entry = tensors.setdefault(
                    id(tensor), FrozenTensor(name, tensor, id(tensor) in adapted, is_buffer)
                )
                if entry.is_adapted and is_4bit(tensor):
                    raise UnsupportedModelError(
                        f"{name}: expected adapters on 4-bit modules, found one on the packed "
                        "weight itself (target_parameters); choose target_modules instead"
                    )
                entry.places.append((index, owner, key))
                if is_4bit(tensor) and "quant_state" in module.__dict__:
                    entry.modules.append((index, module))


def _check_streamable(name: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise UnsupportedModelError(
            f"{name}: expected a frozen base, found a trainable base weight in a streamed layer; "
            "attach adapters with get_peft_model (which freezes the base), or set "
            "requires_grad_(False), before poros.prepare"
        )
    found = f"a {type(tensor).__qualname__}"
    if is_plain(tensor) and tensor.dim() > 1 and tensor.dtype in _PACKED:
        found = f"packed weights of {tensor.dtype}"
    elif is_params4bit(tensor) and not is_4bit(tensor):
        found += " that is not quantized yet"
    elif (is_plain(tensor) or is_4bit(tensor)) and tensor.layout is torch.strided:
        return
    # Kernels of other libraries keep pointers to packed weights, or scales in objects of their own,
    # that do not follow when a tensor moves to a slot.
    raise UnsupportedModelError(
        f"{name}: expected a plain tensor or a 4-bit weight of bitsandbytes, found {found}. Load "
        "the unquantized model with poros.load(..., quantization='nf4') or "
        "BitsAndBytesConfig(load_in_4bit=True)"
    )


def _check_records(base: PreTrainedModel, kinds: Mapping[str, str]) -> str:
    """Refuse a family or kinds that are refused on record; name those that are untested."""
    from poros.gates.registry import read_registry

    registry = read_registry()
    name = base.config.model_type
    command = f"poros check --architecture {name}"
    found = [(f"architecture {name!r}", name, command)]
    records = [registry.family(name)]
    for kind in sorted(kinds.keys() - {"lora"}):  # families are recorded with LoRA
        found.append((f"adapters of kind {kinds[kind]}", kind, f"{command} --adapter {kind}"))
        records.append(registry.adapter(kind))
    untested = []
    for (what, key, check), record in zip(found, records, strict=True):
        if record.is_refused:
            raise UnsupportedModelError(
                f"expected a model and adapters that stream exactly, found {what}, refused on "
                f"record (`poros check --registered {key}`): {record.reason}. Train it without "
                "poros.prepare"
            )
        if record.outcome != "exact":
            untested.append(f"{what} (`{check}` does)")
    return " and ".join(untested)


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensors in (module._parameters, module._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)
