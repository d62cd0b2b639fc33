"""An adapter on a model without memory: which tensors of the base it changes, and how."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.errors import CheckpointFormatError, UnsupportedModelError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_folder(path: Path) -> Path:
    """The folder of an adapter: ``path``, or ``adapter`` in the folder of a run.

    Raises:
        CheckpointFormatError: If there is none.
    """
    for folder in (path, path / "adapter"):
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            return folder
    raise CheckpointFormatError(
        f"ADAPTER: expected a folder with {CONFIG} and {WEIGHTS}, or a run's, found "
        f"{quoted(str(path))}; give the folder that training has written"
    )


def base_named(folder: Path) -> str | None:
    """The base that an adapter says it was trained on."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(
            f"{quoted(str(folder / CONFIG))}: expected JSON, found {quoted(str(error))}"
        ) from error
    name = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    return name if isinstance(name, str) and name else None


class Adapter:
    """An adapter on a base whose tensors have no memory.

    Args:
        folder: Of the adapter.
        model: The base on the meta device, dense. It gets the adapter.

    Attributes:
        touched: Names of the tensors of the base that it changes.

    Raises:
        UnsupportedModelError: If it is of a kind that cannot be merged module by module.
    """

    def __init__(self, folder: Path, model: "PreTrainedModel") -> None:
        from peft import PeftConfig, PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import load_peft_weights, set_peft_model_state_dict
        from peft.utils.other import ModulesToSaveWrapper

        try:
            config = PeftConfig.from_pretrained(str(folder))
            with torch.device("meta"):
                adapted: Any = PeftModel(model, config, low_cpu_mem_usage=True)
            # Not by from_pretrained, which brings adapters to where the base is: nowhere.
            _give_memory(adapted)
            result = set_peft_model_state_dict(
                adapted, load_peft_weights(str(folder), device="cpu")
            )
        except (ValueError, KeyError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"ADAPTER: expected one that fits the base, found {quoted(str(error))}; name its "
                "own base with --base"
            ) from error
        own = {name for name, each in adapted.named_parameters() if not each.is_meta}
        strange = [*result.unexpected_keys, *(own & set(result.missing_keys))]
        if strange:
            raise UnsupportedModelError(
                "ADAPTER: expected the matrices of the modules that it names, found one too many "
                f"or too few: {quoted(strange[0])}; name its own base with --base"
            )
        if not hasattr(adapted.base_model, "merge_adapter"):
            raise UnsupportedModelError(
                "ADAPTER: expected a kind that can be merged into weights, found "
                f"{quoted(_kind(adapted))}, which only works beside the base"
            )
        inner: nn.Module = adapted.get_base_model()
        self._layers: dict[str, Any] = {}
        self._saved: dict[str, torch.Tensor] = {}
        self._modules: dict[str, str] = {}
        for name, module in inner.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                saved = module.modules_to_save[module.active_adapters[0]]
                self._saved |= {f"{name}.{key}": value for key, value in saved.state_dict().items()}
            elif isinstance(module, BaseTunerLayer) and hasattr(module, "merge"):
                self._require_whole(name, module)
                self._layers[name] = module
        if not self._layers and not self._saved:
            raise UnsupportedModelError(
                "ADAPTER: expected one that changes weights of the base, found "
                f"{quoted(_kind(adapted))}, which changes none"
            )
        for name, module in self._layers.items():
            for key, _ in module.get_base_layer().named_parameters(recurse=False):
                self._modules[f"{name}.{key}"] = name
        self.touched = self._modules.keys() | self._saved.keys()
        inside = {id(each) for layer in self._layers.values() for each in layer.parameters()}
        trained = [
            name
            for name, each in inner.named_parameters()
            if not each.is_meta and id(each) not in inside and "modules_to_save" not in name
        ]
        if trained:
            raise UnsupportedModelError(
                f"ADAPTER: expected trained matrices of its own, found trained tensors of the base "
                f"besides ({', '.join(map(quoted, trained[:3]))}), which are not merged yet"
            )

    def _require_whole(self, name: str, module: Any) -> None:
        base = module.get_base_layer()
        if type(base) not in (nn.Linear, nn.Embedding):
            raise UnsupportedModelError(
                f"{name}: expected an adapter on a linear module or an embedding, found one on a "
                f"{type(base).__name__}; merge it with PEFT's merge_and_unload"
            )
        inside = {id(each) for each in base.parameters()}
        tensors = [*module.parameters(), *module.buffers()]
        tables: list[Any] = [getattr(module, name, None) for name in module.other_param_names]
        tensors += [
            each for table in tables if hasattr(table, "buffers") for each in table.buffers()
        ]
        if any(each.is_meta and id(each) not in inside for each in tensors):
            raise UnsupportedModelError(
                f"{name}: expected an adapter that has its matrices to itself, found one that "
                "shares them between modules; merge it with PEFT's merge_and_unload"
            )

    def group_of(self, name: str) -> str:
        """What has to be merged together with the tensor of that name: a module, or itself."""
        return self._modules.get(name, name)

    def merged(self, module: str, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of one module with the adapter in them, by PEFT's own code.

        Args:
            module: As ``group_of`` says.
            base: Its tensors as they are, by name.
        """
        saved = {name: self._saved[name] for name in base if name in self._saved}
        if saved:
            return saved
        layer = self._layers[module]
        inner = layer.get_base_layer()
        for name, value in base.items():
            setattr(inner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
        with torch.no_grad():
            layer.merge()
        found = {name: getattr(inner, name.rpartition(".")[2]).detach() for name in base}
        for name, value in base.items():
            empty = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
            setattr(inner, name.rpartition(".")[2], empty)
        return found


def _give_memory(adapted: Any) -> None:
    """Have what an adapter consists of in memory, uninitialized; the base stays without."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    for module in adapted.modules():
        tables: list[Any] = []
        if isinstance(module, ModulesToSaveWrapper):
            tables = [module.modules_to_save]
        elif isinstance(module, BaseTunerLayer):
            names = (*module.adapter_layer_names, *module.other_param_names)
            tables = [getattr(module, name, None) for name in names]
        for table in tables:
            if isinstance(table, nn.ModuleDict):
                table.to_empty(device="cpu")
            elif isinstance(table, nn.ParameterDict):
                for key, value in table.items():
                    table[key] = nn.Parameter(torch.empty_like(value, device="cpu"))


def _kind(adapted: Any) -> str:
    return str(getattr(adapted.active_peft_config, "peft_type", "another")).rpartition(".")[2]
