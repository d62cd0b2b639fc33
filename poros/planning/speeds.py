"""Measures the two rates from which ``poros.plan`` forecasts the time of a step.

Both are measured as a step meets them: a copy from a slab of the host store on the copy stream,
and the largest linear layer of the model's blocks, forward and backward to its input.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from poros.cuda_streams import streams_for
from poros.errors import UnsupportedModelError
from poros.host.layout import BlockLayout
from poros.host.slab import HostSlab
from poros.kernels.nf4 import Format
from poros.planning.request import Speeds
from poros.streams import StreamContext, gb_per_s
from poros.utils.devices import usable_device

logger = logging.getLogger(__name__)

COPY_NUM_BYTES = 2**28
"""Of one copy: enough that starting it takes no time in comparison."""
_NUM_RUNS = 7


def measure_speeds(
    layers: Iterable[nn.Module],
    num_tokens: int,
    device: torch.device | str | None = None,
    *,
    copy_num_bytes: int = COPY_NUM_BYTES,
) -> Speeds:
    """Measure how fast this machine copies and multiplies: medians of several runs.

    Args:
        layers: A model's decoder layers; only shapes and dtypes are read, so the meta device will
            do.
        num_tokens: In a micro-batch.
        device: Where to measure; None is the current CUDA device. On a CPU a copy is one within
            host memory.
        copy_num_bytes: Of one copy.

    Streams:
        Blocks the host until each run is done. Needs ``copy_num_bytes`` and one dense linear layer
        of device memory, and gives them back.

    Raises:
        PolicyError: If there is no such device.
        UnsupportedModelError: If the layers have no linear layer.
    """
    usable = usable_device(
        "cuda" if device is None else device,
        expected=f"a {'CUDA ' if device is None else ''}device to measure on",
        remedy="; measure on the machine that has it, or with device 'cpu'",
    )
    streams = streams_for(usable)
    return Speeds(
        copy_gb_per_s=gb_per_s(copy_num_bytes, _copy_ms(streams, copy_num_bytes)),
        tflop_per_s=_tflop_per_s(streams, _largest_linear(layers), num_tokens),
    )


def _copy_ms(streams: StreamContext, num_bytes: int) -> float:
    slab = HostSlab(BlockLayout((), num_bytes))
    slab.bytes.fill_(1)  # memory that nobody has written to is not there yet
    if streams.device.type == "cuda" and not slab.pin(streams.device):
        logger.warning("poros: the driver refused page-locked memory; copying from pageable memory")
    target = streams.allocate(num_bytes)
    try:
        return _median_ms(
            streams, lambda: streams.wait(streams.copy(target, slab.bytes, after=streams.record()))
        )
    finally:
        slab.unpin()


def _tflop_per_s(streams: StreamContext, like: Any, num_tokens: int) -> float:
    """Measure a layer of this shape, forward and backward to its input."""
    linear, dtype = _twin(like, streams.device)
    hidden = torch.randn(num_tokens, like.in_features, device=streams.device).to(dtype)
    hidden.requires_grad_()

    def run() -> None:
        output = linear(hidden)
        torch.autograd.grad(output, hidden, torch.ones_like(output))

    num_operations = 2 * 2 * num_tokens * like.in_features * like.out_features
    return num_operations / _median_ms(streams, run) / 1e9


def _median_ms(streams: StreamContext, run: Callable[[], None]) -> float:
    times = []
    for _ in range(_NUM_RUNS + 2):
        streams.synchronize(streams.record())
        begin = time.perf_counter()
        run()
        streams.synchronize(streams.record())
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])  # the first ones warm up


def _largest_linear(layers: Iterable[nn.Module]) -> Any:
    """Find the largest linear layer of the base: adapters are far smaller."""
    modules: list[Any] = [module for layer in layers for module in layer.modules()]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    largest: Any = max(linears, key=lambda each: each.in_features * each.out_features, default=None)
    if largest is None or not largest.in_features * largest.out_features:
        raise UnsupportedModelError(
            "expected linear layers in the decoder's blocks to measure, found none; give the rates "
            "as they are known"
        )
    return largest


def _twin(like: Any, device: torch.device) -> tuple[nn.Module, torch.dtype]:
    """Make a layer of the same shape with random weights; return it with its input dtype."""
    from bitsandbytes.nn import Linear4bit

    dtype = like.compute_dtype if isinstance(like, Linear4bit) else like.weight.dtype
    weight = torch.randn(like.out_features, like.in_features, device=device).mul_(0.02).to(dtype)
    if not isinstance(like, Linear4bit):
        made = nn.Linear(1, 1, bias=False)
        made.weight = nn.Parameter(weight, requires_grad=False)
        return made, dtype
    packed = Linear4bit(1, 1, bias=False, compute_dtype=dtype, quant_type=like.weight.quant_type)
    packed.weight = Format.of(like.weight).weight(weight, None, packed).to(device)
    return packed, dtype
