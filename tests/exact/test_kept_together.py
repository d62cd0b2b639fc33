"""Layers that keep their graphs, of several micro-batches: one graph at a time is in the memory of
a recording, and those of others wait in copies.

Streams are adversarial, slots and what recordings leave are poisoned.
"""

from collections.abc import Callable
from functools import partial
from itertools import count, groupby
from typing import Any
from weakref import WeakSet

import pytest
import torch

import poros
from poros.accumulation.distributed import Ranks
from poros.accumulation.loop import Samples, Step
from poros.model.runtime import find_runtime
from poros.replay.forms import HeldGraph, Room
from poros.replay.recording import Recordings
from poros.replay.rows import Row, Rows
from tests.exact.recorded import few as recorded_few
from tests.exact.recorded import on_tapes
from tests.loops import (
    Subject,
    accumulated,
    bf16,
    in_autocast,
    layers_of,
    micro_batches,
    nothing,
    own_loss,
    same,
    train,
    trained,
)
from tests.replaced import Patch, in_place_of, noted, raising
from tools.tape import TapeRecorder

Model = Any
Facts = list[torch.Tensor]
OTHER_BITS = "a recording gave other bits"
ALL = {"slots": 3, "keep_last": 3}
LAST = {"slots": 3, "keep_last": 1}
OFTEN: Any = {"sizes": (4,) * 9, "lengths": (12,)}
few: Subject = partial(recorded_few, num_layers=3)
DROPOUT: Subject = partial(few, lora_dropout=0.05, quantize=False)
UNDRAWN: Subject = partial(few, quantize=False)
TO_GROUP: Subject = partial(few, target_modules=["q_proj", "k_proj", "v_proj"])


def behind_a_loss(model: Model, together: bool = True, num_steps: int = 9) -> Facts:
    """A loss waits for its backward while others go together."""
    facts: Facts = []
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(2)
    for _ in range(num_steps):
        waiting, *others = micro_batches(5, generator, (12,))
        loss = own_loss(model, waiting)
        facts += accumulated(model, others, own_loss, together)
        loss.backward()
        facts += [loss.detach(), *(each.grad.clone() for each in trained(model))]
        model.zero_grad()
    return facts


def between_two(model: Model, together: bool = True) -> Facts:
    """A loss from before has its backward behind the second micro-batch, as by a callback."""
    facts: Facts = []
    generator = torch.Generator().manual_seed(2)

    def run(batch: Any) -> torch.Tensor:
        value = own_loss(model, batch)
        value.backward()
        return value.detach()

    for _ in range(9):
        waiting, *others = micro_batches(5, generator, (12,))
        loss = own_loss(model, waiting)
        samples = Samples(others)
        step = Step(lambda: find_runtime(model), Ranks(model), run, [own_loss])
        for number, batch in enumerate(others):
            facts.append(samples.take(step, number == 3) if together else run(batch))
            if number == 1:
                loss.backward()
        facts += [each.grad.clone() for each in trained(model)]
        model.zero_grad()
    return facts


def behind_an_error(model: Model, together: bool = True) -> Facts:
    """The loss of a third one is not computed; whoever has the error has what was on its way."""
    facts = train(model, together, **OFTEN)
    kept: list[Exception] = []

    def loss(model: Model, batch: Any) -> torch.Tensor:
        value = own_loss(model, batch)
        if not kept and batch is step[2]:
            raise ValueError("no loss")
        return value

    for _ in range(3):
        step = micro_batches(4, torch.Generator().manual_seed(2), (12,))
        model.zero_grad()
        try:
            facts += accumulated(model, step, loss, together)
        except ValueError as error:
            kept.append(error)
    return [*facts, *(each.grad.clone() for each in trained(model))]


def with_a_teacher(model: Model, batch: Any) -> torch.Tensor:
    output = model(**batch, use_cache=False)
    with torch.no_grad():
        reference = model(**batch, use_cache=False).logits
    return output.loss / 4 + 0.1 * (output.logits.float() - reference.float()).square().mean()  # type: ignore[no-any-return]


def as_by_accelerate(model: Model, together: bool = True) -> Facts:
    """The model's forward is an autocast region, and runs once more without gradients."""
    model.forward = bf16()(model.forward)
    return train(model, together, loss=with_a_teacher, **OFTEN)


def with_one_of_another_length(model: Model, together: bool = True) -> Facts:
    """Those of its groups that are otherwise as many before are not replayed in one go."""
    facts = train(model, together, **OFTEN)
    return facts + train(model, together, sizes=(4,) * 3, lengths=(12, 9, 12, 12))


def with_a_loss_that_waits(model: Model, together: bool = True) -> Facts:
    """Its graph waits in a copy of a row, which then has to be free."""
    return train(model, together, **OFTEN) + behind_a_loss(model, together, 3)


def with_hooks_at_first(model: Model, together: bool = True) -> Facts:
    """The layer in the middle is recorded last, so the one behind it could overwrite its graph."""
    hook = layers_of(model)[1].mlp.register_forward_hook(lambda *_: None)
    facts = train(model, together, sizes=(1,) * 3, lengths=(12,))
    hook.remove()
    return facts + train(model, together, **OFTEN)


def more_and_more(model: Model, together: bool = True) -> Facts:
    return train(model, together, sizes=(2,) * 9 + (3,) * 2 + (4,) * 8, lengths=(12,))


def read_behind_two(model: Model, together: bool = True) -> Facts:
    """Somebody looks at gradients when two of four micro-batches are done."""
    facts, generator = list[torch.Tensor](), torch.Generator().manual_seed(2)

    def run(batch: Any) -> torch.Tensor:
        value = own_loss(model, batch)
        value.backward()
        return value.detach()

    for _ in range(9):
        samples = Samples(batches := micro_batches(4, generator, (12,)))
        step = Step(lambda: find_runtime(model), Ranks(model), run, [own_loss])
        for number, batch in enumerate(batches):
            facts.append(samples.take(step, number == 3) if together else run(batch))
            if number in (1, 3):
                facts += [each.grad.clone() for each in trained(model)]
        model.zero_grad()
    return facts


GROUPED = {"adapter_kernels": "grouped"}
RUNS: dict[str, tuple[Callable[..., Facts], Subject, dict[str, Any]]] = {
    "all": (partial(train, **OFTEN), few, ALL),
    "the last": (partial(train, **OFTEN), few, LAST),
    "dropout": (partial(train, **OFTEN), DROPOUT, ALL),
    "two numbers": (partial(train, sizes=(4, 3) * 6, lengths=(12,)), few, ALL),
    "two lengths": (partial(train, sizes=(5,) * 6, lengths=(12, 12, 9, 12, 9)), DROPOUT, ALL),
    "grouped products": (
        *(partial(train, loss=in_autocast, sizes=(4,) * 11, lengths=(12,)), TO_GROUP),
        {**ALL, **GROUPED},
    ),
    "behind a loss": (behind_a_loss, few, ALL),
    "behind a loss, dropout": (behind_a_loss, DROPOUT, ALL),
    "between two": (between_two, few, ALL),
    "behind an error": (behind_an_error, few, ALL),
    "a pass without gradients": (as_by_accelerate, few, ALL),
    "a loss that waits, later": (with_a_loss_that_waits, few, LAST),
    "one of another length": (with_one_of_another_length, few, ALL),
    "one that is recorded last": (with_hooks_at_first, UNDRAWN, ALL),
}


def as_resident(which: str) -> tuple[bool, Any]:
    """Whether a run ends as resident; the model's statistics."""
    run, base, policy = RUNS[which]
    model, resident = on_tapes(base(), **policy), base()
    if GROUPED.items() <= policy.items():
        poros.use_adapter_kernels(resident, "grouped")
    return same(run(model), run(resident, together=False)), poros.runtime(model)


@pytest.mark.parametrize("which", RUNS)
def test_runs(which: str, monkeypatch: Patch) -> None:
    put_aside = noted(monkeypatch, HeldGraph, "put_aside")
    is_same, runtime = as_resident(which)
    assert is_same and put_aside
    assert (runtime.stats()["num_joined_visits"] > 0) == (DROPOUT is not RUNS[which][1])


@pytest.mark.parametrize("which", ["all", "one that is recorded last"])
def test_nothing_is_recorded_to_be_recomputed(which: str) -> None:
    is_same, runtime = as_resident(which)
    found = runtime.context.captures.num_recorded, runtime.stats()["num_joined_visits"]
    # Each twice but the first layer, which is not joined; three steps forward and back.
    assert is_same and found == (2 * 3 - 1, 3 * 2 * 2 * 4)


def test_memory_is_taken_for_recordings_and_then_for_copies() -> None:
    model = on_tapes(few(), **ALL)
    captures, found = poros.runtime(model).context.captures, []
    for _ in range(9):
        found.append(captures.terms_to_come)
        train(model, sizes=(4,), lengths=(12,))
    assert [key for key, _ in groupby(found)] == [("recordings", "copies"), ("copies",), ()]


@pytest.mark.parametrize("have_rooms", [True, False])
@pytest.mark.parametrize("lengths", [(12, 9, 12, 12), (12, 12, 12)], ids=["two forms", "fewer"])
def test_a_group_that_is_not_replayed_in_one_go_takes_no_memory_of_its_own(
    lengths: tuple[int, ...], have_rooms: bool, monkeypatch: Patch
) -> None:
    if not have_rooms:
        none = property(lambda self: [], lambda self, value: None)
        monkeypatch.setattr(HeldGraph, "rooms", none, raising=False)
    model = on_tapes(few(), **ALL)
    train(model, **OFTEN)
    taken, waiting = (noted(monkeypatch, HeldGraph, each) for each in ("new_room", "put_aside"))
    train(model, sizes=(len(lengths),), lengths=lengths)
    # Two for the graphs of the first layer, and one by way of which graphs of each change places.
    assert waiting and (len(taken) == 2 + 3) is have_rooms


def no_room_in_rows(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Row, "_make_homes", raising(torch.OutOfMemoryError, "none left"))


def the_last_is_ahead(monkeypatch: Patch) -> None:
    """Its visits are joined a step before those of the layer before it."""

    def backward(genuine: Callable[..., Any], self: Rows, visits: Any, *given: Any) -> Any:
        form, number = visits[0].form, len(visits)
        if visits[0].call.layer.index == 4 and form.num_rows[number] == 1:
            form.num_rows[number] += 1
        return genuine(self, visits, *given)

    in_place_of(Rows, "backward")(backward)(monkeypatch)


WITHIN_THE_PLAN: dict[str, tuple[Any, Subject, Callable[[Patch], None]]] = {
    "all": (partial(train, **OFTEN), few, nothing),
    "more and more": (more_and_more, few, nothing),
    "read behind two": (read_behind_two, few, nothing),
    "not joined": (partial(train, **OFTEN), few, no_room_in_rows),
    "the last is ahead": (partial(train, **OFTEN), few, the_last_is_ahead),
    "the first layer as it is": (
        *(partial(train, **OFTEN), partial(few, layers_to_transform=[1, 2])),
        nothing,
    ),
    "two kinds": (partial(train, **OFTEN), partial(few, "gemma3"), nothing),
}


@pytest.mark.parametrize("which", WITHIN_THE_PLAN)
def test_graphs_are_no_more_than_planned(which: str, monkeypatch: Patch) -> None:
    """Of four micro-batches four of each layer, and one on the way; and none is computed again."""
    run, base, plant = WITHIN_THE_PLAN[which]
    there, most, kinds = WeakSet[Any](), list[int](), set[str]()

    def count(genuine: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
        genuine(self, *args, **options)
        there.add(self)
        most.append(len(there))

    def note(genuine: Callable[..., None], self: Any, layer: Any, form: Any) -> None:
        kinds.add(form.kind)
        genuine(self, layer, form)

    for kind in (HeldGraph, Room):
        in_place_of(kind, "__init__")(count)(monkeypatch)
    in_place_of(Recordings, "record")(note)(monkeypatch)
    plant(monkeypatch)
    model = on_tapes(base(num_layers=5), slots=5, keep_last=5)
    assert same(run(model), run(base(num_layers=5), together=False))
    assert 8 < max(most) <= 4 * 5 + 1
    assert kinds == {"kept"}


def stays_aside(first: int, monkeypatch: Patch) -> None:
    """From the call of that number on, no graph is copied back."""
    genuine, numbers = HeldGraph.bring_back, count()

    def bring_back(self: HeldGraph, call: object) -> bool:
        if self.in_flight() is call or next(numbers) < first:
            return genuine(self, call)
        self.forget(call)
        return True

    monkeypatch.setattr(HeldGraph, "bring_back", bring_back)


def copies_nothing(monkeypatch: Patch) -> None:
    other = torch.zeros(1, dtype=torch.uint8)
    monkeypatch.setattr(TapeRecorder, "memory_of", lambda self, recording: [other])


@pytest.mark.parametrize("fault", [partial(stays_aside, 0), copies_nothing])
def test_faults_are_noticed_before_anything_is_replayed(
    fault: Callable[[Patch], None], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    fault(monkeypatch)
    assert as_resident("dropout")[0] and OTHER_BITS in caplog.text


@pytest.mark.parametrize("graphs", [None, False])
def test_a_loss_from_before_of_recomputed_layers(graphs: bool | None) -> None:
    model = on_tapes(few(), slots=2, cuda_graphs=graphs)
    assert same(between_two(model), between_two(few(), together=False))


def have_moved(monkeypatch: Patch) -> None:
    """Graphs in the memory of recordings wait elsewhere as the backward of a row begins."""
    genuine = Rows.backward

    def backward(self: Rows, visits: Any, *given: Any) -> Any:
        for held in visits[0].form.all_held():
            if held.put_aside(for_now=True):
                for place in held.places:
                    place.zero_()
        return genuine(self, visits, *given)

    monkeypatch.setattr(Rows, "backward", backward)


def as_in_its_place(monkeypatch: Patch) -> None:
    """A joined backward takes them to be there."""
    have_moved(monkeypatch)
    monkeypatch.setattr(Row, "has_graphs", lambda *_: True)


def test_graphs_that_have_moved(monkeypatch: Patch) -> None:
    have_moved(monkeypatch)
    is_same, runtime = as_resident("all")
    assert is_same and runtime.stats()["num_joined_visits"]


def stays_in_the_way(monkeypatch: Patch) -> None:
    monkeypatch.setattr(HeldGraph, "vacate", lambda *_: True)


@pytest.mark.parametrize(
    ("fault", "which"),
    [
        (partial(stays_aside, 12), "all"),
        (as_in_its_place, "all"),
        (stays_in_the_way, "a loss that waits, later"),
    ],
)
def test_controls(fault: Callable[[Patch], None], which: str, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert not as_resident(which)[0]
