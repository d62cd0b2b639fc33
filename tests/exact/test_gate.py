"""The gate itself: it passes equal runs, and fails on every fault, with the reason.

In place of a streamed model stand the identity and hand-made faults.
"""

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import poros
from poros.errors import CheckpointFormatError, UnsupportedModelError
from poros.gates import tiny
from poros.gates.parity import check_architecture, check_model_dir, run_parity
from poros.gates.reference import TrainingSpec
from poros.gates.report import ParityReport, render
from poros.stream.boundary import detach_layer
from tests.comparing import QUANTITIES
from tests.loops import flip_nibble
from tests.support import make_model, prepare_plain


def build(**changes: Any) -> Any:
    return make_model(num_layers=2, dropout=0.05, **changes)


def same(model: Any, **_: Any) -> Any:
    return model


def gate(
    prepare: Callable[..., Any], make: Callable[[], Any] = build, **options: Any
) -> ParityReport:
    spec = TrainingSpec(num_steps=2)
    options.setdefault("is_control", prepare in (same, flip_nibble))
    return run_parity(make, tiny.make_batches(2), spec, prepare, **options)


def text_of(report: ParityReport) -> str:
    console = Console(file=StringIO(), width=200)
    render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_gate_accepts_an_equal_run_and_writes_its_record(tmp_path: Path) -> None:
    report = gate(same, subject="two resident runs")
    assert report.exact and report.error is None and report.resident_repeats is None
    assert set(report.tallies) == {*QUANTITIES}
    assert all(tally.num_elements > 0 for tally in report.tallies.values())
    report.write(tmp_path / "deep" / "record.json")
    record = json.loads((tmp_path / "deep" / "record.json").read_text())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["record.json"]
    assert record["exact"] is True and record["environment"]["num_threads"] == 1
    versions = {"torch", "transformers", "peft", "bitsandbytes", "accelerate", "poros", "python"}
    assert versions == set(record["environment"]["versions"])
    assert record["settings"]["training"]["num_steps"] == 2
    text = text_of(report)
    assert "EXACT: two resident runs: 0 differing bits" in text
    assert all(quantity in text for quantity in report.tallies)


def test_gate_rejects_a_changed_base_and_says_where_it_begins() -> None:
    report = gate(flip_nibble)
    assert not report.exact and report.resident_repeats is True
    assert report.differences[0].name.startswith("step 0, ")
    assert report.num_differences > len(report.differences) == 50
    assert report.tallies["adapter weights"].num_differing_elements > 0
    assert report.verdict().startswith("DIFFERENT") and "step 0, " in text_of(report)


def all_but_one(model: Any) -> Any:
    detach_layer(prepare_plain(model).get_base_model().model.layers[1])
    return model


def one_load_more(model: Any) -> Any:
    model = prepare_plain(model, self_check="off")
    stats = poros.runtime(model).stats

    def more() -> dict[str, Any]:
        return {**stats(), "num_loads": stats()["num_loads"] + 1}

    poros.runtime(model).stats = more  # type: ignore[method-assign]
    return model


def head_filled_with(value: float) -> Callable[[], Any]:
    def make() -> Any:
        model = build()
        model.get_base_model().lm_head.weight.data.fill_(value)
        return model

    return make


def explode(model: Any) -> Any:
    raise RuntimeError("slot 1 is IN_USE")


SEEDS = iter((0, 1))
WRONG: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "a second arm that is not streamed": (lambda model: model, build, "PreparedModelError"),
    "one layer that is not streamed": (all_but_one, build, "1 of 2 decoder layers"),
    "other loads than a zigzag makes": (one_load_more, build, "loaded 3 blocks, a zigzag loads 2"),
    "other bytes": (same, lambda: build(seed=next(SEEDS)), "start from different bytes"),
    "an arm that raises": (explode, build, "streamed arm raised RuntimeError: slot 1 is IN_USE"),
    "a resident arm that raises": (
        *(same, lambda: build().requires_grad_(False), "resident arm raised"),
    ),
    # Equalities that could not have failed.
    "no gradients": (same, head_filled_with(0.0), "only have zero gradients"),
    "no numbers": (same, head_filled_with(float("nan")), "not finite"),
}


@pytest.mark.parametrize("which", WRONG)
def test_gate_refuses(which: str) -> None:
    prepare, make, reason = WRONG[which]
    report = gate(prepare, make)
    assert not report.exact and reason in (report.error or "")
    assert report.num_differences == 0 and report.verdict().startswith("FAILED")


def test_gate_calls_an_unrepeatable_machine_undecided() -> None:
    num_calls = 0

    def drift(module: Any, args: Any, output: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        output.loss = output.loss * (1 + num_calls / 1024)

    def make() -> Any:
        model = build()
        model.register_forward_hook(drift)
        return model

    report = gate(same, make)
    assert report.resident_repeats is False and not report.exact
    assert report.verdict().startswith("UNDECIDED")


def test_check_architecture_passes_the_policy_on() -> None:
    seen: dict[str, Any] = {}

    def note(model: Any, **policy: Any) -> Any:
        seen.update(policy)
        return prepare_plain(model, **policy)

    report = check_architecture("llama", num_steps=1, num_layers=2, prepare=note, block_size=2)
    assert report.exact and report.subject == "llama"
    assert seen.pop("device") == report.settings["device"]
    # The other arm is plain transformers.
    compared = {"loss": "reference", "adapter_kernels": "fused"}
    assert seen == {"block_size": 2, **compared}
    assert report.settings["policy"] == {"block_size": 2}


@pytest.mark.parametrize("adapter", ["ia3", "prompt_tuning"])
def test_the_gate_of_a_kind_of_adapter_can_fail(adapter: str) -> None:
    """Also of those that PEFT trains on dense weights or under autocast alone."""
    options: dict[str, Any] = {"num_steps": 2, "num_layers": 3, "adapter": adapter}
    report = check_architecture("qwen2", **options)
    assert report.exact and report.subject == f"qwen2 with {adapter}"
    assert report.settings["adapter"] == adapter

    def corrupt(model: Any, **policy: Any) -> Any:
        model = prepare_plain(model, **{**policy, "self_check": "off"}, slots=2)
        poros.runtime(model).host_slab(1)[4000] ^= 0x40
        return model

    report = check_architecture("qwen2", prepare=corrupt, **options)
    assert not report.exact and report.differences[0].name.startswith("step 0, ")


def test_the_gate_lets_adalora_cut_ranks_in_both_arms() -> None:
    options: dict[str, Any] = {"num_steps": 3, "num_layers": 2, "adapter": "adalora"}
    patterns = []

    def watch(model: Any, **policy: Any) -> Any:
        reallocate = model.base_model.update_and_allocate

        def note(index: int) -> None:
            reallocate(index)
            patterns.append(model.peft_config["default"].rank_pattern)

        model.base_model.update_and_allocate = note
        return prepare_plain(model, **policy)

    assert check_architecture("qwen2", prepare=watch, **options).exact
    kept = [each for pattern in patterns if pattern for ranks in pattern.values() for each in ranks]
    assert len(patterns) == 3 and True in kept and False in kept

    def without(model: Any, **policy: Any) -> Any:
        model.base_model.update_and_allocate = lambda index: None
        return prepare_plain(model, **policy)

    report = check_architecture("qwen2", prepare=without, **options)
    assert not report.exact and "weight" in report.differences[0].name


def test_the_gate_refuses_adapters_that_peft_has_replaced() -> None:
    """PEFT's 4-bit layers pass over some variants of LoRA without a word."""
    with pytest.raises(UnsupportedModelError, match=r"'kasa'.*attached lora"):
        check_architecture("qwen2", adapter="kasa", quantize=True, num_layers=2, prepare=same)
    with pytest.raises(UnsupportedModelError, match=r"'qalora'.*lora, dora, .*vera"):
        check_architecture("qwen2", adapter="qalora", prepare=same)


def test_check_model_dir_checks_a_checkpoint_on_disk(tmp_path: Path) -> None:
    config = tiny.small_config("mistral", num_layers=2)
    tiny.write_checkpoint(config, tmp_path, dtype=torch.float32)
    assert check_model_dir(tmp_path, num_steps=1).exact
    report = check_model_dir(tmp_path, num_steps=1, adapter="trainable_tokens")
    assert report.exact and report.subject == f"{tmp_path} with trainable_tokens", report.error

    def flip_and_prepare(model: Any, **policy: Any) -> Any:
        # The self-check would see it at once.
        return prepare_plain(flip_nibble(model), **{**policy, "self_check": "off"})

    report = check_model_dir(tmp_path, num_steps=1, prepare=flip_and_prepare)
    assert not report.exact and report.differences[0].name.startswith("step 0, ")


def test_check_model_dir_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        check_model_dir(tmp_path / "nothing", prepare=same)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 64}))
    with pytest.raises(CheckpointFormatError, match=r"expected model\.safetensors"):
        check_model_dir(tmp_path, prepare=same)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointFormatError, match=r"config\.json"):
        check_model_dir(tmp_path, prepare=same)


@pytest.mark.parametrize("kernels", ["fused", "grouped"])
def test_it_compares_with_a_resident_run_of_the_same_kernels(kernels: str) -> None:
    """Of DoRA, and of LoRA in groups, whose bits are not PEFT's."""
    small: dict[str, Any] = {"num_steps": 2, "num_layers": 2, "hidden_size": 64}
    if kernels == "fused":
        small["adapter"] = "dora"
    else:  # which have no dropout, and multiply in the dtype of the base
        small |= {"dropout": 0.0, "autocast_dtype": torch.bfloat16}
    for each in (kernels, "peft"):
        report = check_architecture("qwen2", adapter_kernels=each, **small)
        assert report.exact, report.error

    def without_ours(model: Any, **policy: Any) -> Any:
        return poros.prepare(model, **{**policy, "adapter_kernels": "peft", "slots": 2})

    report = check_architecture("qwen2", prepare=without_ours, adapter_kernels=kernels, **small)
    assert not report.exact and report.num_differences > 0 and report.resident_repeats
