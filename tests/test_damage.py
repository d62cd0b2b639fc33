"""Damaged checkpoints and stores: a typed error before anything trains, or the right bytes.

Each case changes one thing in a checkpoint or store that loads. While the error is held, the model
is nowhere: no mapping of a file, no memory of a host store, no method of quantization stays behind.
"""

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import num_memory_files
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import poros
from poros.errors import PorosError
from poros.gates import tiny
from poros.loaders.load import load
from tests.damage import Damage
from tests.damage_cases import CASES
from tests.loaded import differences, is_mapped, quantization, standard
from tests.test_malformed import CASES as FILES


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What is damaged: each made once, before it is copied."""
    folder = tmp_path_factory.mktemp("bases")

    def base(name: str) -> Path:
        path = folder / name
        if path.exists():
            return path
        if name in ("dense", "moe"):
            architecture = {"dense": "qwen2", "moe": "qwen3_moe"}[name]
            config = tiny.small_config(architecture, num_layers=2, hidden_size=64)
            config.tie_word_embeddings = False
            tiny.write_checkpoint(config, path, dtype=torch.bfloat16)
        elif name == "store":
            load(base("dense"), store=path)
        else:
            double = name == "4bit"
            how = quantization(bnb_4bit_use_double_quant=double)
            standard(base("dense"), how).save_pretrained(path)
        return path

    return base


def test_there_are_at_least_120_cases() -> None:
    names = [f"file: {case.name}" for case in FILES] + [f"{c.base}: {c.name}" for c in CASES]
    assert len(set(names)) == len(names) >= 120
    assert sum(case.says is None for case in CASES) >= 10  # what is sound is loaded


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.base}: {case.name}")
def test_a_typed_error_or_the_bytes_of_from_pretrained(
    bases: Any, tmp_path: Path, case: Damage
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bases(case.base), folder)
    case.break_it(folder)
    gc.collect()
    methods, memory = dict(AUTO_QUANTIZER_MAPPING), num_memory_files()
    if case.says is None:
        expected = load(bases("dense")) if case.base == "store" else expected_of(case, folder)
        found = load(folder, **case.options)
        ignored = ("name_or_path", "config") if case.base == "store" else ()
        assert [each for each in differences(found, expected) if each not in ignored] == []
        return
    calls: list[Callable[[], Any]] = [lambda: load(folder, **case.options)]
    if case.planned:
        calls.append(lambda: poros.plan(folder, seq_len=8))
    for call in calls:
        with pytest.raises(PorosError, match=case.says) as caught:
            call()
        assert isinstance(caught.value, case.error) or call is calls[-1] is not calls[0]
        message = str(caught.value)
        assert message.isascii() and message.isprintable() and len(message) < 3000
        del caught  # its traceback holds what was loaded so far
    gc.collect()
    assert not is_mapped(folder) and num_memory_files() == memory
    assert dict(AUTO_QUANTIZER_MAPPING) == methods
    assert torch.get_default_dtype() == torch.float32


def expected_of(case: Damage, folder: Path) -> Any:
    return standard(folder, None if case.base.startswith("4bit") else quantization())
