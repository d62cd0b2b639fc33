"""Damaged checkpoints and stores: a typed error that says what and where, or the right bytes.

Each case changes one thing in something that opens or loads. While the error of a file is held, no
descriptor is open that was not before and nothing is mapped; after that of a load, no mapping of a
file, no memory of a host store and no method of quantization stays behind.
"""

import gc
import mmap
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.errors import PorosError
from poros.loaders.load import load
from tests.loading.cases import FILES, MODELS, STORES
from tests.loading.checkpoints import FIRST, mappings, open_files, write_sharded
from tests.loading.damage import Case, pickled
from tests.loading.loaded import Kinds, differences, quantization, standard
from tests.support import num_arenas

CASES = [*FILES, *MODELS, *STORES]


def name(case: Case) -> str:
    return f"{case.base}: {case.name}"


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it holds in the end: transformers leaves its readers to end by themselves."""
    end = time.monotonic() + 30.0
    gc.collect()
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    return condition()


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_load_is_refused_or_has_the_bytes_of_from_pretrained(
    kinds: Kinds, tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "model"
    if case.base == "files":
        write_sharded(folder)
    else:
        shutil.copytree(kinds.damaged(case.base), folder)
    case.break_it(folder)
    gc.collect()
    memory, before = num_arenas(), Counter(open_files())
    if case.says is None:
        # Of a store, what its checkpoint is.
        checkpoint = kinds.damaged("dense") if case.base == "store" else folder
        config = None if case.base.startswith("4bit") else quantization()
        found = differences(load(folder, **case.options), standard(checkpoint, config))
        ignored = ("config",) if case.base == "store" else ()  # the place of its tokenizer
        assert [key for key in found if key not in ignored] == []
        return
    source = folder if case.source == "." else f"{folder}/{case.source}"
    calls: list[Callable[[], Any]] = [lambda: load(source, **case.options)]
    if case.planned:
        calls.append(lambda: poros.plan(folder, seq_len=8))
    for index, call in enumerate(calls):
        with pytest.raises(PorosError, match=case.says) as caught:
            call()
        assert isinstance(caught.value, case.error) or index > 0
        assert isinstance(caught.value, ValueError) or case.error is PorosError
        message = str(caught.value)
        assert message.isascii() and message.isprintable()
        assert len(message) < 2000 + len(str(source))
        assert case.file is None or (str(folder) if case.file == "." else case.file) in message
        assert case.tensor is None or f"tensor '{case.tensor}'" in message
        if case.base in ("files", "store"):
            assert not Counter(open_files()) - before
            assert mappings(folder) == []
        del caught  # its traceback holds what was loaded so far
    assert comes_true(lambda: mappings(folder) == [] and num_arenas() == memory)
    assert torch.get_default_dtype() == torch.float32 and not (folder / "trace").exists()


def test_control_the_leak_checks_see_a_leak(tmp_path: Path) -> None:
    file = write_sharded(tmp_path) / FIRST
    before = open_files()
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ):
        assert len(open_files()) == len(before) + 2  # a mapping has a descriptor of its own
        assert mappings(tmp_path) == [str(file)]
    assert open_files() == before and mappings(tmp_path) == []


def test_control_the_pickle_would_run_code(tmp_path: Path) -> None:
    pickled("x.bin")(tmp_path)
    pickle.loads((tmp_path / "x.bin").read_bytes())
    assert (tmp_path / "trace").is_dir()
