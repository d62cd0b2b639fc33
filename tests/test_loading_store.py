"""``poros.load`` with a store on disk, its fallback, and what is trained on a loaded model."""

import gc
import json
import logging
import os
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import poros.loaders.load
from poros.errors import (
    CheckpointFormatError,
    HostMemoryError,
    PolicyError,
    UnsupportedModelError,
)
from poros.gates import tiny
from poros.gates.parity import run_parity
from poros.gates.reference import TrainingSpec
from poros.host.disk import DiskStore
from poros.host.store import left_store
from poros.layout import slab_offsets
from poros.loaders import slab_writer as slab_writer_module
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.loaders.load import load
from poros.loaders.store import open_store
from tests.loaded import copy_of, differences, quantization, standard, tensors, unplaced
from tests.support import AdversarialPrepare

ARCHITECTURES = ("qwen2", "gemma4_shared_kv", "mixtral", "phi3")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small checkpoint for each of the architectures."""
    found = {}
    for name in ARCHITECTURES:
        found[name] = tmp_path_factory.mktemp(name)
        config = tiny.small_config(name, num_layers=4, hidden_size=64)
        tiny.write_checkpoint(config, found[name], dtype=torch.bfloat16)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
def test_a_reopened_store_is_the_model(
    checkpoints: dict[str, Path], tmp_path: Path, architecture: str, is_quantized: bool
) -> None:
    """Made on the way, opened by the checkpoint's name, and by its own."""
    path, store = checkpoints[architecture], tmp_path / "store"
    wanted = "nf4" if is_quantized else None
    expected = standard(path, quantization() if is_quantized else None)
    for model in (load(path, quantization=wanted, store=store) for _ in range(2)):
        assert differences(model, expected) == []
        assert unplaced(model) == []
    model = load(store)
    assert differences(model, expected) == ["config", "name_or_path"]  # its own name
    model.name_or_path = model.config.name_or_path = str(path)
    assert differences(model, expected) == []
    assert unplaced(model) == []
    shutil.rmtree(store)  # in memory is all of it
    assert sum(each.float().sum().item() for each in tensors(model).values()) != 0


def test_a_store_of_a_checkpoint_that_is_4bit_already(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Whatever is asked for."""
    config = quantization(bnb_4bit_use_double_quant=False, bnb_4bit_quant_type="fp4")
    standard(checkpoints["qwen2"], config).save_pretrained(tmp_path / "4bit")
    for _ in range(2):
        model = load(tmp_path / "4bit", store=tmp_path / "store")
        assert differences(model, standard(tmp_path / "4bit", None)) == []


@pytest.mark.parametrize("architecture", ["qwen2", "mixtral"])
def test_saving_a_loaded_model(
    checkpoints: dict[str, Path], tmp_path: Path, architecture: str
) -> None:
    """Conversions are undone as after from_pretrained, for a reopened store too."""
    path = checkpoints[architecture]
    saved = {}
    for name, model in {
        "standard": standard(path, None),
        "loaded": load(path, quantization=None),
        "reopened": load(path, quantization=None, store=tmp_path / "store"),
    }.items():
        model.save_pretrained(tmp_path / name)
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            saved[name] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for name in ("loaded", "reopened"):
        assert saved[name].keys() == saved["standard"].keys()
        for key, expected in saved["standard"].items():
            assert torch.equal(saved[name][key], expected)


def test_what_a_store_remembers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Who made it, of what, and how."""
    load(checkpoints["qwen2"], store=tmp_path / "store")
    with open_store(tmp_path / "store", verify=True) as opened:
        about = opened.manifest.about
    assert about["versions"]["torch"] == torch.__version__
    assert about["device"] == "cpu" and about["num_threads"] == torch.get_num_threads()
    assert about["quantization"] == quantization().to_dict() and about["dtype"] == "bfloat16"
    assert about["source"].startswith("xxh3:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp4"}, "expected one with quantization"),
        ({"quantization": None}, "expected one with quantization"),
        ({"dtype": torch.float16}, "expected one with"),
    ],
)
def test_a_store_made_with_other_options_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Instead of being taken for what is asked for."""
    load(checkpoints["qwen2"], store=tmp_path / "store")
    with pytest.raises(PolicyError, match=message):
        load(checkpoints["qwen2"], store=tmp_path / "store", **options)


def test_a_store_of_another_checkpoint_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """By the content, not by the name."""
    load(checkpoints["qwen2"], store=tmp_path / "store")
    (tmp_path / "same").mkdir()
    same = copy_of(checkpoints["qwen2"], tmp_path / "same")
    load(same, store=tmp_path / "store")

    def change(found: dict[str, Any]) -> None:
        found["model.norm.weight"] += 1

    (tmp_path / "other").mkdir()
    other = copy_of(checkpoints["qwen2"], tmp_path / "other", change)
    with pytest.raises(CheckpointFormatError, match="expected a store of the checkpoint"):
        load(other, store=tmp_path / "store")


def test_a_store_whose_configuration_asks_for_other_layers(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """As after a change of transformers."""
    load(checkpoints["qwen2"], store=tmp_path / "store")
    with pytest.raises(CheckpointFormatError, match="expected layer 0 as this configuration"):
        load(tmp_path / "store", intermediate_size=96)
    with pytest.raises(CheckpointFormatError, match="expected 3 layers, found 4"):
        load(tmp_path / "store", num_hidden_layers=3, layer_types=["full_attention"] * 3)


def test_a_failed_load_leaves_no_store(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Nothing that opens, nothing hidden."""

    def spoil(found: dict[str, Any]) -> None:
        found["model.layers.3.mlp.up_proj.weight"] *= float("nan")

    (tmp_path / "bad").mkdir()
    path = copy_of(checkpoints["qwen2"], tmp_path / "bad", spoil)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointFormatError, match=r"layers\.3\.mlp\.up_proj.*finite"):
        load(path, store=tmp_path / "out" / "store")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_store_as_source_and_as_store(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """One is enough."""
    load(checkpoints["qwen2"], store=tmp_path / "store")
    with pytest.raises(PolicyError, match="store: expected none"):
        load(tmp_path / "store", store=tmp_path / "another")


@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "store"])
@pytest.mark.parametrize("fault", ["touched", "replaced", "unreadable"])
def test_a_checkpoint_that_changes_while_it_is_read(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    is_stored: bool,
) -> None:
    """Ends in an error that names the file; the model is nowhere."""
    (tmp_path / "source").mkdir()
    path = copy_of(checkpoints["qwen2"], tmp_path / "source")
    file = path / "model.safetensors"
    fetch, names = Checkpoint.fetch, []

    def fetch_and_spoil(self: Checkpoint, name: str) -> torch.Tensor:
        names.append(name)
        if len(names) == 20:
            if fault == "touched":
                os.utime(file)
            elif fault == "replaced":
                shutil.copy(file, tmp_path / "copy")
                os.replace(tmp_path / "copy", file)
            else:
                raise defect(file, "expected to read it, found: Input/output error", tensor=name)
        return fetch(self, name)

    monkeypatch.setattr(Checkpoint, "fetch", fetch_and_spoil)
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors"):
        load(path, store=tmp_path / "store" if is_stored else None)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["source"]
    monkeypatch.undo()
    assert differences(load(path), standard(path, quantization())) == []


class TestWithoutLayersToStream:
    """openai-gpt has no list of checkpointable layers."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        config = tiny.small_config("openai-gpt", num_layers=2, hidden_size=64)
        tiny.write_checkpoint(config, tmp_path / "source", dtype=torch.bfloat16)
        return tmp_path / "source"

    @pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
    def test_transformers_loads_it_loudly(
        self, path: Path, caplog: pytest.LogCaptureFixture, is_quantized: bool
    ) -> None:
        """With the memory that it takes, and on record."""
        with caplog.at_level(logging.WARNING, logger="poros.loaders.load"):
            model = load(path, quantization="nf4" if is_quantized else None)
        assert differences(model, standard(path, quantization() if is_quantized else None)) == []
        (line,) = [
            each.getMessage() for each in caplog.records if each.name == "poros.loaders.load"
        ]
        num_bytes = sum(
            each.nbytes
            for name, each in tensors(model).items()
            if not name.endswith((".code", ".offset", ".nested_code"))
        )
        assert "cannot be streamed" in line and f"about {num_bytes / 1e9:.2f} GB" in line
        (fallback,) = left_store(model).fallbacks
        assert fallback.startswith("loaded by transformers: expected exactly one ModuleList")

    def test_it_gets_no_store(self, path: Path, tmp_path: Path) -> None:
        """There would be no slab in it."""
        with pytest.raises(UnsupportedModelError, match="expected exactly one ModuleList"):
            load(path, store=tmp_path / "store")
        assert sorted(each.name for each in tmp_path.iterdir()) == ["source"]


def test_too_little_host_memory_is_refused_before_anything_is_read(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store on disk takes less: what lies outside the layers."""
    asked = []

    def require(num_bytes: int, what: str) -> None:
        asked.append(num_bytes)
        if len(asked) == 1:
            raise HostMemoryError(f"{what}: no")

    def fail(*_: Any) -> None:
        raise RuntimeError("read")

    monkeypatch.setattr(slab_writer_module, "require_host_memory", require)
    with monkeypatch.context() as patch:
        patch.setattr("poros.loaders.checkpoint.Checkpoint.fetch", fail)
        with pytest.raises(HostMemoryError, match="no"):
            load(checkpoints["qwen2"])
    monkeypatch.setattr(
        poros.loaders.load, "_open", lambda *_: standard(checkpoints["qwen2"], None)
    )
    load(checkpoints["qwen2"], store=tmp_path / "store")
    model = standard(checkpoints["qwen2"], quantization())
    outside = {
        name: each
        for name, each in tensors(model).items()
        if ".layers." not in name or name.endswith(("norm.weight", ".bias", ".nested_absmax"))
    }
    assert asked[0] > asked[1]
    assert asked[1] == sum(each.nbytes for each in outside.values())


class Peak:
    """The most memory of this process inside the body, over what it had before.

    Anonymous and shared pages; pages of mapped files are the system's to drop.
    """

    def __enter__(self) -> "Peak":
        gc.collect()
        self._before = self._now()
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(0.001):
            self.num_bytes = max(self.num_bytes, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
def test_host_memory_while_loading(tmp_path: Path, is_quantized: bool) -> None:
    """The model as it will be, one tensor, and what pieces of it take."""
    config = tiny.small_config("qwen2", num_layers=6, hidden_size=1024)
    config.vocab_size, config.intermediate_size = 4096, 4096
    tiny.write_checkpoint(config, tmp_path, dtype=torch.bfloat16)
    largest = 1024 * 4096 * 2
    wanted = "nf4" if is_quantized else None
    load(tmp_path, quantization=wanted)  # whatever libraries allocate once
    with Peak() as peak:
        model = load(tmp_path, quantization=wanted)
    store = left_store(model)
    outside = sum(each.nbytes for name, each in tensors(model).items() if ".layers." not in name)
    bound = store.num_bytes + outside + largest + 192 * 2**20  # pieces, and what allocators hold
    assert 0.9 * store.num_bytes < peak.num_bytes <= bound
    del model, store
    with Peak() as control:  # float32 takes more than the bound, and is seen to
        load(tmp_path, quantization=None, dtype=torch.float32)
    assert control.num_bytes > bound


@pytest.mark.parametrize(
    ("architecture", "is_quantized"),
    [*((name, True) for name in ARCHITECTURES), ("qwen2", False), ("mixtral", False)],
)
@pytest.mark.parametrize(
    ("tier", "block_size"), [("loaded", 1), ("loaded", 2), ("reopened", 2), ("disk", 1)]
)
def test_training_a_loaded_model_is_exact(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    architecture: str,
    is_quantized: bool,
    tier: str,
    block_size: int,
) -> None:
    """Resident and streamed from the same loader; the streamed arm adopts the slabs."""
    store = None if tier == "loaded" else tmp_path / "store"
    budget = None
    if tier == "disk":
        load(checkpoints[architecture], quantization="nf4" if is_quantized else None, store=store)
        with open_store(store) as opened:
            budget = slab_offsets(opened.layouts)[2]
    prepare = AdversarialPrepare()
    adopted = []

    def make_model() -> Any:
        base = load(
            checkpoints[architecture],
            quantization="nf4" if is_quantized else None,
            store=store,
            host_budget=budget,
        )
        assert isinstance(left_store(base), DiskStore) == (tier == "disk")
        for module in base.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return tiny.attach_lora(base, dropout=0.05)

    def stream(model: Any, **options: Any) -> Any:
        model = prepare(model, **options)
        adopted.append(poros.runtime(model).is_adopted)
        return model

    with prepare.watching():
        report = run_parity(
            make_model,
            tiny.make_batches(3),
            TrainingSpec(num_steps=3),
            partial(stream, block_size=block_size, device="cpu", allow_unvalidated=True),
            subject=architecture,
        )
    assert report.exact, report.verdict()
    assert adopted == [True]


def test_control_training_another_loaded_model_differs(checkpoints: dict[str, Path]) -> None:
    """The comparison sees one bit of one weight of the loaded base."""
    loads = []

    def make_model() -> Any:
        base = load(checkpoints["qwen2"])
        loads.append(base)
        if len(loads) == 2:
            weight = base.model.layers[3].mlp.up_proj.weight
            weight.data.view(-1)[0] ^= 8
        for module in base.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return tiny.attach_lora(base)

    report = run_parity(
        make_model,
        tiny.make_batches(2),
        TrainingSpec(num_steps=2),
        partial(AdversarialPrepare(), device="cpu"),
        subject="qwen2",
    )
    assert report.error is not None
    assert "start from different bytes: base_model.model.model.layers.3" in report.error


def test_a_host_budget(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The first layers lie in memory, the others are the file's, unwritten."""
    path, store = checkpoints["gemma4_shared_kv"], tmp_path / "store"
    load(path, store=store)
    with open_store(store) as opened:
        starts = slab_offsets(opened.layouts)
    expected = standard(path, quantization())
    for num_layers, budget in ((0, 0), (0, starts[1] - 1), (1, starts[1]), (3, str(starts[3]))):
        model = load(path, store=store, host_budget=budget)
        assert differences(model, expected) == []
        assert unplaced(model) == []
        host = left_store(model)
        assert isinstance(host, DiskStore)
        on_disk = [slab.arena is host.mapped for slab in host.slabs]
        assert on_disk == [index >= num_layers for index in range(4)]
        assert all(host.is_untouched(slab) for slab in host.slabs)
    assert not isinstance(left_store(load(path, store=store, host_budget="1 GiB")), DiskStore)


def test_a_host_budget_that_cannot_work(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="host_budget: expected a store"):
        load(checkpoints["qwen2"], host_budget="1GiB")
    for wrong in ("much", -1, "8 gibs"):
        with pytest.raises(PolicyError, match="host_budget: expected bytes"):
            load(checkpoints["qwen2"], store=tmp_path / "store", host_budget=wrong)
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_reopened_model(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Those of the configuration."""
    load(checkpoints["qwen2"], store=tmp_path / "store")
    model = load(tmp_path / "store", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    kept = json.loads((tmp_path / "store" / "config.json").read_text())
    assert kept == json.loads((checkpoints["qwen2"] / "config.json").read_text())
