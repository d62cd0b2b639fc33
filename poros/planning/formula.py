"""What a training step will need, before anything is downloaded or loaded.

Terms (bytes on the device), for K blocks of L layers in S slots with the last p layers kept:

    slots         the largest block of each residue class k mod S
    kept blocks   blocks of the kept layers, resident
    adapters      weights; optimizer: its state
    gradients, boundaries (one input per recomputed layer; at most two if they are offloaded), kept
                  graphs (what autograd keeps of the kept layers), workspace (head
                  and loss, one layer recomputed, or the optimizer's temporaries): at the moment of
                  the step when their sum is largest
    embedding, head, other   what is not in the layers, and what is small in them (norms, biases,
                  quantization constants)
    inputs        tokens, labels, masks and rotary embeddings
    self-check    what the first step needs beyond a later one

``poros.planning.step_cost`` finds boundaries, graphs and workspace by running layers on the meta
device.

The first step is checked: while a layer is, there are besides it a fresh copy of its block, what
the streamed backward has given, and its output. The optimizer's state is not there yet, unless
training is resumed; so the check costs nothing as long as that state is the larger.

Spare budget becomes slots first, because each saves two block loads a step; when all blocks are on
the device it becomes kept layers, because each saves a recomputation. Boundaries are offloaded only
if nothing else helps, because the wire has to carry them. Time is forecast phase by phase: the
larger of wire and compute in forward, and again in backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from poros.config import MIN_SLOTS
from poros.errors import PolicyError, VRAMBudgetError
from poros.layout import BlockLayout, slot_sizes
from poros.planning.step_cost import StepCost
from poros.slots.schedule import divide

_MIN_8BIT_NUM_ELEMENTS, _8BIT_BLOCK = 4096, 256
"""bitsandbytes keeps smaller states in float32, and one float32 scale per block of others."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model with adapters, in bytes unless said otherwise."""

    layers: Sequence[BlockLayout]
    """One per decoder layer."""
    layer_adapters: Sequence[int]
    """Trainable bytes of each decoder layer."""
    adapter_sizes: Sequence[tuple[int, int]]
    """Elements and bytes of every trainable parameter, in the layers and elsewhere."""
    embedding: int
    head: int
    """0 if tied to the embedding."""
    other: int
    num_linear_parameters: int = 0
    """Weight elements of the linear layers of all blocks, for the forecast of time."""
    num_head_parameters: int = 0
    """The head's, tied or not."""

    @property
    def num_adapter_parameters(self) -> int:
        return sum(number for number, _ in self.adapter_sizes)

    @property
    def adapters(self) -> int:
        return sum(size for _, size in self.adapter_sizes)


@dataclass(frozen=True)
class Speeds:
    """Measured or given rates, for the forecast of time."""

    copy_gb_per_s: float
    """From page-locked host memory to the device, and as fast the other way at the same time."""
    tflop_per_s: float
    """Of the model's linear layers as they run, with dequantization; taken for all products."""


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of an optimizer."""

    state: int
    temporaries: int = 0
    """During its step."""


@dataclass(frozen=True)
class MemoryPlan:
    """A decision and its terms. Sizes are bytes; see the module's docstring."""

    terms: Mapping[str, int]
    num_slots: int
    keep_last: int
    offload_boundaries: bool
    num_blocks: int
    block_size: int
    num_adapter_parameters: int
    bytes_per_step: int
    """Over the wire, both ways, per micro-batch once warm: 2 (K - S) blocks, and 2 boundaries per
    recomputed layer if they are offloaded."""
    host_num_bytes: int
    """The frozen base, and offloaded boundaries."""
    vram_budget: int | None
    step_ms: float | None = None
    speeds: Speeds | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """What was planned for: batch size, sequence length."""

    @property
    def total_num_bytes(self) -> int:
        return sum(self.terms.values())

    def table(self) -> str:
        """The terms that are not zero, a line each, for errors."""
        rows = (f"  {name:<12} {size / 1e9:8.3f} GB" for name, size in self.terms.items() if size)
        return "\n".join(rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``poros plan --json`` prints them."""
        return {
            "total_num_bytes": self.total_num_bytes,
            "terms": dict(self.terms),
            "num_slots": self.num_slots,
            "keep_last": self.keep_last,
            "offload_boundaries": self.offload_boundaries,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_adapter_parameters": self.num_adapter_parameters,
            "bytes_per_step": self.bytes_per_step,
            "step_ms": self.step_ms,
            "copy_gb_per_s": self.speeds and self.speeds.copy_gb_per_s,
            "tflop_per_s": self.speeds and self.speeds.tflop_per_s,
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
    offload_boundaries: bool | None = None,
    self_check: bool = False,
    vram_budget: int | None = None,
    optimizer: OptimizerCost | None = None,
    accumulation: int = 1,
    speeds: Speeds | None = None,
    options: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """Choose slots, kept layers and offloading for a budget, or take those that are given.

    Args:
        shapes: Of the model.
        cost: Of one micro-batch.
        block_size: Layers per transfer.
        num_slots: Device slots; None is the most that the budget affords, or 2 without one.
        keep_last: Layers that are not recomputed; None likewise, or 0.
        offload_boundaries: Whether inputs of recomputed layers wait in host memory for their
            backward; None is no, unless not even two slots fit the budget otherwise.
        self_check: Whether the first step is checked layer by layer.
        vram_budget: Bytes; None takes what the other arguments need.
        optimizer: None is fused AdamW.
        accumulation: Micro-batches per optimizer step: with several, all gradients are there while
            the boundaries are.
        speeds: For the forecast of a step's time.
        options: Kept in the plan.

    Raises:
        VRAMBudgetError: If not even two slots fit; it names the floor and the terms.
    """
    formula = _Formula(
        shapes=shapes,
        cost=cost,
        block_size=block_size,
        optimizer=optimizer or optimizer_cost("adamw_torch_fused", shapes),
        accumulation=accumulation,
        self_check=self_check,
        vram_budget=vram_budget,
        speeds=speeds,
        options=options or {},
    )
    num_blocks, num_layers = len(formula.blocks), len(shapes.layers)
    least = min(MIN_SLOTS, num_blocks)
    slots, kept = num_slots or least, keep_last or 0
    if vram_budget is None:
        return formula.plan(min(slots, num_blocks), kept, bool(offload_boundaries))

    def fits(slots: int, kept: int) -> bool:
        return formula.plan(slots, kept, offload).total_num_bytes <= vram_budget

    offload = bool(offload_boundaries)
    if offload_boundaries is None and not fits(slots, kept):
        offload = True
        if not fits(slots, kept):
            lowest = (formula.plan(slots, kept, each) for each in (False, True))
            offload = min(lowest, key=lambda each: each.total_num_bytes).offload_boundaries
    if num_slots is None:
        slots = _most(least, num_blocks, lambda n: fits(n, kept))
    if keep_last is None and slots == num_blocks:
        kept = _most(0, num_layers, lambda n: fits(slots, n))
    chosen = formula.plan(slots, kept, offload)
    if chosen.total_num_bytes > vram_budget:
        raise VRAMBudgetError(_does_not_fit(chosen, vram_budget))
    return chosen


def optimizer_cost(name: str, shapes: Shapes) -> OptimizerCost:
    """What an optimizer keeps for a model's adapters, and needs besides during its step.

    Args:
        name: As in ``TrainingArguments.optim``.
        shapes: Of the model.

    Raises:
        PolicyError: If it is not one of those known here.
    """
    known = {
        "adamw_torch_fused": OptimizerCost(2 * shapes.adapters),
        # The foreach implementation takes the roots of all second moments at once.
        "adamw_torch": OptimizerCost(2 * shapes.adapters, shapes.adapters),
        **dict.fromkeys(
            # Paged states leave the device only while something else needs the room.
            ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"),
            OptimizerCost(sum(_two_8bit_states(number) for number, _ in shapes.adapter_sizes)),
        ),
        "sgd": OptimizerCost(0),
    }
    if name not in known:
        raise PolicyError(
            f"optimizer: expected one of {', '.join(known)}, found {name!r}; for another one give "
            "optimizer_num_bytes"
        )
    return known[name]


def _two_8bit_states(num_elements: int) -> int:
    if num_elements < _MIN_8BIT_NUM_ELEMENTS:
        return 2 * 4 * num_elements
    return 2 * (num_elements + 4 * -(-num_elements // _8BIT_BLOCK))


@dataclass
class _Formula:
    """Plans of one model and one micro-batch."""

    shapes: Shapes
    cost: StepCost
    block_size: int
    optimizer: OptimizerCost
    accumulation: int
    self_check: bool
    vram_budget: int | None
    speeds: Speeds | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        layers, self.num_layers = self.shapes.layers, len(self.shapes.layers)
        starts = range(0, self.num_layers, self.block_size)
        self.blocks = [BlockLayout.join(layers[k : k + self.block_size]) for k in starts]
        outside = self.shapes.adapters - sum(self.shapes.layer_adapters)
        backwards = accumulate(reversed(self.shapes.layer_adapters), initial=outside)
        # Of trained parts outside the layers most are in the head, whose backward is first.
        self.gradients_above = list(backwards)[:-1][::-1]

    def plan(self, slots: int, keep_last: int, offload: bool) -> MemoryPlan:
        """For layers to keep as in ``StreamingPolicy``: rounded down to whole blocks, or all."""
        first_kept, num_resident, ring_slots = divide(
            self.num_layers, self.block_size, slots, keep_last
        )
        keep_last = min(self.block_size * num_resident, self.num_layers)
        num_recomputed = min(first_kept * self.block_size, self.num_layers)
        kept = self.num_layers - num_recomputed
        ring, resident = self.blocks[:first_kept], self.blocks[first_kept:]
        peak = max(self._later_step(kept, offload), key=lambda each: sum(each.values()))
        terms = {
            "slots": sum(slot_sizes(ring, ring_slots)) if ring else 0,
            "kept blocks": sum(block.num_bytes for block in resident),
            "adapters": self.shapes.adapters,
            "optimizer": self.optimizer.state,
            **peak,
            "embedding": self.shapes.embedding,
            "head": self.shapes.head,
            "other": self.shapes.other,
            "inputs": self.cost.inputs + self.cost.shared,
        }
        if self.self_check:
            later = self.optimizer.state + sum(peak.values())
            terms["self-check"] = max(0, *self._first_step(kept, offload), later) - later
        # At the turn the last blocks are in the slots, at the next step's start the first ones.
        loaded = [block.num_bytes for block in ring]
        forward, backward = sum(loaded[ring_slots:]), sum(loaded[: len(loaded) - ring_slots])
        boundaries = num_recomputed * self.cost.boundary if offload else 0
        return MemoryPlan(
            terms=terms,
            num_slots=ring_slots + num_resident,
            keep_last=keep_last,
            offload_boundaries=offload,
            num_blocks=len(self.blocks),
            block_size=self.block_size,
            num_adapter_parameters=self.shapes.num_adapter_parameters,
            bytes_per_step=forward + backward + 2 * boundaries,
            host_num_bytes=sum(block.num_bytes for block in self.blocks) + boundaries,
            vram_budget=self.vram_budget,
            # ActivationOffloader leave against the direction of the blocks and come back with it.
            step_ms=self._step_ms(max(forward, boundaries), backward + boundaries, kept),
            speeds=self.speeds,
            options=dict(self.options),
        )

    def _boundaries(self, num_layers: int, kept: int, offload: bool) -> int:
        """Bytes of the first layers' inputs, as far as they are on the device."""
        num_recomputed = min(num_layers, self.num_layers - kept)
        return (min(num_recomputed, 2) if offload else num_recomputed) * self.cost.boundary

    def _later_step(self, kept: int, offload: bool) -> Iterator[dict[str, int]]:
        """What comes and goes within a step, phase by phase."""
        cost, first_kept = self.cost, self.num_layers - kept
        sizes = (each.saved + each.kept_input for each in cost.layers[first_kept:])
        graphs = list(accumulate(sizes, initial=0))
        # Gradients are there from the first micro-batch on, layer by layer from the last.
        before = self.shapes.adapters if self.accumulation > 1 else 0

        def phase(gradients: int, boundaries: int, graphs: int, workspace: int) -> dict[str, int]:
            return {
                "gradients": gradients,
                "boundaries": boundaries,
                "kept graphs": graphs,
                "workspace": workspace,
            }

        everything = self._boundaries(self.num_layers, kept, offload)
        yield phase(before, everything, graphs[-1], cost.loss_peak)
        yield phase(self.shapes.adapters, 0, 0, self.optimizer.temporaries)
        for index, each in enumerate(cost.layers):
            gradients = before or self.gradients_above[index]
            boundaries = self._boundaries(index + 1, kept, offload)
            if index < first_kept:
                yield phase(gradients, boundaries, 0, each.peak)
            else:
                # Its output went with the graph of the layer behind it.
                workspace = each.peak - each.saved - cost.boundary
                yield phase(gradients, boundaries, graphs[index - first_kept + 1], workspace)

    def _first_step(self, kept: int, offload: bool) -> Iterator[int]:
        """Bytes of the same while a layer is checked, without the optimizer's."""
        for index, each in enumerate(self.cost.layers[: self.num_layers - kept]):
            yield (
                self.gradients_above[index]
                + self._boundaries(index + 1, kept, offload)
                + each.peak
                + self.blocks[index // self.block_size].num_bytes
                # Its output, and the gradients that the streamed backward has given: for its
                # input those of the residual path and of the norm, apart.
                + 3 * self.cost.boundary
                + self.shapes.layer_adapters[index]
            )

    def _step_ms(self, forward_wire: int, backward_wire: int, kept: int) -> float | None:
        if self.speeds is None:
            return None
        num_tokens = self.cost.inputs / 16  # tokens and labels, 8 bytes each
        layers = 2 * num_tokens * self.shapes.num_linear_parameters / self.num_layers
        head = 2 * num_tokens * self.shapes.num_head_parameters
        forward = [layers + each.attention_flop for each in self.cost.layers]
        # Frozen weights need no gradient: backward is one product per weight, as forward is. Of
        # attention it is five products, and the forward two.
        backward = [layers + 2.5 * each.attention_flop for each in self.cost.layers]
        recomputed = forward[: self.num_layers - kept]
        per_flop = 1e-9 / self.speeds.tflop_per_s
        compute = (
            per_flop * (sum(forward) + head),
            per_flop * (sum(backward) + sum(recomputed) + head),
        )
        wires = (each / self.speeds.copy_gb_per_s / 1e6 for each in (forward_wire, backward_wire))
        return sum(map(max, wires, compute))


def _most(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number for which ``fits``, between two; the least if none."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _does_not_fit(plan: MemoryPlan, budget: int) -> str:
    offloaded = ", boundaries in host memory" if plan.offload_boundaries else ""
    return (
        f"vram_budget: expected at least {plan.total_num_bytes / 2**30:.2f} GiB, the floor for "
        f"{plan.num_slots} slots{offloaded}, found {budget / 2**30:.2f} GiB; "
        f"{(plan.total_num_bytes - budget) / 1e9:.2f} GB are missing:\n{plan.table()}"
    )
