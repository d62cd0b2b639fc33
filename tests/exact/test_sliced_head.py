"""A prepared model whose loss is computed in slices, and whose head may lie in host memory.

That it trains as a resident model with the same loss does is said by the cells. Here: which models
have it, what others keep, what moves, and what notices damage.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoHaConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import poros
from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.errors import ParityError, PolicyError, PreparedModelError
from poros.gates import tiny
from poros.head.host_matrix import HostMatrix
from poros.head.logits import LazyLogits
from poros.head.slices import SliceReader
from poros.model.sizing import ResidencyPlan
from tests.exact.arms import ON_HOST, narrow_slices, slice_resident_loss, with_sliced_loss
from tests.snapshots import NUM_LAYERS, assert_same_run, batches, build, changes, picture, run
from tools.adversary import AdversarialStreams, SlotHazard

Model = Any
SHAPE = {"seq_len": 16, "batch_size": 2}


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_slices(monkeypatch)


def head_of(model: Model) -> torch.Tensor:
    weight: torch.Tensor = model.get_output_embeddings().weight
    return weight


def outputs(model: Model, **inputs: Any) -> Any:
    torch.manual_seed(5)
    return model(**{**batches()[1], **inputs})


# What is taken over, and how it comes back.


@pytest.mark.parametrize("policy", [ON_HOST, {"loss": "chunked"}, {"stream_head": True}], ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_restore_gives_everything_back(architecture: str, policy: dict[str, Any]) -> None:
    """Gemma's head is its embedding's matrix; its own object, at both places, with its bytes."""
    model = build(architecture)
    before = picture(model)
    poros.prepare(model, slots=2, **policy)
    assert isinstance(head_of(model), HostMatrix) == ("stream_head" in policy)
    if architecture == "gemma3":
        assert head_of(model) is model.get_input_embeddings().weight
    saved = model.state_dict()
    poros.restore(model)
    assert changes(before, picture(model)) == {}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name


FAMILIES = ["qwen2", "gemma2", "cohere", "cohere2", "granite", "falcon_h1", "mixtral"]
FAMILIES += ["gpt2", "bloom", "phi"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_families_that_scale_or_cap_their_logits(architecture: str) -> None:
    """Not one of them has its logits computed; they are the model's own when they are looked at."""
    model, plain = build(architecture), build(architecture)
    slice_resident_loss(model)
    torch.manual_seed(5)
    found = model.train()(**batches()[1])
    torch.manual_seed(5)
    expected = plain.train()(**batches()[1])
    assert isinstance(found.logits, LazyLogits) and not found.logits.is_computed
    capped = {"gemma2": ["divide", "tanh", "multiply"], "granite": ["divide"]}
    scaled = {key: ["multiply"] for key in ("cohere", "cohere2", "falcon_h1")} | capped
    assert [step.kind for step in found.logits.steps] == scaled.get(architecture, [])
    # In bfloat16 the whole logits are rounded to three digits.
    assert abs(float(found.loss.detach()) - float(expected.loss.detach())) < 0.01
    assert torch.equal(found.logits, expected.logits)


def with_loha_on_it(model: Model) -> Model:
    config = LoHaConfig(r=4, target_modules=["lm_head"], init_weights=False)
    torch.manual_seed(3)
    return get_peft_model(model.unload(), config)


def with_a_loss_of_its_own(model: Model) -> Model:
    def loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))

    model.get_base_model().loss_function = loss
    return model


def with_a_forward_of_its_own(model: Model) -> Model:
    head = model.get_output_embeddings()
    head.forward = partial(type(head).forward, head)
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_loha_on_it, "its head is a"),
        (with_a_loss_of_its_own, "its loss is loss"),
        (with_a_forward_of_its_own, "its head's forward has been replaced"),
    ],
)
def test_what_cannot_be_sliced_stays_as_it_was_and_that_is_said(
    change: Callable[[Model], Model], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(change(build()))
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = with_sliced_loss(change(build()))
    assert reason in caplog.text
    assert_same_run(expected, run(model))
    assert not isinstance(model(**batches()[0]).logits, LazyLogits)


def test_what_was_tied_while_it_was_prepared_stays_tied() -> None:
    def tie(model: Model) -> Model:
        base = model.get_base_model()
        base.model.embed_tokens.weight = base.lm_head.weight
        return model

    model = poros.restore(tie(with_sliced_loss(build())))
    base = model.get_base_model()
    assert base.model.embed_tokens.weight is base.lm_head.weight
    assert torch.equal(outputs(model).loss, outputs(tie(build())).loss)


@pytest.mark.parametrize("fault", ["loss", "slices"])
def test_a_failed_prepare_leaves_the_head_as_it_was(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    before = picture(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("not today")

    with monkeypatch.context() as patch:
        if fault == "loss":
            patch.setattr("poros.head.takeover._Loss", fail)
        else:
            patch.setattr("poros.head.kept.SliceReader", fail)
        with pytest.raises(RuntimeError, match="not today"):
            with_sliced_loss(model)
    assert changes(before, picture(model)) == {}
    run(with_sliced_loss(model))


def test_a_matrix_with_other_users_stays_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    def with_another_user(model: Model) -> Model:
        base = model.get_base_model()
        base.other = torch.nn.Linear(1, 1, bias=False)
        base.other.weight = base.lm_head.weight
        return model

    expected = run(slice_resident_loss(with_another_user(build())))
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = with_sliced_loss(with_another_user(build()))
    assert "something else uses its weight" in caplog.text
    assert not isinstance(head_of(model), HostMatrix)
    assert_same_run(expected, run(model))


@pytest.mark.parametrize("name", ["loss", "stream_head"])
def test_policies_that_make_no_sense(name: str) -> None:
    with pytest.raises(PolicyError, match=name):
        poros.prepare(build(), **{name: "fast"})


def test_by_itself_only_a_large_head_with_a_sliced_loss_leaves_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_on_host(**policy: Any) -> bool:
        return isinstance(head_of(poros.prepare(build(), stream_head=None, **policy)), HostMatrix)

    assert not is_on_host(loss="chunked")
    monkeypatch.setattr("poros.head.embedding.LEAST_NUM_BYTES", 1)
    assert is_on_host(loss="chunked") and not is_on_host(loss="reference")


# What moves, and what is there.


class Sizes(TorchDispatchMode):
    """The largest tensors that operators make, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func is not torch.ops.aten.detach.default:
            self.most = max(self.most, result.numel())
        return result


def test_no_tensor_of_the_vocabulary_is_made_in_a_step() -> None:
    """Neither tokens x vocabulary nor vocabulary x hidden states."""
    batch = tiny.make_batches(1, num_tokens=20)[0]

    def most(**policy: Any) -> int:
        model = with_sliced_loss(build(), stream_embedding=True, self_check="off", **policy).train()
        with Sizes() as sizes:
            model(**batch).loss.backward()
        return sizes.most

    vocabulary, num_tokens, columns = 512, batch["input_ids"].numel(), 64
    assert most() < min(vocabulary * num_tokens, vocabulary * columns)
    assert most(loss="reference", stream_head=False) >= vocabulary * num_tokens, "control"
    assert most(loss="reference") >= vocabulary * columns, "control"


def test_the_head_travels_once_a_forward_and_is_on_the_host_once() -> None:
    model = with_sliced_loss(build(), stream_embedding=False)
    runtime, matrix = poros.runtime(model), head_of(model)
    before = runtime.stats()
    assert before["host_num_bytes"] == runtime.host.num_bytes + matrix.nbytes
    assert before["head_num_bytes"] == 0
    run(model)
    assert runtime.stats()["head_num_bytes"] == 2 * matrix.nbytes
    # Two buffers of 96 rows.
    resident = poros.prepare(build(), slots=2, loss="chunked")
    buffers = before["device_num_bytes"] - poros.runtime(resident).stats()["device_num_bytes"]
    assert buffers == 2 * 96 * matrix.shape[1] * matrix.element_size()


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_the_head_has_a_place_once_every_block_has_one(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied once, sliced as before; and it leaves with the slots."""
    monkeypatch.setattr("poros.head.embedding.LEAST_NUM_BYTES", 1)
    expected = run(with_sliced_loss(build(architecture)))
    policy = {**ON_HOST, "stream_head": None}
    model = with_sliced_loss(build(architecture), **policy, slots=NUM_LAYERS)
    runtime, matrix = poros.runtime(model), head_of(model)
    plan = poros.plan(model, **SHAPE, **policy, num_slots=NUM_LAYERS)
    assert_same_run(expected, run(model))
    assert runtime.head.slices is not None and runtime.head.slices.holds_all
    assert runtime.stats()["head_num_bytes"] == matrix.nbytes
    assert plan.terms["head"] == matrix.nbytes + 2 * 96 * matrix[0].nbytes
    whole = runtime.stats()["device_num_bytes"]
    runtime.resize(ResidencyPlan(2, 0))
    assert not runtime.head.slices.holds_all
    assert runtime.stats()["device_num_bytes"] <= whole - matrix.nbytes
    runtime.resize(ResidencyPlan(NUM_LAYERS, 0))
    assert runtime.stats()["device_num_bytes"] == whole
    # One that was asked for stays in host memory.
    asked = poros.runtime(with_sliced_loss(build(architecture), slots=NUM_LAYERS))
    assert asked.head.slices is not None and not asked.head.slices.holds_all


def test_no_room_for_the_head_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros.head.embedding.LEAST_NUM_BYTES", 1)
    model = with_sliced_loss(build(), **{**ON_HOST, "stream_head": None})
    runtime = poros.runtime(model)
    before = runtime.stats()["device_num_bytes"]

    def full(_: SliceReader) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(SliceReader, "load", full)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            runtime.resize(ResidencyPlan(NUM_LAYERS, 0))
    assert runtime.room == ResidencyPlan(2, 0) and runtime.stats()["device_num_bytes"] == before
    assert_same_run(run(with_sliced_loss(build())), run(model))


def test_tied_matrices_are_on_the_host_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = with_sliced_loss(build("gemma3"), stream_embedding=True)
    assert "embedding" not in caplog.text, "nothing was asked for in vain"
    runtime = poros.runtime(model)
    expected = runtime.host.num_bytes + head_of(model).nbytes
    assert runtime.stats()["host_num_bytes"] == expected
    run(model)
    stats = runtime.stats()
    assert stats["rows_num_bytes"] > 0 and stats["head_num_bytes"] > 0


# What notices damage.


def flipped_byte(model: Model, patch: pytest.MonkeyPatch) -> None:
    head_of(model).host.view(torch.uint8)[-1, 3] ^= 1  # type: ignore[attr-defined]


def swapped_slices(model: Model, patch: pytest.MonkeyPatch) -> None:
    genuine = SliceReader._bring

    def bring(self: SliceReader, first: int, width: int, released: Any) -> Any:
        _, event = genuine(self, first, width, released)
        other, _ = genuine(self, 96 if first == 192 else first, width, released)
        return other, event

    patch.setattr(SliceReader, "_bring", bring)


def late_slice(model: Model, patch: pytest.MonkeyPatch) -> None:
    genuine = SliceReader._bring

    def bring(self: SliceReader, first: int, width: int, released: Any) -> Any:
        rows, event = genuine(self, first, width, released)
        if first == 96:
            rows.view(torch.uint8).fill_(0xFF)  # what was there before
        return rows, event

    patch.setattr(SliceReader, "_bring", bring)


@pytest.mark.parametrize("damage", [flipped_byte, swapped_slices, late_slice])
def test_the_first_step_notices(
    damage: Callable[[Model, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_sliced_loss(build()).train()
    damage(model, monkeypatch)
    with pytest.raises(ParityError, match=r"lm_head\.weight"):
        model(**batches()[0])
    monkeypatch.undo()
    narrow_slices(monkeypatch)
    expected = outputs(with_sliced_loss(build(), self_check="off").train()).loss
    unchecked = with_sliced_loss(build(), self_check="off").train()
    damage(unchecked, monkeypatch)
    assert not torch.equal(outputs(unchecked).loss, expected), "control: it would have trained on"


def no_wait_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    genuine = SliceReader.__call__

    def call(self: SliceReader, width: int) -> Any:
        self._streams.wait = lambda event: None  # type: ignore[method-assign]
        return genuine(self, width)

    patch.setattr(SliceReader, "__call__", call)


def copies_that_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    genuine = SliceReader._bring

    def bring(self: SliceReader, first: int, width: int, released: Any) -> Any:
        start = getattr(self, "start", None) or self._streams.record()
        self.start = start  # type: ignore[attr-defined]
        return genuine(self, first, width, [start] * len(released))

    patch.setattr(SliceReader, "_bring", bring)


@pytest.mark.parametrize("fault", [None, no_wait_for_the_copy, copies_that_wait_for_nothing])
def test_a_missing_wait_is_a_hazard(
    fault: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is not None:
        fault(monkeypatch)
    streams = AdversarialStreams()
    policy = StreamingPolicy(slots=2, device="cpu", self_check="off", **ON_HOST)
    with streams.watch():
        model = prepare_with(build(), policy, streams=streams)
        if fault is None:
            run(model)
        else:
            with pytest.raises(SlotHazard):
                run(model)


def cast(model: Model) -> None:
    model.get_output_embeddings().float()


def made_trainable(model: Model) -> None:
    head_of(model).requires_grad_(True)


def given_another_weight(model: Model) -> None:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.zeros(head.weight.shape, dtype=torch.bfloat16))


def given_other_data(model: Model) -> None:
    head_of(model).data = torch.ones(512, 64, dtype=torch.bfloat16)


def swapped(model: Model) -> None:
    other = torch.nn.Parameter(torch.ones(512, 64, dtype=torch.bfloat16), requires_grad=False)
    torch.utils.swap_tensors(head_of(model), other)


def written_in_a_row(model: Model) -> None:
    with torch.no_grad():
        head_of(model)[3] = 1.0


def written(model: Model) -> None:
    with torch.no_grad():
        head_of(model).mul_(2)


CHANGES = [cast, made_trainable, given_other_data, written, written_in_a_row]


@pytest.mark.parametrize("change", [*CHANGES, given_another_weight, swapped])
@pytest.mark.parametrize("loss", ["chunked", "reference"])
def test_a_head_in_host_memory_that_is_changed_is_refused(
    loss: str, change: Callable[[Model], None]
) -> None:
    """Before anything is computed with it; but a weight of one's own is a weight of one's own."""
    model = with_sliced_loss(build(), loss=loss)
    if change in (given_another_weight, swapped) and loss == "reference":
        own = build()
        change(model)
        change(own)
        assert torch.equal(outputs(model).logits, outputs(own).logits)
        return
    with pytest.raises(PreparedModelError, match="weight"):
        change(model)
        model(**batches()[0]).loss.backward()
