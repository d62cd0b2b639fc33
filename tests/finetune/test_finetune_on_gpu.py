"""``poros finetune`` and what comes after it, on a GPU."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("liger_kernel")

from poros.reporting.step_times import step_times
from tests.command import poros_command
from tests.finetune.arms import arm
from tests.finetune.subjects import at_step, recipe_of, run
from tests.liger import names_of_liger

pytestmark = pytest.mark.gpu

KINDS = ("sft, packed", "packed attention", "sft, padded", "dpo")
ADAPTERS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"adapter__use_dora": True}}


@pytest.mark.parametrize(
    ("kind", "adapter"), [*product(KINDS, ADAPTERS), ("bfloat16 adapter", "lora")]
)
def test_the_default(
    kind: str,
    adapter: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is on; streamed gives the resident bits; and nothing is left of it, or seen meanwhile."""
    names: list[str] = []
    at_step(monkeypatch, 2, lambda: names.extend(names_of_liger()))
    more: dict[str, Any] = {**ADAPTERS[adapter], "training__max_steps": 6}
    few = {"memory__slots": 2}
    off = {"training__use_liger_kernel": False}
    before = arm(model, data, tmp_path / "before", kind, **more, **few, **off)
    streamed = arm(model, data, tmp_path / "streamed", kind, **more, **few)
    budget = arm(model, data, tmp_path / "budget", kind, **more, memory__vram="2GiB")
    resident = arm(model, data, tmp_path / "resident", kind, **more, memory__resident=True)
    after = arm(model, data, tmp_path / "after", kind, **more, **few, **off)
    assert "Liger's norms, rotary embeddings" in streamed.said
    assert "Liger's are off" in before.said
    for found in (streamed, budget):
        assert (found.losses, found.adapter) == (resident.losses, resident.adapter)
    assert (before.losses, before.adapter) == (after.losses, after.adapter)
    assert before.adapter != streamed.adapter  # control
    assert names == names_of_liger() == []
    assert "could not be estimated" not in caplog.text


def test_a_report_has_memory_and_times_of_the_gpu(model: Path, data: Path, tmp_path: Path) -> None:
    finished = tmp_path / "finished"
    settings = {
        "model__source": model,
        "data__source": data / "text.jsonl",
        "training__max_length": 64,
        "training__max_steps": 12,
        "memory__slots": 2,
        "output__folder": finished,
        "output__trace_step": 10,
    }
    run(recipe_of(**settings))
    done = poros_command("report", str(finished))
    assert done.exit_code == 0, done.output
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "there was no GPU" not in page
    times = step_times(finished / "step_trace.json")
    assert 0 < times["matrix products"] < times["kernels"] < times["wall"]
    assert times["launches"] and times["copies to the GPU"]
