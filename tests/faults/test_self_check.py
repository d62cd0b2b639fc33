"""The check of the first step: it changes nothing, leaves nothing behind, and says what it found.

What it finds is in ``planted``.
"""

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

import poros
from poros.errors import ParityError
from poros.gates.reference import TrainingSpec, train
from poros.kernels import lora
from poros.planning.planner import Planner
from poros.planning.request import PlanRequest
from poros.self_check.evidence import CallSnapshot
from poros.self_check.proof import Outcome
from tests.comparing import compare_trajectories
from tests.loops import batches, build, layers_of, resident_run, run
from tests.support import prepare_plain


def status(model: Any) -> str:
    return poros.runtime(model).self_check["status"]


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
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "bloom", "jetmoe"])
def test_a_cache_in_training_is_dropped_under_any_name(architecture: str) -> None:
    spec = TrainingSpec(num_steps=2)
    data = batches()[:2]
    model = prepare_plain(with_cache(architecture))
    expected = train(with_cache(architecture), data, spec)
    assert compare_trajectories(expected, train(model, data, spec)) == []
    assert status(model) == "passed"


def test_a_layer_that_computes_otherwise_with_a_cache_is_named() -> None:
    """codegen casts its keys before it caches them."""
    with pytest.raises(ParityError, match=r"expected .* found .*use_cache=False"):
        backward(prepare_plain(with_cache("codegen")))


# Runs with the check are in ``tests/exact/test_cells``.


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
    assert poros.runtime(model).self_check == {
        "mode": "strict",
        "status": "passed",
        "message": None,
        "proved_with_deterministic_attention": [],
        "not_provable": [],
        "kernels": "peft",
    }
    assert caplog.text.count("the first step passed its check: 3 layers") == 1


# A bit that a move itself flips is found before anything is trained, wherever the tensor goes.


def part_of(model: Any, kind: str) -> torch.Tensor:
    """One tensor of each kind, of layer 1."""
    layer = layers_of(model)[1]
    state: Any = layer.mlp.up_proj.base_layer.weight.quant_state
    found = {
        "packed weight": layer.mlp.up_proj.base_layer.weight,
        "absmax": state.absmax,
        "nested absmax": state.state2.absmax,
        "norm": layer.input_layernorm.weight,
        "bias": layer.self_attn.k_proj.base_layer.bias,
    }
    return found[kind]


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("keep_last", [0, 3])
@pytest.mark.parametrize("self_check", ["strict", "off"], ids=["", "control"])
@pytest.mark.parametrize("kind", ["packed weight", "absmax", "nested absmax", "norm", "bias"])
def test_a_bit_flipped_by_prepare(
    kind: str, self_check: str, keep_last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of tensor that travels or stays is read: without the check others are trained."""
    model = build()
    moved = part_of(model, kind)
    place, dtype = moved.data_ptr(), moved.dtype
    copy, flips = torch.Tensor.copy_, list[int]()

    def faulty(self: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """A copy of this tensor arrives with a nibble changed, and PyTorch counts no write."""
        result = copy(self, other, *args, **kwargs)
        if other.data_ptr() == place != self.data_ptr() and self.dtype == dtype:
            flips.append(self.data_ptr())
            array: Any = self.detach().data.view(-1).view(torch.uint8).numpy()
            array[1] ^= 0x30
        return result

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", faulty)
        prepare_plain(model, self_check=self_check, keep_last=keep_last)
    assert len(flips) == 1
    if self_check == "strict":
        with pytest.raises(ParityError, match=r"layers\.1"):
            run(model)
    else:
        found = compare_trajectories(resident_run(), run(model))
        assert found[0].name.startswith("step 0, ")


# It leaves no trace. That hooks run once: ``tests/exact/test_written_programs``.


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
        model = prepare_plain(build(), self_check=mode)
        model.train()
        before = tensor_memory()
        loss = model(**batches()[1]).loss
        gc.collect()
        assert records() == others and loss.grad_fn is not None
        return tensor_memory() - before

    assert growth("strict") == growth("off") > 0


# Modes.


@pytest.mark.parametrize("mode", ["warn", "strict"])
def test_a_failed_check_is_logged_or_raised_and_recorded(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = prepare_plain(build(), self_check=mode)
    poros.runtime(model).host_slab(1)[1000] ^= 0x0F
    if mode == "strict":
        with pytest.raises(ParityError, match=r"poros\.restore\(model\)") as caught:
            backward(model)
        said = str(caught.value)
    else:
        with caplog.at_level(logging.WARNING, logger="poros"):
            assert len(train(model, batches(), TrainingSpec(num_steps=2)).steps) == 2
        said = caplog.text
        assert said.count("self-check failed") == 1
    found = poros.runtime(model).self_check
    assert (found["mode"], found["status"]) == (mode, "failed")
    assert "layers.1" in found["message"] and "host bytes of block 1" in found["message"]
    assert said.count(found["message"]) == 1


def test_off_is_logged_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    model = prepare_plain(build(), self_check="off")
    assert "self_check is off" in caplog.text
    backward(model)
    found = poros.runtime(model).self_check
    assert (found["mode"], found["status"], found["message"]) == ("off", "off", None)


# With which adapter kernels it compares, and what it finds of ours.

TOKENS: Any = {"seq_len": 512, "batch_size": 2, "cuda_graphs": False}


def budget_between(model: Any) -> str:
    """Room for a step that is checked with our kernels, and not with PEFT's modules."""
    ours, plain = (
        Planner(model).plan(PlanRequest.of(**TOKENS, self_check=each)).total_num_bytes
        for each in (False, True)
    )
    assert ours < 0.9 * plain
    return f"{(ours + plain) // 2}B"


def first_step(model: Any) -> Any:
    tokens = torch.randint(0, 100, (TOKENS["batch_size"], TOKENS["seq_len"]))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return poros.runtime(model).self_check


@pytest.mark.parametrize("is_narrow", [True, False], ids=["narrow", "wide"])
def test_the_first_step_is_checked_with_what_fits(
    is_narrow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(dropout=0.0)
    poros.prepare(model, vram_budget=budget_between(model) if is_narrow else "1GiB")
    found = first_step(model)
    assert found["status"] == "passed"
    assert found["kernels"] == ("fused" if is_narrow else "peft")
    assert ("no room for PEFT's own modules" in caplog.text) == is_narrow


@pytest.mark.parametrize("case", ["recomputed", "kept", "narrow"])
def test_a_fault_in_our_operator_is_found_where_peft_is_the_reference(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our kernels on both sides the same fault passes: what is said of the check is true."""
    monkeypatch.setattr(
        lora, "add_scaled", lambda result, added, how: result + added.to(result.dtype) * how.scaling
    )
    model = build(dropout=0.0)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 5 / 3
    if case == "narrow":
        poros.prepare(model, vram_budget=budget_between(model))
        assert first_step(model)["status"] == "passed"
        return
    poros.prepare(model, **({"slots": 3, "keep_last": 3} if case == "kept" else {"slots": 2}))
    with pytest.raises(ParityError, match="self-check failed"):
        first_step(model)
