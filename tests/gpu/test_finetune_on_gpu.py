"""``poros finetune`` and what comes after it, on a GPU."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="poros finetune needs TRL")
pytest.importorskip("liger_kernel")

from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from safetensors.torch import load_file

import poros
from poros.merging.merge import merge
from tests.command import poros_command
from tests.finetune.arms import arm
from tests.finetune.subjects import at_step, recipe_of, rows, run, write_model, write_rows
from tests.liger import names_of_liger
from tests.support import same_bits

pytestmark = pytest.mark.gpu

KINDS = ("sft, packed", "sft, padded", "dpo")
ADAPTERS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"adapter__use_dora": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for form in ("messages", "text", "preferences"):
        write_rows(folder / f"{form}.jsonl", rows(form))
    return folder


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some steps, of which one was traced."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    settings = {
        "model__source": model,
        "data__source": data / "text.jsonl",
        "training__max_length": 64,
        "training__max_steps": 12,
        "memory__slots": 2,
        "output__trace_step": 11,
        "output__folder": folder,
    }
    run(recipe_of(**settings))
    return folder


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
    assert "Liger's feed-forwards, norms, rotary embeddings" in streamed.said
    assert "Liger's are off" in before.said
    for found in (streamed, budget):
        assert (found.losses, found.adapter) == (resident.losses, resident.adapter)
    assert (before.losses, before.adapter) == (after.losses, after.adapter)
    assert before.adapter != streamed.adapter  # control
    assert names == names_of_liger() == []
    assert "could not be estimated" not in caplog.text


def test_a_report_shows_both_streams(finished: Path) -> None:
    done = poros_command("report", str(finished))
    assert done.exit_code == 0, done.output
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "there was no GPU" not in page
    assert all(f'y="{row}" width=' in page for row in (6, 46))  # compute and copies
    trace = json.loads((finished / "step_trace.json").read_text(encoding="utf-8"))
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any("Memcpy HtoD" in name for name in names)


def test_a_merge_into_what_was_trained_on_has_its_bytes(finished: Path, tmp_path: Path) -> None:
    """The base that ``poros.load`` quantizes on this GPU, made dense there."""
    from bitsandbytes.functional import dequantize_4bit

    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    out = merge(finished, tmp_path / "merged", into="trained")
    found = {}
    for file in out.glob("*.safetensors"):
        found |= load_file(file)
    dense = poros.load(config["base_model_name_or_path"], quantization=None)
    quantized = poros.load(config["base_model_name_or_path"])
    for name, module in quantized.named_modules():
        if isinstance(module, Linear4bit):
            weight = module.weight.to("cuda")
            plain = dequantize_4bit(weight.data, weight.quant_state).to(torch.bfloat16)
            dense.get_submodule(name).weight.data = plain.cpu()
    merged = PeftModel.from_pretrained(dense, finished / "adapter").merge_and_unload()
    expected = merged.state_dict()
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []
