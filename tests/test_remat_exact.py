"""What surrounds a forward is replayed at its recomputation, to the bit, for all kinds of LoRA."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from snapshots import (
    assert_same_run,
    assert_same_step,
    batches,
    bf16,
    build,
    changes,
    layers_of,
    no_context,
    outcome,
    run,
    step,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.errors import UnsupportedModelError

Model = Any
Make = Callable[[], Model]


def only_math() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)  # type: ignore[no-any-return]


def fp32() -> Model:
    return build(dtype=torch.float32)


def plain() -> Model:
    return build()


@pytest.mark.parametrize("between", ["eval", "train", "eval of one layer"])
def test_training_flags_are_replayed(between: str) -> None:
    flips: dict[str, Callable[[Model], object]] = {
        "eval": lambda model: model.eval(),
        "train": lambda model: model.train(),
        "eval of one layer": lambda model: layers_of(model)[1].eval(),
    }
    assert_same_step(between=flips[between])
    # And back: a forward in evaluation mode has no dropout, whatever the mode is at its backward.
    found = []
    for each in (build(), poros.prepare(build())):
        each.eval()
        torch.manual_seed(5)
        loss = each(**batches()[0]).loss
        each.train()
        loss.backward()
        found.append(outcome(each))
    assert changes(*found) == {}


def test_flags_are_after_backward_what_they_were_before() -> None:
    model = poros.prepare(build())
    step(model, between=lambda each: each.eval())
    assert not any(each.training for each in model.modules())


@pytest.mark.parametrize("make", [plain, fp32])
@pytest.mark.parametrize("backward", [no_context, bf16])
def test_autocast_around_the_forward_is_replayed(make: Make, backward: Callable[[], Any]) -> None:
    assert_same_step(make, around_forward=bf16, around_backward=backward)


@pytest.mark.parametrize("make", [plain, fp32])
def test_autocast_around_the_backward_only_does_not_reach_the_recomputation(make: Make) -> None:
    assert_same_step(make, around_backward=bf16)


def test_autocast_changes_bits() -> None:
    """The control of the two tests above."""
    assert changes(step(fp32()), step(fp32(), around_forward=bf16))
    assert changes(step(plain()), step(plain(), around_forward=bf16))


@pytest.mark.parametrize("make", [plain, fp32])
@pytest.mark.parametrize("backward", [no_context, only_math])
def test_the_choice_of_attention_backends_is_replayed(
    make: Make, backward: Callable[[], Any]
) -> None:
    assert_same_step(make, around_forward=only_math, around_backward=backward)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_the_choice_of_attention_backends_changes_bits() -> None:
    """The control of the test above, without dropout, which has one backend only."""
    fused, by_math = (
        step(build(dtype=torch.float32, dropout=0.0), around_forward=each)
        for each in (no_context, only_math)
    )
    assert changes(fused, by_math)


@pytest.mark.parametrize("use_reentrant_hooks", [True, False])
def test_input_require_grads_is_exact(use_reentrant_hooks: bool) -> None:
    def make() -> Model:
        model = build()
        if use_reentrant_hooks:
            model.get_base_model().enable_input_require_grads()
        return model

    resident = step(build())
    assert changes(resident, step(make())) == {}
    assert changes(resident, step(poros.prepare(make()))) == {}
    model = poros.prepare(build())
    model.get_base_model().enable_input_require_grads()
    assert changes(resident, step(model)) == {}


def only_on(layers: list[int], **options: Any) -> Make:
    """Models with adapters in some layers only."""

    def make() -> Model:
        torch.manual_seed(2)
        config = LoraConfig(
            r=4,
            target_modules=["q_proj", "down_proj"],
            layers_to_transform=layers,
            lora_dropout=0.05,
            init_lora_weights=False,
            **options,
        )
        return get_peft_model(build().unload(), config)

    return make


@pytest.mark.parametrize("layers", [[0], [1], [2], [0, 2]])
def test_layers_without_adapters_are_exact(layers: list[int]) -> None:
    assert_same_step(only_on(layers))
    make = only_on(layers)
    assert_same_run(run(make()), run(poros.prepare(make())))


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["input_layernorm"]},
    ],
)
def test_kinds_of_lora_are_exact(options: dict[str, Any]) -> None:
    make = only_on([0, 1, 2], **options)
    assert_same_run(run(make()), run(poros.prepare(make())))


def test_adapters_frozen_by_hand_are_exact() -> None:
    def make() -> Model:
        model = build()
        for name, each in model.named_parameters():
            each.requires_grad_(each.requires_grad and "layers.1." not in name)
        layers_of(model)[2].mlp.up_proj.lora_A["default"].weight.requires_grad_(False)
        return model

    assert_same_step(make)
    found = []
    for each in (build(), poros.prepare(build())):
        # Frozen between forward and backward, the gradient still arrives.
        freeze = layers_of(each)[0].mlp.up_proj.lora_A["default"].weight
        found.append(step(each, between=lambda _, freeze=freeze: freeze.requires_grad_(False)))
    assert changes(*found) == {}


@pytest.mark.parametrize("tie", ["within a layer", "across layers"])
def test_tied_adapters_are_exact(tie: str) -> None:
    def make() -> Model:
        model = build(dropout=0.0)
        first, last = layers_of(model)[0].mlp, layers_of(model)[2].mlp
        other = first.gate_proj if tie == "within a layer" else last.up_proj
        other.lora_A["default"].weight = first.up_proj.lora_A["default"].weight
        return model

    assert_same_step(make)
    assert_same_run(run(make()), run(poros.prepare(make())))
    model = poros.prepare(make())
    with bf16(), pytest.raises(UnsupportedModelError, match=r"lora_A.*autocast"):
        model(**batches()[0])
    assert_same_run(run(make()), run(model))


def test_dropout_masks_of_forward_and_backward_agree() -> None:
    """The random state of every layer is its own: without replay no gradient would be right."""
    expected, found = step(build(dropout=0.5)), step(poros.prepare(build(dropout=0.5)))
    assert changes(expected, found) == {}
    assert changes(expected, step(build(dropout=0.4)))
