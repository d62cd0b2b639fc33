"""What code of the model does in, around and between its layers: equal bits, or a typed error."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from poros.accumulation import foreign, observed
from poros.accumulation.calls import Calls, HiddenStates
from poros.accumulation.foreign import LIBRARIES
from poros.accumulation.group import Group
from poros.accumulation.micro_batch import MicroBatch
from poros.errors import UnsupportedModelError
from poros.stream.condition import StackConditions
from tests.exact import subjects as S
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.together import Call, Control, Loop, Program, dense, ends, layers, program, train
from tests.support import prepare_plain

Model = Any

# In layers.


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-3 * torch.randn_like(gradient)


def in_layers(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Of the input and the output of each layer's MLP."""

    def make(model: Model) -> None:
        class Changed(type(layers(model)[0].mlp)):  # type: ignore[misc]
            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                return change(hidden, super().forward(hidden))

        for layer in layers(model):
            layer.mlp.__class__ = Changed

    return make


def drawing_by_data(given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    torch.rand(int((given.float().sum() * 1e4).abs()) % 7)
    return output * torch.rand(1).to(output.dtype)


def drawing_one(given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """A CPU's generator keeps the second one of a pair: no count of draws says that."""
    return output * (1 + 0.01 * torch.randn(1).to(output.dtype))


def other_rates(model: Model) -> None:
    """Measured once for each kind of layer."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and ".1." in name:
            module.p = 0.0


def hooked(model: Model) -> None:
    layers(model)[1].register_forward_hook(lambda module, args, output: output * 1.5)


def hooked_before(model: Model) -> None:
    layers(model)[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


# Around layers.


def dropout_outside(model: Model) -> None:
    """What comes behind the last layer is not known before: the first group ends early."""
    for module in (model.get_base_model().model.norm, model.get_input_embeddings()):
        module.register_forward_hook(
            lambda module, args, output: torch.nn.functional.dropout(output, 0.1)
        )


def leaving(leave: Callable[[torch.Tensor], Any], read: Callable[[Any], Any] = float) -> Any:
    """Layers leave something in a module, which the loss reads."""

    def make(model: Model) -> Any:
        class Leaving(type(layers(model)[0].mlp)):  # type: ignore[misc]
            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = super().forward(hidden)
                self.left = leave(found.float().square().mean())
                return found

        for layer in layers(model):
            layer.mlp.__class__ = Leaving

        def loss(model: Model, batch: Any) -> torch.Tensor:
            found: torch.Tensor = model(**batch, use_cache=False).loss / 4
            return found + found * sum(read(each.mlp.left) for each in layers(model))

        return loss

    return make


def scaling(place: int) -> Any:
    """The loss sets the scaling of one layer before it calls the model; of some another one."""

    def make(model: Model) -> Any:
        values = layers(model)[place].self_attn.q_proj.scaling
        usual = values["default"]

        def loss(model: Model, batch: Any) -> torch.Tensor:
            values["default"] = usual * (4 if batch["input_ids"].shape[1] == 9 else 1)
            found: torch.Tensor = model(**batch, use_cache=False).loss / 4
            return found

        return loss

    return make


def growing(model: Model) -> None:
    """Rotary embeddings: what a forward leaves in the model for the next one."""
    base = model.get_base_model().model
    base.norm.register_buffer("longest", torch.zeros(()))
    base.rotary_emb.longest = 0

    def grow(module: Any, args: Any, output: Any) -> Any:
        module.longest = max(module.longest, args[0].shape[1])
        return tuple(each * (1 + module.longest / 100) for each in output)

    base.rotary_emb.register_forward_hook(grow)


def writing(change: float) -> Any:
    """A forward writes to a buffer; with 0 what was in it, as DDP does before a forward."""

    def make(model: Model) -> None:
        def write(module: Any, args: Any) -> None:
            module.inv_freq.copy_(module.inv_freq * (1 + change))

        model.get_base_model().model.rotary_emb.register_forward_pre_hook(write)

    return make


def tied(model: Model) -> None:
    first, second = (layer.self_attn.q_proj.lora_A for layer in layers(model)[:2])
    second.default.weight = first.default.weight


def vocabulary(bases: Bases, is_tied: bool) -> Model:
    base = bases.base("qwen2", quantize=False)
    if is_tied:
        base.config.tie_word_embeddings = True
        base.tie_weights()
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


SEVERAL = "a trained parameter with several places"
AROUND = {
    "draws in the backwards of layers": program(
        in_layers(lambda given, output: Noise.apply(output)), "in the backwards of layers"
    ),
    "draws that depend on data": program(
        in_layers(drawing_by_data), "does not depend on shapes", lengths=(8,), sizes=(3,) * 4
    ),
    "a normal number at a time": program(in_layers(drawing_one), "does not depend on shapes"),
    "layers that draw differently": program(other_rates, lengths=(8,)),
    "hooks on a layer": program(hooked, "hooks on whole layers", is_late=True),
    "hooks before a layer": program(hooked_before, "hooks on whole layers", is_late=True),
    "dropout outside the layers": program(dropout_outside, lengths=(8,), sizes=(3, 3)),
    "rotary embeddings that grow": program(growing, "changes the model", lengths=(20, 60, 40)),
    "a buffer that is written to": program(writing(0.01), "changes the model"),
    "a buffer that is written to, the same": program(writing(0.0)),
    "tied adapters": program(tied, SEVERAL),
    "another scaling for some": program(
        *(scaling(1), (UnsupportedModelError, "while it runs")), lengths=(12, 9, 12, 12)
    ),
    "another scaling of the first layer": program(
        *(scaling(0), (UnsupportedModelError, "while it runs")), lengths=(12, 12, 9, 12)
    ),
    "layers that leave a tensor": program(
        leaving(lambda found: found, lambda left: left), "leave left in their modules"
    ),
    "layers that leave a number": program(leaving(float), "leave left in their modules"),
    "layers that leave a list": program(
        leaving(lambda found: [found.detach()], lambda left: left[0]), "leave left in their modules"
    ),
    "a trained vocabulary": program(base=partial(vocabulary, is_tied=False)),
    "a trained vocabulary, tied": program(end=SEVERAL, base=partial(vocabulary, is_tied=True)),
    "frozen lower layers": program(
        base=lambda b: adapted(b, lora_dropout=0.1, layers_to_transform=[1]), lengths=(8,)
    ),
    "inputs that require gradients": program(lambda model: model.enable_input_require_grads()),
    "autocast around all, without a cache": program(
        base=lambda bases: dense(bases, dtype=torch.float32),
        around=partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False),
    ),
}


# Between layers, from the first step on or from a later one.


def scaled(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    return layer(hidden * 1.5 if number == 1 else hidden, *args, **kwargs)


def in_place(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    return layer(hidden.mul_(1.5) if number == 1 else hidden, *args, **kwargs)


def drawing(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    torch.rand(3)
    return layer(hidden, *args, **kwargs)


def in_evaluation_mode(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    layer.train(number != 1)
    try:
        return layer(hidden, *args, **kwargs)
    finally:
        layer.train()


def in_autocast(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number == 1):
        return layer(hidden, *args, **kwargs)


def with_a_seed(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    if number != 1:
        return layer(hidden, *args, **kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return layer(hidden, *args, **kwargs)


def masking(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    """The mask is edited for one layer, and put back."""
    mask = kwargs["attention_mask"]
    if number != 1:
        return layer(hidden, *args, **kwargs)
    before = mask.clone()
    mask.mul_(0.0)
    found = layer(hidden, *args, **kwargs)
    mask.copy_(before)
    return found


def reading(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    """A mask that depends on hidden states, for one layer."""
    if number == 1:
        mask = kwargs["attention_mask"]
        kwargs = {**kwargs, "attention_mask": mask + hidden.detach().mean().to(mask.dtype)}
    return layer(hidden, *args, **kwargs)


def refilled(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    """A mask of its own for one layer, edited behind the call."""
    if number != 1:
        return layer(hidden, *args, **kwargs)
    own = kwargs["attention_mask"].clone()
    found = layer(hidden, *args, **{**kwargs, "attention_mask": own})
    own.fill_(0.0)
    return found


def frozen_meanwhile(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    trained = [each for each in layer.parameters() if each.requires_grad and number == 1]
    for each in trained:
        each.requires_grad_(False)
    try:
        return layer(hidden, *args, **kwargs)
    finally:
        for each in trained:
            each.requires_grad_(True)


def of_python(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    random.random()
    return layer(hidden, *args, **kwargs)


def halving(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    for each in layer.parameters():
        if number == 1 and each.requires_grad and each.grad is not None:
            each.grad.mul_(0.5)
    return layer(hidden, *args, **kwargs)


@torch.jit.script
def mean_of(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.mean()


def compiled(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
    """No function of Python sees that it reads hidden states."""
    if number == 1:
        mask = kwargs["attention_mask"]
        kwargs = {**kwargs, "attention_mask": mask + mean_of(hidden).detach().to(mask.dtype)}
    return layer(hidden, *args, **kwargs)


class Kept:
    """Layer 1 is given what layer 0 has returned at the call before."""

    def __init__(self) -> None:
        self.before: Any = None

    def __call__(self, number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        if number == 1:
            before, self.before = self.before, hidden
            hidden = hidden if before is None else before
        return layer(hidden, *args, **kwargs)


def frozen_below(bases: Bases) -> Model:
    model = dense(bases)
    for parameter in layers(model)[0].parameters():
        parameter.requires_grad_(False)
    return model


def summed(model: Model) -> None:
    """Reads what layers return."""
    seen: list[torch.Tensor] = []

    def keeping(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        if number == 0:
            seen.clear()
        seen.append(layer(hidden, *args, **kwargs))
        return seen[-1]

    Loop(model, keeping)
    model.get_base_model().model.norm.register_forward_hook(
        lambda module, args, output: output + sum(seen[:-1])
    )


def with_a_state(bases: Bases) -> Model:
    """Layers take an object that scales."""
    model = dense(bases)
    own: Any = type(layers(model)[0])

    class Scaled(own):
        def forward(self, hidden_states: Any, *args: Any, state: Any = None, **kw: Any) -> Any:
            found = super().forward(hidden_states, *args, **kw)
            return found if state is None else found * state.scale

    Scaled.__name__, Scaled.__qualname__ = own.__name__, own.__qualname__
    Scaled.__module__ = own.__module__
    for layer in layers(model):
        layer.__class__ = Scaled
    return model


class Scaling:
    scale = 1.0

    def __call__(self, number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        self.scale = 1.0 + number / 8
        return layer(hidden, *args, state=self, **kwargs)


def between(make: Callable[[], Call], end: Any, since: int = 0, **options: Any) -> Program:
    """``since``: the step from which on the loop is another one."""
    loops: list[Loop] = []

    def change(model: Model) -> None:
        loops[:] = [Loop(model, make())]

    def switch(model: Model, step: int) -> None:
        loops[0].is_on = step >= since

    usual = {"is_late": True, "between": switch, "sizes": (3, 3)}
    return program(change, end, **{**usual, **options})


COMPUTES = "computes with hidden states between"
CALLS: dict[str, tuple[Call, str]] = {
    "code": (scaled, COMPUTES),
    "edits in place": (in_place, COMPUTES),
    "draws": (drawing, "drawn between layers"),
    "evaluation mode": (in_evaluation_mode, "change"),
    "autocast": (in_autocast, "changes autocast"),
    "a seed": (with_a_seed, "drawn between layers"),
}
LATER = {
    **{name: (call, (UnsupportedModelError, end)) for name, (call, end) in CALLS.items()},
    "evaluation mode": (in_evaluation_mode, (UnsupportedModelError, "while it runs")),
}
EDITED = (UnsupportedModelError, "edited in place")
EAGER = partial(dense, attn_implementation="eager")
THREE: Any = {"base": partial(dense, num_layers=3)}
UNDONE: dict[str, tuple[Call, str, Any]] = {
    "draws of Python": (of_python, "drawn between layers", THREE),
    "halved gradients": (halving, "gradients are used", THREE),
    "a mask that is refilled": (refilled, "edited in place", {"base": EAGER}),
    "a mask by compiled code": (compiled, COMPUTES, {"base": EAGER}),
}
BETWEEN = {
    **{
        f"{name}, later": between(lambda call=call: call, (UnsupportedModelError, end), 1, **more)
        for name, (call, end, more) in UNDONE.items()
    },
    "one layer": program(base=partial(dense, num_layers=1)),
    **{
        name: between(lambda call=call: call, end, lengths=(8,))
        for name, (call, end) in CALLS.items()
    },
    **{f"{n}, later": between(lambda call=c: call, end, 1) for n, (c, end) in LATER.items()},
    "a mask of hidden states": between(lambda: reading, COMPUTES, base=EAGER),
    "a mask of hidden states, later": between(
        lambda: reading, (UnsupportedModelError, COMPUTES), 1, base=EAGER
    ),
    "an edited mask, later": between(lambda: masking, EDITED, 1, base=EAGER),
    "hidden states of another micro-batch": between(
        Kept, (UnsupportedModelError, COMPUTES), base=frozen_below, lengths=(12,)
    ),
    "hidden states that are kept": program(summed, COMPUTES, is_late=True, lengths=(12,)),
    "an object that changes": between(
        *(Scaling, "objects that may change", 1),
        **{"base": with_a_state, "policy": {"keep_last": 3}, "is_late": False},
    ),
}
PROGRAMS = {**AROUND, **BETWEEN}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of these tests counts as a library's, as what layers and models do is looked at."""
    monkeypatch.setattr(foreign, "LIBRARIES", LIBRARIES | {"tests", __name__.partition(".")[0]})


def carrying(model: Model) -> None:
    """The first layer leaves something for the others, in an object that nobody looks into."""
    held = Scaling()

    class Carrying(type(layers(model)[0].mlp)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(hidden)
            if self is layers(model)[0].mlp:
                held.scale = 1 + float(found.detach().float().mean())
            return found * held.scale

    for layer in layers(model):
        layer.mlp.__class__ = Carrying


FOREIGN_CODE = "code of no library"
FOREIGN = {
    "a module": program(carrying, FOREIGN_CODE),
    **{
        name: between(lambda call=call: call, FOREIGN_CODE, is_late=False, **THREE)
        for name, call in {
            "a seed between layers": with_a_seed,
            "frozen adapters for one call": frozen_meanwhile,
        }.items()
    },
}


@pytest.mark.parametrize("which", FOREIGN)
def test_code_of_others_in_layers_is_not_grouped(
    which: str, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "LIBRARIES", LIBRARIES)
    assert ends(FOREIGN[which], bases)


def test_control_code_of_others_passes_values(bases: Bases) -> None:
    """As if it were a library's."""
    with pytest.raises(AssertionError):
        assert ends(FOREIGN["a module"]._replace(end=None), bases)


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str, bases: Bases) -> None:
    assert ends(PROGRAMS[which], bases)


def blank(batch: Any) -> torch.Tensor:
    """Hidden states that are zeros, and may be used."""
    shape, dtype = batch._form
    found = torch.zeros(shape, dtype=dtype).as_subclass(HiddenStates)
    found.used = lambda: None
    return found


CONTROLS = {
    "states that are not planned": Control(
        Group, "_plan_behind", lambda self, batch: True, AROUND["frozen lower layers"]
    ),
    "hidden states that nobody watches": Control(
        *(MicroBatch, "_hand_on", blank, BETWEEN["a mask of hidden states, later"])
    ),
    "arguments that nobody compares": Control(
        *(Calls, "require_unedited", lambda self: None, BETWEEN["a mask that is refilled, later"])
    ),
    "draws that nobody sees": Control(
        *(MicroBatch, "_has_drawn", lambda self: False, BETWEEN["a seed, later"])
    ),
    "what layers leave that nobody looks at": Control(
        observed, "contents_of", lambda table: {}, AROUND["layers that leave a number"]
    ),
    "conditions that nobody compares": Control(
        *(StackConditions, "still_hold", lambda self: True),
        AROUND["another scaling of the first layer"],
    ),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_controls(which: str, bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONTROLS[which].is_seen(bases, monkeypatch)


def test_what_goes_into_the_layers_and_into_the_loss(bases: Bases) -> None:
    """It is refused: whoever listens there would see two gradients for their sum."""

    def loss(model: Model, batch: Any) -> torch.Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"])
        output = model(inputs_embeds=embedded, labels=batch["labels"], use_cache=False)
        found: torch.Tensor = output.loss / 4 + embedded.float().square().mean()
        return found

    model = prepare_plain(S.inputs_require_gradients(bases).train(), slots=2)
    with pytest.raises(UnsupportedModelError, match="what goes into them"):
        train(model, True, sizes=(3, 2), loss=loss)
