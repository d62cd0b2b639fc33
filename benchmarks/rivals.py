"""Whole runs of `poros finetune` beside TRL's trainer, over one checkpoint and one file of rows.

    python -m benchmarks rivals qwen2.5-7b --length 512 --out rivals.jsonl
    python -m benchmarks rivals qwen2.5-7b --arms poros:4GiB trl:checkpointed --length 2048

A checkpoint of random weights at true shapes, a tokenizer of 8,000 tokens and rows of the text that
Python comes with are written into ``--folder``, once. Each arm is a process of its own and trains
LoRA of rank 16 on all linear layers, in bf16 autocast, on rows packed to ``--length`` tokens, one a
micro-batch, with fused AdamW:

* ``poros:SIZE``: the command `poros finetune --vram SIZE`;
* ``trl:resident`` and ``trl:checkpointed``: TRL's ``SFTTrainer`` over a 4-bit base of transformers.

``+no-liger`` behind an arm leaves Liger's kernels out. Times are between the logs of two steps, the
median of the last half; tokens are those of whole rows, padding included (packing leaves little).
Peaks are those that the allocator saw from the start, loading and first steps included. Rows are
packed by each in its own way, and TRL's adapters over 4 bits are bfloat16, so losses are near each
other, not equal.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.models import config_of, random_dense

ARMS = ("poros:4GiB", "poros:24GiB", "trl:resident", "trl:checkpointed")
WITHOUT_LIGER = "+no-liger"
RANK = 16
LEARNING_RATE = 2e-4
VOCABULARY = 8000
MOST_CHARACTERS = 6000
"""Of a row, which is some paragraphs of a topic."""
TIMEOUT_S = 500

Result = dict[str, Any]


class Log(logging.Handler):
    """What a run says, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, with the time of the clock."""
        self.lines.append((record.created, record.getMessage()[:200]))


def write_inputs(folder: Path, name: str, num_layers: int | None, num_tokens: int) -> None:
    """Write the checkpoint and its tokenizer, and rows of at least ``num_tokens``, if not there."""
    from poros.examples.demo_data import documentation_topics, train_tokenizer

    texts = [text.strip() for text in documentation_topics().values()]
    checkpoint, rows = folder / "model", folder / "rows.jsonl"
    if not (checkpoint / "tokenizer.json").exists():
        config = config_of(name, num_layers)
        random_dense(config).save_pretrained(checkpoint)
        train_tokenizer(texts, min(VOCABULARY, config.vocab_size)).save_pretrained(checkpoint)
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
    arguments = ["finetune", str(options.folder / "model"), str(options.folder / "rows.jsonl")]
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


def run_trl(options: argparse.Namespace, way: str, has_liger: bool) -> Result:
    """TRL's trainer, as its documentation has it for a 4-bit base."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        TrainerCallback,
    )
    from trl import SFTConfig, SFTTrainer

    source = str(options.folder / "model")
    has_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.bfloat16,
        device_map={"": 0} if has_gpu else "cpu",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )
    times: list[float] = []
    losses: list[float] = []

    class Timing(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                times.append(time.time())
                losses.append(logs["loss"])

    settings = SFTConfig(
        output_dir=str(options.folder / f"trl-{os.getpid()}"),
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.accumulation,
        gradient_checkpointing=way == "checkpointed",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        optim="adamw_torch_fused" if has_gpu else "adamw_torch",
        weight_decay=0.0,
        bf16=True,
        packing=True,
        max_length=options.length,
        use_liger_kernel=has_liger,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        use_cpu=not has_gpu,
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=load_dataset(
            "json", data_files=str(options.folder / "rows.jsonl"), split="train"
        ),
        processing_class=AutoTokenizer.from_pretrained(source),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Timing()],
    )
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 1e9 if has_gpu else 0.0
    return {"times": times, "losses": losses, "peak_gb": peak, "fallbacks": []}


def run_arm(options: argparse.Namespace, arm: str) -> None:
    """Run one arm in this process, and write what it measured to ``options.result``."""
    name, _, rest = arm.partition(":")
    way = rest.removesuffix(WITHOUT_LIGER)
    run = {"poros": run_poros, "trl": run_trl}[name]
    result = run(options, way, not rest.endswith(WITHOUT_LIGER))
    options.result.write_text(json.dumps(result), encoding="utf-8")


def measure(options: argparse.Namespace, arm: str) -> Result:
    """Run one arm in a process of its own."""
    result = options.folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.rivals", options.model, "--arm", arm]
    for key in ("folder", "length", "steps", "accumulation"):
        command += [f"--{key}", str(getattr(options, key))]
    began = time.time()
    row: Result = {"arm": arm, "length": options.length, "accumulation": options.accumulation}
    try:
        ended = subprocess.run(
            [*command, "--result", str(result)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**row, "note": f"not ready after {TIMEOUT_S} s"}
    row["wall_s"] = round(time.time() - began, 1)
    if not result.exists():
        last = (ended.stderr.strip() or ended.stdout.strip() or "nothing").splitlines()
        return {**row, "note": " ".join(last[-3:])[-300:]}
    return {**row, **json.loads(result.read_text(encoding="utf-8")), "began": began}


def step_times(row: Mapping[str, Any]) -> list[float]:
    """Seconds between the logs of two steps, of the last half."""
    between = [after - before for before, after in pairwise(row["times"])]
    return between[len(between) // 2 :]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| arm | tokens a row | tokens/s | a step, ms (least) | peak, GB | to step 1, s | loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        start = f"| {row['arm']} | {row['length']} |"
        if "note" in row:
            lines.append(f"{start} {row['note']} | | | | |")
            continue
        steps = step_times(row)
        median = statistics.median(steps)
        rate = row["length"] * row["accumulation"] / median
        first = row["times"][0] - row["began"]
        losses = row["losses"][len(row["losses"]) // 2 :]
        lines.append(
            f"{start} {rate:,.0f} | {median * 1e3:.0f} ({min(steps) * 1e3:.0f}) | "
            f"{row['peak_gb']:.2f} | {first:.0f} | {statistics.mean(losses):.3f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.rivals", description=__doc__)
    parser.add_argument("model", help="one of benchmarks.models.SHAPES")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--folder", type=Path, default=Path("rivals"))
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--out", type=Path, help="raw data: a line an arm, appended")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.arm is not None:
        run_arm(options, options.arm)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    num_tokens = options.length * options.accumulation * options.steps
    write_inputs(options.folder, options.model, options.layers, num_tokens)
    rows = []
    for arm in options.arms:
        rows.append(measure(options, arm))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
