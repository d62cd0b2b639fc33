"""Whole runs of `poros finetune` beside other trainers, over one checkpoint and one file of rows.

    python -m benchmarks rivals qwen2.5-7b --length 512 --out rivals.jsonl
    python -m benchmarks rivals qwen2.5-7b --arms poros:4GiB trl:checkpointed --length 2048
    python -m benchmarks rivals qwen2.5-7b --whole-rows --sites unsloth=FOLDER soup=FOLDER \
        --arms trl:resident unsloth:offload-27 unsloth:auto@6GiB soup

A checkpoint of random weights at true shapes, a tokenizer of 8,000 tokens and rows of the text that
Python comes with are written into ``--folder``, once. Each arm is a process of its own and trains
LoRA of rank 16 on all linear layers, in bf16 autocast, on rows packed to ``--length`` tokens, one a
micro-batch, with fused AdamW:

* ``poros:SIZE``: the command `poros finetune --vram SIZE`;
* ``trl:resident`` and ``trl:checkpointed``: TRL's ``SFTTrainer`` over a 4-bit base of transformers;
* ``unsloth:resident``, ``unsloth:checkpointed`` (with its own checkpointing), ``unsloth:offload-N``
  (``offload_layers=N``) and ``unsloth:auto``: the same trainer over Unsloth's model;
* ``soup:accumulated`` (or ``soup``): the command `soup train` with ``stream_layers``. It packs no
  rows there, and needs ``--whole-rows``. ``soup:batched`` takes the rows of a step as one batch, as
  its manual advises, with the loss in chunks.

``+no-liger`` behind an arm leaves Liger's kernels out. ``@SIZE`` behind it has another process
hold the memory of the GPU but for SIZE, for arms that go by what is free. Trainers want different
versions of libraries: ``--sites NAME=FOLDER`` puts a folder before others on the path of the arms
of that name (``pip install --target FOLDER``).

With ``--whole-rows`` no arm packs: each row is longer than ``--length`` and is cut to it, and there
are as many rows as a run trains. What HF's trainer shuffles with one seed then comes in one order,
so that losses of those arms can be compared step by step.

Times are between the logs of two steps, the median of the last half; tokens are those of whole
rows, padding included (packing leaves little). Peaks are those that the allocator saw from the
start, loading and first steps included. Bytes of the host are those of the process after the last
step, without mapped files. Packed rows are packed by each in its own way, and TRL's adapters over
4 bits are bfloat16, so losses are near each other, not equal.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import memory
from benchmarks.models import TARGETS, config_of, random_dense
from poros.config import parse_num_bytes

ARMS = ("poros:4GiB", "poros:24GiB", "trl:resident", "trl:checkpointed")
WITHOUT_LIGER = "+no-liger"
RANK = 16
LEARNING_RATE = 2e-4
VOCABULARY = 8000
MOST_CHARACTERS = 6000
"""Of a row, which is some paragraphs of a topic."""
CHARACTERS_A_TOKEN = 8
"""More than any text has with this tokenizer, so that a row with so many is long enough."""
TIMEOUT_S = 500
LAST_LINES = 15
"""Of what a process said that failed."""
NEEDS = {"poros": (), "trl": ("trl",), "unsloth": ("unsloth", "trl"), "soup": ("soup_cli", "trl")}
"""Modules that an arm needs beside those of the project."""
AS_THEY_ARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that adds nothing."""

Result = dict[str, Any]


class Log(logging.Handler):
    """What a run says, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, with the time of the clock."""
        self.lines.append((record.created, record.getMessage()[:200]))


class Way(NamedTuple):
    """What the name of an arm says."""

    name: str
    """Of the trainer, a key of ``NEEDS``."""
    how: str
    has_liger: bool
    room: int | None
    """Bytes of the GPU that are left free for it."""


def parse_arm(arm: str) -> Way:
    """Read the name of an arm, for example ``unsloth:auto@6GiB`` or ``trl:resident+no-liger``."""
    rest, _, size = arm.partition("@")
    name, _, how = rest.removesuffix(WITHOUT_LIGER).partition(":")
    if name not in NEEDS:
        raise SystemExit(f"expected an arm of {', '.join(NEEDS)}, found {arm!r}")
    room = parse_num_bytes(size, "the room of an arm") if size else None
    return Way(name, how, not rest.endswith(WITHOUT_LIGER), room)


def rows_of(folder: Path, length: int, are_whole: bool) -> Path:
    """Where the rows are that a run trains."""
    return folder / (f"rows-{length}.jsonl" if are_whole else "rows.jsonl")


def whole_rows(texts: Sequence[str], length: int, number: int) -> list[str]:
    """Texts of more than ``length`` tokens each, from every part of ``texts`` in turn."""
    joined = "\n\n".join(texts)
    size = length * CHARACTERS_A_TOKEN
    while len(joined) < 2 * size:
        joined += "\n\n" + joined
    starts = (index * size % (len(joined) - size) for index in range(number))
    return [joined[start : start + size] for start in starts]


def write_lines(file: Path, values: Sequence[Any]) -> None:
    """Write each value as a line of JSON."""
    file.write_text("".join(json.dumps(each) + "\n" for each in values), encoding="utf-8")


def write_inputs(
    folder: Path, name: str, num_layers: int | None, num_tokens: int, whole: int | None = None
) -> None:
    """Write the checkpoint and its tokenizer, if not there, and rows of ``num_tokens`` in all.

    With ``whole``, each row has more than so many tokens, of which so many count.
    """
    from poros.examples.demo_data import documentation_topics, train_tokenizer

    texts = [text.strip() for text in documentation_topics().values()]
    checkpoint, rows = folder / "model", rows_of(folder, whole or 0, whole is not None)
    if not (checkpoint / "tokenizer.json").exists():
        config = config_of(name, num_layers)
        random_dense(config).save_pretrained(checkpoint)
        train_tokenizer(texts, min(VOCABULARY, config.vocab_size)).save_pretrained(checkpoint)
    if whole is not None:
        write_lines(
            rows, [{"text": each} for each in whole_rows(texts, whole, num_tokens // whole)]
        )
        return
    pieces = [
        text[start : start + MOST_CHARACTERS]
        for text in texts
        for start in range(0, len(text), MOST_CHARACTERS)
    ]
    with rows.open("w", encoding="utf-8") as file:
        written = 0
        while written < 5 * num_tokens:  # characters; a token is about four of them
            for piece in pieces:
                file.write(json.dumps({"text": piece}) + "\n")
                written += len(piece)


def run_poros(options: argparse.Namespace, size: str, has_liger: bool) -> Result:
    """Run the command in this process; what its log of events says."""
    from poros.cli.app import main

    log = Log()
    logger = logging.getLogger("poros")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    out = options.folder / f"run-{os.getpid()}"
    rows = rows_of(options.folder, options.length, options.whole_rows)
    arguments = ["finetune", str(options.folder / "model"), str(rows)]
    arguments += [
        "--vram",
        size,
        "--steps",
        str(options.steps),
        "--max-length",
        str(options.length),
    ]
    arguments += ["--accumulation", str(options.accumulation), "--out", str(out)]
    arguments += ["--rank", str(RANK), "--lr", str(LEARNING_RATE), "--save-every", "10000"]
    arguments += ["--store", str(options.folder / "store")]
    arguments += [] if has_liger else ["--no-liger"]
    arguments += ["--no-packing"] if options.whole_rows else []
    sys.argv = ["poros", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code not in (0, None):
            raise
    lines = (out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    logs = [each for each in events if each["event"] == "log"]
    return {
        "times": [each["time"] for each in logs],
        "losses": [each["loss"] for each in logs],
        "peak_gb": max(each.get("poros/peak_gb", 0.0) for each in logs),
        "fallbacks": next(each["fallbacks"] for each in reversed(events) if "fallbacks" in each),
        "log": log.lines,
    }


def timing(result: Result) -> Any:
    """A callback of HF's trainer that keeps when each step was logged, with its loss and peak."""
    import torch
    from transformers import TrainerCallback

    class Timing(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                result["times"].append(time.time())
                result["losses"].append(float(logs["loss"]))
                if torch.cuda.is_available():
                    peak = torch.cuda.max_memory_allocated() / 1e9
                    result["peak_gb"] = max(peak, result["peak_gb"])

    return Timing


def nothing_yet() -> Result:
    """What a run has measured before its first step."""
    return {"times": [], "losses": [], "peak_gb": 0.0, "fallbacks": []}


def train_with_trl(
    options: argparse.Namespace, model: Any, tokenizer: Any, result: Result, **more: Any
) -> None:
    """Train with TRL's trainer; ``more`` has ``peft_config`` and other settings."""
    import torch
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    has_gpu = torch.cuda.is_available()
    adapter = {"peft_config": more.pop("peft_config")} if "peft_config" in more else {}
    settings = SFTConfig(
        output_dir=str(options.folder / f"trl-{os.getpid()}"),
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        optim="adamw_torch_fused" if has_gpu else "adamw_torch",
        weight_decay=0.0,
        bf16=True,
        packing=not options.whole_rows,
        max_length=options.length,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        use_cpu=not has_gpu,
        **more,
    )
    rows = rows_of(options.folder, options.length, options.whole_rows)
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        processing_class=tokenizer,
        callbacks=[timing(result)()],
        **adapter,
    )
    trainer.train()


def run_trl(options: argparse.Namespace, way: str, has_liger: bool) -> Result:
    """TRL's trainer, as its documentation has it for a 4-bit base."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    source = str(options.folder / "model")
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.bfloat16,
        device_map={"": 0} if torch.cuda.is_available() else "cpu",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )
    result = nothing_yet()
    train_with_trl(
        options,
        model,
        AutoTokenizer.from_pretrained(source),
        result,
        gradient_checkpointing=way == "checkpointed",
        use_liger_kernel=has_liger,
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    return result


def unsloth_settings(way: str) -> tuple[bool | str, dict[str, Any]]:
    """``use_gradient_checkpointing``, and what else ``from_pretrained`` gets for this way."""
    start, _, number = way.partition("-")
    if way == "resident":
        return False, {}
    if way == "checkpointed":
        return "unsloth", {}
    if way == "auto":
        return "unsloth", {"offload_layers": "auto"}
    if start == "offload" and number.isdecimal():
        return "unsloth", {"offload_layers": int(number)}
    raise SystemExit(
        f"expected resident, checkpointed, auto or offload-N of Unsloth, found {way!r}"
    )


def run_unsloth(options: argparse.Namespace, way: str, has_liger: bool) -> Result:
    """Unsloth, as its documentation has it; it has kernels of its own instead of Liger's."""
    import torch
    from unsloth import FastLanguageModel

    checkpointing, more = unsloth_settings(way)

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(options.folder / "model"),
        max_seq_length=options.length,
        dtype=torch.bfloat16,
        load_in_4bit=True,
        use_gradient_checkpointing=checkpointing,
        **more,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        target_modules=list(TARGETS),
        lora_alpha=2 * RANK,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=checkpointing,
        random_state=0,
        max_seq_length=options.length,
    )
    result = nothing_yet()
    if torch.cuda.is_available():
        result["loaded_gb"] = torch.cuda.memory_allocated() / 1e9
    train_with_trl(
        options, model, tokenizer, result, gradient_checkpointing=checkpointing is not False
    )
    return result


def soup_settings(options: argparse.Namespace, way: str, has_gpu: bool) -> dict[str, Any]:
    """The file that `soup train` is given; names are relative to ``options.folder``."""
    if way not in ("", "accumulated", "batched"):
        raise SystemExit(f"expected accumulated or batched of Soup, found {way!r}")
    if not options.whole_rows:
        raise SystemExit("Soup packs no rows of streamed layers; expected --whole-rows")
    is_batch = way == "batched"
    return {
        "base": "model",
        "task": "sft",
        "backend": "transformers",
        "data": {
            "train": f"messages-{options.length}.jsonl",
            "format": "chatml",
            "max_length": options.length,
            "val_split": 0.0,
            "train_on_responses_only": False,
            "chat_template": AS_THEY_ARE,
        },
        "training": {
            "epochs": 1,
            "lr": LEARNING_RATE,
            "batch_size": options.accumulation if is_batch else 1,
            "gradient_accumulation_steps": 1 if is_batch else options.accumulation,
            "quantization": "4bit",
            "optimizer": "adamw_torch_fused" if has_gpu else "adamw_torch",
            "scheduler": "cosine",
            "warmup_ratio": 0.03,
            "weight_decay": 0.0,
            "logging_steps": 1,
            "save_steps": 10000,
            "seed": 0,
            "stream_layers": True,
            "lora": {
                "r": RANK,
                "alpha": 2 * RANK,
                "dropout": 0.0,
                "target_modules": list(TARGETS),
            },
            **({"stream_loss_chunk": 512} if is_batch else {}),
        },
        "output": f"soup-{os.getpid()}",
    }


def as_messages(text: str) -> Result:
    """A row as a conversation; with the template that adds nothing it is the text again."""
    half = len(text) // 2
    turns = (("user", text[:half]), ("assistant", text[half:]))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def as_others_shuffle(trainer: Any, dataset: Any = None) -> Any:
    """The sampler of HF's trainer, seeded as Accelerate does it for the other arms.

    Soup wraps the sampler, so that Accelerate does not seed it.
    """
    import torch

    rows = trainer.train_dataset if dataset is None else dataset
    return torch.utils.data.RandomSampler(rows, generator=torch.Generator().manual_seed(0))


def run_soup(options: argparse.Namespace, way: str, has_liger: bool) -> Result:
    """The command `soup train` in this process; it takes none of Liger's kernels."""
    import torch
    from transformers import trainer

    settings = soup_settings(options, way, torch.cuda.is_available())
    folder = options.folder
    rows = rows_of(folder, options.length, are_whole=True).read_text(encoding="utf-8").splitlines()
    write_lines(
        folder / settings["data"]["train"], [as_messages(json.loads(row)["text"]) for row in rows]
    )
    (folder / "soup.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    os.environ.setdefault("SOUP_LAYER_STREAM_CACHE_DIR", str(folder / "soup-layers"))
    result = nothing_yet()
    trainer.DEFAULT_CALLBACKS.append(timing(result))
    trainer.Trainer._get_train_sampler = as_others_shuffle
    sys.argv = ["soup", "train", "--config", "soup.yaml", "--yes"]
    from soup_cli.cli import run

    try:
        run()
    except SystemExit as end:
        if end.code not in (0, None):
            raise
    return result


def missing(name: str) -> list[str]:
    """Modules that an arm of this trainer needs and that are not installed."""
    return [each for each in NEEDS[name] if find_spec(each) is None]


def run_arm(options: argparse.Namespace, arm: str) -> None:
    """Run one arm in this process, and write what it measured to ``options.result``."""
    way = parse_arm(arm)
    result: Result
    if absent := missing(way.name):
        result = {"note": f"not installed: {', '.join(absent)}"}
    else:
        runs = {"poros": run_poros, "trl": run_trl, "unsloth": run_unsloth, "soup": run_soup}
        result = runs[way.name](options, way.how, way.has_liger)
        result["host_gb"], result["pinned_gb"] = host_gb()
    options.result.write_text(json.dumps(result), encoding="utf-8")


def host_gb() -> tuple[float, float]:
    """Memory of this process without mapped files, and what PyTorch has page-locked, in GB."""
    import torch

    status = memory.host_memory()
    pinned = 0
    if torch.cuda.is_available():
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return (status["host_anonymous"] + status["host_shared"]) / 1e9, pinned / 1e9


UNSLOTH_FIRST = """
import importlib.util, runpy
if importlib.util.find_spec("unsloth"):
    import unsloth
runpy.run_module("benchmarks.rivals", run_name="__main__", alter_sys=True)
"""
"""A program that is this module, after Unsloth, which changes transformers, TRL and PEFT as it is
imported, and says that it is to be imported before them."""

HOLD = """
import sys, torch
torch.zeros(1, device="cuda")
free = torch.cuda.mem_get_info()[0]
held = torch.empty(max(free - int(sys.argv[1]), 1), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
"""A program that holds the memory of the GPU but for its argument until its input ends."""


@contextmanager
def leaving(room: int | None) -> Iterator[None]:
    """While inside, no more than ``room`` bytes of the GPU are free for other processes."""
    if room is None:
        yield
        return
    command = [sys.executable, "-c", HOLD, str(room)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        if holder.stdout is None or holder.stdout.readline() != b"held\n":
            raise SystemExit("the memory of the GPU could not be held by another process")
        yield
        holder.communicate()


def environment(sites: Sequence[str], name: str) -> dict[str, str]:
    """Variables of an arm's process: its own folders come first on the path, then this checkout."""
    given = dict(os.environ)
    own = [folder for each, _, folder in (site.partition("=") for site in sites) if each == name]
    here = str(Path(__file__).resolve().parents[1])
    path = [*(str(Path(each).resolve()) for each in own), here]
    path += filter(None, given.get("PYTHONPATH", "").split(os.pathsep))
    return {**given, "PYTHONPATH": os.pathsep.join(path)}


def measure(options: argparse.Namespace, arm: str) -> Result:
    """Run one arm in a process of its own."""
    result = options.folder / "result.json"
    result.unlink(missing_ok=True)
    way = parse_arm(arm)
    program = ["-c", UNSLOTH_FIRST] if way.name == "unsloth" else ["-m", "benchmarks.rivals"]
    command = [sys.executable, *program, options.model, "--arm", arm]
    for key in ("folder", "length", "steps", "accumulation"):
        command += [f"--{key}", str(getattr(options, key))]
    command += ["--whole-rows"] if options.whole_rows else []
    row: Result = {"arm": arm, "length": options.length, "accumulation": options.accumulation}
    said = options.folder / "said.txt"  # no pipe: a process that is left over would hold it
    note = ""
    with leaving(way.room), said.open("w", encoding="utf-8") as file:
        began = time.time()
        try:
            subprocess.run(
                [*command, "--result", str(result)],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=options.timeout,
                check=False,
                cwd=options.folder,  # Unsloth and Soup write where they are run
                env=environment(options.sites, way.name),
            )
        except subprocess.TimeoutExpired:
            note = f"not ready after {options.timeout} s"
    row["wall_s"] = round(time.time() - began, 1)
    if note or not result.exists():
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines() or ["nothing"]
        return {**row, "note": note or " ".join(lines[-3:])[-300:], "last": lines[-LAST_LINES:]}
    return {**row, **json.loads(result.read_text(encoding="utf-8")), "began": began}


def step_times(row: Mapping[str, Any]) -> list[float]:
    """Seconds between the logs of two steps, of the last half."""
    between = [after - before for before, after in pairwise(row["times"])]
    return between[len(between) // 2 :]


def summary(row: Mapping[str, Any]) -> Result:
    """What is told of a run: milliseconds of a step, tokens a second, memory and losses."""
    told = {key: row[key] for key in ("arm", "length", "accumulation")}
    if "note" in row:
        return told | {"note": row["note"]}
    steps = step_times(row)
    median = statistics.median(steps)
    return told | {
        "step_ms": round(median * 1e3, 1),
        "least_ms": round(min(steps) * 1e3, 1),
        "tokens_per_s": round(row["length"] * row["accumulation"] / median),
        "peak_gb": round(row["peak_gb"], 2),
        "loaded_gb": round(row.get("loaded_gb", 0.0), 2),
        "host_gb": round(row["host_gb"], 2),
        "pinned_gb": round(row["pinned_gb"], 2),
        "first_s": round(row["times"][0] - row["began"]),
        "losses": [round(each, 4) for each in row["losses"]],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| arm | tokens a row | tokens/s | a step, ms (least) | peak, GB | host, GB | to step 1, s "
        "| loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        told = summary(row)
        start = f"| {told['arm']} | {told['length']} |"
        if "note" in told:
            lines.append(f"{start} {told['note']} | | | | | |")
            continue
        losses = told["losses"][len(told["losses"]) // 2 :]
        lines.append(
            f"{start} {told['tokens_per_s']:,} | {told['step_ms']:.0f} ({told['least_ms']:.0f}) | "
            f"{told['peak_gb']:.2f} | {told['host_gb']:.2f} | {told['first_s']} | "
            f"{statistics.mean(losses):.3f} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    known = argparse.ArgumentParser(prog="benchmarks.rivals", description=__doc__)
    known.add_argument("model", help="one of benchmarks.models.SHAPES")
    known.add_argument("--layers", type=int, help="fewer than the model has")
    known.add_argument("--folder", type=Path, default=Path("rivals"))
    known.add_argument("--length", type=int, default=512)
    known.add_argument("--steps", type=int, default=24)
    known.add_argument("--accumulation", type=int, default=8)
    known.add_argument("--arms", nargs="+", default=list(ARMS))
    known.add_argument("--whole-rows", action="store_true", help="cut rows, instead of packing")
    known.add_argument("--sites", nargs="+", default=[], metavar="NAME=FOLDER")
    known.add_argument("--timeout", type=int, default=TIMEOUT_S, help="seconds an arm may take")
    known.add_argument("--json", action="store_true", help="print a line of JSON an arm instead")
    known.add_argument("--out", type=Path, help="raw data: a line an arm, appended")
    known.add_argument("--arm", help=argparse.SUPPRESS)
    known.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return known


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser().parse_args(arguments)
    if options.arm is not None:
        run_arm(options, options.arm)
        return
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    num_tokens = options.length * options.accumulation * options.steps
    whole = options.length if options.whole_rows else None
    write_inputs(options.folder, options.model, options.layers, num_tokens, whole)
    rows = []
    for arm in options.arms:
        rows.append(measure(options, arm))
        line = json.dumps(summary(rows[-1])) if options.json else table(rows[-1:]).splitlines()[-1]
        print(line, flush=True)
        for said in rows[-1].get("last", []):
            print(f"    {said}", file=sys.stderr, flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if not options.json:
        print(table(rows))


if __name__ == "__main__":
    main()
