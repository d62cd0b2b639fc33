"""What the plan says of each Poros row, with rates measured in the same run."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import poros
from benchmarks import memory
from benchmarks.work import Work
from poros.config import MIN_SLOTS
from poros.planning.meta_model import shapes_of
from poros.planning.request import Speeds
from poros.streams import gb_per_s


def add_forecasts(model: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Add ``planned_num_bytes``, and ``forecast_ms`` where a resident arm did the same work.

    The rate of compute is that arm's: its step is one product per weight in forward and one in
    backward. The rate of copies is the plain copy's of the row's own arm.
    """
    for case in dict.fromkeys(row["case"] for row in rows if "num_slots" in row):
        own = [row for row in rows if row["case"] == case and "num_slots" in row]
        work = Work(own[0]["batch"], own[0]["seq"])
        options = {key: own[0][key] for key in ("num_slots", "keep_last", "block_size")}
        options["num_slots"] = max(MIN_SLOTS, options["num_slots"])  # one if all is one block
        for key in ("offload_boundaries", "stream_embedding", "stream_head"):
            options[key] = bool(own[0].get(key))
        options["cuda_graphs"] = own[0].get("cuda_graphs")
        options["loss"] = own[0].get("loss", "reference")
        resident = [
            row["ms"]
            for row in rows
            if row["arm"] == "resident" and "ms" in row and _work(row) == work
        ]
        speeds = None
        if resident:
            num_tokens = work.batch_size * work.seq_len
            shapes = shapes_of(model)
            num_parameters = shapes.num_linear_parameters + shapes.num_head_parameters
            tflop = 2 * 2e-12 * num_parameters * num_tokens
            speeds = Speeds(
                copy_gb_per_s=statistics.median(row["copy_gb_per_s"] for row in own),
                tflop_per_s=tflop / (statistics.median(resident) / 1e3),
            )
        planned = poros.plan(
            model, seq_len=work.seq_len, batch_size=work.batch_size, speeds=speeds, **options
        )
        for row in own:
            row["planned_num_bytes"] = planned.total_num_bytes
            if planned.step_ms is not None:
                row["forecast_ms"] = planned.step_ms


def copy_rate(runtime: Any, device: torch.device, repeats: int = 3) -> float:
    """GB/s of plain copies of whole blocks, one after the other, on one stream."""
    slabs = [runtime.host_slab(block) for block in range(runtime.num_blocks)]
    target = torch.empty(max(map(len, slabs)), dtype=torch.uint8, device=device)
    rates = []
    for _ in range(repeats):
        memory.synchronize(device)
        began = time.perf_counter()
        for slab in slabs:
            target[: len(slab)].copy_(slab, non_blocking=True)
        memory.synchronize(device)
        rates.append(gb_per_s(sum(map(len, slabs)), 1e3 * (time.perf_counter() - began)))
    return statistics.median(rates)


def _work(row: dict[str, Any]) -> Work:
    return Work(row["batch"], row["seq"])
