"""Several adapters on one model, switched, added, deleted and loaded, before and after prepare.

A scenario is a list of calls a user makes. It is run on a resident model, and again with
``poros.prepare`` before its first call and half way through (in the slow tests before each of its
calls); whatever the calls compute has the same bits.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import poros
from poros.gates.reference import Trajectory
from tests.snapshots import assert_same_run, batches, bf16, bits_of, build, changes, digest, run

Call = Callable[[Any], object]

OTHER = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "layers_to_transform": [0, 2]},
    "lora bias": {"lora_bias": True, "target_modules": ["k_proj"]},
}


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{**OTHER, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options})


def add(name: str, **options: Any) -> Call:
    def call(model: Any) -> None:
        torch.manual_seed(len(name))
        model.add_adapter(name, config(**options))

    return call


def use(name: str) -> Call:
    return lambda model: model.set_adapter(name)


def delete(name: str) -> Call:
    return lambda model: model.delete_adapter(name)


def train(model: Any) -> Trajectory:
    """Two steps of the adapters that are active now."""
    before = {name: digest(each) for name, each in model.named_parameters()}
    trajectory = run(model)
    trained = {name for name, each in model.named_parameters() if digest(each) != before[name]}
    assert trained == set(trajectory.steps[0].gradients), "the optimizer missed a parameter"
    assert trained
    return trajectory


def look(model: Any) -> object:
    """The outputs in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return digest(model(**batches()[1]).logits)


def compare(
    scenario: Sequence[Call],
    make: Callable[[], Any] = build,
    places: Sequence[int] | None = None,
    **policy: Any,
) -> list[object]:
    """Run the scenario resident, then prepared at ``places``; what it computed."""
    resident = make()
    expected = [call(resident) for call in scenario]
    for place in places or (0, len(scenario) // 2):
        model = make()
        found = [call(model) for call in scenario[:place]]
        poros.prepare(model, **policy)
        found += [call(model) for call in scenario[place:]]
        for wanted, got in zip(expected, found, strict=True):
            if isinstance(wanted, Trajectory):
                assert isinstance(got, Trajectory)
                assert_same_run(wanted, got)
            else:
                assert got == wanted, f"prepared before call {place}"
        assert poros.runtime(model).stats()["num_loads"] > 0
        assert changes(bits_of(resident), bits_of(model)) == {}
    return expected


def differ(*seen: object) -> None:
    """The scenario shows something only if its outputs change."""
    assert len(set(map(str, seen))) == len(seen)


def one_then_another(kind: str) -> list[Call]:
    calls = [train, add("b", **KINDS[kind]), use("b"), look, train, use("default"), look, train]
    return [*calls, look]


@pytest.mark.parametrize("kind", KINDS)
def test_training_one_adapter_then_another(kind: str) -> None:
    seen = compare(one_then_another(kind))
    differ(*(each for each in seen if isinstance(each, tuple)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prepare_anywhere_between_the_calls(kind: str) -> None:
    calls = one_then_another(kind)
    compare(calls, places=range(len(calls)))
    deleting = [add("b"), use("b"), train, delete("b"), add("b", **KINDS[kind]), use("b"), train]
    compare(deleting, places=range(len(deleting)))


def test_deleting_the_active_adapter() -> None:
    compare([add("b"), use("b"), train, delete("b"), use("default"), look, train])


def test_deleting_an_adapter_that_is_not_active() -> None:
    compare([add("b"), train, delete("b"), train, look])


def test_an_adapter_of_the_same_name_again() -> None:
    compare([add("b"), use("b"), train, delete("b"), add("b", r=5), use("b"), train, look])


def test_two_adapters_at_once() -> None:
    both: Call = lambda model: model.base_model.set_adapter(["default", "b"])  # noqa: E731
    expected = compare([add("b"), both, train, look, use("b"), look])
    trajectory = expected[2]
    assert isinstance(trajectory, Trajectory)
    names = "".join(trajectory.steps[0].gradients)
    assert ".default." in names and ".b." in names


def test_a_weighted_sum_of_adapters() -> None:
    def combine(model: Any) -> None:
        model.add_adapter("c", config(r=8, lora_alpha=16, target_modules=["q_proj", "up_proj"]))
        model.add_weighted_adapter(["b", "c"], [0.7, 0.3], "sum", combination_type="cat")

    compare([add("b"), use("b"), train, combine, use("sum"), look, train, look])


def test_different_saved_modules() -> None:
    options = {"modules_to_save": ["lm_head", "input_layernorm"]}

    def make() -> Any:
        torch.manual_seed(4)
        # A norm in bf16 is too coarse to change in two steps.
        return get_peft_model(build(dtype=torch.float32).unload(), config(**options))

    compare([train, add("b", **options), use("b"), train, look, use("default"), look], make)


@pytest.mark.parametrize("trainable", [True, False])
def test_loading_an_adapter(trainable: bool, tmp_path: Path) -> None:
    torch.manual_seed(6)
    other = get_peft_model(build().unload(), config())
    run(other)
    other.save_pretrained(tmp_path)

    def load(model: Any) -> None:
        model.load_adapter(tmp_path, "b", is_trainable=trainable)

    calls = [train, load, use("b"), look] + [train] * trainable + [use("default"), train, look]
    seen = compare(calls)
    differ(*(each for each in seen if isinstance(each, tuple)))


def test_every_adapter_is_saved_as_a_resident_model_saves_it(tmp_path: Path) -> None:
    folders = []
    for name in ("resident", "streamed"):
        model = build()
        if name == "streamed":
            poros.prepare(model)
        for call in (train, add("b", use_dora=True), use("b"), train):
            call(model)
        model.save_pretrained(tmp_path / name)
        folders.append(sorted((tmp_path / name).rglob("adapter_*")))
    resident, streamed = folders
    assert len(resident) == len(streamed) == 4
    for left, right in zip(resident, streamed, strict=True):
        assert left.name == right.name
        assert left.read_bytes() == right.read_bytes()
    plain = PeftModel.from_pretrained(build().unload(), tmp_path / "streamed" / "b", "b")
    assert look(plain) == look(model)


def reference(model: Any) -> torch.Tensor:
    """The outputs of the base, as a preference loss needs them."""
    with torch.no_grad(), model.disable_adapter():
        found: torch.Tensor = model(**batches()[1]).logits
    return found


def preference_step(model: Any, order: str) -> dict[str, object]:
    """One step of a loss against the base, with the reference pass before or after the policy's."""
    model.train()
    model.zero_grad()
    torch.manual_seed(5)
    base = reference(model) if order == "before" else None
    policy = model(**batches()[1]).logits
    if order == "between":
        base = reference(model)
    elif order == "between, under grad":
        with model.disable_adapter():
            base = model(**batches()[1]).logits
        assert not base.requires_grad
    assert base is not None
    loss = (policy.log_softmax(-1) - base.log_softmax(-1)).square().mean()
    loss.backward()
    gradients = {n: digest(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert gradients
    random_state = digest(torch.get_rng_state())
    return {"loss": digest(loss), "base": digest(base), "random": random_state, **gradients}


@pytest.mark.parametrize("order", ["before", "between", "between, under grad"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_reference_pass_with_the_adapter_disabled(order: str, autocast: bool) -> None:
    def step(model: Any) -> dict[str, object]:
        if not autocast:
            return preference_step(model, order)
        with bf16():
            return preference_step(model, order)

    compare([step, train, step])


@pytest.mark.parametrize("order", ["before", "between"])
def test_a_reference_pass_with_another_adapter(order: str) -> None:
    """What TRL does for a model that comes with an adapter: a frozen copy of its start."""

    def other(model: Any) -> torch.Tensor:
        with torch.no_grad():
            model.set_adapter("ref")
            found: torch.Tensor = model(**batches()[1]).logits
            model.set_adapter("default")
        return found

    def step(model: Any) -> dict[str, object]:
        model.train()
        model.zero_grad()
        torch.manual_seed(5)
        base = other(model) if order == "before" else None
        policy = model(**batches()[1]).logits
        base = other(model) if base is None else base
        loss = (policy - base).square().mean()
        loss.backward()
        return {n: digest(p.grad) for n, p in model.named_parameters() if p.grad is not None}

    compare([add("ref"), step, train, step])


def test_disabling_adapters_changes_what_comes_out() -> None:
    model = poros.prepare(build())
    assert not torch.equal(reference(model), model.eval()(**batches()[1]).logits)


def test_disabling_all_adapter_layers_and_enabling_them_again() -> None:
    def off(model: Any) -> None:
        model.base_model.disable_adapter_layers()

    def on(model: Any) -> None:
        model.base_model.enable_adapter_layers()

    seen = compare([look, off, look, on, train, look])
    differ(seen[0], seen[2], seen[5])


def cast(model: Any) -> None:
    """As trainers do: the same parameter objects, with new memory in another dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [True, False])
def test_adapters_cast_while_prepared(dtype: torch.dtype, quantize: bool) -> None:
    def make() -> Any:
        return build(dtype=dtype, quantize=quantize)

    def dtypes(model: Any) -> object:
        return {str(each.dtype) for each in model.parameters() if each.requires_grad}

    seen = compare([dtypes, cast, dtypes, train, look], make)
    assert seen[2] == {"torch.bfloat16"} != seen[0]
    # Later too, between steps, when the layers have been streamed and checked already.
    seen = compare([train, cast, train, look], make)


def test_adapters_cast_while_prepared_under_autocast() -> None:
    def under_autocast(model: Any) -> Trajectory:
        return run(model, autocast_dtype=torch.bfloat16)

    compare([cast, under_autocast, look], lambda: build(dtype=torch.float32))


@pytest.mark.parametrize("block_size", [1, 2])
def test_switching_adapters_with_blocks_of_several_layers(block_size: int) -> None:
    calls = [train, add("b"), use("b"), train, use("default"), train]
    compare(calls, block_size=block_size, slots=2)


def test_control_an_adapter_that_is_not_switched_shows() -> None:
    resident, model = build(), poros.prepare(build())
    for each in (resident, model):
        add("b")(each)
    use("b")(resident)
    assert look(resident) != look(model)
