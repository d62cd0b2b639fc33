"""``plan``: what a training step will need, from a configuration alone."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.config import StreamingPolicy, parse_num_bytes
from poros.discover import find_layers, frozen_by_block
from poros.errors import PolicyError, UnsupportedModelError
from poros.frozen import is_4bit
from poros.layout import BlockLayout
from poros.loaders.intake import part_tensors
from poros.paper import step_cost
from poros.skeleton import skeleton, with_adapters
from poros.terms import MemoryPlan, Shapes, Speeds, plan_for

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig, PreTrainedConfig


def plan(
    source: "str | os.PathLike[str] | PreTrainedConfig | nn.Module",
    *,
    seq_len: int,
    batch_size: int = 1,
    rank: int = 16,
    lora: "PeftConfig | None" = None,
    vram_budget: int | float | str | None = None,
    quantization: str | None = "nf4",
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 1,
    num_slots: int | None = None,
    keep_last: int | None = None,
    optimizer_num_bytes: int | None = None,
    accumulation: int = 1,
    speeds: Speeds | None = None,
) -> MemoryPlan:
    """Plan a training step: memory term by term, slots and kept layers, bytes moved.

    The model is built without memory and one micro-batch is run on paper, so only a configuration
    is needed, some seconds (about 10 for 72B on a busy CPU), and no GPU.

    Args:
        source: A folder or hub name with a ``config.json``, a configuration, or a transformers or
            PEFT model (then its own adapters and quantization count, not ``rank`` and ``lora``).
        seq_len: Tokens per row; rows are planned full.
        batch_size: Rows per micro-batch.
        rank: Of LoRA on every linear layer of the blocks.
        lora: Other adapters, as given to ``get_peft_model``.
        vram_budget: Bytes, or ``"8GiB"``; None plans two slots and reports what that needs.
        quantization: ``"nf4"``, ``"fp4"``, or None for a dense base.
        dtype: Of everything that is not quantized.
        block_size: Layers per transfer.
        num_slots: Fixes the slots; None takes what the budget affords.
        keep_last: Fixes the layers that are not recomputed; None likewise.
        optimizer_num_bytes: State and temporaries of the optimizer; None is fused AdamW.
        accumulation: Micro-batches per optimizer step.
        speeds: For a forecast of the step's time.

    Raises:
        PolicyError: If a number makes no sense.
        UnsupportedModelError: If the model has no decoder layers that can be streamed.
        VRAMBudgetError: If the budget is below the floor; the message holds the terms.
    """
    for what, value in (
        ("seq_len", seq_len),
        ("batch_size", batch_size),
        ("rank", rank),
        ("accumulation", accumulation),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PolicyError(f"{what}: expected a positive whole number, found {value!r}")
    StreamingPolicy(block_size=block_size)
    budget = None if vram_budget is None else parse_num_bytes(vram_budget, "vram_budget")
    model = _on_paper(source, quantization, dtype, lora, rank)
    _, layers = find_layers(model)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(limit, int) and seq_len > limit:
        raise PolicyError(
            f"seq_len: expected at most the model's {limit} positions, found {seq_len}"
        )
    try:
        cost = step_cost(model.train(), layers, batch_size, seq_len)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"expected a model whose operators run on shapes alone, found {type(model).__name__} "
            f"of {model.config.model_type!r}, which does not (adapters on fused experts?): {error}"
        ) from error
    return plan_for(
        shapes_of(model),
        cost,
        block_size=block_size,
        num_slots=num_slots,
        keep_last=keep_last,
        vram_budget=budget,
        optimizer_num_bytes=optimizer_num_bytes,
        accumulation=accumulation,
        speeds=speeds,
        options={"batch_size": batch_size, "seq_len": seq_len},
    )


def shapes_of(model: nn.Module) -> Shapes:
    """Sizes of a model with adapters, on any device."""
    name, layers = find_layers(model)
    blocks = frozen_by_block(model, name, layers, block_size=1)
    streamed = {id(each.tensor) for block in blocks for each in block}
    base = _base_of(model)
    embedding = _weights(base.get_input_embeddings())
    head = _weights(base.get_output_embeddings())
    trained = {id(each): each for each in model.parameters() if each.requires_grad}
    constants, other = 0, 0
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts = part_tensors(tensor_name, tensor, with_constants=True)
        if id(tensor) in streamed:
            moved = part_tensors(tensor_name, tensor).keys()
            constants += _num_bytes(each for key, each in parts.items() if key not in moved)
        elif id(tensor) not in trained.keys() | embedding.keys() | head.keys():
            other += _num_bytes(parts.values())
    return Shapes(
        layers=[
            BlockLayout.pack((part.name, part.get()) for each in block for part in each.parts())
            for block in blocks
        ],
        num_adapter_parameters=sum(each.numel() for each in trained.values()),
        adapters=_num_bytes(trained.values()),
        embedding=_num_bytes(embedding.values()),
        head=_num_bytes(each for key, each in head.items() if key not in embedding),
        other=other + constants,
        num_linear_parameters=sum(_num_weights(each.tensor) for block in blocks for each in block),
    )


def _on_paper(
    source: Any,
    quantization: str | None,
    dtype: torch.dtype,
    lora: "PeftConfig | None",
    rank: int,
) -> Any:
    from transformers import PreTrainedConfig

    if isinstance(source, nn.Module):
        return _model_on_paper(source)
    if not isinstance(source, PreTrainedConfig):
        source = _configuration(source)
    wanted = _quantization(quantization, dtype)
    base = skeleton(source, wanted, dtype)
    return with_adapters(base, {"default": lora or _lora_on_layers(base, rank)})


def _lora_on_layers(base: Any, rank: int) -> "PeftConfig":
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _model_on_paper(model: nn.Module) -> Any:
    """The same modules, adapters and dtypes without memory."""
    base = _base_of(model)
    adapters: Mapping[str, PeftConfig] = getattr(model, "peft_config", {})
    if not adapters:
        raise UnsupportedModelError(
            "expected a model with PEFT adapters, found one without; call get_peft_model first, or "
            "plan from its configuration"
        )
    quantization = getattr(base.config, "quantization_config", None)
    made: Any = with_adapters(skeleton(base.config, quantization, base.dtype), adapters)
    given = dict(model.named_parameters())
    for name, parameter in made.named_parameters():
        like = given.get(name)
        if like is not None and not is_4bit(parameter):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(like.dtype)
            parameter.requires_grad_(like.requires_grad)
    return made


def _configuration(source: Any) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"expected a model that transformers knows, found at {os.fspath(source)!r}: {error}"
        ) from error


def _quantization(kind: str | None, dtype: torch.dtype) -> "BitsAndBytesConfig | None":
    from transformers import BitsAndBytesConfig

    if kind is None:
        return None
    if kind not in ("nf4", "fp4"):
        raise PolicyError(f"quantization: expected 'nf4', 'fp4' or None, found {kind!r}")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _weights(module: nn.Module | None) -> dict[int, torch.Tensor]:
    found = (
        [] if module is None else [each for each in module.parameters() if not each.requires_grad]
    )
    return {id(each): each for each in found}


def _num_weights(tensor: Any) -> int:
    if is_4bit(tensor):
        return int(torch.Size(tensor.quant_state.shape).numel())
    return int(tensor.numel()) if tensor.dim() > 1 else 0


def _num_bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def render(plan: MemoryPlan) -> Any:
    """The plan as a table for the terminal."""
    from rich.table import Table

    table = Table(title="memory of a training step", show_header=True)
    table.add_column("term")
    table.add_column("GB", justify="right")
    for name, size in plan.terms.items():
        table.add_row(name, f"{size / 1e9:.3f}")
    table.add_section()
    table.add_row("total on the device", f"{plan.total_num_bytes / 1e9:.3f}")
    table.add_row("host memory", f"{plan.host_num_bytes / 1e9:.3f}")
    table.add_row("moved per micro-batch", f"{plan.bytes_per_step / 1e9:.3f}")
    table.add_section()
    rows: Sequence[tuple[str, str]] = [
        ("slots", f"{plan.num_slots} of {plan.num_blocks} blocks"),
        ("layers kept", str(plan.keep_last)),
        ("adapter parameters", f"{plan.num_adapter_parameters:,}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    if plan.step_ms is not None:
        table.add_row("forecast of a micro-batch", f"{plan.step_ms:.0f} ms")
    return table
