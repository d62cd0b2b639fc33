"""What is refused, by a typed error that says what to do: models, policies and calls.

Whatever was asked for, the model is as it was, and trains as if nobody had asked.
"""

import re
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from transformers import DynamicCache

import poros
from poros.errors import (
    PolicyError,
    PreparedModelError,
    UnsupportedModelError,
)
from tests.faults.refused import CASES
from tests.snapshots import (
    assert_same_run,
    batches,
    build,
    changes,
    digest,
    layers_of,
    picture,
    resident_run,
    run,
)
from tests.support import prepare_plain, same_bits

IDS = {"input_ids": torch.arange(3, 11).view(1, 8)}


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


# Models.


def look_at(model: Any, has_plain_tensors: bool) -> dict[str, object]:
    if not isinstance(model, nn.Module):
        return {}
    if has_plain_tensors:
        return picture(model)
    classes = {name: type(module) for name, module in model.named_modules()}
    return classes | {f"{name} id": id(each) for name, each in model.named_parameters()}


def outputs(model: Any, has_plain_tensors: bool) -> object:
    """What the model gives in evaluation mode, as digests."""
    if not has_plain_tensors:
        model(**batches()[0]).loss.backward()
        return None
    with torch.no_grad():
        return digest(model.eval()(**IDS)[0])


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_refused_with_a_reason_and_left_untouched(name: str) -> None:
    case = CASES[name]
    model = case.make()
    expected = outputs(model, True) if case.works and case.has_plain_tensors else None
    before = look_at(model, case.has_plain_tensors)
    with pytest.raises(case.error) as caught:
        prepare_plain(model)
    # The builtin too, so that existing except clauses keep working.
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "expected" in message and "found" in message
    for pattern in (case.found, case.where, case.advice):
        assert re.search(pattern, message, re.DOTALL), f"{pattern!r} not in {message!r}"
    assert changes(before, look_at(model, case.has_plain_tensors)) == {}
    if case.works:
        assert outputs(model, case.has_plain_tensors) == expected
    with pytest.raises(PreparedModelError):
        poros.runtime(model)
    if case.mend is not None:
        case.mend(model)
        assert torch.isfinite(prepare_plain(model)(**batches()[0]).loss)


def test_control_dequantized_bases_and_masks_are_taken() -> None:
    """Of a 4-bit base, which all other tests prepare, the configuration is there too."""
    assert build().get_base_model().config.quantization_config is not None
    model = build(quantize=False)
    model.get_base_model().config.quantization_config = {"quant_method": "fp8", "dequantize": True}
    layers_of(model)[0].mlp.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))
    run(prepare_plain(model))
    poros.restore(model)


# Policies.

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
    "unknown check": ({"self_check": "sometimes"}, "self_check"),
    **{
        f"{field} {value!r}": ({field: value}, field)
        for field, values in {
            "offload_boundaries": ("yes", 1, 0.5),
            "keep_last": (-1, True, 1.5, "2"),
            **dict.fromkeys(("loss", "stream_head"), ("fast",)),
            "vram_budget": ("8 apples", -1, 0, float("nan"), True, "GiB"),
        }.items()
        for value in values
    },
    **{
        f"vram_budget {value!r}": (
            {"vram_budget": value},
            rf"vram_budget: .* did you mean '{meant}'\?",
        )
        for value, meant in ((8, "8GiB"), (24.5, "24.5GiB"), ("8", "8GiB"), (8192, "8192MiB"))
    },
}


@pytest.fixture(scope="module")
def unprepared() -> Iterator[Any]:
    """Everything is asked of one model, which trains exactly in the end."""
    model = build()
    yield model
    assert_same_run(resident_run(), run(prepare_plain(model)))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_cannot_work_is_refused_and_the_model_left_alone(
    name: str, unprepared: Any
) -> None:
    options, message = POLICIES[name]
    before = picture(unprepared)
    with pytest.raises(PolicyError, match=message) as caught:
        prepare_plain(unprepared, **options)
    assert isinstance(caught.value, ValueError)
    assert changes(before, picture(unprepared)) == {}
    with pytest.raises(PreparedModelError):
        poros.runtime(unprepared)
    if "device" not in options and "evict" not in options:
        with pytest.raises(PolicyError, match=message):
            poros.StreamingPolicy(**options)
    if "did you mean" in message:
        with pytest.raises(PolicyError, match=message):
            poros.plan(unprepared.config, batch_size=1, seq_len=16, **options)
        meant = message.split("'")[1]
        assert poros.StreamingPolicy(vram_budget=meant).vram_budget == meant


# Calls, while gradients are enabled.


class Notes:
    """An object of the user."""


CONTAINERS: dict[str, Callable[[], object]] = {
    "set": set,
    "deque": deque,
    "subclass of UserDict": type("Marked", (UserDict,), {"__module__": __name__}),
    "bytearray": bytearray,
    "object": Notes,
    "set in a tuple": lambda: (1, {2}),
}
NOTES = r"argument 'notes'.*layers\.0.*expected.*found"


def filled_cache(model: Any) -> dict[str, Any]:
    cache = DynamicCache(config=model.get_base_model().config)
    with torch.no_grad():
        model(batches()[0]["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 12
    return {"past_key_values": cache}


Options = Callable[[Any], dict[str, Any]]
CALLS: dict[str, tuple[Options, str]] = {
    **{
        f"a mutable container: {kind}": (lambda model, make=make: {"notes": make()}, NOTES)
        for kind, make in CONTAINERS.items()
    },
    "a cache with contents": (filled_cache, r"layers\.0.*cache.*torch\.no_grad"),
}


@pytest.fixture(scope="module")
def called() -> Iterator[Any]:
    """Every call is made of one prepared model, which trains exactly in the end."""
    model, twin = (build() for _ in "ab")
    prepare_plain(model)(**batches()[0]).loss.backward()
    model.zero_grad()
    yield model
    assert_same_run(run(twin), run(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused_by_name_and_exact_without_gradients(name: str, called: Any) -> None:
    make, message = CALLS[name]
    called.train()
    options = make(called)
    before, stats = picture(called), poros.runtime(called).stats()
    batch = {"input_ids": batches()[1]["input_ids"]} if "cache" in name else batches()[1]
    with pytest.raises(UnsupportedModelError, match=message):
        called(**batch, **options)
    assert changes(before, picture(called)) == {}
    assert poros.runtime(called).stats() == stats
    if "cache" in name:
        assert options["past_key_values"].get_seq_length() == 12
        return
    with torch.no_grad():
        expected, found = (model.eval()(**batch, **options) for model in (build(), called))
    assert same_bits(expected.logits, found.logits)


def test_control_what_can_be_copied_passes(called: Any) -> None:
    plain = (1, "two", (torch.float32, None), torch.zeros(2), 3.0, torch.device("cpu"))
    shared = UserDict(states=torch.zeros(2), notes=[])
    for notes in (plain, [], [1, (torch.zeros(2), [2])], {}, {"states": torch.zeros(2)}, shared):
        called.train()(**batches()[0], notes=notes).loss.backward()
    called.zero_grad()
