"""Layers that are all called alike: known from the first of them, until a model calls otherwise."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.accumulation.distributed import Ranks
from poros.accumulation.micro_batch import MicroBatch
from poros.accumulation.outline import Call, Outlines
from poros.accumulation.watching import Passer
from tests.exact.arms import Bases
from tests.exact.together import Batch, num_groups, own_loss, reasons, same, train
from tests.support import prepare_plain

Model = Any
Change = Callable[[int, torch.Tensor, dict[str, Any]], tuple[torch.Tensor, dict[str, Any]] | None]
SIZES = (4,) * 5
CHANGES_AT = 2
"""The step from which on a model calls its layers otherwise."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


def build(bases: Bases, architecture: str = "qwen2") -> Model:
    return bases.build(architecture).train()


def layers(model: Model) -> Any:
    return model.get_base_model().model.layers


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each micro-batch was seen to call as its code ran first."""
    counts: list[int] = []
    collect, note = MicroBatch.collect, MicroBatch.note

    def counted(self: MicroBatch, run: Callable[[], Any]) -> None:
        counts.append(0)
        collect(self, run)

    def noting(self: MicroBatch, *args: Any) -> Any:
        counts[-1] += 1
        return note(self, *args)

    monkeypatch.setattr(MicroBatch, "collect", counted)
    monkeypatch.setattr(MicroBatch, "note", noting)
    return counts


def test_code_is_stopped_at_the_first_layer_once_all_were_called_alike(
    bases: Bases, noted: list[int]
) -> None:
    expected = train(build(bases), together=False, sizes=SIZES)
    noted.clear()
    model = prepare_plain(build(bases), slots=2)
    assert same(train(model, sizes=SIZES), expected) and num_groups(model) == len(SIZES)
    num_layers = len(layers(model))
    # Lengths 12, 9, 20 and 7: each kind is looked at in full the first time.
    assert noted == [num_layers] * 4 + [1] * 4 * (len(SIZES) - 1)


def test_layers_that_are_called_unlike_are_looked_at_each_time(
    bases: Bases, noted: list[int]
) -> None:
    expected = train(build(bases, "gemma3"), together=False, sizes=SIZES)
    noted.clear()
    model = prepare_plain(build(bases, "gemma3"), slots=2)
    assert same(train(model, sizes=SIZES), expected) and num_groups(model) == len(SIZES)
    assert set(noted) == {len(layers(model))} and len(noted) == 4 * len(SIZES)


def test_ranks_look_at_all_layers_each_time(
    bases: Bases, noted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward within DDP cannot begin anew: it may have exchanged buffers with other ranks."""
    monkeypatch.setattr(Ranks, "are_several", True)
    model = prepare_plain(build(bases), slots=2)
    train(model, sizes=SIZES)
    assert set(noted) == {len(layers(model))} and num_groups(model) == len(SIZES)


class Loop:
    """The model's loop over its layers, which does something of its own from some step on."""

    def __init__(self, model: Model, change: Change) -> None:
        self.is_changed = False
        stack = layers(model)
        genuine = stack.__class__.__iter__

        def called(
            number: int, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            changed = (hidden, kwargs)
            if self.is_changed and number == 1:
                found = change(number, hidden, kwargs)
                if found is None:
                    return hidden
                changed = found
            result: torch.Tensor = layer(changed[0], *args, **changed[1])
            return result

        class Calls(torch.nn.ModuleList):
            def __getitem__(self, places: Any) -> Any:
                return [partial(called, number, each) for number, each in enumerate(genuine(stack))]

        stack.__class__ = Calls

    def between(self, model: Model, step: int) -> None:
        self.is_changed = step >= CHANGES_AT


def other_positions(number: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    cosine, sine = kwargs["position_embeddings"]
    return hidden, {**kwargs, "position_embeddings": (cosine * 0.5, sine)}


def equal_positions(number: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    cosine, sine = kwargs["position_embeddings"]
    return hidden, {**kwargs, "position_embeddings": (cosine.clone(), sine)}


def left_out(number: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    return None


def fewer_arguments(number: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    return hidden, {key: value for key, value in kwargs.items() if key != "use_cache"}


def drawing(number: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    torch.rand(3)
    return hidden, kwargs


def scaled(number: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    return hidden * 1.5, kwargs


def another(number: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    return torch.ones(hidden.shape, dtype=hidden.dtype), kwargs


CHANGES: dict[str, tuple[Change, str]] = {
    "other values": (other_positions, "called otherwise"),
    "other tensors of the same values": (equal_positions, "called otherwise"),
    "a layer that is left out": (left_out, "called otherwise"),
    "an argument that is left out": (fewer_arguments, "called otherwise"),
    "random numbers between layers": (drawing, "draws random numbers between"),
    "hidden states that are scaled": (scaled, "between its layers"),
    "other hidden states": (another, "called otherwise"),
}


@pytest.mark.parametrize("head", [False, True], ids=["", "head in slices"])
@pytest.mark.parametrize("which", CHANGES)
def test_a_model_that_calls_otherwise_later_is_seen(which: str, head: bool, bases: Bases) -> None:
    change, reason = CHANGES[which]
    policy: dict[str, Any] = {"slots": 2}
    if head:
        policy |= {"loss": "chunked", "stream_head": True}

    def trained(together: bool) -> tuple[Model, list[torch.Tensor]]:
        model = poros.prepare(build(bases), allow_unvalidated=True, **{"device": "cpu", **policy})
        loop = Loop(model, change)
        return model, train(model, together, sizes=SIZES, between=loop.between)

    _, expected = trained(False)
    model, found = trained(True)
    assert same(found, expected)
    assert any(reason in each for each in reasons(model)), reasons(model)
    assert num_groups(model) >= CHANGES_AT


def test_control_without_looking_again_other_calls_would_not_be_seen(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(together: bool) -> list[torch.Tensor]:
        model = prepare_plain(build(bases), slots=2)
        loop = Loop(model, drawing)
        return train(model, together, sizes=SIZES, between=loop.between)

    expected = trained(False)
    monkeypatch.setattr(Passer, "_require_outlined", lambda *_: None)
    assert not same(trained(True), expected)


@pytest.mark.parametrize("head", [False, True], ids=["", "head in slices"])
def test_a_layer_that_a_loss_puts_into_evaluation_mode_for_a_while(
    head: bool, bases: Bases
) -> None:
    """One that is not the first, for some micro-batches: seen as the code runs again."""

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        layer = layers(model)[1].train(batch["input_ids"].shape[1] != 20)
        try:
            return own_loss(model, batch)
        finally:
            layer.train()

    policy: dict[str, Any] = {"loss": "chunked", "stream_head": True} if head else {}

    def trained(together: bool) -> tuple[Model, list[torch.Tensor]]:
        model = poros.prepare(build(bases), slots=2, device="cpu", allow_unvalidated=True, **policy)
        found = train(model, together)
        return model, found + train(model, together, sizes=SIZES, loss=loss)

    _, expected = trained(False)
    model, found = trained(True)
    assert same(found, expected) and num_groups(model) >= 3
    assert any("layers that change" in each for each in reasons(model)), reasons(model)


def test_calls_are_alike_where_they_are_given_the_same_objects() -> None:
    given, mask = torch.ones(2), torch.ones(3)
    call = Call.of((given, mask), {"use_cache": False, "positions": (mask,)}, given)
    positions = call.kwargs["positions"]
    assert call.is_like(Call.of((given, mask), {"use_cache": False, "positions": positions}, given))
    others = [
        Call.of((given, mask.clone()), call.kwargs, given),
        Call.of((mask, mask), call.kwargs, given),
        Call.of((given,), call.kwargs, given),
        Call.of((given, mask), {**call.kwargs, "use_cache": 0}, given),
        Call.of((given, mask), {**call.kwargs, "more": None}, given),
        Call.of((given, mask), {**call.kwargs, "positions": [mask]}, given),
    ]
    assert not any(map(call.is_like, others))


def test_kinds_that_were_called_unlike_once_are_never_taken_for_known() -> None:
    outlines = Outlines()
    assert not outlines.are_alike("kind")
    outlines.note("kind", True)
    assert outlines.are_alike("kind") and not outlines.are_alike("other kind")
    outlines.note("kind", False)
    outlines.note("kind", True)
    assert not outlines.are_alike("kind")
