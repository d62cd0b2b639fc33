"""Micro-batches that go together through layers whose visits are replayed."""

from typing import Any

import pytest
import torch

import poros
from poros.stream.body import LayerBody
from poros.stream.condition import Condition
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.recorded import KEPT, recorded
from tests.exact.together import train, trained
from tests.support import same_bits

Model = Any
SIZES = (4,) * 8
LENGTHS = (12, 12, 20, 12)


@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("share_dense", [False, True], ids=["", "dense weights shared"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_replayed_together_equals_one_after_the_other(
    dropout: float, share_dense: bool, policy: dict[str, Any], bases: Bases
) -> None:
    expected = train(adapted(bases, lora_dropout=dropout), False, sizes=SIZES, lengths=LENGTHS)
    model = adapted(bases, lora_dropout=dropout)
    captures, _ = recorded(model, **policy, share_dense=share_dense)
    found = train(model, sizes=SIZES, lengths=LENGTHS)
    assert len(found) == len(expected) and all(map(same_bits, found, expected))
    assert poros.runtime(model).stats()["num_groups"] >= 7 and captures.num_replays > 60


def test_a_reference_pass_between_forwards_and_backwards(bases: Bases) -> None:
    """As DPO has it, of several lengths: kept graphs stay, whatever is replayed meanwhile."""

    def loss(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["input_ids"]
        policy = model(input_ids=tokens, use_cache=False).logits.float()
        with torch.no_grad(), model.disable_adapter():
            reference = model(input_ids=tokens, use_cache=False).logits.float()
        value: torch.Tensor = (policy - reference).pow(2).mean() + policy.logsumexp(-1).mean()
        return value

    options: dict[str, Any] = {"sizes": SIZES, "lengths": (12, 20, 12, 9), "loss": loss}
    expected = train(adapted(bases), False, **options)
    for policy in ({}, KEPT):
        model = adapted(bases)
        captures, _ = recorded(model, **policy)
        found = train(model, **options)
        assert all(map(same_bits, found, expected)) and captures.num_replays > 20


def test_a_layer_is_looked_at_once_for_all_of_a_group(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once for each micro-batch as the model's code runs, which is anybody's."""
    model = adapted(bases)
    recorded(model)
    train(model, sizes=SIZES, lengths=(12,))
    number, genuine = 0, Condition.__init__

    def counted(self: Condition, layer: LayerBody) -> None:
        nonlocal number
        number += 1
        genuine(self, layer)

    monkeypatch.setattr(Condition, "__init__", counted)
    tokens = torch.arange(4, 28).view(2, 12)
    poros.accumulate(model, [{"input_ids": tokens, "labels": tokens, "use_cache": False}] * 4)
    layers = list(poros.runtime(model).streamed_layers())
    # As the code calls it, as it runs, and in backward; between the first one's runs is that code.
    assert number == 4 * len(layers) + (4 + len(layers) - 1) + len(layers)
    for each in trained(model):
        each.grad = None


def test_control_code_that_runs_between_them_would_not_be_seen(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why nobody's code may: the rate of dropout that a layer had before is taken for its own."""
    model = adapted(bases, lora_dropout=0.1)
    recorded(model)
    layer = next(iter(poros.runtime(model).streamed_layers()))
    with layer.in_a_row():
        before = layer.condition()
        module = next(m for m in layer.contents().modules() if isinstance(m, torch.nn.Dropout))
        module.p = 0.4
        assert layer.condition() is before
    assert not before.equals(layer.condition())
