"""Code that no known library has written: in layers, and around them within an autocast region.

It may read and change what nothing else sees, so its layers are never replayed, and their
recomputation is looked at; and it may use what autocast has made of an adapter.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import poros
from poros.errors import RematerializationError, UnsupportedModelError
from poros.kernels import forwards
from poros.kernels.forwards import LIBRARIES
from poros.replay.uses import Observation
from tests.exact.recorded import KEPT, as_resident, recorded, train
from tests.exact.recorded import few_dense as few
from tests.loops import Model, adapted, bf16, layers_of, mlps, own_loss, same, trained

LATE = 5
"""The step from which on something is otherwise; by then visits are replayed."""


@pytest.fixture
def as_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the tests is a user's."""
    monkeypatch.setattr(forwards, "LIBRARIES", LIBRARIES)


class Held:
    gain = 1.0


class Scaled(nn.Module):
    """An activation, by a gain that nothing sees."""

    gain = 1.0

    def __init__(self, inner: nn.Module, gain_of: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner, self.gain_of, self.held = inner, gain_of, Held()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given) * self.gain_of(self)  # type: ignore[no-any-return]


OWN = torch.Generator()


def drawn(draw: Callable[[Any], float]) -> Callable[[Any], float]:
    """Random from ``LATE`` on."""
    return lambda module: 1.0 if module.held.gain == 1 else draw(module)


READ: dict[str, Callable[[Any], float]] = {
    "an object": lambda module: module.held.gain,
    "its class": lambda module: type(module).gain,
    "random numbers of Python": drawn(lambda _: random.gauss(1, 0.1)),
    "random numbers of NumPy": drawn(lambda _: np.random.normal(1, 0.1)),
    "random numbers of its own": drawn(lambda _: float(torch.rand((), generator=OWN))),
}


def scaled(gain_of: Callable[[Any], float]) -> Model:
    model = few()
    OWN.manual_seed(0)
    for mlp in mlps(model):
        mlp.act_fn = Scaled(mlp.act_fn, gain_of)
    return model


def set_gain(model: Model, number: int) -> None:
    Scaled.gain = 1.0 if number < LATE else 0.5
    for mlp in mlps(model):
        mlp.act_fn.held.gain = Scaled.gain


@pytest.mark.parametrize(
    ("what", "policy"), [*((each, {}) for each in READ), ("random numbers of its own", KEPT)]
)
@pytest.mark.usefixtures("as_users")
def test_what_code_of_others_reads(what: str, policy: dict[str, Any]) -> None:
    run = partial(train, between=set_gain)
    if what == "random numbers of its own" and not policy:
        with pytest.raises(RematerializationError, match="values that the forward saved"):
            as_resident(partial(scaled, READ[what]), run)
        return
    assert as_resident(partial(scaled, READ[what]), run, **policy).num_replays == 0


def test_control_what_code_of_others_reads() -> None:
    """As if it were a library's."""
    with pytest.raises(AssertionError):
        as_resident(partial(scaled, READ["an object"]), partial(train, between=set_gain))


@pytest.mark.usefixtures("as_users")
def test_a_class_of_ones_own_is_noticed_when_a_layer_gets_it() -> None:
    class Halved(type(mlps(few())[0])):  # type: ignore[misc]
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return super().forward(given) / 2  # type: ignore[no-any-return]

    def exchange(model: Model, number: int) -> None:
        if number == LATE:
            for mlp in mlps(model):
                mlp.__class__ = Halved

    assert as_resident(few, partial(train, between=exchange)).num_replays > 0


def test_a_rate_of_dropout_that_is_a_number_of_numpy() -> None:
    def between(model: Model, number: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = np.float32(0.05 if number < LATE else 0.3)  # type: ignore[assignment]

    make = partial(few, lora_dropout=0.1)
    assert as_resident(make, partial(train, between=between)).num_replays > 0


def in_region(forward: Callable[..., Any] | None = None, hook: Any = None) -> Model:
    """As Accelerate wraps it, for bf16; with another forward of the user's, or a hook."""
    model = adapted(quantize=False, target_modules=["q_proj", "down_proj"])
    base = model.get_base_model()
    if forward is not None:
        kind = type(base)
        own = {"forward": lambda self, **given: forward(self, partial(kind.forward, self), given)}
        base.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **own})
    if hook is not None:
        base.register_forward_hook(hook)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    return model


def penalized(model: Any, result: Any) -> Any:
    matrices = [each for name, each in model.named_parameters() if "lora_A" in name]
    result.loss = result.loss + 0.1 * sum(
        (each @ each.T).float().square().sum() for each in matrices
    )
    return result


def twice(model: Any, own: Any, given: Any) -> Any:
    one, two = own(**given), own(**given)
    one.loss = (one.loss + two.loss) / 2 + (one.logits - two.logits).float().square().mean()
    return one


REGIONS: dict[str, Callable[[], Model]] = {
    "a penalty": partial(in_region, lambda model, own, given: penalized(model, own(**given))),
    "two forwards": partial(in_region, twice),
    "a hook with a penalty": partial(
        in_region, hook=lambda model, _, result: penalized(model, result)
    ),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("which", REGIONS)
@pytest.mark.usefixtures("as_users")
def test_adapters_that_others_use_in_the_region_of_the_model(
    which: str, policy: dict[str, Any]
) -> None:
    assert as_resident(REGIONS[which], train, **policy).num_replays > 0


def test_control_adapters_that_others_use_in_the_region() -> None:
    """As if libraries did."""
    with pytest.raises(AssertionError):
        as_resident(REGIONS["a penalty"], train)


def tie(model: Model) -> None:
    one, two = (layer.self_attn.q_proj.lora_A["default"] for layer in layers_of(model))
    two.weight = one.weight


def stack_twice(model: Model) -> None:
    base = model.get_base_model().model
    base.layers = nn.ModuleList([*base.layers, base.layers[-1]])
    base.config.num_hidden_layers, base.config.layer_types = 3, base.config.layer_types[:1] * 3


@pytest.mark.parametrize("share", [tie, stack_twice])
def test_adapters_that_are_shared_later_in_the_region_of_the_model(
    share: Callable[[Model], None],
) -> None:
    model, captures, _ = recorded(in_region())
    train(model)
    assert captures.num_replays > 0
    share(model)
    with pytest.raises(UnsupportedModelError, match="shared since"):
        for _ in range(4):
            own_loss(model, {"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]})


@pytest.mark.cover("values")
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("around", [None, bf16])
def test_the_order_of_gradients_behind_a_penalty_that_has_gone(use_dora: bool, around: Any) -> None:
    """Which was made before the forward, so that each adapter waited for it."""
    steps: list[int] = []

    def between(model: Model, number: int) -> None:
        steps[:] = [number]
        if number == LATE + 2:
            for each in trained(model):
                each.register_hook(lambda gradient: gradient + 1e-3 * torch.randn_like(gradient))

    def loss(model: Model, batch: Any) -> torch.Tensor:
        first = steps[0] < LATE
        penalty = sum(each.square().sum() for each in reversed(trained(model))) if first else 0
        return own_loss(model, batch) + 0.01 * penalty

    make = partial(
        adapted, quantize=False, target_modules=["q_proj", "down_proj"], use_dora=use_dora
    )
    options = {} if around is None else {"around": around}
    run = partial(train, num_steps=12, between=between, loss=loss, **options)
    model, captures, _ = recorded(make())
    assert same(run(model), run(poros.use_adapter_kernels(make()) if use_dora else make()))
    assert captures.num_replays > 0


def test_control_the_order_in_which_they_were_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Observation._order

    def order(self: Any, sources: Any, last: Any) -> Any:
        found = genuine(self, sources, last)
        return None if found is None else found[::-1]

    monkeypatch.setattr(Observation, "_order", order)
    with pytest.raises(AssertionError):
        test_the_order_of_gradients_behind_a_penalty_that_has_gone(False, None)
