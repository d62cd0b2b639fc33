"""Programs that write in place to what adapted modules give: resident, streamed and recorded.

Compared with PEFT's own modules are loss, every gradient, the order in which parameters get theirs,
and the random state. The dtypes of base and adapters are an axis: where they differ, a sum is cast,
which makes a new tensor whatever the operator gave.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poros
from tests.exact.adapter_arms import adapted, differences, step
from tests.exact.arms import Bases
from tests.exact.recorded import record_on_tapes

Model = Any
BF16, FP32 = torch.bfloat16, torch.float32


def scale(module: Any, given: Any, result: torch.Tensor) -> None:
    result.mul_(1.5)


def steer(module: Any, given: Any, result: torch.Tensor) -> None:
    """As steering vectors and patches of activations are added."""
    result[:, -1] += torch.linspace(-1, 1, result.shape[-1]).to(result)


def add_the_input(module: Any, given: Any, result: torch.Tensor) -> None:
    result += given[0].mean()


def on(*names: str, hook: Callable[..., None]) -> Callable[[Model], None]:
    def register(model: Model) -> None:
        for name, module in model.named_modules():
            if name.endswith(names):
                module.register_forward_hook(hook)

    return register


INNER = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
# Which model, and what is done to it before it is trained.
PROGRAMS: dict[str, tuple[str, Callable[[Model], None]]] = {
    "falcon": ("falcon", lambda model: None),
    "scaled": ("qwen2", on(*INNER, "down_proj", hook=scale)),
    "steered": ("qwen2", on(*INNER, "down_proj", hook=steer)),
    "a sum": ("qwen2", on(*INNER, "down_proj", hook=add_the_input)),
    "the last one": ("qwen2", on("down_proj", hook=steer)),
    "feed-forward": ("qwen2", on("mlp", hook=scale)),
    "fused projections": ("phi3", on("qkv_proj", "gate_up_proj", "down_proj", hook=steer)),
}
DTYPES = [(BF16, BF16), (BF16, FP32), (FP32, FP32)]


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_as_writable_as_those_of_peft(
    program: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    quantize: bool,
    dropout: float,
    bases: Bases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (architecture, change), (dtype, adapters) = PROGRAMS[program], dtypes
    model = adapted(
        bases,
        architecture,
        dtype=dtype,
        quantize=quantize,
        adapters=adapters,
        lora_dropout=dropout,
        target_modules="all-linear",
    )
    change(model)
    plain, found = step(model), {}
    for kernels in ("fused", "exact"):
        poros.use_adapter_kernels(model, kernels)
        found[f"resident, {kernels}"] = [step(model)]
        poros.restore(model)
    captures = record_on_tapes(monkeypatch)
    for kernels in ("fused", "exact"):
        poros.prepare(model, loss="reference", adapter_kernels=kernels)
        found[f"streamed, {kernels}"] = [step(model) for _ in range(4)]
        assert poros.runtime(model).self_check["status"] == "passed"
        assert poros.runtime(model).stats()["num_unfused_adapters"] == 0
        poros.restore(model)
    wrong = {arm: [differences(plain, each) for each in steps] for arm, steps in found.items()}
    assert not any(map(any, wrong.values())), wrong
    assert any(each.num_replays for each in captures) == (program == "falcon")
