"""A bit that a move itself flips is found before anything is trained, wherever the tensor goes."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshots import assert_same_run, build, layers_of, run

import poros
import poros.loaders.load
from poros.errors import ParityError, StoreWriteError
from poros.gates import tiny
from poros.layer.streamed import is_streamed
from poros.loaders.quantize import Quantizer
from poros.loaders.slab_writer import SlabWriter
from poros.streams import EagerStreams
from tests.loading.loaded import quantization, standard
from tests.loading.stores import lay_down


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """One of each kind."""
    layer = layers_of(model)[1]
    weight = layer.mlp.up_proj.base_layer.weight
    return {
        "packed weight": weight.data,
        "absmax": weight.quant_state.absmax,
        "nested absmax": weight.quant_state.state2.absmax,
        "norm": layer.input_layernorm.weight.data,
        "bias": layer.self_attn.k_proj.base_layer.bias.data,
    }


def flip_when_copied(source: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on a copy of ``source`` arrives with one nibble changed."""
    copy, place, flips = torch.Tensor.copy_, source.data_ptr(), list[int]()

    def faulty(self: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = copy(self, other, *args, **kwargs)
        if other.data_ptr() == place and self.data_ptr() != place and self.dtype == other.dtype:
            self.view(-1).view(torch.uint8)[1] ^= 0x30
            flips.append(self.data_ptr())
        return result

    monkeypatch.setattr(torch.Tensor, "copy_", faulty)
    return flips


@pytest.mark.parametrize("keep_last", [0, 3])
@pytest.mark.parametrize("kind", ["packed weight", "absmax", "nested absmax", "norm", "bias"])
def test_a_nibble_flipped_by_prepare_is_found(
    kind: str, keep_last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with monkeypatch.context() as patch:
        flips = flip_when_copied(tensors_of(model)[kind], patch)
        poros.prepare(model, keep_last=keep_last)
    assert len(flips) == 1
    with pytest.raises(ParityError, match=r"layers\.1"):
        run(model)


@pytest.mark.parametrize("self_check", ["strict", "off"])
@pytest.mark.parametrize("is_adopted", [False, True])
def test_control_nothing_is_found_where_nothing_flips(self_check: str, is_adopted: bool) -> None:
    def make() -> Any:
        base = build(dropout=0.0).unload()
        if is_adopted:
            lay_down(base)
        return tiny.attach_lora(base, rank=8, seed=1)

    model = poros.prepare(make(), self_check=self_check)
    assert poros.runtime(model).is_adopted == is_adopted
    assert_same_run(run(make()), run(model))
    assert poros.runtime(model).self_check["status"] in ("passed", "off")


UP = "layers.1.mlp.up_proj.weight"
PARTS = {"packed weight": UP, "absmax": f"{UP}.absmax", "nested absmax": f"{UP}.nested_absmax"}
WAYS = ("memory", "staged", "4-bit checkpoint")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    config = tiny.small_config("qwen2", num_layers=3, hidden_size=64)
    tiny.write_checkpoint(config, path, dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def packed_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    standard(checkpoint, quantization()).save_pretrained(path)
    return path


@pytest.fixture
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A weight is quantized in several pieces; staged, they come back as from a device."""
    is_staged = request.node.callspec.params.get("way") == "staged"
    streams = EagerStreams(torch.device("cpu")) if is_staged else None
    pieces = partial(Quantizer, chunk_num_bytes=2048, streams=streams)
    monkeypatch.setattr(poros.loaders.load, "Quantizer", pieces)
    yield


def flip_when_packed(
    part: str, monkeypatch: pytest.MonkeyPatch, *, on_the_way: bool = False
) -> list[int]:
    """From now on a nibble changes as ``part`` is written to its place in host memory.

    Or, ``on_the_way``, as it comes back from where it was quantized.
    """
    find, bring, copy = SlabWriter._target, Quantizer._bring_back, torch.Tensor.copy_
    places, sources, flips = list[torch.Tensor](), list[int](), list[int]()

    def is_there(tensor: torch.Tensor) -> bool:
        starts = [(each.data_ptr(), each.numel() * each.element_size()) for each in places]
        return any(0 <= tensor.data_ptr() - start < size for start, size in starts)

    def target(self: Any, name: str, like: torch.Tensor) -> torch.Tensor:
        found = find(self, name, like)
        if name.endswith(part):
            places.append(found)
        return found

    def bring_back(self: Any, values: torch.Tensor, target: torch.Tensor, *args: Any) -> None:
        if is_there(target):
            sources.append(values.data_ptr())
        bring(self, values, target, *args)

    def faulty(self: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = copy(self, other, *args, **kwargs)
        is_it = other.data_ptr() in sources if on_the_way else is_there(self)
        if is_it and not flips:
            flips.append(self.data_ptr())
            self.view(-1).view(torch.uint8)[1] ^= 0x30
        return result

    monkeypatch.setattr(SlabWriter, "_target", target)
    monkeypatch.setattr(Quantizer, "_bring_back", bring_back)
    monkeypatch.setattr(torch.Tensor, "copy_", faulty)
    return flips


def flip_unseen(tensor: torch.Tensor) -> None:
    """Change a nibble as a fault of the memory does: PyTorch counts no write."""
    array: Any = tensor.detach().data.view(-1).view(torch.uint8).numpy()
    array[1] ^= 0x30


def with_lora(base: Any) -> Any:
    return tiny.attach_lora(base, rank=8, seed=1)


def up_of(model: Any) -> Any:
    """The weight that ``UP`` names."""
    linear = layers_of(model)[1].mlp.up_proj
    return getattr(linear, "base_layer", linear).weight


def part_of(model: Any, kind: str) -> torch.Tensor:
    weight = up_of(model)
    state = weight.quant_state
    found = {"absmax": state.absmax, "nested absmax": state.state2.absmax}
    return found.get(kind, weight)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_nibble_flipped_by_load_is_found(
    kind: str,
    way: str,
    checkpoint: Path,
    packed_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        flips = flip_when_packed(PARTS[kind], patch)
        base = poros.load(packed_checkpoint if way == "4-bit checkpoint" else checkpoint)
    assert len(flips) == 1
    model = with_lora(base)
    before = part_of(model, kind).clone()
    with pytest.raises(ParityError, match=r"layers\.1\.mlp\.up_proj.*expected digest.*found"):
        poros.prepare(model)
    assert not any(map(is_streamed, model.modules()))
    assert torch.equal(part_of(model, kind), before)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("way", ["staged"])
def test_a_nibble_flipped_on_the_way_back_from_a_device_is_found(
    way: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        flips = flip_when_packed(UP, patch, on_the_way=True)
        model = with_lora(poros.load(checkpoint))
    assert len(flips) == 1
    with pytest.raises(ParityError, match=r"layers\.1\.mlp\.up_proj"):
        poros.prepare(model)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_nibble_flipped_on_its_way_into_a_store_is_found(
    kind: str,
    way: str,
    checkpoint: Path,
    packed_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = packed_checkpoint if way == "4-bit checkpoint" else checkpoint
    with monkeypatch.context() as patch:
        flips = flip_when_packed(PARTS[kind], patch)
        with pytest.raises(StoreWriteError, match=r"layers\.1\.mlp\.up_proj"):
            poros.load(source, store=tmp_path / "store")
    assert len(flips) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("host_budget", [None, 0])
def test_a_nibble_of_an_opened_store_that_changes_before_prepare_is_found(
    kind: str, host_budget: int | None, checkpoint: Path, tmp_path: Path
) -> None:
    base = poros.load(checkpoint, store=tmp_path / "store", host_budget=host_budget)
    flip_unseen(part_of(base, kind))
    with pytest.raises(ParityError, match=r"layers\.1\.mlp\.up_proj"):
        poros.prepare(with_lora(base))


def test_what_load_has_flipped_is_said_and_trained_on_if_that_is_wanted(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = poros.load(checkpoint)
    flip_unseen(up_of(model))
    model = poros.prepare(with_lora(model), self_check="warn")
    with caplog.at_level(logging.WARNING, "poros"):
        run(model)
    assert caplog.text.count("layers.1.mlp.up_proj") == 1
    assert poros.runtime(model).self_check["status"] == "failed"
    poros.prepare(poros.restore(model), self_check="off")


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("way", [*WAYS, "store", "disk"])
def test_control_what_load_has_packed_is_taken_over(
    way: str, checkpoint: Path, packed_checkpoint: Path, tmp_path: Path
) -> None:
    def make() -> Any:
        if way in ("store", "disk"):
            budget = 0 if way == "disk" else None
            base = poros.load(checkpoint, store=tmp_path / "store", host_budget=budget)
        else:
            base = poros.load(packed_checkpoint if way == "4-bit checkpoint" else checkpoint)
        return with_lora(base)

    model = poros.prepare(make())
    assert poros.runtime(model).is_adopted
    assert_same_run(run(make()), run(model))
    assert poros.runtime(model).self_check["status"] == "passed"
    poros.prepare(poros.restore(model))


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        up_of(model)[:64] ^= 0x11


def edit_scales(model: Any) -> None:
    with torch.no_grad():
        part_of(model, "absmax")[:8] ^= 1
        part_of(model, "nested absmax").mul_(2)


def replace_bytes(model: Any) -> None:
    up_of(model).data = up_of(model).data ^ 0x11


def replace_scales(model: Any) -> None:
    state = up_of(model).quant_state
    state.state2.absmax = state.state2.absmax * 2


def edit_dense(model: Any) -> None:
    model.get_submodule("base_model.model.model.embed_tokens").weight.data[3] *= 2
    layers_of(model)[1].input_layernorm.weight.data[3] *= 2


EDITS = (edit_in_place, edit_scales, replace_bytes, replace_scales, edit_dense)


@pytest.mark.parametrize("edit", EDITS)
def test_control_edits_before_prepare_are_nobodys_fault(edit: Any, checkpoint: Path) -> None:
    def make() -> Any:
        model = with_lora(poros.load(checkpoint))
        edit(model)
        return model

    model = poros.prepare(make())
    assert_same_run(run(make()), run(model))


def test_control_a_dense_weight_may_be_edited_behind_pytorch(checkpoint: Path) -> None:
    def make() -> Any:
        model = with_lora(poros.load(checkpoint, quantization=None))
        flip_unseen(up_of(model))
        return model

    assert_same_run(run(make()), run(poros.prepare(make())))
