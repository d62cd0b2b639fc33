"""Recorded visits: what a step takes beside its floor, what recording takes, and the host's share.

    python -m benchmarks.graphs qwen2.5-7b --seq 512 --slots 2
    python -m benchmarks.graphs qwen2.5-7b --seq 512 --slots 28 --keep-last 28
    python -m benchmarks.graphs small --lengths 1000

One model, streamed by Poros, with visits that run and then with visits that are replayed, in turns.
The floor is phase by phase: the larger of copies and kernels of the forward, plus the same of the
backward, plus the kernels of the optimizer. Copies: bytes loaded in the phase over the rate of a
plain copy. Kernels: the sum of their times in one replayed step, as the profiler has them. Host
times are those of a layer's forward from its call to its return, and of the whole backward over the
number of layers, the device being idle before; medians. Memory is what the allocator holds in pools
of recordings, and what else the device has less of.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import poros
from benchmarks import memory
from benchmarks.forecast import copy_rate
from benchmarks.loops import make_optimizer
from benchmarks.models import config_of, random_model, small_model, with_lora
from benchmarks.work import Work, batch_of
from poros.api import prepare_with
from poros.stream.boundary import streamed_layer
from tools.tape import TapeRecorder

Figures = dict[str, float]


class Run:
    """Steps of one model on the same tokens."""

    def __init__(self, model: Any, device: torch.device, seq: int) -> None:
        self.model, self.device = model, device
        self.optimizer = make_optimizer(model)
        self.batch = batch_of(model.config.vocab_size, Work(1, seq), device)
        self.runtime = poros.runtime(model)

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(**self.batch).loss
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_ms(self) -> float:
        """The whole step, to the end of its work."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.forward().backward()
        self.update()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    def num_bytes_moved(self) -> int:
        """To the device so far: blocks, slices of the head, rows of the embedding."""
        stats = self.runtime.stats()
        return sum(stats[f"{name}_num_bytes"] for name in ("h2d", "head", "rows"))

    def use(self, seq: int) -> None:
        self.batch = batch_of(self.model.config.vocab_size, Work(1, seq), self.device)


def host_times(run: Run, repeats: int = 5) -> Figures:
    """Of the host, per layer, in ms."""
    layers = [streamed_layer(layer) for layer in run.model.get_base_model().model.layers]
    forwards: list[float] = []
    genuine = type(layers[0]).forward

    def timed(self: Any, args: Any, kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return genuine(self, args, kwargs)
        finally:
            forwards.append((time.perf_counter() - began) * 1e3)

    backwards, updates = [], []
    type(layers[0]).forward = timed  # type: ignore[method-assign]
    try:
        for _ in range(repeats):
            torch.cuda.synchronize()
            loss = run.forward()
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss.backward()
            backwards.append((time.perf_counter() - began) * 1e3 / len(layers))
            torch.cuda.synchronize()
            began = time.perf_counter()
            run.update()
            updates.append((time.perf_counter() - began) * 1e3)
    finally:
        type(layers[0]).forward = genuine  # type: ignore[method-assign]
    return {
        "host: forward of a layer, ms": statistics.median(forwards),
        "host: backward of a layer, ms": statistics.median(backwards),
        "host: optimizer, ms": statistics.median(updates),
    }


def kernels(run: Run) -> dict[str, tuple[float, float]]:
    """Sums of the times of kernels, and of copies to the device, by phase, in ms."""
    found = {}
    losses: list[torch.Tensor] = []
    phases: list[tuple[str, Callable[[], object]]] = [
        ("forward", lambda: losses.append(run.forward())),
        ("backward", lambda: losses.pop().backward()),
        ("optimizer", run.update),
    ]
    for name, work in phases:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            work()
            torch.cuda.synchronize()
        of_kernels = of_copies = 0.0
        for event in profiler.events() or ():
            if event.device_type != torch.autograd.DeviceType.CUDA:
                continue
            if "Memcpy HtoD" in event.name:
                of_copies += event.device_time_total
            elif not event.is_user_annotation:
                of_kernels += event.device_time_total
        found[name] = of_kernels / 1e3, of_copies / 1e3
    return found


def pools_num_bytes() -> int:
    """Held by the allocator in pools of recordings."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def used_besides() -> int:
    """Of the device, besides what the allocator holds."""
    free, whole = torch.cuda.mem_get_info()
    return whole - free - torch.cuda.memory_reserved()


def of_lengths(num_batches: int) -> Figures:
    """Shares of replayed visits over batches of one row whose lengths are spread.

    Which visits are replayed does not hang on the device: a small model on the CPU shows it, whose
    recordings are replayed by a stand-in. Lengths are drawn from a lognormal distribution (median
    200 tokens, sigma 0.6), as they are and padded to the next multiple.
    """
    found: Figures = {}
    for multiple in (1, 16, 64, 128, 256):
        model = small_model(1, 4).train()
        policy = poros.StreamingPolicy(self_check="off", device="cpu")
        prepare_with(model, policy, recorder=TapeRecorder())
        captures = poros.runtime(model).context.captures
        generator = torch.Generator().manual_seed(3)
        drawn = (5.3 + 0.6 * torch.randn(num_batches, generator=generator)).exp().int().tolist()
        for length in drawn:
            tokens = torch.zeros(1, -(-length // multiple) * multiple, dtype=torch.long)
            model(input_ids=tokens, labels=tokens).loss.backward()
        visits = captures.num_replays + sum(captures.eager.values())
        found[f"padded to {multiple}: share replayed"] = captures.num_replays / visits
        found[f"padded to {multiple}: recordings a hundred steps"] = (
            100 * captures.num_recorded / num_batches
        )
    return found


def measure(options: argparse.Namespace, model: Any) -> Figures:
    device = torch.device("cuda")
    found: Figures = {}
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(options.passes):
        for graphs in (False, True) if turn % 2 == 0 else (True, False):
            gc.collect()
            memory.empty(device)
            poros.prepare(
                model,
                slots=options.slots,
                keep_last=options.keep_last,
                loss=options.loss,
                self_check="off",
                cuda_graphs=graphs,
            )
            run = Run(model, device, options.seq)
            run.step_ms()
            before = used_besides()
            for _ in range(options.warm):
                run.step_ms()
            if graphs:
                found["besides the allocator, GB"] = (used_besides() - before) / 1e9
            memory.reset_peaks(device)
            times[graphs] += [run.step_ms() for _ in range(options.steps)]
            peak = torch.cuda.max_memory_reserved() / 1e9
            name = "replayed" if graphs else "run"
            found[f"{name}: peak reserved, GB"] = peak
            if turn == options.passes - 1 or options.passes == 1:
                if graphs:
                    found |= of_recorded(run, options)
                else:
                    found |= {f"{name}: {key}": value for key, value in host_times(run).items()}
            del run
            poros.restore(model)
    for graphs, name in ((False, "run"), (True, "replayed")):
        found[f"{name}: step, ms"] = statistics.median(times[graphs])
    found["step over floor"] = found["replayed: step, ms"] / found["floor, ms"]
    return found


def of_recorded(run: Run, options: argparse.Namespace) -> Figures:
    """Everything else about a run whose visits are replayed."""
    captures = run.runtime.context.captures
    found: Figures = {f"replayed: {key}": value for key, value in host_times(run).items()}
    found["recordings"] = captures.num_recorded
    found["recording, ms"] = captures.recording_ms
    found["pools, GB"] = pools_num_bytes() / 1e9
    found["fixed memory, GB"] = captures.memory.num_bytes / 1e9
    before = run.runtime.stats()["num_replayed_visits"]
    phases = kernels(run)
    found["replayed visits of a step"] = run.runtime.stats()["num_replayed_visits"] - before
    rate = copy_rate(run.runtime, run.device)
    found["plain copy, GB/s"] = rate
    run.forward().backward()
    first = run.num_bytes_moved()
    loss = run.forward()
    middle = run.num_bytes_moved()
    loss.backward()
    last = run.num_bytes_moved()
    run.update()
    wires = {"forward": (middle - first) / rate / 1e6, "backward": (last - middle) / rate / 1e6}
    floor = 0.0
    for name, (of_kernels, of_copies) in phases.items():
        found[f"{name}: kernels, ms"] = of_kernels
        found[f"{name}: copies, ms"] = of_copies
        found[f"{name}: wire, ms"] = wires.get(name, 0.0)
        floor += max(of_kernels, wires.get(name, 0.0))
    found["floor, ms"] = floor
    if options.second:
        free = torch.cuda.mem_get_info()[0]
        pools = pools_num_bytes()
        run.use(options.second)
        for _ in range(options.warm):
            run.step_ms()
        found[f"{options.second} tokens: step, ms"] = statistics.median(
            run.step_ms() for _ in range(options.steps)
        )
        found[f"{options.second} tokens: pools grow by, GB"] = (pools_num_bytes() - pools) / 1e9
        found[f"{options.second} tokens: free memory shrinks by, GB"] = (
            free - torch.cuda.mem_get_info()[0]
        ) / 1e9
    found["eager visits since"] = sum(captures.eager.values())
    for reason, count in captures.eager.items():
        print(f"  {count} visits ran: {reason}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.graphs", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--second", type=int, default=0, help="a second length, for its memory")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--keep-last", type=int, default=0)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument(
        "--lengths", type=int, default=0, help="so many batches of lengths that vary, on the CPU"
    )
    parser.add_argument("--loss", default="chunked")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="one line of JSON")
    options = parser.parse_args(argv)
    if options.lengths:
        torch.set_num_threads(1)
        for name, value in of_lengths(options.lengths).items():
            print(f"| {name} | {value:.3f} |")
        return 0
    config = config_of(options.model)
    if options.layers:
        config.num_hidden_layers = options.layers
    model = with_lora(
        random_model(config, "nf4"), options.rank, options.dropout, use_dora=options.dora
    ).train()
    work = measure(options, model)
    machine = memory.environment(torch.device("cuda"))
    if options.out:
        asked = {key: value for key, value in vars(options).items() if key != "out"}
        with options.out.open("a") as file:
            print(json.dumps({"options": asked, "machine": machine, **work}), file=file)
    print(f"{vars(options)}, {machine['device']}")
    for name, value in work.items():
        print(f"| {name} | {value:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
