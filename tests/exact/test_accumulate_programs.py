"""What code of the user does besides: equal bits, together or not, or a typed error.

Each program runs resident, one micro-batch after the other, and prepared, in groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import poros
from poros.accumulation import loop
from poros.accumulation.cuts import Cut
from poros.accumulation.gradients import Watch
from poros.accumulation.names import Names
from poros.errors import PorosError, RematerializationError, UnsupportedModelError
from tests.exact.arms import Bases
from tests.exact.together import (
    Batch,
    Loss,
    Rows,
    build,
    layers,
    num_groups,
    own_loss,
    reasons,
    same,
    train,
    trained,
)
from tests.support import prepare_plain

Model = Any
End = str | type[PorosError] | None
"""Why they run one after the other, a typed error, or None: together."""
SIZES = (4, 3, 4)


class Program(NamedTuple):
    make: Callable[[Model], Loss]
    """Of the model before it is prepared."""
    end: End = None
    form: Callable[[Batch], Any] = lambda batch: batch


def ends(run: Callable[[Model, bool], list[torch.Tensor]], bases: Bases, end: End) -> bool:
    """Whether a run together ends in this way."""
    expected = run(build(bases), False)
    model = build(bases)
    if isinstance(end, type):
        with pytest.raises(end):
            run(model, True)
        return True
    found = run(model, True)
    is_said = reasons(model) == [] if end is None else any(end in each for each in reasons(model))
    return same(found, expected) and is_said and (end is not None or num_groups(model) >= 3)


def run_loop(program: Program, model: Model, together: bool) -> list[torch.Tensor]:
    loss = program.make(model)
    if together:
        prepare_plain(model, slots=2)
    return train(model, together, loss=loss, sizes=SIZES, form=program.form)


# Batches of all forms, which the loss edits.


@dataclass
class Sample:
    input_ids: torch.Tensor
    labels: torch.Tensor


class Pair(NamedTuple):
    input_ids: torch.Tensor
    labels: torch.Tensor


def masking(model: Model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Masks the first label that is not masked yet."""
    labels[:, int((labels == -100).sum(-1).max())] = -100
    return own_loss(model, {"input_ids": tokens, "labels": labels})


def of_batch(loss: Loss) -> Callable[[Model], Loss]:
    return lambda model: loss


EDITS = of_batch(lambda model, batch: masking(model, batch.input_ids, batch.labels))
EDITS_PAIR = of_batch(lambda model, batch: masking(model, *batch))


def nested(batch: Batch) -> Any:
    return {"model": {"input_ids": batch["input_ids"]}, "targets": [batch["labels"].clone()]}


def popping(model: Model, batch: Any) -> torch.Tensor:
    labels = batch["targets"].pop()
    return own_loss(model, {**batch["model"], "labels": labels})


def viewed(batch: Batch) -> Any:
    labels = batch["labels"].clone()
    return {**batch, "labels": labels, "first": labels[:, :3]}


def editing_a_view(model: Model, batch: Any) -> torch.Tensor:
    batch["first"][:, int((batch["labels"] == -100).sum(-1).max())] = -100
    return own_loss(model, {"input_ids": batch["input_ids"], "labels": batch["labels"]})


def by_number(model: Model, batch: Any) -> torch.Tensor:
    batch["state"].calls += 1
    return masked(model, batch, batch["state"].calls)


def taking_the_next(model: Model, batch: Any) -> torch.Tensor:
    return own_loss(model, {"input_ids": batch["input_ids"], "labels": next(batch["rows"])})


def rows_of(batch: Batch) -> list[torch.Tensor]:
    return [batch["labels"], torch.full_like(batch["labels"], 7)]


def apart(batch: Batch) -> dict[str, torch.Tensor]:
    return {key: each.clone() for key, each in batch.items()}


FORMS = {
    "tuple": Program(EDITS_PAIR, None, lambda batch: tuple(apart(batch).values())),
    "named tuple": Program(EDITS, None, lambda batch: Pair(**apart(batch))),
    "data class": Program(EDITS, None, lambda batch: Sample(**apart(batch))),
    "object": Program(EDITS, None, lambda batch: SimpleNamespace(**apart(batch))),
    "nested": Program(of_batch(popping), None, nested),
    "a view": Program(of_batch(editing_a_view), None, viewed),
    "a state": Program(
        of_batch(by_number), None, lambda batch: {**batch, "state": SimpleNamespace(calls=0)}
    ),
    "an iterator": Program(
        of_batch(taking_the_next), None, lambda batch: {**batch, "rows": iter(rows_of(batch))}
    ),
    "a generator": Program(
        of_batch(taking_the_next),
        "cannot be copied",
        lambda batch: {**batch, "rows": (each for each in rows_of(batch))},
    ),
}


# State of the user's own, which decides the loss.


def masked(model: Model, batch: Batch, number: int) -> torch.Tensor:
    labels = batch["labels"].clone()
    labels[:, : number % 5] = -100
    return own_loss(model, {"input_ids": batch["input_ids"], "labels": labels})


def variable(model: Model) -> Loss:
    calls = 0

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return masked(model, batch, calls)

    return lambda model, batch: loss(model, batch)


def listed(model: Model) -> Loss:
    calls: list[int] = []

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        calls.append(1)
        return masked(model, batch, len(calls))

    return loss


TOTAL = 0


def total(model: Model) -> Loss:
    global TOTAL
    TOTAL = 0

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        global TOTAL
        TOTAL += 1
        return masked(model, batch, TOTAL)

    return loss


class Counting:
    calls, flip, last = 0, False, 1.0

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        self.calls += 1
        return masked(model, batch, self.calls)

    def toggled(self, model: Model, batch: Batch) -> torch.Tensor:
        self.flip = not self.flip
        return masked(model, batch, 1 + self.flip)

    def scaled(self, model: Model, batch: Batch) -> torch.Tensor:
        found = own_loss(model, batch) * (1 if self.last > 1 else 0.5)
        self.last = float(found)
        return found

    def tokens(self, model: Model, batch: Batch) -> torch.Tensor:
        self.calls += 1
        tokens = (batch["input_ids"] + self.calls) % 100
        return own_loss(model, {**batch, "input_ids": tokens})

    def late_tokens(self, model: Model, batch: Batch) -> torch.Tensor:
        tokens = (batch["input_ids"] + self.calls) % 100
        found = own_loss(model, {**batch, "input_ids": tokens})
        self.calls += 1
        return found


def on_model(kind: Any, change: Callable[[Any], Any]) -> Program:
    """An attribute of the model's."""

    def make(model: Model) -> Loss:
        holder = model.get_base_model()
        holder.seen = kind()

        def loss(model: Model, batch: Batch) -> torch.Tensor:
            value = holder.seen = change(holder.seen)
            return masked(model, batch, value if isinstance(value, int) else len(value))

        return loss

    return Program(make, "changes the model")


STATES = {
    "variable": Program(variable),
    "list": Program(listed),
    "global": Program(total),
    "object": Program(lambda model: Counting()),
    "toggle": Program(lambda model: Counting().toggled),
    "last loss": Program(lambda model: Counting().scaled),
    "tokens by number": Program(lambda model: Counting().tokens),
    "tokens by number, late": Program(lambda model: Counting().late_tokens, UnsupportedModelError),
    "number of the model": on_model(int, lambda value: value + 1),
    "toggle of the model": on_model(bool, lambda value: not value),
    "text of the model": on_model(str, lambda value: value + "x"),
    "list of the model": on_model(list, lambda value: value.append(1) or value),
}


# Gradients that the loss reads, writes or takes.


def size(gradients: Any) -> float:
    return sum(float(each.abs().sum()) for each in gradients if each is not None)


def reading(model: Model, batch: Batch) -> torch.Tensor:
    return own_loss(model, batch) * (1 + size(each.grad for each in trained(model)))


def reading_before(model: Model, batch: Batch) -> torch.Tensor:
    found = size(each.grad for each in trained(model))
    return own_loss(model, batch) * (1 + found)


def clamp(model: Model) -> None:
    for each in trained(model):
        if each.grad is not None:
            each.grad.clamp_(-1e-3, 1e-3)


def add_noise(model: Model) -> None:
    for each in trained(model):
        if each.grad is not None:
            each.grad += 1e-3 * torch.randn_like(each)


def drop(model: Model) -> None:
    model.zero_grad()


def put(model: Model) -> None:
    for each in trained(model)[:3]:
        each.grad = torch.full_like(each, 0.01)


def step(model: Model) -> None:
    torch.optim.SGD(trained(model), lr=1e-3).step()


def then(act: Callable[[Model], None], has_backward: bool = False) -> Callable[[Model], Loss]:
    def loss(model: Model, batch: Batch) -> torch.Tensor:
        found = own_loss(model, batch)
        if has_backward:
            found.backward()
        act(model)
        return torch.zeros((), requires_grad=True) if has_backward else found

    return lambda model: loss


def taking(model: Model, batch: Batch) -> torch.Tensor:
    found = own_loss(model, batch)
    gradients = torch.autograd.grad(found, trained(model), retain_graph=True, allow_unused=True)
    return found * (1 + size(gradients))


def backward_into(model: Model, batch: Batch) -> torch.Tensor:
    own_loss(model, batch).backward(inputs=trained(model)[:4])
    return torch.zeros((), requires_grad=True)


WHILE = "gradients are used while"
GRADIENTS = {
    "read": Program(of_batch(reading), WHILE),
    "read before": Program(of_batch(reading_before), "gradients are used before"),
    "clamped": Program(then(clamp), WHILE),
    "dropped": Program(then(drop), WHILE),
    "set": Program(then(put), WHILE),
    "clamped behind its backward": Program(then(clamp, True)),
    "noise behind its backward": Program(then(add_noise, True)),
    "a step behind its backward": Program(then(step, True), "between micro-batches"),
    "taken by autograd.grad": Program(of_batch(taking), "takes gradients"),
    "backward into some": Program(of_batch(backward_into), "takes gradients"),
}


# What is known to go one after the other.


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-3 * torch.randn_like(gradient)


def noisy_layers(model: Model) -> Loss:
    kind = type(layers(model)[0].mlp)

    class Noisy(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Noise.apply(super().forward(hidden))
            return found

    for layer in layers(model):
        layer.mlp.__class__ = Noisy
    return own_loss


def noisy_norm(model: Model) -> Loss:
    model.get_base_model().model.norm.register_forward_hook(
        lambda module, args, output: Noise.apply(output)
    )
    return own_loss


def tied(model: Model) -> Loss:
    first, second = (layer.self_attn.q_proj.lora_A for layer in layers(model)[:2])
    second.default.weight = first.default.weight
    return own_loss


def hooked(model: Model) -> Loss:
    trained(model)[0].register_hook(lambda gradient: gradient * 0.5)
    return own_loss


def cast_outside(model: Model, batch: Batch) -> torch.Tensor:
    """One cast of an adapter, in the region of the layers."""
    weight = layers(model)[0].self_attn.q_proj.lora_A.default.weight
    with torch.autocast("cpu", torch.bfloat16):
        found = own_loss(model, batch)
        ones = torch.ones(1, weight.shape[1])
        return found + torch.nn.functional.linear(ones, weight).float().square().sum()


ALONE = {
    "draws in the backwards of layers": Program(noisy_layers, RematerializationError),
    "draws in the backward of the norm": Program(noisy_norm),
    "tied adapters": Program(tied, "several places"),
    "hooks on adapters": Program(hooked, "hooks on parameters"),
    "a cast outside the layers": Program(of_batch(cast_outside), "uses parameters of layers"),
}
PROGRAMS = {**FORMS, **STATES, **GRADIENTS, **ALONE}


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str, bases: Bases) -> None:
    program = PROGRAMS[which]
    assert ends(partial(run_loop, program), bases, program.end)


CONTROLS: dict[str, tuple[Any, str, Any, str]] = {
    "batches that are not copied": (loop, "copy_of", lambda batch: batch, "data class"),
    "names that stay": (Names, "put_back", Names.keep, "variable"),
    "gradients that nobody watches": (Watch, "begin", lambda self: None, "read"),
    "edges that are not there": (
        Cut,
        "take",
        lambda self, trained=(), genuine=Cut.take: genuine(self),
        "taken by autograd.grad",
    ),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_controls(which: str, bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, program = CONTROLS[which]
    monkeypatch.setattr(owner, name, instead)
    assert not ends(partial(run_loop, PROGRAMS[program]), bases, PROGRAMS[program].end)


# Trainers, and what acts between their micro-batches.


def scale_weights(model: Model) -> None:
    with torch.no_grad():
        for each in trained(model):
            each.mul_(0.99)


def freeze(model: Model) -> None:
    for each in trained(model)[:2]:
        each.requires_grad_(False)


def evaluate(model: Model) -> None:
    model.eval()


def settings(model: Model) -> None:
    torch.use_deterministic_algorithms(True)


def behind(act: Callable[[Model], None]) -> Any:
    """A class with a ``training_step`` of its own, behind the mixin."""

    def make(mixins: tuple[type, ...]) -> type[Trainer]:
        class Own(Trainer):  # type: ignore[misc]
            def training_step(self, model: Model, *args: Any, **options: Any) -> Any:
                found = super().training_step(model, *args, **options)
                act(model)
                return found

        return type("Behind", (*mixins, Own), {})

    return make


def before(act: Callable[[Model], None]) -> Any:
    def make(mixins: tuple[type, ...]) -> type[Trainer]:
        class Own(*mixins, Trainer):  # type: ignore[misc]
            def training_step(self, model: Model, *args: Any, **options: Any) -> Any:
                found = super().training_step(model, *args, **options)
                act(model)
                return found

        return Own

    return make


def called_back(act: Callable[[Model], None]) -> Any:
    class Acts(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, *args: Any, model: Model, **options: Any) -> None:
            act(model)

    def make(mixins: tuple[type, ...]) -> type[Trainer]:
        class Own(*mixins, Trainer):  # type: ignore[misc]
            def __init__(self, **options: Any) -> None:
                super().__init__(**options, callbacks=[Acts()])

        return Own

    return make


def with_loss(change: Callable[[Any, Batch], object]) -> Any:
    def make(mixins: tuple[type, ...]) -> type[Trainer]:
        class Own(*mixins, Trainer):  # type: ignore[misc]
            calls, text = 0, ""

            def compute_loss(self, model: Model, inputs: Batch, *args: Any, **options: Any) -> Any:
                change(self, inputs)
                return super().compute_loss(model, inputs, *args, **options)

        return Own

    return make


def count(trainer: Any, inputs: Batch) -> None:
    trainer.calls += 1
    inputs["labels"][:, : trainer.calls % 5] = -100


def write(trainer: Any, inputs: Batch) -> None:
    trainer.text += "x"
    inputs["labels"][:, : len(trainer.text) % 5] = -100


TRAINERS: dict[str, tuple[Any, End]] = {
    "clamps, behind": (behind(clamp), None),
    "clamps, before": (before(clamp), None),
    "clamps, called back": (called_back(clamp), None),
    "noise, behind": (behind(add_noise), None),
    "noise, before": (before(add_noise), "drawn between"),
    "drops, called back": (called_back(drop), None),
    "steps, behind": (behind(step), "edited, frozen"),
    "weights, called back": (called_back(scale_weights), RematerializationError),
    "freezes, called back": (called_back(freeze), "edited, frozen"),
    "evaluation mode, called back": (called_back(evaluate), None),
    "settings, called back": (called_back(settings), "settings are others"),
    "counts": (with_loss(count), None),
    "writes": (with_loss(write), None),
}


@pytest.mark.parametrize("which", TRAINERS)
def test_trainers(which: str, bases: Bases, tmp_path: Path) -> None:
    make, end = TRAINERS[which]

    def run(model: Model, together: bool) -> list[torch.Tensor]:
        if together:
            prepare_plain(model, slots=2)
        adapters = trained(model)
        args = TrainingArguments(
            str(tmp_path / str(together)),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            learning_rate=1e-2,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        kind = make((poros.BlockMajorMixin,) if together else ())
        try:
            kind(model=model, args=args, train_dataset=Rows()).train()
        finally:
            torch.use_deterministic_algorithms(False)
        return [each.detach().clone() for each in adapters]

    assert ends(run, bases, end)
