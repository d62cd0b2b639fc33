"""The two ways to recompute a layer, side by side: step time and peak device memory.

    python -m benchmarks.lanes --models qwen2.5-7b qwen2.5-32b --tokens 512 8192 --out lanes.jsonl

``general`` recomputes within the graph of the forward, ``function`` in one autograd node per layer;
neither records anything. Two slots, rank 16 on the seven projections, fp32 adapters. The arms of a
cell take turns in one process, several times; a row has the median step of all turns and the
highest peak that PyTorch allocated, less what it held before the model was prepared, workspaces of
cuBLAS included. The losses of both arms have to be the same bits, up to about 2,048 tokens: from
there on fused attention's backward does not repeat itself, so that losses of later steps differ
within one arm too.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import poros
from benchmarks.models import config_of, random_nf4, with_lora

ARMS: dict[str, dict[str, Any]] = {
    "function": {"cuda_graphs": False},
    "general": {"lane": "general"},
}


def turn(
    model: Any, tokens: torch.Tensor, policy: dict[str, Any], num_steps: int
) -> dict[str, Any]:
    """Some steps of one arm: times in ms, peak in bytes, losses."""
    before = torch.cuda.memory_allocated()
    poros.prepare(model, device="cuda", slots=2, self_check="off", **policy)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    times, losses = [], []
    for number in range(num_steps + 1):
        if number == 1:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append((time.perf_counter() - began) * 1e3)
        del loss
    peak = torch.cuda.max_memory_allocated() - before
    poros.restore(model)
    return {"ms": times[1:], "peak": peak, "losses": losses}


def load_libraries() -> None:
    """Have cuBLAS take its workspaces, so that they are not the first arm's."""
    layer = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    layer(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 8192])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    load_libraries()
    for name in chosen.models:
        config = config_of(name, chosen.layers)
        model = with_lora(random_nf4(config), 16).train()
        adapters = {k: v.detach().clone() for k, v in model.named_parameters() if v.requires_grad}
        for num_tokens in chosen.tokens:
            tokens = torch.randint(0, config.vocab_size, (1, num_tokens), device="cuda")
            found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
            for _ in range(chosen.turns):
                for arm, policy in ARMS.items():
                    with torch.no_grad():
                        for key, parameter in model.named_parameters():
                            if key in adapters:
                                parameter.copy_(adapters[key])
                    with torch.autocast("cuda", torch.bfloat16, enabled=chosen.autocast):
                        found[arm].append(turn(model, tokens, policy, chosen.steps))
            for arm, turns in found.items():
                row = {
                    "model": name,
                    "layers": config.num_hidden_layers,
                    "tokens": num_tokens,
                    "autocast": chosen.autocast,
                    "arm": arm,
                    "median ms": statistics.median(ms for each in turns for ms in each["ms"]),
                    "least ms": min(ms for each in turns for ms in each["ms"]),
                    "peak GB": max(each["peak"] for each in turns) / 1e9,
                    "equal losses": all(
                        each["losses"] == found["function"][0]["losses"] for each in turns
                    ),
                    "device": torch.cuda.get_device_name(),
                }
                print(json.dumps(row), flush=True)
                if chosen.out:
                    with chosen.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
