"""How long a run takes until its steps are as fast as its budget allows.

    python -m benchmarks.settling [--model qwen2.5-7b] [--seq 512] [--budgets 6GiB 9GiB]

Each arm prepares the same bytes anew and trains: AdamW, one sequence of random tokens a step, the
self-check on. The time counts from the first forward to the end of the first step that begins with
the room which the run has in the end: estimating the floor, the check, measuring, growing and
loading are in it. The arm with two slots is settled after its first step; the figure to compare
with is the time of its first three. Arms take turns, and the order is reversed in every other
round. A line an arm and round, then medians and ratios.
"""

import argparse
import gc
import statistics
import time
from typing import Any

import torch

import poros
from benchmarks.models import config_of, random_nf4, with_lora

NUM_STEPS = 6


def run(base: Any, policy: dict[str, Any], seq_len: int) -> tuple[list[float], list[Any], int]:
    """Seconds from the first forward to the end of each step, the rooms, and bytes reserved."""
    model = poros.prepare(base, device="cuda", **policy).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, seq_len), generator=generator).cuda()
    torch.cuda.synchronize()
    times, rooms = [], []
    begin = time.perf_counter()
    for _ in range(NUM_STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        rooms.append(tuple(poros.runtime(model).room))
    reserved = torch.cuda.memory_reserved()
    del optimizer, trained
    poros.restore(model)
    gc.collect()
    torch.cuda.empty_cache()
    return times, rooms, reserved


def main() -> None:
    """Run the arms and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", nargs="*", default=["6GiB", "9GiB"])
    options = parser.parse_args()
    torch.manual_seed(0)
    base = with_lora(random_nf4(config_of(options.model, options.layers)))
    arms = [{"slots": 2}, *({"vram_budget": budget} for budget in options.budgets)]
    settled: dict[str, list[float]] = {}
    three: list[float] = []
    for number in range(options.rounds):
        for policy in arms[:: -1 if number % 2 else 1]:
            times, rooms, reserved = run(base, policy, options.seq)
            last = rooms.index(rooms[-1])
            name = ", ".join(f"{key}={value}" for key, value in policy.items())
            settled.setdefault(name, []).append(times[last])
            if "slots" in policy:
                three.append(times[2])
            steps = ", ".join(f"{seconds:.2f}" for seconds in times)
            print(f"{name}: {steps} s; rooms {rooms}; {reserved / 1e9:.2f} GB reserved", flush=True)
    reference = statistics.median(three)
    print(f"three steps with two slots: {reference:.2f} s (median of {len(three)})")
    for name, seconds in settled.items():
        found = statistics.median(seconds)
        print(f"{name}: settled after {found:.2f} s, {found / reference:.2f} times that")


if __name__ == "__main__":
    main()
