"""What code of the model does in, around and between its layers: equal bits, or a typed error.

Hooks and tied adapters: ``test_written_programs``.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from poros.accumulation.group import Group
from poros.errors import UnsupportedModelError
from poros.kernels import forwards
from poros.kernels.forwards import LIBRARIES
from tests.exact import subjects as S
from tests.exact.subjects import Call, Loop
from tests.loops import (
    Control,
    Training,
    adapted,
    before,
    behind,
    dense,
    ends,
    layers_of,
    mlps,
    of,
    override,
    own_loss,
    program,
    small_base,
    trained,
)

Model = Any

# In layers.


def in_layers(forward: Callable[..., torch.Tensor]) -> Any:
    """With this forward of each layer's MLP: of the module, its own forward, and its input."""
    return lambda model: override(mlps(model), forward)


def drawing_by_data(mlp: Any, own: Any, given: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = own(given)
    torch.rand(int((given.float().sum() * 1e4).abs()) % 7)
    return output * torch.rand(1).to(output.dtype)


def drawing_one(mlp: Any, own: Any, given: torch.Tensor) -> torch.Tensor:
    """A CPU's generator keeps the second one of a pair: no count of draws says that."""
    output: torch.Tensor = own(given)
    return output * (1 + 0.01 * torch.randn(1).to(output.dtype))


def other_rates(model: Model) -> None:
    """Measured once for each kind of layer."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and ".1." in name:
            module.p = 0.0


def without_rates(model: Model, step: int) -> None:
    if step == 2:
        other_rates(model)


# Around layers.


dropout_outside = behind(
    lambda module, args, output: torch.nn.functional.dropout(output, 0.1),
    *("model.norm", "embed_tokens"),
)
"""What comes behind the last layer is not known before: the first group ends early."""


def leaving(leave: Callable[[torch.Tensor], Any], read: Callable[[Any], Any] = float) -> Any:
    """Layers leave something in a module, which the loss reads."""

    def forward(mlp: Any, own: Any, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = own(given)
        mlp.left = leave(found.float().square().mean())
        return found

    def loss(model: Model, batch: Any) -> torch.Tensor:
        found = own_loss(model, batch)
        return found + found * sum(read(each.mlp.left) for each in layers_of(model))

    def make(model: Model) -> Any:
        in_layers(forward)(model)
        return loss

    return make


def with_a_set(model: Model) -> None:
    """Of which a copy has another order: it had more elements once."""
    found = set(range(100))
    found -= {*found} - {1, 64}
    assert list(found) != list(found.copy())
    model.get_base_model().model.classes = found


def patching(model: Model) -> Any:
    """A loss patches a norm before it calls the model, in the second step."""
    norm, numbers = layers_of(model)[1].input_layernorm, count()

    def loss(model: Model, batch: Any) -> torch.Tensor:
        if next(numbers) == 4:
            norm.forward = partial(lambda own, hidden: 2 * own(hidden), norm.forward)
        return own_loss(model, batch)

    return loss


def scaling(place: int) -> Any:
    """The loss sets the scaling of one layer before it calls the model; of some another one."""

    def make(model: Model) -> Any:
        projection = layers_of(model)[place].self_attn.q_proj
        usual = projection.scaling["default"]

        def loss(model: Model, batch: Any) -> torch.Tensor:
            projection.scaling["default"] = usual * (4 if batch["input_ids"].shape[1] == 9 else 1)
            return own_loss(model, batch)

        return loss

    return make


class Passing:
    """From the second step on, a value that the loss reads is changed by one of length 9.

    ``before``: before it calls the model; ``alone``: and it runs alone, behind the others. Or one
    of length 9 is running alone, has read it before it calls the model, and another one changes it.
    """

    def __init__(self, before: bool, alone: bool) -> None:
        self.before, self.alone, self.step, self.scale = before, alone, 0, 1.0

    def __call__(self, model: Model, batch: Any) -> torch.Tensor:
        is_last = bool(self.step) and batch["input_ids"].shape[1] == 9
        if is_last and self.before:
            self.scale = 2.0
        scale = self.scale
        if is_last and self.alone:
            assert any(each.grad is not None for each in trained(model))
        found = own_loss(model, batch)
        if self.step and not is_last and not self.before:
            self.scale = 3.0
        return found * (self.scale if self.before else scale)

    def note(self, model: Model, step: int) -> None:
        self.step, self.scale = step, 1.0


def passing(before: bool, alone: bool) -> Training:
    loss, end = Passing(before, alone), (UnsupportedModelError, "changes scale")
    lengths = (12, 12, 9) if before else (12, 9)
    sizes = (len(lengths), len(lengths))
    return program(of(loss), end, lengths=lengths, sizes=sizes, between=loss.note)


def using_what_goes_in(model: Model, batch: Any) -> torch.Tensor:
    """Whoever listens there would see two gradients for their sum."""
    embedded = model.get_input_embeddings()(batch["input_ids"])
    output = model(inputs_embeds=embedded, labels=batch["labels"], use_cache=False)
    return output.loss / 4 + embedded.float().square().mean()


def writing(change: float) -> Any:
    """A forward writes to a buffer; with 0 what was in it, as DDP does before a forward."""

    def write(module: Any, args: Any) -> None:
        module.inv_freq.copy_(module.inv_freq * (1 + change))

    return before(write, "rotary_emb")


def vocabulary(is_tied: bool) -> Model:
    base = small_base("qwen2", quantize=False)
    if is_tied:
        base.config.tie_word_embeddings = True
        base.tie_weights()
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def of_a_class_of_its_own(model: Model) -> None:
    class Own(torch.nn.Parameter):
        pass

    trained(model)[0].__class__ = Own


CHANGED = UnsupportedModelError, "while it runs"
AROUND = {
    "a parameter of its own class": program(of_a_class_of_its_own, "a class of its own"),
    "draws that depend on data": program(
        in_layers(drawing_by_data), "does not depend on shapes", lengths=(8,), sizes=(3,) * 4
    ),
    "a normal number at a time": program(in_layers(drawing_one), "does not depend on shapes"),
    "layers that draw differently": program(other_rates, lengths=(8,)),
    "a layer that draws no more": program(lengths=(8,), sizes=(3, 3, 3), between=without_rates),
    "dropout outside the layers": program(dropout_outside, lengths=(8,), sizes=(3, 3)),
    "a buffer that is written to": program(writing(0.01), "changes the model"),
    "a buffer that is written to, the same": program(writing(0.0)),
    "a set": program(with_a_set),
    "a value that one passes": passing(before=True, alone=False),
    "a value that one passes that goes alone": passing(before=True, alone=True),
    "a value that one that goes alone has read": passing(before=False, alone=True),
    "another scaling for some": program(scaling(1), CHANGED, lengths=(12, 9, 12, 12)),
    "a forward of its own for some": program(patching, CHANGED, lengths=(12,)),
    "another scaling of the first layer": program(scaling(0), CHANGED, lengths=(12, 12, 9, 12)),
    "layers that leave a tensor": program(
        leaving(lambda found: found, lambda left: left), "uses parameters of layers"
    ),
    "layers that leave a number": program(leaving(float), "leave left in their modules"),
    "a trained vocabulary": program(base=partial(vocabulary, is_tied=False)),
    "a trained vocabulary, tied": program(
        end="a trained parameter with several places", base=partial(vocabulary, is_tied=True)
    ),
    "frozen lower layers": program(
        base=lambda: adapted(lora_dropout=0.1, layers_to_transform=[1]), lengths=(8,)
    ),
    "inputs that require gradients": program(lambda model: model.enable_input_require_grads()),
    "what goes into the layers, in the loss too": program(
        of(using_what_goes_in), "what goes into them", base=S.inputs_require_gradients
    ),
    "autocast around all, without a cache": program(
        base=lambda: dense(dtype=torch.float32),
        around=partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False),
    ),
}


# Between layers, from the first step on or from a later one: layer 1 is called otherwise.


def handing(change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """It is handed what ``change`` makes of its hidden states."""

    def call(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        return layer(change(hidden) if number == 1 else hidden, *args, **kwargs)

    return call


def doing(act: Callable[[Any, torch.Tensor, dict[str, Any]], Iterator[None]]) -> Call:
    """``act`` does something before its ``yield``, and behind it, when the layer has run.

    It is given the layer, its hidden states, and its other arguments, which it may replace.
    """

    def call(number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        with contextmanager(act)(layer, hidden, kwargs) if number == 1 else nullcontext():
            return layer(hidden, *args, **kwargs)

    return call


Arguments = dict[str, Any]
Doing = Iterator[None]


def hidden_states_of_the_call_before() -> Call:
    seen: list[torch.Tensor] = []

    def exchange(hidden: torch.Tensor) -> torch.Tensor:
        seen[:] = [*seen[-1:], hidden]
        return seen[0]

    return handing(exchange)


def drawing_of_python(layer: Any, hidden: torch.Tensor, given: Arguments) -> Doing:
    random.random()
    yield


def with_a_seed(layer: Any, hidden: torch.Tensor, given: Arguments) -> Doing:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield


def in_evaluation_mode(layer: Any, hidden: torch.Tensor, given: Arguments) -> Doing:
    layer.eval()
    yield
    layer.train()


def in_autocast(layer: Any, hidden: torch.Tensor, given: Arguments) -> Doing:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def halved_gradients(layer: Any, hidden: torch.Tensor, given: Arguments) -> Doing:
    for each in layer.parameters():
        if each.requires_grad and each.grad is not None:
            each.grad.mul_(0.5)
    yield


def mask_refilled_behind(layer: Any, hidden: torch.Tensor, given: Arguments) -> Doing:
    """One of its own."""
    own = given["attention_mask"] = given["attention_mask"].clone()
    yield
    own.fill_(0.0)


def mask_of_hidden_states(layer: Any, hidden: torch.Tensor, given: Arguments) -> Doing:
    mask = given["attention_mask"]
    given["attention_mask"] = mask + hidden.detach().mean().to(mask.dtype)
    yield


@torch.jit.script
def mean_of(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.mean()


def mask_by_compiled_code(layer: Any, hidden: torch.Tensor, given: Arguments) -> Doing:
    """No function of Python sees that it reads hidden states."""
    mask = given["attention_mask"]
    given["attention_mask"] = mask + mean_of(hidden).detach().to(mask.dtype)
    yield


def frozen_below() -> Model:
    model = dense()
    layers_of(model)[0].requires_grad_(False)
    return model


def with_a_state() -> Model:
    """Layers take an object that scales."""

    def forward(layer: Any, own: Any, *args: Any, state: Any = None, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return found if state is None else found * state.scale

    model = dense()
    override(layers_of(model), forward)
    return model


class Scaling:
    scale = 1.0

    def __call__(self, number: int, layer: Any, hidden: Any, args: Any, kwargs: Any) -> Any:
        self.scale = 1.0 + number / 8
        return layer(hidden, *args, state=self, **kwargs)


def between(call: Call, end: Any, since: int = 0, **options: Any) -> Training:
    """``since``: the step from which on the loop is another one."""
    loops: list[Loop] = []

    def change(model: Model) -> None:
        loops[:] = [Loop(model, call)]

    def switch(model: Model, step: int) -> None:
        loops[0].is_on = step >= since

    usual = {"is_late": True, "between": switch, "sizes": (3, 3)}
    return program(change, end, **{**usual, **options})


COMPUTES, DRAWN = "computes with hidden states between", "drawn between layers"
RUNS, EDITED = "while it runs", "edited in place"
EAGER: Any = {"base": partial(dense, attn_implementation="eager")}
THREE: Any = {"base": partial(dense, num_layers=3)}
# What is done; why micro-batches run one after the other, if it is done from the first step on;
# what the error says if it is done from the second on, when they have gone together.
WAYS: dict[str, tuple[Call, str | None, str, dict[str, Any]]] = {
    "other hidden states": (handing(lambda hidden: hidden * 1.5), COMPUTES, COMPUTES, {}),
    "evaluation mode": (doing(in_evaluation_mode), "change", RUNS, {}),
    "autocast": (doing(in_autocast), "changes autocast", "changes autocast", {}),
    "a seed": (doing(with_a_seed), DRAWN, DRAWN, {}),
    "a mask of hidden states": (doing(mask_of_hidden_states), COMPUTES, COMPUTES, EAGER),
    "a mask that is refilled": (doing(mask_refilled_behind), None, EDITED, EAGER),
    "a mask by compiled code": (doing(mask_by_compiled_code), None, COMPUTES, EAGER),
    "draws of Python": (doing(drawing_of_python), None, DRAWN, THREE),
    "halved gradients": (doing(halved_gradients), None, "gradients are used", THREE),
}
BETWEEN = {
    **{
        name: between(call, first, lengths=(8,), **options)
        for name, (call, first, _, options) in WAYS.items()
        if first is not None
    },
    **{
        f"{name}, later": between(call, (UnsupportedModelError, says), 1, **options)
        for name, (call, _, says, options) in WAYS.items()
    },
    "one layer": program(base=partial(dense, num_layers=1)),
    "hidden states of another micro-batch": between(
        hidden_states_of_the_call_before(),
        (UnsupportedModelError, COMPUTES),
        **{"base": frozen_below, "lengths": (12,)},
    ),
    "an object that changes": between(
        *(Scaling(), "objects that may change", 1),
        **{"base": with_a_state, "policy": {"keep_last": 3}, "is_late": False},
    ),
}


def by_keyword(model: Model) -> None:
    """Layers are given their hidden states by name."""
    kind: Any = type(layers_of(model)[0])

    class Named(kind):
        def __call__(self, hidden_states: torch.Tensor, **given: Any) -> Any:
            return super().__call__(hidden_states=hidden_states, **given)

    for each in layers_of(model):
        each.__class__ = Named


def exchange(model: Model, number: int) -> None:
    """The layers are called in another order from the second step on."""
    if number == 1:
        places = layers_of(model)._modules
        places["0"], places["1"] = places["1"], places["0"]


PROGRAMS = {
    **AROUND,
    **BETWEEN,
    "hidden states by keyword": program(by_keyword, is_late=False),
    "layers in another order": program(end="once each, in order", between=exchange, sizes=(3, 3)),
}


def carrying(model: Model) -> None:
    """The first layer leaves something for the others, in an object that nobody looks into."""
    held = Scaling()

    def forward(mlp: Any, own: Any, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = own(given)
        if mlp is layers_of(model)[0].mlp:
            held.scale = 1 + float(found.detach().float().mean())
        return found * held.scale

    in_layers(forward)(model)


def hooked(model: Model) -> None:
    """What a hook on the head leaves one on the embedding takes."""
    left = [1.0]

    def leave(module: Any, args: Any, found: torch.Tensor) -> None:
        left[0] += 0.1

    model.get_output_embeddings().register_forward_hook(leave)
    model.get_input_embeddings().register_forward_hook(lambda _, args, found: found * left[0])


def replaced(model: Model) -> None:
    """Forwards that are set on both do."""
    left = [1.0]
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    own_head, own_table = head.forward, table.forward

    def of_head(hidden: torch.Tensor) -> Any:
        left[0] += 0.1
        return own_head(hidden)

    head.forward, table.forward = of_head, lambda tokens: own_table(tokens) * left[0]


def watched(model: Model) -> None:
    """By hooks that pass nothing on, as many scripts have one."""
    model.get_output_embeddings().register_forward_hook(lambda module, args, found: None)
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, found: found.requires_grad_(True)
    )


FOREIGN_CODE = "code of no library"
FOREIGN = {
    "hooks outside the layers": program(hooked, "changes left"),
    "forwards outside the layers": program(replaced, "changes left"),
    "hooks that pass nothing": program(watched),
    "a module": program(carrying, FOREIGN_CODE),
    "code between layers": between(doing(with_a_seed), FOREIGN_CODE, is_late=False),
}


@pytest.mark.parametrize("which", FOREIGN)
def test_code_of_others_in_layers_is_not_grouped(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "LIBRARIES", LIBRARIES)
    assert ends(FOREIGN[which])


def test_control_code_of_others_passes_values() -> None:
    """As if it were a library's."""
    with pytest.raises(AssertionError):
        assert ends(FOREIGN["a module"]._replace(end=None))


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str) -> None:
    assert ends(PROGRAMS[which])


def test_control_states_that_are_not_planned_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with an error or a reason say themselves that what they do is found."""
    program = AROUND["frozen lower layers"]
    control = Control(Group, "_plan_behind", lambda self, batch: True, program)
    assert control.is_seen(monkeypatch)
