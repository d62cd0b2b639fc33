"""FLORA beside naive accumulation, LoRA and nothing: losses on held-out text, and memory.

    python -m benchmarks.flora --models t5-small gpt2 --workers 8 --seconds 520 --out flora.jsonl

After Tables 1 and 2 of the paper (Hao, Cao and Mou, ICML 2024), with models of its sizes but with
text that is here: the docstrings of installed packages, one half of the packages for training the
model that Table 1 starts from, the other half for the arms, every tenth file held out. T5 predicts
64 tokens from the 192 before them, GPT-2 each token of 256. What is compared is the loss on text
held out, not ROUGE or BLEU.

- ``accumulation`` (Table 1): from the model trained here first, 16 micro-batches of one row an
  update. *None* updates after each micro-batch.
- ``momentum`` (Table 2): from scratch, batch 4, momentum 0.9. *None* has no momentum. The paper's
  kappa of 1000 would never resample in a run this short, so 200 is taken; it is run beside it.

The base optimizer is Adafactor, products are in TF32. *Naive* and *LoRA* run through the same
optimizer with nothing projected; LoRA trains embeddings, norms and biases beside its adapters, as
the paper's does. Learning rates are swept for Naive and for LoRA and FLORA of the middle rank, on
runs of a third of the length; Naive's is taken for None. A seed decides the order of the rows,
the projections and the weights that ``momentum`` begins with. ``memory`` repeats the lowest rank
over AdamW, whose state is as large as the weights.

Models are spread over the GPUs. Runs are started in the order of what is worth most, so that a run
that ends after ``--seconds`` has whole comparisons of fewer seeds. Runs that are in ``--out``
already are left out, if they are of the same text (its digest is in each row); sweeps of another
text are taken, since they choose nothing but the learning rate.
"""

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from poros.optim import Flora

SOURCES = {"first": ("torch", "numpy"), "arms": ("scipy", "sklearn", "transformers")}
LENGTH, TARGET, VOCABULARY = 256, 64, 8192
EVALUATED = 128
RATES = {
    "accumulation": {
        "Naive": (3e-3, 1e-2, 3e-2),
        "LoRA": (1e-2, 3e-2, 1e-1),
        "FLORA": (3e-3, 1e-2, 3e-2),
    },
    "momentum": {
        "Naive": (1e-3, 3e-3, 1e-2),
        "LoRA": (3e-3, 1e-2, 3e-2),
        "FLORA": (1e-3, 3e-3, 1e-2),
    },
}


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


def digest_of(folder: Path) -> str:
    """Of the rows of tokens in it."""
    found = hashlib.sha256()
    for part in ("first_train", "arms_train", "arms_held_out"):
        found.update(torch.load(folder / f"{part}.pt").numpy().tobytes())
    return found.hexdigest()[:12]


def make_model(name: str, seed: int, device: torch.device, is_tiny: bool) -> Any:
    """Of the size of the paper's small models, with random weights."""
    import transformers

    torch.manual_seed(seed)
    sizes: dict[str, Any]
    if name == "t5-small":
        sizes = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
        if is_tiny:
            sizes |= {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2}
            sizes |= {"num_layers": 1, "vocab_size": VOCABULARY}
        config = transformers.T5Config(**sizes)
        return transformers.T5ForConditionalGeneration(config).to(device)
    sizes = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    if is_tiny:
        sizes |= {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": VOCABULARY}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(device)


def loss_of(name: str, model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Of int64 ``rows`` [n, LENGTH]."""
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
    parts = [loss_of(name, model, part).item() for part in rows[:EVALUATED].split(8)]
    model.train()
    return sum(parts) / len(parts)


def prepare(device: torch.device) -> None:
    """This process, for its next run."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    gc.collect()  # of the run before
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()


def first_model(name: str, folder: Path, updates: int, device: Any, is_tiny: bool) -> None:
    """The model that Table 1's setting starts from."""
    device = torch.device(device)
    prepare(device)
    model = make_model(name, 0, device, is_tiny)
    rows = torch.load(folder / "first_train.pt").to(device).long()
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
    device = torch.device(job["device"])
    prepare(device)
    folder, name, is_accumulation = Path(job["folder"]), job["model"], job["setting"] != "momentum"
    rows, held_out = (
        torch.load(folder / f"arms_{part}.pt").to(device).long() for part in ("train", "held_out")
    )
    model = make_model(name, 1 + job["seed"], device, job["is_tiny"])
    if is_accumulation:
        model.load_state_dict(torch.load(folder / f"{name}.pt", map_location=device))
    start = evaluate(name, model, held_out)
    if job["arm"] == "LoRA":
        model = with_lora(name, model, job["rank"])
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
        kappa=job.get("kappa", 1000),
        seed=job["seed"],
        projected=None if job["arm"] == "FLORA" else [],
    )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(job["seed"]))
    order = order[torch.arange(num_batches * batch) % len(rows)].to(device)
    losses, held, peaks, began = [], {}, [], time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(num_batches):
        chosen = rows[order[number * batch : (number + 1) * batch]]
        (loss_of(name, model, chosen) / num_micro).backward()
        if (number + 1) % num_micro == 0:
            held = optimizer.state_num_bytes() if number + 1 == num_batches else held
            optimizer.step()
            optimizer.zero_grad()
        if (number + 1) % (num_batches // 5) == 0:
            peaks.append(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0)
            losses.append(evaluate(name, model, held_out))
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
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
        "peak bytes": max(peaks),
        "trained parameters": trained,
        "rows of training text": len(rows),
        "seconds": time.perf_counter() - began,
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
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


def jobs_of(model: str, device: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs of one model, those worth most first: the sweeps, then arms, which have no ``lr``."""
    settings = {"momentum": options.momentum_updates, "accumulation": options.updates}
    least, *_, most = ranks = options.ranks
    common = {"model": model, "device": device, "folder": str(options.folder)}
    common |= {"is_tiny": options.tiny, "text": digest_of(options.folder)}
    jobs: list[dict[str, Any]] = []

    def add(setting: str, arm: str, rank: int, **more: Any) -> None:
        if setting == "momentum":
            more = {"kappa": 200} | more
        more = {"seed": 0, "updates": settings.get(setting, 4)} | more
        jobs.append({**common, "setting": setting, "arm": arm, "rank": rank, **more})

    for setting, updates in settings.items():
        for arm, rates in RATES[setting].items():
            rank = 0 if arm == "Naive" else ranks[len(ranks) // 2]
            for lr in rates:
                add(setting, arm, rank, lr=lr, updates=max(5, updates // 3), is_sweep=True)
    repeated = [("Naive", 0), ("FLORA", most), ("LoRA", least), ("FLORA", least), ("LoRA", most)]
    others = [(arm, rank) for rank in ranks[1:-1] for arm in ("FLORA", "LoRA")] + [("None", 0)]
    for arm, rank in repeated + others:
        for setting in settings:
            add(setting, arm, rank)
    for arm in ("Naive", "LoRA", "FLORA"):
        add("memory", arm, least, base="adamw", lr=1e-4)
    for seed in options.seeds[1:]:
        for arm, rank in repeated:
            for setting in settings:
                add(setting, arm, rank, seed=seed)
    for rank in (most, least):
        add("momentum", "FLORA", rank, kappa=1000)
    return jobs


class Plan:
    """The runs of one model that have not begun, and what the sweeps have found."""

    def __init__(self, jobs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
        self.has_first_model = False
        self.sweeps: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.done = [row for row in rows if row["model"] == jobs[0]["model"]]
        self.jobs = jobs
        for row in self.done:
            if row.get("lr") in RATES.get(row["setting"], {}).get(row["arm"], ()):
                self.note(row)

    def next_job(self) -> dict[str, Any] | None:
        """The first that can begin and has not been done."""
        for job in list(self.jobs):
            rate = job.get("lr") or self.rate_of(job)
            if rate and (job["setting"] == "momentum" or self.has_first_model):
                self.jobs.remove(job)
                ready = {**job, "lr": rate}
                if not self.has_row_of(ready):
                    return ready
        return None

    def has_row_of(self, job: dict[str, Any]) -> bool:
        unlike = {"device", "folder"} | ({"text"} if job.get("is_sweep") else set())
        wanted = {key: job[key] for key in job.keys() - unlike}
        return any(row.items() >= wanted.items() for row in self.done)

    def rate_of(self, job: dict[str, Any]) -> float | None:
        swept = "Naive" if job["arm"] == "None" else job["arm"]
        found = self.sweeps.get((job["setting"], swept), [])
        if len(found) < len(RATES[job["setting"]][swept]):
            return None
        best: float = min(found, key=lambda row: row["best loss"])["lr"]
        return best

    def note(self, row: dict[str, Any]) -> None:
        if row.get("is_sweep"):
            self.sweeps.setdefault((row["setting"], row["arm"]), []).append(row)


def run_all(options: argparse.Namespace, ends: float) -> None:
    """Every run, or those that end before the clock's ``ends``."""
    devices = options.devices or list(range(torch.cuda.device_count()))
    os.environ["OMP_NUM_THREADS"] = "1"
    context, results = multiprocessing.get_context("spawn"), queue.SimpleQueue[Any]()
    plans, pools, free = {}, {}, dict.fromkeys(options.models, options.workers)

    def begin(model: str, job: dict[str, Any] | None, call: Any, *arguments: Any) -> None:
        free[model] -= 1

        def done(result: Any) -> None:
            results.put((model, job, result))

        pools[model].apply_async(call, arguments, {}, done, done)

    text = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    for number, model in enumerate(options.models):
        device = devices[number % len(devices)]
        plans[model] = Plan(jobs_of(model, device, options), rows)
        pools[model] = context.Pool(options.workers)
        more = (options.folder, options.first_updates, device, options.tiny)
        begin(model, None, first_model, model, *more)
    while True:
        for model, plan in plans.items():
            while free[model] and (ready := plan.next_job()):
                begin(model, ready, run_arm, ready)
        running = sum(options.workers - each for each in free.values())
        left = ends - time.monotonic()
        if not running or left <= 0:
            break
        try:
            model, job, found = results.get(timeout=min(left, 1e6))
        except queue.Empty:
            continue
        free[model] += 1
        if isinstance(found, BaseException):
            print("failed:", job or f"the first {model}", repr(found), flush=True)
            found = {**(job or {}), "best loss": math.inf}
        elif job:
            save(options.out, found)
        else:
            plans[model].has_first_model = True
        plans[model].note(found or {})
    for pool in pools.values():
        pool.terminate()
    print(f"{running} runs were cut, {sum(len(each.jobs) for each in plans.values())} not begun")


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="benchmarks.flora",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["t5-small", "gpt2"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=40, help="of 16 micro-batches")
    parser.add_argument("--momentum-updates", type=int, default=400, help="of 4 rows")
    parser.add_argument("--first-updates", type=int, default=500)
    parser.add_argument("--files", type=int, default=3000, help="of a package, at most about")
    parser.add_argument("--workers", type=int, default=8, help="of a model")
    parser.add_argument("--devices", nargs="+", help="one a model, as cuda:1 or cpu; else all GPUs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which it ends")
    parser.add_argument("--tiny", action="store_true", help="models of one layer, to try this")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/flora"))
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each run")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "arms_held_out.pt").exists():
        make_data(options.folder, options.files)
    run_all(options, began + options.seconds)
    show(options.out)
    return 0


def save(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(row), file=file)
    shown = ("model", "setting", "arm", "rank", "seed", "lr", "best loss", "seconds")
    print(*(row[key] for key in shown), "sweep" if row.get("is_sweep") else "", flush=True)


def show(path: Path) -> None:
    """A Markdown table: the least loss on held-out text of each seed, and bytes."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        key = (*(row[k] for k in ("model", "setting", "arm", "rank", "lr")), row.get("kappa", ""))
        key += (row.get("text", ""),)
        groups.setdefault((bool(row.get("is_sweep")), *key), []).append(row)
    heads = "model, setting, arm, rank, lr, kappa, text, loss by seed, state MB, with weights"
    print("|", heads.replace(", ", " | "), "|")
    print("| --- " * 10 + "|")
    for (is_sweep, *key), rows in sorted(groups.items(), key=str):
        losses = ", ".join(
            f"{row['best loss']:.3f}" for row in sorted(rows, key=lambda r: r["seed"])
        )
        total, held = rows[0]["weights and state bytes"], sum(rows[0]["state bytes"].values())
        cells = [*key, losses + " (sweep)" * is_sweep, f"{held / 1e6:.0f}", f"{total / 1e6:.0f}"]
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    sys.exit(main())
