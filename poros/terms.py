"""What a training step will need, before anything is downloaded or loaded.

Terms (bytes on the device), for K blocks of L layers in S slots with the last p layers kept:

    slots         the largest block of each residue class k mod S
    kept blocks   blocks of the kept layers, resident
    adapters      weights; optimizer: AdamW's two moments
    gradients, boundaries (one input per layer), kept graphs (what autograd keeps of the kept
                  layers), workspace (head and loss, or one layer recomputed): at the moment of the
                  step when their sum is largest
    embedding, head, other   what is not in the layers
    inputs        tokens, labels, masks and rotary embeddings

``poros.paper`` finds boundaries, graphs and workspace by running layers on the meta device.

Spare budget becomes slots first, because each saves two block loads a step; when all blocks are on
the device it becomes kept layers, because each saves a recomputation. Time is forecast phase by
phase: the larger of wire and compute in forward, and again in backward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poros.config import MIN_SLOTS
from poros.errors import VRAMBudgetError
from poros.layout import BlockLayout, slot_sizes
from poros.paper import StepCost


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model with adapters, in bytes unless said otherwise."""

    layers: Sequence[BlockLayout]
    """One per decoder layer."""
    num_adapter_parameters: int
    """Trainable elements."""
    adapters: int
    embedding: int
    head: int
    """0 if tied to the embedding."""
    other: int
    num_linear_parameters: int = 0
    """Weight elements of the linear layers of all blocks, for the forecast of time."""


@dataclass(frozen=True)
class Speeds:
    """Measured or given rates, for the forecast of time."""

    copy_gb_per_s: float
    """From page-locked host memory to the device."""
    tflop_per_s: float
    """Of the model's linear layers as they run, with dequantization."""


@dataclass(frozen=True)
class MemoryPlan:
    """A decision and its terms. Sizes are bytes; see the module's docstring."""

    terms: Mapping[str, int]
    num_slots: int
    keep_last: int
    num_blocks: int
    block_size: int
    num_adapter_parameters: int
    bytes_per_step: int
    """Over the wire, per micro-batch once warm: 2 (K - S) blocks."""
    host_num_bytes: int
    vram_budget: int | None
    step_ms: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """What was planned for: batch size, sequence length, optimizer."""

    @property
    def total_num_bytes(self) -> int:
        return sum(self.terms.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``poros plan --json`` prints them."""
        return {
            "total_num_bytes": self.total_num_bytes,
            "terms": dict(self.terms),
            "num_slots": self.num_slots,
            "keep_last": self.keep_last,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_adapter_parameters": self.num_adapter_parameters,
            "bytes_per_step": self.bytes_per_step,
            "step_ms": self.step_ms,
            "host_num_bytes": self.host_num_bytes,
            "vram_budget": self.vram_budget,
            **self.options,
        }


def plan_for(
    shapes: Shapes,
    cost: StepCost,
    *,
    block_size: int = 1,
    num_slots: int | None = None,
    keep_last: int | None = None,
    vram_budget: int | None = None,
    optimizer_num_bytes: int | None = None,
    accumulation: int = 1,
    speeds: Speeds | None = None,
    options: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """Choose slots and kept layers for a budget, or take those that are given.

    Args:
        shapes: Of the model.
        cost: Of one micro-batch.
        block_size: Layers per transfer.
        num_slots: Device slots; None is the most that the budget affords, or 2 without one.
        keep_last: Layers that are not recomputed; None likewise, or 0.
        vram_budget: Bytes; None takes what the other arguments need.
        optimizer_num_bytes: Of the optimizer's state and temporaries; None is AdamW's two moments
            in the adapters' dtype, fused.
        accumulation: Micro-batches per optimizer step: with several, all gradients are there while
            the boundaries are.
        speeds: For the forecast of a step's time.
        options: Kept in the plan.

    Raises:
        VRAMBudgetError: If not even two slots fit; it names the floor and what would help.
    """
    num_blocks = -(-len(shapes.layers) // block_size)
    moments = 2 * shapes.adapters if optimizer_num_bytes is None else optimizer_num_bytes

    def made(slots: int, kept: int) -> MemoryPlan:
        return _plan(
            shapes,
            cost,
            block_size,
            slots,
            kept,
            moments,
            vram_budget,
            speeds,
            accumulation,
            options or {},
        )

    least = min(MIN_SLOTS, num_blocks)
    slots, kept = num_slots or least, keep_last or 0
    if vram_budget is None:
        return made(min(slots, num_blocks), kept)
    if num_slots is None:
        slots = _most(least, num_blocks, lambda n: made(n, 0).total_num_bytes <= vram_budget)
    if keep_last is None and slots == num_blocks:
        kept = _most(0, len(shapes.layers), lambda n: made(slots, n).total_num_bytes <= vram_budget)
    chosen = made(slots, kept)
    if chosen.total_num_bytes > vram_budget:
        raise VRAMBudgetError(_does_not_fit(chosen, vram_budget))
    return chosen


def _plan(
    shapes: Shapes,
    cost: StepCost,
    block_size: int,
    slots: int,
    kept: int,
    moments: int,
    vram_budget: int | None,
    speeds: Speeds | None,
    accumulation: int,
    options: Mapping[str, Any],
) -> MemoryPlan:
    num_layers = len(shapes.layers)
    blocks = [
        BlockLayout.join(shapes.layers[first : first + block_size])
        for first in range(0, num_layers, block_size)
    ]
    first_kept = -(-(num_layers - kept) // block_size)
    resident = [block.num_bytes for block in blocks[first_kept:]]
    ring, ring_slots = blocks[:first_kept], max(0, min(slots - len(resident), first_kept))
    if ring:
        ring_slots = max(min(MIN_SLOTS, len(ring)), ring_slots)
    peak = _peak_phase(shapes, cost, kept, accumulation)
    terms = {
        "slots": sum(slot_sizes(ring, ring_slots)) if ring else 0,
        "kept blocks": sum(resident),
        "adapters": shapes.adapters,
        "optimizer": moments,
        **peak,
        "embedding": shapes.embedding,
        "head": shapes.head,
        "other": shapes.other,
        "inputs": cost.inputs + cost.shared,
    }
    # At the turn the last blocks are in the slots, at the next step's start the first ones.
    loaded = [block.num_bytes for block in ring]
    forward, backward = sum(loaded[ring_slots:]), sum(loaded[: len(loaded) - ring_slots])
    return MemoryPlan(
        terms=terms,
        num_slots=ring_slots + len(resident),
        keep_last=kept,
        num_blocks=len(blocks),
        block_size=block_size,
        num_adapter_parameters=shapes.num_adapter_parameters,
        bytes_per_step=forward + backward,
        host_num_bytes=sum(block.num_bytes for block in blocks),
        vram_budget=vram_budget,
        step_ms=_step_ms(shapes, cost, forward, backward, kept / num_layers, speeds),
        options=dict(options),
    )


def _peak_phase(shapes: Shapes, cost: StepCost, kept: int, accumulation: int) -> dict[str, int]:
    """What comes and goes within a step, at the moment when it is most."""
    num_layers = len(shapes.layers)
    graphs = [each.saved for each in cost.layers[num_layers - kept :]]
    # Gradients are there from the first micro-batch on, layer by layer from the last.
    before = shapes.adapters if accumulation > 1 else 0

    def phase(gradients: int, boundaries: int, graphs: int, workspace: int) -> dict[str, int]:
        return {
            "gradients": gradients,
            "boundaries": boundaries * cost.boundary,
            "kept graphs": graphs,
            "workspace": workspace,
        }

    phases = [
        phase(before, num_layers, sum(graphs), cost.loss_peak),
        phase(shapes.adapters, 0, 0, 0),  # the optimizer's step
    ]
    for index, each in enumerate(cost.layers):
        gradients = before or shapes.adapters * (num_layers - 1 - index) // num_layers
        if index < num_layers - kept:
            phases.append(phase(gradients, index + 1, 0, each.peak))
        else:
            pending = sum(graphs[: index - (num_layers - kept) + 1])
            phases.append(phase(gradients, index + 1, pending, each.peak - each.saved))
    return max(phases, key=lambda each: sum(each.values()))


def _step_ms(
    shapes: Shapes,
    cost: StepCost,
    forward_num_bytes: int,
    backward_num_bytes: int,
    kept: float,
    speeds: Speeds | None,
) -> float | None:
    if speeds is None:
        return None
    num_tokens = cost.inputs / 16  # tokens and labels, 8 bytes each
    forward = 2e-9 * shapes.num_linear_parameters * num_tokens / speeds.tflop_per_s
    # Frozen weights need no gradient: backward is one product per weight, as forward is.
    backward = forward + (1 - kept) * forward
    wires = (each / speeds.copy_gb_per_s / 1e6 for each in (forward_num_bytes, backward_num_bytes))
    return sum(map(max, wires, (forward, backward)))


def _most(least: int, most: int, fits: Any) -> int:
    """The largest number for which ``fits``, between two; the least if none."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _does_not_fit(plan: MemoryPlan, budget: int) -> str:
    missing = plan.total_num_bytes - budget
    table = "\n".join(
        f"  {name:<12} {size / 1e9:8.3f} GB" for name, size in plan.terms.items() if size
    )
    batch, length = plan.options.get("batch_size"), plan.options.get("seq_len")
    per_token = plan.terms["boundaries"] + plan.terms["workspace"]
    share = missing / per_token if per_token else math.inf
    hints = []
    if share < 1 and isinstance(length, int):
        hints.append(f"sequences of at most about {int(length * (1 - share))} tokens")
    if isinstance(batch, int) and batch > 1:
        hints.append("a smaller batch with more accumulation")
    states = sum(plan.terms[each] for each in ("adapters", "gradients", "optimizer"))
    if missing < states:
        hints.append(f"adapters of about {1 - missing / states:.0%} of the rank")
    return (
        f"vram_budget: expected at least {plan.total_num_bytes / 2**30:.2f} GiB, the floor for "
        f"{plan.num_slots} slots, found {budget / 2**30:.2f} GiB; {missing / 1e9:.2f} GB are "
        f"missing:\n{table}\nWhat would make it fit: {'; '.join(hints) or 'a larger budget'}"
    )
