"""Streamed DoRA beside resident DoRA with ``poros.use_adapter_kernels``: equal bits.

And beside PEFT's modules: within rounding, in one file format.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig

import poros
from poros.errors import ParityError, PolicyError
from poros.kernels.dora import SquaresOfRows
from tests.covers import with_slow
from tests.exact.adapter_arms import Found, adapted, differences, step, with_kernels
from tests.exact.arms import Bases, slice_resident_loss

Model = Any
BF16, FP32 = torch.bfloat16, torch.float32
autocast = partial(torch.autocast, "cpu", dtype=BF16)


def dora(bases: Bases, architecture: str = "qwen2", **options: Any) -> Model:
    """With DoRA whose B is not zero, and whose magnitudes are not the norms."""
    model = adapted(bases, architecture, **{"use_dora": True, "lora_alpha": 2, **options})
    generator = torch.Generator().manual_seed(4)
    for name, module in model.named_modules():
        if name.endswith("lora_magnitude_vector"):
            for vector in module.values():
                noise = torch.rand(vector.weight.shape, generator=generator)
                vector.weight.data = (3 + noise).to(vector.weight.dtype)
    return model


def streamed(model: Model, around: Callable[[], Any] = nullcontext, **policy: Any) -> list[Found]:
    poros.prepare(model, **{"loss": "reference", **policy})
    found = [step(model, around) for _ in range(2)]
    runtime = poros.runtime(model)
    assert runtime.self_check["status"] in ("passed", "off")
    stats = runtime.stats()
    assert stats["num_fused_adapters"] > 0 and stats["num_unfused_adapters"] == 0
    poros.restore(model)
    return found


def assert_exact(model: Model, around: Callable[[], Any] = nullcontext, **policy: Any) -> None:
    expected = with_kernels(model, around)
    for found in streamed(model, around, **policy):
        assert differences(found, expected) == []


@pytest.mark.parametrize("loss", ["reference", "chunked"])
def test_dora_outside_of_layers_is_pefts_in_both(loss: str, bases: Bases) -> None:
    """On the head: bits of the prepared model are those of ``use_adapter_kernels``."""
    model = dora(bases, target_modules=["q_proj", "down_proj", "lm_head"])
    plain = step(model)
    if loss == "chunked":
        slice_resident_loss(model)
    expected = with_kernels(model)
    model = dora(bases, target_modules=["q_proj", "down_proj", "lm_head"])
    for found in streamed(model, slots=2, loss=loss):
        assert differences(found, expected) == []
    assert differences(plain, expected), "control: the layers run ours"


@pytest.mark.cover("values")
@pytest.mark.parametrize("around", [nullcontext, autocast], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "options",
    [
        {"adapters": BF16},
        {"use_rslora": True},
        {"r": 1},
        {"r": 96},
        {"lora_dropout": 0.1},
        {"quantize": False},
    ],
    ids=str,
)
def test_no_choice_of_dora_changes_a_bit(
    options: dict[str, Any], dtype: torch.dtype, around: Any, bases: Bases
) -> None:
    assert_exact(dora(bases, dtype=dtype, **options), around)


def side_by_side(bases: Bases) -> Model:
    """Each module as its adapter says; those of LoRA are checked against PEFT's own."""
    model = dora(bases, target_modules=["q_proj", "down_proj"])
    model.add_adapter("plain", LoraConfig(r=4, target_modules=["k_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "plain"])
    return model


MODELS: dict[str, Callable[[Bases], Model]] = {
    "LoRA beside it": side_by_side,
    "phi3": partial(dora, architecture="phi3", lora_dropout=0.1, target_modules="all-linear"),
    **{
        name: partial(dora, architecture=name, lora_dropout=0.1)
        for name in ("llama", "mistral", "gemma3")
    },
}


@pytest.mark.parametrize("which", with_slow(MODELS, ("llama", "mistral")))
def test_other_models(which: str, bases: Bases) -> None:
    assert_exact(MODELS[which](bases))


@pytest.mark.parametrize("kernels", ["exact", "peft"])
def test_peft_modules_are_a_choice_with_the_bits_of_plain_peft(kernels: str, bases: Bases) -> None:
    model = dora(bases)
    expected = step(model)
    poros.prepare(model, loss="reference", adapter_kernels=kernels)
    found = step(model)
    assert differences(found, expected) == []
    assert poros.runtime(model).stats()["num_fused_adapters"] == 0


def test_a_resident_model_may_leave_dora_to_peft(bases: Bases) -> None:
    model = dora(bases)
    expected = step(model)
    poros.use_adapter_kernels(model, kernels="exact")
    assert differences(step(model), expected) == []
    poros.restore(model)
    with pytest.raises(PolicyError, match="fused, exact"):
        poros.use_adapter_kernels(model, kernels="peft")


def test_control_ours_and_those_of_peft_are_not_the_same_bits(bases: Bases) -> None:
    model = dora(bases)
    assert differences(with_kernels(model), step(model))


@pytest.mark.parametrize("around", [nullcontext, autocast], ids=["", "autocast"])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
def test_a_step_is_within_rounding_of_peft(quantize: bool, around: Any, bases: Bases) -> None:
    """In float32: a forward and backward of two layers is some hundred roundings deep."""
    model = dora(bases, dtype=FP32, quantize=quantize)
    expected, found = step(model, around), with_kernels(model, around)
    unit = 2.0**-8 if around is autocast else 2.0**-24
    for name, value in expected.facts.items():
        distance = (found.facts[name].double() - value.double()).abs().max()
        assert distance <= 512 * unit * value.double().abs().max() + 1e-12, name


def test_the_self_check_sees_a_norm_that_is_not_the_weights(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that only the streamed layers remember: those it compares with start anew."""
    model = dora(bases)
    poros.prepare(model, loss="reference", self_check="strict")
    layer = model.base_model.model.model.layers[0]
    forward = layer.mlp.up_proj.__dict__["forward"]
    own = SquaresOfRows.of

    def wrong(self: SquaresOfRows, *args: Any, **kwargs: Any) -> torch.Tensor:
        squares = own(self, *args, **kwargs)
        return squares * 2 if self is forward._squares else squares

    monkeypatch.setattr(SquaresOfRows, "of", wrong)
    with pytest.raises(ParityError):
        step(model)


def test_a_weight_that_was_merged_into_has_new_norms(bases: Bases) -> None:
    """PEFT writes to it through ``.data``, and taking it out again leaves other bits."""
    model = dora(bases, quantize=False)
    model.add_adapter("plain", LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    weight = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    for name, each in model.named_parameters():
        if "plain" in name:
            each.data.normal_(0, 0.3)
    poros.use_adapter_kernels(model)
    step(model)
    before = weight.detach().clone()
    model.set_adapter("plain")
    model.merge_adapter()
    step_of_merged = model(input_ids=torch.arange(8)[None]).logits
    model.unmerge_adapter()
    model.set_adapter("default")
    found = step(model)
    poros.restore(model)
    assert step_of_merged.isfinite().all() and not torch.equal(before, weight)
    assert differences(found, with_kernels(model)) == []


EDITS: dict[str, Callable[[Any], None]] = {
    "a weight through .data": lambda weight: weight.data.mul_(1.5),
    "a weight in place": lambda weight: weight.mul_(1.5),
    "scales through .data": lambda weight: weight.quant_state.absmax.data.bitwise_xor_(1),
    "scales in place": lambda weight: weight.quant_state.absmax.bitwise_xor_(1),
}


@pytest.mark.parametrize("edit", EDITS)
def test_norms_are_those_of_the_base_as_it_is_now(edit: str, bases: Bases) -> None:
    """A resident one, which anybody may edit: as if the edit had come first."""
    found = []
    for is_late in (False, True):
        model = dora(bases, quantize="scales" in edit)
        if is_late:
            poros.use_adapter_kernels(model)
            step(model)
        for layer in model.base_model.model.model.layers:
            with torch.no_grad():
                EDITS[edit](layer.mlp.up_proj.base_layer.weight)
        if not is_late:
            poros.use_adapter_kernels(model)
        found.append(step(model))
    assert differences(*found) == []
    assert differences(with_kernels(dora(bases, quantize="scales" in edit)), found[0])
