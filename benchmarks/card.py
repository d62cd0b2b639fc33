"""What a card that is not here would take: its memory and link emulated, its kernels forecast.

    python -m benchmarks.card qwen2.5-32b --cards rtx3090 rtx4090 --links 25 12 --sizes 1 8

PyTorch may take no more of this GPU than the card has, the model is prepared with the budget that
``poros.prepare`` would find there, and copies to the device take as long as over the link. What is
measured so: the peak, the bytes over the link, and how long kernels run, matrix products (attention
included) apart from the rest. What is not: the card's own kernels. Its time is a **forecast**,

    max(bytes / link, products x ratio of rates of products + rest x ratio of rates of memory)

with the published rates of ``poros.planning.cards`` (a peak each, of which both cards are taken to
reach the same share). Beside it: the same with all kernels slowed down by the ratio of products
alone, which no kernel can be slower than, and the step on this GPU over the emulated link.

The model's forward is a bfloat16 autocast region, as a Trainer's is, and it has Liger's
kernels that ``poros finetune`` takes; with ``--float32`` neither.

``--checkpointing`` measures PEFT and transformers alone, base on the GPU and activation
checkpointing, with all of Liger's kernels but its loss, without the cap, and says whether its peak
is within the budget; its time is that of its kernels. Accelerate's offload of the same base is what
its hooks move, the base twice for each micro-batch (forward, and backward with recomputation), one
after the other with the kernels: computed, not run.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.integrations.liger import apply_liger_kernel

import poros
from benchmarks import memory
from benchmarks.accumulate import SlowLink, Steps, cycles_per_ms, in_region, plain_rate
from benchmarks.models import config_of, random_model, with_lora
from poros.api import prepare_with
from poros.finetune.liger import use_liger
from poros.planning.cards import CARDS, Card, find_card
from poros.planning.meta_model import shapes_of

PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "wgmma", "flash", "fmha", "attention")
"""In the names of kernels that multiply matrices."""


class Measured(NamedTuple):
    """Of a micro-batch: one optimizer step, divided by how many it has."""

    products_ms: float
    rest_ms: float
    num_bytes: float
    """Over the link."""
    peak: int = 0
    """Bytes that PyTorch held at most, without the step in which kernels are counted."""


class Forecast(NamedTuple):
    """Of a micro-batch, in ms; ``least`` where nothing but the card's peaks would limit it."""

    ms: float
    slow_ms: float
    """With all kernels slowed down as products are."""
    wire_ms: float
    least_ms: float


def forecast(
    found: Measured, link: float, card: Card, here: Card, num_flop: float, is_serial: bool = False
) -> Forecast:
    """What the micro-batch would take on ``card``.

    Args:
        found: On the GPU ``here``.
        link: GB/s.
        card: The one that is not here.
        here: The one that was measured on.
        num_flop: Of the micro-batch: 6 for each parameter and token.
        is_serial: Copies wait for kernels, and kernels for copies.
    """
    of_products = here.tflop_per_s / card.tflop_per_s
    of_memory = here.memory_gb_per_s / card.memory_gb_per_s
    kernels = found.products_ms * of_products + found.rest_ms * of_memory
    slow = (found.products_ms + found.rest_ms) * max(of_products, of_memory)
    wire = found.num_bytes / link / 1e6
    longer: Callable[[float, float], float] = (lambda a, b: a + b) if is_serial else max
    least = max(num_flop / card.tflop_per_s / 1e9, wire)
    return Forecast(longer(kernels, wire), longer(slow, wire), wire, least)


def kernels_ms(steps: Steps, size: int, is_together: bool) -> tuple[float, float, dict[str, float]]:
    """Of one step: products, everything else, and the longest of that by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps.ms(size, is_together)
        torch.cuda.synchronize()
    products = rest = 0.0
    names: dict[str, float] = {}
    for event in profiler.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        # The pause of the emulated link is a kernel too.
        if "Memcpy HtoD" in event.name or "spin_kernel" in event.name:
            continue
        ms = event.device_time_total / 1e3
        if any(each in event.name.lower() for each in PRODUCTS):
            products += ms
        else:
            rest += ms
            name = event.name[:50]
            names[name] = names.get(name, 0.0) + ms
    longest = sorted(names.items(), key=lambda item: -item[1])[:6]
    return products, rest, dict(longest)


def settle(steps: Steps, size: int, stats: Callable[[], dict[str, Any]], most: int) -> None:
    """Step until two in a row have found room and recordings as they stay, or ``most`` times.

    Room is found anew after the first steps, as they are measured, and then layers are recorded and
    proved anew, which takes their kernels several times.
    """
    keys, num_quiet = ("num_eager_visits", "num_resizes"), 0
    for _ in range(most):
        before = stats()
        steps.ms(size, True)
        after = stats()
        num_quiet = num_quiet + 1 if all(before[key] == after[key] for key in keys) else 0
        if num_quiet == 2:
            return
    print(f"  after {most} steps layers still run that might be replayed, or room changes")


def streamed(options: argparse.Namespace, model: Any, take: Callable[..., None]) -> None:
    """Poros, over each link, in the budget of the card."""
    device = torch.device("cuda")
    plain, cycles = plain_rate(device), cycles_per_ms(device)
    print(f"  plain link: {plain:.1f} GB/s", flush=True)
    for link in options.links:
        for size in options.sizes:
            gc.collect()
            memory.empty(device)
            policy = poros.StreamingPolicy(vram_budget=options.budget, self_check="off")
            prepare_with(model, policy, streams=SlowLink(device, link, cycles, plain))
            runtime = poros.runtime(model)
            steps = Steps(model, options.seq, size)
            settle(steps, size, runtime.stats, options.warm)
            memory.reset_peaks(device)
            before = runtime.stats()["h2d_num_bytes"]
            times = [steps.ms(size, True) for _ in range(options.steps)]
            moved = (runtime.stats()["h2d_num_bytes"] - before) / options.steps / size
            peak = torch.cuda.max_memory_reserved()
            products, rest, names = kernels_ms(steps, size, True)
            take(
                "Poros",
                link,
                size,
                Measured(products / size, rest / size, moved, peak),
                measured_ms=statistics.median(times),
                host_gb=runtime.stats()["host_num_bytes"] / 1e9,
                in_place=f"{runtime.num_slots} of {runtime.num_blocks} blocks",
                longest={name: round(ms / size, 2) for name, ms in names.items()},
            )
            del steps, runtime
            poros.restore(model)


def checkpointing(options: argparse.Namespace, model: Any, take: Callable[..., None]) -> None:
    """PEFT and transformers alone, and what Accelerate would move."""
    base = sum(each.nbytes for each in model.parameters())
    torch.cuda.set_per_process_memory_fraction(1.0)
    model.to(torch.device("cuda"))
    model.enable_input_require_grads()
    if not options.float32:
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    model.gradient_checkpointing_enable()
    steps = Steps(model, options.seq, 1)
    for _ in range(2):
        steps.ms(1, False)
    memory.reset_peaks(torch.device("cuda"))
    times = [steps.ms(1, False) for _ in range(options.steps)]
    peak = torch.cuda.max_memory_reserved()
    products, rest, names = kernels_ms(steps, 1, False)
    found = Measured(products, rest, 0.0, peak)
    way = "PEFT, checkpointing" + ("" if peak <= options.budget else ", which does not fit")
    took = statistics.median(times)
    take(way, options.links[0], 1, found, measured_ms=took, longest=names)
    for link in options.links:
        offloaded = found._replace(num_bytes=2.0 * base)
        take("Accelerate's offload, computed", link, 1, offloaded, is_serial=True)


def measure(
    options: argparse.Namespace,
    model: Any,
    here: Card,
    cards: Sequence[Card],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """All ways and links; ``show`` takes each row as soon as it is there."""
    shapes = shapes_of(model)
    num_parameters = shapes.num_linear_parameters + shapes.num_head_parameters
    num_flop = 6.0 * num_parameters * options.seq

    def take(
        way: str,
        link: float,
        size: int,
        measured: Measured,
        is_serial: bool = False,
        **more: object,
    ) -> None:
        row = {
            "way": way,
            "link, GB/s": link,
            "micro-batches": size,
            **measured._asdict(),
            "peak reserved, GB": measured.peak / 1e9,
            **more,
        }
        for card in cards:
            said = forecast(measured, link, card, here, num_flop, is_serial)
            row[card.title] = {
                "tokens/s": 1e3 * options.seq / said.ms,
                "tokens/s, all kernels as products": 1e3 * options.seq / said.slow_ms,
                "share of the ceiling": said.least_ms / said.ms,
                "wire, ms": said.wire_ms,
            }
        show(row)

    ways = [streamed, checkpointing] if options.checkpointing else [streamed]
    for way in ways:
        with in_region(model, not options.float32):
            way(options, model, take)


def card_here() -> Card:
    """The GPU at hand.

    Raises:
        PolicyError: If its rates are not known.
    """
    return find_card(torch.cuda.get_device_name().replace("NVIDIA ", "").split(" 80GB")[0])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model")
    parser.add_argument("--cards", nargs="+", default=["rtx3090", "rtx4090"], help="of one size")
    parser.add_argument("--here", help="the GPU at hand, if its name is not known")
    parser.add_argument("--links", type=float, nargs="+", default=[25, 12], help="GB/s")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8], help="micro-batches")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--float32", action="store_true", help="no autocast, and no Liger")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--warm", type=int, default=16, help="the most steps before measuring")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a line of JSON for each row")
    options = parser.parse_args(argv)
    here = CARDS[options.here] if options.here else card_here()
    cards = [find_card(each) for each in options.cards]
    options.budget = min(card.budget for card in cards)
    whole = torch.cuda.get_device_properties(0).total_memory
    cap = min(card.memory_gib for card in cards) * 2**30
    torch.cuda.set_per_process_memory_fraction(cap / whole)
    config = config_of(options.model, options.layers)
    model = with_lora(random_model(config, "nf4"), options.rank, options.dropout).train()
    if not options.float32:
        use_liger(model)
    machine = memory.environment(torch.device("cuda"))
    asked = {key: value for key, value in vars(options).items() if key != "out"}
    print(f"{asked}, {machine['device']}", flush=True)

    def show(row: dict[str, Any]) -> None:
        print(_line(row, cards), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                print(json.dumps({"options": asked, "machine": machine, **row}), file=file)

    measure(options, model, here, cards, show)
    return 0


def _line(row: Mapping[str, Any], cards: Sequence[Card]) -> str:
    cells = [row["way"], f"{row['link, GB/s']:g} GB/s", f"G={row['micro-batches']}"]
    cells.append(f"kernels {row['products_ms']:.1f} + {row['rest_ms']:.1f} ms")
    cells.append(f"{row['num_bytes'] / 1e9:.2f} GB")
    cells.append(f"peak {row['peak reserved, GB']:.2f} GB")
    if "measured_ms" in row:
        cells.append(f"here {row['measured_ms']:.1f} ms")
    for card in cards:
        said = row[card.title]
        cells.append(
            f"{card.title}: {said['tokens/s']:.0f} tokens/s "
            f"({said['tokens/s, all kernels as products']:.0f}), "
            f"{100 * said['share of the ceiling']:.0f} %"
        )
    return " | ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
