"""A bit that a move itself flips is found before anything is trained, wherever the tensor goes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
import poros.loaders.load
from poros.errors import ParityError
from poros.gates import tiny
from poros.loaders.quantize import Quantizer
from tests.covers import with_slow
from tests.snapshots import assert_same_run, build, layers_of, run
from tests.support import prepare_plain

Patch = pytest.MonkeyPatch
KINDS = ("packed weight", "absmax", "nested absmax")


def part_of(model: Any, kind: str) -> torch.Tensor:
    """One tensor of each kind, of layer 1."""
    layer = layers_of(model)[1]
    linear = layer.mlp.up_proj
    weight = getattr(linear, "base_layer", linear).weight
    found: dict[str, Callable[[], torch.Tensor]] = {
        "packed weight": lambda: weight,
        "absmax": lambda: weight.quant_state.absmax,
        "nested absmax": lambda: weight.quant_state.state2.absmax,
        "norm": lambda: layer.input_layernorm.weight,
        "bias": lambda: layer.self_attn.k_proj.base_layer.bias,
    }
    return found[kind]()


def flip(tensor: torch.Tensor) -> None:
    """Change a nibble as a fault of the memory does: PyTorch counts no write."""
    array: Any = tensor.detach().data.view(-1).view(torch.uint8).numpy()
    array[1] ^= 0x30


def flip_copies(patch: Patch, is_it: Callable[[torch.Tensor, torch.Tensor], bool]) -> list[int]:
    """From now on a copy, said by target and source, arrives with one nibble changed."""
    copy, flips = torch.Tensor.copy_, list[int]()

    def faulty(self: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = copy(self, other, *args, **kwargs)
        if is_it(self, other):
            flips.append(self.data_ptr())
            flip(self)
        return result

    patch.setattr(torch.Tensor, "copy_", faulty)
    return flips


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    config = tiny.small_config("qwen2", num_layers=3, hidden_size=64)
    tiny.write_checkpoint(config, path, dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def packed(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    tiny.load_base(dense, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def source(way: str, dense: Path, packed: Path, monkeypatch: Patch) -> Path:
    """What is loaded: each weight in several pieces."""
    pieces = partial(Quantizer, chunk_num_bytes=2048)
    monkeypatch.setattr(poros.loaders.load, "Quantizer", pieces)
    return packed if way == "4-bit checkpoint" else dense


def with_lora(base: Any) -> Any:
    return tiny.attach_lora(base, rank=8, seed=1)


@pytest.mark.cover("values")
@pytest.mark.parametrize("keep_last", [0, 3])
@pytest.mark.parametrize("kind", [*KINDS, "norm", "bias"])
def test_flipped_by_prepare(kind: str, keep_last: int, monkeypatch: Patch) -> None:
    model = build()
    place = part_of(model, kind).data_ptr()
    dtype = part_of(model, kind).dtype

    def is_it(target: torch.Tensor, source: torch.Tensor) -> bool:
        return source.data_ptr() == place != target.data_ptr() and target.dtype == dtype

    with monkeypatch.context() as patch:
        flips = flip_copies(patch, is_it)
        prepare_plain(model, keep_last=keep_last)
    assert len(flips) == 1
    with pytest.raises(ParityError, match=r"layers\.1"):
        run(model)


@pytest.mark.parametrize(
    ("way", "self_check"),
    [
        *((way, "strict") for way in ("memory", "4-bit checkpoint", "disk")),
        pytest.param("store", "strict", marks=pytest.mark.slow),
        ("not loaded", "off"),
    ],
)
def test_control_nothing_is_found_where_nothing_flips(
    way: str, self_check: str, source: Path, tmp_path: Path
) -> None:
    """What ``poros.load`` has packed is taken over where it lies."""

    def make() -> Any:
        if way == "not loaded":
            return with_lora(build(dropout=0.0).unload())
        if way in ("store", "disk"):
            budget = 0 if way == "disk" else None
            return with_lora(poros.load(source, store=tmp_path / "store", host_budget=budget))
        return with_lora(poros.load(source))

    model = prepare_plain(make(), self_check=self_check)
    assert poros.runtime(model).is_adopted == (way != "not loaded")
    assert_same_run(run(make()), run(model))
    assert poros.runtime(model).self_check["status"] == {"strict": "passed"}.get(self_check, "off")
    prepare_plain(poros.restore(model))


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        part_of(model, "packed weight")[:64] ^= 0x11


def edit_scales(model: Any) -> None:
    with torch.no_grad():
        part_of(model, "absmax")[:8] ^= 1
        part_of(model, "nested absmax").mul_(2)


def replace_bytes(model: Any) -> None:
    weight = part_of(model, "packed weight")
    weight.data = weight.data ^ 0x11


def replace_scales(model: Any) -> None:
    state: Any = part_of(model, "packed weight").quant_state  # type: ignore[attr-defined]
    state.state2.absmax = state.state2.absmax * 2


def edit_dense(model: Any) -> None:
    model.get_submodule("base_model.model.model.embed_tokens").weight.data[3] *= 2
    part_of(model, "norm").data[3] *= 2


def edit_behind_pytorch(model: Any) -> None:
    flip(part_of(model, "packed weight"))


EDITS = (edit_scales, replace_bytes, edit_dense, edit_in_place, replace_scales, edit_behind_pytorch)


@pytest.mark.parametrize("edit", with_slow(EDITS, (edit_in_place, replace_scales)))
def test_control_edits_before_prepare_are_nobodys_fault(edit: Any, dense: Path) -> None:
    def make() -> Any:
        model = with_lora(poros.load(dense))
        edit(model)
        return model

    assert_same_run(run(make()), run(prepare_plain(make())))
