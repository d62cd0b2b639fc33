"""Recorded visits of layers that keep their graph, without gradients, of unsteady attention.

And around layers: under the HF Trainer, of other architectures, and what recordings read. Replayed
by a stand-in that sees nothing of Python.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import poros
from poros.errors import ParityError
from poros.gates import tiny
from poros.model.sizing import ResidencyPlan
from poros.replay.call import CHECK
from poros.replay.captures import ARGUMENTS, NEW
from poros.replay.forms import Form, HeldGraphs
from tests.comparing import compare_trajectories
from tests.covers import with_slow
from tests.exact.adapter_arms import mlps
from tests.exact.arms import Bases
from tests.exact.recorded import (
    KEPT,
    autocast,
    few,
    loss_of,
    record_on_tapes,
    recorded,
    spoil,
    train,
)
from tests.exact.together import same, trained
from tests.exact.trainer_arms import NUM_STEPS, Arms
from tests.support import prepare_plain
from tests.unsteady import make_unsteady
from tools.tape import TapeRecorder

Model = Any


def gradients(model: Model) -> list[Any]:
    return [each.grad.clone() for each in trained(model)]


def inside_and_outside(around: Callable[[], Any], model: Model) -> list[Any]:
    """What a backward runs under is its own: each is recorded, and no other is replayed."""
    facts = []
    for number in range(12):
        with around():
            loss = loss_of(model, shift=number)
            if number % 2:
                loss.backward()
        if not number % 2:
            loss.backward()
        facts += [loss.detach(), *gradients(model)]
    return facts


def region_of_its_own(model: Model) -> list[Any]:
    """As Accelerate has it."""
    model.forward = autocast()(model.forward)
    return train(model, 8, 2)


def two_losses(model: Model, number_of_forwards: int = 2) -> list[Any]:
    """Forwards whose backwards come later, in the order of the forwards and in reverse."""
    facts = []
    for number in range(8):
        parts = range(number_of_forwards if number % 3 else 1)
        losses = [loss_of(model, shift=part) for part in parts]
        for loss in losses if number % 2 else losses[::-1]:
            loss.backward()
        facts += gradients(model)
    return facts


def second_backward(model: Model) -> list[Any]:
    facts = []
    for number in range(8):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss_of(model, shift=1).backward()
        if number != 5:
            loss.backward()
        facts += gradients(model)
    return facts


def without_gradients(is_training: bool, model: Model) -> list[Any]:
    """As DPO's reference pass: dropout draws if the model trains."""
    model.train(is_training)
    facts = []
    for number in range(8):
        tokens = torch.arange(12)[None] + number
        with torch.no_grad(), model.disable_adapter() if number % 2 else nullcontext():
            facts.append(model(input_ids=tokens, use_cache=False).logits.clone())
        loss = loss_of(model, shift=number)
        loss.backward()
        facts += [loss.detach(), *gradients(model)]
    return facts


def inference_between(model: Model) -> list[Any]:
    """What is recorded then could not be replayed later, so nothing is."""

    def evaluate(model: Model, number: int) -> None:
        model.eval()
        with torch.inference_mode():
            model(input_ids=torch.arange(12)[None], use_cache=False)
        model.train()

    return train(model, 9, 1, evaluate)


RUNS: dict[str, Callable[[Model], list[Any]]] = {
    "backwards inside and outside": partial(inside_and_outside, nullcontext),
    "backwards inside and outside, autocast": partial(inside_and_outside, autocast),
    "a region of the model itself": region_of_its_own,
    "two losses": two_losses,
    "a second backward": second_backward,
    "without gradients, dropout": partial(without_gradients, True),
    "without gradients": partial(without_gradients, False),
    "inference mode between": inference_between,
}


def kinds_of(captures: Any, is_replayed: bool = False) -> set[str]:
    """Of the forms of visits; or of those whose recorded forward has been proved."""
    forms = [form for of_layer in captures._forms.values() for form in of_layer.values()]
    proved = [form for form in forms if form.forward is not None and form.forward.is_proved]
    return {form.kind for form in (proved if is_replayed else forms)}


@cache
def resident_run(which: str, bases: Bases) -> list[Any]:
    model = few(bases, lora_dropout=0.1)
    torch.manual_seed(3)
    return RUNS[which](model)


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [KEPT, {}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("which", ["two losses", *(name for name in RUNS if name != "two losses")])
def test_runs(which: str, policy: dict[str, Any], bases: Bases) -> None:
    model = few(bases, lora_dropout=0.1)
    captures, _ = recorded(model, **policy)
    torch.manual_seed(3)
    found = RUNS[which](model)
    assert same(found, resident_run(which, bases))
    assert captures.num_replays > 0
    if which == "two losses":
        # The second one's graph has no place in the recording: it is recomputed.
        assert kinds_of(captures) == ({"kept", "recomputed"} if policy else {"recomputed"})
    if which.startswith("without gradients"):
        kinds = kinds_of(captures, is_replayed=True)
        assert "inference" in kinds and len(kinds) == 2


def test_control_a_kept_graph_that_is_overwritten_gives_other_gradients(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = two_losses(few(bases))
    model = few(bases)
    recorded(model, **KEPT)
    two_losses(model, 1)
    for each in trained(model):
        each.grad = None

    class Unseen:
        """A form whose graph in flight nobody sees."""

        def __get__(self, form: Form, kind: Any = None) -> Any:
            return lambda: None

        def __set__(self, form: Form, value: Any) -> None:
            pass

    monkeypatch.setattr(Form, "in_flight", Unseen(), raising=False)
    monkeypatch.setattr(Form, "is_there", lambda self, call: True)
    assert not same(two_losses(model), expected)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_layer_whose_graph_goes_before_that_of_a_later_one(
    is_guarded: bool, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded first, it may compute where the later one, recorded then, has its graph."""
    if not is_guarded:
        monkeypatch.setattr(HeldGraphs, "would_lose", lambda self, form: False)

    def run(model: Model) -> list[Any]:
        cuts = False
        facts = []

        def cut(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
            return result.detach().requires_grad_() + 0 if cuts else result

        handle = model.base_model.model.model.layers[0].register_forward_hook(cut)
        for number in range(10):
            cuts = number > 5
            first = loss_of(model, shift=number)
            if number > 5:
                gc.collect()  # the first layer's call is gone, and so may its graph
                first = first + loss_of(model, shift=number + 1)
            first.backward()
            facts += [first.detach(), *gradients(model)]
            model.zero_grad(set_to_none=False)
        handle.remove()
        return facts

    expected = run(few(bases))
    model = few(bases)
    captures, _ = recorded(model, **KEPT)
    is_same = same(run(model), expected)
    assert captures.num_replays > 0 and is_same == is_guarded


def test_attention_that_does_not_repeat_itself_is_proved_with_one_that_does(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unsteady(monkeypatch)
    for policy in ({}, KEPT):
        model = few(bases, lora_dropout=0.1)
        captures, recorder = recorded(model, self_check="off", **policy)
        train(model, 8, 1)
        assert not any("other bits" in reason for reason in captures.eager)
        assert captures.num_replays >= 2 * 2 * 2
        # Of each of two layers: a forward, a backward, and the steady one that proves it.
        assert recorder.num_recorded == 2 * 3


def test_attention_that_does_not_repeat_itself_in_micro_batches_together(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several backwards of a layer come before what proves the first can be recorded."""
    make_unsteady(monkeypatch)
    model = few(bases, lora_dropout=0.1)
    captures, recorder = recorded(model, self_check="off")
    batch = tiny.make_batches(1, batch_size=1, num_tokens=8, padded=False)[0]
    for _ in range(6):
        poros.accumulate(model, [dict(batch) for _ in range(3)])
        model.zero_grad()
    assert not any("other bits" in reason for reason in captures.eager)
    assert recorder.num_recorded == 2 * 3
    assert captures.num_replays > 2 * 2 * 2 * 3


def test_the_first_step_is_recorded_behind_the_micro_batch_that_is_checked(bases: Bases) -> None:
    model = few(bases)
    captures, recorder = recorded(model, self_check="strict")
    batch = tiny.make_batches(1, batch_size=1, num_tokens=8, padded=False)[0]
    poros.accumulate(model, [dict(batch) for _ in range(5)])
    assert poros.runtime(model).self_check["status"] == "passed"
    assert recorder.num_recorded == 2 * 2
    # Of four, a forward and a backward run beside what is compared with it.
    assert captures.num_replays == 2 * (3 + 2)


def test_of_micro_batches_together_one_call_of_each_layer_is_watched(bases: Bases) -> None:
    model = few(bases)
    captures, _ = recorded(model, self_check="off")
    batch = tiny.make_batches(1, batch_size=1, num_tokens=8, padded=False)[0]
    for _ in range(4):
        poros.accumulate(model, [dict(batch) for _ in range(4)])
    before = captures.num_replays
    to_come = {0, 1}

    def watches(layer: int) -> bool:
        found = layer in to_come
        to_come.discard(layer)
        return found

    poros.runtime(model).context.watches = watches
    poros.accumulate(model, [dict(batch) for _ in range(4)])
    assert captures.eager[CHECK] == 2 and captures.num_replays == before + 2 * 2 * 3


def test_control_a_recording_that_is_wrong_is_found_with_steady_attention_too(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unsteady(monkeypatch)
    model = few(bases, lora_dropout=0.1)
    captures, _ = recorded(model, self_check="off")

    def fault(recorder: TapeRecorder, steps: list[Any]) -> None:
        places = [place for place, (func, *_) in enumerate(steps) if "bernoulli" in str(func)]
        if torch.are_deterministic_algorithms_enabled() or recorder.num_recorded > 4:
            del steps[places[-1]]

    spoil(monkeypatch, fault)
    train(model, 8, 1)
    assert any("other bits" in reason for reason in captures.eager)


def test_lengths_that_alternate_do_not_drive_each_other_out(bases: Bases) -> None:
    """One length more than there are places: that one runs as always, and nothing anew."""
    model = few(bases)
    captures, recorder = recorded(model, self_check="off")
    after: list[int] = []
    for _ in range(8):
        for length in range(8, 13):
            loss_of(model, length).backward()
        after.append(recorder.num_recorded)
    assert after[-1] == after[-3] == 2 * 2 * 4
    assert captures.num_replays > 0


def test_kept_layers_replay_a_second_length_as_recomputed_ones(bases: Bases) -> None:
    model = few(bases)
    captures, recorder = recorded(model, self_check="off", **KEPT)
    eager: list[int] = []
    for _ in range(10):
        for length in (8, 9):
            loss_of(model, length).backward()
        eager.append(captures.eager[NEW])
    assert recorder.num_recorded == 2 * 2 * 2
    assert eager[-1] == eager[-3], "neither runs any more"


@pytest.mark.parametrize("keep_last", [0, 2])
def test_what_is_known_of_calls_stays_known_in_other_rooms(keep_last: int, bases: Bases) -> None:
    expected = train(few(bases, lora_dropout=0.1), 14, 1)
    model = few(bases, lora_dropout=0.1)
    captures, recorder = recorded(model, self_check="off")
    eager: list[int] = []

    def change(model: Any, number: int) -> None:
        eager.append(captures.eager[NEW])
        if number in (5, 9):
            assert recorder.num_recorded == 2 * 2 * (1 if number == 5 else 2)
            room = ResidencyPlan(3, keep_last) if number == 5 else ResidencyPlan(2, 0)
            poros.runtime(model).resize(room)

    assert same(train(model, 14, 1, change), expected)
    assert recorder.num_recorded == 2 * 2 * 3, "each once more, at once"
    # One of each runs beside what is compared with it; none is there to be learnt from.
    assert eager[5] == eager[4] and eager[9] == eager[5] + 2 * 2 == eager[-1] - 2 * 2


def test_a_length_that_does_not_come_back_makes_way(bases: Bases) -> None:
    model = few(bases)
    captures, _ = recorded(model, self_check="off")
    for length in range(8, 14):
        for _ in range(8):
            loss_of(model, length).backward()
    for forms in captures._forms.values():
        assert sum(form.forward is not None for form in forms.values()) == 4
    assert captures.num_replays >= 6 * 4 * 2 * 2


def test_the_bytes_of_a_kept_layer_are_checked_before_any_visit_is_replayed(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.replay.captures._LEAST_VISITS", 1)
    model = few(bases)
    recorded(model, **KEPT)
    poros.runtime(model).host_slab(1)[0] ^= 1
    with pytest.raises(ParityError):
        train(model, 3, 1)


class Generating(TrainerCallback):  # type: ignore[misc]
    """Evaluation and generation come between steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        model.eval()
        with torch.no_grad():
            model.generate(torch.arange(5)[None] + 3, max_new_tokens=3, do_sample=False)
        model.train()


class GeneratingTrainer(Trainer):  # type: ignore[misc]
    def __init__(self, *, callbacks: list[TrainerCallback], **options: Any) -> None:
        super().__init__(callbacks=[*callbacks, Generating()], **options)


@pytest.mark.parametrize(
    ("keep_last", "options"),
    [
        pytest.param(0, {"gradient_accumulation_steps": 1}, marks=pytest.mark.slow),
        (2, {"bf16": True}),
    ],
    ids=str,
)
def test_hf_trainer(
    options: dict[str, Any], keep_last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That lengths change, too, is in ``test_trl``."""
    captures = record_on_tapes(monkeypatch, 2)
    arms = Arms.make(tmp_path, torch.bfloat16)
    options = {**options, "trainer_class": GeneratingTrainer}
    options |= {"save_strategy": "steps", "save_steps": NUM_STEPS}
    prepare = partial(prepare_plain, slots=2 + keep_last, keep_last=keep_last)
    expected, found = arms.run("resident", **options), arms.run("recorded", prepare, **options)
    assert compare_trajectories(expected, found) == []
    assert arms.log_history("resident") == arms.log_history("recorded")
    assert captures[0].num_replays > 0


def with_a_gain(model: Model, patch: pytest.MonkeyPatch) -> list[Any]:
    """Its feed-forwards multiply by a tensor that they hold as a plain attribute."""
    kind = type(mlps(model)[0])
    genuine = kind.forward
    patch.setattr(kind, "forward", lambda self, given: genuine(self, given) * self.gain)
    found = mlps(model)
    for each in found:
        each.gain = torch.full((64,), 1.5, dtype=torch.bfloat16)
    return found


@pytest.mark.cover("values")
@pytest.mark.parametrize("in_a_list", [False, True])
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
def test_a_tensor_that_a_module_exchanges(
    policy: dict[str, Any], in_a_list: bool, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(model: Model, number: int) -> None:
        for mlp in mlps(model):
            gain = torch.full((64,), 1.5 if number < 6 else 0.5, dtype=torch.bfloat16)
            if number in (0, 6):
                mlp.gain = gain
            if in_a_list and number == 0:
                mlp.others = [gain]

    def run(record: bool) -> tuple[list[Any], Any]:
        with monkeypatch.context() as patch:
            model = few(bases)
            with_a_gain(model, patch)
            captures = recorded(model, **policy)[0] if record else None
            return train(model, 12, 1, exchange), captures

    expected, _ = run(False)
    found, captures = run(True)
    assert same(found, expected)
    assert captures.num_replays == 0


REPLAYED = dict.fromkeys(["qwen2", "llama", "mistral", "qwen3", "phi3", "gemma3"])
RUN = {"gemma4": ARGUMENTS, "mixtral": "hooks", "qwen3_moe": "hooks"}
ENDS: dict[str, str | None] = {**REPLAYED, **RUN}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("architecture", with_slow(ENDS, ("llama", "mistral", "qwen3")))
def test_promised_architectures(architecture: str, policy: dict[str, Any], bases: Bases) -> None:
    """Layers that share keys and values, or whose routers are recorded by hooks, run as always."""
    reason = ENDS[architecture]
    options = {} if architecture == "qwen3_moe" else {"lora_dropout": 0.1}
    expected = train(few(bases, architecture, **options), 7, 1)
    model = few(bases, architecture, **options)
    captures, _ = recorded(model, **policy)
    assert same(train(model, 7, 1), expected)
    assert (captures.num_replays > 0) == (reason is None)
    assert reason is None or reason in captures.eager
