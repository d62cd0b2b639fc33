"""The demo: a small run of it end to end, and what makes it fail."""

import io
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

import poros
from poros.api import prepare_with
from poros.errors import PorosError
from poros.examples.demo import MIN_LOSS_DROP, DemoReport, held_out, losses, render, run_demo
from poros.examples.demo_data import ModelSize
from tests.command import rendered

pytest.importorskip("trl", reason="the demo trains as poros finetune does")
pytestmark = pytest.mark.usefixtures("planned_once")

SMALL = ModelSize(num_layers=3, hidden_size=96, intermediate_size=192, vocab_size=512)


def small_demo(out_dir: Path, num_steps: int) -> DemoReport:
    options: dict[str, Any] = {"size": SMALL, "device": "cpu"}
    return run_demo(out_dir, num_steps=num_steps, console=Console(file=io.StringIO()), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder: Path) -> DemoReport:
    return small_demo(folder, 30)


def test_a_small_demo_holds_every_claim(demo: DemoReport) -> None:
    assert demo.is_exact and demo.passed and len(losses(demo.streamed)) == 30
    before, after = held_out(demo.streamed)
    assert after <= before - MIN_LOSS_DROP
    streamed, resident = (each.end or {} for each in (demo.streamed, demo.resident))
    assert 0 < streamed["device_num_bytes"] < resident["device_num_bytes"]
    summary = rendered(render, demo)
    assert "PASSED" in summary and "FAILED" not in summary


@pytest.mark.usefixtures("demo")
def test_rows_and_checkpoint_are_those_of_a_user(folder: Path) -> None:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len({*texts}) == len(texts) and sum(map(len, texts)) > 160_000
    assert len(AutoTokenizer.from_pretrained(folder / "base")) == SMALL.vocab_size


def test_a_flipped_bit_is_a_failure(
    demo: DemoReport, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In host memory, where the self-check would stop it; here the comparison has to see it."""
    genuine = prepare_with

    def prepare(model: Any, policy: poros.StreamingPolicy, **options: Any) -> Any:
        model = genuine(model, policy.override(self_check="off"), **options)
        if policy.slots == 2:
            poros.runtime(model).host_slab(1)[0] ^= 1
        return model

    monkeypatch.setattr("poros.finetune.run.prepare_with", prepare)
    rows, base = folder / "rows.jsonl", folder / "base"
    monkeypatch.setattr("poros.examples.demo.write_rows", partial(shutil.copy, rows))
    monkeypatch.setattr(
        "poros.examples.demo.write_base", lambda place, *_: shutil.copytree(base, place)
    )
    report = small_demo(tmp_path, 1)
    assert not report.is_exact and not report.passed
    assert losses(report.resident)[0] == losses(demo.resident)[0], "it repeats itself"
    assert "FAILED: streamed and resident runs differ" in rendered(render, report)


def test_a_loss_that_hardly_falls_is_a_failure(demo: DemoReport) -> None:
    run = replace(demo.streamed, evaluations=demo.streamed.evaluations[:1] * 2)
    report = replace(demo, streamed=run)
    assert not report.has_learned and not report.passed
    assert "FAILED: the held-out loss did not fall" in rendered(render, report)


def test_what_it_cannot_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(PorosError, match="expected an empty or new folder"):
        small_demo(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    with pytest.raises(PorosError, match=r"device: .*'abacus'"):
        run_demo(tmp_path / "out", device="abacus")
    assert not (tmp_path / "out").exists()
