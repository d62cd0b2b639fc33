"""A model whose steps are interrupted: the next ones are bit for bit those of a resident model.

Exceptions out of the middle of a layer, under adversarial streams whose reads are watched; Ctrl-C
at every step of a visit's begin and end, and within the streams of a GPU.
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
from poros import cuda_streams as streams_module
from poros.cuda_streams import CudaStreams
from poros.errors import SlotStateError
from poros.gates.reference import Trajectory
from poros.self_check.evidence import CallSnapshot, random_states
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase
from poros.stream.attention import deterministic_flag, unchanged_flags
from poros.stream.boundary import StreamedLayer, streamed_layer
from poros.stream.settings import Settings
from poros.stream.visit import Visits, proxy_leaves
from tests.fake_cuda import FakeCuda, FakeStream, FakeTensor
from tests.interrupts import Interrupts
from tests.snapshots import assert_same_run, batches, build, layers_of, resident_run, run
from tests.support import AdversarialPrepare, prepare_plain

Patch = pytest.MonkeyPatch
Model = Any
NUM_LAYERS = 4
BATCHES = batches(3)

POLICIES = [
    pytest.param({"block_size": 1, "slots": 2}, id="4 blocks, 2 slots"),
    pytest.param({"block_size": 1, "slots": 3}, id="4 blocks, 3 slots"),
    pytest.param({"block_size": 2, "slots": 2}, id="2 blocks, 2 slots"),
]


def layered() -> Model:
    return build(num_layers=NUM_LAYERS)


def loss_of(model: Any, index: int) -> torch.Tensor:
    loss: torch.Tensor = model(**BATCHES[index]).loss
    return loss


# Exceptions out of a layer.


@pytest.fixture(scope="module")
def healthy() -> Trajectory:
    """The resident run without any interruption."""
    return run(layered())


def raise_in_call(model: Any, layer: int, number: int, error: BaseException) -> Any:
    """Raise in the middle of a layer: 1 is its forward, 2 its recomputation in backward."""
    calls = 0

    def hook(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error

    return layers_of(model)[layer].mlp.register_forward_pre_hook(hook)


def raise_in_gradient(model: Any, layer: int, _: int, error: BaseException) -> Any:
    """Raise while autograd is inside the recomputed graph of a layer."""

    def raise_now(gradient: torch.Tensor) -> None:
        raise error

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(raise_now)

    return layers_of(model)[layer].mlp.register_forward_hook(hook)


class Interrupted(RuntimeError):
    """Something in a layer that is none of the runtime's business."""


FORWARD, RECOMPUTATION = 1, 2
Places = list[tuple[Callable[..., Any], int, int]]
WHERE: dict[str, Places] = {
    "gradient of a middle layer": [(raise_in_gradient, 1, 1)],
    "gradient of the first layer": [(raise_in_gradient, 1, 0)],
    "one layer after another": [
        (raise_in_call, number, layer)
        for number in (FORWARD, RECOMPUTATION)
        for layer in range(NUM_LAYERS)
    ],
    "an evaluation": [(raise_in_call, FORWARD, 2)],
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", WHERE)
def test_healthy_steps_after_an_exception_equal_the_resident_ones(
    where: str, policy: dict[str, int], healthy: Trajectory
) -> None:
    prepare = AdversarialPrepare()
    with prepare.watching():
        model = prepare(layered(), **policy)
        model.train(where != "an evaluation")
        for arrange, number, layer in WHERE[where]:
            error = KeyboardInterrupt() if layer == 1 else Interrupted("in the middle of a layer")
            hook = arrange(model, layer, number, error)
            with torch.set_grad_enabled(model.training), pytest.raises(type(error)):
                loss_of(model, 1).backward()
            hook.remove()
        assert_same_run(healthy, run(model))
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


@pytest.mark.parametrize(
    "phase", [pytest.param(Phase.FORWARD, marks=pytest.mark.slow), Phase.BACKWARD]
)
def test_a_visit_interrupted_anywhere_leaves_nothing_behind(phase: Phase) -> None:
    prepared = small()
    runtimes = [streamed_layer(layer) for layer in layers_of(prepared)]
    prepared(**BATCHES[0])
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
        assert state_of(prepared, modules) == before, number
    assert num_interrupted > 400
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


def test_control_a_clean_up_that_is_not_made_up_for(monkeypatch: Patch) -> None:
    prepared = small()
    visit_once(streamed_layer(layers_of(prepared)[0]), Phase.FORWARD)

    def end(self: Visits, note: Any) -> None:
        if note in self._open:
            self._open.remove(note)
            note.undo()

    monkeypatch.setattr(Visits, "end", end)
    modules: Modules = list(prepared.named_modules())
    before = state_of(prepared, modules)
    runtime = streamed_layer(layers_of(prepared)[0])
    for number in range(1, 4000):
        interrupts = Interrupts(number, AROUND, fine=True)
        interrupts.run(lambda: visit_once(runtime, Phase.FORWARD))
        if state_of(prepared, modules) != before:
            return
    raise AssertionError("no interruption left anything behind")


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
        gc.collect()
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


@pytest.mark.parametrize("then", ["train", "restore"])
def test_a_visit_that_was_never_left_is_undone_by_what_comes_next(then: str) -> None:
    """Interrupted between two steps of leaving it, and its frame lives on in a traceback."""
    model = small()
    before = state_of(model)
    layer = streamed_layer(layers_of(model)[0])
    leaves, _ = proxy_leaves(layer.contents().adapters().places)
    left = layer.visit(Phase.FORWARD, leaves)
    left.__enter__()
    inside = state_of(model)
    assert inside != before
    if then == "train":
        model(**batches()[0])
        assert state_of(model) == before
    else:
        poros.restore(model)
        assert all(
            id(value) == before[name]
            for name, value in (*model.named_parameters(), *model.named_buffers())
            if name in before
        )
    assert_same_run(resident_run(), run(model))


def test_a_visit_within_a_visit_is_refused() -> None:
    model = AdversarialPrepare()(build(), slots=3)
    runtimes = [streamed_layer(layer) for layer in layers_of(model)]
    before = state_of(model)
    with (
        pytest.raises(SlotStateError, match=r"layers\.0: expected one layer to run at a time"),
        runtimes[0].visit(Phase.FORWARD, ()),
    ):
        visit_once(runtimes[1], Phase.FORWARD)
    assert state_of(model) == before
    assert_same_run(resident_run(), run(model))


NUM_BYTES = 16


def bytes_of(value: int) -> torch.Tensor:
    return torch.full((NUM_BYTES,), value, dtype=torch.uint8)


# Within the streams of a GPU, on stand-ins that see what no event orders.


@pytest.fixture
def cuda(monkeypatch: Patch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setattr(streams_module, "torch", found.torch)
    return found


def visit(streams: CudaStreams, memory: FakeTensor, value: int) -> None:
    """The next block: its copy behind the last read, then a read of it."""
    copied = streams.copy(memory, bytes_of(value), after=streams.record())  # type: ignore[arg-type]
    streams.wait(copied)
    assert memory.read().tolist() == [value] * NUM_BYTES


def begin() -> tuple[CudaStreams, FakeTensor]:
    streams = CudaStreams(torch.device("cuda", 0))
    memory: FakeTensor = streams.allocate(NUM_BYTES)  # type: ignore[assignment]
    visit(streams, memory, 1)
    return streams, memory


def test_as_another_compute_stream_is_met(cuda: FakeCuda, monkeypatch: Patch) -> None:
    """The old one is joined again, or what comes next would be ordered behind the wrong stream."""
    streams, memory = begin()
    genuine = FakeStream.wait_stream

    def struck(self: FakeStream, stream: FakeStream) -> None:
        genuine(self, stream)
        raise KeyboardInterrupt

    with cuda.on(FakeStream(name="another compute stream")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(FakeStream, "wait_stream", struck)
            streams.record()
        for value in (2, 3):
            visit(streams, memory, value)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_as_a_copy_is_queued(cuda: FakeCuda, where: str, monkeypatch: Patch) -> None:
    """The copy stream does not stay the current one."""
    streams, memory = begin()
    genuine, calls = streams_module._set_current, [0]

    def struck(*key: int) -> None:
        calls[0] += 1
        if where == "behind" and calls[0] == 2:
            raise KeyboardInterrupt
        genuine(*key)
        if where == "before":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(streams_module, "_set_current", struck)
        streams.copy(memory, bytes_of(2), after=streams.record())  # type: ignore[arg-type]
    assert cuda.current_stream() is not cuda.compute, "as PyTorch's own context would leave it"
    streams.record()
    assert cuda.current_stream() is cuda.compute
    visit(streams, memory, 3)
