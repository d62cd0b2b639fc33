"""Each example runs as it stands, on a small model; what it writes is an adapter that works."""

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import set_seed

import poros
from poros.examples import own_loop
from tests.covers import with_slow
from tests.finetune.subjects import TEMPLATE, write_base, write_rows
from tests.support import AS_PLAIN

pytestmark = pytest.mark.usefixtures("planned_once")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_base(tmp_path_factory.mktemp("base") / "base")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def changed(folder: Path) -> bool:
    """Whether the adapter in it has learned: lora_B begins with zeros."""
    found = load_file(folder / "adapter_model.safetensors")
    return all(bool(each.any()) for name, each in found.items() if "lora_B" in name)


# Rows, and the script for them.
ROWS = {"messages": "sft", "completions": "sft", "text": "sft", "preferences": "dpo"}


@pytest.mark.parametrize("kind", with_slow(ROWS, ["completions", "text"]))
def test_trains(kind: str, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    script = import_module(f"poros.examples.{ROWS[kind]}")
    rows = write_rows(tmp_path / "rows.jsonl", kind, 16)
    script.main(str(base), str(rows), str(tmp_path / "out"), steps=1)
    assert changed(tmp_path / "out")


def test_grpo(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers that a streamed model writes, and what it learns from them, are a resident's."""
    pytest.importorskip("trl")
    from poros.examples import grpo

    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "the slot"}, {"prompt": "a block"}] * 4)
    genuine = poros.prepare
    arms: dict[str, Callable[..., Any]] = {
        "streamed": lambda model, vram_budget: genuine(model, slots=2, **AS_PLAIN),
        "resident": lambda model, vram_budget: model,
    }
    found = {}
    for name, prepare in arms.items():
        monkeypatch.setattr(poros, "prepare", prepare)
        set_seed(0)
        grpo.main(str(base), str(rows), str(tmp_path / name), steps=2, answers=4, tokens=4)
        found[name] = (tmp_path / name / "adapter_model.safetensors").read_bytes()
    assert changed(tmp_path / "streamed")
    assert found["streamed"] == found["resident"]


def test_a_loop(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", "text", 8)
    own_loop.main(str(base), rows, str(tmp_path / "out"), steps=4)
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert changed(tmp_path / "out")


def test_each_example_is_listed() -> None:
    page = (ROOT / "docs" / "how-to" / "script.md").read_text(encoding="utf-8")
    for each in ("sft", "dpo", "grpo", "own_loop"):
        assert f"examples/{each}.py" in page


def test_the_notebook(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, with a small model and few steps."""
    pytest.importorskip("datasets")
    notebook = json.loads((ROOT / "examples" / "first_run.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", "text", 16)
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not source.startswith("%pip"):
            source = source.replace("Qwen/Qwen2.5-7B-Instruct", str(base))
            exec(compile(source.replace("STEPS = 20", "STEPS = 1"), "notebook", "exec"), names)
    assert changed(tmp_path / "adapter")
