"""What a step holds in memory, found by running it on paper: operators on the meta device.

Storages are counted as operators make them and as the last tensor over them goes, so the peak is
that of PyTorch's own allocations for the same calls. Two things differ from a real device and are
put right: attention is written down as the fused kernels have it (inputs, output and one float32
per row are kept, no score matrix exists), and a 4-bit product dequantizes its weight inside one
operator.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class LayerCost:
    """Bytes of one decoder layer on one micro-batch."""

    saved: int
    """Kept between its forward and its backward if it is not recomputed, without its input."""
    peak: int
    """At most, in forward or backward, above its input and its result's gradient."""


@dataclass(frozen=True)
class StepCost:
    """Bytes of one micro-batch of a model."""

    layers: Sequence[LayerCost]
    boundary: int
    """One layer's input."""
    shared: int
    """What layers are given besides: masks, rotary embeddings."""
    loss_peak: int
    """Of final norm, head and loss, forward and backward."""
    inputs: int


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators make, while they live.

    Attributes:
        now: At this moment.
        peak: At most, since the beginning or ``mark``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def mark(self) -> int:
        """Forget the peak; the bytes now."""
        self.peak = self.now
        return self.now

    def know(self, *tensors: torch.Tensor) -> None:
        """Leave storages that are there already out of account."""
        for tensor in tensors:
            self._note(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # whether all of a mask is set, whether positions follow each other
        hidden = _dequantized_inside(func, args)
        self.peak = max(self.peak, self.now + hidden)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._note(each, each.untyped_storage().nbytes())
        return result

    def _note(self, tensor: torch.Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


class FusedAttention(TorchFunctionMode):
    """Writes attention down as fused kernels have it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            return _Attention.apply(query, key, value)
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, rows = ctx.saved_tensors
        torch.empty_like(rows)  # the row sums of gradient times output
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def step_cost(
    model: nn.Module, layers: Sequence[nn.Module], batch_size: int, seq_len: int
) -> StepCost:
    """Run one micro-batch of ``model`` on paper.

    Args:
        model: On the meta device, with adapters, and ready to train.
        layers: Its decoder layers.
        batch_size: Rows.
        seq_len: Tokens per row; every row is full.
    """
    tokens = torch.empty((batch_size, seq_len), dtype=torch.long, device="meta")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    live = LiveBytes()
    marks: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        """Drop the layer's graph; what follows the last one is counted from here."""
        if module is layers[-1]:
            marks.append(live.mark())
        return _detached(output)

    handles = [each.register_forward_pre_hook(note, with_kwargs=True) for each in layers]
    handles += [each.register_forward_hook(cut) for each in layers]
    try:
        with FusedAttention(), live:
            live.know(tokens, *model.parameters(), *model.buffers())
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    for parameter in model.parameters():
        parameter.grad = None
    costs: dict[object, LayerCost] = {}
    found = []
    for layer, call in zip(layers, calls, strict=True):
        kind = _kind(layer, call)
        if kind not in costs:
            costs[kind] = _layer_cost(layer, *call)
        found.append(costs[kind])
    # The last layer's graph was still there when the mark was set.
    loss_peak = live.peak - (marks[0] - found[-1].saved)
    hidden = calls[0][0][0]
    others = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for args, kwargs in calls
        for each in tree_leaves((args[1:], kwargs))
        if isinstance(each, torch.Tensor)
    }
    return StepCost(
        layers=found,
        boundary=_num_bytes(hidden),
        shared=sum(others.values()),
        loss_peak=loss_peak,
        inputs=2 * _num_bytes(tokens),
    )


def _layer_cost(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCost:
    """One layer alone, forward and backward."""
    hidden = args[0].detach().requires_grad_()
    trained = [each for each in layer.parameters() if each.requires_grad]
    live = LiveBytes()
    with FusedAttention(), live:
        live.know(hidden, *layer.parameters(), *layer.buffers())
        live.know(*(e for e in tree_leaves((args, kwargs)) if isinstance(e, torch.Tensor)))
        output = layer(hidden, *args[1:], **kwargs)
        ends = [e for e in tree_leaves(output) if isinstance(e, torch.Tensor) and e.requires_grad]
        results = sum(_num_bytes(each) for each in ends)
        saved = live.now - results
        starts = [torch.empty_like(each) for each in ends]
        given = sum(_num_bytes(each) for each in starts)
        gradients = torch.autograd.grad(ends, [hidden, *trained], starts, allow_unused=True)
        del gradients
    return LayerCost(saved=saved, peak=live.peak - given)


def _kind(layer: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[object, ...]:
    """Equal for layers that cost the same."""
    shapes = tuple(
        (name, each.shape, each.requires_grad) for name, each in layer.named_parameters()
    )
    return (type(layer), getattr(layer, "layer_type", None), shapes, len(call[0]))


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, tuple):
        return tuple(map(_detached, value))
    return value


def _dequantized_inside(func: Any, args: Sequence[Any]) -> int:
    """Bytes of the dense weight that a 4-bit product makes for itself."""
    if func.namespace != "bitsandbytes" or not func._opname.startswith("gemm_4bit"):
        return 0
    shape = next(each for each in args if isinstance(each, list | tuple | torch.Size))
    num_elements = 1
    for size in shape:
        num_elements *= size
    return num_elements * args[0].element_size()


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
