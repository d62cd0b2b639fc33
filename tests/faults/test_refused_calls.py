"""What a prepared model refuses to be called with, by name, and policies that cannot work."""

import logging
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import poros
from poros.errors import PolicyError, PreparedModelError, UnsupportedModelError
from tests.snapshots import assert_same_run, batches, build, changes, digest, picture, run
from tests.support import same_bits

POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "one slot": ({"slots": 1}, "slots: expected .*at least 2.*found 1"),
    "no slots": ({"slots": 0}, "slots: expected .*at least 2.*found 0"),
    "slots of a wrong type": ({"slots": True}, "slots: expected an integer.*found True"),
    "block size 0": ({"block_size": 0}, "block_size: expected .*at least 1.*found 0"),
    "half a block": ({"block_size": 1.5}, "block_size: expected an integer.*found 1.5"),
    "unknown field": (
        {"evict": 1},
        "'evict' is not a policy field.*block_size, vram_budget, slots",
    ),
    "no such device": ({"device": "cuda:99"}, "device: expected a usable.*found 'cuda:99'"),
    "not a device": ({"device": "gpu"}, "device: expected a usable.*found 'gpu'"),
    "meta device": ({"device": "meta"}, "device: expected a usable.*found 'meta'"),
    "flag of a wrong type": (
        {"allow_unvalidated": "yes"},
        "allow_unvalidated: expected a bool.*'yes'",
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_cannot_work_is_refused_and_the_model_left_alone(name: str) -> None:
    options, message = POLICIES[name]
    model = build()
    before = picture(model)
    with pytest.raises(PolicyError, match=message) as caught:
        poros.prepare(model, **options)
    assert isinstance(caught.value, ValueError)
    assert changes(before, picture(model)) == {}
    with pytest.raises(PreparedModelError):
        poros.runtime(model)
    assert_same_run(run(build()), run(poros.prepare(model)))


class Notes:
    """An object of the user."""


CONTAINERS: dict[str, Callable[[], object]] = {
    "dict": dict,
    "filled dict": lambda: {"states": torch.zeros(2)},
    "list": list,
    "set": set,
    "deque": deque,
    "subclass of UserDict": type("Marked", (UserDict,), {"__module__": __name__}),
    "bytearray": bytearray,
    "object": Notes,
    "list in a tuple": lambda: (1, [2]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_mutable_container_is_refused_by_name_under_grad_only(kind: str) -> None:
    model, twin = poros.prepare(build()), build()
    notes = CONTAINERS[kind]()
    with pytest.raises(
        UnsupportedModelError, match=r"argument 'notes'.*layers\.0.*expected.*found"
    ):
        model(**batches()[0], notes=notes)
    assert_same_run(run(twin), run(model))
    for each in (twin, model):
        each.eval()
    with torch.no_grad():
        expected, found = (each(**batches()[0], notes=notes) for each in (twin, model))
    assert same_bits(expected.logits, found.logits)


def test_plain_keywords_pass() -> None:
    """The control of the test above."""
    model = poros.prepare(build())
    notes = (1, "two", (torch.float32, None), torch.zeros(2), 3.0, torch.device("cpu"))
    model(**batches()[0], notes=notes).loss.backward()


def filled_cache(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.get_base_model().config)
    with torch.no_grad():
        model(batches()[0]["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 12
    return cache


def test_a_cache_with_contents_is_refused_under_grad() -> None:
    model, twin = poros.prepare(build()), build()
    cache = filled_cache(model)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0.*cache.*torch\.no_grad"):
        model(batches()[1]["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 12
    model(**batches()[0]).loss.backward()
    model.zero_grad()
    assert_same_run(run(twin), run(model))


def test_a_cache_used_twice_under_grad_is_refused() -> None:
    model = poros.prepare(build())
    cache = DynamicCache(config=model.get_base_model().config)
    model(batches()[0]["input_ids"], past_key_values=cache)
    with pytest.raises(UnsupportedModelError, match="KV cache"):
        model(batches()[1]["input_ids"], past_key_values=cache)


@pytest.mark.parametrize("given", [True, False])
def test_a_cache_dropped_under_grad_never_passes_for_a_filled_one(given: bool) -> None:
    """Decoding on after a forward with gradients: with the right cache, or an error."""
    found = []
    for model in (build(), poros.prepare(build())):
        model.eval()
        cache = DynamicCache(config=model.get_base_model().config) if given else None
        out = model(batches()[0]["input_ids"], past_key_values=cache, use_cache=True)
        try:
            with torch.no_grad():
                again = model(batches()[1]["input_ids"][:, :1], past_key_values=out.past_key_values)
        except UnsupportedModelError as error:
            assert "cache" in str(error)
            return
        found.append(digest(again.logits))
    assert found[0] == found[1]


def test_training_with_the_cache_on_is_exact() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        torch.manual_seed(0)
        model.train()
        model(**batches()[0], use_cache=True).loss.backward()
        found.append(
            {
                name: digest(each.grad)
                for name, each in model.named_parameters()
                if each.requires_grad
            }
        )
    assert changes(*found) == {}


def test_recorded_attentions_are_refused_under_grad_and_exact_without() -> None:
    twin = build(attn_implementation="eager")
    model = poros.prepare(build(attn_implementation="eager"))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0.*attentions.*torch\.no_grad"):
        model(**batches()[1], output_attentions=True)
    assert_same_run(run(twin), run(model))
    for each in (twin, model):
        each.eval()
    with torch.no_grad():
        expected, found = (each(**batches()[1], output_attentions=True) for each in (twin, model))
    assert len(expected.attentions) == len(found.attentions) == 3
    for left, right in zip(expected.attentions, found.attentions, strict=True):
        assert same_bits(left, right)


@pytest.mark.filterwarnings("ignore")
def test_a_refused_call_leaves_the_slots_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    model = poros.prepare(build())
    run(model)
    before, stats = picture(model), poros.runtime(model).stats()
    with caplog.at_level(logging.WARNING, "poros"), pytest.raises(UnsupportedModelError):
        model(**batches()[0], notes=[])
    assert changes(before, picture(model)) == {}
    assert poros.runtime(model).stats() == stats
