"""Time and peak memory of a training step: Poros at several slot counts beside resident runs.

    python -m benchmarks.step qwen2.5-7b --seq 512 --slots 2 8 28 --out results/step.csv

Every arm trains the same model object, from the same base bytes and adapter bytes, on the same
tokens; the arms take turns, ``--passes`` times. A plain copy of the same host memory to the device,
timed in the same run, gives the rate that the floor is computed with: phase by phase,

    floor = max(wire, forward) + max(wire, forward + backward),   wire = bytes of a phase / rate,

where forward and backward are those of the resident arm.
"""

import argparse
import csv
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import poros
from benchmarks.models import config_of, random_nf4, with_lora

DEVICE = torch.device("cuda", 0)


def batch_of(config: Any, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (batch_size, seq_len), generator=generator)
    return {"input_ids": tokens.to(DEVICE), "labels": tokens.to(DEVICE)}


@contextmanager
def streamed(model: Any, **policy: Any) -> Iterator[Any]:
    poros.prepare(model, device=str(DEVICE), allow_unvalidated=True, self_check="off", **policy)
    try:
        yield poros.runtime(model)
    finally:
        poros.restore(model)


@contextmanager
def resident(model: Any, is_checkpointing: bool = False) -> Iterator[None]:
    model.to(DEVICE)
    if is_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    try:
        yield None
    finally:
        if is_checkpointing:
            model.gradient_checkpointing_disable()
            model.disable_input_require_grads()
        model.to("cpu")


def run_arm(
    model: Any, arm: Any, batch: dict[str, torch.Tensor], start: Any, warm: int, steps: int
) -> dict[str, Any]:
    """Reset the adapter, take ``warm + steps`` steps, time the last ones."""
    model.load_state_dict(start, strict=False)
    model.train()
    row: dict[str, Any] = {"times_ms": [], "forward_ms": [], "losses": []}
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    with arm as runtime:
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        before: dict[str, Any] = {}
        for number in range(warm + steps):
            if number == warm:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = runtime.stats() if runtime else {}
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if number >= warm:
                row["times_ms"].append((time.perf_counter() - began) * 1e3)
                row["losses"].append(loss.item())
            del loss
        # The forward alone, to the end of its work on the device.
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = model(**batch).loss
            torch.cuda.synchronize()
            row["forward_ms"].append((time.perf_counter() - began) * 1e3)
            loss.backward()
            optimizer.zero_grad()
            del loss
        row["peak_allocated"] = torch.cuda.max_memory_allocated() - base
        row["peak_reserved"] = torch.cuda.max_memory_reserved()
        if runtime:
            after = runtime.stats()
            passes = steps + 3
            for key in ("num_loads", "num_hits", "h2d_num_bytes"):
                row[f"{key}_per_step"] = (after[key] - before[key]) / passes
            row |= {key: after[key] for key in ("host_num_bytes", "pinned_num_bytes")}
            row["copy_gb_per_s"] = copy_rate(runtime)
            if runtime.plan is not None:
                row["plan"] = runtime.plan.as_dict()
        del optimizer, trained
    gc.collect()
    return row


def copy_rate(runtime: Any, repeats: int = 3) -> float:
    """GB/s of plain copies of whole blocks, one after the other, on one stream."""
    slabs = [runtime.host_slab(block) for block in range(runtime.num_blocks)]
    target = torch.empty(max(map(len, slabs)), dtype=torch.uint8, device=DEVICE)
    rates = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for slab in slabs:
            target[: len(slab)].copy_(slab, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(sum(map(len, slabs)) / (time.perf_counter() - began) / 1e9)
    return statistics.median(rates)


def environment() -> dict[str, str]:
    import accelerate
    import bitsandbytes
    import peft
    import transformers

    versions = {
        each.__name__: each.__version__
        for each in (torch, transformers, peft, accelerate, bitsandbytes, poros)
    }
    return {
        "device": torch.cuda.get_device_name(DEVICE),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **versions,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, nargs="+", default=[2])
    parser.add_argument("--budgets", nargs="*", default=[])
    parser.add_argument("--block-size", type=int, default=1)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-resident", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    config = config_of(options.model, options.layers)
    config._attn_implementation = "sdpa"
    began = time.perf_counter()
    model = with_lora(random_nf4(config), options.rank)
    print(f"model made in {time.perf_counter() - began:.0f} s", flush=True)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    batch = batch_of(config, options.batch, options.seq)
    arms: dict[str, Callable[[], Any]] = {}
    if not options.no_resident:
        arms["resident"] = lambda: resident(model)
        arms["resident, checkpointing"] = lambda: resident(model, is_checkpointing=True)
    for slots in options.slots:
        arms[f"poros, {slots} slots"] = lambda slots=slots: streamed(
            model, slots=slots, block_size=options.block_size
        )
    for budget in options.budgets:
        arms[f"poros, {budget}"] = lambda budget=budget: streamed(
            model, vram_budget=budget, block_size=options.block_size
        )
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for _ in range(options.passes):
        for name, make in arms.items():
            rows[name].append(run_arm(model, make(), batch, start, options.warm, options.steps))
            print(name, f"{statistics.median(rows[name][-1]['times_ms']):.1f} ms", flush=True)
    report(rows, options)
    return 0


def report(rows: dict[str, list[dict[str, Any]]], options: Any) -> None:
    print(json.dumps(environment()))
    print(json.dumps({key: str(value) for key, value in vars(options).items()}))
    first = next(iter(rows.values()))[0]["losses"]
    plain = rows.get("resident")
    for name, passes in rows.items():
        times = sorted(each for row in passes for each in row["times_ms"])
        last = passes[-1]
        line = {
            "arm": name,
            "median_ms": round(statistics.median(times), 2),
            "p10_ms": round(times[len(times) // 10], 2),
            "p90_ms": round(times[-1 - len(times) // 10], 2),
            "forward_ms": round(statistics.median(f for r in passes for f in r["forward_ms"]), 2),
            "peak_gb": round(max(row["peak_allocated"] for row in passes) / 1e9, 3),
            "reserved_gb": round(max(row["peak_reserved"] for row in passes) / 1e9, 3),
            "losses_equal": all(row["losses"] == first for row in passes),
        }
        if "plan" in last:
            planned = last["plan"]
            line |= {key: planned[key] for key in ("num_slots", "keep_last")}
            line["planned_gb"] = round(planned["total_num_bytes"] / 1e9, 3)
        if "copy_gb_per_s" in last:
            rate = statistics.median(row["copy_gb_per_s"] for row in passes)
            moved = last["h2d_num_bytes_per_step"]
            line |= {"gb_per_step": round(moved / 1e9, 3), "copy_gb_per_s": round(rate, 2)}
            line["wire_ms"] = round(moved / rate / 1e6, 2)
            if plain:
                forward = statistics.median(f for row in plain for f in row["forward_ms"])
                step = statistics.median(each for row in plain for each in row["times_ms"])
                wire = moved / 2 / rate / 1e6
                floor = max(wire, forward) + max(wire, step)
                line |= {
                    "floor_ms": round(floor, 2),
                    "over_floor": round(line["median_ms"] / floor, 3),
                }
        print(json.dumps(line), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", newline="") as file:
                writer = csv.writer(file)
                for number, row in enumerate(passes):
                    for step, value in enumerate(row["times_ms"]):
                        writer.writerow([options.model, name, number, step, f"{value:.4f}"])


if __name__ == "__main__":
    sys.exit(main())
