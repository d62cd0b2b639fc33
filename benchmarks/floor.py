"""Steps in bf16 autocast beside what the GPU computes and copies in them.

    python -m benchmarks floor qwen2.5-7b --arms slots:512:8 kept:512:1 slots:2048:8 kept:2048:1

An arm is ``WAY:TOKENS:MICRO_BATCHES``: ``slots`` has two, ``kept`` all blocks on the GPU and every
graph kept, ``alone`` all blocks on the GPU, recomputed, and micro-batches one after the other; the
other ways call ``poros.accumulate``. Random NF4 weights at the true shapes, LoRA of rank 16 in
float32 with grouped products, Liger's norms and rotary embeddings, a bf16 region
around the model's forward, fused AdamW, self-check off. A micro-batch is one row of random tokens.

After eight steps, some three seconds of them (four at least) follow one another without waiting for
the GPU, three times. ``wall`` is the median time of the GPU from the end of one step to that of the
next, the first of each turn left out, as the GPU waits in it for the host to begin; ``least`` the
least. ``single`` is a step between two device synchronisations, ``host`` the time until all steps
of a turn are queued, by step. Then three are traced: ``kernels`` is the time in which at least one
ran, ``wire`` that of copies to the GPU, each by step. ``ratio`` is ``wall`` by the larger of the
two.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import poros
from benchmarks.loops import make_optimizer
from benchmarks.models import config_of, random_model, with_lora
from poros.finetune.liger import use_liger
from poros.reporting.step_times import step_times

NUM_WARM, NUM_TURNS, MS_OF_A_TURN, NUM_TRACED = 5, 3, 3000, 3
COLUMNS = ("arm", "wall", "least", "single", "host", "kernels", "wire", "ratio", "peak_gb")


def measure(model: Any, arm: str) -> dict[str, Any]:
    """Times are ms a step."""
    way, length, accumulation = arm.split(":")
    num_layers = model.config.num_hidden_layers
    policy = {
        "slots": 2 if way == "slots" else num_layers,
        "keep_last": num_layers if way == "kept" else 0,
    }
    poros.prepare(model, self_check="off", adapter_kernels="grouped", **policy)
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(0)
    shape = (int(accumulation), 1, int(length))
    rows = torch.randint(0, model.config.vocab_size, shape, generator=generator).cuda()
    batches = [{"input_ids": row, "labels": row.clone(), "use_cache": False} for row in rows]
    forward = model.forward
    model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(forward)
    torch.cuda.reset_peak_memory_stats()

    def steps(number: int) -> dict[str, Any]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        ends = []
        for _ in range(number):
            if way == "alone":
                for batch in batches:
                    (model(**batch).loss / len(batches)).backward()
            else:
                poros.accumulate(model, batches)
            optimizer.step()
            optimizer.zero_grad()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
        host = (time.perf_counter() - begin) * 1000 / number
        torch.cuda.synchronize()
        wall = (time.perf_counter() - begin) * 1000 / number
        later = [first.elapsed_time(second) for first, second in pairwise(ends)]
        return {"synchronised": wall, "host": host, "later": later}

    steps(NUM_WARM)
    gc.collect()
    gc.freeze()  # as `poros finetune` does
    single = [steps(1)["synchronised"] for _ in range(NUM_TURNS)]
    number = max(4, round(MS_OF_A_TURN / single[0]))
    turns = [steps(number) for _ in range(NUM_TURNS)]
    peak = torch.cuda.max_memory_allocated() / 1e9
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        steps(NUM_TRACED)
    with tempfile.TemporaryDirectory() as folder:
        traced.export_chrome_trace(f"{folder}/trace.json")
        times = step_times(Path(folder, "trace.json"))
    gc.unfreeze()
    del model.forward
    poros.restore(model)
    gc.collect()
    torch.cuda.empty_cache()
    later = [each for turn in turns for each in turn["later"]]
    wall = statistics.median(later)
    kernels, wire = times["kernels"] / NUM_TRACED, times["copies to the GPU"] / NUM_TRACED
    return {
        "arm": arm,
        "wall": wall,
        "least": min(later),
        "single": statistics.median(single),
        "host": statistics.median(turn["host"] for turn in turns),
        "kernels": kernels,
        "wire": wire,
        "ratio": wall / max(kernels, wire),
        "peak_gb": peak,
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks floor", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--arms", nargs="+", required=True, metavar="WAY:TOKENS:MICRO_BATCHES")
    parser.add_argument("--out", type=Path, help="a file to which each arm adds a line of JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA GPU, whose kernels are traced; found none")
    model = with_lora(random_model(config_of(options.model, options.layers))).train()
    use_liger(model)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for arm in options.arms:
        found = measure(model, arm)
        cells = [arm, *(f"{found[column]:.4g}" for column in COLUMNS[1:])]
        print(f"| {' | '.join(cells)} |", flush=True)
        if options.out is not None:
            found |= {"model": options.model, "device": torch.cuda.get_device_name()}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
