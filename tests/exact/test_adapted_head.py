"""LoRA on the head: what it adds to the logits is never there whole either."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

import poros
from poros.head.logits import LazyLogits
from poros.head.loss import sliced_cross_entropy
from tests.exact.arms import ON_HOST, narrow_slices, slice_resident_loss, streamed, with_sliced_loss
from tests.snapshots import assert_same_run, batches, build, run

Model = Any
RANK, V = 4, 1000


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_slices(monkeypatch)


def with_lora(model: Model, **options: Any) -> Model:
    config = LoraConfig(
        **{"r": RANK, "target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.05}
        | {"init_lora_weights": False}
        | options
    )
    torch.manual_seed(3)
    return get_peft_model(model.unload(), config).train()


def with_two(model: Model) -> Model:
    model = with_lora(model)
    torch.manual_seed(4)
    model.add_adapter("two", LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "two"])
    return model


def in_float32(model: Model) -> Model:
    """As PEFT leaves adapters of a bfloat16 model, if it is asked not to cast them back."""
    model = with_lora(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model


CHANGES: dict[str, Callable[[Model], Model]] = {
    "one": with_lora,
    "two of them": with_two,
    "float32 adapters": in_float32,
    "rsLoRA": lambda model: with_lora(model, use_rslora=True),
}


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*(("qwen2", kind) for kind in CHANGES), ("gemma2", "one"), ("gemma3", "two of them")],
)
def test_it_is_trained_in_slices(
    architecture: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a resident model with the same loss; gemma2 caps its logits, gemma3 ties the head."""
    change = CHANGES[kind]
    expected = run(slice_resident_loss(change(build(architecture))))
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = with_sliced_loss(change(build(architecture)), **{**ON_HOST, "stream_head": None})
    assert "keeps its own" not in caplog.text
    assert_same_run(expected, run(model))
    own = [name for name in expected.steps[0].gradients if "lm_head" in name]
    assert len(own) == (4 if kind == "two of them" else 2)
    assert all(bool(expected.steps[0].gradients[name].any()) for name in own)


@pytest.mark.parametrize("kind", CHANGES)
def test_whole_logits_are_those_of_peft(kind: str) -> None:
    """Also after the loss, and of a model whose adapters are off."""
    change = CHANGES[kind]
    model, plain = with_sliced_loss(change(build()), stream_head=False), change(build())
    for mode in ("on", "off"):
        found = []
        for each in (model, plain):
            torch.manual_seed(5)
            if mode == "off":
                with each.disable_adapter():
                    found.append(each(**batches()[1]))
            else:
                found.append(each(**batches()[1]))
        assert isinstance(found[0].logits, LazyLogits) and not found[0].logits.is_computed
        assert torch.equal(found[0].logits, found[1].logits), mode


def test_no_tensor_of_tokens_and_vocabulary_is_made() -> None:
    """The sum that PEFT writes down is noted, not computed."""
    model = with_sliced_loss(with_lora(build()), stream_head=False)
    output = model(**batches()[1])
    assert not output.logits.is_computed
    assert len(output.logits.added) == 1
    assert not output.logits.added[0].is_computed


def test_a_bias_of_lora_is_not_left_out() -> None:
    """It is no product: the logits are computed whole, and the loss is the model's own."""

    def biased(model: Model) -> Model:
        model = with_lora(model, lora_bias=True)
        own = model.get_base_model().get_output_embeddings().lora_B["default"].bias
        own.data = torch.linspace(-3, 3, len(own), dtype=own.dtype)
        return model

    expected = run(biased(build()))
    found = run(streamed(biased(build()), slots=2, loss="chunked", stream_head=False))
    assert_same_run(expected, found)
    name = next(name for name in found.steps[0].gradients if "lm_head.lora_B" in name)
    assert bool(found.steps[0].gradients[name].any())


def test_dora_on_the_head_keeps_whole_logits_and_its_own_loss() -> None:
    """It scales what LoRA adds by a norm of each row."""
    expected = run(with_lora(build(), use_dora=True))
    model = streamed(with_lora(build(), use_dora=True), slots=2, loss="chunked")
    assert_same_run(expected, run(model))


def test_an_adapter_that_comes_later_is_computed_whole() -> None:
    def added(model: Model) -> Model:
        torch.manual_seed(4)
        config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        model.add_adapter("two", config)
        model.set_adapter("two")
        return model

    expected = run(added(slice_resident_loss(with_lora(build()))))
    assert_same_run(expected, run(added(with_sliced_loss(with_lora(build()), stream_head=False))))


def test_the_plan_has_no_logits() -> None:
    tokens, vocabulary = 256, 512
    model = with_lora(build())
    plans = [
        poros.plan(model, seq_len=tokens, batch_size=4, loss=loss).terms["workspace"]
        for loss in ("reference", "chunked")
    ]
    assert plans[0] > 4 * tokens * vocabulary * 4
    assert plans[1] < plans[0] - 4 * tokens * vocabulary * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_added_columns_are_those_of_a_wider_head(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    weight = (0.4 * torch.randn(V, 48)).to(dtype)
    columns = (0.3 * torch.randn(V, RANK)).requires_grad_()
    hidden = torch.randn(23, 48 + RANK).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (23,))
    labels[2::5] = -100

    def read(width: int) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(0, V, width):
            yield first, weight[first : first + width]

    loss = sliced_cross_entropy(hidden, labels, read, V, added=columns)
    loss.backward()
    exact = hidden.detach().double().requires_grad_()
    own = columns.detach().to(dtype).double().requires_grad_()
    head = torch.cat([weight.double(), own], dim=1)
    expected = F.cross_entropy(exact @ head.T, labels, reduction="sum")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert columns.grad is not None and hidden.grad is not None
    assert own.grad is not None and exact.grad is not None
    # Weights of rows, and what comes out, are rounded to the dtype.
    roundoff = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-18
    for found, true in ((columns.grad, own.grad), (hidden.grad, exact.grad)):
        assert (found.double() - true).norm() <= roundoff * true.norm()
