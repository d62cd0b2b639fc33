"""``poros finetune`` and what comes after it, on a GPU."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="poros finetune needs TRL")

from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from safetensors.torch import load_file

import poros
from poros.cli.conversation import Chat
from poros.merging.merge import merge
from poros.merging.saved_adapter import SavedAdapter
from tests.command import poros_command
from tests.finetune.arms import arm
from tests.finetune.subjects import recipe_of, rows, run, write_model, write_rows
from tests.support import same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for form in ("messages", "completions", "text", "preferences"):
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


@pytest.mark.parametrize("kind", ["sft, packed", "sft, padded", "dpo", "bfloat16 adapter"])
def test_streamed_equals_resident(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    streamed = arm(model, data, tmp_path / "streamed", kind, memory__slots=2)
    resident = arm(model, data, tmp_path / "resident", kind, memory__resident=True)
    assert streamed.losses == resident.losses and len(set(streamed.losses)) >= 2
    assert streamed.adapter == resident.adapter


def test_the_summary_forecasts_how_long_it_takes(model: Path, data: Path, tmp_path: Path) -> None:
    source = {"model__source": model, "data__source": data / "text.jsonl"}
    found = run(recipe_of(**source, training__max_steps=2, output__folder=tmp_path / "run"))
    assert "published rates" in found.said or "known after the first steps" in found.said


def test_a_report_shows_both_streams(finished: Path) -> None:
    done = poros_command("report", str(finished))
    assert done.exit_code == 0, done.output
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "there was no GPU" not in page
    assert all(f'y="{row}" width=' in page for row in (8, 52))  # compute and copies
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


def test_a_chat_says_what_the_resident_model_says(finished: Path) -> None:
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    base = config["base_model_name_or_path"]
    talk = Chat(SavedAdapter(finished / "adapter"), base, vram="64MiB", max_new_tokens=8)
    other = Chat(SavedAdapter(finished / "adapter"), base, max_new_tokens=8)
    assert talk.answer("the slot", lambda text: None) == other.answer("the slot", lambda text: None)
