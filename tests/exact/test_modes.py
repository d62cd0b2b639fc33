"""``train()`` and ``eval()`` of a prepared model leave each module in the mode it has otherwise.

Trainers ask for it at each micro-batch, so layers pass over modules that are in it already.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from poros.stream.layer_index import LayerIndex
from tests.loops import build
from tests.support import prepare_plain

Model = Any


class Freezing:
    """Keeps a part in evaluation. Placed before a module's own class."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)  # type: ignore[misc]
        self.mlp.eval()  # type: ignore[attr-defined]
        return self


def freeze(layer: Any) -> None:
    if not isinstance(layer, Freezing):
        own = type(layer)
        layer.__class__ = type(own.__name__, (Freezing, own), {})


def count_on_the_instance(layer: Any) -> None:
    module = layer.mlp.act_fn
    module.num_calls = 0

    def train(mode: bool = True) -> Any:
        module.num_calls += 1
        return nn.Module.train(module, mode)

    module.train = train


CHANGES: dict[str, Callable[[Any], object]] = {
    "a module": lambda layer: layer.self_attn.q_proj.eval(),
    "a flag": lambda layer: setattr(layer.self_attn.o_proj, "training", False),
    "all but the layer's own": lambda layer: (layer.eval(), setattr(layer, "training", True)),
    "another module": lambda layer: setattr(layer.mlp, "extra", nn.Identity().eval()),
    "a method": count_on_the_instance,
    "a class": freeze,
}
"""Of a layer, before each call."""


def layer_of(model: Model) -> nn.Module:
    return next(each for name, each in model.named_modules() if name.endswith("layers.1"))


def after(
    is_prepared: bool, change: Callable[[Any], object] = lambda layer: None
) -> list[list[tuple[str, bool, int]]]:
    """The modules after each of some calls, with the change before and between."""
    model = build("qwen2").train()
    if change is freeze:  # prepared layers have a class of their own
        change(layer_of(model))
    if is_prepared:
        prepare_plain(model, slots=2)
    found = []
    for mode in (True, True, False, False, True):
        change(layer_of(model))
        model.train(mode)
        named = model.named_modules()
        found.append([(name, m.training, getattr(m, "num_calls", 0)) for name, m in named])
    return found


@pytest.mark.parametrize("which", CHANGES)
def test_each_module_has_the_mode_it_has_otherwise(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = CHANGES[which]
    expected = after(False, change)
    assert after(True, change) == expected
    # A control: a layer that looks at itself alone is caught by every change within it.
    monkeypatch.setattr(
        LayerIndex, "is_in_mode", lambda self, mode: self.modules()[0].training is mode
    )
    assert change is freeze or after(True, change) != expected


def test_modules_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare_plain(build("qwen2").train(), slots=2).train()
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
