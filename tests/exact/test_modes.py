"""``train()`` and ``eval()`` of a prepared model leave each module in the mode it has otherwise.

Trainers ask for it at each micro-batch, so layers pass over modules that are in it already.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from poros.stream.layer_index import LayerIndex
from tests.exact.arms import Bases
from tests.support import prepare_plain

Model = Any
Change = Callable[[Any], object]


class Counting:
    """Does more than to set a flag. Placed before a module's own class."""

    def train(self, mode: bool = True) -> Any:
        self.__dict__["num_calls"] = self.__dict__.get("num_calls", 0) + 1
        return super().train(mode)  # type: ignore[misc]


class Freezing:
    """Keeps a part in evaluation."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)  # type: ignore[misc]
        self.mlp.eval()  # type: ignore[attr-defined]
        return self


class Counts(Counting, nn.Module):
    pass


def of_class(kind: type) -> Change:
    def change(module: Any) -> None:
        if not isinstance(module, kind):
            own = type(module)
            module.__class__ = type(own.__name__, (kind, own), {})

    return change


def count_on_the_instance(layer: Any) -> None:
    module = layer.mlp.act_fn
    module.num_calls = 0

    def train(mode: bool = True) -> Any:
        module.num_calls += 1
        return nn.Module.train(module, mode)

    module.train = train


def nothing(layer: Any) -> None:
    pass


CHANGES: dict[str, Change] = {
    "nothing": nothing,
    "a module": lambda layer: layer.self_attn.q_proj.eval(),
    "a flag": lambda layer: setattr(layer.self_attn.o_proj, "training", False),
    "the layer's own": lambda layer: setattr(layer, "training", False),
    "all but the layer's own": lambda layer: (layer.eval(), setattr(layer, "training", True)),
    "another module": lambda layer: setattr(layer.mlp, "extra", nn.Identity().eval()),
    "a method": count_on_the_instance,
    "a class": lambda layer: setattr(layer.mlp, "counts", Counts()),
    "another class": lambda layer: of_class(Counting)(layer.mlp),
}
"""Of a layer, before each call; and before the model is prepared."""
CASES: dict[str, tuple[Change, Change]] = {
    **{name: (change, nothing) for name, change in CHANGES.items()},
    "a layer that counts": (nothing, of_class(Counting)),
    "a layer that freezes": (nothing, of_class(Freezing)),
}


def built(bases: Bases, is_prepared: bool, before: Change = nothing) -> Model:
    model = bases.build("qwen2").train()
    before(layer_of(model))
    return prepare_plain(model, slots=2) if is_prepared else model


def layer_of(model: Model) -> nn.Module:
    return next(each for name, each in model.named_modules() if name.endswith("layers.1"))


def after(model: Model, change: Change) -> list[list[tuple[str, bool, int]]]:
    """The modes after each of some calls, with the change before and between."""
    found = []
    for mode in (True, True, False, False, True):
        change(layer_of(model))
        model.train(mode)
        named = model.named_modules()
        found.append([(name, m.training, getattr(m, "num_calls", 0)) for name, m in named])
    return found


@pytest.mark.parametrize("which", CASES)
def test_each_module_has_the_mode_it_has_otherwise(which: str, bases: Bases) -> None:
    change, before = CASES[which]
    found, expected = (after(built(bases, each, before), change) for each in (True, False))
    assert found == expected
    plain = after(built(bases, False), nothing)
    assert before is nothing or expected != plain


def test_control_of_the_comparison(bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that looks at itself alone is caught by every change within it."""
    monkeypatch.setattr(
        LayerIndex, "is_in_mode", lambda self, mode: self.modules()[0].training is mode
    )
    caught = {
        name
        for name, change in CHANGES.items()
        if after(built(bases, True), change) != after(built(bases, False), change)
    }
    assert caught == CHANGES.keys() - {"nothing"}


def test_modules_are_passed_over(bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(bases, True)
    model.train()
    inner = set(map(id, layer_of(model).modules())) - {id(layer_of(model))}
    seen = []
    plain = nn.Module.__setattr__

    def note(self: nn.Module, name: str, value: Any) -> None:
        if name == "training" and id(self) in inner:
            seen.append(self)
        plain(self, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", note)
    model.train()
    assert not seen
    model.eval()
    assert len(seen) == len(inner)
