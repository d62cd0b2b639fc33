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


def with_lora_on_it(model: Model) -> Model:
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(3)
    return get_peft_model(model.unload(), config)


def parameters_of_head(model: Model) -> list[Any]:
    return [p for n, p in model.named_parameters() if "lm_head" in n and p.requires_grad]


def stepped(kind: Any, **options: Any) -> Callable[[Model], None]:
    return lambda model: kind(parameters_of_head(model), **options).step()


def through_data(model: Model) -> None:
    for each in parameters_of_head(model):
        each.data.mul_(2)


def with_rows_exchanged(model: Model) -> None:
    for each in parameters_of_head(model):
        each.data.copy_(each.data.flip(0))


def with_other_data(model: Model) -> None:
    for each in parameters_of_head(model):
        each.data = each.data * 2


def merged(model: Model) -> None:
    """PEFT writes to the frozen weight through ``.data``."""
    model.get_output_embeddings().merge()


EDITS: dict[str, Callable[[Model], object]] = {
    "for-each": stepped(torch.optim.AdamW, lr=0.1, foreach=True),
    "fused": stepped(torch.optim.AdamW, lr=0.1, fused=True),
    "through .data": through_data,
    "rows exchanged": with_rows_exchanged,
    "other .data": with_other_data,
    "nothing": lambda model: None,
    # It is counted as a write.
    "a step of no size": stepped(torch.optim.SGD, lr=0.0, foreach=True),
}
KEEPS = ("nothing", "a step of no size")
EDITED = [(change, edit) for change in (trained, saved_whole, with_lora_on_it) for edit in EDITS]


@pytest.mark.parametrize(("change", "edit"), [*EDITED, (with_lora_on_it, merged)])
def test_logits_that_are_read_after_the_head_was_edited(
    change: Callable[[Model], Model], edit: Any
) -> None:
    """They are those of the head that was called, or refused."""

    def logits_of(model: Model) -> torch.Tensor:
        torch.manual_seed(5)
        output = model.train()(**batches()[1])
        output.loss.backward()
        EDITS.get(edit, edit)(model)
        found: torch.Tensor = output.logits * 1.0
        return found.clone()

    plain = logits_of(change(build()))
    model = with_sliced_loss(change(build()))
    if edit in KEEPS:
        assert torch.equal(logits_of(model), plain)
    else:
        with pytest.raises(PreparedModelError, match="found them written to before"):
            logits_of(model)


@pytest.mark.parametrize("edit", ["fused", "through .data"])
def test_a_loss_that_is_taken_of_them_after_an_edit_is_refused(edit: str) -> None:
    model = with_sliced_loss(trained(build())).train()
    labels = batches()[1]["labels"]
    output = model(**batches()[1])
    again = model.get_base_model().loss_function(output.logits, labels, vocab_size=512)
    assert torch.equal(again, output.loss)
    output.loss.backward()
    EDITS[edit](model)
    with pytest.raises(PreparedModelError, match="found them written to before"):
        model.get_base_model().loss_function(output.logits, labels, vocab_size=512)


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
