"""The check of the first step: it changes nothing, leaves nothing behind, and says what it found.

What it finds is in ``planted``.
"""

import gc
import logging
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

import poros
import poros.head.loss as sliced_loss
from poros.errors import ParityError
from poros.gates.reference import TrainingSpec, train
from poros.self_check.evidence import CallSnapshot
from poros.self_check.proof import Outcome
from tests.comparing import compare_trajectories
from tests.snapshots import batches, bits_of, build, changes, layers_of
from tests.support import prepare_plain


def prepared(model: Any, self_check: str = "strict", **overrides: Any) -> Any:
    return prepare_plain(model, self_check=self_check, **overrides)


def status(model: Any) -> str:
    found: str = poros.runtime(model).self_check["status"]
    return found


def backward(model: Any) -> torch.Tensor:
    model.train()
    loss: torch.Tensor = model(**batches()[1]).loss
    loss.backward()
    return loss


# A cache that layers are given in training is empty, and dropped.


def with_cache(architecture: str) -> Any:
    model = build(architecture, dropout=0.0)
    for each in (model.config, model.get_base_model().config):
        each.use_cache = True
    return model


# gpt2 gets it by position, bloom under a name of its own; jetmoe records one tensor twice.
@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "jetmoe"])
def test_a_cache_in_training_is_dropped_under_any_name(architecture: str) -> None:
    spec = TrainingSpec(num_steps=2)
    data = batches()[:2]
    model = prepared(with_cache(architecture))
    expected = train(with_cache(architecture), data, spec)
    assert compare_trajectories(expected, train(model, data, spec)) == []
    assert status(model) == "passed"


def test_a_layer_that_computes_otherwise_with_a_cache_is_named() -> None:
    """codegen casts its keys before it caches them."""
    with pytest.raises(ParityError, match=r"expected .* found .*use_cache=False"):
        backward(prepared(with_cache("codegen")))


# A run with the check and one without.

# Architectures and policies are in ``tests/exact/test_cells``, where runs are checked.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a block of two layers": ("qwen2", {"num_layers": 4}, {"block_size": 2}, {}),
    "router losses under autocast": (
        "mixtral",
        {"dtype": torch.float32},
        {},
        {"autocast_dtype": torch.bfloat16},
    ),
    "shared states between blocks": (
        "gemma4_shared_kv",
        {"num_layers": 5},
        {"block_size": 2},
        {"accumulation": 2},
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_with_the_check_ends_as_one_without(case: str) -> None:
    architecture, changed, policy, settings = RUNS[case]
    spec = TrainingSpec(num_steps=2, **settings)
    python_state = random.getstate()
    ends = []
    for mode in ("off", "strict"):
        model = prepared(build(architecture, **changed), mode, **policy)
        trajectory = train(model, batches(4), spec)
        ends.append((trajectory, bits_of(model), model))
    (expected, bits, _), (found, other_bits, model) = ends
    assert any(gradient.any() for gradient in expected.steps[0].gradients.values())
    assert [str(each) for each in compare_trajectories(expected, found)] == []
    assert changes(bits, other_bits) == {}
    assert random.getstate() == python_state
    assert poros.runtime(model).self_check == {
        "mode": "strict",
        "status": "passed",
        "message": None,
        "proved_with_deterministic_attention": [],
        "not_provable": [],
        "kernels": "peft",
    }


def test_it_is_strict_by_default_and_pending_until_the_first_forward_with_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = prepare_plain(build())
    assert poros.runtime(model).policy.self_check == "strict"
    model.eval()
    with torch.no_grad():
        model(**batches()[0])
    with torch.inference_mode():
        model(**batches()[0])
    assert status(model) == "pending"
    with caplog.at_level(logging.INFO, logger="poros"):
        model.train()(**batches()[1])
    assert status(model) == "passed"
    assert [
        record.getMessage()
        for record in caplog.records
        if "first step is checked" in record.getMessage()
    ] == ["poros: the first step is checked: 3 layers give the bits of an ordinary graph"]


def test_it_is_said_once_though_slices_of_the_head_go_on_to_be_checked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_LEAST_WIDTH", 128), ("_MOST_WEIGHTS", 64 * 128)):
        monkeypatch.setattr(sliced_loss, name, value)  # several slices
    policy: Any = {"slots": 3, "keep_last": 3, "loss": "chunked", "stream_head": True}
    model = poros.prepare(build(), device="cpu", **policy)  # layers are checked in their forward
    with caplog.at_level(logging.INFO, logger="poros"):
        for batch in batches()[:3]:
            model(**batch).loss.backward()
    assert status(model) == "passed"
    assert caplog.text.count("first step is checked") == 1


def test_evaluation_before_training_does_not_change_what_is_checked() -> None:
    ends = []
    for mode in ("off", "strict"):
        model = prepared(build(), mode).eval()
        with torch.no_grad():
            model(**batches()[0])
        ends.append(train(model, batches(), TrainingSpec(num_steps=2)))
    assert status(model) == "passed"
    assert [str(each) for each in compare_trajectories(*ends)] == []


def test_layers_below_the_lowest_adapter_are_checked_too() -> None:
    """They get no gradient, but what they hand on is trained on."""
    model = build()
    for index in (0, 1):
        layers_of(model)[index].requires_grad_(False)
    prepared(model)
    backward(model)
    assert status(model) == "passed"


def test_each_layer_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(build())
    backward(model)
    monkeypatch.setattr(poros.self_check.check.SelfCheck, "_mismatch", None)
    backward(model)


# It leaves no trace.


def test_hooks_on_parameters_run_once_and_no_gradient_is_accumulated() -> None:
    model = prepared(build())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen: list[int] = []
    for parameter in trained:
        parameter.register_hook(lambda _, p=parameter: seen.append(id(p)))
    model.train()
    found = torch.autograd.grad(model(**batches()[1]).loss, trained)
    assert status(model) == "passed" and len(found) == len(trained)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sorted(seen) == sorted(map(id, trained))


def test_accumulation_hooks_run_once() -> None:
    model = prepared(build())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen: list[torch.Tensor] = []
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(seen.append)
    backward(model)
    assert status(model) == "passed"
    assert sorted(map(id, seen)) == sorted(map(id, trained))


def test_no_random_number_is_drawn_from_anyone() -> None:
    model = prepared(build())
    model.train()
    torch.manual_seed(3)
    loss = model(**batches()[1]).loss
    before, python_state = torch.get_rng_state(), random.getstate()
    loss.backward()
    assert status(model) == "passed"
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python_state


def tensor_memory() -> int:
    """Bytes of all tensors that Python holds, shared memory counted once."""
    gc.collect()
    held = {}
    for each in gc.get_objects():
        # A compiler that ran in this process leaves tensors without memory behind.
        if type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta:
            storage = each.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def test_its_memory_is_freed_with_the_forward() -> None:
    def records() -> int:
        return sum(isinstance(value, CallSnapshot | Outcome) for value in gc.get_objects())

    gc.collect()
    others = records()

    def growth(mode: str) -> int:
        model = prepared(build(), mode)
        model.train()
        before = tensor_memory()
        loss = model(**batches()[1]).loss
        gc.collect()
        assert records() == others and loss.grad_fn is not None
        return tensor_memory() - before

    assert growth("strict") == growth("off") > 0


# Modes.


def flip_a_nibble(model: Any) -> Any:
    poros.runtime(model).host_slab(1)[1000] ^= 0x0F
    return model


def test_warn_logs_and_records_and_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    model = flip_a_nibble(prepared(build(), "warn"))
    with caplog.at_level(logging.WARNING, logger="poros"):
        trajectory = train(model, batches(), TrainingSpec(num_steps=2))
    assert len(trajectory.steps) == 2
    found = poros.runtime(model).self_check
    assert (found["mode"], found["status"]) == ("warn", "failed")
    assert "layers.1" in found["message"] and "host bytes of block 1" in found["message"]
    logged = [record for record in caplog.records if "self-check failed" in record.getMessage()]
    assert len(logged) == 1 and found["message"] in logged[0].getMessage()


def test_off_is_logged_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = prepared(build(), "off")
    assert [record for record in caplog.records if "self_check is off" in record.getMessage()]
    backward(model)
    found = poros.runtime(model).self_check
    assert (found["mode"], found["status"], found["message"]) == ("off", "off", None)


def test_strict_records_too() -> None:
    model = flip_a_nibble(prepared(build()))
    with pytest.raises(ParityError) as caught:
        backward(model)
    found = poros.runtime(model).self_check
    assert found["status"] == "failed" and found["message"] in str(caught.value)
    assert re.search(r"poros\.restore\(model\)", str(caught.value))


def test_adapters_that_are_frozen_at_the_forward_only_are_not_asked_for_gradients() -> None:
    model = prepared(build())
    model.train()
    frozen = [each for name, each in model.named_parameters() if "lora_B" in name]
    for each in frozen:
        each.requires_grad_(False)
    loss = model(**batches()[1]).loss
    for each in frozen:
        each.requires_grad_(True)
    loss.backward()
    assert status(model) == "passed" and all(each.grad is None for each in frozen)
