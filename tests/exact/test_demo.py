"""The demo: a small run of it end to end, and what makes it fail."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

import poros
from poros.errors import PorosError
from poros.examples.demo import MIN_LOSS_DROP, DemoReport, render, run_demo
from poros.examples.demo_data import LESSON, ModelSize, paragraphs

pytest.importorskip("trl", reason="the demo trains as poros finetune does")

SMALL = ModelSize(num_layers=3, hidden_size=96, intermediate_size=192, vocab_size=512)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def rendered(report: DemoReport) -> str:
    console = quiet()
    render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def small_demo(out_dir: Path, num_steps: int) -> DemoReport:
    options: dict[str, Any] = {"num_base_steps": 10, "size": SMALL, "device": "cpu"}
    return run_demo(out_dir, num_steps=num_steps, console=quiet(), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder: Path) -> DemoReport:
    return small_demo(folder, 12)


def test_no_paragraph_is_in_two_parts() -> None:
    margin, indented = paragraphs()
    assert len({*margin, *indented}) == len(margin) + len(indented)
    assert sum(map(len, margin)) > 100_000 and sum(map(len, indented)) > 60_000


def test_a_small_demo_holds_every_claim(demo: DemoReport) -> None:
    assert demo.is_checked and demo.is_exact and demo.passed
    assert len(demo.streamed.losses) == 12 and len(demo.said) == len(LESSON)
    before, after = demo.streamed.held_out
    assert after <= before - MIN_LOSS_DROP
    streamed, resident = (each.run.end or {} for each in (demo.streamed, demo.resident))
    assert 0 < streamed["device_num_bytes"] < resident["device_num_bytes"]
    summary = rendered(demo)
    assert "PASSED" in summary and "FAILED" not in summary
    assert all(question in summary for question, _ in LESSON)


@pytest.mark.usefixtures("demo")
def test_rows_and_checkpoint_are_those_of_a_user(folder: Path) -> None:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    for number, (question, answer) in enumerate(LESSON):
        assert json.loads(lines[2 * number])["text"].startswith(f"{question} {answer}\n\n")
    assert len(AutoTokenizer.from_pretrained(folder / "base")) == SMALL.vocab_size


def test_a_flipped_bit_is_a_failure(
    demo: DemoReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In host memory, where the self-check would stop it; here the comparison has to see it."""
    genuine = poros.prepare

    def prepare(model: Any, *, slots: int, **options: Any) -> Any:
        model = genuine(model, slots=slots, **options, self_check="off")
        if slots == 2:
            poros.runtime(model).host_slab(1)[0] ^= 1
        return model

    monkeypatch.setattr(poros, "prepare", prepare)
    report = small_demo(tmp_path, 1)
    assert report.is_checked and not report.is_exact and not report.passed
    assert report.resident.losses[0] == demo.resident.losses[0], "it repeats itself"
    assert "FAILED: streamed and resident runs differ" in rendered(report)


def test_a_loss_that_hardly_falls_is_a_failure(demo: DemoReport) -> None:
    run = replace(demo.streamed.run, evaluations=demo.streamed.run.evaluations[:1] * 2)
    report = replace(demo, streamed=replace(demo.streamed, run=run))
    assert not report.has_learned and not report.passed
    assert "FAILED: the held-out loss did not fall" in rendered(report)
    assert "a bit differed in the check" in rendered(replace(demo, is_checked=False))


def test_what_it_cannot_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(PorosError, match="expected an empty or new folder"):
        small_demo(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    with pytest.raises(PorosError, match=r"device: .*'abacus'"):
        run_demo(tmp_path / "out", device="abacus")
    assert not (tmp_path / "out").exists()
