"""Streamed training equals resident training, bit for bit, in every cell that Poros promises.

The cells that differ in what is computed run twice: with the streams a CPU has, and with the
adversarial ones, which copy as late as the waits allow, poison what they are about to overwrite,
and watch every read. Block sizes and slots under adversarial streams are in test_hazards.py.
"""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import AdversarialPrepare

import poros
from poros.gates import tiny
from poros.gates.parity import ParityReport, check_architecture
from poros.gates.reference import QUANTITIES
from poros.layer.rng import RngStash
from poros.model.inspect import validated_model_types

SMALL = {"num_layers": 4, "hidden_size": 64, "num_tokens": 16}

Prepare = Callable[..., Any]


class Kept:
    """A ``prepare`` that keeps the model, to look at once the run is over."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self.model: Any = None

    def __call__(self, model: Any, **options: Any) -> Any:
        self.model = self._prepare(model, **options)
        return self.model


def check_cell(streams: str, name: str = "qwen2", **options: Any) -> ParityReport:
    """Run one cell of the gate and assert that it is exact, and that this says something."""
    adversary = AdversarialPrepare()
    kept = Kept(poros.prepare if streams == "eager" else adversary)
    options = {**SMALL, "device": "cpu", "accumulation": 1, **options}
    with ExitStack() as stack:
        if streams == "adversarial":
            stack.enter_context(adversary.watching())
        report = check_architecture(name, prepare=kept, **options)
    assert report.exact, f"{report.verdict()}\n{report.traceback or ''}"
    check_not_vacuous(report, kept.model, options)
    if streams == "adversarial":
        assert adversary.streams.num_copies == report.stats["num_loads"]
        assert adversary.streams.num_bytes == report.stats["h2d_num_bytes"]
    return report


def check_not_vacuous(report: ParityReport, model: Any, options: Mapping[str, Any]) -> None:
    """Everything was compared, every adapter learnt, and every block travelled as often as said."""
    num_steps, accumulation = options["num_steps"], options["accumulation"]
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    linears = [name for name in adapters if "lora_A" in name]
    assert len(adapters) == 2 * len(linears) >= 2 * 4 * options["num_layers"]
    # What is left after the last step are its clipped gradients.
    assert all(p.grad is not None and bool(p.grad.any()) for p in adapters.values())
    num_tensors = {name: tally.num_tensors for name, tally in report.tallies.items()}
    assert num_tensors.pop("start bytes") > len(adapters)
    per_parameter = ("gradients", "adapter weights", "exp_avg", "exp_avg_sq")
    assert num_tensors == {
        "loss": num_steps * accumulation,
        "grad norm": num_steps,
        "RNG end state": 1,
        **dict.fromkeys(per_parameter, num_steps * len(adapters)),
    }
    assert set(num_tensors) == set(QUANTITIES)
    K, S = report.stats["num_blocks"], report.stats["num_slots"]
    num_warm = num_steps * accumulation - 1
    assert report.stats["num_loads"] == (2 * K - S) + num_warm * 2 * (K - S)
    assert report.stats["num_loads"] + report.stats["num_hits"] == (num_warm + 1) * 2 * K
    # Every byte of the base travels at least once.
    assert report.stats["h2d_num_bytes"] >= report.stats["host_num_bytes"] > 0
    assert poros.runtime(model).stats()["fallbacks"] == []


@pytest.fixture(params=["eager", "adversarial"])
def streams(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# The cells.


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_qwen2(streams: str, dtype: torch.dtype, dropout: float, accumulation: int) -> None:
    check_cell(streams, dtype=dtype, dropout=dropout, accumulation=accumulation, num_steps=3)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_validated_architecture(streams: str, name: str) -> None:
    # Watching every operator takes most of the time, and its worst case is there in every step.
    check_cell(streams, name, dropout=0.05, num_steps=20 if streams == "eager" else 5)


def test_the_validated_architectures_are_the_tested_ones() -> None:
    assert set(tiny.ARCHITECTURES.values()) <= set(validated_model_types())


def test_autocast_to_bf16_over_an_fp32_base(streams: str) -> None:
    check_cell(
        streams, dtype=torch.float32, autocast_dtype=torch.bfloat16, num_steps=4, accumulation=2
    )


@pytest.mark.parametrize("slots", [2, 3, 7])
@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
def test_block_sizes_and_slots(
    block_size: int, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Seven layers, so that the last block is a short one; all of them in one block at the end."""
    num_blocks = -(-7 // block_size)
    with caplog.at_level(logging.WARNING, logger="poros"):
        report = check_cell("eager", num_layers=7, block_size=block_size, slots=slots, num_steps=2)
    assert report.stats["num_blocks"] == num_blocks
    assert report.stats["num_slots"] == min(slots, num_blocks)
    # A warning names the clamp; there is none without one.
    clamps = [each.getMessage() for each in caplog.records if "slots=" in each.getMessage()]
    expected = f"poros: slots={slots} is more than the {num_blocks} blocks; using {num_blocks}"
    assert clamps == ([expected] if slots > num_blocks else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@pytest.mark.parametrize(("block_size", "slots"), [(1, 3), (2, 2)])
def test_every_validated_architecture_wider(name: str, block_size: int, slots: int) -> None:
    options = {"num_layers": 8, "hidden_size": 256, "num_tokens": 64, "accumulation": 2}
    check_cell("eager", name, num_steps=20, block_size=block_size, slots=slots, **options)


def test_policy_changes_no_bit_and_runs_repeat(tmp_path: Path) -> None:
    """Whatever the policy, one hash of the trajectory; the record says where it was made."""
    reports = [
        check_cell("eager", num_steps=2, block_size=block_size, slots=slots)
        for block_size, slots in ((1, 2), (1, 2), (2, 2), (1, 4))
    ]
    assert len({report.hashes["resident"] for report in reports}) == 1
    assert len({report.hashes["streamed"] for report in reports}) == 1
    other = check_cell("eager", num_steps=2, seed=1)
    assert other.hashes["streamed"] != reports[0].hashes["streamed"]
    reports[0].write(tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["exact"] is True and record["num_differences"] == 0
    assert {"torch", "transformers", "peft", "bitsandbytes", "poros"} <= set(
        record["environment"]["versions"]
    )
    assert record["environment"]["num_threads"] == 1
    assert record["hashes"]["resident"] == record["hashes"]["streamed"]
    assert len(record["hashes"]["streamed"]) == len(record["hashes"]["start"]) == 64
    assert record["stats"]["num_loads"] == reports[0].stats["num_loads"] > 0


# Negative controls: each fault has to fail the gate, alone with it: the self-check is off.


def run_faulty(prepare: Prepare = poros.prepare, **options: Any) -> ParityReport:
    options = {**SMALL, "num_steps": 2, "device": "cpu", "self_check": "off", **options}
    report = check_architecture("qwen2", prepare=prepare, **options)
    assert not report.exact
    return report


def test_control_random_states_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RngStash, "replay", lambda self: nullcontext())
    error = run_faulty().error or ""
    assert "RematerializationError" in error and "random numbers" in error
    # Without the runtime's own check of a recomputation, the gate is alone with the fault.
    monkeypatch.setattr(RngStash, "equals", lambda self, other: True)
    report = run_faulty()
    assert report.error is None and report.resident_repeats is True
    assert report.differences[0].name.startswith("step 0, gradient of")
    assert report.tallies["RNG end state"].num_differing_tensors == 1
    # Without dropout nothing is drawn, and the same fault has no effect.
    assert check_architecture("qwen2", **SMALL, num_steps=2, device="cpu", dropout=0.0).exact


def test_control_another_dropout_seed() -> None:
    def reseed(model: Any, **options: Any) -> Any:
        def once(*_: Any) -> None:
            torch.manual_seed(1)
            handle.remove()

        handle = model.register_forward_pre_hook(once)
        return poros.prepare(model, **options)

    report = run_faulty(reseed)
    assert report.differences[0].name == "step 0, loss of micro-batch 0"
    assert report.tallies["RNG end state"].num_differing_tensors == 1


@pytest.mark.parametrize(
    "ending", ["q_proj.base_layer.weight", "absmax", "nested_absmax", "bias", "layernorm.weight"]
)
def test_control_one_flipped_nibble_in_the_host_copy(ending: str) -> None:
    """In each kind of tensor that travels or stays: were one not read, nothing would show."""

    def flip(model: Any, **options: Any) -> Any:
        poros.prepare(model, **options)
        takeover = poros.runtime(model)
        slab = takeover.host.slabs[2]
        found = {spec.name: slab.tensor(spec) for spec in slab.layout.tensors}
        found |= {name: each.data for name, each in model.named_parameters()}
        found |= takeover.small.nested
        name = next(n for n in found if ".layers.2." in n and n.endswith(ending))
        # The highest nibble of the tensor's first element: of its exponent, if it is a float.
        tensor = found[name].view(-1)
        tensor.view(torch.uint8)[tensor.element_size() - 1] ^= 0x10
        return model

    report = run_faulty(flip)
    assert report.error is None and report.resident_repeats is True
    assert report.differences[0].name.startswith("step 0, ")
    assert report.tallies["start bytes"].num_differing_tensors == 0


def test_control_a_block_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(model: Any, **options: Any) -> Any:
        poros.prepare(model, **options)
        slabs = poros.runtime(model).host.slabs
        slabs[1], slabs[3] = slabs[3], slabs[1]
        return model

    assert run_faulty(swap).differences[0].name == "step 0, loss of micro-batch 0"
