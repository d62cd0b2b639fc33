"""Loads that transformers has to do, and the memory of the host that a load takes."""

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import poros.loaders.load
from poros.errors import CheckpointFormatError, HostMemoryError, UnsupportedModelError
from poros.host.disk import DiskStore
from poros.host.store import attached_store
from poros.loaders import slab_writer
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.load import load
from poros.loaders.quantize import Quantizer
from tests.loading.loaded import (
    Kinds,
    budget_for,
    differences,
    quantization,
    standard,
    tensors,
    unplaced,
    wanted,
)

BOTH = (True, False)


@pytest.mark.parametrize("how", ["memory", "store"])
@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("openai-gpt", "expected exactly one ModuleList"),  # no list of checkpointable layers
        ("bert", "expected a decoder-only causal language model"),  # its layers see both ways
    ],
)
def test_what_cannot_be_streamed_is_not_loaded(
    family: str, why: str, how: str, kinds: Kinds, tmp_path: Path
) -> None:
    """``poros.prepare`` would refuse it; nothing of it is left."""
    options = {"store": tmp_path / "store"} if how == "store" else {}
    with pytest.raises(UnsupportedModelError, match=why):
        load(kinds.dense(family, num_layers=2), **options)
    assert list(tmp_path.iterdir()) == []


# Host memory.


@pytest.mark.parametrize("is_persistent", BOTH)
def test_only_what_is_loaded_has_to_be_finite(is_persistent: bool) -> None:
    """A mask that is computed may well be infinite; both kinds of buffers are moved to the slab,
    if they are large enough to be streamed."""

    def make() -> torch.nn.Module:
        layer = torch.nn.Linear(3, 3, bias=False)
        mask = torch.full((160, 160), float("-inf"), device=layer.weight.device)
        layer.register_buffer("mask", mask, persistent=is_persistent)
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})

    with torch.device("meta"):
        planned = make()
    intake = slab_writer.SlabWriter(
        Path("here"),
        lambda model: ("layers", list(model["layers"])),
        Quantizer(torch.device("cpu")),
        None,
    )
    intake.plan(planned, {})
    model = make()
    if is_persistent:
        with pytest.raises(CheckpointFormatError, match=r"here: layers\.0\.mask: expected finite"):
            intake.finish(model)
        return
    intake.finish(model)
    parts = (*model.named_parameters(), *model.named_buffers())
    assert all(intake.is_placed(name, tensor) for name, tensor in parts)


def test_too_little_host_memory_is_refused_before_anything_is_read(
    kinds: Kinds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store on disk takes less: what lies outside the layers."""
    asked = list[int]()

    def require(num_bytes: int, what: str) -> None:
        asked.append(num_bytes)
        if len(asked) == 1:
            raise HostMemoryError(f"{what}: no")

    def fail(*_: Any) -> None:
        raise RuntimeError("read")

    path, model = kinds.dense(), standard(kinds.dense(), quantization())
    monkeypatch.setattr(slab_writer, "require_host_memory", require)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "fetch", fail)
        with pytest.raises(HostMemoryError, match="no"):
            load(path)
    monkeypatch.setattr(poros.loaders.load, "_open", lambda *_: model)
    load(path, store=tmp_path / "store")
    stays = ("norm.weight", ".bias", ".nested_absmax")
    sizes = {name: tensor.nbytes for name, tensor in tensors(model).items()}
    outside = [
        size for name, size in sizes.items() if ".layers." not in name or name.endswith(stays)
    ]
    assert asked[0] > asked[1] == sum(outside)


class Peak:
    """The most memory of this process inside the body, over what it had before.

    Anonymous and shared pages; pages of mapped files are the system's to drop.
    """

    def __enter__(self) -> "Peak":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide as much of what is taken
        self._before = self._now()
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    def _sample(self) -> None:
        while not self._is_over.wait(0.001):
            self._look()

    def _look(self) -> None:
        self.num_bytes = max(self.num_bytes, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


@pytest.mark.parametrize("is_quantized", BOTH, ids=["nf4", "dense"])
def test_host_memory_while_loading(kinds: Kinds, is_quantized: bool) -> None:
    """The model as it will be, one tensor, and what pieces of it take."""
    # Of a quantized base fewer layers are enough for the control, and they take their time.
    sizes = {"num_layers": 5 if is_quantized else 8}
    sizes |= {"hidden_size": 1024, "vocab_size": 4096, "intermediate_size": 4096}
    path, ours = kinds.dense(**sizes), wanted(is_quantized)[0]
    load(path, quantization=ours)  # whatever libraries allocate once
    with Peak() as peak:
        model = load(path, quantization=ours)
    store = attached_store(model)
    parts = tensors(model).items()
    outside = sum(tensor.nbytes for name, tensor in parts if ".layers." not in name)
    largest = 1024 * 4096 * 2
    bound = store.num_bytes + outside + largest + 192 * 2**20  # pieces, and what allocators hold
    assert 0.9 * store.num_bytes < peak.num_bytes <= bound
    del model, store, parts
    with Peak() as control:  # twice as much and more, held until the end: seen for certain
        held = load(path, quantization=None, dtype=torch.float32)
    assert sum(tensor.nbytes for tensor in tensors(held).values()) > bound
    assert control.num_bytes > bound


def test_a_host_budget(kinds: Kinds) -> None:
    """The first layers lie in memory, the others are the file's, unwritten."""
    path = kinds.dense("gemma4_shared_kv")
    store, expected = kinds.store(path), kinds.expected(path, quantization())
    starts = [budget_for(store, index) for index in range(4)]
    for num_layers, budget in ((0, 0), (0, starts[1] - 1), (1, starts[1]), (3, str(starts[3]))):
        model = load(path, store=store, host_budget=budget)
        assert differences(model, expected) == [] and unplaced(model) == []
        host = attached_store(model)
        assert isinstance(host, DiskStore)
        on_disk = [slab.arena is host.mapped for slab in host.slabs]
        assert on_disk == [index >= num_layers for index in range(4)]
        assert all(host.is_untouched(slab) for slab in host.slabs)
    assert not isinstance(attached_store(load(path, store=store, host_budget="1 GiB")), DiskStore)
