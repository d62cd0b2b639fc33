"""Measures what a step holds in memory by running its operators on the meta device.

Storages are counted as operators make them and as the last tensor over them goes, so the peak is
that of PyTorch's own allocations for the same calls. Three things differ from a GPU and are put
right: attention is counted as fused kernels have it (inputs, output and one float32 per
row are kept, no score matrix exists), dropout keeps one byte per element, and a 4-bit product
dequantizes its weight inside one operator.
"""

import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils.output_capturing import _active_collector

from poros.head.choice import find_head
from poros.head.takeover import slice_loss
from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import unpatch, use_others
from poros.kernels.packed_attention import attention_of, takes_cu_seqlens
from poros.kernels.use import patch
from poros.model.inspect import find_layers
from poros.model.vision import base_of
from poros.planning.formula import LayerCost, MemoryPlan, StepCost, least_plan, plan_for
from poros.planning.meta_model import Recipe, shapes_of
from poros.planning.request import PlanRequest


class CostModel:
    """A model on the meta device, its decoder layers and sizes, and its costs, once per shape."""

    def __init__(self, recipe: Recipe) -> None:
        self.model = recipe.make()
        base = base_of(self.model)
        if takes_cu_seqlens(attention_of(base)):
            base.set_attn_implementation("sdpa")  # whose memory is theirs, without documents
        self.shapes = shapes_of(self.model)
        _, self.layers = find_layers(self.model)
        self._costs: dict[tuple[int, int, str, str, str, bool], StepCost] = {}

    def plan(self, request: PlanRequest) -> MemoryPlan:
        """Plan a step; the errors are those of ``cost`` and ``formula.plan_for``."""
        return plan_for(self.shapes, self.cost(request), request)

    def least(self, request: PlanRequest) -> MemoryPlan:
        """Plan a step with the least memory, whether that fits its budget or not."""
        return least_plan(self.shapes, self.cost(request), request)

    def cost(self, request: PlanRequest) -> StepCost:
        """Compute the cost of one micro-batch of a requested step."""
        found = self._cost(request)
        if request.self_check and request.policy.adapter_kernels != "peft":
            found = replace(found, checked=self._cost(request, is_check=True).layers)
        return found

    def _cost(self, request: PlanRequest, is_check: bool = False) -> StepCost:
        """Return the cost with a policy's kernels, or with those of its self-check."""
        batch_size, seq_len, policy = request.batch_size, request.seq_len, request.policy
        loss, kernels, lora_paths = policy.loss, policy.adapter_kernels, policy.lora_paths
        key = batch_size, seq_len, loss, kernels, lora_paths, is_check
        if key not in self._costs:
            with (
                _loss_as(loss, self.model),
                adapter_kernels_as(kernels, self.layers, is_check, lora_paths),
            ):
                self._costs[key] = step_cost(self.model, self.layers, batch_size, seq_len)
        return self._costs[key]


@contextmanager
def _loss_as(loss: str, model: Any) -> Iterator[None]:
    """Compute the loss of ``model`` inside the body as the policy ``loss`` does."""
    base = base_of(model)
    head, _ = find_head(model, base, loss, False)
    undo = None if head is None else slice_loss(base, head.module)
    try:
        yield
    finally:
        if undo is not None:
            undo()


@contextmanager
def adapter_kernels_as(
    kernels: str, layers: Sequence[nn.Module], is_check: bool = False, lora_paths: str = "peft"
) -> Iterator[None]:
    """Run adapters in ``layers`` inside the body as a policy does, or as its reference does."""
    try:
        if kernels != "peft":
            tally = KernelStats(kernels, lora_paths)
            for layer in layers:
                patch(layer, torch.device("meta"), tally)
                if is_check:
                    use_others(layer.modules(), are_own=True)
        yield
    finally:
        for layer in layers:
            unpatch(layer.modules())


class FusedKernels(TorchFunctionMode):
    """Replaces attention and dropout by operators with the memory of a GPU's kernels.

    Attributes:
        attention_flop: Floating-point operations of attention so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_flop = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            # Scores and their product with the values; a causal kernel leaves half of both out.
            num_scores = query.shape[:-1].numel() * key.shape[-2]
            flop = 2 * num_scores * (query.shape[-1] + value.shape[-1])
            self.attention_flop += flop // 2 if (kwargs or {}).get("is_causal") else flop
            return _Attention.apply(query, key, value)
        is_grouped = func is nn.functional.grouped_mm and args[1].dim() == 3
        if is_grouped and args[0].dtype != torch.bfloat16:
            # A GPU takes other dtypes too, the meta device does not.
            return _Grouped.apply(args[0], args[1])
        if func is nn.functional.dropout:
            return _dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    return torch.native_dropout(input, p, train=True)[0] if p and training else input


class _Grouped(torch.autograd.Function):
    """Products of the rows of each expert with its matrix."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        of_rows, of_matrices = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_matrices else None, matrices if of_rows else None)
        ctx.forms = rows.shape, matrices.shape
        return rows.new_empty((len(rows), matrices.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            gradients[0].new_empty(form) if is_needed else None
            for form, is_needed in zip(ctx.forms, ctx.needs_input_grad, strict=True)
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        *batch, heads, length, _ = query.shape
        # Kernels lay the heads of a token side by side, as the projection behind them wants it.
        output = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-2, -3)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, rows = ctx.saved_tensors
        torch.empty_like(rows)  # the row sums of gradient times output
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of the storages that operators make.

    Attributes:
        now: Live bytes at this moment.
        peak: Largest value of ``now`` so far; may be reset to ``now``.
        peak_beside: Largest value so far without dequantized 4-bit weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.peak_beside = 0
        self._dense = 0
        self._known: set[int] = set()

    def know(self, *tensors: torch.Tensor) -> None:
        """Exclude storages that exist already."""
        for tensor in tensors:
            self._note(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # whether all of a mask is set, whether positions follow each other
        if func is torch.ops.aten.bincount.default and args[0].is_meta:
            # Tokens per expert, counted by older transformers; the meta device has no such kernel.
            num_bins = args[2] if len(args) > 2 else (kwargs or {}).get("minlength", 0)
            result = args[0].new_empty((num_bins,))
        else:
            self.peak = max(self.peak, self.now + _dequantized_inside(func, args))
            result = func(*args, **(kwargs or {}))
        is_dense = _is_of_bitsandbytes(func, "dequantize_4bit")
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            self._note(storage, storage.nbytes(), is_dense)
        return result

    def _note(self, storage: torch.UntypedStorage, num_bytes: int, is_dense: bool = False) -> None:
        key = storage._cdata
        # Forgotten as it goes: the next storage may lie at its address.
        if key not in self._known:
            self._known.add(key)
            self.now += num_bytes
            self._dense += num_bytes * is_dense
            self.peak = max(self.peak, self.now)
            self.peak_beside = max(self.peak_beside, self.now - self._dense)
            weakref.finalize(storage, self._forget, key, num_bytes, is_dense)

    def _forget(self, key: int, num_bytes: int, is_dense: bool) -> None:
        self._known.discard(key)
        self.now -= num_bytes
        self._dense -= num_bytes * is_dense


@contextmanager
def _without_watchers() -> Iterator[None]:
    """Switch off global module hooks and anomaly mode inside the body."""
    tables = [
        table
        for name, table in vars(nn.modules.module).items()
        if name.startswith("_global_") and name.endswith("_hooks")
    ]
    held = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        for table, hooks in zip(tables, held, strict=True):
            table.update(hooks)


@_without_watchers()
def step_cost(
    model: nn.Module, layers: Sequence[nn.Module], batch_size: int, seq_len: int
) -> StepCost:
    """Run one micro-batch of full rows on the meta device: a fraction of a second at any depth.

    Layers that cost the same are run once; the others pass on a tensor like their input.
    """
    tokens = torch.empty((batch_size, seq_len), dtype=torch.long, device="meta")
    walk = Walk(layers)
    walk.run(model, tokens)
    boundary = walk.inputs[0].nbytes
    return StepCost(
        layers=walk.costs,
        boundary=boundary,
        shared=sum(storage.nbytes() for storage in walk.shared.values()),
        loss_peak=walk.live.peak - walk.num_bytes + boundary,
        inputs=2 * tokens.nbytes,
    )


class Walk:
    """One micro-batch through a model on the meta device.

    Each layer drops its graph. A layer is skipped if one like it has run and it passes on nothing
    but its output.

    Attributes:
        costs: The cost of each layer.
        inputs: The input of each layer, kept until the loss is gone.
        shared: Storages of other inputs of layers, by their ids; kept, so that these stay theirs.
        live: Counts the bytes of the micro-batch.
        num_bytes: Live bytes after the last layer; the peak of ``live`` is reset there.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.costs: list[LayerCost] = []
        self.inputs: list[torch.Tensor] = []
        self.shared: dict[int, torch.UntypedStorage] = {}
        self.live = LiveBytes()
        self.num_bytes = 0
        self._layers = layers
        self._known: dict[object, LayerCost] = {}
        self._have_run: set[object] = set()

    def run(self, model: nn.Module, tokens: torch.Tensor) -> None:
        """Run forward and backward, labels included; without a head for tokens, of the output."""
        with FusedKernels(), _folding_without_autocast(), self.live, self._taking_over():
            self.live.know(tokens, *model.parameters(), *model.buffers())
            if base_of(model).get_output_embeddings() is not None:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            else:
                loss = model(input_ids=tokens, use_cache=False)[0].float().sum()
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    @contextmanager
    def _taking_over(self) -> Iterator[None]:
        """Run layers by ``_run`` inside the body."""

        def mark(module: nn.Module, args: Any, output: Any) -> None:
            self.num_bytes = self.live.peak = self.live.now

        handle = self._layers[-1].register_forward_hook(mark)
        try:
            for layer in self._layers:
                layer.forward = partial(self._run, layer, layer.forward)
            yield
        finally:
            handle.remove()
            for layer in self._layers:
                del layer.forward

    def _run(
        self, layer: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        kind = _kind(layer, args, kwargs)
        if kind not in self._known:
            self._known[kind] = layer_cost(layer, forward, args, kwargs)
        self.costs.append(self._known[kind])
        self.inputs.append(args[0])
        for tensor in _tensors_in((args[1:], kwargs)):
            storage = tensor.untyped_storage()
            self.shared[storage._cdata] = storage
        if kind in self._have_run and not _has_side_channels(kwargs):
            return torch.empty_like(args[0], requires_grad=True)
        output = _detached(forward(*args, **kwargs))
        if isinstance(output, torch.Tensor) and output.shape == args[0].shape:
            self._have_run.add(kind)
        return output


def _has_side_channels(kwargs: dict[str, Any]) -> bool:
    """Whether layers exchange data beside their results."""
    is_shared = any(isinstance(value, UserDict) for value in kwargs.values())
    return is_shared or bool(_active_collector.get())


def layer_cost(
    layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LayerCost:
    """Run one layer's ``forward`` alone, and its backward; nothing is recorded of it aside."""
    hidden = args[0].detach().requires_grad_()
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    live = LiveBytes()
    kept: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage()._cdata)
        return tensor

    token = _active_collector.set(None)
    with FusedKernels() as kernels, _folding_without_autocast(), live:
        live.know(hidden, *layer.parameters(), *layer.buffers(), *_tensors_in((args, kwargs)))
        # It has arrived before the layer is recomputed.
        gradient = torch.empty_like(hidden)
        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = forward(hidden, *args[1:], **kwargs)
        ends = [tensor for tensor in _tensors_in(output) if tensor.requires_grad]
        saved = live.now - sum(each.nbytes for each in (gradient, *ends))
        starts = [gradient if e.shape == gradient.shape else torch.empty_like(e) for e in ends]
        gradients = torch.autograd.grad(ends, [hidden, *trained], starts, allow_unused=True)
        del gradients
    _active_collector.reset(token)
    is_kept = hidden.untyped_storage()._cdata in kept
    dense = live.peak - live.peak_beside
    return LayerCost(saved, hidden.nbytes * is_kept, live.peak, kernels.attention_flop, dense)


def _kind(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """Return a key that is equal for calls of equal cost."""
    shapes = tuple(
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in layer.named_parameters()
    )
    given = tuple(tensor.shape for tensor in _tensors_in((args, kwargs)))
    return (type(layer), getattr(layer, "layer_type", None), shapes, len(args), given)


@contextmanager
def _folding_without_autocast() -> Iterator[None]:
    """Let PEFT merge adapters into fused experts that have no memory.

    PEFT switches autocast off for the tensor's device, which PyTorch refuses for the meta device.
    Tensors on other devices, in any thread, are not affected.
    """
    from peft.tuners.lora import layer

    proxy: Any = getattr(layer, "_LoraFactorsProxy", None)
    if proxy is None:
        yield
        return
    forward = proxy.forward

    def fold(self: Any, weight: torch.Tensor) -> Any:
        if not weight.is_meta:
            return forward(self, weight)
        return torch.baddbmm(weight, self.lhs, self.rhs, alpha=self.scaling)

    proxy.forward = fold
    try:
        yield
    finally:
        proxy.forward = forward


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, tuple):
        return tuple(map(_detached, value))
    return value


def _dequantized_inside(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of the dense weight that a 4-bit product allocates."""
    if not _is_of_bitsandbytes(func, "gemm_4bit"):
        return 0
    shape = next(value for value in args if isinstance(value, list | tuple | torch.Size))
    return prod(shape) * int(args[0].element_size())


def _is_of_bitsandbytes(func: Any, name: str) -> bool:
    return bool(func.namespace == "bitsandbytes" and func._opname.startswith(name))


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
