"""What a recomputed layer takes at a length, term by term: from shapes alone, without a GPU.

    python -m benchmarks.layer qwen2.5-32b --seq 32768

Runs one decoder layer with LoRA on the meta device, as a plan does, and lists what autograd keeps
of it until its backward, by the module in whose forward it was saved. What several keep counts
once, for the first. What is left of the layer's peak comes and goes in its backward.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.models import TARGETS, config_of
from poros.planning import cost_model
from poros.planning.cost_model import CostModel
from poros.planning.meta_model import Recipe


@contextmanager
def inside(layer: nn.Module) -> Iterator[list[str]]:
    """The names of the modules whose forwards are running, the innermost last."""
    names = ["the layer itself"]

    def enter(name: str) -> Any:
        return lambda *_: names.append(name)

    def leave(*_: Any) -> None:
        names.pop()

    with ExitStack() as stack:
        for name, module in layer.named_modules():
            if name and not name.endswith(("lora_A", "lora_B", "lora_dropout")):
                stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                stack.callback(module.register_forward_hook(leave).remove)
        yield names


def kept(model: CostModel, seq_len: int) -> tuple[Counter[tuple[str, ...]], Any]:
    """Bytes by module, dtype and shape; and the layer's cost."""
    layer, found = model.layers[0], Counter[tuple[str, ...]]()
    known = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), *layer.buffers())}
    genuine = cost_model._layer_cost
    costs = []

    def watched(watched_layer: nn.Module, args: Any, kwargs: Any) -> Any:
        with inside(watched_layer) as names:

            def note(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    known.add(storage._cdata)
                    what = str(tensor.dtype).removeprefix("torch."), str(tuple(tensor.shape))
                    found[(names[-1], *what)] += storage.nbytes()
                    alive.append(storage)
                return tensor

            alive: list[Any] = []  # or their addresses would be used again
            with cost_model.FusedKernels(), saved_tensors_hooks(note, lambda tensor: tensor):
                run = type(watched_layer).forward
                output = run(watched_layer, args[0].detach().requires_grad_(), *args[1:], **kwargs)
            del output
        costs.append(genuine(watched_layer, args, kwargs))
        return costs[-1]

    cost_model._layer_cost = watched
    try:
        cost = model.cost(1, seq_len)
    finally:
        cost_model._layer_cost = genuine
    return found, cost


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.layer", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seq", type=int, default=32768)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    adapters = LoraConfig(
        r=options.rank, target_modules=list(TARGETS), task_type="CAUSAL_LM", lora_dropout=0.0
    )
    model = CostModel(Recipe.of(config_of(options.model), "nf4", torch.bfloat16, adapters))
    found, cost = kept(model, options.seq)
    layer = cost.layers[0]
    print(
        f"{options.model}, 1 x {options.seq} tokens, LoRA of rank {options.rank}, GB (1e9 bytes)\n"
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
