"""Several adapters on one model, switched, added, deleted and loaded, before and after prepare.

A scenario is a list of calls a user makes. It is run on a resident model, and again with
``poros.prepare`` before its first call or half way through (in the slow tests both, and before each
of its calls); whatever the calls compute has the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.gates.reference import Trajectory
from tests.exact import programs as P
from tests.exact import subjects as S
from tests.exact.arms import Bases, Model, Residents, Subject, facts_of, streamed
from tests.snapshots import batches, bf16, bits_of, changes, digest, run
from tests.support import make_base

Call = Callable[[Model], object]

OTHER = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "layers_to_transform": [0, 2]},
    "lora bias": {"lora_bias": True, "target_modules": ["k_proj"]},
}


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{**OTHER, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options})


# Calls.


def add(name: str, **options: Any) -> Call:
    def call(model: Model) -> None:
        torch.manual_seed(len(name))
        model.add_adapter(name, config(**options))

    return call


def use(name: str) -> Call:
    return lambda model: model.set_adapter(name)


def delete(name: str) -> Call:
    return lambda model: model.delete_adapter(name)


def both(model: Model) -> None:
    model.base_model.set_adapter(["default", "b"])


def train(model: Model, **spec: Any) -> Trajectory:
    """A step of the adapters that are active now."""
    before = {name: digest(each) for name, each in model.named_parameters()}
    trajectory = run(model, 1, **spec)
    trained = {name for name, each in model.named_parameters() if digest(each) != before[name]}
    assert trained == set(trajectory.steps[0].gradients), "the optimizer missed a parameter"
    assert trained
    return trajectory


def look(model: Model) -> object:
    """The outputs in evaluation mode."""
    with torch.no_grad():
        return {"outputs": digest(model.eval()(**batches()[1]).logits)}


def saved(model: Model) -> object:
    """The files of all adapters."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(Path(folder).rglob("adapter_*"))
        found = {str(each.relative_to(folder)): each.read_bytes() for each in files}
    assert len(found) == 2 * len(model.peft_config)
    return {f"file {name}": content for name, content in found.items()}


def load(trainable: bool) -> Call:
    """A trained adapter of another model, from its files."""

    def call(model: Model) -> None:
        torch.manual_seed(6)
        other = get_peft_model(make_base(num_layers=3, hidden_size=64, dropout=0.05), config())
        run(other)
        with TemporaryDirectory() as folder:
            other.save_pretrained(folder)
            model.load_adapter(folder, "b", is_trainable=trainable)

    return call


def combine(model: Model) -> None:
    model.add_adapter("c", config(r=8, lora_alpha=16, target_modules=["q_proj", "up_proj"]))
    model.add_weighted_adapter(["b", "c"], [0.7, 0.3], "sum", combination_type="cat")


def off(model: Model) -> None:
    model.base_model.disable_adapter_layers()


def on(model: Model) -> None:
    model.base_model.enable_adapter_layers()


def cast(model: Model) -> None:
    """As trainers do: the same parameter objects, with new memory in another dtype."""
    for parameter in P.trained(model).values():
        parameter.data = parameter.data.to(torch.bfloat16)


def dtypes(model: Model) -> object:
    return sorted({str(each.dtype) for each in P.trained(model).values()})


def logits(model: Model) -> torch.Tensor:
    return model(**batches()[1]).logits  # type: ignore[no-any-return]


def of_the_base(model: Model) -> torch.Tensor:
    """The outputs of the base, as a preference loss needs them."""
    with torch.no_grad(), model.disable_adapter():
        return logits(model)


def of_the_base_under_grad(model: Model) -> torch.Tensor:
    with model.disable_adapter():
        base = logits(model)
    assert not base.requires_grad
    return base


def of_another(model: Model) -> torch.Tensor:
    """What TRL does for a model that comes with an adapter: a frozen copy of its start."""
    with torch.no_grad():
        model.set_adapter("ref")
        base = logits(model)
        model.set_adapter("default")
    return base


def preference(reference: Callable[[Model], torch.Tensor], *, is_first: bool = False) -> Call:
    """One step of a loss against a reference pass before or behind the policy's."""

    def step(model: Model) -> object:
        model.train()
        model.zero_grad()
        torch.manual_seed(5)
        base = reference(model) if is_first else None
        policy = logits(model)
        base = reference(model) if base is None else base
        loss = (policy.log_softmax(-1) - base.log_softmax(-1)).square().mean()
        loss.backward()
        return loss, base, torch.get_rng_state(), P.gradients_now(model)

    return step


def under_autocast(call: Call) -> Call:
    def region(model: Model) -> object:
        with bf16():
            return call(model)

    return region


# Scenarios.

LATER: list[Call] = [use("b"), look, train, use("default"), look, train, look]
OTHERWISE: list[Call] = [train, add("b"), use("b"), train, use("default"), train]
SAVED = {"modules_to_save": ["lm_head", "input_layernorm"]}


def saving_modules(bases: Bases) -> Model:
    # A norm in bf16 is too coarse to change in two steps.
    base = bases.base(dtype=torch.float32)
    torch.manual_seed(4)
    return get_peft_model(base, config(**SAVED))


def scenarios() -> Iterator[tuple[str, list[Call], Subject, dict[str, Any]]]:
    for kind, options in KINDS.items():
        yield f"one, then another: {kind}", [train, add("b", **options), *LATER], S.PLAIN, {}
    start = [add("b"), use("b"), train]
    ends: dict[str, list[Call]] = {
        "the active one deleted": [*start, delete("b"), use("default"), look, train],
        "another deleted": [add("b"), train, delete("b"), train, look],
        "the same name again": [*start, delete("b"), add("b", r=5), use("b"), train, look],
        "two at once": [add("b"), both, train, look, use("b"), look],
        "a weighted sum": [*start, combine, use("sum"), look, train, look],
        "all off and on": [look, off, look, on, train, look],
        "saved": [train, add("b", use_dora=True), use("b"), train, saved],
        "loaded": [train, load(True), use("b"), look, train, use("default"), train, look],
        "loaded frozen": [train, load(False), use("b"), look, use("default"), train, look],
        "cast under autocast": [cast, partial(train, autocast_dtype=torch.bfloat16), look],
    }
    for name, calls in ends.items():
        yield name, calls, S.FP32 if "autocast" in name else S.PLAIN, {}
    calls = [train, add("b", **SAVED), use("b"), train, look, use("default"), look]
    yield "other saved modules", calls, saving_modules, {}
    references = {
        "before": preference(of_the_base, is_first=True),
        "between": preference(of_the_base),
        "between, under grad": preference(of_the_base_under_grad),
    }
    for name, step in references.items():
        yield f"the base as reference, {name}", [step, train, step], S.PLAIN, {}
        within = under_autocast(step)
        yield f"the base as reference, {name}, autocast", [within, train, within], S.PLAIN, {}
    for is_first in (True, False):
        step = preference(of_another, is_first=is_first)
        name = "before" if is_first else "between"
        yield f"another as reference, {name}", [add("ref"), step, train, step], S.PLAIN, {}
    for dtype in (torch.float32, torch.bfloat16):
        for quantize in (True, False):
            subject = S.small(dtype=dtype, quantize=quantize)
            name = f"{dtype} {'4 bits' if quantize else 'dense'}"
            yield f"cast at once, {name}", [dtypes, cast, dtypes, train, look], subject, {}
            # Later too, when the layers have been streamed and checked already.
            yield f"cast later, {name}", [train, cast, train, look], subject, {}
    for block_size in (1, 2):
        policy = {"block_size": block_size, "slots": 2}
        yield f"switched in blocks of {block_size}", OTHERWISE, S.PLAIN, policy


def compare(
    calls: Sequence[Call], subject: Subject, bases: Bases, places: Sequence[int], **policy: Any
) -> list[object]:
    """Run the calls resident, then prepared at ``places``; what they computed."""
    resident = subject(bases)
    expected = [call(resident) for call in calls]
    for place in places:
        model = subject(bases)
        found = [call(model) for call in calls[:place]]
        streamed(model, **policy)
        found += [call(model) for call in calls[place:]]
        assert changes(facts_of(expected), facts_of(found)) == {}, f"prepared before call {place}"
        assert poros.runtime(model).stats()["num_loads"] > 0
        assert changes(bits_of(resident), bits_of(model)) == {}
    return expected


def require_telling(name: str, expected: list[object]) -> None:
    """The scenario shows something only if what comes out of it changes."""
    looks = [str(each) for each in expected if isinstance(each, dict)]
    assert len(set(looks)) == len(looks)
    if name == "two at once":
        trained = "".join(expected[2].steps[0].gradients)  # type: ignore[attr-defined]
        assert ".default." in trained and ".b." in trained
    if name.startswith("cast at once"):
        assert expected[2] == ["torch.bfloat16"] != expected[0]


# Of casts at once and later each dtype comes, with 4 bits and dense; these too.
SLOW = [
    *(f"cast at once, {each}" for each in ("torch.float32 dense", "torch.bfloat16 4 bits")),
    *(f"cast later, {each}" for each in ("torch.float32 4 bits", "torch.bfloat16 dense")),
    *(f"one, then another: {each}" for each in ("rslora", "lora bias")),
    # Under autocast or not, before or between: one of each.
    *(f"the base as reference, {each}" for each in ("before", "between, autocast")),
    "the base as reference, between, under grad, autocast",
    *("another as reference, before", "switched in blocks of 1"),
    *("the base as reference, between, under grad", "another deleted", "loaded frozen"),
    *("cast at once, torch.float32 4 bits", "cast later, torch.float32 dense", "saved"),
]


@pytest.mark.cover("values")
@pytest.mark.parametrize("is_late", [False, True], ids=["before all calls", "half way"])
@pytest.mark.parametrize(
    ("name", "calls", "subject", "policy"),
    [
        pytest.param(*each, id=each[0], marks=[pytest.mark.slow] if each[0] in SLOW else [])
        for each in scenarios()
    ],
)
def test_a_scenario_is_exact(
    name: str,
    calls: list[Call],
    subject: Subject,
    policy: dict[str, Any],
    is_late: bool,
    bases: Bases,
) -> None:
    place = len(calls) // 2 if is_late else 0
    require_telling(name, compare(calls, subject, bases, [place], **policy))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prepare_anywhere_between_the_calls(kind: str, bases: Bases) -> None:
    added = add("b", **KINDS[kind])
    calls = [train, added, *LATER]
    compare(calls, S.PLAIN, bases, range(len(calls)))
    deleting = [add("b"), use("b"), train, delete("b"), added, use("b"), train]
    compare(deleting, S.PLAIN, bases, range(len(deleting)))


# Controls.


def test_control_disabling_adapters_changes_what_comes_out(bases: Bases) -> None:
    model = streamed(S.PLAIN(bases))
    assert not torch.equal(of_the_base(model), logits(model.eval()))


def test_control_an_adapter_that_is_not_switched_shows(residents: Residents) -> None:
    resident, model = S.PLAIN(residents.bases), streamed(S.PLAIN(residents.bases))
    for each in (resident, model):
        add("b")(each)
    use("b")(resident)
    assert look(resident) != look(model)
