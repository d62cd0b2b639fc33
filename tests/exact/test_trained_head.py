"""A head that is trained, whose loss and gradient are computed in slices all the same."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from poros.errors import PreparedModelError
from poros.head.logits import LazyLogits
from tests.exact.arms import narrow_slices, slice_resident_loss, with_sliced_loss
from tests.snapshots import assert_same_run, batches, build, digest, run

Model = Any


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_slices(monkeypatch)


def trained(model: Model) -> Model:
    model.get_output_embeddings().weight.requires_grad_(True)
    return model


def saved_whole(model: Model) -> Model:
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    torch.manual_seed(3)
    return get_peft_model(model.unload(), config)


def both_forms(model: Model) -> Model:
    """A trained bias beside a frozen weight."""
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 512, dtype=head.weight.dtype))
    return model


@pytest.mark.parametrize("change", [trained, saved_whole, both_forms])
def test_a_head_that_is_trained_stays_on_the_device(
    change: Callable[[Model], Model], caplog: pytest.LogCaptureFixture
) -> None:
    """Its loss is computed in slices all the same, and its gradient too."""
    resident = slice_resident_loss(change(build()))
    expected = run(resident)
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = with_sliced_loss(change(build()))
    assert "the head stays on the device: it is trained" in caplog.text
    assert_same_run(expected, run(model))
    own = [n for n, p in model.named_parameters() if "lm_head" in n and p.requires_grad]
    assert own and all(bool(expected.steps[0].gradients[name].any()) for name in own)
    assert isinstance(model(**batches()[0]).logits, LazyLogits)


def test_logits_that_are_read_after_the_head_was_updated_are_refused() -> None:
    model = with_sliced_loss(trained(build())).train()
    output = model(**batches()[1])
    output.loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    with pytest.raises(PreparedModelError, match="found them written to before"):
        output.logits.sum()


def with_a_second_copy(model: Model) -> Model:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("two", config)
    model.set_adapter("two")
    return model


def test_a_trained_copy_of_the_head_that_comes_later_is_the_one_that_is_read() -> None:
    """PEFT copies the head, and all that is in it."""
    expected = run(slice_resident_loss(with_a_second_copy(build())))
    model = with_a_second_copy(with_sliced_loss(build(), stream_head=False))
    found = run(model)
    assert_same_run(expected, found)
    assert any("lm_head" in name and g.any() for name, g in found.steps[0].gradients.items())


def test_a_resident_head_that_is_made_trainable_is_trained() -> None:
    def train(model: Model) -> Any:
        trained(model)
        run(model)
        return digest(model.get_output_embeddings().weight)

    start = digest(build().get_output_embeddings().weight)
    resident = train(slice_resident_loss(build()))
    assert resident == train(with_sliced_loss(build(), stream_head=False)) != start
