"""Damaged checkpoints and stores: a typed error that says what and where, or the right bytes.

Each case changes one thing in something that opens or loads. While the error of a file is held, no
descriptor is open that was not before and nothing is mapped; after that of a load, no mapping of a
file, no memory of a host store and no method of quantization stays behind.
"""

import gc
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
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.load import load
from poros.loaders.store import open_store
from tests.loading.checkpoints import FIRST, SECOND, mappings, open_files, write, write_sharded
from tests.loading.damage import Case, manifest, pickled
from tests.loading.file_cases import FILES, NAMES, STORES
from tests.loading.loaded import Kinds, differences, is_mapped, quantization, standard
from tests.loading.model_cases import MODELS
from tests.support import num_memory_files

OPENED: dict[str, tuple[Callable[[Path], Path], Callable[[Any], Any]]] = {
    "files": (write_sharded, Checkpoint.open),
    "slabs": (write, open_store),
}
CASES = [*FILES, *MODELS, *STORES]
OF_FILES = [case for case in CASES if case.base in OPENED]
OF_LOADS = [case for case in CASES if case.base not in OPENED]


def name(case: Case) -> str:
    return f"{case.base}: {case.name}"


def test_there_are_as_many_cases_as_there_were() -> None:
    assert len({name(case) for case in CASES}) == len(CASES) >= 310
    assert sum(case.says is None for case in CASES) >= 10  # what is sound is loaded


def test_what_the_cases_of_files_start_from_is_sound(tmp_path: Path) -> None:
    """And so is a manifest that was sealed again."""
    with Checkpoint.open(write_sharded(tmp_path / "files")) as checkpoint:
        assert sorted(checkpoint.names) == NAMES
    manifest(lambda store: None)(write(tmp_path / "slabs"))
    open_store(tmp_path / "slabs", verify=True).close()


@pytest.mark.parametrize("case", OF_FILES, ids=name)
def test_a_file_is_refused_and_nothing_leaks(
    tmp_path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make, open_it = OPENED[case.base]
    folder = make(tmp_path / "model")
    case.break_it(folder)
    before = Counter(open_files())
    source = f"{folder}/{case.source}" if case.source != "." else folder
    with pytest.raises(PorosError, match=case.says) as caught:
        open_it(source)
    message = str(caught.value)
    assert isinstance(caught.value, case.error) and isinstance(caught.value, ValueError)
    assert (folder.name if case.file == "." else case.file) in message
    assert case.base == "files" or str(folder) in message
    assert case.tensor is None or f"tensor '{case.tensor}'" in message
    assert len(message) < 2000 + len(str(source)) and message.isascii()
    assert not Counter(open_files()) - before and mappings(folder) == []
    assert not (folder / "trace").exists()


def comes_true(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    """Whether it holds in the end: transformers leaves its readers to end by themselves."""
    end = time.monotonic() + within_s
    gc.collect()
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    return condition()


@pytest.mark.parametrize("case", OF_LOADS, ids=name)
def test_a_load_is_refused_or_has_the_bytes_of_from_pretrained(
    kinds: Kinds, tmp_path: Path, case: Case
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(kinds.damaged(case.base), folder)
    case.break_it(folder)
    gc.collect()
    memory = num_memory_files()
    if case.says is None:
        # Of a store, what its checkpoint is.
        source = kinds.damaged("dense") if case.base == "store" else folder
        config = None if case.base.startswith("4bit") else quantization()
        found = differences(load(folder, **case.options), standard(source, config))
        ignored = ("name_or_path", "config") if case.base == "store" else ()
        assert [key for key in found if key not in ignored] == []
        return
    calls: list[Callable[[], Any]] = [lambda: load(folder, **case.options)]
    if case.planned:
        calls.append(lambda: poros.plan(folder, seq_len=8))
    for index, call in enumerate(calls):
        with pytest.raises(PorosError, match=case.says) as caught:
            call()
        assert isinstance(caught.value, case.error) or index > 0
        message = str(caught.value)
        assert message.isascii() and message.isprintable() and len(message) < 3000
        assert case.file != "." or str(folder) in message
        del caught  # its traceback holds what was loaded so far
    assert comes_true(lambda: not is_mapped(folder) and num_memory_files() == memory)
    assert torch.get_default_dtype() == torch.float32


def test_control_the_leak_checks_see_a_leak(tmp_path: Path) -> None:
    """An open checkpoint is seen by both."""
    before = open_files()
    with Checkpoint.open(write_sharded(tmp_path)):
        assert len(open_files()) == len(before) + 2
        assert {Path(file).name for file in mappings(tmp_path)} == {FIRST, SECOND}
    assert open_files() == before and mappings(tmp_path) == []


def test_control_the_pickle_would_run_code(tmp_path: Path) -> None:
    """Loading it does leave the trace that the cases look for."""
    pickled("x.bin")(tmp_path)
    pickle.loads((tmp_path / "x.bin").read_bytes())
    assert (tmp_path / "trace").is_dir()
