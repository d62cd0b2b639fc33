"""Code that lies beside a model, its tokenizer or an adapter is not run, and nobody is asked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.command import poros_command
from tests.finetune.subjects import write_base, write_rows

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
class Strange(PreTrainedConfig):
    model_type = "strange"
class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, an adapter and rows; whoever asks gets a yes."""
    base = write_base(tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl", "text", 4)
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "adapter" / name)
    asked = tmp_path / "asked"
    monkeypatch.setattr("builtins.input", lambda *said: asked.touch() or "y")
    return tmp_path


def estrange(folder: Path, file: str, marker: Path) -> None:
    """Have a file of a folder say that its class is in code beside it."""
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    content = json.loads((folder / file).read_text())
    if file == "config.json":
        content |= {"model_type": "strange", "auto_map": {"AutoConfig": "strange.Strange"}}
    else:
        names = ["strange.StrangeTokenizer", "strange.StrangeTokenizer"]
        content |= {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": names}}
    (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("command", "folder", "file"),
    [
        ("finetune base rows.jsonl", "base", "config.json"),
        ("finetune base rows.jsonl --dry-run", "base", "config.json"),
        ("chat adapter --prompt a", "adapter", "tokenizer_config.json"),
        ("chat adapter --prompt a", "base", "config.json"),
        ("plan base --seq 8", "base", "config.json"),
        ("check base", "base", "config.json"),
        ("load base --out store", "base", "config.json"),
    ],
)
def test_code_is_refused_and_nobody_is_asked(
    command: str, folder: str, file: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    estrange(place / folder, file, place / "ran")
    result = poros_command(*command.split())
    assert result.exit_code == 2, result.output
    assert "code of their own (auto_map), which is never run" in result.output.replace("\n", " ")
    assert not (place / "ran").exists() and not (place / "asked").exists()
    assert not (place / "runs").exists() and not (place / "store").exists()


# What a configuration says, and what is said of it.
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a kernel of the hub": ({"attn_implementation": "someone/attention"}, "someone/attention"),
    "GPTQ": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "of 'gptq'"),
    "Mamba": ({"model_type": "mamba"}, "incompatible with Mamba"),
    "no row of layers": ({"model_type": "openai-gpt", "n_layer": 1}, "ModuleList of decoder lay"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_commands_refuse_the_same(case: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, what = CONFIGS[case]
    monkeypatch.chdir(place)
    file = place / "base" / "config.json"
    plain = json.loads(file.read_text())
    del plain["layer_types"]
    file.write_text(json.dumps({**plain, **said}))
    for command in ("finetune base rows.jsonl --dry-run", "plan base --seq 8", "load base --out s"):
        result = poros_command(*command.split())
        is_loaded = command.startswith("load") and "model_type" in said
        assert result.exit_code == 2, result.output
        assert is_loaded or what in " ".join(result.output.split()), result.output


def test_code_beside_a_model_that_is_known_is_left_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has a class of its own for it."""
    monkeypatch.chdir(place)
    estrange(place / "base", "tokenizer_config.json", place / "ran")
    result = poros_command("finetune", "base", "rows.jsonl", "--dry-run", "--max-length", "64")
    assert result.exit_code == 0, result.output
    assert not (place / "ran").exists() and not (place / "asked").exists()
