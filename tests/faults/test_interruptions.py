"""A model whose steps are interrupted: the next ones are bit for bit those of a resident model.

Exceptions out of the middle of a layer, under adversarial streams whose reads are watched; Ctrl-C
at every step of a visit's begin and end; both among grouped micro-batches. Within the streams of a
GPU: ``test_missing_waits``; in trainers: ``tests/exact/test_accumulate_trainers``.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch

import poros
from poros.accumulation.group import Group
from poros.accumulation.parked import ParkedCode
from poros.api import prepare_with
from poros.kernels.dense_memory import DenseLayer
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase
from poros.stream.adapters import proxy_leaves
from poros.stream.attention import unchanged_flags
from poros.stream.body import LayerBody
from poros.stream.boundary import StreamedLayer, streamed_layer
from poros.stream.visit import BlockVisit, Visits
from tests.comparing import assert_same_run
from tests.interrupts import Interrupts
from tests.loops import (
    Batch,
    adapted,
    batches,
    build,
    dense,
    layers_of,
    own_loss,
    resident_run,
    run,
    same,
    train,
    trained,
)
from tests.support import AdversarialPrepare, prepare_plain, same_bits
from tools.tape import TapeRecorder

Patch = pytest.MonkeyPatch
Model = Any
BATCHES = batches(3)


def loss_of(model: Any, index: int) -> torch.Tensor:
    return model(**BATCHES[index]).loss


# Exceptions out of a layer.


class Interrupted(RuntimeError):
    """Something in a layer that is none of the runtime's business."""


def raise_in(model: Any, layer: int, where: str, error: BaseException) -> Any:
    """Raise in the middle of a layer's forward or recomputation, or in its graph's backward."""
    calls: list[None] = []

    def fail(_: torch.Tensor) -> None:
        raise error

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        calls.append(None)
        if where == "gradient" and output.requires_grad:
            output.register_hook(fail)
        elif len(calls) == {"forward": 1, "recomputation": 2}.get(where):
            raise error

    return layers_of(model)[layer].mlp.register_forward_hook(hook)


def test_healthy_steps_after_exceptions_equal_the_resident_ones() -> None:
    prepare = AdversarialPrepare()
    with prepare.watching():
        model = prepare(build(), slots=2)
        for where in ("forward", "recomputation", "gradient", "evaluation"):
            model.train(where != "evaluation")
            for layer in range(3):
                error = KeyboardInterrupt() if layer == 1 else Interrupted("in a layer")
                handle = raise_in(model, layer, where.replace("evaluation", "forward"), error)
                with torch.set_grad_enabled(model.training), pytest.raises(type(error)):
                    loss_of(model, 1).backward()
                handle.remove()
        assert_same_run(resident_run(), run(model))
        runtime = poros.runtime(model)
        before = runtime.stats()["num_loads"]
        loss_of(model, 0).backward()
    loads = 2 * (runtime.num_blocks - runtime.num_slots)
    assert runtime.stats()["num_loads"] - before == loads
    assert runtime.stats()["num_loads"] == prepare.streams.num_copies


# Ctrl-C at every step of a visit's begin and end. Whatever it strikes: the model is as at rest when
# the next step has begun, and that step is exact.

AROUND = ("stream/visit.py", "stream/body.py", "slots/manager.py", "contextlib.py")
STEP = (
    *("visit", "body", "streamed", "general", "manager", "layer_index"),
    *("proof", "settings", "rng", "check", "contextlib"),
)


def visit_once(runtime: StreamedLayer, phase: Phase) -> None:
    leaves, _ = proxy_leaves(runtime.contents().adapters().places)
    with runtime.visit(phase, leaves):
        pass


Modules = list[tuple[str, torch.nn.Module]]


def state_of(model: Model, modules: Modules | None = None) -> dict[str, Any]:
    """What an interrupted visit could leave behind: tables' entries, slots, states of torch.

    ``modules``: those of the model, for who asks often.
    """
    found: dict[str, Any] = {
        "subclasses see calls": torch._C._is_torch_function_enabled(),
        "gradients are taken": torch.is_grad_enabled(),
    }
    for name, module in modules or model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                found[f"{name}.{key}"] = id(value)
        if "quant_state" in module.__dict__:
            found[f"{name} quant_state"] = id(module.quant_state)
    for slot in poros.runtime(model).ring.slots:
        found[f"slot {slot.index} is in use"] = slot.state is SlotState.IN_USE
    return found


def small() -> Model:
    return prepare_plain(build(), self_check="off", slots=2)


def end_at_once(self: Visits, note: Any) -> None:
    """As a visit would end if nobody made up for an end that is interrupted."""
    if note in self._open:
        self._open.remove(note)
        note()


@pytest.mark.parametrize(
    ("phase", "is_mended"),
    [
        pytest.param(Phase.FORWARD, True, marks=pytest.mark.slow),
        (Phase.BACKWARD, True),
        pytest.param(Phase.FORWARD, False, id="control"),
    ],
)
def test_a_visit_interrupted_anywhere_leaves_nothing_behind(
    phase: Phase, is_mended: bool, monkeypatch: Patch
) -> None:
    prepared = small()
    runtimes = [streamed_layer(layer) for layer in layers_of(prepared)]
    prepared(**BATCHES[0])
    if not is_mended:
        monkeypatch.setattr(Visits, "end", end_at_once)
    modules: Modules = list(prepared.named_modules())
    before = state_of(prepared, modules)
    num_interrupted = 0
    for number in count(1):
        interrupts = Interrupts(number, AROUND, fine=True)
        runtime = runtimes[number % len(runtimes)]
        if interrupts.run(lambda runtime=runtime: visit_once(runtime, phase)):
            num_interrupted += 1
        elif interrupts.num_steps < number:
            break
        if state_of(prepared, modules) != before:
            assert not is_mended, number
            return
    assert is_mended and num_interrupted > 400
    assert_same_run(resident_run(), run(prepared))


# Primes apart, so that every place of the four visits comes up in one of them.
@pytest.mark.parametrize(
    ("self_check", "apart"),
    [
        *(("off", 1021), ("strict", 4001)),
        *(pytest.param(each, 257, marks=pytest.mark.slow) for each in ("off", "strict")),
    ],
)
def test_a_step_interrupted_anywhere_is_followed_by_exact_ones(self_check: str, apart: int) -> None:
    expected = run(build(num_layers=2), num_steps=1)
    batch = batches()[0]

    def once(model: Model) -> None:
        model.train()
        model(**batch).loss.backward()

    files = tuple(f"{name}.py" for name in STEP)
    model = prepare_plain(build(num_layers=2), self_check=self_check)
    counter = Interrupts(None, files)
    counter.run(lambda: once(model))
    total = counter.num_steps
    assert total > 1000
    for number in range(1, total, apart):
        model = prepare_plain(build(num_layers=2), self_check=self_check)
        Interrupts(number, files).run(lambda model=model: once(model))
        model.zero_grad()
        assert_same_run(expected, run(model, num_steps=1))
        poros.restore(model)


@contextmanager
def by_a_generator() -> Iterator[None]:
    """Puts the flag back whenever it is collected."""
    before = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(True)
        yield
    finally:
        torch.set_grad_enabled(before)


def puts_back_late(make: Callable[[], Any]) -> bool:
    """Whether one that is interrupted somewhere puts an old state back after others set theirs."""
    expected = torch.get_rng_state()

    def use() -> None:
        torch.set_grad_enabled(False)  # as the engine does around a backward
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with make():
                pass
        finally:
            torch.set_grad_enabled(True)
            torch.use_deterministic_algorithms(False)
            torch.set_rng_state(expected)

    found = False
    for number in count(1):
        torch.manual_seed(number)
        was_interrupted = Interrupts(number, ("contextlib.py",)).run(use)
        gc.collect(1)  # what is new
        found |= not torch.is_grad_enabled() or torch.are_deterministic_algorithms_enabled()
        found |= not torch.equal(torch.get_rng_state(), expected)
        if not was_interrupted:
            return found
    raise AssertionError


@pytest.mark.parametrize(("make", "is_late"), [(unchanged_flags, False), (by_a_generator, True)])
def test_what_was_interrupted_does_not_put_an_old_state_back_later(
    make: Callable[[], Any], is_late: bool
) -> None:
    """What is ``Within``, beside a generator as the control."""
    try:
        assert puts_back_late(make) == is_late
    finally:
        torch.set_grad_enabled(True)


def test_a_visit_that_was_never_left_is_undone_by_restore() -> None:
    """Interrupted between two steps of leaving it, and its frame lives on in a traceback."""
    model = small()
    before = state_of(model)
    layer = streamed_layer(layers_of(model)[0])
    leaves, _ = proxy_leaves(layer.contents().adapters().places)
    left = layer.visit(Phase.FORWARD, leaves)
    left.__enter__()
    assert state_of(model) != before
    poros.restore(model)
    named = (*model.named_parameters(), *model.named_buffers())
    assert all(id(value) == before[name] for name, value in named if name in before)
    assert_same_run(resident_run(), run(model))


# Among grouped micro-batches nothing of them is left in the model. An error or Ctrl-C strikes as a
# context begins, and what that was to undo is undone as its frame goes. If it strikes in a loss,
# gradients are those of the micro-batches before it.

REPLAYED: Any = {
    **{"device": "cpu", "slots": 2, "self_check": "off"},
    **{"loss": "chunked", "stream_head": True, "share_dense": True},
}
IN_GROUPS: dict[str, tuple[Any, str]] = {
    "code of the user": (Group, "_in_place"),
    "its regions": (ParkedCode, "inside"),
    "a row": (LayerBody, "in_a_row"),
    "a row of visits": (BlockVisit, "in_a_row"),
    "a replayed visit": (BlockVisit, "occupy"),
    "dense weights": (DenseLayer, "use"),
}
TOKENS = torch.arange(4, 52).view(4, 12)
ROWS = [{"input_ids": row[None], "labels": row[None], "use_cache": False} for row in TOKENS]


class Warm(NamedTuple):
    """A model whose visits are replayed, what it computes, and gradients of a step."""

    model: Model
    output: torch.Tensor
    gradients: list[torch.Tensor]


@pytest.fixture(scope="module")
def warm() -> Warm:
    model = adapted(lora_dropout=0.1)
    prepare_with(model, poros.StreamingPolicy(**REPLAYED), recorder=TapeRecorder())
    for _ in range(4):
        poros.accumulate(model, ROWS)
    return Warm(model, look(model), step(model))


def step(model: Model) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    poros.accumulate(model, ROWS)
    return gradients(model)


def look(model: Model) -> torch.Tensor:
    """What it computes with another rate of dropout, as only this model's own code would."""
    dropouts = [each for each in model.modules() if isinstance(each, torch.nn.Dropout)]
    for each in dropouts:
        each.p = 0.5
    torch.manual_seed(3)
    tokens = TOKENS[:1]
    found: torch.Tensor = model(input_ids=tokens.flip(1), labels=tokens, use_cache=False).loss
    for each in dropouts:
        each.p = 0.1
    return found.detach()


def striking(owner: Any, name: str, at: int, kept: list[Any]) -> Any:
    """The context manager of ``owner``, which strikes as it begins for the time ``at``."""
    number, genuine = count(1), getattr(owner, name)

    @contextmanager
    def context(*args: Any, **options: Any) -> Iterator[Any]:
        manager: AbstractContextManager[Any] = genuine(*args, **options)
        kept.append(manager)
        if next(number) == at:
            manager.__enter__()
            raise KeyboardInterrupt
        with manager as found:
            yield found

    return context


@pytest.mark.parametrize("share", (0.0, 0.7))
@pytest.mark.parametrize("which", IN_GROUPS)
def test_nothing_is_left_behind(
    which: str, share: float, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are there are to be thrown away, as after any backward that is interrupted."""
    model, calls = warm.model, list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(*IN_GROUPS[which], striking(*IN_GROUPS[which], 0, calls))
        poros.accumulate(model, ROWS)
    assert calls, "it is used at all"
    at = 1 + int(share * len(calls))
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(*IN_GROUPS[which], striking(*IN_GROUPS[which], at, calls))
        with suppress(KeyboardInterrupt):
            poros.accumulate(model, ROWS)
    assert len(calls) >= at
    calls.clear()
    assert same_bits(look(model), warm.output)
    assert all(each.state.value != "in use" for each in poros.runtime(model).ring.slots)
    assert not any(hasattr(each, "is_watched") for each in trained(model))
    assert same(step(model), warm.gradients) and warm.gradients[0].numel()


def gradients(model: Model) -> list[torch.Tensor]:
    return [torch.empty(0) if each.grad is None else each.grad.clone() for each in trained(model)]


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("where", ["before the model", "behind the model"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("at, step", [(0, 0), (2, 0), (0, 1), (2, 1)])
def test_micro_batches_before_it_have_their_gradients(
    at: int, step: int, error: type[BaseException], where: str
) -> None:
    """The caller may catch the error and step; and begin again."""

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        is_struck = is_on and batch["input_ids"].shape[1] == 5
        if is_struck and where.startswith("before"):
            raise error
        value = own_loss(model, batch)
        if is_struck:
            raise error
        return value

    found: list[Any] = []
    for is_grouped in (False, True):
        model, is_on = dense(), False
        if is_grouped:
            prepare_plain(model, slots=2)
        lengths = [12, 9, 7]
        lengths[at] = 5
        options: Any = {"loss": loss, "lengths": lengths, "sizes": (3,)}
        if step:
            train(model, is_grouped, **options)
        is_on = True
        with pytest.raises(error):
            train(model, is_grouped, **options)
        struck, is_on = gradients(model), False
        model.zero_grad()
        found.append((struck, train(model, is_grouped, **options)))
    (*struck,), (*after,) = zip(*found, strict=True)
    # Ctrl-C as the code runs ahead of its turn: those before it have not been trained yet.
    is_early = error is KeyboardInterrupt and where.startswith("before") and at > 0
    assert same(*after) and (is_early or same(*struck))
