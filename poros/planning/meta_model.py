"""Builds models on the meta device: modules, shapes, dtypes and packed weights, no memory.

Plans read sizes off it, and run its layers there, where operators compute shapes only.
"""

import copy
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import module_from_spec
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.errors import CheckpointFormatError, PolicyError, UnsupportedModelError, quoted
from poros.head.choice import find_embeddings, find_head
from poros.head.slices import buffer_sizes
from poros.host.layout import BlockLayout
from poros.kernels.dora import squares_num_bytes
from poros.kernels.forwards import PatchedForward, is_forward_of_liger, is_of_liger
from poros.kernels.gated_forms import Names, names_in
from poros.kernels.nf4 import is_4bit, num_weights, part_tensors
from poros.loaders.build import ONE_AT_A_TIME
from poros.loaders.options import bits_and_bytes
from poros.loaders.settings import (
    CLASSIFIER,
    classifier_of,
    configuration,
    describe_error,
    model_class_of,
    stored_quantization,
)
from poros.loaders.slab_writer import quantize_on_meta
from poros.loaders.source import find_config
from poros.model.adapter_kinds import adapter_kinds, configured_kinds
from poros.model.inspect import find_frozen, find_layers, require_language_model
from poros.model.vision import are_dropped, base_of, drop_towers, excluded_modules, find_towers
from poros.planning.formula import Shapes, SlicedHead
from poros.planning.request import require_positive
from poros.stream.frozen import FrozenTensor, small_parts

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

_META = torch.device("meta")

COUNTED_KINDS = frozenset(
    (
        *("lora", "dora", "beft", "c3a", "deft", "delora", "fourierft", "glora", "gralora"),
        *("hira", "hra", "ln_tuning", "loha", "lokr", "miss", "oft", "peanut", "psoft"),
        *("supertuning", "trainable_tokens", "vera", "prompt_tuning", "p_tuning", "ia3"),
        *("pvera", "road"),
    )
)
"""Kinds of adapters whose plans were compared with counted steps. Other kinds need real weights, or
do more outside of their layers than a plan counts."""


@dataclass(frozen=True)
class Recipe:
    """Everything that a model on the meta device is built from."""

    config: "PreTrainedConfig"
    quantization: "BitsAndBytesConfig | None"
    dtype: torch.dtype
    adapters: Mapping[str, "PeftConfig"]
    active: Sequence[str] = ()
    """The active adapters; empty for the first one."""
    forms: Mapping[str, tuple[torch.dtype, bool]] = field(default_factory=dict)
    """Dtype of each parameter, and whether it is trained; empty for PEFT's choices."""
    adapter_dtype: torch.dtype | None = None
    """Dtype of everything that is trained; None for PEFT's choice."""
    vision: str = "keep"
    """As in ``poros.load``."""
    on_language_model: bool = False
    """Whether adapters leave out towers and routers (``poros.model.vision``)."""
    model_class: Any = None
    """Class of the model; None takes the language model that the configuration chooses."""
    counts_all: bool = False
    """Whether kinds of adapters that plans do not count are taken as if they did."""
    has_liger: bool = False
    """Whether its gated feed-forwards run Liger's kernel: three tensors are kept, not two."""

    @classmethod
    def of(
        cls,
        source: "str | os.PathLike[str] | PreTrainedConfig",
        *,
        rank: int = 16,
        lora: "PeftConfig | None" = None,
        quantization: str | None = "nf4",
        dtype: torch.dtype = torch.bfloat16,
        adapter_dtype: torch.dtype | None = None,
        vision: str = "keep",
    ) -> "Recipe":
        """Make a recipe from a configuration, or from a folder or hub name, as ``poros.plan`` does.

        A configuration whose ``architectures`` name a classifier is one's; others are those of
        language models.

        Raises:
            PolicyError: If ``rank`` is not positive, ``quantization`` is none of "nf4", "fp4" and
                None, or ``vision`` none of "keep" and "drop".
            UnsupportedModelError: If there is no configuration that transformers knows, or the
                adapters are of a kind that plans do not count.
        """
        from peft import LoraConfig
        from transformers import PreTrainedConfig

        require_positive("rank", rank)
        if vision not in ("keep", "drop"):
            raise PolicyError(f"vision: expected 'keep' or 'drop', found {quoted(vision)}")
        config = source if isinstance(source, PreTrainedConfig) else _configuration(source)
        model_class, task = None, "CAUSAL_LM"
        if classifier_of(config) is not None:
            model_class, config = model_class_of(config, CLASSIFIER)
            task = "SEQ_CLS"  # whose head is trained as a whole
        adapters = lora or LoraConfig(r=rank, target_modules="all-linear", task_type=task)
        _refuse_uncounted(configured_kinds({"default": adapters}))
        return cls(
            config,
            bits_and_bytes(quantization, dtype),
            dtype,
            {"default": adapters},
            adapter_dtype=adapter_dtype,
            vision=vision,
            on_language_model=lora is None,
            model_class=model_class,
        )

    @classmethod
    def like(cls, model: Any, counts_all: bool = False) -> "Recipe":
        """Make a recipe from a model with PEFT adapters, prepared or not.

        Args:
            counts_all: See the field.

        Raises:
            UnsupportedModelError: If it has no adapters, or some that plans do not count.
        """
        adapters: Mapping[str, PeftConfig] = getattr(model, "peft_config", {})
        if not adapters:
            raise UnsupportedModelError(
                "expected a model with PEFT adapters, found one without; call get_peft_model "
                "first, or plan from its configuration"
            )
        if not counts_all:
            _refuse_uncounted(adapter_kinds(model))
        base = base_of(model)
        active = model.active_adapters
        return cls(
            config=base.config,
            quantization=getattr(base.config, "quantization_config", None),
            dtype=base.dtype,
            adapters=dict(adapters),
            active=tuple(active() if callable(active) else active),
            forms={
                name: (parameter.dtype, parameter.requires_grad)
                for name, parameter in base.named_parameters()
                if not is_4bit(parameter)
            },
            vision="drop" if are_dropped(base) else "keep",
            model_class=_as_shipped(type(base)),
            counts_all=counts_all,
            has_liger=any(map(_is_gated_by_liger, base.modules())),
        )

    def make(self) -> Any:
        """Build the model, ready to train.

        Raises:
            UnsupportedModelError: If its adapters are of a kind that plans do not count.
        """
        base = meta_model(self.config, self.quantization, self.dtype, self.vision, self.model_class)
        adapters = dict(self.adapters)
        if self.on_language_model:
            adapters = copy.deepcopy(adapters)
            for config in adapters.values():
                config.exclude_modules = excluded_modules(base)
        made: Any = with_adapters(base, adapters)
        if not self.counts_all:
            _refuse_uncounted(adapter_kinds(made))
        if self.active and tuple(made.active_adapters) != self.active:
            made.base_model.set_adapter(list(self.active))
        for module in made.modules() if self.has_liger else ():
            names = names_in(type(module).forward)
            if names is not None:
                module.__dict__["forward"] = partial(_run_as_by_liger, module, names)
        for name, parameter in base_of(made).named_parameters():
            if name in self.forms and not is_4bit(parameter):
                dtype, is_trained = self.forms[name]
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(dtype)
                parameter.requires_grad_(is_trained)
        if self.adapter_dtype is not None:
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(self.adapter_dtype)
        return made.train()


def _is_gated_by_liger(module: nn.Module) -> bool:
    """Whether a module is a gated feed-forward that runs Liger's kernel."""
    if is_of_liger(type(module)):
        return "GLUMLP" in type(module).__name__
    forward = vars(module).get("forward")
    if isinstance(forward, PatchedForward):
        forward = forward.before
    return is_forward_of_liger(forward) and names_in(type(module).forward) is not None


def _run_as_by_liger(module: nn.Module, names: Names, input: torch.Tensor) -> Any:
    """Run a gated feed-forward with the memory that it takes with Liger's kernel."""
    parts: Any = module._modules
    if names.up is None:
        gate, up = parts[names.gate](input).chunk(2, dim=-1)
    else:
        gate, up = parts[names.gate](input), parts[names.up](input)
    return parts[names.down](_Gated.apply(gate, up))


class _Gated(torch.autograd.Function):
    """In backward gradients take the places of what is kept."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors


def _as_shipped(model_class: Any) -> Any:
    """Return a class of transformers as its file has it, where Liger has replaced code of that.

    Liger's kernels would read tensors of the meta device at address 0, which loses the CUDA
    context. A plan counts the model without them, but for what feed-forwards keep (``_Gated``).
    """
    code = sys.modules[model_class.__module__]
    spec = code.__spec__
    if spec is None or spec.loader is None or not any(map(is_of_liger, vars(code).values())):
        return model_class
    shipped = module_from_spec(spec)
    spec.loader.exec_module(shipped)
    return getattr(shipped, model_class.__name__)


def _refuse_uncounted(kinds: Mapping[str, str]) -> None:
    others = [found for kind, found in kinds.items() if kind not in COUNTED_KINDS]
    if others:
        known = ", ".join(sorted(COUNTED_KINDS))
        raise UnsupportedModelError(
            f"expected adapters whose memory a plan counts ({known}), found {', '.join(others)}; "
            "such a model trains with slots= (and keep_last=), on a GPU with vram_budget= too"
        )


def meta_model(
    config: "PreTrainedConfig",
    quantization: "BitsAndBytesConfig | None",
    dtype: torch.dtype,
    vision: str = "keep",
    model_class: Any = None,
) -> "PreTrainedModel":
    """The model of ``config``, which is left as it is, on the meta device; ``vision`` as in load.

    ``model_class`` is its class; None is the one that the configuration chooses.

    Raises:
        UnsupportedModelError: If there is none.
    """
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    # The model keeps what it is made from, and notes its quantization there.
    config = copy.deepcopy(config)
    if model_class is None:
        model_class, config = model_class_of(config)
    require_language_model(model_class.__name__, config)
    with ONE_AT_A_TIME, _META:
        try:
            model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
        except Exception as error:
            raise UnsupportedModelError(
                "expected a configuration that transformers builds a model from, found "
                f"{describe_error(error)}; check its settings, and the release of transformers"
            ) from error
        if vision == "drop":
            drop_towers(model)
    text: Any = model.config.get_text_config(decoder=True)
    if getattr(text, "pad_token_id", None) is None and model.get_output_embeddings() is None:
        text.pad_token_id = 0  # a classifier of several rows asks for one, when it runs
    if quantization is not None:
        with ONE_AT_A_TIME, _META:
            head: Any = model.get_output_embeddings()
            if hasattr(head, "weight"):
                # Not tied yet, as where it is loaded: the quantizer spares the last parameter.
                head.weight = nn.Parameter(torch.empty_like(head.weight))
            quantizer = Bnb4BitHfQuantizer(quantization, pre_quantized=False)
            before = set(model.modules())
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
            for module in set(model.modules()) - before:
                if module._parameters.get("bias") is not None:
                    module.bias.data = module.bias.data.to(dtype)
            quantize_on_meta(model)
            quantizer.postprocess_model(model)
    model.tie_weights()
    model.requires_grad_(False)
    return model


def with_adapters(model: "PreTrainedModel", adapters: Mapping[str, "PeftConfig"]) -> nn.Module:
    """``model`` with PEFT adapters, as ``get_peft_model`` and ``add_adapter`` give them."""
    from peft import get_peft_model

    # PEFT writes to the configurations.
    with _META:
        (first, config), *others = copy.deepcopy(dict(adapters)).items()
        adapted = get_peft_model(model, config, adapter_name=first)
        for name, config in others:
            adapted.add_adapter(name, config)
    return adapted


def _configuration(source: Any) -> "PreTrainedConfig":
    try:
        path, texts = find_config(source)
        config = configuration(path, texts, {})
    except CheckpointFormatError as error:
        raise UnsupportedModelError(f"expected a model that can be planned: {error}") from error
    stored_quantization(path, config)  # raises if Poros cannot read it
    return config


def shapes_of(model: nn.Module) -> Shapes:
    """Compute the sizes of a model with adapters, on any device."""
    name, layers = find_layers(model)
    blocks, small = find_frozen(model, name, layers, block_size=1)
    in_layers = {id(frozen.tensor) for group in (*blocks, *small) for frozen in group}
    buffers = [
        BlockLayout.pack((part.name, part.get()) for part in small_parts(staying, block))
        for staying, block in zip(small, blocks, strict=True)
    ]
    base = base_of(model)
    embedding = _frozen_of(base.get_input_embeddings())
    last = base.get_output_embeddings()
    head = _frozen_of(last)
    trained = {id(tensor): tensor for tensor in model.parameters() if tensor.requires_grad}
    # A parameter of several layers counts in the first.
    elsewhere = dict(trained)
    layer_adapters = [
        _num_bytes(elsewhere.pop(id(own)) for own in layer.parameters() if id(own) in elsewhere)
        for layer in layers
    ]
    towers = list(find_towers(base).values())
    embeddings = find_embeddings(model, [*layers, *towers])
    in_towers = {
        id(tensor) for tower in towers for tensor in (*tower.parameters(), *tower.buffers())
    }
    constants: dict[tuple[str, torch.dtype], int] = {}
    other, vision = squares_num_bytes(model), 0
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts = part_tensors(tensor_name, tensor, with_constants=True)
        if id(tensor) in in_layers:
            for key in parts.keys() - part_tensors(tensor_name, tensor).keys():
                # Code books are there once; other constants are one number per tensor.
                once = key.rpartition(".")[2] if parts[key].numel() > 1 else key
                constants[once, parts[key].dtype] = parts[key].nbytes
        elif id(tensor) in in_towers and id(tensor) not in trained:
            vision += _num_bytes(parts.values())
        elif id(tensor) not in trained.keys() | embedding.keys() | head.keys():
            other += _num_bytes(parts.values())
    return Shapes(
        layers=[
            BlockLayout.pack((part.name, part.get()) for frozen in block for part in frozen.parts())
            for block in blocks
        ],
        layer_adapters=layer_adapters,
        adapter_sizes=[(tensor.numel(), tensor.nbytes) for tensor in trained.values()],
        embedding=_num_bytes(embedding.values()),
        head=_num_bytes(tensor for key, tensor in head.items() if key not in embedding),
        other=other + sum(constants.values()) + sum(layout.num_bytes for layout in buffers),
        vision=vision,
        on_host=[
            ("embedding" if id(each.matrix) in embedding else "other", each.matrix.nbytes)
            for each in embeddings
        ],
        sliced_head=_sliced_head(model, base, set(embedding)),
        dense_layer=max((_dense_num_bytes(block) for block in blocks), default=0),
        dense_weight=max((each.dense_num_bytes for block in blocks for each in block), default=0),
        num_linear_parameters=sum(num_weights(each.tensor) for block in blocks for each in block),
        num_head_parameters=max(map(num_weights, last.parameters()), default=0) if last else 0,
    )


def _sliced_head(model: nn.Module, base: Any, embedding: set[int]) -> SlicedHead | None:
    head, _ = find_head(model, base, "chunked", True)
    if head is None or not head.is_on_host:
        return None
    matrix = head.matrix
    return SlicedHead(matrix.nbytes, sum(buffer_sizes(matrix)), id(matrix) in embedding)


def _frozen_of(module: nn.Module | None) -> dict[int, torch.Tensor]:
    parameters = [] if module is None else module.parameters()
    return {id(tensor): tensor for tensor in parameters if not tensor.requires_grad}


def _dense_num_bytes(block: Iterable[FrozenTensor]) -> int:
    states = [each.tensor.quant_state for each in block if each.is_4bit]  # type: ignore[attr-defined]
    return sum(prod(state.shape) * state.dtype.itemsize for state in states)


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
