"""The page of a run: what it says, what is missing, what is damaged; nothing of it is code."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from poros.errors import RunFolderError
from poros.reporting.events import read_run
from poros.reporting.page import facts, page
from poros.reporting.step_times import OTHERS, step_times
from tests.command import poros_command
from tests.finetune.subjects import write_base, write_rows

pytest.importorskip("trl", reason="a run is made by poros finetune")


BUDGET = "1300kB"
"""In which two of the three blocks have a place."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    base, rows = write_base(folder / "base"), write_rows(folder / "rows.jsonl", "text", 160)
    options = ("--steps", "4", "--accumulation", "2", "--max-length", "64", "--validation", "0.1")
    more = ("--out", str(folder / "out"), "--trace-step", "3", "--vram", BUDGET)
    result = poros_command("finetune", str(base), str(rows), *options, *more)
    assert result.exit_code == 0, result.output
    return folder / "out"


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def write(folder: Path, lines: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    (folder / "events.jsonl").write_text(text)
    return folder


def test_the_page_of_a_real_run(run: Path) -> None:
    result = poros_command("report", str(run))
    assert result.exit_code == 0 and "report.html" in result.output
    text = (run / "report.html").read_text()
    for title in ("Loss", "Memory, planned", "PCIe transfers", "Time of step 3"):
        assert f"<h2>{title}</h2>" in text
    assert "validation" in text
    found = facts(read_run(run))
    assert found["check of the first step"] == "passed" and found["state"] == "has ended"
    assert re.fullmatch(r"[\d,]+", str(found["tokens per second"]))
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    assert "color-scheme: light dark" in text and 'name="viewport"' in text


def test_what_comes_from_files_is_no_code(run: Path, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    found = events(run)
    found[0]["versions"]["torch"] = evil
    found[-1]["fallbacks"] = [evil]
    text = page(read_run(write(tmp_path / "run", found)))
    assert "<script" not in text and "&lt;script&gt;" in text


def test_damaged_lines_are_left_out_and_named(run: Path, tmp_path: Path) -> None:
    """The last one is cut off."""
    whole = [json.dumps(each) for each in events(run)]
    folder = write(tmp_path / "run", [whole[0], "{garbage", *whole[1:], whole[-1][:9]])
    found = read_run(folder)
    assert found.damaged == [2, len(whole) + 2]
    assert found.logs == read_run(run).logs and page(found)
    assert facts(found)["damaged lines, skipped"] == f"2, {len(whole) + 2}"
    assert poros_command("report", str(folder)).exit_code == 0


def traced(name: str, kind: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "ts": begin, "dur": length}


def test_where_the_time_of_a_step_goes(run: Path, tmp_path: Path) -> None:
    """Kernels of two streams overlap from 1,500 to 2,000 us; nothing runs in the last 1,000."""
    trace = [
        traced("cudaGraphLaunch", "cuda_runtime", 0, 100),
        traced("cudaLaunchKernel", "cuda_runtime", 4900, 100),
        traced("cudaStreamSynchronize", "cuda_runtime", 3000, 1000),
        traced("nvjet_sm90_tst", "kernel", 1000, 1000),
        traced("flash_bwd_kernel", "kernel", 1500, 1500),
        traced("vectorized_elementwise_kernel", "kernel", 3000, 1000),
        traced("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 0, 4000),
        {"ph": "i", "name": "no span", "ts": 9000},
    ]
    file = tmp_path / "step_trace.json"
    file.write_text(json.dumps({"traceEvents": trace}))
    assert step_times(file) == {
        **{"wall": 5.0, "matrix products": 1.0, "attention": 1.5, OTHERS: 1.0},
        **{"kernels": 3.0, "idle": 2.0, "copies to the GPU": 4.0, "launches": 2},
    }
    (own,) = [each for each in events(run) if each["event"] == "step"]
    assert own["step"] == 3 and own["times"].keys() == {"wall"}, "a CPU has no kernels"
    assert own["times"] == step_times(run / "step_trace.json")


@pytest.mark.parametrize("content", [None, ""])
def test_no_run(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_text(content)
    with pytest.raises(RunFolderError, match="expected"):
        read_run(tmp_path)


def test_a_run_that_went_on_has_each_step_once(run: Path, tmp_path: Path) -> None:
    found = events(run)
    logs = [each for each in found if each["event"] == "log"]
    again = [found[0], *logs[:3], found[0], {**logs[1], "loss": 1.5}, *logs[2:], found[-1]]
    joined = read_run(write(tmp_path / "run", again))
    assert [each["step"] for each in joined.logs] == [1, 2, 3, 4]
    assert joined.logs[1]["loss"] == 1.5 and facts(joined)["starts"] == 2


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_said_and_not_drawn(
    run: Path, tmp_path: Path, loss: float
) -> None:
    found = events(run)
    lost = [each for each in found if each["event"] == "log"][1:3]
    for each in lost:
        each["loss"] = loss
    for each in found:
        if each["event"] == "evaluation":
            each["eval_loss"] = loss
    broken = read_run(write(tmp_path / "run", found))
    text = page(broken)
    assert facts(broken)["logs whose loss is not a number"] == 2
    assert "polyline" in text and "nan" not in text and "validation" not in text.split("Memory")[0]


def test_a_rate_is_that_between_two_logs_of_a_start(run: Path) -> None:
    """However many steps lie between them."""
    logs = read_run(run).logs
    assert ["poros/tokens_per_s" in each for each in logs] == [False, True, True, True]
    for before, log in pairwise(logs):
        rate = (log["num_tokens"] - before["num_tokens"]) / (log["time"] - before["time"])
        assert log["poros/tokens_per_s"] == pytest.approx(rate, rel=0.1)


def test_what_is_missing_is_said(run: Path, tmp_path: Path) -> None:
    text = page(read_run(write(tmp_path / "run", events(run)[:1])))
    assert "No loss was logged that is a number." in text
