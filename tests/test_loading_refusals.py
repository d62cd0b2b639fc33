"""What ``poros.load`` refuses, by name, and that nothing is left of it."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from poros.errors import CheckpointFormatError, PolicyError, UnsupportedModelError
from poros.loaders.load import load
from poros.loaders.quantize import Quantizer
from poros.loaders.slab_writer import SlabWriter
from tests.loaded import (
    DOWN,
    EMBED,
    NORM,
    checkpoints,
    copy_of,
    differences,
    is_mapped,
    quantization,
    standard,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes small checkpoints, each once."""
    return checkpoints(tmp_path_factory)


@pytest.fixture(autouse=True)
def leaves_transformers_as_it_was() -> Iterator[None]:
    """No method of quantization stays behind, whatever happened."""
    before = dict(AUTO_QUANTIZER_MAPPING)
    yield
    assert dict(AUTO_QUANTIZER_MAPPING) == before


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update({name: value(found[name])})


@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop(DOWN), f"none of {DOWN}"),
        (lambda found: found.pop(NORM), f"none of {NORM}"),
        (lambda found: found.pop(EMBED), f"none of {EMBED}"),
        (_set(DOWN, lambda each: each[:-1].clone()), f"{DOWN}: expected shape"),
        (_set(DOWN, lambda each: each.T.contiguous()), f"{DOWN}: expected shape"),
        (_set(NORM, lambda each: each[:-1].clone()), f"{NORM}.*expected shape"),
        (_set(EMBED, lambda each: each[:-1].clone()), f"{EMBED}.*expected shape"),
        (_set(DOWN, lambda each: each * float("nan")), f"{DOWN}: expected finite"),
        (_set(NORM, lambda each: each * float("inf")), f"{NORM}: expected finite"),
        (_set(EMBED, lambda each: each * float("nan")), f"{EMBED}: expected finite"),
        (
            lambda found: found.update({"model.layers.1.mlp.extra.weight": torch.ones(3)}),
            "tensors without use: model.layers.1.mlp.extra.weight",
        ),
        (
            lambda found: found.update({"model.layers.4.mlp.up_proj.weight": torch.ones(3)}),
            "tensors without use: model.layers.4.mlp.up_proj.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    checkpoint: Any, tmp_path: Path, change: Any, message: str, is_quantized: bool
) -> None:
    """By name; from_pretrained would fill the gaps with random numbers."""
    path = copy_of(checkpoint(), tmp_path, change)
    with pytest.raises(CheckpointFormatError, match=message) as caught:
        load(path, quantization="nf4" if is_quantized else None)
    assert str(tmp_path) in str(caught.value)
    del caught  # its traceback holds what was loaded so far
    gc.collect()
    assert not is_mapped(path)


def test_control_a_sound_copy_is_loaded(checkpoint: Any, tmp_path: Path) -> None:
    """What the refused ones differ from; tensors of other parts of a model do no harm."""
    extra = {"vision.weight": torch.ones(3)}
    path = copy_of(checkpoint(), tmp_path, lambda found: found.update(extra))
    assert differences(load(path), standard(path, quantization())) == []


def test_nonfinite_weights_can_be_allowed(checkpoint: Any, tmp_path: Path) -> None:
    """They are then what from_pretrained makes of them."""

    def spoil(found: dict[str, Any]) -> None:
        for name in (DOWN, NORM, EMBED):
            found[name].view(-1)[7] = float("nan")

    path = copy_of(checkpoint(), tmp_path, spoil)
    model = load(path, allow_nonfinite=True)
    assert differences(model, standard(path, quantization())) == []


@pytest.mark.parametrize("is_persistent", [True, False])
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
    slab_writer = SlabWriter(
        Path("here"),
        lambda model: ("layers", list(model["layers"])),
        Quantizer(torch.device("cpu")),
        None,
        lambda tensor: False,
    )
    slab_writer.plan(planned, {})
    model = make()
    if is_persistent:
        with pytest.raises(CheckpointFormatError, match=r"here: layers\.0\.mask: expected finite"):
            slab_writer.finish(model)
    else:
        slab_writer.finish(model)
        assert all(
            slab_writer.is_placed(name, each)
            for name, each in (*model.named_parameters(), *model.named_buffers())
        )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda each: each[:-1].clone()),
        ("weight.absmax", lambda each: each[:-1].clone()),
        ("weight.nested_absmax", lambda each: torch.cat([each, each])),
        ("weight.nested_absmax", lambda each: each * float("nan")),
    ],
)
def test_parts_of_4bit_weights_that_do_not_fit(
    checkpoint: Any, tmp_path: Path, name: str, change: Any
) -> None:
    """From a checkpoint that is 4-bit already."""
    (tmp_path / "sound").mkdir()
    standard(checkpoint(), quantization()).save_pretrained(tmp_path / "sound")
    part = DOWN.replace("weight", name)
    path = copy_of(tmp_path / "sound", tmp_path, _set(part, change))
    with pytest.raises(CheckpointFormatError, match=DOWN):
        load(path)


def test_a_missing_part_of_a_4bit_weight(checkpoint: Any, tmp_path: Path) -> None:
    """Its statistics."""
    (tmp_path / "sound").mkdir()
    standard(checkpoint(), quantization()).save_pretrained(tmp_path / "sound")
    path = copy_of(tmp_path / "sound", tmp_path, lambda found: found.pop(f"{DOWN}.absmax"))
    with pytest.raises(CheckpointFormatError):
        load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto"}, "device_map: expected options"),
        ({"state_dict": {}}, "state_dict: expected options"),
        ({"torch_dtype": torch.float32}, "torch_dtype: expected options"),
        ({"trust_remote_code": True}, "trust_remote_code: expected False"),
        ({"quantization": "int8"}, "quantization: expected 'nf4'"),
        ({"quantization": BitsAndBytesConfig(load_in_8bit=True)}, "quantization: expected 'nf4'"),
        ({"device": "nowhere"}, "device: expected a usable device"),
        ({"device": "meta"}, "device: expected a usable device, found 'meta' .only CPUs and CUDA"),
    ],
)
def test_options_that_cannot_work(checkpoint: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load(checkpoint(), **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            UnsupportedModelError,
            "gptq",
        ),
        ({"model_type": "vit"}, UnsupportedModelError, "vit"),
        ({"model_type": "no_such_model"}, CheckpointFormatError, "config.json"),
        ({"num_hidden_layers": "many"}, CheckpointFormatError, "config.json"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}},
            CheckpointFormatError,
            "config.json",
        ),
    ],
)
def test_configurations_that_cannot_be_loaded(
    checkpoint: Any, tmp_path: Path, changes: dict[str, Any], error: type, message: str
) -> None:
    path = copy_of(checkpoint(), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=message):
        load(path)
