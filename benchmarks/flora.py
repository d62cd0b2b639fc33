"""FLORA beside naive accumulation, LoRA and nothing: losses on held-out text, and memory.

    python -m benchmarks.flora --models t5-small gpt2 --workers 12 --out flora.jsonl

After Tables 1 and 2 of the paper (Hao, Cao and Mou, ICML 2024), with models of its sizes but with
text that is here: the docstrings of installed packages, one half of the packages for training the
model that Table 1 starts from, the other half for the arms, every tenth file held out. T5 predicts
64 tokens from the 192 before them, GPT-2 each token of 256. What is compared is the loss on text
held out, not ROUGE or BLEU.

- ``accumulation`` (Table 1): from the model trained here first, 16 micro-batches of one row an
  update. *None* updates after each micro-batch.
- ``momentum`` (Table 2): from scratch, batch 4, momentum 0.9, kappa 1000. *None* has no momentum.

The base optimizer is Adafactor. *Naive* and *LoRA* run through the same optimizer with nothing
projected; LoRA trains embeddings, norms and biases beside its adapters, as the paper's does.
Learning rates are swept for Naive and for LoRA of the middle rank, each on runs of a third of the
length; Naive's is taken for None and FLORA. ``memory`` repeats the lowest rank over AdamW, whose
state is as large as the weights.
"""

import argparse
import ast
import contextlib
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from poros.optim import Flora

SOURCES = {"first": ("torch", "numpy"), "arms": ("scipy", "sklearn", "transformers")}
LENGTH, TARGET, VOCABULARY = 256, 64, 8192
EVALUATED = 64


def docstrings(packages: tuple[str, ...], most_files: int) -> Iterator[tuple[int, str]]:
    """Number of the file and text, of docstrings with more than 200 characters."""
    number = 0
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
        for file in files[:: max(1, len(files) // most_files)]:
            number += 1
            with contextlib.suppress(SyntaxError, UnicodeDecodeError, RecursionError):
                tree = ast.parse(file.read_text(encoding="utf-8"))
                kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
                texts = (ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds))
                yield number, "\n\n".join(text for text in texts if text and len(text) > 200)


def make_data(folder: Path, most_files: int) -> None:
    """Rows of tokens, int64 [n, LENGTH], of a tokenizer made from the text itself."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    texts = {part: list(docstrings(names, most_files)) for part, names in SOURCES.items()}
    every = (text for part in texts.values() for _, text in part)
    tokenizer.train_from_iterator(every, vocab_size=VOCABULARY)
    for part, found in texts.items():
        for name, is_held_out in (("train", False), ("held_out", True)):
            chosen = [text for number, text in found if (number % 10 == 0) == is_held_out]
            ids = torch.tensor([i for text in chosen for i in tokenizer.encode(text).ids])
            rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
            torch.save(rows[order].to(torch.int16), folder / f"{part}_{name}.pt")


def make_model(name: str, seed: int) -> Any:
    """Of the size of the paper's small models, with random weights."""
    import transformers

    torch.manual_seed(seed)
    if name == "t5-small":
        config = transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config).cuda()
    sizes = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).cuda()


def loss_of(name: str, model: Any, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.cuda().long()
    if name == "t5-small":
        loss: torch.Tensor = model(
            input_ids=rows[:, :-TARGET], labels=rows[:, -TARGET:].contiguous()
        ).loss
    else:
        loss = model(input_ids=rows, labels=rows).loss
    return loss


@torch.no_grad()
def evaluate(name: str, model: Any, rows: torch.Tensor) -> float:
    model.eval()
    parts = [loss_of(name, model, part).item() for part in rows[:EVALUATED].split(16)]
    model.train()
    return sum(parts) / len(parts)


def first_model(name: str, folder: Path, updates: int) -> None:
    """The model that Table 1's setting starts from."""
    model = make_model(name, seed=0)
    rows = torch.load(folder / "first_train.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * min(1.0, (update + 1) / 50)
        start = update * 16 % (len(rows) - 16)
        loss_of(name, model, rows[start : start + 16]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), folder / f"{name}.pt")


def run_arm(job: dict[str, Any]) -> dict[str, Any]:
    """One arm from its first to its last update."""
    gc.collect()  # of the run before in this process
    torch.cuda.empty_cache()
    torch.cuda.set_device(job["device"])
    torch.set_num_threads(1)
    folder, name = Path(job["folder"]), job["model"]
    rows, held_out = (torch.load(folder / f"arms_{part}.pt") for part in ("train", "held_out"))
    model = make_model(name, seed=1)
    is_accumulation = job["setting"] != "momentum"
    if is_accumulation:
        model.load_state_dict(torch.load(folder / f"{name}.pt"))
    start = evaluate(name, model, held_out)
    if job["arm"] == "LoRA":
        model = with_lora(name, model, job["rank"])
    torch.cuda.reset_peak_memory_stats()
    # None sees as many rows as the others, in smaller updates.
    num_micro = 16 if is_accumulation and job["arm"] != "None" else 1
    batch = 1 if is_accumulation else 4
    num_batches = job["updates"] * (16 if is_accumulation else 1)
    optimizer = Flora(
        model.named_parameters(),
        job["lr"],
        rank=job["rank"] or 8,
        base=job.get("base", "adafactor"),
        accumulation=num_micro,
        momentum=0.9 if job["setting"] == "momentum" and job["arm"] != "None" else None,
        seed=job["seed"],
        projected=None if job["arm"] == "FLORA" else [],
    )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(job["seed"]))
    losses, held, began = [], {}, time.perf_counter()
    for number in range(num_batches):
        chosen = order[torch.arange(number * batch, (number + 1) * batch) % len(rows)]
        (loss_of(name, model, rows[chosen]) / num_micro).backward()
        if (number + 1) % num_micro == 0:
            held = optimizer.state_num_bytes()
            optimizer.step()
            optimizer.zero_grad()
        if (number + 1) % (num_batches // 5) == 0:
            losses.append(evaluate(name, model, held_out))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    held |= {"base": optimizer.state_num_bytes()["base"]}
    weights = sum(each.nbytes for each in model.parameters())
    return {
        **{key: value for key, value in job.items() if key not in ("folder", "device")},
        "loss before": start,
        "losses": losses,
        "best loss": min((x for x in losses if math.isfinite(x)), default=math.inf),
        "state bytes": held,
        "weights and state bytes": weights + sum(held.values()),
        "peak bytes": torch.cuda.max_memory_allocated(),
        "trained parameters": trained,
        "rows of training text": len(rows),
        "seconds": time.perf_counter() - began,
        "card": torch.cuda.get_device_name(),
    }


def with_lora(name: str, model: Any, rank: int) -> Any:
    """LoRA on attention and feed-forward matrices; everything but these is trained as it is."""
    from peft import LoraConfig, get_peft_model

    targets = {
        "t5-small": ["q", "k", "v", "o", "wi", "wo"],
        "gpt2": ["c_attn", "c_proj", "c_fc"],
    }[name]
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=targets, fan_in_fan_out=name == "gpt2"
    )
    model = get_peft_model(model, config)
    for module, each in model.named_parameters():
        if "lora_" not in module:
            each.requires_grad_("base_layer.weight" not in module)
    return model


def jobs_of(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs that choose learning rates, and the arms that take them."""
    sweep, arms = [], []
    middle = options.ranks[len(options.ranks) // 2]
    for number, model in enumerate(options.models):
        device = number % torch.cuda.device_count()
        for setting in ("accumulation", "momentum"):
            updates = options.updates if setting == "accumulation" else options.momentum_updates
            common = {"model": model, "setting": setting, "device": device, "seed": options.seed}
            common |= {"folder": str(options.folder)}
            for lr in options.rates:
                half = {**common, "updates": updates // 2, "lr": lr}
                sweep += [
                    {**half, "arm": "Naive", "rank": 0},
                    {**half, "arm": "LoRA", "rank": middle},
                ]
            whole = {**common, "updates": updates}
            arms += [{**whole, "arm": "None", "rank": 0}, {**whole, "arm": "Naive", "rank": 0}]
            arms += [
                {**whole, "arm": a, "rank": r} for a in ("LoRA", "FLORA") for r in options.ranks
            ]
        least = {"rank": options.ranks[0], "base": "adamw", "updates": 4, "lr": 1e-4}
        for arm in ("Naive", "LoRA", "FLORA"):
            arms.append({**common, "setting": "memory", "arm": arm, **least})
    return sweep, arms


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.flora",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["t5-small", "gpt2"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 1e-2])
    parser.add_argument("--updates", type=int, default=60, help="of 16 micro-batches")
    parser.add_argument("--momentum-updates", type=int, default=1100, help="of 4 rows")
    parser.add_argument("--first-updates", type=int, default=500)
    parser.add_argument("--files", type=int, default=3000, help="of a package, at most about")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/flora"))
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each run")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "arms_held_out.pt").exists():
        make_data(options.folder, options.files)
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    sweep, arms = jobs_of(options)
    best: dict[tuple[str, ...], tuple[float, float]] = {}
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        starts = [
            pool.submit(first_model, name, options.folder, options.first_updates)
            for name in options.models
        ]
        for start in starts:
            start.result()
        for done in as_completed([pool.submit(run_arm, job) for job in sweep]):
            row = done.result()
            save(options.out, {**row, "is_sweep": True})
            key = (row["model"], row["setting"], row["arm"])
            best[key] = min(best.get(key, (math.inf, 0.0)), (row["best loss"], row["lr"]))
        for job in arms:
            if "lr" not in job:
                kind = "LoRA" if job["arm"] == "LoRA" else "Naive"
                job["lr"] = best[job["model"], job["setting"], kind][1]
        for done in as_completed([pool.submit(run_arm, job) for job in arms]):
            save(options.out, done.result())
    return 0


def save(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(row), file=file)
    shown = ("model", "setting", "arm", "rank", "lr", "best loss", "seconds")
    held = f"{row['weights and state bytes'] / 1e6:.0f} MB, peak {row['peak bytes'] / 1e6:.0f} MB"
    print(" ".join(str(row[key]) for key in shown), held, row["losses"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
