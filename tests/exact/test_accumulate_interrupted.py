"""An error or Ctrl-C among grouped micro-batches leaves nothing of them in the model.

It strikes as a context begins, and what that was to undo is undone as its frame goes. If it strikes
in a loss, gradients are those of the micro-batches before it.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import pytest
import torch

import poros
from poros.accumulation.group import Group
from poros.accumulation.parked import ParkedCode
from poros.api import prepare_with
from poros.kernels.dequantize import DenseLayer
from poros.stream.body import LayerBody
from poros.stream.visit import BlockVisit
from tests.loops import Batch, adapted, dense, own_loss, same, train, trained
from tests.support import prepare_plain, same_bits
from tools.tape import TapeRecorder

Model = Any
POLICY: Any = {
    **{"device": "cpu", "slots": 2, "self_check": "off"},
    **{"loss": "chunked", "stream_head": True, "share_dense": True},
}
CONTEXTS: dict[str, tuple[Any, str]] = {
    "code of the user": (Group, "_in_place"),
    "its regions": (ParkedCode, "inside"),
    "a row": (LayerBody, "in_a_row"),
    "a row of visits": (BlockVisit, "in_a_row"),
    "a replayed visit": (BlockVisit, "occupy"),
    "dense weights": (DenseLayer, "use"),
}
TOKENS = torch.arange(4, 52).view(4, 12)
BATCHES = [{"input_ids": row[None], "labels": row[None], "use_cache": False} for row in TOKENS]


class Warm(NamedTuple):
    """A model whose visits are replayed, what it computes, and gradients of a step."""

    model: Model
    output: torch.Tensor
    gradients: list[torch.Tensor]


@pytest.fixture(scope="module")
def warm() -> Warm:
    model = adapted(lora_dropout=0.1)
    prepare_with(model, poros.StreamingPolicy(**POLICY), recorder=TapeRecorder())
    for _ in range(4):
        poros.accumulate(model, BATCHES)
    return Warm(model, look(model), step(model))


def step(model: Model) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    poros.accumulate(model, BATCHES)
    return gradients(model)


def look(model: Model) -> torch.Tensor:
    """What it computes with another rate of dropout, as only this model's own code would."""
    dropouts = [each for each in model.modules() if isinstance(each, torch.nn.Dropout)]
    for each in dropouts:
        each.p = 0.5
    torch.manual_seed(3)
    tokens = TOKENS[:1]
    found: torch.Tensor = model(input_ids=tokens.flip(1), labels=tokens, use_cache=False).loss
    for each in dropouts:
        each.p = 0.1
    return found.detach()


def striking(owner: Any, name: str, at: int, kept: list[Any]) -> Any:
    """The context manager of ``owner``, which strikes as it begins for the time ``at``."""
    number, genuine = itertools.count(1), getattr(owner, name)

    @contextmanager
    def context(*args: Any, **options: Any) -> Iterator[Any]:
        manager: AbstractContextManager[Any] = genuine(*args, **options)
        kept.append(manager)
        if next(number) == at:
            manager.__enter__()
            raise KeyboardInterrupt
        with manager as found:
            yield found

    return context


@pytest.mark.parametrize("share", (0.0, 0.7))
@pytest.mark.parametrize("which", CONTEXTS)
def test_nothing_is_left_behind(
    which: str, share: float, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are there are to be thrown away, as after any backward that is interrupted."""
    model, calls = warm.model, list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(*CONTEXTS[which], striking(*CONTEXTS[which], 0, calls))
        poros.accumulate(model, BATCHES)
    assert calls, "it is used at all"
    at = 1 + int(share * len(calls))
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(*CONTEXTS[which], striking(*CONTEXTS[which], at, calls))
        with suppress(KeyboardInterrupt):
            poros.accumulate(model, BATCHES)
    assert len(calls) >= at
    calls.clear()
    assert same_bits(look(model), warm.output)
    assert all(each.state.value != "in use" for each in poros.runtime(model).ring.slots)
    assert not any(hasattr(each, "is_watched") for each in trained(model))
    assert same(step(model), warm.gradients) and warm.gradients[0].numel()


def gradients(model: Model) -> list[torch.Tensor]:
    return [torch.empty(0) if each.grad is None else each.grad.clone() for each in trained(model)]


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("where", ["before the model", "behind the model"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("at, step", [(0, 0), (2, 0), (0, 1), (2, 1)])
def test_micro_batches_before_it_have_their_gradients(
    at: int, step: int, error: type[BaseException], where: str
) -> None:
    """The caller may catch the error and step; and begin again."""

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        is_struck = is_on and batch["input_ids"].shape[1] == 5
        if is_struck and where.startswith("before"):
            raise error
        value = own_loss(model, batch)
        if is_struck:
            raise error
        return value

    found: list[Any] = []
    for is_grouped in (False, True):
        model, is_on = dense(), False
        if is_grouped:
            prepare_plain(model, slots=2)
        lengths = [12, 9, 7]
        lengths[at] = 5
        options: Any = {"loss": loss, "lengths": lengths, "sizes": (3,)}
        if step:
            train(model, is_grouped, **options)
        is_on = True
        with pytest.raises(error):
            train(model, is_grouped, **options)
        struck, is_on = gradients(model), False
        model.zero_grad()
        found.append((struck, train(model, is_grouped, **options)))
    (*struck,), (*after,) = zip(*found, strict=True)
    # Ctrl-C as the code runs ahead of its turn: those before it have not been trained yet.
    is_early = error is KeyboardInterrupt and where.startswith("before") and at > 0
    assert same(*after) and (is_early or same(*struck))
