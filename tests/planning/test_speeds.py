"""The rates of a forecast are measured: they scale with the machine, not with what is measured."""

from typing import Any

import pytest
import torch

from poros.errors import PolicyError, UnsupportedModelError
from poros.gates import tiny
from poros.planning import speeds
from poros.planning.formula import Speeds
from poros.planning.meta_model import Recipe
from poros.planning.planner import Planner
from poros.planning.speeds import measure_speeds
from poros.streams import EagerStreams


def planner(quantization: str | None = "nf4") -> Planner:
    config = tiny.small_config("qwen2", num_layers=2, hidden_size=256, dropout=0.0)
    return Planner(config, quantization=quantization, rank=4)


@pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
def test_the_twin_of_the_largest_linear_layer_is_measured(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, Any]] = []
    twin = speeds._twin

    def note(like: Any, device: torch.device) -> Any:
        made.append((like, twin(like, device)[0]))
        return twin(like, device)

    monkeypatch.setattr(speeds, "_twin", note)
    found = planner(quantization)
    rates = found.measure(seq_len=32, device="cpu")
    assert rates.copy_gb_per_s > 0 and rates.tflop_per_s > 0
    ((like, real),) = made
    assert like.in_features * like.out_features == 256 * 512
    packed = like.weight.numel() * like.weight.element_size()
    assert real.weight.numel() * real.weight.element_size() == packed
    assert type(real) is type(like)
    if quantization is not None:
        assert real.weight.quant_state.nested and real.weight.quant_state.quant_type == quantization


def test_rates_are_work_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (
        Recipe.of(
            tiny.small_config("qwen2", num_layers=1, hidden_size=64, dropout=0.0),
            "nf4",
            torch.bfloat16,
            planner()._recipe.adapters["default"],
        )
        .make()
        .get_base_model()
        .model.layers
    )
    monkeypatch.setattr(speeds, "_median_ms", lambda streams, run: 2.0)
    found = measure_speeds(layers, 10, "cpu", copy_num_bytes=10**6)
    assert found.copy_gb_per_s == pytest.approx(0.5)
    # Two products of 10 x 64 x 128, two operations for each element.
    assert found.tflop_per_s == pytest.approx(2 * 2 * 10 * 64 * 128 / 2e-3 / 1e12)


def test_twice_the_work_takes_longer() -> None:
    """Control: what is timed is really done."""
    streams = EagerStreams(torch.device("cpu"))
    few, many = (speeds._copy_ms(streams, size) for size in (2**20, 2**27))
    assert many > 4 * few


def test_measured_rates_are_those_of_the_forecast() -> None:
    found = planner()
    rates = found.measure(seq_len=16, device="cpu")
    plan = found.plan(seq_len=16, speeds=rates)
    assert plan.speeds == rates and plan.step_ms is not None and plan.step_ms > 0
    twice = Speeds(2 * rates.copy_gb_per_s, 2 * rates.tflop_per_s)
    assert found.plan(seq_len=16, speeds=twice).step_ms == pytest.approx(plan.step_ms / 2)


def test_what_cannot_be_measured_is_refused() -> None:
    message = r"device: expected a device to measure on, found 'apples'.*device 'cpu'"
    with pytest.raises(PolicyError, match=message):
        planner().measure(seq_len=16, device="apples")
    with pytest.raises(PolicyError, match="seq_len"):
        planner().measure(seq_len=0, device="cpu")
    with pytest.raises(UnsupportedModelError, match="expected linear layers"):
        measure_speeds([torch.nn.LayerNorm(4)], 16, "cpu", copy_num_bytes=1024)


@pytest.mark.gpu
def test_rates_of_a_gpu_are_those_of_a_gpu() -> None:
    config = tiny.small_config("qwen2", num_layers=1, hidden_size=2048, dropout=0.0)
    found = Planner(config).measure(seq_len=256)
    print(found)
    assert found.copy_gb_per_s > 5
    assert found.tflop_per_s > 1
