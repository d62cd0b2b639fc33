"""One pass over a head in host memory for all micro-batches that are grouped."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import poros
import poros.head.loss as sliced_loss
from poros.errors import UnsupportedModelError
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.together import (
    SIZES,
    Batch,
    Loss,
    dense,
    in_autocast,
    num_groups,
    of,
    own_loss,
    reasons,
    same,
    train,
    unchanged,
)

Model = Any
POLICY: Any = {"slots": 2, "loss": "chunked", "stream_head": True, "stream_embedding": True}
AHEAD = 1 + len(SIZES)
"""Heads that are brought: for the first one, which runs alone, and for each group."""


@pytest.fixture(autouse=True)
def narrow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slices of a head of 512 rows."""
    monkeypatch.setattr(sliced_loss, "_LEAST_WIDTH", 128)
    monkeypatch.setattr(sliced_loss, "_MOST_WEIGHTS", 64 * 128)


def read_logits(model: Model, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    found: torch.Tensor = torch.logsumexp(logits.float(), dim=-1).mean()
    return found


def counted(model: Model) -> Loss:
    """Losses run once."""
    calls = model.calls = SimpleNamespace(begun=0, ended=0)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        calls.begun += 1
        found = read_logits(model, batch)
        calls.ended += 1
        return found

    return loss


SEEN = SimpleNamespace(step=0)


def note(model: Model, step: int) -> None:
    SEEN.step = step


def stopping(model: Model, batch: Batch) -> torch.Tensor:
    return (read_logits if SEEN.step else own_loss)(model, batch)


def numbered(model: Model) -> Loss:
    """Counts its calls where nobody sees it, and masks other labels each time."""
    numbers = itertools.count(1)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        labels = batch["labels"].clone()
        labels[:, next(numbers) % 5] = -100
        return own_loss(model, {**batch, "labels": labels})

    return loss


def changing(model: Model) -> Loss:
    """Of the same hidden states and labels: what was computed ahead is not what it asks for."""
    done: list[int] = []

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        ignored = (-100, int(batch["labels"][0, 3]))[len(done) % 2]
        found: torch.Tensor = model.get_base_model().loss_function(
            logits, batch["labels"], vocab_size=logits.shape[-1], ignore_index=ignored
        )
        done.append(1)
        return found

    return loss


def evaluating(model: Model, step: int) -> None:
    with torch.no_grad():
        tokens = torch.arange(9)[None]
        model.eval()(input_ids=tokens, labels=tokens)
    model.train()


FP32 = partial(dense, dtype=torch.float32)
# Name, loss, model, how often all of the head is brought, more of ``train``.
PROGRAMS: dict[str, tuple[Any, Any, int | None, dict[str, Any]]] = {
    "once for a group": (unchanged, dense, AHEAD, {"padded": True}),
    "autocast": (of(in_autocast), FP32, AHEAD, {}),
    "evaluation between": (unchanged, dense, AHEAD + len(SIZES), {"between": evaluating}),
    "read logits": (counted, dense, None, {}),
    "by number": (numbered, dense, AHEAD, {}),
    "adapters of the embedding": (unchanged, "embed_tokens", None, {}),
}


def pair(which: str, bases: Bases) -> Model:
    """A prepared model that was trained in groups, to the bits of one after the other."""
    make, base, _, run = PROGRAMS[which]
    if isinstance(base, str):
        base = partial(adapted, lora_dropout=0.1, target_modules=["q_proj", "v_proj", base])
    found = []
    for is_grouped in (False, True):
        model = poros.prepare(base(bases), **POLICY)
        loss = make(model) or own_loss
        found.append(train(model, is_grouped, loss=loss, **{"sizes": SIZES, **run}))
    assert same(*found) and num_groups(model) >= len(SIZES) and reasons(model) == []
    return model


def num_heads(model: Model) -> float:
    runtime = poros.runtime(model)
    return float(runtime.stats()["head_num_bytes"] / runtime.head.sliced_num_bytes)


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str, bases: Bases) -> None:
    model, expected = pair(which, bases), PROGRAMS[which][2]
    assert expected is None or num_heads(model) == expected
    if which == "read logits":
        assert (model.calls.begun, model.calls.ended) == (sum(SIZES), sum(SIZES))


def test_slices_of_other_widths_come_for_themselves(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 24 tokens or fewer take slices of 256 rows, 40 tokens slices of 128.
    monkeypatch.setattr(sliced_loss, "_MOST_WEIGHTS", 64 * 256)
    monkeypatch.setattr(sliced_loss, "_MOST_LOGITS", 24 * 256)
    monkeypatch.setitem(PROGRAMS, "two widths", (unchanged, dense, None, {"lengths": (12, 20)}))
    assert num_heads(pair("two widths", bases)) == AHEAD + len(SIZES)


def test_a_loss_that_stops_coming_to_the_head_is_refused(bases: Bases) -> None:
    model = poros.prepare(dense(bases), **POLICY)
    with pytest.raises(UnsupportedModelError, match="one backward for each micro-batch"):
        train(model, sizes=SIZES, loss=stopping, between=note)


def test_a_loss_that_counts_behind_its_layers_runs_alone(bases: Bases) -> None:
    """The part of it before the head would count too little, where others are at the head."""
    found = []
    for is_grouped in (False, True):
        model = poros.prepare(dense(bases), **POLICY)
        found.append(train(model, is_grouped, loss=changing(model), sizes=SIZES))
    assert same(*found) and "changes done" in reasons(model)[0]
