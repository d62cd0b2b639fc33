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
from tests.loops import (
    SIZES,
    Batch,
    Loss,
    Training,
    adapted,
    dense,
    ends_so,
    in_autocast,
    later,
    made,
    of,
    own_loss,
    program,
    resident,
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


on_host = partial(program, base=dense, policy=POLICY)
UNSUPPORTED = UnsupportedModelError
# How often all of the head is brought, if nothing else reads it.
PROGRAMS: dict[str, tuple[Training, int | None]] = {
    "once for a group": (on_host(padded=True), AHEAD),
    "autocast": (on_host(of(in_autocast), base=partial(dense, dtype=torch.float32)), AHEAD),
    "evaluation between": (on_host(between=evaluating), AHEAD + len(SIZES)),
    "read logits": (on_host(counted), None),
    "by number": (on_host(numbered), AHEAD),
    "adapters of the embedding": (
        on_host(
            base=partial(
                adapted, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "embed_tokens"]
            )
        ),
        None,
    ),
    # Slices of other widths come for themselves.
    "two widths": (on_host(lengths=(12, 20)), AHEAD + len(SIZES)),
    "it stops coming to the head": (
        later(read_logits, (UNSUPPORTED, "one backward for each"), base=dense, policy=POLICY),
        None,
    ),
    # The part of it before the head would count too little, where others are at the head.
    "it counts behind its layers": (on_host(changing, "changes done"), None),
}


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if which == "two widths":
        # 24 tokens or fewer take slices of 256 rows, 40 tokens slices of 128.
        monkeypatch.setattr(sliced_loss, "_MOST_WEIGHTS", 64 * 256)
        monkeypatch.setattr(sliced_loss, "_MOST_LOGITS", 24 * 256)
    each, num_heads = PROGRAMS[which]
    model, run = made(each, True)
    assert ends_so(model, run, each.end, partial(resident, each))
    runtime = poros.runtime(model)
    if num_heads is not None:
        head: Any = runtime.head
        assert runtime.stats()["head_num_bytes"] == num_heads * head.matrix.nbytes
    if which == "read logits":
        assert (model.calls.begun, model.calls.ended) == (sum(SIZES), sum(SIZES))
