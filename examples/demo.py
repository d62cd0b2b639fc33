"""The demo: the whole of Poros on real input, offline, in a few minutes on two CPU cores.

It does what a user does. A checkpoint lies on disk as sharded safetensors; it is loaded as NF4 and
given LoRA adapters; the parity gate trains it for a few steps resident and streamed and compares
every bit; ``poros.prepare`` puts its layers in host memory; the HF Trainer fine-tunes it, and a
resident model beside it for the first steps, whose losses have to be the same and whose time stands
beside; the adapter is saved, and a fresh resident model that knows nothing of Poros reads it back
and has to give the same bits. Checkpoint and text are made on the spot (see
``poros.examples.demo_data``).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.config import MIN_SLOTS
from poros.errors import PorosError, quoted
from poros.examples.demo_data import (
    LESSON,
    ModelSize,
    RowDataset,
    documentation_topics,
    pack_rows,
    split_text,
    spread,
    train_base,
    train_tokenizer,
    with_lesson,
    write_checkpoint,
)
from poros.examples.demo_report import DemoReport, frozen_layer_num_bytes
from poros.examples.demo_training import train
from poros.io.writing import require_empty_folder, write_json
from poros.utils.devices import default_device

if TYPE_CHECKING:
    from peft import PeftModel
    from rich.console import Console
    from transformers import PreTrainedTokenizerFast, Trainer

    from poros.gates.report import ParityReport

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 16
DROPOUT = 0.05

_NUM_PHASES = 6


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the demo does; the defaults take one to two minutes on two CPU cores.

    Args:
        size: Sizes of the model.
        num_base_steps: Full-precision steps that make the base.
        num_gate_steps: Optimizer steps of the parity gate, in each arm.
        num_steps: Optimizer steps of the fine-tuning.
        num_resident_steps: Of these, how many a resident model does as well.
        batch_size: Rows per step.
        learning_rate: Peak value of the fine-tuning.
        num_eval_rows: Rows of each part to evaluate on; fewer if there are fewer.
        num_new_tokens: Tokens to generate greedily at the end.
        max_shard_num_bytes: Largest shard of the checkpoint.
        seed: Of everything that is drawn.
    """

    size: ModelSize = field(default_factory=ModelSize)
    num_base_steps: int = 160
    num_gate_steps: int = 4
    num_steps: int = 90
    num_resident_steps: int = 24
    batch_size: int = 8
    learning_rate: float = 5e-3
    num_eval_rows: int = 96
    num_new_tokens: int = 40
    max_shard_num_bytes: int = 4_000_000
    seed: int = 0


def run_demo(
    out_dir: Path,
    *,
    settings: DemoSettings | None = None,
    device: str | None = None,
    console: "Console | None" = None,
    prepare: Callable[[Any], Any] | None = None,
) -> DemoReport:
    """Run the demo and write everything it makes to ``out_dir``.

    Args:
        out_dir: Folder to write to; made if it is not there, and has to be empty.
        settings: What to do; None is the default.
        device: ``"cpu"`` or ``"cuda"``; None is the GPU if there is one.
        console: Where to tell what happens; None is standard output.
        prepare: Stands in for ``poros.prepare``, so that tests can break it.

    Returns:
        The report, also written to ``out_dir`` as ``demo.json``. A claim that does not hold is in
        it rather than raised; if it is the gate's, the demo ends there.

    Exactness:
        Two runs on one machine give the same losses to the last bit: everything is seeded, and the
        CPU part runs on one thread, since the number of threads changes the order of sums.

    Raises:
        PorosError: If the folder is not empty, the device is not there, or Python was installed
            without its documentation topics.
    """
    from rich.console import Console

    import poros

    settings = settings or DemoSettings()
    # On a large GPU a small model would not stream unless it is told to. It is compared with plain
    # transformers.
    prepare = prepare or partial(poros.prepare, slots=MIN_SLOTS, loss="reference")
    console = console or Console()
    device = _choose_device(device)
    require_empty_folder(out_dir, "out")
    report = DemoReport(device, {"checkpoint": out_dir / "checkpoint"})
    with _one_thread():
        with _phase("text and tokenizer", report, console):
            tokenizer, rows = _make_text(settings, console)
        with _phase("base checkpoint", report, console):
            _make_checkpoint(tokenizer, rows["base"], settings, report, console)
        with _phase("parity gate", report, console):
            report.parity = _run_gate(rows["train"], settings, report, console, prepare)
        # After a gate that failed, training on would only bury what it found.
        if report.parity.exact:
            with _phase("fine-tuning", report, console):
                model = _fine_tune(rows, settings, report, console, prepare, out_dir)
            with _phase("the same, resident", report, console):
                _train_resident(rows, settings, report, console, out_dir)
            with _phase("reload and compare", report, console):
                report.files["adapter"] = out_dir / "adapter"
                model.save_pretrained(report.files["adapter"])
                _compare_with_reload(model, tokenizer, rows["held_out"], settings, report, console)
    report.files["report"] = out_dir / "demo.json"
    write_json(report.files["report"], report.record())
    return report


def _make_text(
    settings: DemoSettings, console: "Console"
) -> tuple["PreTrainedTokenizerFast", dict[str, torch.Tensor]]:
    text = split_text(documentation_topics())
    tokenizer = train_tokenizer((*text.base, *text.train), settings.size.vocab_size)
    rows = {
        part: pack_rows(tokenizer, paragraphs, settings.size.num_tokens)
        for part, paragraphs in vars(text).items()
    }
    rows["lesson"] = with_lesson(tokenizer, rows["train"])
    console.print(
        f"Python's own documentation topics as {settings.size.num_tokens}-token rows: "
        f"{len(rows['base'])} for the base, {len(rows['train'])} to fine-tune on, "
        f"{len(rows['held_out'])} held out; every second row to fine-tune on begins with "
        f"one of {len(LESSON)} lines of a lesson; byte-level BPE with {len(tokenizer)} entries"
    )
    return tokenizer, rows


def _make_checkpoint(
    tokenizer: "PreTrainedTokenizerFast",
    rows: torch.Tensor,
    settings: DemoSettings,
    report: DemoReport,
    console: "Console",
) -> None:
    from tqdm import tqdm

    num_steps = settings.num_base_steps
    with tqdm(total=num_steps, desc="base, full precision") as bar:

        def on_step(loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()

        base = train_base(
            rows,
            settings.size,
            num_steps=num_steps,
            batch_size=settings.batch_size,
            seed=settings.seed,
            on_step=on_step,
        )
    shards = write_checkpoint(
        base,
        tokenizer,
        report.files["checkpoint"],
        max_shard_num_bytes=settings.max_shard_num_bytes,
    )
    num_parameters = sum(parameter.numel() for parameter in base.parameters())
    console.print(
        f"Qwen2 architecture, {settings.size.num_layers} layers, {num_parameters:,} parameters, "
        f"trained from random weights for {num_steps} steps so that there is something to adapt; "
        f"{len(shards)} safetensors shards"
    )


def _run_gate(
    rows: torch.Tensor,
    settings: DemoSettings,
    report: DemoReport,
    console: "Console",
    prepare: Callable[[Any], Any],
) -> "ParityReport":
    from poros.gates import parity, tiny
    from poros.gates.reference import TrainingSpec
    from poros.gates.report import render as render_parity

    def make_model() -> "PeftModel":
        # LoRA starts with B = 0, and then A gets no gradient: the gate's B is not zero.
        base = _load_base(report)
        return tiny.attach_lora(base, rank=RANK, dropout=DROPOUT, seed=settings.seed)

    batches = [
        {"input_ids": batch, "labels": batch}
        for batch in rows.split(settings.batch_size)[: settings.num_gate_steps]
    ]
    parity_report = parity.run_parity(
        make_model,
        batches,
        TrainingSpec(num_steps=settings.num_gate_steps, seed=settings.seed),
        prepare,
        subject="the demo's checkpoint",
        settings={"rank": RANK, "dropout": DROPOUT, "device": report.device},
    )
    render_parity(parity_report, console)
    return parity_report


def _fine_tune(
    rows: dict[str, torch.Tensor],
    settings: DemoSettings,
    report: DemoReport,
    console: "Console",
    prepare: Callable[[Any], Any],
    out_dir: Path,
) -> "PeftModel":
    import poros

    model = _adapted(settings, report)
    report.resident_num_bytes = frozen_layer_num_bytes(model)
    model = prepare(model)
    trainer = _make_trainer(model, rows, settings, report.device, out_dir)
    num_rows = settings.num_eval_rows
    parts = {part: RowDataset(spread(rows[part], num_rows)) for part in ("train", "held_out")}
    console.print(f"measuring the loss on {num_rows} rows of each part before fine-tuning")
    report.loss_before = _evaluate(trainer, parts)
    console.print(f"fine-tuning for {settings.num_steps} steps of the HF Trainer, streamed")
    report.runs["streamed"] = train(trainer, settings.seed)
    console.print("measuring the loss on the same rows after fine-tuning")
    report.loss_after = _evaluate(trainer, parts)
    runtime = poros.runtime(model)
    report.stats = {
        "num_blocks": runtime.num_blocks,
        "num_slots": runtime.num_slots,
        **runtime.stats(),
    }
    for part, before in report.loss_before.items():
        after = report.loss_after[part]
        console.print(f"{part.replace('_', '-')} loss {before:.4f} -> {after:.4f}")
    return model


def _train_resident(
    rows: dict[str, torch.Tensor],
    settings: DemoSettings,
    report: DemoReport,
    console: "Console",
    out_dir: Path,
) -> None:
    """The first steps once more, without Poros."""
    model = _adapted(settings, report)
    trainer = _make_trainer(model, rows, settings, report.device, out_dir)
    num_steps = min(settings.num_resident_steps, settings.num_steps)
    console.print(f"repeating the first {num_steps} steps with the whole base on the device")
    report.runs["resident"] = train(trainer, settings.seed, num_steps)


def _adapted(settings: DemoSettings, report: DemoReport) -> Any:
    """The checkpoint with new adapters, the same each time."""
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    set_seed(settings.seed)
    config = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        lora_dropout=DROPOUT,
        target_modules=PROJECTIONS,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(_load_base(report), config)


def _make_trainer(
    model: "PeftModel",
    rows: dict[str, torch.Tensor],
    settings: DemoSettings,
    device: str,
    out_dir: Path,
) -> "Trainer":
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(out_dir / "trainer"),
        max_steps=settings.num_steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, settings.num_steps // 10),
        logging_steps=max(1, settings.num_steps // 4),
        save_strategy="no",
        report_to="none",
        use_cpu=device == "cpu",
        dataloader_pin_memory=device != "cpu",
        disable_tqdm=False,
        seed=settings.seed,
    )
    return Trainer(model=model, args=arguments, train_dataset=RowDataset(rows["lesson"]))


def _evaluate(trainer: "Trainer", parts: dict[str, RowDataset]) -> dict[str, float]:
    metrics = trainer.evaluate(parts)
    return {part: metrics[f"eval_{part}_loss"] for part in parts}


def _compare_with_reload(
    streamed: "PeftModel",
    tokenizer: "PreTrainedTokenizerFast",
    rows: torch.Tensor,
    settings: DemoSettings,
    report: DemoReport,
    console: "Console",
) -> None:
    from peft import PeftModel

    from poros.self_check.compare import differing

    resident = PeftModel.from_pretrained(_load_base(report), report.files["adapter"])
    rows = spread(rows, settings.num_eval_rows)

    def say(model: Any, question: str) -> torch.Tensor:
        prompt = torch.tensor([tokenizer(question, add_special_tokens=False)["input_ids"]])
        said: torch.Tensor = model.generate(
            input_ids=prompt.to(report.device),
            attention_mask=torch.ones_like(prompt).to(report.device),
            max_new_tokens=settings.num_new_tokens,
            do_sample=False,
        )
        return said.cpu()[0, prompt.shape[1] :]

    def answers(model: Any) -> list[torch.Tensor]:
        return [say(model, question) for question, _ in LESSON]

    logits, tokens = {}, {}
    for name, model in (("streamed", streamed), ("resident", resident)):
        model.eval()
        with torch.no_grad():
            batches = rows.to(report.device).split(settings.batch_size)
            logits[name] = torch.cat([model(input_ids=batch).logits.cpu() for batch in batches])
            tokens[name] = answers(model)
    with torch.no_grad(), resident.disable_adapter():
        tokens["base"] = answers(resident)
    report.completions = {
        name: [_first_line(tokenizer.decode(each)) for each in said]
        for name, said in tokens.items()
    }
    report.num_logits = logits["resident"].numel()
    report.logits_difference = differing(logits["resident"], logits["streamed"], "held-out logits")
    report.same_tokens = all(map(torch.equal, tokens["resident"], tokens["streamed"]))


def _first_line(text: str) -> str:
    """The first line in which something is said; only what can be printed."""
    lines = (line.strip() for line in text.split("\n"))
    return quoted(next(filter(None, lines), ""), is_bare=True)


def _load_base(report: DemoReport) -> Any:
    """Load the checkpoint as NF4: bf16 on a GPU, fp32 on a CPU, where few have fast bf16."""
    from poros.gates import tiny

    on_cpu = report.device == "cpu"
    return tiny.load_base(
        report.files["checkpoint"],
        dtype=torch.float32 if on_cpu else torch.bfloat16,
        device=report.device,
        # The other attention kernels add up in any order in a GPU's backward, and two runs differ.
        attn_implementation=None if on_cpu else "eager",
    )


def _choose_device(device: str | None) -> str:
    has_gpu = torch.cuda.is_available()
    if device is None:
        return default_device().type
    if device not in ("cpu", "cuda") or (device == "cuda" and not has_gpu):
        found = "one" if has_gpu else "none"
        raise PorosError(
            f"device: expected 'cpu', or 'cuda' on a machine with a GPU that torch can use (found "
            f"{found} here), found {device!r}"
        )
    return device


@contextmanager
def _phase(name: str, report: DemoReport, console: "Console") -> Iterator[None]:
    """Announce a phase and record its wall time."""
    console.rule(f"{len(report.phase_s) + 1} of {_NUM_PHASES}: {name}", align="left")
    start = time.perf_counter()
    yield
    report.phase_s[name] = round(time.perf_counter() - start, 3)


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
