"""A model whose steps are interrupted: the next ones are bit for bit those of a resident model.

Exceptions out of the middle of a layer, under adversarial streams whose reads are watched; Ctrl-C
at every step of a visit's begin and end. Within the streams of a GPU: ``test_missing_waits``.
"""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import poros
from poros.self_check.evidence import CallSnapshot, random_states
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase
from poros.stream.attention import deterministic_flag, unchanged_flags
from poros.stream.boundary import StreamedLayer, streamed_layer
from poros.stream.settings import Settings
from poros.stream.visit import Visits, proxy_leaves
from tests.comparing import assert_same_run
from tests.interrupts import Interrupts
from tests.loops import batches, build, layers_of, resident_run, run
from tests.support import AdversarialPrepare, prepare_plain

Patch = pytest.MonkeyPatch
Model = Any
NUM_LAYERS = 4
BATCHES = batches(3)


def loss_of(model: Any, index: int) -> torch.Tensor:
    loss: torch.Tensor = model(**BATCHES[index]).loss
    return loss


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
        model = prepare(build(num_layers=NUM_LAYERS), slots=3)
        for where in ("forward", "recomputation", "gradient", "evaluation"):
            model.train(where != "evaluation")
            for layer in range(NUM_LAYERS):
                error = KeyboardInterrupt() if layer == 1 else Interrupted("in a layer")
                handle = raise_in(model, layer, where.replace("evaluation", "forward"), error)
                with torch.set_grad_enabled(model.training), pytest.raises(type(error)):
                    loss_of(model, 1).backward()
                handle.remove()
        assert_same_run(run(build(num_layers=NUM_LAYERS)), run(model))
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
    *("stream/state", "proof", "settings", "rng", "check", "contextlib"),
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
        note.undo()


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


CONTEXTS: dict[str, Callable[[], Any]] = {
    "state of a forward": lambda: CallSnapshot.state(SURROUNDINGS, CPU),
    "state of a backward": lambda: CallSnapshot.backward_state(SURROUNDINGS, CPU),
    "flags": unchanged_flags,
    "deterministic flag": deterministic_flag,
}
CPU = torch.device("cpu")
SURROUNDINGS: Any = SimpleNamespace(
    rng=random_states(CPU),
    other_rng=(random.getstate(), np.random.get_state()),
    rng_backward=random_states(CPU),
    autocast=[],
    has_cast_cache=True,
    is_late=False,
    settings=Settings.capture(),
    layer=torch.nn.Linear(1, 1),
    training=[True],
)


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


@pytest.mark.parametrize(
    ("make", "is_late"),
    [
        *(pytest.param(make, False, id=name) for name, make in CONTEXTS.items()),
        pytest.param(by_a_generator, True, id="control"),
    ],
)
def test_what_was_interrupted_does_not_put_an_old_state_back_later(
    make: Callable[[], Any], is_late: bool
) -> None:
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
