"""One pass over a head in host memory for all micro-batches that go together."""

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import poros
import poros.head.loss as sliced_loss
from poros.errors import RematerializationError
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.together import Batch, num_groups, own_loss, reasons, same, train

Model = Any
POLICY: Any = {"slots": 2, "loss": "chunked", "stream_head": True, "stream_embedding": True}
NUM_GROUPS = 3
SIZE = 4


@pytest.fixture(autouse=True)
def narrow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slices of a head of 512 rows."""
    monkeypatch.setattr(sliced_loss, "_LEAST_WIDTH", 128)
    monkeypatch.setattr(sliced_loss, "_MOST_WEIGHTS", 64 * 128)


def num_heads(model: Model) -> float:
    """How often all of the head was brought."""
    runtime = poros.runtime(model)
    return float(runtime.stats()["head_num_bytes"] / runtime.head.sliced_num_bytes)


def pair(make: Any, **options: Any) -> Model:
    """A prepared model that was trained together, to the bits of one after the other."""
    policy = {**POLICY, **options.pop("policy", {})}
    expected = train(poros.prepare(make(), **policy), together=False, **options)
    model = poros.prepare(make(), **policy)
    assert same(train(model, **options), expected)
    assert num_groups(model) >= NUM_GROUPS and reasons(model) == []
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slices_come_once_for_a_group(dtype: torch.dtype, padded: bool, bases: Bases) -> None:
    """From the second group on, when it was seen where losses come from."""
    model = pair(lambda: bases.build("qwen2", dtype=dtype).train(), padded=padded)
    assert num_heads(model) == SIZE + (NUM_GROUPS - 1)


def test_slices_of_other_widths_come_for_themselves(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 24 tokens or fewer take slices of 256 rows, 40 tokens slices of 128.
    monkeypatch.setattr(sliced_loss, "_MOST_WEIGHTS", 64 * 256)
    monkeypatch.setattr(sliced_loss, "_MOST_LOGITS", 24 * 256)
    model = pair(lambda: bases.build("qwen2").train(), lengths=(12, 9, 20, 7))
    assert num_heads(model) == SIZE + 2 * (NUM_GROUPS - 1)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_lora_on_the_vocabulary(target: str, bases: Bases) -> None:
    """A head that is added to draws behind the layers, and its slices come for each."""
    targets = ["q_proj", "v_proj", target]
    pair(partial(adapted, bases, lora_dropout=0.1, target_modules=targets))


def test_autocast(bases: Bases) -> None:
    def loss(model: Model, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return own_loss(model, batch)

    model = pair(lambda: bases.build("qwen2", dtype=torch.float32).train(), loss=loss)
    assert num_heads(model) == SIZE + (NUM_GROUPS - 1)


def test_losses_that_read_logits_are_run_twice_and_no_more(bases: Bases) -> None:
    # In an object of its own: what is in a list of the loss's would be put back.
    calls = SimpleNamespace(begun=0, ended=0)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        calls.begun += 1
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        calls.ended += 1
        found: torch.Tensor = torch.logsumexp(logits.float(), dim=-1).mean()
        return found

    pair(lambda: bases.build("qwen2").train(), loss=loss)
    # One after the other, and together: up to the last layer, and to the end.
    assert calls.begun == 3 * SIZE * NUM_GROUPS
    assert calls.ended == 2 * SIZE * NUM_GROUPS


def test_a_loss_that_stops_coming_to_the_head(bases: Bases) -> None:
    groups: Iterator[int] = iter(range(100))
    number = [0]

    def between(model: Model, step: int) -> None:
        number[0] = next(groups) % NUM_GROUPS

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        if number[0] < 1:
            return own_loss(model, batch)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        found: torch.Tensor = torch.logsumexp(logits.float(), dim=-1).mean()
        return found

    pair(lambda: bases.build("qwen2").train(), loss=loss, between=between)


def test_a_loss_that_is_another_one_behind_each_that_was_computed(bases: Bases) -> None:
    """Of the same hidden states and labels: what was computed ahead is not what it asks for."""

    def changing() -> Any:
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

    def make() -> Model:
        return poros.prepare(bases.build("qwen2").train(), **POLICY)

    model, expected = make(), train(make(), together=False, loss=changing())
    assert same(train(model, loss=changing()), expected)
    assert num_groups(model) == NUM_GROUPS and reasons(model) == []


def test_control_a_loss_that_is_another_one_each_time_is_refused(bases: Bases) -> None:
    """It counts its calls where nobody sees it, and masks other labels each time."""
    calls = itertools.count(1)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        labels = batch["labels"].clone()
        labels[:, next(calls) % 5] = -100
        return own_loss(model, {**batch, "labels": labels})

    model = poros.prepare(bases.build("qwen2").train(), **POLICY)
    with pytest.raises(RematerializationError, match="same hidden states and labels"):
        train(model, loss=loss)
    with torch.no_grad():
        tokens = torch.arange(9)[None]
        model(input_ids=tokens, labels=tokens)


def test_evaluation_between_reads_for_itself(bases: Bases) -> None:
    def between(model: Model, step: int) -> None:
        with torch.no_grad():
            tokens = torch.arange(9)[None]
            model.eval()(input_ids=tokens, labels=tokens)
        model.train()

    model = pair(lambda: bases.build("qwen2").train(), between=between)
    assert num_heads(model) == SIZE + (NUM_GROUPS - 1) + NUM_GROUPS
