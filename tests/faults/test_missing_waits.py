"""Every wait and record of slots and copies is needed: without one a test fails, every time.

If the source lacks one, ``test_the_source_as_it_is_passes`` fails, over streams that run as late or
as early as events allow, or ``test_cuda_streams_as_they_are_pass``, over a stand-in for CUDA. The
tests of mutations take each away and see so. On a GPU ``tests/gpu/test_cuda`` and
``tests/gpu/test_cuda_hazards`` do.

The mutations come from the source itself (see ``mutants``), so that a wait which is added later has
to earn its place here too. That any walk at all of blocks in slots reads its own blocks is in
``tests/unit/test_slots``, that models trained so are exact in ``tests/exact/test_cells``.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from poros import cuda_streams as streams_module
from poros.cuda_streams import CudaStreams
from poros.head.rows import RowReader
from poros.head.slices import SliceReader
from poros.slots.ring import SlotState
from poros.slots.schedule import Phase
from poros.stream.offload import ActivationOffloader
from tests import mutants
from tests.comparing import compare_trajectories
from tests.fake_cuda import FakeCuda, FakeStream, FakeTensor
from tests.journal import training_visits
from tests.loops import build, resident_run, run
from tests.replaced import Patch, raising
from tests.slots import Slots
from tests.support import AdversarialPrepare, same_bits
from tools.adversary import AdversarialStreams, SlotHazard

Problem = str | None
Scenario = Callable[[AdversarialStreams], Problem]


def visit_blocks(streams: AdversarialStreams) -> Problem:
    """Two training steps with an evaluation in between, and a visit that is given up."""
    slots = Slots(5, 2, streams)
    slots.train()
    slots.infer()
    slots.train()
    slots.give_up(1)
    return None


def train_a_model(streams: AdversarialStreams) -> Problem:
    """Two training steps compared with the resident ones."""
    model = AdversarialPrepare(lambda: streams)(build())
    differences = compare_trajectories(resident_run(), run(model))
    return str(differences[0]) if differences else None


def offload_inputs(streams: AdversarialStreams) -> Problem:
    """Passes over five layers whose inputs wait on the host, two of them given up half-way."""
    offloader = ActivationOffloader(streams)
    device = Slots(2, 2, streams)
    for number in range(4):
        inputs, offloaded = [], []
        for index in range(5):
            device.visit(index % 2, Phase.FORWARD)  # what computes the input
            inputs.append(torch.randn(3, 4))
            offloaded.append(offloader.offload(inputs[-1].clone(), str(index), index))
        for index in reversed(range(2 if number % 2 else 0, 5)):
            device.visit(index % 2, Phase.BACKWARD)
            if not same_bits(offloaded[index].fetch(), inputs[index]):
                return f"input {index}: other bytes"
        del offloaded
    return None


def read_rows(streams: AdversarialStreams) -> Problem:
    """Lookups in a matrix on the host, while blocks compute."""
    reader, matrix = RowReader(streams), torch.randn(20, 4)
    device = Slots(2, 2, streams)
    for number in range(6):
        device.visit(number % 2, Phase.FORWARD)
        indices = torch.randint(20, (2, 3 + number % 2))
        if not same_bits(reader.rows("matrix", matrix, indices), matrix[indices]):
            return f"rows {indices.tolist()}: other bytes"
        if not same_bits(reader.whole(matrix[:7]), matrix[:7]):
            return "some rows: other bytes"
    return None


def read_slices(streams: AdversarialStreams) -> Problem:
    """Passes over a matrix on the host, one of them given up half-way, while blocks compute."""
    matrix = torch.randn(20, 4)
    with Patch.context() as patch:
        patch.setattr("poros.head.slices.slice_width", lambda *_: 6)
        reader = SliceReader("matrix", matrix, streams)
    device = Slots(2, 2, streams)
    for number, width in enumerate((6, 5, 6, 6)):
        device.visit(number % 2, Phase.FORWARD)
        for first, rows in reader(width):
            if not same_bits(rows.clone(), matrix[first : first + width]):
                return f"slice at {first}: other bytes"
            if number == 2 and first:
                break
        if number == 2:
            reader.load()
    return None


def problem_of(scenario: Scenario, watched: bool) -> Problem:
    """What goes wrong, in words: a hazard, other bytes or other results; None if nothing does.

    Any other exception is not what a missing wait looks like, and is raised.
    """
    streams = AdversarialStreams()
    try:
        with streams.watch() if watched else nullcontext():
            return scenario(streams)
    except SlotHazard as hazard:
        return f"SlotHazard: {hazard}"
    except AssertionError as error:
        if "other bytes" not in str(error):
            raise
        return str(error)


OTHERS = {
    "poros.stream.offload": offload_inputs,
    "poros.head.rows": read_rows,
    "poros.head.slices": read_slices,
}
"""Modules that order streams beside those of slots, and what shows it."""
SCENARIOS = [
    *((scenario, watched) for scenario in (visit_blocks, train_a_model) for watched in (1, 0)),
    *((scenario, 1) for scenario in OTHERS.values()),
]
CONTEXT_MUTATIONS = mutants.stream_context_mutations()
OTHER_MUTATIONS = {each: mutants.stream_context_mutations([each]) for each in OTHERS}
CUDA_MUTATIONS = mutants.cuda_mutations()


def name_of(value: object) -> str:
    return getattr(value, "__name__", {1: "watched", 0: "unwatched"}.get(value, str(value)))  # type: ignore[call-overload]


@pytest.mark.parametrize(("scenario", "watched"), SCENARIOS, ids=name_of)
def test_the_source_as_it_is_passes(scenario: Scenario, watched: bool) -> None:
    assert problem_of(scenario, watched) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("mutation", "scenario", "watched"),
    [
        *(
            (mutation, *each)
            for mutation in CONTEXT_MUTATIONS
            # A model that trains gives up no visit.
            for each in SCENARIOS[: 2 if "evict" in str(mutation) else 4]
        ),
        *((each, OTHERS[module], 1) for module in OTHERS for each in OTHER_MUTATIONS[module]),
    ],
    ids=name_of,
)
def test_a_mutation_is_noticed(
    mutation: mutants.Mutation, scenario: Scenario, watched: bool, monkeypatch: Patch
) -> None:
    mutation.apply(monkeypatch)
    assert problem_of(scenario, watched), f"nothing notices that {mutation}"


def test_every_point_of_order_is_mutated() -> None:
    changes = [str(mutation) for mutation in CONTEXT_MUTATIONS]
    for wanted in (
        "slots.ring.DeviceRing.__init__: streams.record() replaced by an older event",
        "slots.manager.BlockManager._load: after=slot.released replaced by after=None",
        "slots.manager.BlockManager._waited_for: self._streams.wait(slot.ready) removed",
    ):
        assert wanted in changes
    assert any("manager" in each and "record() replaced by None" in each for each in changes)
    assert any("manager" in each and "an older event" in each for each in changes)
    assert len({str(mutation) for mutation in CONTEXT_MUTATIONS}) == len(CONTEXT_MUTATIONS)
    # Nobody else in poros/ does so; who starts to, belongs into ``mutants.MANAGED``.
    assert all(OTHER_MUTATIONS.values())
    assert mutants.modules_that_order_streams() == {*mutants.MANAGED, *OTHERS}
    methods = {mutation.change.split("(")[0].split(".")[-1] for mutation in CUDA_MUTATIONS}
    assert methods | {"removed"} >= set(mutants.STREAM_METHODS)
    assert len(CUDA_MUTATIONS) >= 6


# With CUDA streams, on a CUDA whose every unordered pair of accesses collides.


class CudaSlots(Slots):
    """``Slots`` whose reads are kernels of the fake device."""

    def read(self, block: int) -> None:
        slot = self.ring.slot(block)
        assert (slot.state, slot.block) == (SlotState.IN_USE, block)
        source = self.host.slabs[block].bytes
        buffer: object = slot.buffer
        assert isinstance(buffer, FakeTensor)
        assert same_bits(buffer[: source.numel()].read(), source), f"block {block}: other bytes"

    def buffers(self) -> list[FakeTensor]:
        buffers: list[object] = [slot.buffer for slot in self.ring.slots]
        return [each for each in buffers if isinstance(each, FakeTensor)]


def cuda_slots() -> CudaSlots:
    return CudaSlots(5, 2, CudaStreams(torch.device("cuda", 0)))


def train_in_used_memory(cuda: FakeCuda) -> None:
    """The slots lie where kernels that are still queued read and write."""
    before = [cuda.empty(1024, dtype=torch.uint8, device=None) for _ in range(2)]
    for tensor in before:
        tensor.fill_(1)
        tensor.read()
        cuda.free(tensor)
    slots = cuda_slots()
    assert [each.block for each in slots.buffers()] == [each.block for each in before]
    slots.train(2)
    slots.infer()
    slots.train()
    slots.give_up(1)


def move_between_streams(cuda: FakeCuda) -> None:
    """Each layer of a block computes on another stream, without a word to anyone."""
    slots = cuda_slots()
    others = [cuda.compute, FakeStream(name="second stream"), FakeStream(name="third stream")]
    for block, phase in training_visits(slots.num_blocks, 2):
        for stream in others:
            with cuda.on(stream):
                slots.visit(block, phase)


def give_to_the_next(cuda: FakeCuda, slots: CudaSlots) -> None:
    """The model is gone, restored or collected; its slots go to whoever allocates next."""
    for buffer in slots.buffers():
        cuda.free(buffer)
        following = cuda.empty(buffer.numel(), dtype=torch.uint8, device=None)
        assert following.block is buffer.block
        following.fill_(1)


def drop_with_copies_queued(cuda: FakeCuda) -> None:
    """In the middle of a step, when the copy stream still writes."""
    slots = cuda_slots()
    slots.visit(0, Phase.FORWARD)
    assert SlotState.LOADING in [state for state, _ in slots.states()]
    give_to_the_next(cuda, slots)


def drop_after_another_stream(cuda: FakeCuda) -> None:
    """The last reads were queued on another stream than the memory came from."""
    slots = cuda_slots()
    slots.train()
    with cuda.on(FakeStream(name="second stream")):
        slots.train()
    give_to_the_next(cuda, slots)


def allocate_on_another_stream(cuda: FakeCuda) -> None:
    """Prepared under a stream of its own, used and dropped on the ordinary one."""
    with cuda.on(FakeStream(name="second stream")):
        slots = cuda_slots()
    slots.train()
    with cuda.on(slots.buffers()[0].block.stream):
        give_to_the_next(cuda, slots)


def abandon_a_copy(cuda: FakeCuda) -> None:
    """Memory of the compute stream is given up while a copy into it is queued."""
    streams = CudaStreams(torch.device("cuda", 0))
    memory: object = streams.borrow(1024, torch.uint8)  # type: ignore[arg-type]
    assert isinstance(memory, FakeTensor)
    source = torch.zeros(1024, dtype=torch.uint8)
    event = streams.copy(memory, source, after=streams.record())  # type: ignore[arg-type]
    streams.abandon(memory, event)  # type: ignore[arg-type]
    cuda.free(memory)
    following = cuda.empty(1024, dtype=torch.uint8, device=None)
    assert following.block is memory.block
    following.fill_(1)


CUDA_SCENARIOS = (
    abandon_a_copy,
    train_in_used_memory,
    move_between_streams,
    drop_with_copies_queued,
    drop_after_another_stream,
    allocate_on_another_stream,
)


def fake_cuda(monkeypatch: Patch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(streams_module, "torch", cuda.torch)
    monkeypatch.setattr("poros.streams.torch", cuda.torch)
    return cuda


def hazard_of(scenario: Callable[[FakeCuda], None], monkeypatch: Patch) -> Problem:
    try:
        scenario(fake_cuda(monkeypatch))
    except SlotHazard as hazard:
        return str(hazard)
    return None


@pytest.mark.parametrize("scenario", CUDA_SCENARIOS, ids=lambda each: each.__name__)
def test_cuda_streams_as_they_are_pass(
    scenario: Callable[[FakeCuda], None], monkeypatch: Patch
) -> None:
    assert hazard_of(scenario, monkeypatch) is None


# An event from before the allocation is as good if nothing was queued in between, and nothing is:
# that mutation is no hazard here. The adversarial streams are stricter and report it.
HARMLESS = "slots.ring.DeviceRing.__init__: streams.record() replaced by an older event"


@pytest.mark.parametrize(
    "mutation",
    [mutation for mutation in CUDA_MUTATIONS + CONTEXT_MUTATIONS if str(mutation) != HARMLESS],
    ids=str,
)
def test_a_mutation_is_a_hazard_on_cuda(mutation: mutants.Mutation, monkeypatch: Patch) -> None:
    mutation.apply(monkeypatch)
    hazards = [hazard_of(scenario, monkeypatch) for scenario in CUDA_SCENARIOS]
    assert any(hazards), f"nothing notices that {mutation}"


# Interrupted within them.


def test_interrupted_as_another_compute_stream_is_met(monkeypatch: Patch) -> None:
    """The old one is joined again, or what comes next would be ordered behind the wrong stream."""
    cuda = fake_cuda(monkeypatch)
    slots = cuda_slots()
    slots.train()
    with cuda.on(FakeStream(name="another compute stream")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(FakeStream, "wait_stream", raising(KeyboardInterrupt))
            slots.streams.record()
        slots.train(2)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_interrupted_as_a_copy_is_queued(where: str, monkeypatch: Patch) -> None:
    """The copy stream does not stay the current one."""
    cuda = fake_cuda(monkeypatch)
    slots = cuda_slots()
    slots.train()
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
        slots.manager.prefetch(2)
    assert cuda.current_stream() is not cuda.compute, "as PyTorch's own context would leave it"
    slots.streams.record()
    assert cuda.current_stream() is cuda.compute
    slots.train()
