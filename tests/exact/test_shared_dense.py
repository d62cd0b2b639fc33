"""Micro-batches that share the dense weights of a layer: the bits of those that do not."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.api import prepare_with
from poros.kernels import dense_layer, dequantize
from poros.kernels.dense_layer import DenseLayer
from poros.stream.body import LayerBody
from tests.exact import together
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases, on_tapes
from tests.exact.together import num_groups, reasons, same
from tests.support import AS_PLAIN, AdversarialPrepare, prepare_plain
from tools.adversary import AdversarialStreams
from tools.tape import TapeRecorder

Model = Any
Patch = pytest.MonkeyPatch
NUM_LAYERS = 4
SIZES = (2,) * 6
"""So that visits are replayed."""
train = partial(together.train, sizes=SIZES[:3])


def build(bases: Bases, **options: Any) -> Model:
    return bases.build("qwen2", num_layers=NUM_LAYERS, **options).train()


@pytest.fixture(scope="module")
def expected(bases: Bases) -> list[torch.Tensor]:
    return train(build(bases), together=False)


class Counted:
    """How often weights were made dense, by whom."""

    def __init__(self, patch: Patch) -> None:
        self.num_single = self.num_shared = 0
        genuine = dequantize.dequantize_ref

        def single(*args: Any) -> torch.Tensor:
            self.num_single += 1
            return genuine(*args)

        def shared(packed: torch.Tensor, state: Any, weight: torch.Tensor) -> None:
            self.num_shared += 1
            weight.copy_(genuine(packed, state, weight.dtype))

        patch.setattr(dequantize, "dequantize_ref", single)
        patch.setattr(dense_layer, "dequantize_into", shared)


def test_each_weight_is_made_dense_once_a_group_and_pass(
    bases: Bases, expected: list[torch.Tensor], monkeypatch: Patch
) -> None:
    counted = Counted(monkeypatch)
    model = prepare_plain(build(bases), slots=2, share_dense=True, self_check="off")
    assert same(train(model), expected)
    assert num_groups(model) == 3 and reasons(model) == []
    # Seven matrices, forward and backward; the last layer's are still there at the turn.
    assert counted.num_shared == 3 * 7 * (2 * NUM_LAYERS - 1)
    # On a CPU the forward is bitsandbytes' own: what asks is the gradient of the input.
    assert counted.num_single == 0
    runtime = poros.runtime(model)
    largest = 2 * sum(p.numel() for p in projections(model, 0))
    assert runtime.device_num_bytes - without_sharing(bases) == largest


def projections(model: Model, layer: int) -> list[torch.Tensor]:
    found = model.get_base_model().model.layers[layer].modules()
    weights = (getattr(module, "weight", None) for module in found)
    states = [each.quant_state for each in weights if hasattr(each, "quant_state")]
    unique = {id(state): torch.empty(state.shape, device="meta") for state in states}
    return list(unique.values())


def without_sharing(bases: Bases) -> int:
    model = prepare_plain(build(bases), slots=2, self_check="off")
    train(model, sizes=(2,))
    found: int = poros.runtime(model).device_num_bytes
    return found


def test_without_it_each_micro_batch_makes_them(bases: Bases, monkeypatch: Patch) -> None:
    counted = Counted(monkeypatch)
    train(on_tapes(build(bases), slots=2), sizes=SIZES)
    assert counted.num_shared == 0
    # In what is recorded at least, whose gradient is ours on a CPU too.
    assert counted.num_single >= SIZES[0] * NUM_LAYERS


@pytest.mark.parametrize("use_dora", [False, True])
def test_adversarial_streams_and_dora(use_dora: bool, bases: Bases) -> None:
    options: Any = {"use_dora": use_dora, "lora_dropout": 0.05}
    policy: Any = {"adapter_kernels": "fused", "slots": 2}
    prepare = AdversarialPrepare()
    found = train(prepare(adapted(bases, **options), share_dense=True, **policy))
    assert same(found, train(prepare_plain(adapted(bases, **options), **policy), together=False))


@pytest.mark.parametrize("keep_last", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_recorded_visits(keep_last: int, bases: Bases) -> None:
    """Some micro-batches of a form share, and a single one of the same form does not."""
    run: Any = {"sizes": (2, 1, 2, 1, 2, 1, 2, 2, 1), "lengths": (12,)}
    expected = train(build(bases), together=False, **run)
    model = build(bases)
    policy = poros.StreamingPolicy(
        **AS_PLAIN, slots=4, keep_last=keep_last, device="cpu", share_dense=True
    )
    prepare_with(model, policy, recorder=TapeRecorder())
    assert same(train(model, **run), expected) and num_groups(model) == 5
    captures: Any = poros.runtime(model).context.captures
    kinds = {
        form.dense_address is not None
        for forms in captures._forms.values()
        for form in forms.values()
        if any(each is not None and each.is_proved for each in form.backwards.values())
    }
    # Of a layer that keeps its graph one form is recorded at a time.
    assert kinds == ({True, False} if keep_last == 0 else {True})


def test_a_smaller_budget_goes_without(bases: Bases, expected: list[torch.Tensor]) -> None:
    model = prepare_plain(build(bases), slots=2, share_dense=True)
    runtime = poros.runtime(model)
    train(model, sizes=(2, 2))
    before = runtime.device_num_bytes
    runtime.sizer.shares_dense = False
    train(model, sizes=(2,))
    assert runtime.device_num_bytes < before
    again = prepare_plain(build(bases), slots=2, share_dense=True)
    poros.runtime(again).sizer.shares_dense = False
    assert same(train(again), expected)


def test_no_memory_for_it(bases: Bases, expected: list[torch.Tensor], monkeypatch: Patch) -> None:
    def out_of_memory(self: DenseLayer) -> None:
        raise torch.OutOfMemoryError("none")

    monkeypatch.setattr(DenseLayer, "allocate", out_of_memory)
    model = prepare_plain(build(bases), slots=2, share_dense=True)
    assert same(train(model), expected) and num_groups(model) == 3


# ------------------------------------------------------------------------------------ faults


def never_filled_again(patch: Patch) -> None:
    """Another layer's weights are taken for this one's."""
    genuine = DenseLayer.fill

    def fill(self: DenseLayer, layer: int, weights: Any) -> None:
        if self._filled is not None:
            self._reader = layer
        else:
            genuine(self, layer, weights)

    patch.setattr(DenseLayer, "fill", fill)


def before_the_block_is_there(patch: Patch) -> None:
    """The weights are made dense ahead of the visit, from what its slot held before."""

    def sharing(self: LayerBody) -> Any:
        dense = self.context.dense
        if dense is None:
            return nullcontext()
        found = dense.serving(self.index)
        dense.served = self.index
        dense.fill(self.index, self.weights.bindings.dense_weights)
        return found

    patch.setattr(LayerBody, "sharing_dense", sharing)


@pytest.mark.parametrize("fault", [never_filled_again, before_the_block_is_there])
def test_a_fault_shows(fault: Any, bases: Bases, monkeypatch: Patch) -> None:
    """Where a recomputation makes a graph: on a CPU that of a forward is bitsandbytes' own."""
    expected = train(build(bases), together=False, sizes=SIZES)
    fault(monkeypatch)
    policy = poros.StreamingPolicy(
        **AS_PLAIN, slots=2, device="cpu", share_dense=True, self_check="off"
    )
    model, streams = build(bases), AdversarialStreams()
    prepare_with(model, policy, streams=streams, recorder=TapeRecorder())
    assert not same(train(model, sizes=SIZES), expected)
