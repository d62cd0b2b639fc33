"""Ctrl-C among micro-batches that go together leaves nothing of them in the model.

It strikes as a context begins: what that was to undo is not undone by it, and its frame is kept
alive by the traceback for as long as somebody looks at that.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import poros
from poros.accumulation import micro_batch as micro_batch_module
from poros.accumulation.group import Group
from poros.accumulation.head import SharedHead
from poros.api import prepare_with
from poros.gates.tape import TapeRecorder
from poros.kernels.dense_layer import DenseLayer
from poros.layer.body import LayerBody
from poros.layer.visit import BlockVisit
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.support import same_bits

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
    try:
        poros.accumulate(model, BATCHES)
    except KeyboardInterrupt:
        assert runtime.context.in_place is None
        assert same_bits(look(model), expected), "while all frames are kept"
    assert striking.kept
    assert all(slot.state.value != "in use" for slot in runtime.ring.slots)
    for parameter in model.parameters():
        parameter.grad = None
    poros.accumulate(model, BATCHES)
    assert same_bits(look(model), expected)
