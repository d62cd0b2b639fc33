"""What a recomputed layer takes at a length, term by term: from shapes alone, without a GPU.

    python -m benchmarks.layer qwen2.5-32b --seq 32768

Runs one decoder layer with LoRA on the meta device, as a plan does, and lists what autograd keeps
of it until its backward, by the module in whose forward it was saved. What several keep counts
once, for the first. What is left of the layer's peak comes and goes in its backward.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.models import TARGETS, config_of
from poros.config import ADAPTER_KERNELS
from poros.planning.cost_model import (
    CostModel,
    FusedKernels,
    Walk,
    adapter_kernels_as,
)
from poros.planning.formula import LayerCost
from poros.planning.meta_model import Recipe


@contextmanager
def inside(layer: nn.Module) -> Iterator[list[str]]:
    """The names of the modules whose forwards are running, the innermost last.

    By the call of all modules, not by hooks: with those the layer would run as it is written.
    """
    names = ["the layer itself"]
    known = {
        id(module): name for name, module in layer.named_modules() if name and ".lora_" not in name
    }
    genuine = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in known:
            return genuine(module, *args, **kwargs)
        names.append(known[id(module)])
        try:
            return genuine(module, *args, **kwargs)
        finally:
            names.pop()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield names
    finally:
        nn.Module.__call__ = genuine  # type: ignore[method-assign]


def kept(
    model: CostModel, seq_len: int, adapter_kernels: str
) -> tuple[Counter[tuple[str, ...]], LayerCost]:
    """Bytes by module, dtype and shape; and the first layer's cost."""
    layer, walk, calls = model.layers[0], Walk(model.layers), list[tuple[Any, Any]]()
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with adapter_kernels_as(adapter_kernels, model.layers):
        walk.run(model.model, torch.empty((1, seq_len), dtype=torch.long, device="meta"))
        handle.remove()
        return _kept(layer, *calls[0]), walk.costs[0]


def _kept(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Counter[tuple[str, ...]]:
    found = Counter[tuple[str, ...]]()
    known = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), *layer.buffers())}
    alive: list[Any] = []  # or their addresses would be used again
    with inside(layer) as names:

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                what = str(tensor.dtype).removeprefix("torch."), str(tuple(tensor.shape))
                found[(names[-1], *what)] += storage.nbytes()
                alive.append(storage)
            return tensor

        with FusedKernels(), saved_tensors_hooks(note, lambda tensor: tensor):
            layer(args[0].detach().requires_grad_(), *args[1:], **kwargs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.layer", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seq", type=int, default=32768)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapter-kernels", choices=ADAPTER_KERNELS, default="fused")
    options = parser.parse_args()
    adapters = LoraConfig(
        r=options.rank, target_modules=list(TARGETS), task_type="CAUSAL_LM", lora_dropout=0.0
    )
    model = CostModel(Recipe.of(config_of(options.model), lora=adapters))
    found, layer = kept(model, options.seq, options.adapter_kernels)
    print(
        f"{options.model}, 1 x {options.seq} tokens, LoRA of rank {options.rank}, "
        f"adapter kernels {options.adapter_kernels}, GB (1e9 bytes)\n"
    )
    print("| saved in | dtype | shape | GB |\n| --- | --- | --- | --- |")
    for (name, dtype, shape), num_bytes in found.most_common():
        if num_bytes >= 1e7:
            print(f"| {name} | {dtype} | {shape} | {num_bytes / 1e9:.3f} |")
    rest = sum(size for size in found.values() if size < 1e7)
    print(f"| smaller ones | | | {rest / 1e9:.3f} |")
    print(f"\nkept for backward {layer.saved / 1e9:.2f}, at the peak {layer.peak / 1e9:.2f}")


if __name__ == "__main__":
    main()
