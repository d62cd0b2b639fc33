"""Finds which tensors of the base an adapter changes, on a model without memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.errors import UnsupportedModelError, quoted
from poros.merging.saved_adapter import SavedAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BY_PEFT = "merge it with PEFT's merge_and_unload"
# LoRA's initialisations that leave the weights of the base unchanged.
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


class Adapter:
    """An adapter on a base whose tensors have no memory.

    Args:
        model: The base on the meta device, dense. It gets the adapter.

    Attributes:
        touched: Names of the tensors of the base that it changes.

    Raises:
        UnsupportedModelError: If it is of a kind that cannot be merged module by module.
    """

    def __init__(self, saved: SavedAdapter, model: "PreTrainedModel") -> None:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper

        config, used_twice = saved.config, model.all_tied_weights_keys
        tied = {*used_twice, *used_twice.values()}
        of_base = {id(each) for each in (*model.parameters(), *model.buffers())}
        _require_base_as_it_is(config)
        with saved.fitting():
            with torch.device("meta"):
                adapted: Any = PeftModel(model, config, low_cpu_mem_usage=True)
            if not hasattr(adapted.base_model, "merge_adapter"):
                raise UnsupportedModelError(
                    "adapter: expected a kind that can be merged into weights, found "
                    f"{quoted(_kind(adapted))}, which only works beside the base"
                )
            # Not by from_pretrained, which brings adapters to where the base is: nowhere.
            _give_memory(adapted, of_base)
            unexpected = saved.fill(adapted)
            self._saved = _trained_of_base(adapted, saved.weights)
            if getattr(config, "bias", "none") != "none" and not self._saved:
                raise UnsupportedModelError(
                    f"adapter: expected the biases that were trained (bias={quoted(config.bias)}), "
                    "found none in its file: PEFT saves them with bias='all' only"
                )
            saved.require_filled(adapted, unexpected)
        inner: nn.Module = adapted.get_base_model()
        self._layers: dict[str, Any] = {}
        self._modules: dict[str, str] = {}
        for name, module in inner.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                copy = module.modules_to_save[module.active_adapters[0]]
                self._saved |= {f"{name}.{key}": value for key, value in copy.state_dict().items()}
            elif isinstance(module, BaseTunerLayer) and hasattr(module, "merge"):
                self._require_whole(name, module)
                self._layers[name] = module
        if not self._layers and not self._saved:
            raise UnsupportedModelError(
                "adapter: expected one that changes weights of the base, found "
                f"{quoted(_kind(adapted))}, which changes none"
            )
        for name, module in self._layers.items():
            for key, _ in module.get_base_layer().named_parameters(recurse=False):
                self._modules[f"{name}.{key}"] = name
        self.touched = self._modules.keys() | self._saved.keys()
        if tied & self.touched:
            raise UnsupportedModelError(
                f"adapter: expected a base whose {quoted(min(tied & self.touched))} is its own, "
                "found one that its embedding and its head share: what was trained for one place "
                "would change the other; use the adapter beside the base"
            )
        inside = {id(each) for layer in self._layers.values() for each in layer.parameters()}
        trained = [
            name
            for name, each in inner.named_parameters()
            if not each.is_meta and id(each) not in inside and "modules_to_save" not in name
        ]
        if trained:
            raise UnsupportedModelError(
                f"adapter: expected trained matrices of its own, found trained tensors of the base "
                f"besides ({', '.join(map(quoted, trained[:3]))}), which are not merged yet"
            )

    def _require_whole(self, name: str, module: Any) -> None:
        from transformers.pytorch_utils import Conv1D

        base = module.get_base_layer()
        if not isinstance(base, nn.Linear | nn.Embedding | Conv1D):
            raise UnsupportedModelError(
                f"{name}: expected an adapter on a linear module or an embedding, found one on a "
                f"{type(base).__name__}; {_BY_PEFT}"
            )
        inside = {id(each) for each in base.parameters()}
        tensors = [*module.parameters(), *module.buffers()]
        tables: list[Any] = [getattr(module, name, None) for name in module.other_param_names]
        tensors += [
            each for table in tables if hasattr(table, "buffers") for each in table.buffers()
        ]
        if any(each.is_meta and id(each) not in inside for each in tensors):
            raise UnsupportedModelError(
                f"{name}: expected an adapter with all that it needs in its file, found one that "
                f"shares matrices between modules, or works some out; {_BY_PEFT}"
            )

    def group_of(self, name: str) -> str:
        """Return the group that is merged with the tensor of that name: its module, or itself."""
        return self._modules.get(name, name)

    def merged(self, module: str, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Merge the adapter into the tensors of one module, by PEFT's own code.

        Args:
            module: A group, as ``group_of`` returns it.
            base: The module's tensors before the merge, by name.

        Raises:
            UnsupportedModelError: If PEFT cannot merge it.
        """
        base = {
            name: self._saved[name].to(value.dtype) if name in self._saved else value
            for name, value in base.items()
        }
        if module not in self._layers:
            return base
        layer = self._layers[module]
        inner = layer.get_base_layer()
        for name, value in base.items():
            setattr(inner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
        try:
            with torch.no_grad():
                layer.merge()
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            raise UnsupportedModelError(
                f"{module}: expected an adapter that can be merged alone, found that PEFT raised "
                f"{quoted(str(error))}; {_BY_PEFT}"
            ) from error
        found = {name: getattr(inner, name.rpartition(".")[2]).detach() for name in base}
        for name, value in base.items():
            empty = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
            setattr(inner, name.rpartition(".")[2], empty)
        return found


def _require_base_as_it_is(config: Any) -> None:
    begins = getattr(config, "init_lora_weights", None)
    if not any(begins is each or begins == each for each in _KEEPS_BASE):
        raise UnsupportedModelError(
            "adapter: expected one of the base as it is, found one that began by changing the "
            f"weights of its base (init_lora_weights={quoted(str(begins))}); {_BY_PEFT}, or "
            "convert it: save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if getattr(config, "layer_replication", None):
        raise UnsupportedModelError(
            "adapter: expected one on the layers of its base, found one that repeats them "
            f"(layer_replication={config.layer_replication}), which a checkpoint of the base has "
            f"no room for; {_BY_PEFT}"
        )


def _trained_of_base(adapted: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return trained tensors of the base, such as biases, by their names there."""
    names = {name for name, each in adapted.named_parameters() if each.is_meta}
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): value
        for name, value in weights.items()
        if name in names
    }


def _give_memory(adapted: Any, base: set[int]) -> None:
    """Give what an adapter has added uninitialized memory.

    The base, by the ids of its tensors, stays without, and so does what is in no file.
    """
    for module in adapted.modules():
        in_no_file = module._non_persistent_buffers_set
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None or id(tensor) in base or key in in_no_file:
                    continue
                made = torch.empty_like(tensor, device="cpu")
                table[key] = nn.Parameter(made) if table is module._parameters else made


def _kind(adapted: Any) -> str:
    return str(getattr(adapted.active_peft_config, "peft_type", "another")).rpartition(".")[2]
