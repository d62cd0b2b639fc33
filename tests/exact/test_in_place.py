"""Programs that write in place to what adapted modules give: resident, streamed and recorded.

Compared with PEFT's own modules are loss, every gradient, the order in which parameters get theirs,
and the random state. The dtypes of base and adapters are an axis: where they differ, a sum is cast,
which makes a new tensor whatever the operator gave.

At the end products that a recomputation leaves out, because nobody reads what they give.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poros
from poros.errors import RematerializationError
from tests.exact.recorded import record_on_tapes
from tests.loops import (
    Model,
    adapted,
    behind,
    differences,
    layers_of,
    micro_batches,
    nothing,
    override,
    step,
    with_kernels,
)

BF16, FP32 = torch.bfloat16, torch.float32


def scale(module: Any, given: Any, result: torch.Tensor) -> None:
    result.mul_(1.5)


def steer(module: Any, given: Any, result: torch.Tensor) -> None:
    """As steering vectors and patches of activations are added."""
    # Made on the device: a copy from the host cannot be recorded.
    result[:, -1] += torch.linspace(-1, 1, result.shape[-1], device=result.device).to(result.dtype)


def within(write: Callable[..., None]) -> Callable[[Model], None]:
    """Written by the layer's own code, to its last sum: values that a recomputation leaves out."""

    def forward(layer: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        write(layer, args, result)
        return result

    return lambda model: override(layers_of(model), forward)


ALL = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Which model, its adapters, what is done to it before it is trained, and whether its visits can be
# recorded then.
PROGRAMS: dict[str, tuple[str, dict[str, Any], Callable[[Model], None], bool]] = {
    "falcon": ("falcon", {}, nothing, True),
    "steered": ("qwen2", {}, behind(steer, *ALL), False),
    "with a bias": ("qwen2", {"lora_bias": True}, behind(steer, *ALL), False),
    "with DoRA": ("qwen2", {"use_dora": True}, behind(steer, *ALL), False),
    # 4-bit modules of bitsandbytes with a bias give views themselves.
    "not adapted": ("qwen2", {"target_modules": ["k_proj"]}, behind(steer, *ALL[2:]), False),
    "feed-forward": ("qwen2", {}, behind(scale, "mlp"), False),
    "fused projections": ("phi3", {}, behind(steer, "qkv_proj", "gate_up_proj"), False),
    "layers": ("qwen2", {}, behind(steer, "layers.0", "layers.1"), True),
    "all of what is left out": ("qwen2", {}, within(scale), True),
    "a part of what is left out": ("qwen2", {}, within(steer), True),
}
DTYPES = [(BF16, BF16), (BF16, FP32), (FP32, FP32)]


@pytest.mark.cover("values")
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_as_writable_as_those_of_peft(
    program: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    quantize: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (architecture, options, change, is_recorded), (dtype, adapters) = PROGRAMS[program], dtypes
    options = {"target_modules": "all-linear", "lora_dropout": 0.05, **options}
    model = adapted(architecture, dtype=dtype, quantize=quantize, adapters=adapters, **options)
    change(model)
    plain, captures, wrong = step(model), record_on_tapes(monkeypatch), {}
    # Of LoRA "exact" is "fused".
    for kernels in ("fused", "exact" if "use_dora" in options else "grouped"):
        resident = with_kernels(model, kernels=kernels)
        poros.prepare(model, loss="reference", adapter_kernels=kernels)
        streamed = [step(model) for _ in range(4)]
        assert poros.runtime(model).self_check["status"] == "passed"
        poros.restore(model)
        has_own_bits = kernels == "grouped" or (kernels == "fused" and "use_dora" in options)
        wrong[kernels, "resident"] = [] if has_own_bits else differences(plain, resident)
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
    "an input": (behind(write_to_the_input, "v_proj"), True),
}


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("case", SPOILT)
def test_what_backward_needs_is_not_written_to_unseen(
    case: str, dtypes: tuple[torch.dtype, torch.dtype], use_dora: bool
) -> None:
    (change, is_copied), (dtype, adapters) = SPOILT[case], dtypes
    model = adapted(dtype=dtype, quantize=False, adapters=adapters, use_dora=use_dora)
    change(model)
    if is_copied and dtype != adapters:
        assert step(model)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model)
    for kernels in ("fused",) if use_dora else ("fused", "grouped"):
        poros.use_adapter_kernels(model, kernels)
        with pytest.raises(RematerializationError, match="written to"):
            step(model)
        poros.restore(model)
        poros.prepare(model, loss="reference", adapter_kernels=kernels)
        with pytest.raises(poros.PorosError, match=r"written to|edited in place"):
            step(model)
        poros.restore(model)


def test_what_an_operator_has_saved_is_not_written_to_unseen_once_the_layer_has_run() -> None:
    seen: list[torch.Tensor] = []

    def keep(module: Any, given: Any, result: torch.Tensor) -> None:
        seen.append(given[0])

    def edited(model: Model) -> None:
        loss = model(**micro_batches(1, torch.Generator().manual_seed(2))[0]).loss
        with torch.no_grad():
            seen[0].mul_(0.5)
        loss.backward()

    model = adapted(quantize=False)
    behind(keep, "act_fn")(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edited(model)
    seen.clear()
    poros.prepare(model, loss="reference", self_check="off")
    with pytest.raises(RematerializationError, match="edited in place after an operator"):
        edited(model)


def reading(layer: Any, _: Any, result: torch.Tensor) -> None:
    """Something in the layer that reads what it returns, without a graph."""
    layer.largest = float(result.detach().abs().max())


# Layers whose last projection is left out in each of three steps, and why not.
LEFT_OUT: dict[str, tuple[str, Callable[[Model], None], int]] = {
    "qwen2": ("qwen2", nothing, 6),
    "a norm behind": ("gemma3", nothing, 0),
    "hooks in one layer": ("qwen2", behind(lambda *_: None, "0.mlp"), 3),
    "a reader": ("qwen2", within(reading), 0),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("kernels", ["fused", "grouped"])
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_last_product_that_nobody_needs_is_left_out(
    case: str, quantize: bool, kernels: str
) -> None:
    architecture, change, num_expected = LEFT_OUT[case]
    # Projections with dropout, or with adapters of another dtype, are not grouped.
    options = {"lora_dropout": 0.05} if kernels == "fused" else {"adapters": torch.bfloat16}
    model = adapted(architecture, quantize=quantize, **options)
    change(model)
    expected = step(model) if kernels == "fused" else with_kernels(model, kernels=kernels)
    poros.prepare(model, loss="reference", adapter_kernels=kernels)
    assert not any(differences(expected, step(model)) for _ in range(3))
    runtime = poros.runtime(model)
    assert runtime.self_check["status"] == "passed"
    assert runtime.stats()["num_left_out_adapters"] == num_expected
