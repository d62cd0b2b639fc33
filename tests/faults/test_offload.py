"""Inputs of layers that wait on the host: two on the device at a time.

That no bit changes is in ``tests/exact/test_cells``.
"""

import gc
from typing import Any

import pytest
import torch

import poros
from poros.api import prepare_with
from poros.errors import HostMemoryError, RematerializationError
from poros.gates import tiny
from poros.gates.reference import TrainingSpec, Trajectory, train
from poros.host import limits
from poros.host.layout import BlockLayout
from poros.host.store import HostSlab
from poros.stream.boundary import streamed_layer
from poros.stream.offload import ActivationOffloader, OffloadedInput
from tests.comparing import compare_trajectories
from tests.planning.cells import OperatorBytes
from tests.snapshots import layers_of
from tests.support import AdversarialPrepare, make_model, prepare_plain
from tools.adversary import AdversarialStreams, SlotHazard

NUM_LAYERS = 5
SPEC = TrainingSpec(num_steps=2, accumulation=2)
BATCHES = tiny.make_batches(4, num_tokens=12)


def build(architecture: str = "qwen2", **options: Any) -> Any:
    wanted = {"num_layers": NUM_LAYERS, "hidden_size": 64, "dropout": 0.05, **options}
    return make_model(architecture, **wanted)


@pytest.fixture(scope="module")
def resident() -> Trajectory:
    return train(build(), BATCHES, SPEC)


def hostile(model: Any, **overrides: Any) -> Any:
    """Adversarial streams with the self-check on."""
    policy = poros.StreamingPolicy(offload_boundaries=True, loss="reference").override(**overrides)
    return prepare_with(model, policy, streams=AdversarialStreams())


def test_two_inputs_are_on_the_device_at_a_time() -> None:
    sizes = []
    batch = tiny.make_batches(1, num_tokens=64, padded=False)[0]
    for is_offloaded in (False, True):
        model = prepare_plain(
            build(num_layers=8), device="cpu", offload_boundaries=is_offloaded, self_check="off"
        ).train()
        model(**batch).loss.backward()
        with OperatorBytes() as live:
            loss = model(**batch, use_cache=False).loss
            sizes.append(live.now)
        del loss, model
    one = 2 * 64 * 64 * 2
    assert sizes[0] - sizes[1] == pytest.approx((8 - 2) * one, abs=one / 2)


def test_host_buffers_are_used_again() -> None:
    model = hostile(build(), self_check="off").train()
    runtime = poros.runtime(model)
    sizes = []
    longer = tiny.make_batches(1, num_tokens=40, padded=False)[0]
    for batch in (BATCHES[0], BATCHES[0], longer, BATCHES[0]):
        model(**batch).loss.backward()
        sizes.append(runtime.offloader.num_bytes)
        assert runtime.stats()["offloaded_num_bytes"] == sizes[-1]
    assert sizes[0] == sizes[1] > 0 and sizes[2] == sizes[3]
    assert sizes[2] == pytest.approx(sizes[0] * 40 / 12, rel=0.01)


def test_a_graph_that_is_dropped_gives_everything_back(resident: Trajectory) -> None:
    model = hostile(build(), self_check="off").train()
    offloader = poros.runtime(model).offloader
    loss = model(**BATCHES[0]).loss
    most = offloader.num_bytes
    del loss
    loss = model(**BATCHES[1]).loss

    def fail(*_: object) -> None:
        raise ValueError("interrupted")

    handle = layers_of(model)[2].mlp.register_full_backward_hook(fail)
    with pytest.raises((ValueError, RematerializationError)):
        loss.backward()
    handle.remove()
    del loss
    gc.collect()
    model.zero_grad()
    assert compare_trajectories(resident, train(model, BATCHES, SPEC)) == []
    assert offloader.num_bytes == most > 0


def test_two_backwards_through_one_graph() -> None:
    gradients = []
    for is_offloaded in (False, True):
        model = build().train()
        prepare_plain(model, device="cpu", offload_boundaries=is_offloaded)
        torch.manual_seed(0)
        loss = model(**BATCHES[0]).loss
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0] and all(map(torch.equal, *gradients))


def test_control_another_inputs_buffer_is_seen(
    resident: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActivationOffloader, "_take", lambda self, tensor: buffer)
    buffer = HostSlab(BlockLayout((), 1 << 20))
    model = AdversarialPrepare()(build(), offload_boundaries=True)
    assert compare_trajectories(resident, train(model, BATCHES, SPEC))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_control_memory_given_back_under_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedInput, "__del__", lambda self: None)
    streams = AdversarialStreams()
    offloader = ActivationOffloader(streams)
    offloaded = [offloader.offload(torch.ones(4, 4), f"layer {index}", index) for index in range(5)]
    offloaded[4].fetch()
    offloaded[3].fetch()
    del offloaded  # the input of layer 2 is on its way
    with pytest.raises(SlotHazard, match="given back"):
        offloader.offload(torch.ones(4, 4), "layer 0", 0)


def test_a_dropped_input_is_waited_for() -> None:
    offloader, sizes = ActivationOffloader(AdversarialStreams()), []
    for _ in range(2):
        offloaded = [
            offloader.offload(torch.ones(4, 4), f"layer {index}", index) for index in range(5)
        ]
        sizes.append(offloader.num_bytes)
        offloaded[4].fetch()
        offloaded[3].fetch()
        del offloaded
    assert sizes[0] == sizes[1] > 0


def test_each_input_comes_back_ahead_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = ActivationOffloader(AdversarialStreams())
    inputs = [torch.full((3, 4), float(index)) for index in range(6)]
    offloaded = [
        offloader.offload(each, f"layer {index}", index) for index, each in enumerate(inputs)
    ]
    assert [each._tensor is not None for each in offloaded] == [False] * 4 + [True] * 2
    for index in reversed(range(6)):
        assert torch.equal(offloaded[index].fetch(), torch.full((3, 4), float(index)))
        on_device = [number for number, each in enumerate(offloaded) if each._tensor is not None]
        assert on_device == ([index - 1] if index else [])


def test_what_cannot_be_parked_stays() -> None:
    model = hostile(build(), self_check="off").train()
    layer = layers_of(model)[1]
    runtime = streamed_layer(layer)
    assert runtime.offload(torch.ones(4, 6).t()) is None
    assert runtime.offload(torch.ones(4, dtype=torch.long)) is None
    assert runtime.offload(torch.nn.Parameter(torch.ones(4))) is None


def test_an_edited_input_is_refused_again_and_again() -> None:
    """The edit and the copy to the host are not ordered: what came back may hold either."""
    model = hostile(build(), self_check="off").train()
    inputs: list[torch.Tensor] = []
    handle = layers_of(model)[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    edited = model(**BATCHES[0]).loss
    handle.remove()
    with torch.no_grad():
        inputs[0].add_(1)
    other = model(**BATCHES[1]).loss  # not to blame
    for _ in range(2):
        with pytest.raises(RematerializationError, match=r"layers\.4: its input was edited"):
            edited.backward(retain_graph=True)
    other.backward()


def test_host_memory_goes_with_the_backward_not_with_the_loss() -> None:
    model = hostile(build(), self_check="off").train()
    losses, sizes = [], set()
    for _ in range(4):
        losses.append(model(**BATCHES[0]).loss)
        losses[-1].backward()
        sizes.add(poros.runtime(model).offloader.num_bytes)
    assert len(sizes) == 1


def test_a_dropped_graph_waits_on_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector drops it wherever it is, with any stream current: the allocator has to know."""
    streams = AdversarialStreams()
    offloader = ActivationOffloader(streams)
    offloaded = [offloader.offload(torch.ones(4, 4), "layer", index) for index in range(3)]
    own = offloader._streams
    abandoned: list[tuple[int, ...]] = []

    def refuse(event: object) -> None:
        raise AssertionError("waited")

    monkeypatch.setattr(own, "wait", refuse)
    monkeypatch.setattr(own, "abandon", lambda memory, event: abandoned.append(memory.shape))
    del offloaded
    gc.collect()
    assert abandoned == [(4, 4)] * 2


def test_an_input_given_twice_passes_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    layer = layers_of(model)[1]
    forward = type(layer).forward

    def twice(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("again", None)
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(layer), "forward", twice)
    model = hostile(model).train()

    def add(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "again": args[0]}

    for each in layers_of(model):
        each.register_forward_pre_hook(add, with_kwargs=True)
    model(**BATCHES[0]).loss.backward()
    assert poros.runtime(model).self_check["status"] == "passed"


def test_too_little_host_memory_is_said_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hostile(build(), self_check="off").train()
    limit = limits.MemoryLimit(1 << 20, "a limit")
    monkeypatch.setattr(limits, "host_memory_left", lambda root: limit)
    with pytest.raises(HostMemoryError, match="inputs of layers"):
        model(**BATCHES[0])
    monkeypatch.undo()
    model(**BATCHES[0]).loss.backward()
