"""With which adapter kernels the self-check compares, and what it finds of ours."""

from typing import Any

import pytest
import torch

import poros
from poros.errors import ParityError, VRAMBudgetError
from poros.kernels import lora
from poros.planning.planner import Planner
from poros.planning.request import PlanRequest
from tests.support import make_model

TOKENS: Any = {"seq_len": 512, "batch_size": 2, "cuda_graphs": False}


def build() -> Any:
    return make_model("qwen2", num_layers=3, hidden_size=64)


def total(model: Any, **options: Any) -> int:
    return Planner(model).plan(PlanRequest.of(**TOKENS, **options)).total_num_bytes


def budget_between(model: Any) -> str:
    """Room for a step that is checked with our kernels, and not with PEFT's modules."""
    ours = total(model, self_check=False)
    plain = total(model, self_check=True)
    assert ours < 0.9 * plain
    return f"{(ours + plain) // 2}B"


def first_step(model: Any) -> Any:
    tokens = torch.randint(0, 100, (TOKENS["batch_size"], TOKENS["seq_len"]))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return poros.runtime(model).self_check


def scaled_late(result: torch.Tensor, added: torch.Tensor, how: Any) -> torch.Tensor:
    return result + added.to(result.dtype) * how.scaling


def test_a_plan_checks_with_what_fits() -> None:
    model = build()
    planner, budget = Planner(model), budget_between(model)
    found = planner.plan(PlanRequest.of(**TOKENS, vram_budget=budget, self_check=True))
    assert found.check_kernels == found.as_dict()["check_kernels"] == "fused"
    assert planner.plan(PlanRequest.of(**TOKENS, self_check=True)).check_kernels == "peft"
    with pytest.raises(VRAMBudgetError):
        planner.plan(
            PlanRequest.of(**TOKENS, vram_budget=budget, self_check=True, adapter_kernels="peft")
        )


@pytest.mark.parametrize("is_narrow", [True, False], ids=["narrow", "wide"])
def test_the_first_step_is_checked_with_what_fits(
    is_narrow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    poros.prepare(model, vram_budget=budget_between(model) if is_narrow else "1GiB")
    found = first_step(model)
    assert found["status"] == "passed"
    assert found["kernels"] == ("fused" if is_narrow else "peft")
    assert ("no room for PEFT's own modules" in caplog.text) == is_narrow


def test_a_fault_in_our_operator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "add_scaled", scaled_late)
    model = build()
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 5 / 3
    poros.prepare(model, slots=2)
    with pytest.raises(ParityError, match="self-check failed"):
        first_step(model)


def test_control_nothing_else_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With our kernels on both sides the same fault passes: what is said of the check is true."""
    monkeypatch.setattr(lora, "add_scaled", scaled_late)
    model = build()
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 5 / 3
    poros.prepare(model, vram_budget=budget_between(model))
    assert first_step(model)["status"] == "passed"
