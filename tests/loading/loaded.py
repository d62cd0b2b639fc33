"""Kinds of checkpoints, what transformers loads of them, and what two loads have to agree on."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from poros.gates import tiny
from poros.host.layout import is_small
from poros.host.store import attached_store
from poros.loaders.load import load
from poros.loaders.store import open_store

DOWN = "model.layers.2.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"

Described = dict[str, Any]


def quantization(**options: Any) -> BitsAndBytesConfig:
    options.setdefault("bnb_4bit_quant_type", "nf4")
    options.setdefault("bnb_4bit_use_double_quant", True)
    options.setdefault("bnb_4bit_compute_dtype", torch.bfloat16)
    return BitsAndBytesConfig(load_in_4bit=True, **options)


def wanted(is_quantized: bool) -> tuple[str | None, BitsAndBytesConfig | None]:
    """What to ask ``poros.load`` for, and what to ask ``from_pretrained`` for the same."""
    return ("nf4", quantization()) if is_quantized else (None, None)


class Kinds:
    """Every kind of checkpoint and store that tests load; made when first asked for, then kept.

    Nobody writes to one: a test that damages it takes a copy.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Any] = {}

    def kept(self, key: str, make: Callable[[], Any]) -> Any:
        """Anything that is expensive to make, and that nobody changes."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _once(self, key: str, make: Callable[[Path], object]) -> Path:
        path = self._folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        self.kept(key, lambda: make(path))
        return path

    def dense(
        self,
        architecture: str = "qwen2",
        dtype: torch.dtype = torch.bfloat16,
        num_layers: int = 4,
        hidden_size: int = 64,
        dropout: float = 0.0,
        **changes: Any,
    ) -> Path:
        """In full precision; ``changes`` are fields of its configuration."""
        sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "dropout": dropout}

        def make(path: Path) -> None:
            config = tiny.small_config(architecture, **sizes)  # type: ignore[arg-type]
            for name, value in changes.items():
                setattr(config, name, value)
            tiny.write_checkpoint(config, path, dtype=dtype)

        return self._once(f"{architecture} {dtype} {sizes} {changes}", make)

    def packed(
        self, architecture: str = "qwen2", source: Path | None = None, **options: Any
    ) -> Path:
        """Quantized by bitsandbytes already; ``options`` are those of its configuration."""
        source, config = source or self.dense(architecture), quantization(**options)
        key = f"packed {source} {config.to_dict()}"
        return self._once(key, lambda path: standard(source, config).save_pretrained(path))

    def sharded(self, architecture: str = "qwen2") -> Path:
        """In more than three files."""
        source = self.dense(architecture)

        def make(path: Path) -> None:
            standard(source, None).save_pretrained(path, max_shard_size="60KB")
            assert len(list(path.glob("model-*.safetensors"))) > 3

        return self._once(f"sharded {architecture}", make)

    def store(self, source: Path | None = None, **options: Any) -> Path:
        source = source or self.dense()
        return self._once(
            f"store {source} {options}", lambda path: load(source, store=path, **options)
        )

    def damaged(self, name: str) -> Path:
        dense = self.dense(num_layers=2, tie_word_embeddings=False)
        if name == "moe":
            return self.dense("qwen3_moe", num_layers=2, tie_word_embeddings=False)
        if name in ("4bit", "4bit single"):
            return self.packed(source=dense, bnb_4bit_use_double_quant=name == "4bit")
        return self.store(dense) if name == "store" else dense

    def expected(
        self,
        path: Path,
        config: BitsAndBytesConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Described:
        """What ``from_pretrained`` makes of one of them."""
        key = f"expected {path} {config and config.to_dict()} {dtype}"
        return dict(self.kept(key, lambda: described(standard(path, config, dtype))))


def standard(
    path: Path, config: BitsAndBytesConfig | None, dtype: torch.dtype | str = torch.bfloat16
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
            found[f"{name}.offset"] = state.offset
            found[f"{name}.nested_absmax"] = state.state2.absmax
            found[f"{name}.nested_code"] = state.state2.code
    return found


def described(model: Any) -> Described:
    """What two loads have to agree on, by name; bytes as their SHA-256."""
    found: Described = {}
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
                (level.shape, level.dtype, level.blocksize, level.quant_type, level.nested)
                for level in (state, state.state2)
                if level is not None
            ]
            fields = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
            found[f"{name} format"] = [getattr(tensor, field) for field in fields]
            found[f"{name} is quantized"] = tensor.bnb_quantized
            is_one = (module.quant_state is state, tensor.module is module)
            found[f"{name} module"] = (*is_one, module.compute_dtype)
    for name, module in model.named_modules():
        found[f"{name} class"] = (type(module), module.training)
    found["config"] = json.loads(model.config.to_json_string(use_diff=False))
    if model.can_generate():
        found["generation_config"] = model.generation_config.to_dict()
    # A reopened model has no record of what was converted, which save_pretrained then finds itself.
    # Of layers in a file, save_pretrained reads and checks what it saves.
    ours = {"_poros_store", "_poros_origin", "_weight_conversions", "save_pretrained"}
    found["attributes"] = sorted(model.__dict__.keys() - ours)
    for name in ("quantization_method", "is_loaded_in_4bit", "is_quantized", "name_or_path"):
        found[name] = getattr(model, name, None)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        config = quantizer.quantization_config
        settings = dict(vars(quantizer), quantization_config=config.to_dict())
        settings["modules_to_not_convert"] = sorted(settings["modules_to_not_convert"])
        found["hf_quantizer"] = (type(quantizer), settings)
        found["one config"] = config is model.config.quantization_config
    return found


def differences(left: Any, right: Any) -> list[str]:
    """Names of what two models do not agree on; either may be described already."""
    one, other = (model if isinstance(model, dict) else described(model) for model in (left, right))
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def unplaced(model: Any) -> list[str]:
    """Tensors of layers that stream and do not lie in the slab of their layer.

    And those that are small and do.
    """
    store = attached_store(model)
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
    assert found and len(store.slabs) == model.config.num_hidden_layers
    return sorted(
        name
        for name in found.keys() | place.keys()
        if name not in place
        or name not in found
        or not place[name][0].holds(found[name], place[name][1])
    )


def budget_for(store: Path, num_layers: int) -> int:
    """The host budget that holds so many layers of a store."""
    with open_store(store) as opened:
        return opened.starts[num_layers]


def copy_of(path: Path, to: Path) -> Path:
    """A checkpoint of one file in the folder ``to``."""
    to.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(path / name, to)
    return to
