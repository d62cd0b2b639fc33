"""Tables of whole training steps, each by one command: memory, time and bits of several arms.

    python -m benchmarks.tables step qwen2.5-7b --slots 2 14 28 --out benchmarks/results/NAME.csv
    python -m benchmarks.tables budget qwen2.5-7b --quick --out benchmarks/results/NAME.csv

``--quick`` takes 8 layers, one pass and fewer points: it shows that a table can be made, and its
figures are those of the shape that the table states. ``--out`` also writes the page beside the CSV;
without it the page is printed only. Exit status 1: some arm gave other bits than the others.
"""

import argparse
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import poros
from benchmarks import arms, memory, report, transfer
from benchmarks.models import SHAPES, TARGETS, config_of, random_model, with_lora
from benchmarks.protocol import COLUMNS, Bench, Case, Schedule
from benchmarks.work import Work

_LIMITS = "Other cards, hosts and shapes; more than one GPU; real text."


@dataclass(frozen=True)
class Table:
    title: str
    question: str
    limits: str
    cases: Callable[[Any, Any], list[Case]]
    """Of the model and the options."""
    quantization: str = "nf4"
    is_deterministic: bool = False
    """Whether PyTorch is told to take deterministic kernels only."""


def _work(options: Any) -> Work:
    return Work(options.batch, options.seq)


def _step(model: Any, options: Any) -> list[Case]:
    baselines = [arms.resident_arm(), arms.checkpointing_arm(), arms.trainer_arm()]
    baselines += [arms.accelerate_arm(), arms.fused_resident_arm()]
    compared = _wanted([*baselines, *_asked(options)], options)
    return [Case(arm, _work(options)) for arm in compared]


def _wanted(compared: list[arms.Arm], options: Any) -> list[arms.Arm]:
    return [arm for arm in compared if not options.arms or arm.name in options.arms]


def _asked(options: Any) -> list[arms.Arm]:
    """Poros as the command line asks for it."""
    size = options.block_sizes[0]
    poros_arms = [
        arms.poros_arm(f"{slots} slots", slots=slots, block_size=size) for slots in options.slots
    ]
    poros_arms += [
        arms.poros_arm(
            f"{slots} slots, {keep_last} kept", slots=slots, keep_last=keep_last, block_size=size
        )
        for slots in options.slots[-1:]
        for keep_last in options.keep_last
    ]
    poros_arms += [
        arms.poros_arm(budget, vram_budget=budget, block_size=size) for budget in options.budgets
    ]
    if options.graphs:
        slots = options.slots[0]
        name = f"{slots} slots, visits run"
        poros_arms.append(arms.poros_arm(name, slots=slots, block_size=size, cuda_graphs=False))
    if options.offload_boundaries:
        poros_arms.append(
            arms.poros_arm(
                f"{options.slots[0]} slots, boundaries on the host",
                slots=options.slots[0],
                block_size=size,
                offload_boundaries=True,
            )
        )
    return poros_arms


def _heads(model: Any, options: Any) -> list[Case]:
    """What of the vocabulary is on the device: all of it, and less and less."""
    sliced = {"slots": 2, "loss": "chunked"}
    compared = [
        arms.resident_arm(),
        arms.checkpointing_arm(),
        arms.sliced_resident_arm(),
        arms.poros_arm("2 slots", slots=2),
        arms.poros_arm("2 slots, embedding on the host", slots=2, stream_embedding=True),
        arms.poros_arm("2 slots, loss in slices", **sliced),
        arms.poros_arm("2 slots, loss in slices, head on the host", **sliced, stream_head=True),
        arms.poros_arm(
            "2 slots, as by default",
            **sliced,
            stream_head=True,
            stream_embedding=True,
        ),
    ]
    cases = [(arm, seq) for seq in options.lengths for arm in _wanted(compared, options)]
    cases += [(compared[-1], seq) for seq in options.long]
    return [Case(arm, Work(options.batch, seq)) for arm, seq in cases]


def _block_sizes(model: Any, options: Any) -> list[Case]:
    num_layers = model.config.num_hidden_layers
    sizes = [size for size in options.block_sizes if size <= num_layers]
    compared = [arms.resident_arm()] + [
        arms.poros_arm(f"blocks of {size}", slots=2, block_size=size) for size in sizes
    ]
    return [Case(arm, _work(options)) for arm in compared]


def _sequences(model: Any, options: Any) -> list[Case]:
    compared = [
        arms.resident_arm(),
        arms.checkpointing_arm(),
        arms.poros_arm("2 slots", slots=2),
        arms.poros_arm("2 slots, boundaries on the host", slots=2, offload_boundaries=True),
    ]
    return [Case(arm, Work(options.batch, seq)) for seq in options.lengths for arm in compared]


def _slots(model: Any, options: Any) -> list[Case]:
    num_layers = model.config.num_hidden_layers
    numbers = dict.fromkeys(
        [2, *(round(num_layers * share / 4) for share in (1, 2, 3)), num_layers]
    )
    compared = [arms.resident_arm(), arms.checkpointing_arm()]
    compared += [
        arms.poros_arm(f"{num_slots} slots", slots=num_slots)
        for num_slots in numbers
        if num_slots >= 2
    ]
    return [Case(arm, _work(options)) for arm in compared]


def _budgets(model: Any, options: Any) -> list[Case]:
    """From what two slots need to what the whole model with all layers kept needs."""
    num_layers = model.config.num_hidden_layers
    # As the runtime plans, which does not know how many passes make a step.
    common = {"seq_len": options.seq, "batch_size": options.batch, "accumulation": 2}
    common |= arms.AS_OTHERS
    if not torch.cuda.is_available():
        common["cuda_graphs"] = False
    least = poros.plan(model, num_slots=2, **common).total_num_bytes
    most = poros.plan(model, num_slots=num_layers, keep_last=num_layers, **common).total_num_bytes
    budgets = [
        least + (most - least) * point // (options.points - 1) for point in range(options.points)
    ]
    compared = [arms.resident_arm(), arms.checkpointing_arm()]
    compared += [arms.poros_arm(f"{budget / 1e9:.3g} GB", vram_budget=budget) for budget in budgets]
    compared += [arms.poros_arm(budget, vram_budget=budget) for budget in options.budgets]
    return [Case(arm, _work(options)) for arm in compared]


TABLES = {
    "step": Table(
        "A training step: Poros beside resident and other offload runs",
        "What does streaming cost in time and save in memory, beside the same step done otherwise?",
        _LIMITS,
        _step,
    ),
    "offload": Table(
        "A training step over a dense base: Poros beside Accelerate's offload",
        "What does streaming cost and save beside Accelerate's hooks, on a base that both take?",
        _LIMITS + " A 4-bit base, which Accelerate's hooks do not take.",
        _step,
        quantization="none",
    ),
    "block-size": Table(
        "Layers per transfer",
        "Does moving several layers in one copy save time, and what does it cost in memory?",
        _LIMITS,
        _block_sizes,
    ),
    "sequence": Table(
        "Sequence length",
        "How do time and peak grow with the sequence, streamed and resident?",
        _LIMITS + " Attention with other kernels.",
        _sequences,
        # The fused attention kernels do not repeat themselves over long sequences otherwise.
        is_deterministic=True,
    ),
    "head": Table(
        "Embedding, head and loss",
        "What do the matrices of the vocabulary and the logits cost, and what their streaming?",
        _LIMITS + " A tied embedding. `same bits` compares arms with the same loss.",
        _heads,
    ),
    "slots": Table(
        "Slots",
        "What does each further slot save in copies and time?",
        _LIMITS,
        _slots,
    ),
    "budget": Table(
        "One budget knob, from two slots to resident",
        "What does `vram_budget` buy, from two slots to resident?",
        _LIMITS,
        _budgets,
    ),
    "transfer": Table(
        "Copies while the wire is the bottleneck",
        "Which share of the rate of plain page-locked copies does the copy stream keep?",
        _LIMITS + " Steps in which compute is the bottleneck. Gaps at the turn of a step and "
        "between steps, where the next block has no free slot yet.",
        lambda model, options: [],
        quantization="none",
    ),
}


def parse(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="benchmarks.tables", description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quantization", choices=("nf4", "none"))
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--slots", type=int, nargs="+", default=[2])
    parser.add_argument("--keep-last", type=int, nargs="*", default=[])
    parser.add_argument("--budgets", nargs="*", default=[])
    parser.add_argument("--offload-boundaries", action="store_true")
    parser.add_argument(
        "--graphs", action="store_true", help="an arm whose visits are not recorded"
    )
    parser.add_argument("--block-sizes", type=int, nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--arms", nargs="*", help="only these of a step or head table, by name")
    parser.add_argument("--long", type=int, nargs="*", default=[], help="its last arm alone")
    parser.add_argument("--points", type=int)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--passes", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--deterministic", action="store_true", default=None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    quick = options.quick
    options.layers = options.layers or (8 if quick and options.model != "tiny" else None)
    options.steps = options.steps or (3 if quick else 5)
    options.passes = options.passes or (1 if quick else 2)
    options.points = options.points or (4 if quick else 7)
    options.quantization = options.quantization or TABLES[options.table].quantization
    options.deterministic = options.deterministic or TABLES[options.table].is_deterministic
    sizes = (1, 2, 4, 8, 16) if options.table == "block-size" else (1,)
    options.block_sizes = options.block_sizes or list(sizes)
    every = (128, 1024, 4096) if quick else (128, 256, 512, 1024, 2048, 4096, 8192)
    every = (512,) if options.table == "head" else every
    options.lengths = options.lengths or list(every)
    if options.points < 2:
        parser.error(f"--points: expected at least 2, found {options.points}")
    if options.table == "transfer":
        options.seq = min(options.seq, 64)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    # Names that the oldest supported transformers still needs.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated")
    table, device = TABLES[options.table], torch.device(options.device)
    if options.out is not None and options.out.exists():
        raise SystemExit(f"{options.out} is there already: a new measurement is a new file")
    began = time.perf_counter()
    is_transfer = options.table == "transfer"
    model = with_lora(
        random_model(_config(options), options.quantization),
        options.rank,
        options.dropout,
        targets=TARGETS[:1] if is_transfer else TARGETS,
    )
    print(f"model made in {time.perf_counter() - began:.0f} s", flush=True)
    shape = {
        "model": options.model,
        "quantization": options.quantization,
        "layers": model.config.num_hidden_layers,
        "rank": options.rank,
    }
    page = report.Page(
        table.title,
        table.question,
        shlex.join(["python", "-m", "benchmarks.tables", *(argv or sys.argv[1:])]),
        memory.environment(device),
        _procedure(options),
        table.limits,
        transfer.summarize if is_transfer else report.summarize_steps,
        has_plot=options.table == "budget",
    )
    schedule = Schedule(options.warm, options.steps, options.passes)
    with _kernels(options.deterministic):
        if is_transfer:
            columns: Sequence[str] = transfer.COLUMNS
            rows = transfer.measure(model, device, _work(options), schedule, shape)
        else:
            columns = COLUMNS
            rows = Bench(model, device, schedule, shape).run(table.cases(model, options))
    with TemporaryDirectory() as folder:
        path = options.out or Path(folder, f"{options.table}.csv")
        print(report.write(path, columns, rows, page))
        exact = is_transfer or report.is_exact(report.read(path))
        print(f"took {time.perf_counter() - began:.0f} s", flush=True)
    return 0 if exact else 1


@contextmanager
def _kernels(deterministic: bool) -> Iterator[None]:
    """Deterministic kernels only, if wanted."""
    if not deterministic:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # would only cost time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _config(options: Any) -> Any:
    config = config_of(options.model, options.layers)
    config._attn_implementation = "sdpa"
    return config


def _procedure(options: Any) -> str:
    targets = "q_proj" if options.table == "transfer" else "the seven projections"
    work = (
        f"Random weights at the true shapes ({options.quantization}), LoRA of rank {options.rank} "
        f"in fp32 on {targets}, dropout {options.dropout:g}, fused AdamW, {options.batch} row(s) "
        f"of random tokens, SDPA; {options.warm} warm-up and {options.steps} timed steps a turn, "
        f"{options.passes} pass(es), the device synchronised around each step"
        + (", deterministic kernels" if options.deterministic else "")
    )
    if options.table == "transfer":
        return f"{work}; two slots; plain copies before and after the steps of each pass."
    return (
        f"{work}; arms in turn, every other pass in reverse; peaks after warm-up. `same bits`: "
        "losses and final adapters against the first arm on the same work. Floor: max(wire, "
        "forward) + max(wire, backward with what is recomputed), from the resident arm's times and "
        "the plain copies; forecast: the plan's, from the same two rates."
    )


if __name__ == "__main__":
    sys.exit(main())
