"""One decoder layer with LoRA, forward, recomputed and differentiated: PEFT's modules and ours.

    python -m benchmarks.lora qwen2.5-7b --tokens 512 --dropout 0.05

Arms take turns on the same layer, inputs, gradients and random state; all gradients of PEFT and of
ours have to be equal bit for bit.
``wall`` is from one synchronisation to the next, ``kernels`` the time that kernels took on the GPU
in one such run under the profiler, ``launches`` how many there were, ``kept`` what lives between
the recomputation and its backward. 4-bit products are bitsandbytes' own in the first arm.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import config_of, random_model, with_lora
from poros.kernels.adapters import KernelStats, Recomputation, note_last
from poros.kernels.forwards import unpatch
from poros.kernels.lazy_tensor import forget
from poros.kernels.use import patch


class Given(NamedTuple):
    """What every run starts from."""

    hidden: torch.Tensor
    kwargs: dict[str, Any]
    arriving: torch.Tensor
    trained: list[torch.Tensor]


@contextmanager
def peft(layer: Any) -> Iterator[KernelStats | None]:
    yield None


@contextmanager
def fused(layer: Any) -> Iterator[KernelStats | None]:
    patch(layer, next(layer.parameters()).device, KernelStats())
    try:
        yield None
    finally:
        unpatch(layer.modules())


@contextmanager
def leaving_out(layer: Any) -> Iterator[KernelStats | None]:
    tally = KernelStats()
    patch(layer, next(layer.parameters()).device, tally)
    try:
        yield tally
    finally:
        unpatch(layer.modules())


ARMS: dict[str, Callable[[Any], Any]] = {
    "PEFT": peft,
    "ours": fused,
    "ours, last product left out": leaving_out,
}


def run(layer: Any, given: Given, tally: KernelStats | None) -> tuple[list[torch.Tensor], int]:
    """As a streamed layer runs: a forward whose graph is dropped, and again for its gradients.

    Returns:
        The gradients, and the bytes that lived before they were taken.
    """
    torch.manual_seed(0)
    state = torch.cuda.get_rng_state()
    hidden = given.hidden.detach().requires_grad_()
    result = layer(hidden, **given.kwargs)
    if tally is not None:
        note_last([result])
    del result
    torch.cuda.set_rng_state(state)
    with Recomputation(tally):
        result = layer(hidden, **given.kwargs)
    forget([result])
    kept = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(result, [hidden, *given.trained], given.arriving)
    return list(gradients), kept


def measure(name: str, num_tokens: int, rank: int, dropout: float, passes: int) -> bool:
    """Print one line of JSON per arm; whether all bits are equal."""
    torch.manual_seed(0)
    config = config_of(name, 1)
    config._attn_implementation = "sdpa"
    model = with_lora(random_model(config), rank, dropout).cuda().train()
    inner = model.get_base_model().model
    layer = inner.layers[0]
    hidden = torch.randn(1, num_tokens, config.hidden_size, device="cuda").bfloat16()
    positions = torch.arange(num_tokens, device="cuda")[None]
    given = Given(
        hidden,
        {"position_embeddings": inner.rotary_emb(hidden, positions), "attention_mask": None},
        torch.randn_like(hidden),
        [parameter for parameter in layer.parameters() if parameter.requires_grad],
    )
    facts: dict[str, dict[str, Any]] = {arm: {"wall": []} for arm in ARMS}
    for number in range(passes + 3):
        for arm, use in ARMS.items():
            with use(layer) as tally:
                torch.cuda.synchronize()
                before, began = torch.cuda.memory_allocated(), time.perf_counter()
                gradients, kept = run(layer, given, tally)
                torch.cuda.synchronize()
                took = time.perf_counter() - began
                if number >= 3:
                    facts[arm]["wall"].append(took * 1e3)
                facts[arm] |= {"gradients": gradients, "kept": kept - before}
                if number == passes + 2:
                    facts[arm] |= profiled(layer, given, tally)
    expected = facts["PEFT"]["gradients"]
    exact = True
    for arm, found in facts.items():
        same = all(map(torch.equal, found["gradients"], expected))
        exact &= same
        wall, kernels = statistics.median(found["wall"]), found["kernels"]
        line = {
            **{"model": name, "tokens": num_tokens, "dropout": dropout, "arm": arm},
            **{"wall_ms": round(wall, 3), "kernels_ms": round(kernels, 3)},
            "wall_of_peft": round(wall / statistics.median(facts["PEFT"]["wall"]), 3),
            "kernels_of_peft": round(kernels / facts["PEFT"]["kernels"], 3),
            **{"launches": found["launches"], "kept_gb": round(found["kept"] / 1e9, 4)},
            "same bits": same,
        }
        print(json.dumps(line), flush=True)
    return exact


def profiled(layer: Any, given: Given, tally: KernelStats | None) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(layer, given, tally)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    return {
        "kernels": sum(event.device_time for event in events) / 1e3,
        "launches": len(events),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.lora", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--passes", type=int, default=20)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    exact = [
        measure(options.model, num_tokens, options.rank, options.dropout, options.passes)
        for num_tokens in options.tokens
    ]
    return 0 if all(exact) else 1


if __name__ == "__main__":
    sys.exit(main())
