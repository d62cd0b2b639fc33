"""A run on a card whose memory a tensor holds but for so much, and the same run without that limit.

    python -m benchmarks.capped qwen2.5-32b --gib 16 --steps 200

The Poros technical report restricts its GPU in this way (its section 4.4: a blocker tensor is
allocated before training). Here the process as a whole has the limit, CUDA's context included: a
blocker leaves ``--gib`` of the card, less what the process already holds. The streamed run is given
no budget and finds its own. Afterwards the blocker goes and the same steps run with every block on
the GPU; losses and final adapters are compared bit by bit.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import poros
from benchmarks import memory
from benchmarks.accumulate import make_optimizer
from benchmarks.models import config_of, random_model, with_lora
from benchmarks.work import Work, batch_of, bits_of, digest


def block_all_but(num_bytes: int, device: torch.device) -> torch.Tensor:
    """A tensor that leaves ``num_bytes`` of the card for this process, with what it holds now.

    Raises:
        MemoryError: If the process and others hold too much for that.
    """
    torch.zeros(1, device=device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    size = free - (num_bytes - (total - free))
    if size <= 0 or size > free:
        raise MemoryError(f"expected more than {num_bytes} bytes on the card, {free} are free")
    return torch.empty(size, dtype=torch.uint8, device=device)


def train(model: Any, seq: int, steps: int) -> dict[str, Any]:
    """``steps`` optimizer steps from the adapters as they are."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    optimizer = make_optimizer(model)
    batch = batch_of(model.config.vocab_size, Work(1, seq), device)
    losses, times = [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits_of(loss))
        times.append((time.perf_counter() - began) * 1e3)
    late = sorted(times[steps // 2 :])
    return {"losses": losses, "adapters": digest(model), "median_ms": late[len(late) // 2]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.capped",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model")
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path, help="a line of JSON")
    options = parser.parse_args(argv)
    device = torch.device("cuda")
    machine = memory.environment(device)
    model = with_lora(random_model(config_of(options.model, options.layers), "nf4"), 16, 0.05)
    model.train()
    start = {
        name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad
    }

    blocker = block_all_but(int(options.gib * 2**30), device)
    free, _ = torch.cuda.mem_get_info(device)
    poros.prepare(model, device=device)
    capped = train(model, options.seq, options.steps)
    least, total = torch.cuda.mem_get_info(device)
    runtime = poros.runtime(model)
    found = {
        "cap, bytes": int(options.gib * 2**30),
        "left by the blocker, bytes": free,
        "held by the process at the end, bytes": total - least - blocker.nbytes,
        "peak reserved, bytes": torch.cuda.max_memory_reserved() - blocker.nbytes,
        "peak allocated, bytes": torch.cuda.max_memory_allocated() - blocker.nbytes,
        "blocks on the GPU": f"{runtime.num_slots} of {runtime.num_blocks}",
        "steps": options.steps,
        "ms a step": capped["median_ms"],
    }
    print(json.dumps(found, indent=1), flush=True)

    poros.restore(model)
    del blocker, runtime
    gc.collect()
    memory.empty(device)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name in start:
                each.copy_(start[name])
    poros.prepare(model, device=device, slots=model.config.num_hidden_layers, self_check="off")
    free_run = train(model, options.seq, options.steps)
    found["ms a step, not capped, all blocks on the GPU"] = free_run["median_ms"]
    same = all(capped[key] == free_run[key] for key in ("losses", "adapters"))
    found["same bits"] = same
    print(json.dumps(found, indent=1), flush=True)
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            print(
                json.dumps({"options": vars(options), "machine": machine} | found, default=str),
                file=file,
            )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
