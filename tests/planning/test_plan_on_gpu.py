"""Planned and measured peaks of a training step agree on a GPU, and a budget is kept."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.gates import tiny

pytestmark = pytest.mark.gpu

TOLERANCE = 0.05
SMALL = {"num_layers": 6, "hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 8192}
CASES: dict[str, dict[str, Any]] = {
    "two slots": {},
    "five slots": {"slots": 5},
    "two layers kept": {"slots": 6, "keep_last": 2},
    "all kept": {"keep_last": 6},
    "long": {"seq_len": 2048},
    "batch of four": {"batch_size": 4, "seq_len": 256},
    "high rank": {"rank": 128},
    "large vocabulary": {"vocab_size": 65536},
    "narrow and deep": {"num_layers": 16, "hidden_size": 512, "intermediate_size": 4096},
    "accumulation": {"accumulation": 3, "rank": 64},
    "dropout": {"dropout": 0.1, "seq_len": 2048},
    "foreach optimizer": {"optimizer": "adamw_torch", "rank": 256, "seq_len": 64},
    "8-bit optimizer": {"optimizer": "adamw_bnb_8bit", "rank": 128, "seq_len": 64},
    "offloaded": {"offload_boundaries": True, "num_layers": 16, "seq_len": 2048},
    "offloaded, two layers kept": {
        "slots": 16,
        "keep_last": 2,
        "offload_boundaries": True,
        "num_layers": 16,
        "seq_len": 2048,
    },
}
CHECKED: dict[str, dict[str, Any]] = {
    "low rank": {"rank": 1},
    "blocks of two": {"rank": 1, "block_size": 2},
    "offloaded": {"rank": 1, "offload_boundaries": True, "num_layers": 16, "seq_len": 2048},
    "optimizer state is more": {"rank": 128},
}


def build(folder: Path, rank: int, sizes: dict[str, int], dropout: float = 0.0) -> Any:
    config = tiny.small_config(
        "qwen2", num_layers=sizes["num_layers"], hidden_size=sizes["hidden_size"], dropout=0.0
    )
    config.intermediate_size, config.vocab_size = sizes["intermediate_size"], sizes["vocab_size"]
    config.max_position_embeddings = 4096
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    base = tiny.load_base(folder, dtype=torch.bfloat16, device="cuda")
    return tiny.attach_lora(base, rank=rank, dropout=dropout)


def requested() -> int:
    """Peak of what was asked for, without what the allocator adds because the rest is small."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


def peaks_of(
    model: Any, batch: dict[str, torch.Tensor], accumulation: int, optimizer: str = ""
) -> tuple[int, int]:
    """Of the first step and of a later one."""
    trained = [each for each in model.parameters() if each.requires_grad]
    made: Any
    if optimizer == "adamw_bnb_8bit":
        from bitsandbytes.optim import AdamW8bit

        made = AdamW8bit(trained)
    else:
        is_foreach = optimizer == "adamw_torch"
        made = torch.optim.AdamW(trained, fused=not is_foreach, foreach=is_foreach)
    found = []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(accumulation):
            model(**batch, use_cache=False).loss.backward()
        made.step()
        made.zero_grad()
        torch.cuda.synchronize()
        found.append(requested())
    return found[0], found[1]


def start() -> int:
    """Bytes in use once libraries have their workspaces."""
    probe = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    probe(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    del probe
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def tokens(batch_size: int, seq_len: int, vocab_size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocab_size, (batch_size, seq_len), device="cuda")
    return {"input_ids": ids, "labels": ids.clone()}


USUAL: dict[str, Any] = {
    **SMALL,
    "batch_size": 1,
    "seq_len": 512,
    "rank": 16,
    "accumulation": 1,
    "slots": 2,
    "keep_last": 0,
    "block_size": 1,
    "offload_boundaries": False,
    "optimizer": "adamw_torch_fused",
    "dropout": 0.0,
}


def measure(
    folder: Path, wanted: dict[str, Any], self_check: bool
) -> tuple[poros.MemoryPlan, int, int]:
    """The plan, and the peaks of the first step and a later one."""
    base = start()
    model = build(folder, wanted["rank"], wanted, wanted["dropout"]).train()
    layout = {key: wanted[key] for key in ("keep_last", "block_size", "offload_boundaries")}
    batch = {key: wanted[key] for key in ("batch_size", "seq_len", "accumulation", "optimizer")}
    planned = poros.plan(model, **batch, **layout, num_slots=wanted["slots"], self_check=self_check)
    check = "strict" if self_check else "off"
    poros.prepare(model, slots=wanted["slots"], **layout, self_check=check)
    ids = tokens(wanted["batch_size"], wanted["seq_len"], wanted["vocab_size"])
    first, later = peaks_of(model, ids, wanted["accumulation"], wanted["optimizer"])
    print(f"planned {planned.total_num_bytes}, measured {first - base} and {later - base}")
    print(dict(planned.terms))
    return planned, first - base, later - base


@pytest.mark.parametrize("case", CASES)
def test_the_planned_peak_is_the_measured_one(tmp_path: Path, case: str) -> None:
    planned, _, later = measure(tmp_path, {**USUAL, **CASES[case]}, self_check=False)
    assert later == pytest.approx(planned.total_num_bytes, rel=TOLERANCE)


@pytest.mark.parametrize("case", CHECKED)
def test_the_peak_with_a_checked_first_step_is_the_planned_one(tmp_path: Path, case: str) -> None:
    planned, *measured = measure(tmp_path, {**USUAL, **CHECKED[case]}, self_check=True)
    assert max(measured) == pytest.approx(planned.total_num_bytes, rel=TOLERANCE)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_budget_is_kept_and_used(tmp_path: Path, share: float) -> None:
    base = start()
    model = build(tmp_path, 16, SMALL).train()
    shape = {"seq_len": 512, "accumulation": 2}
    least = poros.plan(model, **shape).total_num_bytes
    most = poros.plan(model, **shape, num_slots=6, keep_last=6).total_num_bytes
    budget = int(least + share * (most - least))
    poros.prepare(model, vram_budget=budget, self_check="off")
    _, later = peaks_of(model, tokens(1, 512, SMALL["vocab_size"]), 2)
    found = later - base
    runtime = poros.runtime(model)
    assert runtime.plan is not None and runtime.plan.total_num_bytes <= budget
    print(f"budget {budget}, planned {runtime.plan.total_num_bytes}, measured {found}")
    assert (1 - TOLERANCE) * runtime.plan.total_num_bytes < found < (1 + TOLERANCE) * budget
