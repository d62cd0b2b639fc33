"""Computes what a training step needs, before anything is downloaded or loaded.

Terms (bytes on the device), for K blocks of L layers in S slots with the last p layers kept:

    slots         the largest block of each residue class k mod S
    kept blocks   blocks of the kept layers, resident
    adapters      weights; optimizer: its state
    gradients, boundaries (one input per recomputed layer; at most two if they are offloaded), kept
                  graphs (what autograd keeps of the kept layers), workspace (head
                  and loss, one layer recomputed, or the optimizer's temporaries): at the moment of
                  the step when their sum is largest
    vision        towers for images and sound
    embedding, head, other   what else is not in the layers, and what is small in them (norms,
                  biases, quantization constants)
    inputs        tokens, labels, masks and rotary embeddings
    copies        if micro-batches go together: recordings of a second one at a time, and a graph
    dense layer   the 4-bit weights of one layer, dense, which micro-batches together share
    dense weight  memory for one 4-bit weight at a time, dense, which visits have that may be
                  recorded; where they are, it is one of the recordings
    libraries     workspaces of cuBLAS; left out of a plan that is made without a GPU
    self-check    what the first step needs beyond a later one

``poros.planning.cost_model`` finds boundaries, graphs and workspace by running layers on the meta
device.

The first step is checked: while a layer is, there are besides it a fresh copy of its block, what
the streamed backward has given, and its output. The optimizer's state is not there yet, unless
training is resumed; so the check costs nothing as long as that state is the larger.

Spare budget becomes slots first, because each saves two block loads a step; when all blocks are on
the device it becomes kept layers, because each saves a recomputation. Boundaries are offloaded only
if nothing else helps, because the wire has to carry them. Time is forecast phase by phase: the
larger of wire and compute in forward, and again in backward.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from poros.config import MIN_SLOTS
from poros.errors import VRAMBudgetError
from poros.head.choice import stays_on_host
from poros.host.layout import BlockLayout, slot_sizes
from poros.planning.request import PlanRequest, Speeds, optimizer_cost
from poros.replay.graphs import MOST_FLOP, MOST_JOINED, SAVED_TOGETHER
from poros.slots.schedule import divide
from poros.utils.formatting import size

_COMING_AND_GOING = ("gradients", "boundaries", "kept graphs", "workspace")
"""Terms of which only the moment with the largest sum counts."""


@dataclass(frozen=True)
class SlicedHead:
    """Bytes of a head in host memory."""

    matrix: int
    buffers: int
    """Buffers on the device for slices of the matrix."""
    is_tied: bool
    """Whether the embedding uses the same matrix."""


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
    vision: int = 0
    """Towers for images and sound."""
    num_linear_parameters: int = 0
    """Weight elements of the linear layers of all blocks, for the forecast of time."""
    num_head_parameters: int = 0
    """The head's, tied or not."""
    on_host: Sequence[tuple[str, int]] = ()
    """Matrices of embeddings that can stay in host memory: the term that counts each ("embedding",
    "head" or "other"), and its size."""
    sliced_head: "SlicedHead | None" = None
    """The head, if a loss can be computed in slices that come from host memory."""
    dense_layer: int = 0
    """The 4-bit weights of the largest layer, dense."""
    dense_weight: int = 0
    """The largest 4-bit weight, dense, of those that a kernel of ours makes so."""

    @cached_property
    def num_adapter_parameters(self) -> int:
        return sum(number for number, _ in self.adapter_sizes)

    @cached_property
    def adapters(self) -> int:
        return sum(size for _, size in self.adapter_sizes)


@dataclass(frozen=True)
class LayerCost:
    """Bytes of one decoder layer on one micro-batch."""

    saved: int
    """Bytes that its graph keeps between forward and backward, without its input."""
    kept_input: int
    """Bytes of its input that the graph keeps: 0 if it keeps only a copy in another dtype."""
    peak: int
    """Peak while it is recomputed and differentiated, above its input."""
    attention_flop: int = 0
    """Floating-point operations of attention in its forward."""
    dense: int = 0
    """Reduction of the peak if dequantized weights have their memory elsewhere."""


@dataclass(frozen=True)
class StepCost:
    """Bytes of one micro-batch of a model."""

    layers: Sequence[LayerCost]
    boundary: int
    """One layer's input."""
    shared: int
    """Other inputs of the layers: masks, rotary embeddings."""
    loss_peak: int
    """Peak of the last layer's output, final norm, head and loss, forward and backward."""
    inputs: int
    checked: Sequence[LayerCost] = ()
    """Costs of the layers as the self-check runs them, with PEFT's modules; empty if equal."""


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
    """Bytes copied over PCIe, both ways, per micro-batch once warm: 2 (K - S) blocks and the head,
    divided by the number of micro-batches that go together, and 2 boundaries per recomputed layer
    if they are offloaded."""
    host_num_bytes: int
    """Host memory for the frozen base and offloaded boundaries."""
    vram_budget: int | None
    step_ms: float | None = None
    speeds: Speeds | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Batch size and sequence length of the step."""
    check_kernels: str = "peft"
    """Adapter kernels of the self-check's resident layers: PEFT's own modules keep more for
    backward, so ours are taken where PEFT's do not fit the budget."""
    replays: bool = False
    """Whether visits of layers are recorded and replayed, which takes memory of its own."""
    micro_batches: int = 1
    """Micro-batches that go through the blocks together."""
    shares_dense: bool = False
    """Whether these share the dense weights of a layer."""
    joins: bool = True
    """Whether micro-batches that go together are so short that their visits are joined."""
    dense_tokens: float = 0.0
    """Tokens of a micro-batch whose recomputation takes as long as what such sharing spares, once
    per pass; 0 if there is nothing to share."""

    @property
    def total_num_bytes(self) -> int:
        return sum(self.terms.values())

    def table(self) -> str:
        """Format the terms that are not zero, a line each, for errors."""
        rows = (f"  {name:<12} {size(each):>11}" for name, each in self.terms.items() if each)
        return "\n".join(rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``poros plan --json`` prints them."""
        nested = ("terms", "speeds", "options", "dense_tokens", "joins")
        return {
            "total_num_bytes": self.total_num_bytes,
            "terms": dict(self.terms),
            **{name: value for name, value in vars(self).items() if name not in nested},
            "copy_gb_per_s": self.speeds and self.speeds.copy_gb_per_s,
            "tflop_per_s": self.speeds and self.speeds.tflop_per_s,
            **self.options,
        }


def plan_for(shapes: Shapes, cost: StepCost, request: PlanRequest) -> MemoryPlan:
    """Choose slots, kept layers and offloading for a budget, or take those that are requested.

    Args:
        request: The step. Without a budget, fields that it leaves open get the least memory: two
            slots, nothing kept, nothing offloaded.

    Raises:
        PolicyError: If its optimizer is not known.
        VRAMBudgetError: If not even two slots fit; it names the floor and the terms.
    """
    for choice in _choices(shapes, cost, request):
        found = _fitting(shapes, cost, request, choice)
        if found is not None:
            return found
    raise VRAMBudgetError(_does_not_fit(least_plan(shapes, cost, request), request.budget or 0))


def least_plan(shapes: Shapes, cost: StepCost, request: PlanRequest) -> MemoryPlan:
    """Plan a step with the least memory that it can do with, whether that fits a budget or not."""
    choice = _choices(shapes, cost, request)[-1]
    formula, policy = _Formula(shapes, cost, request, choice), request.policy
    asked = policy.offload_boundaries
    plans = [
        formula.plan(policy.slots or MIN_SLOTS, policy.keep_last or 0, offload)
        for offload in ((False, True) if asked is None else (asked,))
    ]
    return min(plans, key=lambda plan: plan.total_num_bytes)


class _Choice(NamedTuple):
    """What a plan chooses beside slots and kept layers; see the fields of ``MemoryPlan``."""

    replays: bool
    check_kernels: str
    micro_batches: int
    shares_dense: bool


def _choices(shapes: Shapes, cost: StepCost, request: PlanRequest) -> list[_Choice]:
    """List the choices from the fastest to the one that needs the least memory."""
    return [
        _Choice(replays, kernels, together, shares)
        for replays in _recording(shapes, request)
        for kernels in (("peft", "fused") if request.self_check and cost.checked else ("peft",))
        for together in fewer(request.micro_batches)
        for shares in _sharing(shapes, request, together)
    ]


def _recording(shapes: Shapes, request: PlanRequest) -> tuple[bool, ...]:
    """List the choices of whether visits are recorded, the fastest first."""
    if request.policy.cuda_graphs is not None:
        return (request.policy.cuda_graphs,)
    flop = 2 * request.batch_size * request.seq_len * shapes.num_linear_parameters
    pays = flop <= MOST_FLOP * len(shapes.layers)
    return (True, False) if pays and not request.without_recordings else (False,)


def _sharing(shapes: Shapes, request: PlanRequest, together: int) -> tuple[bool, ...]:
    """List the choices of whether micro-batches share dense weights, the fastest first."""
    if together == 1 or request.policy.adapter_kernels == "peft" or not shapes.dense_layer:
        return (False,)
    return (True, False) if request.policy.share_dense is None else (request.policy.share_dense,)


def fewer(number: int) -> Iterator[int]:
    """Yield ``number``, half of it, and so on down to 1."""
    while number > 1:
        yield number
        number = -(-number // 2)
    yield 1


def _fitting(
    shapes: Shapes, cost: StepCost, request: PlanRequest, choice: _Choice
) -> MemoryPlan | None:
    """Plan a step with the most room that fits the budget; None if not even the least does."""
    formula = _Formula(shapes, cost, request, choice)
    budget, num_blocks = request.budget, len(formula.blocks)
    least = min(MIN_SLOTS, num_blocks)
    slots, kept = request.policy.slots or least, request.policy.keep_last or 0
    offload = bool(request.policy.offload_boundaries)
    if budget is None:
        return formula.plan(slots, kept, offload)

    def fits(slots: int, kept: int) -> bool:
        return formula.plan(slots, kept, offload).total_num_bytes <= budget

    if request.policy.offload_boundaries is None and not fits(slots, kept):
        offload = True
    if request.policy.slots is None:
        slots = _most(least, num_blocks, lambda number: fits(number, kept))
    if request.policy.keep_last is None and slots == num_blocks:
        kept = _most(0, len(shapes.layers), lambda number: fits(slots, number))
    return formula.plan(slots, kept, offload) if fits(slots, kept) else None


class _Formula:
    """Plans of one model and one micro-batch."""

    def __init__(
        self, shapes: Shapes, cost: StepCost, request: PlanRequest, choice: _Choice
    ) -> None:
        self.shapes, self.cost, self.request, self.choice = shapes, cost, request, choice
        self.together = choice.micro_batches
        self.joins = self.together * cost.boundary <= MOST_JOINED
        self.checked = (choice.check_kernels == "peft" and cost.checked) or cost.layers
        self.optimizer = optimizer_cost(request, shapes.adapter_sizes)
        # Where visits might be recorded, but are not.
        has_workspace = request.policy.cuda_graphs is None and not choice.replays
        self.dense_weight = shapes.dense_weight if has_workspace else 0
        shares = any(_sharing(shapes, request, 2))
        self.dense_tokens = (request.speeds or Speeds).dense_tokens if shares else 0.0
        self.num_layers, size = len(shapes.layers), request.policy.block_size
        starts = range(0, self.num_layers, size)
        self.blocks = [BlockLayout.join(shapes.layers[first : first + size]) for first in starts]
        outside = shapes.adapters - sum(shapes.layer_adapters)
        backwards = accumulate(reversed(shapes.layer_adapters), initial=outside)
        # Of trained parts outside the layers most are in the head, whose backward is first.
        self.gradients_above = list(backwards)[:-1][::-1]

    def plan(self, num_slots: int, keep_last: int, offload: bool) -> MemoryPlan:
        """Plan with these numbers; ``num_slots`` and ``keep_last`` are rounded as in a run."""
        shapes, request = self.shapes, self.request
        found = divide(self.num_layers, request.policy.block_size, num_slots, keep_last)
        ring, pinned = self.blocks[: found.num_streamed], self.blocks[found.num_streamed :]
        first_kept = found.num_recomputed
        on_host: Counter[str] = Counter()
        for term, num_bytes in shapes.on_host:
            on_host[term] += num_bytes * stays_on_host(num_bytes, request.policy.stream_embedding)
        head = self._streamed_head()
        if head is not None and head.is_tied:
            on_host["embedding"] = head.matrix
        elif head is not None:
            on_host["head"] = head.matrix
        buffers = travelling = 0
        if head is not None:
            # Once every block has a slot, the head has a place too, but for one that must not.
            has_all = found.ring_slots + found.num_pinned >= len(self.blocks)
            travelling = head.matrix * (not has_all or bool(request.policy.stream_head))
            buffers = head.buffers + head.matrix - travelling
        peak = max(self._later_step(first_kept, offload), key=sum)
        terms = {
            "slots": sum(slot_sizes(ring, found.ring_slots)) if ring else 0,
            "kept blocks": sum(block.num_bytes for block in pinned),
            "adapters": shapes.adapters,
            "optimizer": self.optimizer.state,
            **dict(zip(_COMING_AND_GOING, peak, strict=True)),
            "embedding": shapes.embedding - on_host["embedding"],
            "head": shapes.head - on_host["head"] + buffers,
            **({"vision": shapes.vision} if shapes.vision else {}),
            "other": shapes.other - on_host["other"],
            "inputs": self.together * (self.cost.inputs + self.cost.shared),
            "recordings": self._recordings(first_kept) if self.choice.replays else 0,
            "copies": self._copies(first_kept) if self.choice.replays else 0,
            "dense layer": shapes.dense_layer if self.choice.shares_dense else 0,
            "dense weight": self.dense_weight,
            "libraries": request.libraries,
        }
        if request.self_check:
            # Nothing is recorded yet when the first step is checked.
            later = self.optimizer.state + sum(peak) + terms["recordings"] + terms["copies"]
            terms["self-check"] = max(0, *self._first_step(first_kept, offload), later) - later
        # At the turn the last blocks are in the slots, at the next step's start the first ones.
        loaded = [block.num_bytes for block in ring]
        forward = (sum(loaded[found.ring_slots :]) + travelling) // self.together
        backward = sum(loaded[: len(loaded) - found.ring_slots]) // self.together
        boundaries = first_kept * self.cost.boundary if offload else 0
        return MemoryPlan(
            terms=terms,
            num_slots=found.ring_slots + found.num_pinned,
            keep_last=found.keep_last,
            offload_boundaries=offload,
            num_blocks=len(self.blocks),
            block_size=request.policy.block_size,
            num_adapter_parameters=shapes.num_adapter_parameters,
            bytes_per_step=forward + backward + 2 * boundaries,
            host_num_bytes=sum(block.num_bytes for block in self.blocks)
            + on_host.total()
            + self.together * boundaries,
            vram_budget=request.budget,
            # Boundaries leave against the direction of the blocks and come back with it.
            step_ms=self._step_ms(max(forward, boundaries), backward + boundaries, first_kept),
            speeds=request.speeds,
            options={"batch_size": request.batch_size, "seq_len": request.seq_len},
            joins=self.joins,
            dense_tokens=self.dense_tokens,
            **self.choice._asdict(),
        )

    def _recordings(self, first_kept: int) -> int:
        """Count what recordings hold at all times: the computation of one layer, workspaces.

        Recordings of layers that keep their graph also hold copies of their inputs; their graphs
        are counted as kept graphs.
        """
        inputs = self.together * len(self.cost.layers[first_kept:]) * self.cost.boundary
        return inputs + self._recorded_layer

    @property
    def _recorded_layer(self) -> int:
        largest = max((layer.peak for layer in self.cost.layers), default=0)
        return largest + self.request.libraries

    def _copies(self, first_kept: int) -> int:
        """Count what visits take besides, once they are joined.

        Every other micro-batch is replayed by a recording of its own, in whose memory the graph of
        one is, as of one in the other's. If the longest ones are too long to be joined, none are
        (``Sizer.joins``). Two graphs of a layer change places by way of a third.
        """
        if self.together == 1:
            return 0
        kept = self.cost.layers[first_kept:]
        graph = max((layer.saved + self.cost.boundary for layer in kept), default=0)
        return graph + (self._recorded_layer if self.joins else 0)

    def _streamed_head(self) -> SlicedHead | None:
        """The head, if its bytes are in host memory and it is read in slices."""
        head, wanted = self.shapes.sliced_head, self.request.policy.stream_head
        if head is None or self.request.policy.loss != "chunked":
            return None
        return head if stays_on_host(head.matrix, wanted) else None

    def _boundaries(self, num_inputs: int, offload: bool) -> int:
        """Return the bytes of so many layers' inputs on the device.

        Each of the micro-batches that go together, but one, waits with one tensor more: the last
        layer's result, or a gradient.
        """
        num_waiting = self.together - 1
        num_there = min(num_inputs * self.together, 2) if offload else num_inputs * self.together
        return (num_there + num_waiting) * self.cost.boundary

    def _later_step(self, first_kept: int, offload: bool) -> Iterator[tuple[int, int, int, int]]:
        """Return the temporary bytes of a step at each moment that may be the largest."""
        adapters, cost = self.shapes.adapters, self.cost
        sizes = (layer.saved + layer.kept_input for layer in cost.layers[first_kept:])
        graphs = list(accumulate((self.together * size for size in sizes), initial=0))
        # Gradients are there from the first micro-batch on, layer by layer from the last.
        before = adapters if self.request.accumulation > 1 else 0
        # Ahead of losses that share the head's slices: hidden states, and their sums in float32.
        shares_head = self.together > 1 and self._streamed_head() is not None
        ahead = 3 * cost.boundary * self.together * shares_head
        # Copies of the graphs of micro-batches that go together stay.
        copies = graphs[-1] if self.together > 1 and self.choice.replays else 0
        yield before, self._boundaries(first_kept, offload), graphs[-1], cost.loss_peak + ahead
        yield adapters, 0, copies, self.optimizer.temporaries
        for index, layer in enumerate(cost.layers):
            gradients = before or self.gradients_above[index]
            boundaries = self._boundaries(min(index + 1, first_kept), offload)
            workspace = layer.peak - layer.dense if self.dense_weight else layer.peak
            if index < first_kept:
                yield gradients, boundaries, copies, workspace
            else:
                # Its output went with the graph of the layer behind it.
                workspace -= layer.saved + cost.boundary
                there = max(copies, graphs[index - first_kept + 1])
                yield gradients, boundaries, there, workspace

    def _first_step(self, first_kept: int, offload: bool) -> Iterator[int]:
        """Return the same while a layer is checked, without the optimizer's."""
        kept = 0
        for index, layer in enumerate(self.checked):
            if index >= first_kept:  # checked behind its forward, above the graphs before it
                own = self.cost.layers[index]
                kept += self.together * (own.saved + own.kept_input)
            yield (
                (self.gradients_above[index] if index < first_kept else kept)
                + self._boundaries(min(index + 1, first_kept), offload)
                + layer.peak
                + self.blocks[index // self.request.policy.block_size].num_bytes
                # Its output, and the gradients that the streamed backward has given: for its
                # input those of the residual path and of the norm, apart.
                + 3 * self.cost.boundary
                + self.shapes.layer_adapters[index]
            )

    def _step_ms(self, forward_wire: int, backward_wire: int, first_kept: int) -> float | None:
        speeds = self.request.speeds
        if speeds is None:
            return None
        num_tokens = self.cost.inputs / 16  # tokens and labels, 8 bytes each
        products = 2 * num_tokens * self.shapes.num_linear_parameters / self.num_layers
        head = 2 * num_tokens * self.shapes.num_head_parameters
        # The part of a product's time that goes into a dense weight. Micro-batches that share these
        # make them once in forward and once in backward, for recomputations and gradients.
        dense = products * speeds.dense_tokens / (speeds.dense_tokens + 2 * num_tokens)
        dense *= self.choice.shares_dense
        once = products - dense * (1 - 1 / self.together)
        forward = [once + layer.attention_flop for layer in self.cost.layers]
        # Frozen weights need no gradient: one product each. Of attention it is five, forward two.
        backward = [products - dense + 2.5 * layer.attention_flop for layer in self.cost.layers]
        is_copied = self.together > 1 and self.choice.replays
        recomputed = sum(forward[:first_kept])
        recomputed += (1 - SAVED_TOGETHER) * is_copied * sum(forward[first_kept:])
        per_flop = 1e-9 / speeds.tflop_per_s
        flop = (sum(forward) + head, sum(backward) + recomputed + head)
        compute = (per_flop * number for number in flop)
        wires = (size / speeds.copy_gb_per_s / 1e6 for size in (forward_wire, backward_wire))
        return sum(map(max, wires, compute))


def _most(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Find the largest number between two for which ``fits``; the least if none."""
    return least + bisect_left(range(least + 1, most + 1), True, key=lambda each: not fits(each))


def _does_not_fit(plan: MemoryPlan, budget: int) -> str:
    offloaded = ", boundaries in host memory" if plan.offload_boundaries else ""
    return (
        f"vram_budget: expected at least {size(plan.total_num_bytes)}, the floor for "
        f"{plan.num_slots} slots{offloaded}, found {size(budget)}; "
        f"{size(plan.total_num_bytes - budget)} are missing:\n{plan.table()}"
    )
