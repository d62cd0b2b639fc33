"""Adapters that come to a prepared model train as those that come to a resident one.

That they are added, switched, deleted, loaded and cast: ``test_written_programs``; passes of the
base and of a frozen adapter as references: ``test_trl``.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, MontecloraConfig, VeloraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

import poros
from poros.errors import PreparedModelError, RematerializationError, UnvalidatedArchitectureError
from poros.gates import kinds as gates
from poros.gates.reference import TrainingSpec, Trajectory, train
from tests.comparing import assert_same_run, bits_of, changes, digest, picture
from tests.exact import subjects as S
from tests.loops import (
    Model,
    Subject,
    batches,
    build,
    facts_of,
    layers_of,
    mlps,
    override,
    run,
    small_base,
    streamed,
)
from tests.support import AdversarialPrepare, prepare_plain


def added(model: Any, folder: Path) -> None:
    torch.manual_seed(11)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.05)
    model.add_adapter("late", config)
    model.set_adapter("late")


def loaded(model: Any, folder: Path) -> None:
    if not (folder / "late").exists():
        source = build(seed=5)
        source.save_pretrained(folder)
        (folder / "late").mkdir(exist_ok=True)
        for file in folder.glob("adapter_*"):
            file.rename(folder / "late" / file.name)
    model.load_adapter(str(folder / "late"), "late", is_trainable=True)
    model.set_adapter("late")


def loaded_without_memory(model: Any, folder: Path) -> None:
    loaded(model, folder)
    model.delete_adapter("late")
    model.load_adapter(str(folder / "late"), "late", is_trainable=True, low_cpu_mem_usage=True)
    model.set_adapter("late")


WAYS = [added, loaded, loaded_without_memory]
# Each holds its parameters or buffers otherwise: in modules, in lists, shared by all layers.
KINDS = ["boft", "ia3", "ln_tuning", "vera"]


def late(model: Any) -> dict[str, Any]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: each for name, each in named if "late" in name.split(".")}


class OtherDevice:
    """A device of which no tensor is yet: what is sent there gets memory of its own."""

    type = "other"


@contextmanager
def to_another_device(model: Any) -> Iterator[list[torch.Tensor]]:
    """What a forward sends to another device."""
    sent, to = list[torch.Tensor](), torch.Tensor.to

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not args or not isinstance(args[0], OtherDevice):
            return to(tensor, *args, **kwargs)
        sent.append(tensor.clone())
        return sent[-1]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "to", moved)
        patch.setattr(poros.runtime(model)._attachment, "_device", OtherDevice())
        yield sent


def not_sent(sent: list[torch.Tensor], tensors: dict[str, Any]) -> list[str]:
    arrived = {each.data_ptr() for each in sent}
    return [name for name, each in tensors.items() if each.data_ptr() not in arrived]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_adapter_that_comes_later_is_brought_to_the_device(
    way: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    expected, model = build(), prepare_plain(build())
    for each in (expected, model):
        run(each)
        way(each, tmp_path)
    before, bits = late(model), bits_of(model)
    places = {name: each.data_ptr() for name, each in before.items()}
    with to_another_device(model):
        model(**batches()[0])
    after = late(model)
    assert all(after[name] is each for name, each in before.items())
    assert all(each.data_ptr() != places[name] for name, each in after.items())
    assert changes(bits, bits_of(model)) == {}
    for each in (expected, model):
        each.train()
    assert_same_run(run(expected), run(model))


def another(model: Any) -> None:
    """A second adapter of the kind that is there, with values that are not zero."""
    torch.manual_seed(11)
    model.add_adapter("late", copy.deepcopy(model.peft_config["default"]))
    model.set_adapter("late")
    with torch.no_grad():
        for each in late(model).values():
            if each.requires_grad:
                each.add_(0.05 * torch.randn(each.shape).to(each))


@pytest.mark.parametrize("kind", KINDS)
def test_another_adapter_of_any_kind_is_noticed(kind: str) -> None:
    spec = TrainingSpec(num_steps=2, autocast_dtype=torch.bfloat16)
    quantize = gates.KINDS[kind].on_4bit
    expected, model = (build(adapter=kind, quantize=quantize, num_layers=2) for _ in range(2))
    prepare_plain(model)
    for each in (expected, model):
        train(each, batches(), spec)
        another(each)
    tensors = late(layers_of(model))
    assert tensors
    with to_another_device(model) as sent, torch.autocast("cpu", torch.bfloat16):
        model.eval()(**batches()[0])
    assert not_sent(sent, tensors) == []
    assert_same_run(train(expected, batches(), spec), train(model, batches(), spec))


def test_one_that_takes_the_place_of_another_is_noticed() -> None:
    """Deleted and added again by the same name: neither modules nor names tell."""
    model = prepare_plain(build(adapter="ia3", num_layers=2, quantize=False))
    another(model)
    with torch.no_grad():
        model.eval()(**batches()[0])
    model.delete_adapter("late")
    another(model)
    with to_another_device(model) as sent:
        model(**batches()[0])
    assert not_sent(sent, late(layers_of(model))) == []


def test_frozen_ones_that_exchange_their_names_are_watched() -> None:
    """Of a kind without modules of its own, so that only the keys of its containers change."""
    model = prepare_plain(build(adapter="ia3", num_layers=2, quantize=False)).train()
    names = {"late", "later"}

    def add(*targets: str) -> list[torch.Tensor]:
        for name, target in zip(sorted(names), targets, strict=True):
            model.add_adapter(name, IA3Config(target_modules=[target], feedforward_modules=[]))
        model.base_model.set_adapter(["default", *names])
        named = model.named_parameters()
        frozen = [each for name, each in named if names & set(name.split("."))]
        return [each.requires_grad_(False) for each in frozen]

    add("q_proj", "o_proj")
    model(**batches()[0]).loss.backward()
    for name in names:
        model.delete_adapter(name)
    frozen = add("o_proj", "q_proj")
    loss = model(**batches()[0]).loss
    for each in frozen:
        each.data.add_(0.1)
    with pytest.raises(RematerializationError, match="a frozen adapter"):
        loss.backward()


def test_one_that_does_not_act_may_be_edited_while_a_backward_waits() -> None:
    def edited(model: Model) -> dict[str, Any]:
        torch.manual_seed(3)
        loss = model(**batches(1)[0]).loss
        with torch.no_grad():
            for each in late(model).values():
                each.add_(1)
        loss.backward()
        return facts_of([each.grad for each in model.parameters() if each.grad is not None])

    def make() -> Model:
        model = build()
        model.add_adapter("late", LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        return model

    assert changes(edited(make()), edited(streamed(make()))) == {}


def test_a_buffer_that_a_layer_makes_as_it_runs_is_its_own() -> None:
    def forward(mlp: Any, own: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(mlp, "scale"):
            mlp.register_buffer("scale", torch.full((1,), 0.5, dtype=x.dtype))
        return own(x) * mlp.scale

    expected, model = build(), build()
    for each in (expected, model):
        override(mlps(each), forward)
    assert_same_run(run(expected), run(prepare_plain(model)))


UNPROVEN = {
    "velora": {"velora_config": VeloraConfig(num_groups=8)},
    "monteclora": {"monteclora_config": MontecloraConfig()},
    "alora": {"alora_invocation_tokens": [7]},
}


@pytest.mark.parametrize("kind", UNPROVEN)
def test_a_kind_that_is_not_on_record_is_refused_when_it_comes_later(kind: str) -> None:
    expected, model = build(quantize=False), prepare_plain(build(quantize=False))
    run(expected)
    run(model)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **UNPROVEN[kind])
    for each in (expected, model):
        each.add_adapter("late", config)
    model.set_adapter("late")
    with pytest.raises(UnvalidatedArchitectureError, match=f"{kind} .* came after poros.prepare"):
        model(**batches()[0])
    for each in (expected, model):
        each.delete_adapter("late")
        each.set_adapter("default")
    assert_same_run(run(expected), run(model))


READERS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "mica": {"init_lora_weights": "mica"},
    "new modules": {"target_modules": ["k_proj", "o_proj"], "use_dora": True},
}


@pytest.mark.parametrize("name", READERS)
def test_an_initialisation_finds_the_base_on_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads and draws there is what a resident run reads and draws."""
    options = {"target_modules": ["q_proj", "down_proj"], "r": 4, **READERS[name]}
    quantize = name != "mica"
    base = build(quantize=quantize, num_layers=4)
    expected = build(quantize=quantize, num_layers=4)
    model = AdversarialPrepare()(base, slots=2)
    for each in (expected, model):
        run(each)
    slots = {each.buffer.data_ptr() for each in poros.runtime(model).ring.slots}
    seen: list[bool] = []
    own = LoraLayer.update_layer

    def update_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.get_base_layer().weight.untyped_storage().data_ptr() in slots)
        return own(self, *args, **kwargs)

    for each in (expected, model):
        monkeypatch.setattr(LoraLayer, "update_layer", update_layer)
        torch.manual_seed(3)
        each.add_adapter("late", LoraConfig(**options))
        monkeypatch.undo()
        each.set_adapter("late")
    half = len(seen) // 2
    assert half == 8 and not any(seen[:half]) and all(seen[half:])
    assert_same_run(run(expected), run(model))


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj"]])
def test_an_initialisation_that_changes_the_base_is_refused_and_undone(
    init: str, targets: list[str]
) -> None:
    base = build(quantize=False)
    if targets == ["k_proj"]:
        base = S.adapters_on("q_proj", quantize=False)()
    expected = copy.deepcopy(base)
    model = prepare_plain(base)
    for each in (expected, model):
        run(each)
    before = picture(model)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=init)
    with pytest.raises(PreparedModelError, match=r"layers\.0: .*leaves the base as it is"):
        model.add_adapter("late", config)
    assert changes(before, picture(model)) == {}
    assert "late" not in model.peft_config
    assert_same_run(run(expected), run(model))


# Adapters that are combined, and that save other modules: lists of calls of a user, on a resident
# model, and with ``poros.prepare`` before the first of them or half way through.

Call = Callable[[Model], object]

OTHER = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.1}
SAVED = {"modules_to_save": ["lm_head", "input_layernorm"]}


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{**OTHER, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options})


def adding(name: str, **options: Any) -> Call:
    def call(model: Model) -> None:
        torch.manual_seed(len(name))
        model.add_adapter(name, config(**options))

    return call


def use(name: str) -> Call:
    return lambda model: model.set_adapter(name)


def train_once(model: Model) -> Trajectory:
    """A step of the adapters that are active now."""
    before = {name: digest(each) for name, each in model.named_parameters()}
    trajectory = run(model, 1)
    trained = {name for name, each in model.named_parameters() if digest(each) != before[name]}
    assert trained and trained == set(trajectory.steps[0].gradients), "a parameter was missed"
    return trajectory


def look(model: Model) -> object:
    """The outputs in evaluation mode."""
    with torch.no_grad():
        return {"outputs": digest(model.eval()(**batches()[1]).logits)}


def combine(model: Model) -> None:
    model.add_adapter("c", config(r=8, lora_alpha=16, target_modules=["q_proj", "up_proj"]))
    model.add_weighted_adapter(["b", "c"], [0.7, 0.3], "sum", combination_type="cat")


def saving_modules() -> Model:
    # A norm in bf16 is too coarse to change in two steps.
    base = small_base(dtype=torch.float32)
    torch.manual_seed(4)
    return get_peft_model(base, config(**SAVED))


SCENARIOS: dict[str, tuple[Subject, list[Call]]] = {
    "a weighted sum": (
        S.PLAIN,
        [adding("b"), use("b"), train_once, combine, use("sum"), look, train_once, look],
    ),
    "other saved modules": (
        saving_modules,
        [train_once, adding("b", **SAVED), use("b"), train_once, look, use("default"), look],
    ),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["before all calls", "half way"])
@pytest.mark.parametrize("which", SCENARIOS)
def test_a_scenario_is_exact(which: str, is_late: bool) -> None:
    subject, calls = SCENARIOS[which]
    place = len(calls) // 2 if is_late else 0
    resident, model = subject(), subject()
    expected = [call(resident) for call in calls]
    looks = [str(each) for each in expected if isinstance(each, dict)]
    assert len(set(looks)) == len(looks), "it shows something only if what comes out changes"
    found = [call(model) for call in calls[:place]]
    streamed(model)
    found += [call(model) for call in calls[place:]]
    assert changes(facts_of(expected), facts_of(found)) == {}
    assert poros.runtime(model).stats()["num_loads"] > 0
    assert changes(bits_of(resident), bits_of(model)) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_on_a_gpu(way: Callable[[Any, Path], None], start: str, tmp_path: Path) -> None:
    on_gpu = [{key: value.cuda() for key, value in batch.items()} for batch in batches()]

    def steps(model: Any) -> Any:
        with torch.no_grad():
            model.eval()(**on_gpu[0])  # brings new adapters to where the loop looks for them
        return train(model, on_gpu, TrainingSpec(num_steps=2))

    expected, model = build().cuda(), build()
    if start == "cuda":
        model.cuda()
    prepare_plain(model, device="cuda")
    for index, each in enumerate((expected, model)):
        steps(each)
        way(each, tmp_path)
        if index:
            objects = late(model)
    assert_same_run(steps(expected), steps(model))
    assert objects and all(late(model)[name] is each for name, each in objects.items())
    assert {each.device.type for each in objects.values()} == {"cuda"}
    poros.restore(model)
    devices = {each.device.type for each in layers_of(model).parameters()}
    assert devices == {start}
