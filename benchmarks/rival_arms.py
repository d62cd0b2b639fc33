"""Arms of ``benchmarks.rivals``: each trains with one trainer, in this process, as it has it.

An arm gets the options of the command, its way (what stands behind the trainer's name) and whether
Liger's kernels are wanted. It returns the time and the loss of each step, and the peak on the GPU.
"""

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks import memory
from benchmarks.models import TARGETS
from benchmarks.rival_inputs import rows_of, write_lines
from poros.config import parse_num_bytes

WITHOUT_LIGER = "+no-liger"
RANK = 16
LEARNING_RATE = 2e-4
NEEDS = {"poros": (), "trl": ("trl",), "unsloth": ("unsloth", "trl"), "soup": ("soup_cli", "trl")}
"""Modules that an arm needs beside those of the project."""
COMMANDS = ("poros", "soup")
"""Arms that run a command, which loads anew for each work."""
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


class Work(NamedTuple):
    """What is trained: rows of ``length`` tokens, ``accumulation`` a step."""

    length: int
    accumulation: int
    steps: int

    @property
    def num_tokens(self) -> int:
        """Of all steps."""
        return self.length * self.accumulation * self.steps

    def __str__(self) -> str:
        return f"{self.length}x{self.accumulation}:{self.steps}"


def parse_work(text: str) -> Work:
    """Read ``512x8:6``."""
    length, accumulation, steps = text.replace(":", "x").split("x")
    return Work(int(length), int(accumulation), int(steps))


def with_work(options: argparse.Namespace, work: Work) -> argparse.Namespace:
    """The options, with the settings of one work."""
    return argparse.Namespace(**{**vars(options), **work._asdict()})


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


def nothing_yet() -> Result:
    """What a run has measured before its first step."""
    return {"times": [], "steps": [], "losses": [], "peak_gb": 0.0, "fallbacks": []}


def logging_steps(steps: int) -> int:
    """From one log to the next, as ``poros finetune`` has them: the host waits for each."""
    return max(1, min(10, steps // 20))


def timing(result: Result) -> Any:
    """A callback of HF's trainer that keeps when each step was logged, with its loss and peak."""
    import torch
    from transformers import TrainerCallback

    class Timing(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                result["times"].append(time.time())
                result["steps"].append(state.global_step)
                result["losses"].append(float(logs["loss"]))
                if torch.cuda.is_available():
                    peak = torch.cuda.max_memory_allocated() / 1e9
                    result["peak_gb"] = max(peak, result["peak_gb"])

    return Timing


def run_command(command: Callable[[], object], arguments: list[str]) -> None:
    """Run a command line in this process; an exit of 0 is its end."""
    sys.argv = arguments
    try:
        command()
    except SystemExit as end:
        if end.code not in (0, None):
            raise


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
    arguments += ["--vram", size, "--steps", str(options.steps)]
    arguments += ["--max-length", str(options.length)]
    arguments += ["--accumulation", str(options.accumulation), "--out", str(out)]
    arguments += ["--rank", str(RANK), "--lr", str(LEARNING_RATE), "--save-every", "10000"]
    arguments += ["--store", str(options.folder / "store")]
    arguments += [] if has_liger else ["--no-liger"]
    arguments += ["--no-packing"] if options.whole_rows else []
    run_command(main, ["poros", *arguments])
    lines = (out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    logs = [each for each in events if each["event"] == "log"]
    return {
        "times": [each["time"] for each in logs],
        "steps": [each["step"] for each in logs],
        "losses": [each["loss"] for each in logs],
        "peak_gb": max(each.get("poros/peak_gb", 0.0) for each in logs),
        "fallbacks": next(each["fallbacks"] for each in reversed(events) if "fallbacks" in each),
        "log": log.lines,
    }


def train_each(
    options: argparse.Namespace,
    works: Sequence[Work],
    model: Any,
    tokenizer: Any,
    **more: Any,
) -> Iterator[Result]:
    """Train each work with TRL's trainer; ``more`` has ``peft_config`` and other settings."""
    import torch

    first: dict[str, Any] = {}
    for work in works:
        result = nothing_yet() | {"began": time.time()}
        if torch.cuda.is_available():
            result["loaded_gb"] = torch.cuda.memory_allocated() / 1e9
        trainer = trainer_of_trl(with_work(options, work), model, tokenizer, result, **more)
        model, _ = trainer.model, more.pop("peft_config", None)
        adapters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        with torch.no_grad():
            for name, each in adapters.items():
                each.copy_(first.setdefault(name, each.detach().clone()))
        trainer.train()
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield result


def trainer_of_trl(
    options: argparse.Namespace, model: Any, tokenizer: Any, result: Result, **more: Any
) -> Any:
    """TRL's trainer of one work, which writes what it measures to ``result``."""
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
        logging_steps=logging_steps(options.steps),
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        use_cpu=not has_gpu,
        **more,
    )
    rows = rows_of(options.folder, options.length, options.whole_rows)
    return SFTTrainer(
        model=model,
        args=settings,
        train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        processing_class=tokenizer,
        callbacks=[timing(result)()],
        **adapter,
    )


def run_trl(
    options: argparse.Namespace, works: Sequence[Work], way: str, has_liger: bool
) -> Iterator[Result]:
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
    yield from train_each(
        options,
        works,
        model,
        AutoTokenizer.from_pretrained(source),
        gradient_checkpointing=way == "checkpointed",
        use_liger_kernel=has_liger,
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )


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


def run_unsloth(
    options: argparse.Namespace, works: Sequence[Work], way: str, has_liger: bool
) -> Iterator[Result]:
    """Unsloth, as its documentation has it; it has kernels of its own instead of Liger's."""
    import torch
    from unsloth import FastLanguageModel

    checkpointing, more = unsloth_settings(way)

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(options.folder / "model"),
        max_seq_length=max(work.length for work in works),
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
        max_seq_length=max(work.length for work in works),
    )
    yield from train_each(
        options, works, model, tokenizer, gradient_checkpointing=checkpointing is not False
    )


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
            "logging_steps": logging_steps(options.steps),
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
    from soup_cli.cli import run

    run_command(run, ["soup", "train", "--config", "soup.yaml", "--yes"])
    return result


def missing(name: str) -> list[str]:
    """Modules that an arm of this trainer needs and that are not installed."""
    return [each for each in NEEDS[name] if find_spec(each) is None]


def host_gb() -> tuple[float, float]:
    """Memory of this process without mapped files, and what PyTorch has page-locked, in GB."""
    import torch

    status = memory.host_memory()
    pinned = 0
    if torch.cuda.is_available():
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return (status["host_anonymous"] + status["host_shared"]) / 1e9, pinned / 1e9


def run_arm(options: argparse.Namespace, arm: str, works: Sequence[Work]) -> None:
    """Run one arm in this process, and write to ``options.result`` what each work measured."""
    way = parse_arm(arm)
    results: list[Result] = []
    for result in results_of(options, way, works):
        if "note" not in result:
            result["host_gb"], result["pinned_gb"] = host_gb()
        results.append(result)
        options.result.write_text(json.dumps(results), encoding="utf-8")


def results_of(options: argparse.Namespace, way: Way, works: Sequence[Work]) -> Iterator[Result]:
    """What the arm measures, work by work."""
    if absent := missing(way.name):
        yield from ({"note": f"not installed: {', '.join(absent)}"} for _ in works)
    elif way.name in COMMANDS:
        run = run_poros if way.name == "poros" else run_soup
        yield from (run(with_work(options, work), way.how, way.has_liger) for work in works)
    else:
        train = run_trl if way.name == "trl" else run_unsloth
        yield from train(options, works, way.how, way.has_liger)
