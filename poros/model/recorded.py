"""Makes what recorded visits and shared dense weights need."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from poros.config import StreamingPolicy
from poros.kernels.dense_memory import DenseLayer, DenseWorkspace
from poros.kernels.nf4 import num_weights
from poros.replay.captures import Captures
from poros.replay.graphs import MOST_FLOP, CudaRecorder, Recorder
from poros.stream.frozen import FrozenTensor


def captures_for(
    policy: StreamingPolicy,
    device: torch.device,
    recorder: Recorder | None,
    blocks: Iterable[Sequence[FrozenTensor]],
) -> Captures | None:
    """Make the empty recordings of a model; None if no visit is recorded.

    Args:
        recorder: Records; None for the device's own, if it has one.
    """
    if policy.cuda_graphs is False:
        return None
    if recorder is None and device.type == "cuda":
        recorder = CudaRecorder(device)
    if recorder is None:
        return None
    if policy.cuda_graphs:
        return Captures(recorder, device, is_strict=policy.self_check == "strict")
    most_tokens = MOST_FLOP / (2 * max(1, _most_parameters(blocks)))
    return Captures(recorder, device, most_tokens=most_tokens)


def workspace_for(
    policy: StreamingPolicy, device: torch.device, blocks: Iterable[Sequence[FrozenTensor]]
) -> DenseWorkspace | None:
    """Make the memory in which visits, recorded or not, dequantize one 4-bit weight at a time."""
    if policy.cuda_graphs is False or device.type != "cuda":
        return None
    largest = max((each.dense_num_bytes for block in blocks for each in block), default=0)
    return DenseWorkspace(largest, device) if largest else None


def dense_layer_for(policy: StreamingPolicy, device: torch.device) -> DenseLayer | None:
    """Make the owner of a layer's dequantized weights, which several calls share; empty yet."""
    wanted = device.type == "cuda" if policy.share_dense is None else policy.share_dense
    return DenseLayer(device) if wanted and policy.adapter_kernels != "peft" else None


def _most_parameters(blocks: Iterable[Sequence[FrozenTensor]]) -> int:
    """Return the most elements of one layer's matrices."""
    counts: Counter[int] = Counter()
    for frozen in chain.from_iterable(blocks):
        for layer in {layer for layer, *_ in frozen.places}:
            counts[layer] += num_weights(frozen.tensor)
    return max(counts.values(), default=0)
