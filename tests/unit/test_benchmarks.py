"""The benchmarks at a tiny shape on the CPU: every table and arm, and what they must refuse."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import __main__ as entry
from benchmarks import arms, report, rival_arms, rival_inputs, rival_table, rivals, tables
from benchmarks.arms import Arm, NotOffloadedError, Placed
from benchmarks.card import Measured, forecast
from benchmarks.models import TARGETS, config_of, random_model, with_lora
from benchmarks.protocol import COLUMNS, Bench, Case, Schedule
from benchmarks.work import Work
from poros.planning.cards import CARDS

CPU = torch.device("cpu")
SMALL = ["tiny", "--device", "cpu", "--rank", "2", "--seq", "8", "--batch", "2"]
SHORT = ["--warm", "1", "--steps", "2", "--passes", "1"]


def test_every_benchmark_has_a_description_and_a_row() -> None:
    """Of the modules that can be run; the page names no other."""
    known = entry.names()
    assert {"tables", "accumulate", "versus"} <= set(known) and "protocol" not in known
    assert all(line.endswith((".", "?")) and len(line) <= 100 for line in known.values())
    page = (entry.FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)[` ]", page, re.MULTILINE)) == set(known)


def test_one_entry_point_runs_any_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "layer", "tiny", "--seq", "8"])
    entry.main()
    assert "1 x 8 tokens" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    entry.main()
    assert all(f"  {name} " in entry.usage() for name in entry.names())
    assert capsys.readouterr().out == entry.usage() + "\n"
    monkeypatch.setattr(sys, "argv", ["benchmarks", "protocol"])
    with pytest.raises(SystemExit, match="expected the name of a benchmark, found 'protocol'"):
        entry.main()


def cells(page: str) -> list[dict[str, str]]:
    """The table of a page."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    names, *body = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(names, line, strict=True)) for line in body[1:]]


def test_poros_rows_say_what_was_moved(tmp_path: Path) -> None:
    """The CSV of a table of slots; its page is beside it."""
    path = tmp_path / "slots.csv"
    assert tables.main(["slots", *SMALL, *SHORT, "--out", str(path)]) == 0
    table = cells(path.with_suffix(".md").read_text())
    assert [line["same bits"] for line in table] == ["yes"] * 5
    assert [line["slots"] for line in table] == ["", "", "2", "3", "4"]
    rows = [row for row in report.read(path) if row["num_slots"]]
    loads = {int(row["num_slots"]): float(row["num_loads"]) for row in rows}
    assert loads == {2: 4, 3: 2, 4: 0}  # 2 (K - S) blocks of K = 4 layers
    for row in rows:
        assert (float(row["h2d_num_bytes"]) > 0) == (row["num_slots"] != "4")
        assert float(row["host_rss"]) > 0


def make_bench() -> Bench:
    config = config_of("tiny", 2)
    config._attn_implementation = "sdpa"
    model = with_lora(random_model(config, "none"), 2, targets=TARGETS)
    shape = {"model": "tiny", "quantization": "none", "layers": 2, "rank": 2}
    return Bench(model, CPU, Schedule(warm=1, steps=1, passes=1, forwards=1), shape)


def summaries(rows: list[dict[str, Any]], tmp_path: Path) -> list[dict[str, str]]:
    page = report.Page("t", "q", "c", {}, "p", "l", report.summarize_steps)
    report.write(tmp_path / "rows.csv", COLUMNS, rows, page)
    return report.summarize_steps(report.read(tmp_path / "rows.csv"))


def test_a_resident_model_does_not_pass_for_an_offloaded_one() -> None:
    """Negative control of the assertion that something really is on the CPU."""
    bench = make_bench()
    adapters = {n: p for n, p in bench.model.named_parameters() if p.requires_grad}

    @contextmanager
    def pretending(model: Any, device: torch.device) -> Iterator[Placed]:
        with arms.checkpointing(model, device):
            yield Placed(check=lambda: arms.check_offloaded(model, device, adapters))

    with pytest.raises(NotOffloadedError, match="expected no bytes in the model"):
        bench.run([Case(Arm("Accelerate offload", pretending), Work(1, 8))])


def test_other_bits_are_reported(tmp_path: Path) -> None:
    """Negative control of the comparison between arms: one weight of the base is changed."""
    bench = make_bench()

    @contextmanager
    def tampered(model: Any, device: torch.device) -> Iterator[Placed]:
        weight = arms.find_layers(model)[1][1].input_layernorm.weight
        with torch.no_grad():
            weight[0] += 1
        yield Placed()

    cases = [Case(arms.resident_arm(), Work(1, 8)), Case(Arm("tampered", tampered), Work(1, 8))]
    found = summaries(bench.run(cases), tmp_path)
    assert [line["same bits"] for line in found] == ["yes", "NO"]
    assert not report.is_exact(report.read(tmp_path / "rows.csv"))


# What is forecast of a card that is not here, from what was measured.

HERE, CARD = CARDS["h200"], CARDS["rtx3090"]
PRODUCTS, MEMORY = 989 / 71, 4800 / 936


def test_a_forecast_slows_kernels_down_each_by_its_rate_and_has_the_link_beside_or_behind() -> None:
    found = forecast(Measured(100.0, 20.0, 0.0), 25, CARD, HERE, 0.0)
    assert found.ms == pytest.approx(100 * PRODUCTS + 20 * MEMORY)
    assert found.slow_ms == pytest.approx(120 * PRODUCTS) and found.slow_ms > found.ms
    assert found.wire_ms == found.least_ms == 0
    measured = Measured(1.0, 0.0, 25e9)
    beside = forecast(measured, 25, CARD, HERE, 0.0)
    after = forecast(measured, 25, CARD, HERE, 0.0, is_serial=True)
    assert beside.ms == beside.wire_ms == 1e3
    assert after.ms == pytest.approx(1e3 + PRODUCTS)
    assert forecast(measured, 12.5, CARD, HERE, 0.0).ms == 2e3
    same = forecast(Measured(10.0, 5.0, 0.0), 55, HERE, HERE, 0.0)
    assert same.ms == same.slow_ms == 15.0


# Other trainers: what their arms are given. None of them is needed here.


def rival_options(folder: Path, *more: str) -> argparse.Namespace:
    given = ["tiny", "--folder", str(folder), "--length", "64", "--steps", "2", *more]
    return rivals.parser().parse_args(given)


def test_the_name_of_an_arm_says_trainer_way_kernels_and_room() -> None:
    assert rival_arms.parse_arm("trl:resident+no-liger") == ("trl", "resident", False, None)
    assert rival_arms.parse_arm("unsloth:auto@6GiB") == ("unsloth", "auto", True, 6 * 2**30)
    assert rival_arms.parse_arm("soup") == ("soup", "", True, None)
    with pytest.raises(SystemExit, match="expected an arm of poros, trl, unsloth, soup"):
        rival_arms.parse_arm("other:resident")


def test_unsloth_is_told_how_many_layers_it_offloads() -> None:
    assert rival_arms.unsloth_settings("resident") == (False, {})
    assert rival_arms.unsloth_settings("checkpointed") == ("unsloth", {})
    assert rival_arms.unsloth_settings("offload-27") == ("unsloth", {"offload_layers": 27})
    assert rival_arms.unsloth_settings("auto") == ("unsloth", {"offload_layers": "auto"})
    with pytest.raises(SystemExit, match="found 'offload-most'"):
        rival_arms.unsloth_settings("offload-most")


def test_soup_streams_the_micro_batches_of_a_step_apart_or_as_one_batch(tmp_path: Path) -> None:
    options = rival_options(tmp_path, "--whole-rows", "--accumulation", "4")
    apart = rival_arms.soup_settings(options, "", has_gpu=True)["training"]
    assert (apart["batch_size"], apart["gradient_accumulation_steps"]) == (1, 4)
    assert apart["stream_layers"] and apart["lora"]["r"] == rival_arms.RANK
    batch = rival_arms.soup_settings(options, "batched", has_gpu=True)["training"]
    assert (batch["batch_size"], batch["gradient_accumulation_steps"]) == (4, 1)
    with pytest.raises(SystemExit, match="expected --whole-rows"):
        rival_arms.soup_settings(rival_options(tmp_path), "", has_gpu=True)


def test_whole_rows_are_cut_by_every_trainer_to_the_same_tokens(tmp_path: Path) -> None:
    """As many as a run trains, each longer than it counts; a conversation is its row again."""
    rival_inputs.write_inputs(tmp_path, "tiny", None, 6 * 64, whole=64)
    file = rival_inputs.rows_of(tmp_path, 64, are_whole=True)
    rows = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(rows) == len(set(rows)) == 6
    assert all(len(tokenizer(row)["input_ids"]) > 64 for row in rows)
    said = rival_arms.as_messages(rows[0])["messages"]
    given = {"chat_template": rival_arms.AS_THEY_ARE, "tokenize": False}
    assert tokenizer.apply_chat_template(said, **given) == rows[0]


def test_an_arm_whose_trainer_is_not_installed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rival_arms, "find_spec", lambda name: None)
    options = rival_options(tmp_path, "--result", str(tmp_path / "result.json"))
    work = rival_arms.parse_work("64x8:2")
    rival_arms.run_arm(options, "unsloth:resident", [work, rival_arms.parse_work("64x1:3")])
    result, later = json.loads(options.result.read_text(encoding="utf-8"))
    assert later == result and str(work) == "64x8:2"
    row = {"arm": "unsloth:resident", "length": 64, "accumulation": 8, **result}
    assert rival_table.summary(row)["note"] == "not installed: unsloth, trl"
    assert "| not installed: unsloth, trl |" in rival_table.table([row])


def test_an_arm_has_its_own_folders_first_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "common")
    here = str(entry.FOLDER.parent)
    sites = ["soup=/of/soup", "unsloth=/of/unsloth"]
    paths = [rivals.environment(sites, name)["PYTHONPATH"] for name in ("soup", "trl")]
    assert [path.split(os.pathsep) for path in paths] == [
        ["/of/soup", here, "common"],
        [here, "common"],
    ]


def test_the_table_of_a_page_is_drawn_from_its_raw_data(tmp_path: Path) -> None:
    """As it stands in the project, and again once a row is added; all else in the page stays."""
    source = entry.FOLDER / "results" / "rivals_whole_rows_h100_202611.jsonl"
    raw, text = source.read_text(encoding="utf-8"), source.with_suffix(".md").read_text("utf-8")
    file = tmp_path / source.name
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    file.write_text(raw, encoding="utf-8")
    rival_table.main([str(file)])
    assert file.with_suffix(".md").read_text(encoding="utf-8") == text
    added = {"arm": "soup", "length": 512, "accumulation": 8, "lease": "z", "note": "none"}
    file.write_text(raw + json.dumps(added) + "\n", encoding="utf-8")
    rival_table.main([str(file)])
    redrawn = file.with_suffix(".md").read_text(encoding="utf-8")
    assert rival_table.TABLE.sub("", redrawn) == rival_table.TABLE.sub("", text)
    assert len(cells(redrawn)) == len(cells(text)) + 1 and cells(redrawn)[-1]["note"] == "none"
    with pytest.raises(SystemExit, match="expected one table in the page, found 0"):
        rival_table.redrawn("no table", [added])
