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
from poros.errors import RematerializationError
from tests.exact.adapter_arms import Found, adapted, differences, step
from tests.exact.arms import Bases
from tests.exact.recorded import record_on_tapes

Model = Any
BF16, FP32 = torch.bfloat16, torch.float32


def scale(module: Any, given: Any, result: torch.Tensor) -> None:
    result.mul_(1.5)


def steer(module: Any, given: Any, result: torch.Tensor) -> None:
    """As steering vectors and patches of activations are added."""
    result[:, -1] += torch.linspace(-1, 1, result.shape[-1]).to(result)


def on(*names: str, hook: Callable[..., Any]) -> Callable[[Model], None]:
    def register(model: Model) -> None:
        for name, module in model.named_modules():
            if name.endswith(names):
                module.register_forward_hook(hook)

    return register


def within(write: Callable[..., None]) -> Callable[[Model], None]:
    """Written by the layer's own code, to its last sum: values that a recomputation leaves out."""

    def change(model: Model) -> None:
        for layer in model.base_model.model.model.layers:
            kind = type(layer)

            class Writing(kind):  # type: ignore[misc, valid-type]
                def forward(self, *args: Any, **kwargs: Any) -> Any:
                    result = super().forward(*args, **kwargs)
                    write(self, args, result)
                    return result

            Writing.__name__ = kind.__name__
            layer.__class__ = Writing

    return change


def nothing(model: Model) -> None:
    pass


ALL = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Which model, its adapters, what is done to it before it is trained, and whether its visits can be
# recorded then.
PROGRAMS: dict[str, tuple[str, dict[str, Any], Callable[[Model], None], bool]] = {
    "falcon": ("falcon", {}, nothing, True),
    "falcon with DoRA": ("falcon", {"use_dora": True}, nothing, True),
    "scaled": ("qwen2", {}, on(*ALL, hook=scale), False),
    "steered": ("qwen2", {}, on(*ALL, hook=steer), False),
    "with a bias": ("qwen2", {"lora_bias": True}, on(*ALL, hook=steer), False),
    "with DoRA": ("qwen2", {"use_dora": True}, on(*ALL, hook=steer), False),
    # 4-bit modules of bitsandbytes with a bias give views themselves.
    "not adapted": ("qwen2", {"target_modules": ["k_proj"]}, on(*ALL[2:], hook=steer), False),
    "feed-forward": ("qwen2", {}, on("mlp", hook=scale), False),
    "fused projections": ("phi3", {}, on("qkv_proj", "gate_up_proj", hook=steer), False),
    "layers": ("qwen2", {}, on("layers.0", "layers.1", hook=steer), True),
    "all of what is left out": ("qwen2", {}, within(scale), True),
    "a part of what is left out": ("qwen2", {}, within(steer), True),
    "what is left out, with DoRA": ("qwen2", {"use_dora": True}, within(steer), True),
}
DTYPES = [(BF16, BF16), (BF16, FP32), (FP32, FP32)]


@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_as_writable_as_those_of_peft(
    program: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    quantize: bool,
    bases: Bases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (architecture, options, change, is_recorded), (dtype, adapters) = PROGRAMS[program], dtypes
    options = {"target_modules": "all-linear", "lora_dropout": 0.05, **options}
    model = adapted(
        bases, architecture, dtype=dtype, quantize=quantize, adapters=adapters, **options
    )
    change(model)
    plain, captures, wrong = step(model), record_on_tapes(monkeypatch), {}
    for kernels in ("fused", "exact"):
        poros.use_adapter_kernels(model, kernels)
        resident = step(model)
        poros.restore(model)
        poros.prepare(model, loss="reference", adapter_kernels=kernels)
        streamed = [step(model) for _ in range(4)]
        assert poros.runtime(model).self_check["status"] == "passed"
        poros.restore(model)
        is_ours = kernels == "fused" and "use_dora" in options
        wrong[kernels, "resident"] = [] if is_ours else differences(plain, resident)
        for number, found in enumerate(streamed):
            wrong[kernels, number] = differences(resident, found)
    assert not any(wrong.values()), wrong
    assert all(each.num_replays > 0 for each in captures) == is_recorded


def later(path: str) -> Callable[[Model], None]:
    """What feed-forward is computed from is written to behind it."""

    def change(model: Model) -> None:
        for layer in model.base_model.model.model.layers:
            taken: list[torch.Tensor] = []

            def take(module: Any, given: Any, result: torch.Tensor, taken: Any = taken) -> None:
                taken.append(result)

            def write(module: Any, given: Any, result: torch.Tensor, taken: Any = taken) -> None:
                with torch.no_grad():
                    taken.pop().mul_(0.5)

            layer.get_submodule(path).register_forward_hook(take)
            layer.mlp.register_forward_hook(write)

    return change


def write_to_the_input(module: Any, given: Any, result: torch.Tensor) -> None:
    with torch.no_grad():
        given[0].mul_(0.5)


# What is done, and whether PEFT's modules can be differentiated then where dtypes differ: what they
# keep of their input is a copy in the adapters' dtype.
SPOILT: dict[str, tuple[Callable[[Model], None], bool]] = {
    "gate": (later("mlp.gate_proj"), False),
    "up": (later("mlp.up_proj"), False),
    "an input": (on("v_proj", hook=write_to_the_input), True),
}


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("case", SPOILT)
def test_what_backward_needs_is_not_written_to_unseen(
    case: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    use_dora: bool,
    bases: Bases,
) -> None:
    (change, is_copied), (dtype, adapters) = SPOILT[case], dtypes
    model = adapted(bases, dtype=dtype, quantize=False, adapters=adapters, use_dora=use_dora)
    change(model)
    if is_copied and dtype != adapters:
        assert isinstance(step(model), Found)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model)
    poros.use_adapter_kernels(model)
    with pytest.raises(RematerializationError, match="written to"):
        step(model)
    poros.restore(model)
    poros.prepare(model, loss="reference")
    with pytest.raises(poros.PorosError, match=r"written to|edited in place"):
        step(model)
