"""The gate itself: it passes equal runs, and fails on every fault, with the reason.

In place of a streamed model stand the identity and hand-made faults. The reference run, which it
compares with, repeats itself, records what it says, and shows every change.
"""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.errors import CheckpointFormatError, UnsupportedModelError
from poros.gates import tiny
from poros.gates.parity import check_architecture, check_model_dir, run_parity
from poros.gates.reference import TrainingSpec, Trajectory, compare_steps, train
from poros.gates.report import ParityReport, render
from poros.stream.boundary import detach_layer
from poros.utils.devices import default_device
from tests.command import rendered
from tests.comparing import QUANTITIES, compare_mappings, compare_trajectories
from tests.covers import with_slow
from tests.loops import flip_nibble
from tests.replaced import raising
from tests.support import damaged, make_model, prepare_plain


def build(**changes: Any) -> Any:
    return make_model(**{"num_layers": 2, "dropout": 0.05, **changes})


# The reference run.


def run(model: Any = None, **changes: Any) -> Trajectory:
    spec = TrainingSpec(**{"num_steps": 3, "accumulation": 2, **changes})
    return train(model or build(), tiny.make_batches(6), spec)


@pytest.fixture(scope="module")
def expected() -> Trajectory:
    return run()


def test_it_repeats_itself_and_records_every_quantity(expected: Trajectory) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = run()
    assert torch.equal(before, torch.get_rng_state()), "the caller's is left alone"
    comparisons = list(compare_steps(expected, again))
    assert all(each.difference is None for each in comparisons)
    num = {q: sum(c.quantity == q for c in comparisons) for q in QUANTITIES}
    num_parameters = 2 * 7 * 2  # layers, projections, A and B
    per_parameter = ("gradients", "adapter weights", "exp_avg", "exp_avg_sq")
    assert num == {
        "loss": 3 * 2,
        "grad norm": 3,
        "RNG end state": 1,
        **dict.fromkeys(per_parameter, 3 * num_parameters),
    }
    assert len({entry.name for entry in expected.entries()}) == len(comparisons)
    for step in expected.steps:
        assert all(bool(gradient.any()) for gradient in step.gradients.values())
        # Gradients are recorded before they are clipped.
        squares = sum(float(g.double().square().sum()) for g in step.gradients.values())
        assert step.grad_norm is not None and float(step.grad_norm) > 1.0, "nothing is clipped"
        assert squares**0.5 == pytest.approx(float(step.grad_norm), rel=1e-5)


CONTROLS: dict[str, tuple[dict[str, Any], dict[str, Any], str, set[str]]] = {
    "seed": ({}, {"seed": 1}, "step 0, loss of micro-batch 0", set(QUANTITIES)),
    # The changed weights have to reach the next loss; no random number is another.
    "learning rate": (
        *({}, {"lr": 1.0001e-3}, "step 0, weight base_model.model.model.layers.0."),
        set(QUANTITIES) - {"RNG end state"},
    ),
    "no dropout": ({"dropout": 0.0}, {}, "step 0, ", {"RNG end state"}),
    "autocast": ({}, {"autocast_dtype": torch.bfloat16}, "step 0, ", {"loss"}),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_control_another_run(which: str, expected: Trajectory) -> None:
    of_model, of_run, first, wanted = CONTROLS[which]
    found = run(build(**of_model), **of_run)
    assert compare_trajectories(expected, found)[0].name.startswith(first)
    quantities = {c.quantity for c in compare_steps(expected, found) if c.difference is not None}
    assert wanted <= quantities and (which != "learning rate" or wanted == quantities)


def test_control_one_more_step_is_reported_as_extra(expected: Trajectory) -> None:
    differences = compare_trajectories(expected, run(num_steps=4))
    extra = [d for d in differences if d.kind == "extra"]
    assert extra and all(d.name.startswith("step 3, ") for d in extra)
    assert {d.name for d in differences} - {d.name for d in extra} == {"end, RNG state of cpu"}
    missing = compare_trajectories(run(num_steps=4), expected)
    assert {d.kind for d in missing} == {"missing", "value"}


# The small models.


@pytest.mark.parametrize("name", ("qwen2", "phi3", "gemma3"))
def test_small_models_are_repeatable_and_no_two_layers_alike(name: str) -> None:
    """All projections are adapted: ``check_not_vacuous`` of ``trainers``."""
    models = [tiny.make_model(name, num_layers=2, seed=seed) for seed in (0, 0, 1)]
    states = [model.state_dict() for model in models]
    assert compare_mappings(*states[:2]) == [] and len(compare_mappings(*states[1:])) > 30
    norms = [each.input_layernorm.weight for each in models[0].get_base_model().model.layers]
    assert not torch.equal(*norms), "layers that look alike would hide a mix-up"


# The gate.


def same(model: Any, **_: Any) -> Any:
    return model


def gate(
    prepare: Callable[..., Any], make: Callable[[], Any] = build, **options: Any
) -> ParityReport:
    spec = TrainingSpec(num_steps=2)
    options.setdefault("is_control", prepare in (same, flip_nibble))
    return run_parity(make, tiny.make_batches(2), spec, prepare, **options)


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
    text = rendered(render, report)
    assert "EXACT: two resident runs: 0 differing bits" in text
    assert all(quantity in text for quantity in report.tallies)


def test_gate_rejects_a_changed_base_and_says_where_it_begins() -> None:
    report = gate(flip_nibble)
    assert not report.exact and report.resident_repeats is True
    assert report.differences[0].name.startswith("step 0, ")
    assert report.num_differences > len(report.differences) == 50
    assert report.tallies["adapter weights"].num_differing_elements > 0
    assert report.verdict().startswith("DIFFERENT") and "step 0, " in rendered(render, report)


def all_but_one(model: Any) -> Any:
    detach_layer(prepare_plain(model).get_base_model().model.layers[1])
    return model


def one_load_more(model: Any) -> Any:
    model = prepare_plain(model, self_check="off")
    stats = poros.runtime(model).stats
    poros.runtime(model).stats = lambda: {**stats(), "num_loads": stats()["num_loads"] + 1}
    return model


def head_filled_with(value: float) -> Callable[[], Any]:
    def make() -> Any:
        model = build()
        model.get_base_model().lm_head.weight.data.fill_(value)
        return model

    return make


SEEDS = iter((0, 1))
WRONG: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "a second arm that is not streamed": (lambda model: model, build, "PreparedModelError"),
    "one layer that is not streamed": (all_but_one, build, "1 of 2 decoder layers"),
    "other loads than a zigzag makes": (one_load_more, build, "loaded 3 blocks, a zigzag loads 2"),
    "other bytes": (same, lambda: build(seed=next(SEEDS)), "start from different bytes"),
    "an arm that raises": (
        *(raising(RuntimeError, "a slot is in use"), build),
        "streamed arm raised RuntimeError: a slot is in use",
    ),
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
    numbers = count(1)

    def drift(module: Any, args: Any, output: Any) -> None:
        output.loss = output.loss * (1 + next(numbers) / 1024)

    def make() -> Any:
        model = build()
        model.register_forward_hook(drift)
        return model

    report = gate(same, make)
    assert report.resident_repeats is False and not report.exact
    assert report.verdict().startswith("UNDECIDED")


@pytest.mark.parametrize("adapter", ["ia3", "prompt_tuning"])
def test_the_gate_of_a_kind_of_adapter_can_fail(adapter: str) -> None:
    """Also of those that PEFT trains on dense weights or under autocast alone."""
    options: dict[str, Any] = {"num_steps": 2, "num_layers": 3, "adapter": adapter}
    report = check_architecture("qwen2", **options)
    assert report.exact and report.subject == f"qwen2 with {adapter}"
    assert report.settings["adapter"] == adapter

    report = check_architecture("qwen2", prepare=damaged, slots=2, **options)
    assert not report.exact and report.differences[0].name.startswith("step 0, ")


@pytest.mark.slow
def test_the_gate_lets_adalora_cut_ranks_in_both_arms() -> None:
    options: dict[str, Any] = {"num_steps": 3, "num_layers": 2, "adapter": "adalora"}
    patterns = []

    def watch(model: Any, **policy: Any) -> Any:
        reallocate = model.base_model.update_and_allocate

        def note(index: int) -> None:
            reallocate(index)
            patterns.append(model.peft_config["default"].rank_pattern)

        model.base_model.update_and_allocate = note
        assert policy["device"] == default_device().type, "that of the resident arm"
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

    report = check_model_dir(tmp_path, num_steps=1, prepare=damaged)
    assert not report.exact and report.differences[0].name.startswith("step 0, ")


def test_check_model_dir_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="nothing"):
        check_model_dir(tmp_path / "nothing", prepare=same)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 64}))
    with pytest.raises(CheckpointFormatError, match=r"expected model\.safetensors"):
        check_model_dir(tmp_path, prepare=same)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointFormatError, match=r"config\.json"):
        check_model_dir(tmp_path, prepare=same)


@pytest.mark.parametrize("kernels", with_slow(["fused", "grouped"], ["fused"]))
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
