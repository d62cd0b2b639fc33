"""Loaded models train where their base was loaded, in memory or on a disk, exactly.

``poros.prepare`` takes over the memory that a loader filled, instead of copying it. What trains is
compared with a resident model of ``from_pretrained``, made once for each kind.
"""

import copy
import gc
import io
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

import poros
import poros.self_check.check
from poros.api import prepare_with
from poros.eager_streams import EagerStreams
from poros.gates import tiny
from poros.gates.reference import Trajectory
from poros.host.disk import NUM_STAGING, DiskStore
from poros.host.layout import PAGE_NUM_BYTES
from poros.host.store import HostStore, attached_store
from poros.loaders.load import load
from tests.comparing import assert_same_run, bits_of, changes, picture
from tests.covers import with_slow
from tests.journal import count, training_visits, walk
from tests.loading.loaded import Kinds, budget_for, standard, tensors, wanted
from tests.loops import run
from tests.support import AdversarialPrepare, prepare_plain

ON_DISK = 7
"""Layers of models on a disk: more than the reader has buffers."""
Readers = Callable[[], list[threading.Thread]]


def kind(kinds: Kinds, architecture: str = "qwen2", num_layers: int = 5) -> Path:
    return kinds.dense(architecture, num_layers=num_layers, dropout=0.05)


def adapted(base: Any) -> Any:
    return tiny.attach(tiny.without_repacking(base), rank=8, dropout=0.05, seed=1)


def resident(kinds: Kinds, path: Path, is_quantized: bool = True) -> Trajectory:
    return kinds.kept(
        f"trained {path} {is_quantized}",
        lambda: run(adapted(standard(path, wanted(is_quantized)[1]))),
    )


def from_disk(
    kinds: Kinds, path: Path | None = None, num_resident: int = 2, is_quantized: bool = True
) -> Any:
    """A base whose first layers lie in memory, the others in a store on the disk."""
    path = path or kind(kinds, num_layers=ON_DISK)
    quantization = wanted(is_quantized)[0]
    store = kinds.store(path, quantization=quantization)
    budget = budget_for(store, num_resident) if num_resident < ON_DISK else None
    return load(path, quantization=quantization, store=store, host_budget=budget)


def places(base: Any) -> list[int]:
    """Where the tensors of layers lie that lie in a slab."""
    store = attached_store(base)
    assert store is not None
    slabs = [(slab.bytes.data_ptr(), slab.layout.num_bytes) for slab in store.slabs]
    pointers = [tensor.data_ptr() for tensor in tensors(base).values()]
    return [at for at in pointers if any(0 <= at - start < size for start, size in slabs)]


def adopted(model: Any, block_size: int) -> list[bool]:
    """For each block, whether it is the memory that was loaded."""
    runtime, store = poros.runtime(model), attached_store(model.get_base_model())
    assert store is not None
    return [
        runtime.host_slab(block).data_ptr() == store.slabs[block * block_size].bytes.data_ptr()
        for block in range(runtime.num_blocks)
    ]


class Cell(NamedTuple):
    architecture: str
    is_quantized: bool
    block_size: int
    tier: str = "memory"
    num_resident: int = ON_DISK


CELLS = [
    *(Cell(name, how, 2) for name, how in (("qwen2", True), ("mixtral", False), ("phi3", True))),
    Cell("gemma4_shared_kv", True, 9),
    Cell("mixtral", True, 2, "reopened"),
    Cell("gemma4_shared_kv", True, 1, "disk", 2),
    # All on the disk; blocks of two; a block in memory and on the disk; nothing on the disk.
    *(Cell("qwen2", True, size, "disk", at) for at, size in ((0, 1), (4, 2), (3, 2), (7, 1))),
]
"""Where the bytes come from has no bearing on what a layer computes: see tests/exact for that."""
SLOW = {CELLS[0], CELLS[2], CELLS[7], CELLS[9]}


@pytest.mark.parametrize("cell", with_slow(CELLS, SLOW), ids=str)
def test_training_is_exact_and_nothing_is_copied(
    kinds: Kinds, cell: Cell, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under adversarial streams; blocks of nine layers with the self-check instead."""
    size, is_on_disk = cell.block_size, cell.tier == "disk"
    path = kind(kinds, cell.architecture, ON_DISK if is_on_disk else 5)
    expected = resident(kinds, path, cell.is_quantized)
    if is_on_disk:
        base = from_disk(kinds, path, cell.num_resident, cell.is_quantized)
    else:
        quantization = wanted(cell.is_quantized)[0]
        store = kinds.store(path, quantization=quantization) if cell.tier == "reopened" else None
        base = load(path, quantization=quantization, store=store)
        monkeypatch.setattr(HostStore, "allocate", None)  # nobody may ask for memory
    num_layers = base.config.num_hidden_layers
    num_blocks = -(-num_layers // size)
    on_disk = range(-(-cell.num_resident // size), num_blocks)
    assert isinstance(attached_store(base), DiskStore) == (len(on_disk) > 0 and is_on_disk)
    model = adapted(base)
    before, bits = places(base), bits_of(model)
    assert before
    prepare = AdversarialPrepare()
    with prepare.watching():
        how: Any = prepare_plain if size == 9 else prepare
        how(model, block_size=size, device="cpu")
        is_split = is_on_disk and cell.num_resident % size
        assert adopted(model, size) == [
            not (is_split and block == cell.num_resident // size) for block in range(num_blocks)
        ]
        assert changes(bits, bits_of(model)) == {}
        found = run(model)
    assert_same_run(expected, found)
    runtime = poros.runtime(model)
    stats = runtime.stats()
    assert runtime.num_blocks == num_blocks
    if is_on_disk and on_disk:
        assert stats["disk_num_bytes"] == sum(runtime.host_slab(k).numel() for k in on_disk)
        assert stats["disk_stall_ms"] > 0 and len(readers()) == 1
    if size != 9:  # what moved is what the plan says, wherever it came from
        planned = walk(training_visits(num_blocks, 2), num_blocks, min(2, num_blocks))
        assert stats["num_loads"] == count(planned, "prefetch")
    trained = bits_of(model)
    poros.restore(model)
    assert changes(trained, bits_of(model)) == {} and readers() == []
    assert is_split or places(base) == before


# What is changed between loading and training.


def casting(base: Any) -> Any:
    """The usual preparation: norms and biases in fp32."""
    return adapted(prepare_model_for_kbit_training(base, use_gradient_checkpointing=False))


def with_bias(base: Any) -> Any:
    """``bias="lora_only"`` trains biases that the loader laid down: they go to the device."""
    config = LoraConfig(target_modules=["q_proj", "v_proj"], bias="lora_only", r=4)
    torch.manual_seed(3)
    return get_peft_model(tiny.without_repacking(base), config)


def of_layer_4(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def make(base: Any) -> Any:
        mlp = base.model.layers[4].mlp
        mlp.up_proj.weight.data = change(mlp.up_proj.weight.data, mlp.gate_proj.weight.data)
        return adapted(base)

    return make


def without_a_slab(base: Any) -> Any:
    store = attached_store(base)
    if store is not None:
        store.slabs.pop()
    return adapted(base)


def without_a_layer(base: Any) -> Any:
    base.model.layers = base.model.layers[1:]
    base.config.num_hidden_layers -= 1
    base.config.layer_types = base.config.layer_types[1:]
    for index, layer in enumerate(base.model.layers):
        layer.self_attn.layer_idx = index
    return adapted(base)


# What is done, to a quantized base or not, where it lies, and the layer that is copied for it.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool, str, int | None]] = {
    "cast": (casting, True, "disk", None),
    "a trained bias": (with_bias, True, "memory", None),
    "overlap": (of_layer_4(lambda _, neighbour: neighbour), False, "memory", 4),
    "written in place": (of_layer_4(lambda weight, _: weight.mul_(2)), False, "disk", 4),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_changed_is_copied_loudly_and_the_rest_taken_over(
    kinds: Kinds, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A changed layer is copied with its block; what is cast or trained is in no slab."""
    change, is_quantized, tier, copied = CHANGES[case]
    path = kind(kinds, num_layers=ON_DISK if tier == "disk" else 5)
    on_disk = tier == "disk"
    quantization, theirs = wanted(is_quantized)
    base = (
        from_disk(kinds, path, 2, is_quantized)
        if on_disk
        else load(path, quantization=quantization)
    )
    before = places(base)
    model = change(base)
    bits = bits_of(model)
    for block_size in (2, 1) if copied is None else (1,):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "poros"):
            prepare_plain(model, block_size=block_size)
        changed = [] if copied is None else [copied // block_size]
        stats = poros.runtime(model).stats()
        assert [k for k, is_old in enumerate(adopted(model, block_size)) if not is_old] == changed
        lines = [f"blocks {changed} copied to new host memory"] if changed else []
        assert stats["fallbacks"] == lines and (stats["disk_num_bytes"] > 0) == on_disk
        found = sum("more host memory" in line.getMessage() for line in caplog.records)
        assert found == len(changed) and changes(bits, bits_of(model)) == {}
        assert copied is not None or set(places(base)) <= set(before)
        if block_size == 1:
            assert_same_run(run(change(standard(path, theirs))), run(model))
        poros.restore(model)


@pytest.mark.parametrize("change", [without_a_slab, without_a_layer])
def test_a_store_that_does_not_fit_is_copied_and_dropped(
    kinds: Kinds, change: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    base = load(kind(kinds))
    model = change(base)
    with caplog.at_level(logging.WARNING, "poros"):
        prepare_plain(model)
    assert attached_store(base) is None
    assert sum("held twice" in line.getMessage() for line in caplog.records) == 1
    assert_same_run(run(change(standard(kind(kinds), wanted(True)[1]))), run(model))


# The store that a loader left.


def test_restore_and_a_failed_prepare_leave_the_store_on_the_model(kinds: Kinds) -> None:
    """It is adopted again, in blocks of any size."""

    class NoRoom(EagerStreams):
        def allocate(self, num_bytes: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("no room for slots")

    model = adapted(load(kind(kinds)))
    before, policy = picture(model), poros.StreamingPolicy(loss="reference")
    with pytest.raises(torch.OutOfMemoryError):
        prepare_with(model, policy, streams=NoRoom(torch.device("cpu")))
    assert changes(before, picture(model)) == {}
    for block_size in (2, 1, 3):
        prepare_plain(model, block_size=block_size)
        assert all(adopted(model, block_size))
        assert changes(before, picture(poros.restore(model))) == {}


def test_copies_of_the_model_have_bytes_of_their_own(kinds: Kinds) -> None:
    # A 4-bit weight does not survive a pickle of a model.
    base = load(kind(kinds), quantization=None)
    model, store = adapted(base), attached_store(base)
    assert store is not None
    start, end = store.slabs[0].bytes.data_ptr(), store.slabs[-1].bytes.data_ptr()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    twins.append(torch.load(buffer, weights_only=False))
    bits = bits_of(model)
    for twin in twins:
        assert attached_store(twin.get_base_model()) is None
        weights = [
            parameter.data_ptr() for parameter in twin.get_base_model().model.layers.parameters()
        ]
        assert not [at for at in weights if start <= at <= end]
        assert changes(bits, bits_of(twin)) == {}
    assert attached_store(base) is store
    expected = resident(kinds, kind(kinds), is_quantized=False)
    for each in (twins[1], model):
        assert_same_run(expected, run(prepare_plain(each)))


# Layers on a disk.


def test_a_forgotten_model_ends_its_reader(kinds: Kinds, readers: Readers) -> None:
    model = prepare_plain(adapted(from_disk(kinds)))
    run(model, num_steps=1)
    assert len(readers()) == 1
    reference = weakref.ref(poros.runtime(model))
    del model
    gc.collect()
    assert reference() is None  # and the fixture waits for the thread


@pytest.mark.cover("values")
@pytest.mark.parametrize("keep_last", [2, ON_DISK])
@pytest.mark.parametrize("is_lent_early", [False, True])
def test_kept_layers_come_from_the_disk(
    kinds: Kinds, keep_last: int, is_lent_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are lent once, before any other: the reader has to wait for those copies too."""
    if is_lent_early:  # as on a GPU, where page-locking makes the staging buffers first
        adopt = DiskStore.adopt

        def adopt_and_start(self: DiskStore, blocks: Any) -> HostStore | None:
            made = adopt(self, blocks)
            assert made is not None
            made.start(EagerStreams(torch.device("cpu")))
            return made

        monkeypatch.setattr(DiskStore, "adopt", adopt_and_start)
    model = AdversarialPrepare()(adapted(from_disk(kinds, num_resident=0)), keep_last=keep_last)
    assert_same_run(resident(kinds, kind(kinds, num_layers=ON_DISK)), run(model))


def test_memory_is_the_budget_and_the_staging(kinds: Kinds) -> None:
    base = from_disk(kinds)
    sizes = [slab.layout.num_bytes for slab in attached_store(base).slabs]
    model = prepare_plain(adapted(base))
    stats = poros.runtime(model).stats()
    staging = NUM_STAGING * -(-max(sizes) // PAGE_NUM_BYTES) * PAGE_NUM_BYTES
    assert stats["host_num_bytes"] == sum(sizes[:2]) + staging
    assert stats["disk_num_bytes"] == sum(sizes[2:])
    poros.restore(model)
