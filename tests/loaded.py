"""Small checkpoints, what transformers loads of them, and what two loads have to agree on."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from poros.gates import tiny
from poros.host.store import left_store
from poros.layout import is_small

HIDDEN_SIZE, NUM_LAYERS = 64, 4

DOWN = "model.layers.2.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"


def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes small checkpoints, each once."""
    written: dict[str, Path] = {}

    def write(
        architecture: str = "qwen2", dtype: torch.dtype = torch.bfloat16, **changes: Any
    ) -> Path:
        key = f"{architecture} {dtype} {changes}"
        if key not in written:
            config = tiny.small_config(architecture, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE)
            for name, value in changes.items():
                setattr(config, name, value)
            written[key] = tmp_path_factory.mktemp("checkpoint")
            tiny.write_checkpoint(config, written[key], dtype=dtype)
        return written[key]

    return write


def quantization(**options: Any) -> BitsAndBytesConfig:
    options.setdefault("bnb_4bit_quant_type", "nf4")
    options.setdefault("bnb_4bit_use_double_quant", True)
    options.setdefault("bnb_4bit_compute_dtype", torch.bfloat16)
    return BitsAndBytesConfig(load_in_4bit=True, **options)


def standard(
    path: Path, config: BitsAndBytesConfig | None, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """What a user loads without Poros."""
    # An explicit None would switch off what the checkpoint says.
    options = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, device_map={"": "cpu"}, local_files_only=True, **options
    )


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the model by name, the parts of 4-bit weights too."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = tensor.data
        state = getattr(tensor, "quant_state", None)
        if state is None:
            continue
        found |= {f"{name}.absmax": state.absmax, f"{name}.code": state.code}
        if state.nested:
            found |= {
                f"{name}.offset": state.offset,
                f"{name}.nested_absmax": state.state2.absmax,
                f"{name}.nested_code": state.state2.code,
            }
    return found


def described(model: Any) -> dict[str, Any]:
    """What two loads have to agree on, by name; bytes as their SHA-256."""
    found: dict[str, Any] = {}
    for name, tensor in tensors(model).items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        form = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type)
        found[name] = (*form, hashlib.sha256(data).hexdigest())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name} type"] = (type(tensor), tensor.requires_grad, tensor.is_leaf)
        state = getattr(tensor, "quant_state", None)
        if state is not None:
            module = model.get_submodule(name.rpartition(".")[0])
            found[f"{name} state"] = [
                (each.shape, each.dtype, each.blocksize, each.quant_type, each.nested)
                for each in (state, state.state2)
                if each is not None
            ]
            found[f"{name} format"] = (
                tensor.blocksize,
                tensor.compress_statistics,
                tensor.quant_type,
                tensor.quant_storage,
                tensor.bnb_quantized,
            )
            found[f"{name} module"] = (
                module.quant_state is state,
                tensor.module is module,
                module.compute_dtype,
            )
    for name, module in model.named_modules():
        found[f"{name} class"] = (type(module), module.training)
    found["config"] = json.loads(model.config.to_json_string(use_diff=False))
    found["generation_config"] = model.generation_config.to_dict()
    # A reopened model has no record of what was converted, which save_pretrained then finds itself.
    # Of layers in a file, save_pretrained reads and checks what it saves.
    ours = {"_poros_store", "_weight_conversions", "save_pretrained"}
    found["attributes"] = sorted(model.__dict__.keys() - ours)
    for name in ("quantization_method", "is_loaded_in_4bit", "is_quantized", "name_or_path"):
        found[name] = getattr(model, name, None)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        settings = dict(
            vars(quantizer), quantization_config=quantizer.quantization_config.to_dict()
        )
        settings["modules_to_not_convert"] = sorted(settings["modules_to_not_convert"])
        found["hf_quantizer"] = (type(quantizer), settings)
        found["one config"] = quantizer.quantization_config is model.config.quantization_config
    return found


def differences(left: Any, right: Any) -> list[str]:
    one, other = described(left), described(right)
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def unplaced(model: Any) -> list[str]:
    """Tensors of decoder layers that stream and do not lie in the slab of their layer.

    And those that are small and do.
    """
    store = left_store(model)
    assert store is not None
    place = {spec.name: (slab, spec) for slab in store.slabs for spec in slab.layout.tensors}
    buffers = {name for name, _ in model.named_buffers()}
    constants = (".code", ".offset", ".nested_code", ".nested_absmax")
    found = {
        name: tensor
        for name, tensor in tensors(model).items()
        if ".layers." in f".{name}"
        and not name.endswith(constants)
        and (name.endswith(".absmax") or not is_small(tensor, is_buffer=name in buffers))
    }
    assert found and len(store.slabs) == NUM_LAYERS
    return sorted(
        name
        for name in found.keys() | place.keys()
        if name not in place
        or name not in found
        or not place[name][0].holds(found[name], place[name][1])
    )


def copy_of(path: Path, to: Path, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """A checkpoint with other tensors."""
    found = load_file(path / "model.safetensors")
    if change is not None:
        change(found)
    save_file(found, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text((path / "config.json").read_text())
    return to


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()
