"""Losses that do not suit micro-batches that go together: seen, and made good or refused."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import poros
from poros.errors import UnsupportedModelError
from tests.exact import subjects as S
from tests.exact.arms import Bases
from tests.exact.together import (
    Batch,
    Loss,
    build,
    layers,
    num_groups,
    own_loss,
    reasons,
    same,
    train,
    trained,
)
from tests.support import prepare_plain

Model = Any


def adapters(model: Model) -> list[torch.Tensor]:
    return [each for each in model.parameters() if each.requires_grad]


def penalty(model: Model, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = sum(each.square().sum() for each in adapters(model))
    return own_loss(model, batch) + 0.1 * found


def in_evaluation_mode(model: Model, batch: Batch) -> torch.Tensor:
    model.eval()
    try:
        return own_loss(model, batch)
    finally:
        model.train()


def of_python(model: Model, batch: Batch) -> torch.Tensor:
    labels = batch["labels"].clone()
    labels[:, : random.randrange(1, 4)] = -100
    return own_loss(model, {**batch, "labels": labels})


def of_numpy(model: Model, batch: Batch) -> torch.Tensor:
    tokens = batch["input_ids"].clone()
    tokens[:, np.random.randint(0, 4)] = 3
    return own_loss(model, {**batch, "input_ids": tokens})


def taking_out(model: Model, batch: Batch) -> torch.Tensor:
    labels = batch.pop("labels")
    return own_loss(model, {**batch, "labels": labels})


def editing(model: Model, batch: Batch) -> torch.Tensor:
    batch["input_ids"].add_(1)
    return own_loss(model, batch)


def setting(model: Model, batch: Batch) -> torch.Tensor:
    torch.set_float32_matmul_precision("medium" if batch["input_ids"].shape[1] % 2 else "highest")
    return own_loss(model, batch)


def catching(model: Model, batch: Batch) -> torch.Tensor:
    loss = own_loss(model, batch)
    try:
        return loss + own_loss(model, batch)
    except:  # noqa: E722
        return loss


def keeping(model: Model, batch: Batch) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    handle = model.get_base_model().model.norm.register_forward_pre_hook(
        lambda module, args: kept.append(args[0])
    )
    try:
        return own_loss(model, batch) + 0.1 * sum(each.float().square().mean() for each in kept)
    finally:
        handle.remove()


# With the reason, if they run one after the other; or none, if they go together.
LOSSES: dict[str, tuple[Loss, str | None]] = {
    "a penalty on adapters": (penalty, "uses parameters of layers"),
    "evaluation mode while it runs": (in_evaluation_mode, "changes while it runs"),
    "random numbers of Python": (of_python, None),
    "random numbers of NumPy": (of_numpy, None),
    "a batch that is taken apart": (taking_out, None),
    "a batch that is edited": (editing, None),
    "settings that change": (setting, "changes settings"),
    "errors that are caught": (catching, "more than once"),
    "the last hidden states": (keeping, None),
}


@pytest.fixture
def precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    # What that set for one operator each, which PyTorch has no way to ask for.
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


def seeded(model: Model, loss: Loss, together: bool) -> list[torch.Tensor]:
    random.seed(3)
    np.random.seed(4)
    found = train(model, together, loss=loss)
    return [*found, torch.tensor([random.random(), np.random.random()])]


@pytest.mark.parametrize("which", LOSSES)
def test_losses(which: str, bases: Bases, precision: None) -> None:
    loss, reason = LOSSES[which]
    expected = seeded(build(bases), loss, False)
    torch.set_float32_matmul_precision("highest")
    model = prepare_plain(build(bases), slots=2)
    assert same(seeded(model, loss, True), expected)
    if reason is None:
        assert num_groups(model) == 3 and reasons(model) == []
    else:
        (found,) = reasons(model)
        assert reason in found


def test_adapters_that_add_to_the_loss(bases: Bases) -> None:
    """AdaLoRA's term is one on its own adapters."""
    expected = train(build(bases, adapter="adalora"), together=False)
    model = prepare_plain(build(bases, adapter="adalora"), slots=2)
    assert same(train(model), expected)
    assert reasons(model) == ["the loss uses parameters of layers, or what goes into them, itself"]


def test_what_goes_into_the_layers_and_into_the_loss(bases: Bases) -> None:
    """Whoever listens there sees one gradient, the sum of both."""

    def penalized(seen: list[torch.Tensor]) -> Loss:
        def loss(model: Model, batch: Batch) -> torch.Tensor:
            found: list[torch.Tensor] = []
            embedding = model.get_input_embeddings()
            handle = embedding.register_forward_hook(lambda *given: found.append(given[-1]))
            try:
                value = own_loss(model, batch)
            finally:
                handle.remove()
            found[0].register_hook(seen.append)
            return value + found[0].float().square().mean()

        return loss

    expected_seen, seen = list[torch.Tensor](), list[torch.Tensor]()
    make = S.inputs_require_gradients
    expected = train(make(bases).train(), together=False, loss=penalized(expected_seen))
    model = prepare_plain(make(bases).train(), slots=2)
    assert same(train(model, loss=penalized(seen)), expected)
    assert same(seen[-8:], expected_seen[-8:])
    assert reasons(model) == ["the loss uses parameters of layers, or what goes into them, itself"]


def next_batch() -> Loss:
    drawn = torch.Generator().manual_seed(9)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        tokens = torch.randint(4, 100, (2, 9), generator=drawn)
        return own_loss(model, {"input_ids": tokens, "labels": tokens})

    return loss


def scaling() -> Loss:
    def loss(model: Model, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            for each in adapters(model):
                each.mul_(0.9)
        return own_loss(model, batch)

    return loss


def backward_twice() -> Loss:
    def loss(model: Model, batch: Batch) -> torch.Tensor:
        output = model(**batch, use_cache=False)
        output.logits.square().mean().backward(retain_graph=True)
        found: torch.Tensor = output.loss
        return found

    return loss


REFUSED: dict[str, tuple[Callable[[], Loss], str]] = {
    "batches of its own": (next_batch, "same values"),
    "edited adapters": (scaling, "edits them in place"),
    "two backwards": (backward_twice, "second one through"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_losses_that_are_refused(which: str, bases: Bases) -> None:
    make, message = REFUSED[which]
    model = prepare_plain(build(bases), slots=2)
    with pytest.raises(UnsupportedModelError, match=message):
        train(model, loss=make())


@contextmanager
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_gradients_disabled_around_and_enabled_within(bases: Bases) -> None:
    def loss(model: Model, batch: Batch) -> torch.Tensor:
        with torch.enable_grad():
            return own_loss(model, batch)

    expected = train(build(bases), together=False, loss=loss, around=without_gradients)
    model = prepare_plain(build(bases), slots=2)
    assert same(train(model, loss=loss, around=without_gradients), expected)
    assert "gradients are disabled" in reasons(model)[0]


@pytest.mark.parametrize("where", ["before", "behind"])
def test_the_gradients_of_micro_batches_before_one_that_fails(where: str, bases: Bases) -> None:
    """Its caller catches the error, and steps."""

    def gradients(model: Model, together: bool) -> list[Any]:
        def loss(model: Model, batch: Batch) -> torch.Tensor:
            if where == "before" and batch["input_ids"].shape[1] == 7:
                raise ValueError
            found = own_loss(model, batch)
            if batch["input_ids"].shape[1] == 7:
                raise ValueError
            return found

        with pytest.raises(ValueError):
            train(model, together, loss=loss, lengths=(12, 9, 7, 8))
        return [each.grad for each in trained(model)]

    expected = gradients(build(bases), False)
    assert all(each is not None for each in expected)
    found = gradients(prepare_plain(build(bases), slots=2), True)
    assert same(found, expected)


@pytest.mark.parametrize("lengths", [(20, 24, 40, 60), (60, 20, 40, 24)])
def test_rotary_embeddings_that_grow(lengths: tuple[int, ...], bases: Bases) -> None:
    """What a forward leaves in the model for the next one."""

    def growing(model: Model) -> Model:
        norm = model.get_base_model().model.norm
        norm.register_buffer("longest", torch.zeros(()))
        rotary = model.get_base_model().model.rotary_emb
        rotary.longest = 0

        def grow(module: Any, args: Any, output: Any) -> Any:
            module.longest = max(module.longest, args[0].shape[1])
            return tuple(each * (1 + module.longest / 100) for each in output)

        rotary.register_forward_hook(grow)
        return model

    expected = train(growing(build(bases)), together=False, lengths=lengths)
    model = prepare_plain(growing(build(bases)), slots=2)
    assert same(train(model, lengths=lengths), expected)
    assert reasons(model) == ["the model's code changes the model"]


def test_hidden_states_that_the_model_keeps(bases: Bases) -> None:
    """Code of the model's own that reads what layers return."""

    def dense(model: Model) -> Model:
        stack = layers(model)
        seen: list[torch.Tensor] = []

        class Kept(torch.nn.ModuleList):
            def __getitem__(self, places: Any) -> Any:
                seen.clear()
                return [self.keeping(each) for each in self._modules.values()]

            def keeping(self, layer: Any) -> Any:
                def called(*args: Any, **kwargs: Any) -> torch.Tensor:
                    seen.append(layer(*args, **kwargs))
                    return seen[-1]

                return called

        stack.__class__ = Kept
        model.get_base_model().model.norm.register_forward_hook(
            lambda module, args, output: output + sum(seen[:-1])
        )
        return model

    expected = train(dense(build(bases)), together=False)
    model = prepare_plain(build(bases), slots=2)
    assert same(train(dense(model)), expected)
    assert "hidden states between its layers" in reasons(model)[0]


def test_what_a_trainer_must_not_do_between_is_seen(bases: Bases) -> None:
    """Random numbers that are drawn between the tails of a group."""
    from poros.accumulation.distributed import Ranks
    from poros.accumulation.loop import begin_group
    from poros.accumulation.reasons import NotGrouped

    model = prepare_plain(build(bases), slots=2, self_check="off")
    tokens = torch.arange(9)[None]
    batch = {"input_ids": tokens, "labels": tokens}
    group = begin_group(poros.runtime(model), Ranks(model), own_loss, [batch] * 2, [])
    assert group is not None
    with group.tail():
        own_loss(model, batch).backward()
    torch.rand(1)
    with pytest.raises(NotGrouped, match="between micro-batches"), group.tail():
        own_loss(model, batch).backward()
    group.backward()
