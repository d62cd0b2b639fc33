"""Merges an adapter into the base module by module, on a model without memory."""

import warnings
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
        groups: The tensors of the base that it changes, each with the name of what is merged
            together: a module, or the tensor itself.

    Raises:
        UnsupportedModelError: If it is of a kind that cannot be merged module by module.
    """

    def __init__(self, saved: SavedAdapter, model: "PreTrainedModel") -> None:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper

        config, used_twice = saved.config, model.all_tied_weights_keys
        of_base = {id(each) for each in (*model.parameters(), *model.buffers())}
        _require_base_as_it_is(config)
        saved.require_family(model)
        with saved.fitting():
            with torch.device("meta"):
                adapted: Any = PeftModel(model, config, low_cpu_mem_usage=True)
            if not hasattr(adapted.base_model, "merge_adapter"):
                raise _refused("a kind that can be merged into weights", _kind(adapted))
            # Not by from_pretrained, which brings adapters to where the base is: nowhere.
            _give_memory(adapted, of_base)
            with warnings.catch_warnings():  # trained tensors of the base have no memory to go to
                warnings.filterwarnings("ignore", ".*which is a no-op")
                saved.fill(adapted)
        self._saved = _trained_of_base(adapted, saved.weights)
        if getattr(config, "bias", "none") != "none" and not self._saved:
            raise _refused("the biases that were trained in its file", "none")
        inner: nn.Module = adapted.get_base_model()
        self._layers: dict[str, Any] = {}
        for name, module in inner.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                copy = module.modules_to_save[module.active_adapters[0]]
                self._saved |= {f"{name}.{key}": value for key, value in copy.state_dict().items()}
            elif isinstance(module, BaseTunerLayer) and hasattr(module, "merge"):
                _require_whole(name, module)
                self._layers[name] = module
        self.groups = {name: name for name in self._saved}
        for name, module in self._layers.items():
            tensors = module.get_base_layer().named_parameters(recurse=False)
            self.groups |= {f"{name}.{key}": name for key, _ in tensors}
        if not self.groups:
            raise _refused("one that changes weights of the base", _kind(adapted))
        tied = {*used_twice, *used_twice.values()} & self.groups.keys()
        if tied:
            raise _refused(
                f"a base whose {quoted(min(tied))} is its own",
                "one that its embedding and its head share",
            )
        inside = {id(each) for layer in self._layers.values() for each in layer.parameters()}
        trained = [
            name
            for name, each in inner.named_parameters()
            if not each.is_meta and id(each) not in inside and "modules_to_save" not in name
        ]
        if trained:
            raise _refused(
                "trained matrices of its own", f"trained tensors of the base: {trained[0]}"
            )

    def merged(self, module: str, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Merge the adapter into the tensors of one group, by PEFT's own code.

        Args:
            module: A value of ``groups``.
            base: The group's tensors before the merge, by name.

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
            raise _refused(f"one that can be merged into {module} alone", str(error)) from error
        found = {name: getattr(inner, name.rpartition(".")[2]).detach() for name in base}
        for name, value in base.items():
            empty = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
            setattr(inner, name.rpartition(".")[2], empty)
        return found


def _refused(expected: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"adapter: expected {expected}, found {quoted(found, is_bare=True)}; {_BY_PEFT}, or use "
        "the adapter beside the base"
    )


def _require_base_as_it_is(config: Any) -> None:
    begins = getattr(config, "init_lora_weights", None)
    if not any(begins is each or begins == each for each in _KEEPS_BASE):
        raise _refused(
            "one of the base as it is",
            f"init_lora_weights={begins!r}, which began by changing its weights (save_pretrained("
            "path_initial_model_for_weight_conversion=...) converts it)",
        )
    if getattr(config, "layer_replication", None):
        raise _refused("one on the layers of its base", "one that repeats them: layer_replication")


def _require_whole(name: str, module: Any) -> None:
    """Refuse an adapter on another module than a matrix, and one that is not all in its file."""
    from transformers.pytorch_utils import Conv1D

    base = module.get_base_layer()
    if not isinstance(base, nn.Linear | nn.Embedding | Conv1D):
        raise _refused("one on linear modules and embeddings", f"{name}, a {type(base).__name__}")
    inside = {id(each) for each in base.parameters()}
    tables: list[Any] = [getattr(module, each, None) for each in module.other_param_names]
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [each for table in tables if hasattr(table, "buffers") for each in table.buffers()]
    if any(each.is_meta and id(each) not in inside for each in tensors):
        raise _refused(
            "all that it needs in its file",
            f"that {name} shares matrices with other modules, or works some out",
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
    kind = str(getattr(adapted.active_peft_config, "peft_type", "another")).rpartition(".")[2]
    return f"{kind}, which only works beside the base"
