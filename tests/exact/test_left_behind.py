"""What layers do beside giving a result: it comes again, or nothing of them is replayed or grouped.

They leave values for a loss, for other layers or for their own next call, read what was edited in
place, hook into what they are given, or have the host wait.
"""

import copy
import gc
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from poros.errors import UnsupportedModelError
from poros.replay.call import LEAVES
from poros.replay.captures import ARGUMENTS
from poros.stream.namespaces import put_back
from tests import loops
from tests.exact.recorded import KEPT, as_resident, on_tapes, recorded, train
from tests.exact.recorded import few_dense as few
from tests.loops import (
    Model,
    adapted,
    layers_of,
    mlps,
    num_groups,
    override,
    own_loss,
    reasons,
    same,
    streamed,
    training,
)

LATE = 5
"""The step from which on something is otherwise; by then visits are replayed."""


def in_a_list(model: Model, number: int, has_list: bool = True) -> None:
    """Feed-forwards multiply by a tensor that they hold as a plain attribute."""
    for mlp in mlps(model):
        gain = torch.full((64,), 1.5 if number < LATE else 0.5, dtype=torch.bfloat16)
        if number in (0, LATE):
            mlp.gain = gain
        if has_list and number == 0:
            mlp.others = [gain]


def waited_for(mlp: Any, given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    assert float(given.detach().abs().max()) >= 0
    return result


def scaled(mlp: Any, given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return result * mlp.gain


def left_in_it(mlp: Any, given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """As RecurrentGemma does: None to begin with, then what was computed last."""
    mlp.state = result.detach()
    return result


def with_none(model: Model, number: int) -> None:
    for mlp in mlps(model) if number == 0 else ():
        mlp.state = None


def left_for_the_loss(mlp: Any, given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    mlp.size = result.detach().float().square().mean()
    return result


def that_reads_it(model: Model, batch: Any) -> torch.Tensor:
    """A replay would leave nothing: the loss would go on with what was left last."""
    return own_loss(model, batch) * (1 + sum(each.size for each in mlps(model)))


# What feed-forwards do, what else a run has, and why they are not replayed.
EAGER: dict[str, tuple[Any, dict[str, Any], str]] = {
    "what it leaves in itself": (left_in_it, {"between": with_none}, ""),
    "what it leaves for a loss": (left_for_the_loss, {"loss": that_reads_it}, LEAVES),
    "the host waits": (waited_for, {}, "cannot be recorded"),
    "an exchanged tensor": (scaled, {"between": partial(in_a_list, has_list=False)}, ""),
    "an exchanged tensor, in a list": (scaled, {"between": in_a_list}, ""),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("which", EAGER)
def test_feed_forwards_that_are_not_replayed(
    which: str, policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, options, reason = EAGER[which]
    kind = type(mlps(few())[0])
    genuine = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: change(self, x, genuine(self, x)))
    captures = as_resident(few, partial(train, **options), **policy)
    assert captures.num_replays == 0
    # A graph that is kept makes a form of each value that is left.
    is_said = any(each.startswith(reason) for each in captures.eager)
    assert is_said or (policy and reason is LEAVES)


def test_layers_that_leave_keys_and_values_for_others_run_as_always() -> None:
    """The first two of six neither leave nor take any, in a mapping that is empty then."""
    make = partial(training, "gemma4_shared_kv", num_layers=6, dropout=0.0)
    expected = train(make(), 5)
    model, captures, recorder = recorded(make(), slots=2)
    assert same(train(model, 5), expected)
    assert {LEAVES, ARGUMENTS} <= set(captures.eager)
    assert captures.num_replays > 0 and recorder.num_recorded == 2 * 2


def test_nothing_is_held_of_mappings_that_layers_share() -> None:
    """Their tensors have graphs, in which those of replayed layers are."""

    def num_alive() -> int:
        gc.collect()
        return sum(isinstance(each, UserDict) for each in gc.get_objects())

    model, *_ = recorded(training("gemma4_shared_kv", num_layers=6, dropout=0.0), slots=2)
    train(model, 5)
    before = num_alive()
    train(model, 5)
    assert num_alive() == before


# What layers of a library do with a mapping that a loss gives the model.

Shared = Any


def that_read(layer: Any, own: Any, *args: Any, shared: Shared = None, **kwargs: Any) -> Any:
    found, left = own(*args, **kwargs), shared.get("left")
    return found if left is None else found + 0.1 * left


def that_write(layer: Any, own: Any, *args: Any, shared: Shared = None, **kwargs: Any) -> Any:
    found = own(*args, **kwargs)
    if layer.self_attn.layer_idx == 1:  # the last
        shared["left"] = found.float().square().mean()
    return found


def that_bind(layer: Any, own: Any, *args: Any, shared: Shared = None, **kwargs: Any) -> Any:
    found = own(*args, **kwargs) + 0.1 * getattr(shared, "left", 0.0)
    shared.left = found.detach().float().mean()
    return found


def of_the_last(model: Model, batch: Any, shared: Shared) -> torch.Tensor:
    return own_loss(model, {**batch, "shared": shared}) + 0.01 * shared.get("left", 0.0)


def behind_all(model: Model, batch: Any, shared: Shared) -> torch.Tensor:
    loss = own_loss(model, {**batch, "shared": shared})
    shared["left"] = loss.detach()
    return loss


SHARING: dict[str, tuple[Any, Any, bool, bool]] = {
    # By layers; with a loss; one mapping for all micro-batches; whether they go together.
    "read, and nobody writes": (that_read, of_the_last, False, True),
    "the last one writes": (that_write, of_the_last, False, False),
    "bound to it": (that_bind, of_the_last, False, False),
}


def with_layers(layers: Any) -> Model:
    model = few()
    override(layers_of(model), layers)
    return model


def shared_by(loss: Any, is_one: bool, model: Model, together: bool) -> list[Any]:
    one: Any = UserDict()

    return loops.train(
        *(model, together),
        loss=lambda model, batch: loss(model, batch, one if is_one else UserDict()),
        sizes=(4,) * 4,
        lengths=(12,),
        between=lambda model, number: one.clear(),
    )


@pytest.mark.parametrize("which", SHARING)
def test_a_mapping_of_the_loss(which: str) -> None:
    layers, *run, goes_together = SHARING[which]
    expected = shared_by(*run, with_layers(layers), together=False)
    model = on_tapes(with_layers(layers), slots=2)
    assert same(shared_by(*run, model, together=True), expected)
    assert (num_groups(model) > 0, not reasons(model)) == (goes_together, goes_together)


def test_a_mapping_that_a_loss_writes_to_behind_the_layers() -> None:
    """In a group all layers would have run before."""
    model = on_tapes(with_layers(that_read), slots=2)
    with pytest.raises(UnsupportedModelError, match="layers share tensors"):
        shared_by(behind_all, True, model, together=True)


# What is given, and what is in containers.


def that_hook(layer: Any, own: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: None if gradient is None else gradient * 0.5)
    return own(hidden, *args, **kwargs)


@pytest.mark.parametrize("policy", [{}, KEPT])
def test_hooks_of_a_layer_on_what_it_is_given(policy: dict[str, Any]) -> None:
    resident, replayed, eager = (with_layers(that_hook) for _ in range(3))
    expected = train(resident)
    _, captures, _ = recorded(replayed, **{"slots": 2, **policy})
    assert same(train(replayed), expected)
    assert any("registers hooks on what it is given" in each for each in captures.eager)
    assert same(train(streamed(eager, **{"slots": 2, **policy})), expected)
    assert not same(train(few()), expected)  # a control


def that_look(layer: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
    rates = layer.rates
    rate = next(iter(rates.values() if type(rates) is dict else rates))
    return own(*args, **kwargs) * rate


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, dict])
def test_containers_of_a_layer_that_are_edited(kind: Callable[..., Any]) -> None:
    def rates(value: float) -> Any:
        return {"a": value} if kind is dict else kind([value])

    def change(model: Model, number: int) -> None:
        for layer in layers_of(model):
            if number == 0:
                layer.rates = rates(0.5)
            elif number == LATE and kind in (tuple, frozenset):
                layer.rates = rates(1.5)
            elif number == LATE:
                layer.rates.clear()
                fill = layer.rates.extend if kind is list else layer.rates.update
                fill(rates(1.5))

    captures = as_resident(partial(with_layers, that_look), partial(train, between=change))
    assert captures.num_replays > 0


def test_a_tensor_of_ones_own_goes_into_the_layers_under_autocast() -> None:
    """Which casts a leaf once for all modules of a first layer that has no norm at its input."""

    def run(model: Model, together: bool) -> list[Any]:
        found: list[Any] = []
        for _ in range(3):
            own = [torch.randn(1, 12, 64).requires_grad_() for _ in range(4)]
            labels = torch.arange(12)[None]
            given = [{"inputs_embeds": each, "labels": labels} for each in own]
            found += loops.accumulated(model, given, loops.in_autocast, together)
            found += [each.grad for each in (*own, *loops.trained(model))]
        return found

    make = partial(adapted, "olmo2", quantize=False, dtype=torch.float32)
    torch.manual_seed(0)
    expected = run(make(), together=False)
    model = on_tapes(make(), slots=2)
    torch.manual_seed(0)
    assert same(run(model, together=True), expected)
    assert "a leaf goes into the layers under autocast" in str(reasons(model))


def test_containers_hold_again_what_they_held() -> None:
    module = torch.nn.Identity()
    held = module.seen, module.table, module.kinds = [1], {"a": 1}, {1}
    before = copy.deepcopy(held)
    with put_back([module]):
        module.seen.append(2)
        module.table["b"] = 2
        module.kinds.add(3)
        module.late = 1
    assert held == before and not hasattr(module, "late")
