"""DistributedDataParallel over a prepared model: ranks on a CPU, equal to the resident run.

Each rank trains resident and streamed in one process, on data and dropout of its own, from adapters
that only DDP's first broadcast makes equal. A third run without DDP shows that ranks do exchange
gradients.
"""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comparing import compare_mappings
from tests.exact.ddp_arm import CELLS, NUM_STEPS, UNUSED, Bits, build, run_rank

TIMEOUT_S = 400


def launch(folder: Path, cells: list[str], world: int) -> None:
    """Run the cells on all ranks; never longer than the timeout.

    Ranks are forks of this process, which has imported everything; CUDA does not survive that.
    """
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    for cell in cells:
        build(CELLS[cell], 0)  # what ranks take copies of
    ranks = [context.Process(target=run_rank, args=(folder, cells, i, world)) for i in range(world)]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + TIMEOUT_S
        for rank in ranks:
            rank.join(max(deadline - time.monotonic(), 0))
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        logs = [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(len(ranks))]
    assert [rank.exitcode for rank in ranks] == [0] * world, "\n---\n".join(logs)


def load(folder: Path, cell: str, arm: str, world: int = 9) -> list[Bits]:
    """What each rank of the cell has found."""
    ranks = range(min(CELLS[cell].num_ranks, world))
    return [torch.load(folder / f"{cell}-{arm}-{rank}.pt") for rank in ranks]


def assert_exact(folder: Path, cell: str, world: int = 9) -> list[Bits]:
    """Every bit of every rank agrees, and there was something to agree on."""
    resident, streamed = (load(folder, cell, arm, world) for arm in ("resident", "streamed"))
    for expected, found in zip(resident, streamed, strict=True):
        assert found.pop("checked").item() is True
        # 3 layers, 2 slots: at least the layer that is not held, forward and backward.
        assert found.pop("num_loads").item() >= 2 * NUM_STEPS
        assert [str(each) for each in compare_mappings(expected, found)] == []
        assert all(bool(each.isfinite().all()) for each in found.values())
    one, other = resident[:2]
    # The files of a saved adapter are the first rank's alone.
    for name in one.keys() & other.keys():
        equal = torch.equal(one[name], other[name])
        if "gradient of" in name:
            continue
        if "weight" in name or "exp_avg" in name:
            assert equal, f"{name} differs between the ranks"
        elif "loss" in name or name == "RNG":
            assert not equal, f"{name} is the same on both ranks"
    assert any("exp_avg_sq" in name and bool(each.any()) for name, each in one.items())
    return resident


REST = ("every_backward", "autocast", "static_graph", "trainer", "taken into", "taken at the end")
REST += ("together, unused", "together, bucket views")
TOGETHER = [each for each in CELLS if each.startswith(("together", "taken")) and each not in REST]
"""Grouped; or one after the other, where gradients are taken or exchanged in between."""


@pytest.fixture(scope="module")
def essential(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is not slow, in one start of three ranks: starting costs more than training."""
    folder = tmp_path_factory.mktemp("ddp")
    launch(folder, ["no_sync", "unused", "default", *TOGETHER], 3)
    return folder


def test_accumulation_with_no_sync_and_small_buckets(essential: Path) -> None:
    resident = assert_exact(essential, "no_sync")
    for step in range(NUM_STEPS):
        for name in resident[0]:
            if name.startswith(f"step {step}, ") and "gradient" in name:
                equal = torch.equal(resident[0][name], resident[1][name])
                # Only the last micro-batch exchanges gradients.
                assert equal == ("micro-batch 1" in name), name


def test_unused_parameters_are_found(essential: Path) -> None:
    resident = assert_exact(essential, "unused")
    gradients = [name for name in resident[0] if "gradient" in name]
    weights = [name for name in resident[0] if ": weight " in name]
    # The idle adapter is trained by nobody, and is there.
    assert gradients and not any(UNUSED in name for name in gradients)
    assert any(UNUSED in name for name in weights)


def test_without_ddp_the_gradients_are_others(essential: Path) -> None:
    """Negative control: the comparison sees whether gradients were exchanged."""
    together, alone = (load(essential, "no_sync", arm) for arm in ("resident", "alone"))
    # Rank 0 starts from the same adapters in both.
    first = "step 0, micro-batch 0: loss"
    assert torch.equal(together[0][first], alone[0][first])
    differences = compare_mappings(together[0], alone[0])
    assert sum("micro-batch 1: gradient" in each.name for each in differences) >= 3 * 7 * NUM_STEPS


def test_three_ranks_sum_in_the_order_of_a_resident_run(essential: Path) -> None:
    """Buckets are filled in the order of arrival, and more than two sum by place in the bucket."""
    assert len(assert_exact(essential, "default")) == 3


def test_a_resident_run_with_our_kernels_fills_the_same_buckets(essential: Path) -> None:
    resident, kernels = (load(essential, "default", arm) for arm in ("resident", "kernels"))
    for expected, found in zip(resident, kernels, strict=True):
        assert [str(each) for each in compare_mappings(expected, found)] == []


@pytest.mark.parametrize("cell", TOGETHER)
def test_micro_batches_that_go_together(essential: Path, cell: str) -> None:
    """One exchange of gradients a step, in the order of a resident run, on two and three ranks."""
    assert len(assert_exact(essential, cell)) == CELLS[cell].num_ranks


@pytest.mark.slow
def test_four_ranks_do_too(tmp_path: Path) -> None:
    launch(tmp_path, ["four_ranks"], 4)
    assert len(assert_exact(tmp_path, "four_ranks")) == 4


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    launch(folder, list(REST), 2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("cell", REST)
def test_other_ways_of_running_ddp(rest: Path, cell: str) -> None:
    assert_exact(rest, cell)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_BACKEND", "nccl")
    cells = ["default", "no_sync", "every_backward", "autocast", "replayed", "together"]
    launch(tmp_path, cells, 2)
    for cell in cells:
        assert_exact(tmp_path, cell, 2)
