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
- ``f2:b5``: that order by name, as the paper may take it in bfloat16 too

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
from poros.kernels.adapters import Tally
from poros.kernels.forwards import hand_back
from poros.kernels.paths import Paths
from poros.kernels.use import take_over
from poros.model.stats import adapter_counts

ARMS: dict[str, str | None] = {"PEFT": None, "ours": "peft", "chosen": "flops", "f2:b5": "f2:b5"}
BF16, FP32 = torch.bfloat16, torch.float32


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


class Clock:
    """Times on the device: events of CUDA, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, first: Any, last: Any) -> float:
        if not self.is_cuda:
            return float(last - first) * 1e3
        last.synchronize()
        return float(first.elapsed_time(last))


def measure(name: str, case: Case, device: torch.device, passes: int) -> list[dict[str, Any]]:
    """One row for each arm."""
    layer, kwargs = adapted(case, device)
    trained = [each for each in layer.parameters() if each.requires_grad]
    hidden = torch.randn(case.rows, case.length, case.hidden, device=device).to(case.dtype)
    arriving = torch.randn_like(hidden)
    clock, is_cuda = Clock(device), device.type == "cuda"

    def once(row: dict[str, Any]) -> list[torch.Tensor]:
        input = hidden.detach().requires_grad_()
        before = 0
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = clock.mark()
        result = layer(input, **kwargs)
        result = result[0] if isinstance(result, tuple) else result
        kept = torch.cuda.memory_allocated() - before if is_cuda else 0
        gradients = torch.autograd.grad(result, [input, *trained], arriving)
        row["times"].append(clock.ms(started, clock.mark()))
        if is_cuda:
            row["peak_gb"] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 4)
            row["kept_gb"] = round(kept / 1e9, 4)
        return list(gradients)

    rows: dict[str, dict[str, Any]] = {arm: {"times": []} for arm in ARMS}
    reference: list[torch.Tensor] = []
    for number in range(passes + 2):
        order = list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]
        for arm in order:
            with_arm(layer, ARMS[arm], rows[arm], lambda row: check(once(row), row, reference))
        reference.clear()
    return [finished(name, case, arm, row, rows, device) for arm, row in rows.items()]


def with_arm(
    layer: nn.Module, paths: str | None, row: dict[str, Any], run: Callable[[Any], None]
) -> None:
    """Run an arm once."""
    tally = None if paths is None else Tally(paths=Paths.of(paths))
    if tally is not None:
        take_over(layer, next(layer.parameters()).device, tally)
    try:
        run(row)
    finally:
        if tally is not None:
            row["orders"] = adapter_counts(tally)["lora_paths"]["shapes"]
            hand_back(layer.modules())


def check(found: list[torch.Tensor], row: dict[str, Any], reference: list[torch.Tensor]) -> None:
    """Compare the gradients of an arm's first run with PEFT's, which run first."""
    if not reference:
        reference += found
    if "error" not in row:
        shares = [
            float((left - right).float().norm() / right.float().norm())
            for left, right in zip(found, reference, strict=True)
        ]
        row["error"] = max(shares)


def finished(
    name: str,
    case: Case,
    arm: str,
    row: dict[str, Any],
    rows: dict[str, dict[str, Any]],
    device: torch.device,
) -> dict[str, Any]:
    """A row as it is written."""
    times = sorted(row["times"][2:])
    median, of_peft, of_ours = (
        statistics.median(each["times"][2:]) for each in (row, rows["PEFT"], rows["ours"])
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
        "saved": round(100 * (1 - median / of_peft), 2),
        "saved_over_ours": round(100 * (1 - median / of_ours), 2),
        "paper": case.paper,
        **memory,
        **saved_gb,
        "error": row["error"],
        "orders": row.get("orders", {}),
        "passes": len(times),
        "torch": torch.__version__,
        "card": card,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.paths", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"tiny, or of {', '.join(CASES)}; all if none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--passes", type=int, default=10)
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
        for row in measure(name, case, device, options.passes):
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
