"""A model on the meta device, kept for many plans: sizes once, costs once per shape of a batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros.errors import UnsupportedModelError
from poros.layer.staying import small_parts
from poros.layout import BlockLayout
from poros.model.inspect import find_frozen, find_layers
from poros.nf4 import is_4bit, part_tensors
from poros.planning.formula import (
    MemoryPlan,
    OptimizerCost,
    Shapes,
    Speeds,
    optimizer_cost,
    plan_for,
)
from poros.planning.meta_model import Recipe, base_of
from poros.planning.step_cost import StepCost, step_cost


@dataclass(frozen=True)
class Request:
    """What a step is planned for, but for the budget; see ``poros.plan``."""

    seq_len: int
    batch_size: int = 1
    block_size: int = 1
    num_slots: int | None = None
    keep_last: int | None = None
    offload_boundaries: bool | None = None
    self_check: bool = False
    optimizer: str = "adamw_torch_fused"
    optimizer_num_bytes: int | None = None
    accumulation: int = 1
    speeds: Speeds | None = None


class CostModel:
    """A model on the meta device, and what has been found out about it.

    Args:
        recipe: What it is made from.

    Attributes:
        recipe: See above.
        model: On the meta device.
        layers: Its decoder layers.
        shapes: Its sizes.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model: Any = recipe.make()
        self.shapes = shapes_of(self.model)
        _, self.layers = find_layers(self.model)
        self._costs: dict[tuple[int, int], StepCost] = {}

    def plan(self, request: Request, budget: int | None) -> MemoryPlan:
        """Plan a step.

        Raises:
            UnsupportedModelError: If the model cannot be run on the meta device.
            VRAMBudgetError: If the budget is below the floor.
        """
        if request.optimizer_num_bytes is None:
            optimizer = optimizer_cost(request.optimizer, self.shapes)
        else:
            optimizer = OptimizerCost(request.optimizer_num_bytes)
        return plan_for(
            self.shapes,
            self._cost(request.batch_size, request.seq_len),
            block_size=request.block_size,
            num_slots=request.num_slots,
            keep_last=request.keep_last,
            offload_boundaries=request.offload_boundaries,
            self_check=request.self_check,
            vram_budget=budget,
            optimizer=optimizer,
            accumulation=request.accumulation,
            speeds=request.speeds,
            options={"batch_size": request.batch_size, "seq_len": request.seq_len},
        )

    def _cost(self, batch_size: int, seq_len: int) -> StepCost:
        found = self._costs.get((batch_size, seq_len))
        if found is None:
            try:
                found = step_cost(self.model, self.layers, batch_size, seq_len)
            except (RuntimeError, NotImplementedError) as error:
                name, config = type(self.model).__name__, self.model.config
                raise UnsupportedModelError(
                    f"expected a model whose operators run on shapes alone, found {name} of "
                    f"{config.model_type!r}, which does not: {error}"
                ) from error
            self._costs[batch_size, seq_len] = found
        return found


def shapes_of(model: nn.Module) -> Shapes:
    """Sizes of a model with adapters, on any device."""
    name, layers = find_layers(model)
    blocks, small = find_frozen(model, name, layers, block_size=1)
    in_layers_too = {id(each.tensor) for group in (*blocks, *small) for each in group}
    buffers = [
        BlockLayout.pack((part.name, part.get()) for part in small_parts(staying, block))
        for staying, block in zip(small, blocks, strict=True)
    ]
    base = base_of(model)
    embedding = _weights(base.get_input_embeddings())
    last = base.get_output_embeddings()
    head = _weights(last)
    trained = {id(each): each for each in model.parameters() if each.requires_grad}
    elsewhere = dict(trained)
    in_layers = [
        _num_bytes(elsewhere.pop(id(each)) for each in layer.parameters() if id(each) in elsewhere)
        for layer in layers
    ]
    constants: dict[tuple[str, torch.dtype], int] = {}
    other = 0
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts = part_tensors(tensor_name, tensor, with_constants=True)
        if id(tensor) in in_layers_too:
            for key in parts.keys() - part_tensors(tensor_name, tensor).keys():
                # Code books are there once; other constants are one number per tensor.
                once = key.rpartition(".")[2] if parts[key].numel() > 1 else key
                constants[once, parts[key].dtype] = _num_bytes([parts[key]])
        elif id(tensor) not in trained.keys() | embedding.keys() | head.keys():
            other += _num_bytes(parts.values())
    return Shapes(
        layers=[
            BlockLayout.pack((part.name, part.get()) for each in block for part in each.parts())
            for block in blocks
        ],
        layer_adapters=in_layers,
        adapter_sizes=[(each.numel(), _num_bytes([each])) for each in trained.values()],
        embedding=_num_bytes(embedding.values()),
        head=_num_bytes(each for key, each in head.items() if key not in embedding),
        other=other + sum(constants.values()) + sum(each.num_bytes for each in buffers),
        num_linear_parameters=sum(_num_weights(each.tensor) for block in blocks for each in block),
        num_head_parameters=max(map(_num_weights, last.parameters()), default=0) if last else 0,
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
