"""The rates of a forecast are measured: they scale with the machine, not with what is measured."""

from typing import Any

import pytest
import torch

from poros.errors import PolicyError, UnsupportedModelError
from poros.gates import tiny
from poros.planning import speeds
from poros.planning.meta_model import Recipe
from poros.planning.planner import Planner
from poros.planning.request import PlanRequest, Speeds
from poros.planning.speeds import measure_speeds
from tests.operators import Operators
from tests.planning.cells import lora


def planner(quantization: str | None = "nf4", **sizes: int) -> Planner:
    wanted = {"num_layers": 2, "hidden_size": 256, **sizes}
    return Planner(tiny.small_config("qwen2", **wanted, dropout=0.0), quantization=quantization)


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_the_twin_of_the_largest_linear_layer_is_measured(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, Any]] = []
    twin = speeds._twin

    def note(like: Any, device: torch.device) -> Any:
        made.append((like, twin(like, device)[0]))
        return twin(like, device)

    monkeypatch.setattr(speeds, "_twin", note)
    rates = planner(quantization).measure(seq_len=32, device="cpu")
    assert rates.copy_gb_per_s > 0 and rates.tflop_per_s > 0
    ((like, real),) = made
    assert like.in_features * like.out_features == 256 * 512
    packed = like.weight.numel() * like.weight.element_size()
    assert real.weight.numel() * real.weight.element_size() == packed
    assert type(real) is type(like)
    if quantization is not None:
        assert real.weight.quant_state.nested and real.weight.quant_state.quant_type == quantization


def test_rates_are_work_by_time_and_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.small_config("qwen2", num_layers=1, hidden_size=64, dropout=0.0)
    layers = Recipe.of(config, "nf4", torch.bfloat16, lora()).make().get_base_model().model.layers
    done: list[dict[str, int]] = []

    def note(func: Any, args: Any, result: Any) -> None:
        done[-1][str(func)] = args[0].numel()

    def run_once(streams: Any, run: Any) -> float:
        done.append({})
        with Operators(note):
            run()
        return 2.0

    monkeypatch.setattr(speeds, "_median_ms", run_once)
    found = measure_speeds(layers, 10, "cpu", copy_num_bytes=10**6)
    copy, products = done
    assert copy == {"aten.copy_.default": 10**6}
    assert found.copy_gb_per_s == pytest.approx(0.5)
    # Forward and backward: two products of 10 x 64 x 128, two operations for each element.
    assert products["bitsandbytes.gemm_4bit.default"] == 10 * 64
    assert products["aten.mm.default"] == 10 * 128
    assert found.tflop_per_s == pytest.approx(2 * 2 * 10 * 64 * 128 / 2e-3 / 1e12)


def test_measured_rates_are_those_of_the_forecast_or_refused() -> None:
    found = planner()
    rates = found.measure(seq_len=16, device="cpu")
    plan = found.plan(PlanRequest.of(seq_len=16, speeds=rates))
    assert plan.speeds == rates and plan.step_ms is not None and plan.step_ms > 0
    twice = Speeds(2 * rates.copy_gb_per_s, 2 * rates.tflop_per_s)
    half = found.plan(PlanRequest.of(seq_len=16, speeds=twice)).step_ms
    assert half == pytest.approx(plan.step_ms / 2)
    message = r"device: expected a device to measure on, found 'apples'.*device 'cpu'"
    with pytest.raises(PolicyError, match=message):
        found.measure(seq_len=16, device="apples")
    with pytest.raises(PolicyError, match="seq_len"):
        found.measure(seq_len=0, device="cpu")
    with pytest.raises(UnsupportedModelError, match="expected linear layers"):
        measure_speeds([torch.nn.LayerNorm(4)], 16, "cpu", copy_num_bytes=1024)


@pytest.mark.gpu
def test_rates_of_a_gpu_are_those_of_a_gpu() -> None:
    found = planner(num_layers=1, hidden_size=2048).measure(seq_len=256)
    print(found)
    assert found.copy_gb_per_s > 5
    assert found.tflop_per_s > 1
