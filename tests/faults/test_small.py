"""Tensors of layers that do not stream: they train as in a resident model.

What is small stays on the device: edited, cast, replaced and trained. What hooks bring into a layer
is trained too: ``tests/exact/test_written_programs``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import poros
from poros.errors import PreparedModelError, RematerializationError
from poros.stream.marks import Marks
from tests.comparing import assert_same_run, bits_of, changes
from tests.loops import NUM_LAYERS, at, batches, build, layers_of, run
from tests.support import AdversarialPrepare, prepare_plain

make: Callable[..., Any] = partial(build, dtype=torch.float32)
"""So that a cast of a few tensors is one that a resident model survives."""


def norm_of(model: Any, layer: int = 1) -> Any:
    return layers_of(model)[layer].input_layernorm


def bias_of(model: Any, layer: int = 2) -> Any:
    return layers_of(model)[layer].self_attn.q_proj.base_layer


def in_place(model: Any) -> None:
    with torch.no_grad():
        norm_of(model).weight.mul_(1.5)
        bias_of(model).bias.add_(0.25)


def cast(model: Any) -> None:
    norm_of(model).weight.data = norm_of(model).weight.data.bfloat16()
    bias_of(model).bias.data = bias_of(model).bias.data.bfloat16()


trainable = at(lambda norm: norm.requires_grad_(True), "input_layernorm")


def test_a_cast_between_steps_is_that_of_a_resident_run() -> None:
    """And stays when it is restored; between a forward and its backward it is an error.

    Other edits are written down in ``tests/exact/test_written_programs``.
    """
    twin, model = make(), make()
    with AdversarialPrepare().watching() as prepare:
        prepare(model)
        assert_same_run(run(twin, 1), run(model, 1))
        loss = model.train()(**batches()[0]).loss
        cast(twin), cast(model)
        with pytest.raises(RematerializationError, match=r"layers\.\d.*expected"):
            loss.backward()
        model.zero_grad()
        assert_same_run(run(twin, 1), run(model, 1))
    assert changes(bits_of(twin), bits_of(poros.restore(model))) == {}


@pytest.mark.cover("values")
@pytest.mark.parametrize("when", ["before prepare", "after prepare", "after a run", "budget"])
@pytest.mark.parametrize("quantize", [True, False])
def test_a_norm_that_is_trained_trains_as_in_a_resident_run(when: str, quantize: bool) -> None:
    """With a budget: after a run, in the room that its first step was given."""
    expected, model = make(quantize=quantize), make(quantize=quantize)
    for index, each in enumerate((expected, model)):
        if when == "before prepare":
            trainable(each)
        if index:
            prepare_plain(model, vram_budget="1GiB" if when == "budget" else None)
        if when in ("after a run", "budget"):
            run(each)
        trainable(each)
    found = run(model)
    assert sum("layernorm" in name for name in found.steps[0].gradients) == NUM_LAYERS
    assert_same_run(run(expected), found)
    poros.restore(model)
    assert_same_run(run(expected), run(model))


def test_large_vectors_and_buffers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound of 64 bytes the same model is exact too, and guards what streams."""
    monkeypatch.setattr("poros.host.layout.SMALL_NUM_BYTES", 64)
    model = prepare_plain(make())
    runtime = poros.runtime(model)
    assert not runtime.small.holds(norm_of(model).weight)
    assert_same_run(run(make()), run(model))
    in_place(model)
    with pytest.raises(PreparedModelError, match="written"):
        model(**batches()[0])


class Counting(nn.Module):
    """A norm with a running statistic."""

    def __init__(self, norm: Any, how: str) -> None:
        super().__init__()
        self.norm = norm
        self.how = how
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> Any:
        value = hidden.detach().float().mean()
        if self.how == "in place":
            self.mean.mul_(0.9).add_(value)
        elif self.how == "replaced":
            self.mean = self.mean + value
        elif self.how == "through data":
            self.mean.data = self.mean.data + value
        return self.norm(hidden)


@pytest.mark.cover("values")
@pytest.mark.parametrize("how", ["in place", "replaced", "through data", "not at all"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_layer_that_writes_is_refused(how: str, grad: bool) -> None:
    model = make()
    layer = layers_of(model)[2]
    layer.input_layernorm = Counting(layer.input_layernorm, how)
    prepare_plain(model)
    with torch.set_grad_enabled(grad):
        where = r"layers\.2\.input_layernorm\.mean"
        refused = pytest.raises(PreparedModelError, match=where)
        with nullcontext() if how == "not at all" else refused:
            model(**batches()[0])


def trained_biases(dtype: torch.dtype) -> Any:
    """``bias="all"`` trains biases of modules without adapters too."""
    config = LoraConfig(r=4, target_modules=["q_proj"], bias="all")
    torch.manual_seed(3)
    model = get_peft_model(make().unload(), config)
    for name, each in model.named_parameters():
        if name.endswith(".bias"):
            each.data = each.data.to(dtype)  # bitsandbytes casts another one for good
    return model


def cast_biases(dtype: torch.dtype) -> Any:
    """As bitsandbytes casts them for good."""
    model = make(dtype=dtype)
    for layer in layers_of(model):
        bias = layer.self_attn.q_proj.base_layer.bias
        bias.data = bias.data.to(torch.float64) * 1.001  # of no dtype that it is used in
    return model


@pytest.mark.parametrize(
    ("make_biases", "dtype"),
    [
        *((trained_biases, dtype) for dtype in (torch.float32, torch.float64)),
        *((cast_biases, dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_biases_are_trained_and_cast_as_in_a_resident_run(
    make_biases: Any, dtype: torch.dtype
) -> None:
    expected, model = make_biases(dtype), prepare_plain(make_biases(dtype))
    found = run(model)
    is_trained = make_biases is trained_biases
    assert sum("bias" in name for name in found.steps[0].gradients) == 9 * is_trained
    assert_same_run(run(expected), found)
    assert changes(bits_of(expected), bits_of(model)) == {}
    assert is_trained or bias_of(model).bias.dtype == dtype


def test_one_that_is_gone_differs_from_one_that_is_there() -> None:
    there = torch.ones(1)
    gone, same, other = (Marks([each, there]) for each in (None, there, there.clone()))
    assert [same.changed(each) for each in (gone, same, other)] == [0, None, 0]
    with torch.inference_mode():
        assert Marks([None, torch.ones(1)]).changed(gone) == 1


# Taken out of a layer.


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_probe_whose_tensors_are_edited_is_refused(is_streamed: bool) -> None:
    """As autograd refuses it in a resident model."""
    model = prepare_plain(build()) if is_streamed else build()
    probe, losses, seen = nn.Linear(64, 1), [], []

    def look(module: nn.Module, given: Any, result: torch.Tensor) -> None:
        seen.append(result.detach().float())
        losses.append(probe(seen[-1]).sum())

    layers_of(model)[1].mlp.register_forward_hook(look)
    model(**batches()[1])
    seen[0].mul_(2)
    error = poros.RematerializationError if is_streamed else RuntimeError
    with pytest.raises(error, match=r"in.?place"):
        losses[0].backward()
