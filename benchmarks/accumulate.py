"""Micro-batches that go through the blocks together: time of one, beside others and a slower link.

    python -m benchmarks.accumulate qwen2.5-7b --sizes 1 2 4 8 16 --links 0 25 12

One model, prepared in each of these ways in turn, in one process; each way's steps of all sizes are
measured before the next way's, and the ways take turns in passes:

- two slots, over the plain link and over slower ones (each copy to the device is followed by a
  pause on the copy stream that makes it as long as it would be at that rate): all micro-batches of
  a step together, and one after the other;
- two slots, with weights made dense by each micro-batch for itself (``share_dense=False``);
- all blocks on the GPU, layers recomputed, micro-batches one after the other and together: what
  streaming is compared with, the same work without a link;
- with ``--checkpointing``: PEFT and transformers alone, the base on the GPU, activation
  checkpointing.

``--adapter-kernels fused grouped`` measures each of Poros' ways with each of these.
With ``--autocast`` the model's forward is a bfloat16 autocast region, as a Trainer's is; with
``--liger`` the model has Liger's kernels that ``poros finetune`` takes, and with checkpointing all
but its loss; with ``--kernels`` a row says for how long kernels ran.

Times are of a whole optimizer step, to the end of its work, over the number of micro-batches;
medians; each row is printed as soon as it is there. The same tokens in all ways; loads are counted
by the runtime.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.integrations.liger import apply_liger_kernel

import poros
from benchmarks import memory
from benchmarks.loops import make_optimizer
from benchmarks.models import config_of, random_model, with_lora
from benchmarks.work import Work, batch_of
from poros.api import prepare_with
from poros.config import ADAPTER_KERNELS
from poros.cuda_streams import CudaStreams
from poros.finetune.liger import use_liger
from poros.streams import Event

Row = dict[str, Any]


class SlowLink(CudaStreams):
    """Copies that take as long as over a slower link: the copy stream pauses behind each.

    Args:
        device: The GPU.
        gb_per_s: The rate.
        cycles_per_ms: Of the clock that ``torch.cuda._sleep`` counts.
        plain: The rate of the link itself.
    """

    def __init__(
        self, device: torch.device, gb_per_s: float, cycles_per_ms: float, plain: float
    ) -> None:
        super().__init__(device)
        self._rest_ms_per_byte = (1 / gb_per_s - 1 / plain) / 1e6
        self._options = (device, gb_per_s, cycles_per_ms, plain)
        self._cycles_per_ms = cycles_per_ms

    def beside(self) -> "SlowLink":
        return SlowLink(*self._options)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Event) -> Event:
        super().copy(target, source, after=after)
        stream = self._copies()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(source.nbytes * self._rest_ms_per_byte * self._cycles_per_ms))
        event = torch.cuda.Event()
        event.record(stream)
        return event


def cycles_per_ms(device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    torch.cuda.synchronize(device)
    return 1e8 / begin.elapsed_time(end)


def plain_rate(device: torch.device) -> float:
    source = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return source.nbytes / min(times) / 1e9


class Steps:
    """Optimizer steps of one model on the same tokens."""

    def __init__(self, model: Any, seq: int, most: int) -> None:
        self.model = model
        self.optimizer = make_optimizer(model)
        batch = batch_of(model.config.vocab_size, Work(1, seq), torch.device("cuda"))
        self.batches = [{**batch, "use_cache": False} for _ in range(most)]

    def ms(self, size: int, is_together: bool) -> float:
        """Of a micro-batch."""
        batches = self.batches[:size]
        torch.cuda.synchronize()
        began = time.perf_counter()
        if is_together:
            poros.accumulate(self.model, batches)
        else:
            for batch in batches:
                (self.model(**batch).loss / size).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3 / size


@contextmanager
def in_region(model: Any, is_autocast: bool) -> Iterator[None]:
    """The forward of ``model`` is an autocast region, as Accelerate makes it."""
    if is_autocast:
        model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)


def kernels_ms(steps: Steps, size: int, is_together: bool) -> float:
    """Of kernels and copies on the device for a micro-batch; blocks that come aside."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        steps.ms(size, is_together)
    on_device = [
        each
        for each in seen.events()
        if each.device_type == torch.autograd.DeviceType.CUDA and "Memcpy HtoD" not in each.name
    ]
    return sum(each.device_time for each in on_device) / 1e3 / size


class Way(NamedTuple):
    name: str
    link: float
    """GB/s; 0 is the plain link."""
    num_slots: int
    share_dense: bool | None = None
    adapter_kernels: str = "fused"


def ways(options: argparse.Namespace, num_layers: int) -> Iterator[Way]:
    for kernels in options.adapter_kernels:
        also = "" if kernels == "fused" else f", {kernels} adapters"
        for link in options.links:
            name = f"2 slots, {link:g} GB/s" if link else "2 slots"
            yield Way(f"{name}{also}", link, options.slots, None, kernels)
        name = f"2 slots, dense weights not shared{also}"
        yield Way(name, 0, options.slots, False, kernels)
        yield Way(f"all on the GPU, recomputed{also}", 0, num_layers, None, kernels)


Take = Callable[[str, str, int, Steps, Callable[[], Row]], None]


def prepared_ways(options: argparse.Namespace, model: Any, take: Take) -> None:
    """All ways that Poros has, in turns."""
    device = torch.device("cuda")
    plain, cycles = plain_rate(device), cycles_per_ms(device)
    print(f"  plain link: {plain:.1f} GB/s", flush=True)
    for turn in range(options.passes):
        found = list(ways(options, model.config.num_hidden_layers))
        for way in found if turn % 2 == 0 else reversed(found):
            gc.collect()
            memory.empty(device)
            policy = poros.StreamingPolicy(
                slots=way.num_slots,
                keep_last=0,
                share_dense=way.share_dense,
                adapter_kernels=way.adapter_kernels,
                loss=options.loss,
                stream_head=options.stream_head,
                self_check="off",
            )
            link = way.link
            streams = SlowLink(device, link, cycles, plain) if link else CudaStreams(device)
            prepare_with(model, policy, streams=streams)
            runtime = poros.runtime(model)
            steps = Steps(model, options.seq, max(options.sizes))
            with in_region(model, options.autocast):
                for _ in range(options.warm):
                    steps.ms(2, False)
                    steps.ms(2, True)
                for size in options.sizes:
                    take(way.name, "together", size, steps, runtime.stats)
                    is_fast = not link and size in (1, options.alone)
                    if way.share_dense is None and (is_fast or (link and size == 1)):
                        take(way.name, "one after the other", size, steps, runtime.stats)
            print(f"  {way.name}: {runtime.stats()['fallbacks']}", flush=True)
            del steps, runtime
            poros.restore(model)


def checkpointing(options: argparse.Namespace, model: Any, take: Take) -> None:
    """PEFT and transformers alone."""
    model.to(torch.device("cuda"))
    model.enable_input_require_grads()
    if options.liger:
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    model.gradient_checkpointing_enable()
    steps = Steps(model, options.seq, max(options.sizes))
    for size in (1, options.alone):
        steps.ms(size, False)
        take("PEFT, checkpointing", "one after the other", size, steps, dict)


def measure(options: argparse.Namespace, model: Any, show: Callable[[Row], None]) -> None:
    """Measure all ways; ``show`` takes each row as soon as it is there."""
    device = torch.device("cuda")

    def take(way: str, order: str, size: int, steps: Steps, stats: Callable[[], Row]) -> None:
        is_together = order == "together"
        memory.reset_peaks(device)
        before = stats()
        steps.ms(size, is_together)
        after = stats()
        times = [steps.ms(size, is_together) for _ in range(options.steps)]
        show(
            {
                "way": way,
                "order": order,
                "micro-batches": size,
                "ms a micro-batch": statistics.median(times),
                "least": min(times),
                "most": max(times),
                **(
                    {"kernels, ms": kernels_ms(steps, size, is_together)} if options.kernels else {}
                ),
                "peak reserved, GB": torch.cuda.max_memory_reserved() / 1e9,
                **{
                    key: after[key] - before[key]
                    for key in ("num_loads", "h2d_num_bytes", "head_num_bytes")
                    if key in after
                },
            }
        )

    prepared_ways(options, model, take)
    if options.checkpointing:
        checkpointing(options, model, take)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.accumulate", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--links", type=float, nargs="+", default=[0, 25, 12], help="GB/s; 0: all")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--alone", type=int, default=8, help="size to run alone over slow links")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--loss", default="chunked")
    parser.add_argument("--stream-head", action=argparse.BooleanOptionalAction)
    parser.add_argument("--adapter-kernels", choices=ADAPTER_KERNELS, nargs="+", default=["fused"])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a line of JSON for each row")
    options = parser.parse_args(argv)
    config = config_of(options.model, options.layers)
    model = with_lora(random_model(config, "nf4"), options.rank, options.dropout).train()
    if options.liger:
        use_liger(model)
    machine = memory.environment(torch.device("cuda"))
    asked = {key: value for key, value in vars(options).items() if key != "out"}
    print(f"{asked}, {machine['device']}")

    def show(row: Row) -> None:
        print("| " + " | ".join(_text(value) for value in row.values()) + " |", flush=True)
        if options.out:
            with options.out.open("a") as file:
                print(json.dumps({"options": asked, "machine": machine, **row}), file=file)

    measure(options, model, show)
    return 0


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
