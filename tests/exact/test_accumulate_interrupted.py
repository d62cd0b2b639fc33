"""Ctrl-C among micro-batches that go together leaves nothing of them in the model.

It strikes as a context begins, and what that was to undo is undone as its frame goes. If it strikes
in a loss, gradients are those of the micro-batches before it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import poros
from poros.accumulation import micro_batch as micro_batch_module
from poros.accumulation.group import Group
from poros.accumulation.head import SharedHead
from poros.api import prepare_with
from poros.gates.tape import TapeRecorder
from poros.kernels.dense_layer import DenseLayer
from poros.stream.body import LayerBody
from poros.stream.visit import BlockVisit
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.together import num_groups, own_loss, trained
from tests.exact.trainer_arms import Arms
from tests.support import prepare_plain, same_bits

Model = Any
POLICY: Any = {
    **{"device": "cpu", "slots": 2, "self_check": "off"},
    **{"loss": "chunked", "stream_head": True, "share_dense": True},
}
CONTEXTS: dict[str, tuple[Any, str]] = {
    "watching": (micro_batch_module, "watching"),
    "the head": (SharedHead, "asked"),
    "a tail": (Group, "tail"),
    "a row": (LayerBody, "in_a_row"),
    "a row of visits": (BlockVisit, "in_a_row"),
    "a replayed visit": (BlockVisit, "occupy"),
    "dense weights": (DenseLayer, "serving"),
}
TOKENS = torch.arange(4, 52).view(4, 12)
BATCHES = [{"input_ids": row[None], "labels": row[None], "use_cache": False} for row in TOKENS]


class Striking:
    """Stands for a context manager of the class or module ``owner``; strikes as it begins."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.genuine = owner, name, getattr(owner, name)
        self.number = 0
        self.at = 0
        self.kept: list[AbstractContextManager[Any]] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        striking = self

        @contextmanager
        def context(*args: Any, **options: Any) -> Iterator[Any]:
            striking.number += 1
            genuine = striking.genuine(*args, **options)
            if striking.number == striking.at:
                genuine.__enter__()
                striking.kept.append(genuine)
                raise KeyboardInterrupt
            with genuine as found:
                yield found

        monkeypatch.setattr(self.owner, self.name, context)


def look(model: Model) -> torch.Tensor:
    """What it computes with another rate of dropout, as only this model's own code would."""
    dropouts = [each for each in model.modules() if isinstance(each, torch.nn.Dropout)]
    for each in dropouts:
        each.p = 0.5
    torch.manual_seed(3)
    found: torch.Tensor = model(
        input_ids=TOKENS[:1].flip(1), labels=TOKENS[:1], use_cache=False
    ).loss
    for each in dropouts:
        each.p = 0.1
    return found.detach()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("which", CONTEXTS)
def test_nothing_is_left_behind(
    which: str, share: float, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(bases, lora_dropout=0.1)
    prepare_with(model, poros.StreamingPolicy(**POLICY), recorder=TapeRecorder())
    for _ in range(4):
        poros.accumulate(model, BATCHES)
    expected = look(model)
    runtime = poros.runtime(model)
    striking = Striking(*CONTEXTS[which])
    striking.patch(monkeypatch)
    poros.accumulate(model, BATCHES)
    assert striking.number, "it is used at all"
    striking.at = 1 + int(share * striking.number)
    striking.number = 0
    with suppress(KeyboardInterrupt):
        poros.accumulate(model, BATCHES)
    assert striking.kept
    striking.kept.clear()
    assert same_bits(look(model), expected)
    assert all(slot.state.value != "in use" for slot in runtime.ring.slots)
    for parameter in model.parameters():
        parameter.grad = None
    poros.accumulate(model, BATCHES)
    assert same_bits(look(model), expected)


def gradients(model: Model) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in trained(model)]


def same_gradients(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> bool:
    return len(left) == len(right) and all(
        a is b is None or (a is not None and b is not None and same_bits(a, b))
        for a, b in zip(left, right, strict=True)
    )


def train_head_too(model: Model) -> Model:
    model.get_base_model().lm_head.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize("is_first_group", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_micro_batches_before_it_have_their_gradients(
    at: int, error: type[BaseException], is_first_group: bool, bases: Bases
) -> None:
    def loss(model: Model, batch: Any) -> torch.Tensor:
        value = own_loss(model, batch)
        if number[0] == at:
            raise error
        number[0] += 1
        return value

    found = []
    for together in (False, True):
        model = train_head_too(adapted(bases, lora_dropout=0.1))
        batches = [{key: each[key] for key in ("input_ids", "labels")} for each in BATCHES]
        if together:
            poros.prepare(model, device="cpu", slots=2, loss="reference")
        torch.manual_seed(1)
        number = [-100]
        steps = 1 if is_first_group else 2
        for step in range(steps):
            number[0] = 0 if step == steps - 1 else -100
            try:
                if together:
                    poros.accumulate(model, batches, loss=loss)
                else:
                    for batch in batches:
                        loss(model, batch).backward()
            except error:
                assert number[0] == at
            if step < steps - 1:
                model.zero_grad()
        found.append(gradients(model))
    assert num_groups(model) == steps
    assert same_gradients(*found) and (found[0][0] is None) == (at == 0)


@pytest.mark.parametrize("number", [1, 3, 8])
def test_one_in_the_backwards_of_layers(
    number: int, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in any backward, the gradients that are there are to be thrown away."""
    count, genuine, found = [0], micro_batch_module.MicroBatch.backward, []

    def strike(*args: Any) -> None:
        count[0] += 1
        if count[0] == number:
            raise KeyboardInterrupt
        genuine(*args)

    for is_struck in (False, True):
        model = train_head_too(adapted(bases, lora_dropout=0.1))
        poros.prepare(model, device="cpu", slots=2)
        if is_struck:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(micro_batch_module.MicroBatch, "backward", strike)
                poros.accumulate(model, BATCHES)
            assert not any(hasattr(each, "is_watched") for each in trained(model))
            model.zero_grad()
        torch.manual_seed(2)
        poros.accumulate(model, BATCHES)
        found.append(gradients(model))
    assert same_gradients(*found) and found[0][0] is not None


class Interrupted(Trainer):  # type: ignore[misc]
    """In the loss of the third micro-batch, or between that and the second."""

    at = "loss"
    number = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        type(self).number += 1
        if self.at == "loss" and type(self).number == 3:
            raise KeyboardInterrupt
        return found

    def floating_point_ops(self, inputs: Any) -> int:
        if self.at == "between" and type(self).number == 2:
            raise KeyboardInterrupt
        return 0


class InterruptedTogether(poros.BlockMajorMixin, Interrupted):  # type: ignore[misc]
    pass


@pytest.mark.parametrize("at", ["loss", "between"])
def test_one_that_ends_a_trainer(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupted, "at", at)
    arms = Arms.make(tmp_path, torch.float32)
    found = []
    for kind, prepare in ((Interrupted, None), (InterruptedTogether, prepare_two)):
        monkeypatch.setattr(kind, "number", 0, raising=False)
        with pytest.raises(KeyboardInterrupt):
            arms.run("interrupted", prepare, trainer_class=kind, gradient_accumulation_steps=4)
        found.append(gradients(arms.model))
    assert num_groups(arms.model) == 1
    assert same_gradients(*found) and found[0][0] is not None


def prepare_two(model: Model, **options: Any) -> Model:
    return prepare_plain(model, slots=2, **options)
