"""Files that somebody else may have written, damaged by hand, and the commands that read them.

What is wrong with a base is in tests/loading (``cases``), and here only what the commands add.
Each cell of {file, damage, command} ends as if the file were whole, or in a typed error that names
what is wrong; none raw, none after more than 20 seconds, and of a merge that fails nothing is left.
"""

import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.command import poros_command
from tests.comparing import compare_mappings
from tests.damage import NO_JSON, NO_TEXT, Damage, field, tensors, written
from tests.finetune.subjects import TEMPLATE, write_adapter, write_base

pytest.importorskip("trl", reason="poros finetune trains with TRL")

MOST_SECONDS = 20
ROW = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}


def first(found: dict[str, Any], part: str = "") -> str:
    return min(name for name in found if part in name and name != "__metadata__")


def put(part: str, value: Any) -> Callable[[dict[str, torch.Tensor]], Any]:
    def change(found: dict[str, torch.Tensor]) -> None:
        found[first(found, part)].view(-1)[0] = value

    return change


TEXT = {**NO_TEXT, **NO_JSON, "UTF-16": written("{}".encode("utf-16"))}
BINARY: dict[str, Damage] = {
    **NO_TEXT,
    "a pickle": lambda file: file.write_bytes(b"\x80\x04" + file.read_bytes()),
    "NaN": tensors(put("", float("nan"))),
    "infinity": tensors(put("", float("inf"))),
    "missing": tensors(lambda found: found.pop(first(found))),
    "another shape": tensors(lambda found: found.update({first(found): torch.ones(3, 5)})),
    "whole numbers": tensors(
        lambda found: found.update({first(found): found[first(found)].to(torch.int64)})
    ),
    "no tensor": tensors(lambda found: found.clear()),
    "another name": tensors(lambda found: found.update(other=found.pop(first(found)))),
}
WRONG: dict[str, Any] = {
    "null": None, "text": "x", "a list": [], "an object": {"a": 1}, "negative": -1, "zero": 0,
    "huge": 10**30, "a fraction": 1.5, "NaN": float("nan"),
}  # fmt: skip


def wrong(*names: str) -> dict[str, Damage]:
    return {f"{name}: {kind}": field(name, to=WRONG[kind]) for name, kind in product(names, WRONG)}


def split_by(pattern: str) -> Damage:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return field("pre_tokenizer", to=split | {"invert": False})


def large_vocabulary(file: Path) -> None:
    """Every letter is a token that no model has."""
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    for name in "abcdefgh":
        vocabulary[name] += 10**6
    file.write_text(json.dumps(fields))


ADAPTER, WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
CONFIG, GENERATION, MODEL = (
    "base/config.json",
    "base/generation_config.json",
    "base/model.safetensors",
)
TOKENIZER, SETTINGS = "base/tokenizer.json", "base/tokenizer_config.json"
TEMPLATE_FILE = "base/chat_template.jinja"
DAMAGES: dict[str, dict[str, Damage]] = {
    ADAPTER: {
        **TEXT,
        **wrong("r", "lora_alpha", "target_modules", "peft_type", "task_type", "rank_pattern"),
        **wrong("alpha_pattern", "modules_to_save", "bias", "use_dora", "lora_dropout"),
        **wrong("base_model_name_or_path", "layers_to_transform"),
        "rank too large": field("r", to=2**31),
        "no pattern": field("target_modules", to="(["),
        "alpha that overflows": field("lora_alpha", to=1e300),
        "unknown field": field("unheard_of", to=1),
        "loftq": field("loftq_config", to=5),
    },
    WEIGHTS: {
        **BINARY,
        "one too many": tensors(lambda found: found.update(more=torch.ones(2))),
        "one layer too many": tensors(
            lambda found: found.update(
                {first(found, "layers.0").replace("layers.0", "layers.9"): torch.ones(4, 64)}
            )
        ),
    },
    CONFIG: wrong("max_position_embeddings"),
    GENERATION: wrong("eos_token_id"),
    MODEL: {"missing": BINARY["missing"]},
    TOKENIZER: {
        **TEXT,
        **wrong("model", "added_tokens", "normalizer", "decoder", "post_processor"),
        "no pattern": split_by(r"(["),
        "large vocabulary": large_vocabulary,
        "no vocabulary": field("model", "vocab", to={}),
        "merges of nothing": field("model", "merges", to=[["q", "zz"]]),
    },
    SETTINGS: {
        **TEXT,
        **wrong("tokenizer_class", "eos_token", "pad_token", "chat_template", "model_max_length"),
        **wrong("added_tokens_decoder", "extra_special_tokens", "padding_side"),
        **wrong("model_input_names"),
    },
    TEMPLATE_FILE: {
        "empty": written(b""),
        "no template": written("{% for"),
        "Latin-1": written("{{ 'é' }}".encode("latin-1")),
        "recursion": written("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        "deep": written("{% if true %}" * 2000 + "{% endif %}" * 2000),
        "refuses": written("{{ raise_exception('no') }}"),
        "escapes": written("{{ ''.__class__.__mro__ }}"),
        "nothing": written("{{ '' }}"),
    },
}
READ_BY = {
    ADAPTER: ("merge", "chat"),
    WEIGHTS: ("merge", "chat"),
    GENERATION: ("merge", "chat"),
    MODEL: ("merge", "chat"),
}
CELLS = [
    (file, damage, command)
    for file, damages in DAMAGES.items()
    for damage in damages
    for command in READ_BY.get(file, ("merge", "chat", "finetune"))
]
# Of the others every seventeenth, which is one of each command in turn.
ALWAYS = {
    *((WEIGHTS, damage, "chat") for damage in ("cut", "NaN", "missing", "one too many")),
    *((TOKENIZER, damage, "chat") for damage in ("no pattern", "large vocabulary")),
    *((TOKENIZER, damage, "finetune") for damage in ("no object",)),
    *((TOKENIZER, damage, "finetune") for damage in ("large vocabulary", "deep")),
    *((TEMPLATE_FILE, damage, "finetune") for damage in ("recursion", "deep")),
    (TEMPLATE_FILE, "no template", "chat"),
    (MODEL, "missing", "merge"),
    (ADAPTER, "rank too large", "chat"),
    *((ADAPTER, f"lora_alpha: {kind}", "merge") for kind in ("NaN", "huge")),
    (ADAPTER, "rank_pattern: text", "merge"),
    *((WEIGHTS, damage, "merge") for damage in ("NaN", "infinity")),
    *((GENERATION, f"eos_token_id: {kind}", "chat") for kind in ("text", "NaN")),
    (CONFIG, "max_position_embeddings: negative", "finetune"),
}


def marked(cell: tuple[str, str, str], number: int) -> Any:
    is_fast = cell in ALWAYS or number % 17 == 0
    marks: list[Any] = [] if is_fast else [pytest.mark.slow]
    return pytest.param(*cell, marks=marks, id=", ".join(cell))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with its tokenizer, an adapter, and rows."""
    folder = tmp_path_factory.mktemp("whole")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    write_adapter(write_base(folder / "base"), folder / "adapter", config, named="base")
    (folder / "rows.jsonl").write_text('{"text": "a b"}\n')
    return folder


COMMANDS: dict[str, list[str]] = {
    "merge": ["merge", "adapter", "--out", "out", "--base", "base"],
    "chat": ["chat", "adapter", "--prompt", "a b", "--max-new-tokens", "2", "--base", "base"],
    "finetune": ["finetune", "base", "rows.jsonl", "--dry-run", "--out", "run"],
}


@pytest.mark.parametrize(
    ("file", "damage", "command"), [marked(cell, number) for number, cell in enumerate(CELLS)]
)
def test_a_damaged_file(
    file: str,
    damage: str,
    command: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    if file == TEMPLATE_FILE:
        (tmp_path / file).write_text(TEMPLATE)
        (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    DAMAGES[file][damage](tmp_path / file)
    monkeypatch.chdir(tmp_path)
    before = sorted(each.name for each in tmp_path.iterdir())
    start = seconds()
    result = poros_command(*COMMANDS[command])
    assert seconds() - start < MOST_SECONDS
    assert result.exit_code in (0, 2), result.output
    if result.exit_code == 2:
        for word in ("error: ", "expected", "found"):
            assert word in result.output, result.output
        assert sorted(each.name for each in tmp_path.iterdir()) == before
    elif command == "merge":
        model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.bfloat16)
        expected = PeftModel.from_pretrained(model, "adapter").merge_and_unload().state_dict()
        found = load_file("out/model.safetensors")
        assert compare_mappings(expected, found) == []


def seconds() -> float:
    """Of processor time, of children that have ended too: others may be at work on the machine."""
    return sum(os.times()[:4])
