"""What the code of a loss does besides: equal bits, grouped or not, or a typed error.

Each program runs resident, one micro-batch after the other, and prepared, in groups. What the
fuzzer's language has is in ``test_written_programs``.
"""

import random
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from poros.accumulation.group import Group
from poros.accumulation.in_place import InPlace
from poros.accumulation.parked import ParkedCode, Regions
from poros.errors import UnsupportedModelError
from tests.exact import subjects as S
from tests.loops import (
    Batch,
    Control,
    Loss,
    add_noise,
    clamp,
    ends,
    in_autocast,
    later,
    layers_of,
    of,
    override,
    own_loss,
    program,
    trained,
    training,
)

Model = Any
UNSUPPORTED = UnsupportedModelError

# Batches that the loss edits.


def editing(model: Model, batch: Batch) -> torch.Tensor:
    batch["input_ids"].add_(1)
    return own_loss(model, batch)


def with_labels(model: Model, batch: Any, labels: torch.Tensor) -> torch.Tensor:
    return own_loss(model, {"input_ids": batch["input_ids"], "labels": labels})


FORMS = {
    "nested": program(
        of(lambda model, batch: with_labels(model, batch["model"], batch["targets"].pop())),
        form=lambda b: {"model": {"input_ids": b["input_ids"]}, "targets": [b["labels"].clone()]},
    ),
    "edited": program(of(editing)),
}


# State of the user's own, which decides the loss.


def masked(model: Model, batch: Batch, number: int) -> torch.Tensor:
    labels = batch["labels"].clone()
    labels[:, : number % 5] = -100
    return with_labels(model, batch, labels)


def variable(model: Model) -> Loss:
    calls = 0

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return masked(model, batch, calls)

    return lambda model, batch: loss(model, batch)


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
    calls, last = 0, 1.0

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        self.calls += 1
        return masked(model, batch, self.calls)

    def scaled(self, model: Model, batch: Batch) -> torch.Tensor:
        found = own_loss(model, batch) * (1 if self.last > 1 else 0.5)
        self.last = float(found)
        return found

    def late_tokens(self, model: Model, batch: Batch) -> torch.Tensor:
        tokens = (batch["input_ids"] + self.calls) % 100
        found = own_loss(model, {**batch, "input_ids": tokens})
        self.calls += 1
        return found


class Flagging:
    __slots__ = ("is_odd",)  # mostly bound to what it was

    def __init__(self) -> None:
        self.is_odd = False

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        self.is_odd = bool(batch["input_ids"][0, 0] % 2)
        return own_loss(model, batch) * (2 if self.is_odd else 1)


class Keeping(torch.nn.Module):
    owner: Any = staticmethod(lambda loss: loss)

    def forward(self, model: Model, batch: Batch) -> torch.Tensor:
        self.owner(self).labels = batch["labels"]
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
        wanted = self.owner(self).labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted)


class KeepingForAll(Keeping):
    owner = type


class Warming:
    step, scale = 0, 1.0

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        if self.step:
            self.scale = 1.0 + float(batch["input_ids"][0, 0]) / 100
        return own_loss(model, batch) * self.scale

    def note(self, model: Model, step: int) -> None:
        self.step, self.scale = step, 1.0


WARMING = Warming()


def within_another(model: Model) -> Loss:
    flagging = Flagging()
    return lambda model, batch: flagging(model, batch)


def on_model(model: Model) -> Loss:
    """In an attribute of the model."""
    holder = model.get_base_model()
    holder.seen = 0

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        holder.seen += 1
        return masked(model, batch, holder.seen)

    return loss


STATES = {
    "variable": program(variable, "changes calls"),
    "global": program(total, "changes TOTAL"),
    "object": program(lambda model: Counting()),
    "last loss": program(lambda model: Counting().scaled),
    "tokens by number, late": program(lambda model: Counting().late_tokens, "changes calls"),
    "flag": program(lambda model: Flagging(), "changes is_odd"),
    "flag of another object": program(within_another, "changes is_odd"),
    "labels of a module": program(lambda model: Keeping(), "changes labels"),
    "labels of a class": program(lambda model: KeepingForAll(), "changes labels"),
    "number that changes later": program(
        of(WARMING), (UNSUPPORTED, "changes scale"), sizes=(3, 3), between=WARMING.note
    ),
    "number of the model": program(on_model, "changes the model"),
    "random numbers of Python": program(
        of(lambda model, batch: masked(model, batch, random.randrange(1, 4))),
        "random numbers of Python or NumPy",
    ),
}


# Gradients that the loss reads, writes or takes.


def size(gradients: Any) -> float:
    return sum(float(each.abs().sum()) for each in gradients if each is not None)


def reading(model: Model, batch: Batch) -> torch.Tensor:
    return own_loss(model, batch) * (1 + size(each.grad for each in trained(model)))


def reading_before(model: Model, batch: Batch) -> torch.Tensor:
    return (1 + size(each.grad for each in trained(model))) * own_loss(model, batch)


def behind_its_backward(act: Callable[[Model], None]) -> Loss:
    def loss(model: Model, batch: Batch) -> torch.Tensor:
        own_loss(model, batch).backward()
        act(model)
        return torch.zeros((), requires_grad=True)

    return loss


def taking(model: Model, batch: Batch) -> torch.Tensor:
    found = own_loss(model, batch)
    gradients = torch.autograd.grad(found, trained(model), retain_graph=True, allow_unused=True)
    return found * (1 + size(gradients))


def of_single_parameters(model: Model, batch: Batch) -> torch.Tensor:
    found = own_loss(model, batch)
    found.backward(inputs=trained(model)[:1], retain_graph=True)
    return found


def of_single_parameters_behind(model: Model, batch: Batch) -> torch.Tensor:
    found = own_loss(model, batch)
    found.backward(retain_graph=True)
    found.backward(inputs=trained(model)[:1])
    return torch.zeros((), requires_grad=True)


def gradients_of_logits(model: Model, batch: Batch) -> torch.Tensor:
    output = model(**batch, use_cache=False)
    (taken,) = torch.autograd.grad(output.loss, [output.logits], retain_graph=True)
    return output.loss * (1 + size([taken]))  # type: ignore[no-any-return]


def gradients_of_inputs(model: Model, batch: Batch) -> torch.Tensor:
    """Of what goes into the layers, which is no leaf."""
    leaf = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    given = leaf * 1.0
    found = model(inputs_embeds=given, labels=batch["labels"], use_cache=False).loss
    (taken,) = torch.autograd.grad(found, [given], retain_graph=True, allow_unused=True)
    return found * (1 + size([taken]))  # type: ignore[no-any-return]


def hooked_at_a_node(model: Model, batch: Batch) -> torch.Tensor:
    """A hook on the node of an adapter, for the time of this backward."""
    parameter = trained(model)[0]
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    with node.register_prehook(lambda given: (0.5 * given[0],)):
        own_loss(model, batch).backward()
    return torch.zeros((), requires_grad=True)


def by_the_engine(model: Model, batch: Batch) -> torch.Tensor:
    """A backward that ``torch.autograd`` does not know of, as C++ code has it."""
    found = own_loss(model, batch) + trained(model)[0].square().sum()
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        *((found,), (torch.ones(()),), False, False, ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    return torch.zeros((), requires_grad=True)


def edit_the_last_norm(model: Model, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        model.get_base_model().model.norm.weight.mul_(1.5)
    return own_loss(model, batch)


def no_gradient(model: Model, batch: Batch) -> torch.Tensor:
    """As in the place of a loss that is no number."""
    return own_loss(model, batch).detach().requires_grad_()


def another_backward(model: Model, batch: Batch) -> torch.Tensor:
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    return own_loss(model, batch)


def backward_twice(model: Model, batch: Batch) -> torch.Tensor:
    output = model(**batch, use_cache=False)
    output.logits.square().mean().backward(retain_graph=True)
    return output.loss


def put_before(model: Model, number: int) -> None:
    for each in trained(model):
        each.grad = torch.full_like(each, 0.1)


WHILE = "gradients are used while"
GRADIENTS = {
    "read": program(of(reading), WHILE),
    "read before": program(of(reading_before), "gradients are used before"),
    "clamped behind its backward": program(of(behind_its_backward(clamp))),
    "noise behind its backward": program(of(behind_its_backward(add_noise)), lengths=(8,)),
    "taken by autograd.grad": program(of(taking), "takes gradients of single"),
    "two backwards": program(of(backward_twice), "a second backward"),
    "there before": program(between=put_before),
}


# What else the loss computes, and in what.


def two_forwards(model: Model, batch: Batch) -> torch.Tensor:
    return own_loss(model, batch) + own_loss(model, batch)


def catching(model: Model, batch: Batch) -> torch.Tensor:
    loss = own_loss(model, batch)
    try:
        return loss + own_loss(model, batch)
    except:  # noqa: E722
        return loss


def hidden_states(model: Model, batch: Batch) -> torch.Tensor:
    output = model(**batch, use_cache=False, output_hidden_states=True)
    return output.loss + output.hidden_states[1].float().square().mean()


def packed(model: Model, batch: Batch) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        return own_loss(model, batch)


def penalty(model: Model) -> torch.Tensor:
    """On adapters themselves: seen when the loss has been computed."""
    return 0.1 * sum(each.square().sum() for each in trained(model))


def penalized(model: Model, batch: Batch) -> torch.Tensor:
    return own_loss(model, batch) + penalty(model)


def penalized_apart(model: Model, batch: Batch) -> torch.Tensor:
    """In a backward of its own, behind the loss's."""
    apart = penalty(model)
    own_loss(model, batch).backward()
    return apart


def penalized_before(model: Model, batch: Batch) -> torch.Tensor:
    penalty(model).backward()
    return own_loss(model, batch)


def in_evaluation_mode(model: Model, batch: Batch) -> torch.Tensor:
    model.eval()
    try:
        return own_loss(model, batch)
    finally:
        model.train()


def in_autocast_at_times(model: Model, batch: Batch) -> torch.Tensor:
    return (in_autocast if batch["input_ids"].shape[1] % 2 else own_loss)(model, batch)


def setting(model: Model, batch: Batch) -> torch.Tensor:
    torch.use_deterministic_algorithms(batch["input_ids"].shape[1] % 2 == 1)
    return own_loss(model, batch)


def scaling(model: Model, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        for each in trained(model):
            each.mul_(0.9)
    return own_loss(model, batch)


def reference(is_first: bool) -> Callable[[Model], Loss]:
    """PEFT has all of an adapter trained behind it."""

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        output = None if is_first else model(**batch, use_cache=False)
        with torch.no_grad(), model.disable_adapter():
            expected = model(**batch, use_cache=False).logits.float()
        output = output or model(**batch, use_cache=False)
        return output.loss + (output.logits.float() - expected).square().mean()

    return of(loss)


def frozen_again(model: Model, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name and "layers.1." not in name)


ITSELF = "uses parameters of layers"
THAWS = UNSUPPORTED, "edits, freezes or thaws"
LOSSES = {
    "two forwards": program(of(two_forwards), "more than once"),
    "errors that are caught": program(of(catching), "more than once"),
    "hidden states": program(of(hidden_states), "recorded"),
    "saved tensors that are packed": program(of(packed), (UNSUPPORTED, "saved-tensor hooks")),
    "a penalty on adapters": program(of(penalized), ITSELF),
    "a penalty, apart": program(of(penalized_apart), ITSELF),
    "a hook on the node of an adapter": program(of(hooked_at_a_node), ITSELF),
    "a backward by the engine": program(of(by_the_engine), ITSELF),
    "a penalty of AdaLoRA": program(end=ITSELF, base=lambda: training(adapter="adalora")),
    "evaluation mode while it runs": program(of(in_evaluation_mode), "changes while it runs"),
    "settings that change": program(of(setting), (UNSUPPORTED, "settings of PyTorch")),
    "edited adapters": program(of(scaling), "edits parameters"),
    "a reference behind": program(reference(False), base=S.partly_frozen, sizes=(3, 3, 3)),
    "a reference before, frozen again": program(
        *(reference(True), THAWS),
        **{"base": S.partly_frozen, "between": frozen_again, "lengths": (8,)},
    ),
    "autocast": program(of(in_autocast), base=lambda: training()),
    "autocast for some": program(
        *(of(in_autocast_at_times), "others for some"), base=lambda: training(dtype=torch.float32)
    ),
    "gradients disabled around": program(
        of(torch.enable_grad()(own_loss)), "gradients are disabled", around=torch.no_grad
    ),
}


# Code that ends early or in error, or whose context layers and backwards depend on.


def skipping(model: Model, batch: Batch) -> torch.Tensor:
    """Draws, and calls no model for some."""
    if batch["input_ids"].shape[1] == 5:
        torch.rand(3)
        return torch.zeros((), requires_grad=True)
    return own_loss(model, batch)


def raising(place: int) -> Any:
    """A layer raises for some; the loss goes on without the model then."""

    def forward(mlp: Any, own: Any, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[1] == 5:
            raise ValueError
        return own(hidden)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        try:
            return own_loss(model, batch)
        except ValueError:
            torch.rand(3)
            return torch.zeros((), requires_grad=True)

    def make(model: Model) -> Loss:
        override([layers_of(model)[place].mlp], forward)
        return loss

    return make


SCALE = ContextVar("SCALE", default=1.0)


def scaled(mlp: Any, own: Any, hidden: torch.Tensor) -> torch.Tensor:
    return own(hidden) * SCALE.get()


def with_a_context(model: Model) -> Loss:
    """Layers read a context variable that the loss has set."""
    override([layers_of(model)[1].mlp], scaled)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        token = SCALE.set(1 + batch["input_ids"].shape[1] / 16)
        try:
            return own_loss(model, batch)
        finally:
            SCALE.reset(token)

    return loss


def hooked_backward(model: Model, batch: Batch) -> torch.Tensor:
    """A hook on an adapter, around a backward of the loss."""
    found = own_loss(model, batch)
    with trained(model)[0].register_hook(lambda each: None if each is None else each * 0.5):
        found.backward()
    return torch.zeros((), requires_grad=True)


def backward_in_a_region(model: Model, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own_loss(model, batch).backward()
    return torch.zeros((), requires_grad=True)


def prompted(model: Model) -> Loss:
    """A trained prompt that is not the model's, with a penalty."""
    width = model.config.hidden_size
    prompt = torch.nn.Parameter(torch.linspace(-0.1, 0.1, 2 * width).view(1, 2, width))

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"])
        first = prompt.to(embedded.dtype).expand(len(embedded), -1, -1)
        scale = 1.0 if prompt.grad is None else 1 + float(prompt.grad.norm())
        logits = model(inputs_embeds=torch.cat([first, embedded], 1), use_cache=False).logits
        return logits.float().square().mean() * scale + prompt.square().sum()

    return loss


ENDS = {
    "no model for some": program(of(skipping), lengths=(12, 9, 5, 7), sizes=(3, 4, 3)),
    "an error of the first layer": program(raising(0), lengths=(12, 9, 5, 7), sizes=(3, 4, 3)),
    "an error of a later layer": program(raising(1), lengths=(12, 9, 7, 5), sizes=(4, 4)),
    "an error of a later layer, and one behind": program(
        *(raising(1), (UNSUPPORTED, "its code catches")),
        lengths=(12, 9, 5, 7),
        sizes=(4, 3),
    ),
    "a context variable": program(with_a_context),
    "a hook around its own backward": program(of(hooked_backward), "hooks on parameters"),
    "its own backward in a region": program(
        of(backward_in_a_region),
        "a backward within an autocast region",
        base=lambda: training(quantize=False, dtype=torch.float32),
    ),
    "a prompt of its own": program(prompted, "not the model's"),
}


# What only later ones do, when others of their kind have gone together.

SINGLE = UNSUPPORTED, "gradients of single parameters"
LATER = {
    "read": later(reading, (UNSUPPORTED, "used while")),
    "read before": later(reading_before, "gradients are used before"),
    "clamped behind its backward": later(behind_its_backward(clamp)),
    "taken by autograd.grad": later(taking, SINGLE),
    "backwards of single parameters": later(of_single_parameters, SINGLE),
    "backwards of single parameters behind its own": later(of_single_parameters_behind, SINGLE),
    "gradients of logits": later(gradients_of_logits),
    "gradients of inputs": later(gradients_of_inputs, (UNSUPPORTED, "not behind its layers")),
    "no gradient for the layers": later(no_gradient),
    "a backward of another model": later(another_backward),
    "two backwards": later(backward_twice, (UNSUPPORTED, "one backward for each")),
    "two forwards": later(two_forwards, (UNSUPPORTED, "more than once")),
    "hidden states": later(hidden_states, "recorded"),
    "a penalty on adapters": later(penalized, (UNSUPPORTED, "uses parameters")),
    "a penalty before": later(penalized_before, "uses parameters"),
    "a backward by the engine": later(by_the_engine, (UNSUPPORTED, "past torch.autograd")),
    "a frozen norm that is edited": later(edit_the_last_norm, (UNSUPPORTED, "edits some")),
    "saved tensors that are packed": later(packed, (UNSUPPORTED, "saved-tensor hooks")),
    "evaluation mode while it runs": later(in_evaluation_mode),
}
PROGRAMS = {
    **{**FORMS, **STATES, **GRADIENTS, **LOSSES, **ENDS},
    **{f"{name}, later": each for name, each in LATER.items()},
}


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str) -> None:
    try:
        assert ends(PROGRAMS[which])
    finally:
        torch.use_deterministic_algorithms(False)


def without_states(group: Any, genuine: Any = Group.finish_behind) -> Any:
    """Code that is over leaves the random states of whoever asks."""
    batch = group.behind
    if not batch.code.is_over:
        return genuine(group)
    group.behind = None
    return batch.code.result


CONTROLS = {
    "regions that stay": Control(
        Regions, "replace", lambda self, now: None, LOSSES["autocast for some"]
    ),
    "layers outside the context of the code": Control(
        ParkedCode, "run_in_context", lambda self, run: run(), ENDS["a context variable"]
    ),
    "uses of adapters that nobody looks for": Control(
        *(InPlace, "_why_apart", staticmethod(lambda *_: None)), LATER["a penalty on adapters"]
    ),
    "random states of code that is over": Control(
        *(Group, "finish_behind", without_states), ENDS["no model for some"]
    ),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_controls(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONTROLS[which].is_seen(monkeypatch)
