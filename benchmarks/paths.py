"""RunLoRA's orders of products: one decoder layer, forward and backward, in several arms.

    python -m benchmarks.paths --out benchmarks/results/paths_h100.jsonl

The layers are those of the paper's Table 2 (Cherniuk et al.) and Qwen2.5-7B's over NF4, with LoRA
on every linear module, no dropout, and random weights. The paper gives no widths; they are those of
published configurations: ReLoRA's ``llama_250m.json`` (768, 2560, 16 heads) and ``llama_1b.json``
(2048, 5461, 32 heads, for what the paper calls 1.3b), and the ``config.json`` of
``facebook/opt-350m`` and ``FacebookAI/roberta-large`` (1024, 4096, 16 heads) and of
``Qwen/Qwen2.5-7B``. All arms share one layer, input, arriving gradient and dtype of adapters: the
model's own in the paper's layers, float32 over NF4, as PEFT has it.

- ``PEFT``: PEFT's own modules
- ``ours``: our kernels in PEFT's order
- ``chosen``: ``lora_paths="flops"``
- ``f1:b1`` and ``f2:b5``: that order by name; the paper may take the latter in bfloat16 too

Arms take turns, every other time in reverse, for ``--seconds`` of each case, so that all cases take
about 150 s. ``ms`` is the median of the device's own time, ``ms_p10`` and ``ms_p90`` its spread.
While the host queues the kernels the device sleeps, so a busy host does not count; ``host_ms`` is
how long the queueing took. Where that is longer ``is_host_bound`` is true: without CUDA graphs such
a layer takes ``host_ms`` by itself.

``saved`` is 1 - t / t_PEFT of the medians, in percent; ``paper`` is the paper's, of a whole model
on an A100: embedding, head and loss are not in ours. ``peak_gb`` is the most that was allocated
above what was there before, ``kept_gb`` what was there between forward and backward, of one layer.
``error`` is the largest difference of a gradient from PEFT's, as a share of that gradient's norm.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.models import config_of, random_model
from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import unpatch
from poros.kernels.use import patch
from poros.model.stats import adapter_counts

ARMS: dict[str, str | None] = {
    "PEFT": None,
    "ours": "peft",
    "chosen": "flops",
    "f1:b1": "f1:b1",
    "f2:b5": "f2:b5",
}
BF16, FP32 = torch.bfloat16, torch.float32
_NUM_TRIES = 8


class Case(NamedTuple):
    """A layer and its input."""

    family: str
    hidden: int
    inner: int
    heads: int
    rows: int
    length: int
    rank: int
    dtype: torch.dtype
    paper: float | None = None
    """Time saved, in percent."""


CASES = {
    "llama-250m": Case("llama", 768, 2560, 16, 34, 1024, 256, FP32, 15.99),
    "llama-1.3b": Case("llama", 2048, 5461, 32, 24, 1024, 512, BF16, 12.06),
    "opt-350m": Case("opt", 1024, 4096, 16, 100, 512, 128, BF16, 28.29),
    "roberta-large": Case("roberta", 1024, 4096, 16, 64, 512, 128, BF16, 22.66),
    **{
        f"qwen2.5-7b-rows{rows}-rank{rank}": Case(
            "qwen2.5-7b", 3584, 18944, 28, rows, 2048, rank, BF16
        )
        for rows in (1, 8)
        for rank in (16, 128)
    },
}


def tiny(case: Case) -> Case:
    """One that runs on a CPU in moments."""
    family = "tiny" if case.family == "qwen2.5-7b" else case.family
    return case._replace(family=family, hidden=64, inner=128, heads=4, rows=2, length=24, rank=8)


def layer_of(case: Case, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The layer without adapters, and what it is called with besides its input."""
    torch.manual_seed(0)
    if case.family in ("qwen2.5-7b", "tiny"):
        config = config_of(case.family, 1)
        config.vocab_size, config._attn_implementation = 512, "sdpa"
        inner = random_model(config).to(device).model
        return inner.layers[0], _positions(inner.rotary_emb, case, device)
    sizes = {
        "hidden_size": case.hidden,
        "num_attention_heads": case.heads,
        "attn_implementation": "sdpa",
    }
    kwargs: dict[str, Any] = {}
    layer: nn.Module
    with device:
        if case.family == "llama":
            from transformers.models.llama import modeling_llama as llama

            config = llama.LlamaConfig(**sizes, intermediate_size=case.inner)
            layer = llama.LlamaDecoderLayer(config, 0)
            kwargs = _positions(llama.LlamaRotaryEmbedding(config), case, device)
        elif case.family == "opt":
            from transformers.models.opt import modeling_opt as opt

            options = {"do_layer_norm_before": False, "dropout": 0.0}
            layer = opt.OPTDecoderLayer(opt.OPTConfig(**sizes, **options, ffn_dim=case.inner), 0)
        else:
            from transformers.models.roberta import modeling_roberta as roberta

            options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = roberta.RobertaConfig(**sizes, **options, intermediate_size=case.inner)
            layer = roberta.RobertaLayer(config)
    return layer.to(case.dtype), kwargs


def _positions(rotary: Any, case: Case, device: torch.device) -> dict[str, Any]:
    positions = torch.arange(case.length, device=device)[None]
    like = torch.empty(1, device=device, dtype=case.dtype)
    return {"position_embeddings": rotary(like, positions), "attention_mask": None}


def adapted(case: Case, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The layer with LoRA on every linear module, and B that is not zero."""
    from peft import LoraConfig, inject_adapter_in_model

    layer, kwargs = layer_of(case, device)
    layer.requires_grad_(False)
    names = [name for name, each in layer.named_modules() if isinstance(each, nn.Linear)]
    config = LoraConfig(r=case.rank, lora_alpha=2 * case.rank, target_modules=names)
    layer = inject_adapter_in_model(config, layer)
    is_4bit = case.family in ("qwen2.5-7b", "tiny")
    for name, each in layer.named_parameters():
        if "lora_" in name:
            each.data = each.data.to(device, FP32 if is_4bit else case.dtype)
            if "lora_B" in name:
                each.data.normal_(0, 0.02)
            each.requires_grad_(True)
    return layer.train(), kwargs


class Sample(NamedTuple):
    """Forwards and backwards of one arm, each."""

    ms: float
    """Of the device, from the first kernel to the last."""
    host_ms: float
    """Until all kernels were queued; on a CPU the same."""


class Bench:
    """One layer, and what goes into it."""

    def __init__(self, case: Case, device: torch.device, under_autocast: bool) -> None:
        self.layer, self._kwargs = adapted(case, device)
        self._trained = [each for each in self.layer.parameters() if each.requires_grad]
        self._hidden = torch.randn(case.rows, case.length, case.hidden, device=device).to(
            case.dtype
        )
        self._arriving = torch.randn_like(self._hidden)
        self._device, self._is_cuda = device, device.type == "cuda"
        self._autocast = torch.autocast(device.type, dtype=BF16, enabled=under_autocast)
        self._sleep_ms = 20.0

    def step(self, memory: dict[str, float] | None = None) -> list[torch.Tensor]:
        """One forward and backward: the gradients; ``memory`` gets what it took."""
        input = self._hidden.detach().requires_grad_()
        before = 0
        if memory is not None:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with self._autocast:
            result = self.layer(input, **self._kwargs)
        result = result[0] if isinstance(result, tuple) else result
        kept = torch.cuda.memory_allocated() - before if memory is not None else 0
        arriving = self._arriving.to(result.dtype)
        gradients = torch.autograd.grad(result, [input, *self._trained], arriving)
        if memory is not None:
            peak = torch.cuda.max_memory_allocated() - before
            memory |= {"peak_gb": round(peak / 1e9, 4), "kept_gb": round(kept / 1e9, 4)}
        return list(gradients)

    def sample(self, num_steps: int = 2) -> Sample:
        """Time some steps.

        The device sleeps until all of them are queued, so that it never waits for the host, which
        is timed by itself.
        """
        if not self._is_cuda:
            began = time.perf_counter()
            self.step()
            ms = (time.perf_counter() - began) * 1e3
            return Sample(ms, ms)
        for _ in range(_NUM_TRIES):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self._sleep_ms * 2e6))  # cycles: an H100 makes up to 1.98e6 a ms
            first.record()
            began = time.perf_counter()
            for _ in range(num_steps):
                self.step()
            host_ms = (time.perf_counter() - began) * 1e3
            last.record()
            was_asleep = not first.query()
            last.synchronize()
            if was_asleep:
                return Sample(first.elapsed_time(last) / num_steps, host_ms / num_steps)
            self._sleep_ms = 1.5 * max(host_ms, self._sleep_ms)
        raise RuntimeError(
            f"expected {num_steps} steps to be queued while the device slept for up to "
            f"{self._sleep_ms:.0f} ms, found that the host was slower: it waits for the device, or "
            "others keep it busy"
        )


def measure(
    name: str, case: Case, device: torch.device, seconds: float, under_autocast: bool
) -> list[dict[str, Any]]:
    """One row for each arm."""
    bench = Bench(case, device, under_autocast)
    rows: dict[str, dict[str, Any]] = {arm: {"samples": []} for arm in ARMS}
    reference: list[torch.Tensor] = []

    def warm_up(row: dict[str, Any]) -> None:
        for _ in range(2):
            bench.step()
        found = bench.step(row if device.type == "cuda" else None)
        reference.extend([] if reference else found)  # of PEFT, which is the first
        row["error"] = max(
            float((left - right).float().norm() / right.float().norm())
            for left, right in zip(found, reference, strict=True)
        )

    def take(row: dict[str, Any]) -> None:
        row["samples"].append(bench.sample())

    for arm, row in rows.items():
        with_arm(bench.layer, ARMS[arm], row, warm_up)
    reference.clear()
    began, number = time.perf_counter(), 0
    while number < 6 or (number < 100 and time.perf_counter() - began < seconds):
        for arm in list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]:
            with_arm(bench.layer, ARMS[arm], rows[arm], take)
        number += 1
    facts = {"autocast": under_autocast}
    return [facts | finished(name, case, arm, row, rows, device) for arm, row in rows.items()]


def with_arm(
    layer: nn.Module, paths: str | None, row: dict[str, Any], run: Callable[[Any], None]
) -> None:
    """Run an arm once."""
    tally = None if paths is None else KernelStats(lora_paths=paths)
    if tally is not None:
        patch(layer, next(layer.parameters()).device, tally)
    try:
        run(row)
    finally:
        if tally is not None:
            row["orders"] = adapter_counts(tally)["lora_paths"]["shapes"]
            unpatch(layer.modules())


def finished(
    name: str,
    case: Case,
    arm: str,
    row: dict[str, Any],
    rows: dict[str, dict[str, Any]],
    device: torch.device,
) -> dict[str, Any]:
    """A row as it is written."""
    times = sorted(each.ms for each in row["samples"])
    host = statistics.median(each.host_ms for each in row["samples"])
    median, of_peft, of_ours = (
        statistics.median(each.ms for each in other["samples"])
        for other in (row, rows["PEFT"], rows["ours"])
    )
    memory = {key: row[key] for key in ("peak_gb", "kept_gb") if key in row}
    saved_gb = {
        f"{key}_saved": round(rows["PEFT"][key] - value, 4) for key, value in memory.items()
    }
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "case": name,
        "arm": arm,
        "tokens": case.rows * case.length,
        "rank": case.rank,
        "dtype": str(case.dtype).removeprefix("torch."),
        "ms": round(median, 3),
        "ms_p10": round(times[len(times) // 10], 3),
        "ms_p90": round(times[-1 - len(times) // 10], 3),
        "host_ms": round(host, 3),
        "is_host_bound": device.type == "cuda" and host > median,
        "saved": round(100 * (1 - median / of_peft), 2),
        "saved_over_ours": round(100 * (1 - median / of_ours), 2),
        "paper": case.paper,
        **memory,
        **saved_gb,
        "error": row["error"],
        "orders": row.get("orders", {}),
        "samples": len(times),
        "torch": torch.__version__,
        "card": card,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.paths", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"tiny, or of {', '.join(CASES)}; all if none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=8.0, help="of samples for each case")
    parser.add_argument("--autocast", action="store_true", help="run all arms under bf16 autocast")
    parser.add_argument("--out", type=Path, help="a JSON Lines file, which is never written over")
    options = parser.parse_args()
    is_tiny = "tiny" in options.cases
    wanted = [name for name in options.cases if name != "tiny"] or list(CASES)
    unknown = [name for name in wanted if name not in CASES]
    if unknown:
        parser.error(f"expected cases of {', '.join(CASES)}, found {', '.join(unknown)}")
    device = torch.device(options.device)
    out = None if options.out is None else options.out.open("x", encoding="utf-8")
    for name in wanted:
        case = tiny(CASES[name]) if is_tiny else CASES[name]
        for row in measure(name, case, device, options.seconds, options.autocast):
            line = json.dumps(row)
            print(line, flush=True)
            if out is not None:
                print(line, file=out, flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if out is not None:
        out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
