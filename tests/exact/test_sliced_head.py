"""A prepared model whose loss is computed in slices, and whose head may lie in host memory.

That it trains as a resident model with the same loss does is said by the cells. Here: which models
have it, what others keep, what programs get that look at logits, and what notices damage.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import poros
from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.errors import ParityError, PolicyError, PreparedModelError
from poros.gates import tiny
from poros.gates.adversary import AdversarialStreams, SlotHazard
from poros.head.host_matrix import HostMatrix
from poros.head.logits import LazyLogits
from poros.head.slices import SliceReader
from tests.exact.arms import narrow_slices, slice_resident_loss
from tests.snapshots import assert_same_run, batches, build, changes, digest, picture, run

Model = Any
ON_HOST = {"loss": "chunked", "stream_head": True}


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_slices(monkeypatch)


def prepared(model: Model, **policy: Any) -> Model:
    return poros.prepare(model, **{"slots": 2, "allow_unvalidated": True, **ON_HOST, **policy})


def head_of(model: Model) -> torch.Tensor:
    weight: torch.Tensor = model.get_output_embeddings().weight
    return weight


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


FAMILIES = ["qwen2", "gemma2", "cohere", "cohere2", "granite", "mixtral", "gpt2", "bloom", "phi"]


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
    scaled = {"cohere": ["multiply"], "cohere2": ["multiply"], **capped}
    assert [step.kind for step in found.logits.steps] == scaled.get(architecture, [])
    # In bfloat16 the whole logits are rounded to three digits.
    assert abs(float(found.loss.detach()) - float(expected.loss.detach())) < 0.01
    assert torch.equal(found.logits, expected.logits)


def trained(model: Model) -> Model:
    model.get_output_embeddings().weight.requires_grad_(True)
    return model


def with_lora_on_it(model: Model) -> Model:
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(3)
    return get_peft_model(model.unload(), config)


def saved_whole(model: Model) -> Model:
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
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
        (trained, "its head is trained"),
        (with_lora_on_it, "its head is a"),
        (saved_whole, "its head is a"),
        (with_a_loss_of_its_own, "its loss is loss"),
        (with_a_forward_of_its_own, "its head's forward has been replaced"),
    ],
)
def test_what_cannot_be_sliced_stays_as_it_was_and_that_is_said(
    change: Callable[[Model], Model], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(change(build()))
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = prepared(change(build()))
    assert reason in caplog.text
    assert_same_run(expected, run(model))
    assert not isinstance(model(**batches()[0]).logits, LazyLogits)


def test_a_matrix_with_other_users_stays_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    def with_another_user(model: Model) -> Model:
        base = model.get_base_model()
        base.other = torch.nn.Linear(1, 1, bias=False)
        base.other.weight = base.lm_head.weight
        return model

    expected = run(slice_resident_loss(with_another_user(build())))
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = prepared(with_another_user(build()))
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
        model = prepared(build(), stream_embedding=True, self_check="off", **policy).train()
        with Sizes() as sizes:
            model(**batch).loss.backward()
        return sizes.most

    vocabulary, num_tokens, columns = 512, batch["input_ids"].numel(), 64
    assert most() < min(vocabulary * num_tokens, vocabulary * columns)
    assert most(loss="reference", stream_head=False) >= vocabulary * num_tokens, "control"
    assert most(loss="reference") >= vocabulary * columns, "control"


def test_the_head_travels_once_a_forward_and_is_on_the_host_once() -> None:
    model = prepared(build(), stream_embedding=False)
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


def test_tied_matrices_are_on_the_host_once() -> None:
    model = prepared(build("gemma3"), stream_embedding=True)
    runtime = poros.runtime(model)
    expected = runtime.host.num_bytes + head_of(model).nbytes
    assert runtime.stats()["host_num_bytes"] == expected
    run(model)
    stats = runtime.stats()
    assert stats["rows_num_bytes"] > 0 and stats["head_num_bytes"] > 0


# Who looks at logits.


def outputs(model: Model, **inputs: Any) -> Any:
    torch.manual_seed(5)
    return model(**{**batches()[1], **inputs})


@pytest.mark.parametrize("policy", [ON_HOST, {"loss": "chunked", "stream_head": False}], ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_a_loss_of_ones_own_on_the_logits(architecture: str, policy: dict[str, Any]) -> None:
    """Whole logits, and so the bits of a plain model."""

    def gradients(model: Model) -> dict[str, object]:
        model.train()
        logits = outputs(model, labels=None).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batches()[1]["input_ids"].flatten())
        loss.backward()
        found = {n: digest(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": digest(loss), **found}

    expected = gradients(build(architecture))
    assert len(expected) > 10
    assert changes(expected, gradients(prepared(build(architecture), **policy))) == {}


def test_large_logits_that_are_read_are_mentioned_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.head.takeover._LOUD_NUM_BYTES", 1)
    model = prepared(build())
    with caplog.at_level(logging.WARNING, logger="poros.head.takeover"):
        outputs(model).loss.backward()
        assert caplog.text == ""
        for _ in range(2):
            outputs(model).logits.sum()
    assert caplog.text.count("reads the logits") == 1


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_generate(options: dict[str, Any]) -> None:
    def generated(model: Model) -> torch.Tensor:
        torch.manual_seed(7)
        ids = batches()[0]["input_ids"][:, :6]
        return model.eval().generate(ids, max_new_tokens=5, **options)

    assert torch.equal(generated(build()), generated(prepared(build())))


def test_labels_for_some_positions_only() -> None:
    """Shifted by the caller, divided by a number of items, ignored by another number."""
    given = batches()[0]["labels"]
    shifted = F.pad(given, (0, 1), value=-100)[..., 1:].contiguous()
    for extra in (
        *({"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}),
        *({"shift_labels": shifted, "num_items_in_batch": 7}, {"ignore_index": int(given[0, 3])}),
    ):
        ours, plain = (
            float(outputs(model.eval(), labels=given, **extra).loss.detach())
            for model in (prepared(build(dtype=torch.float32)), build(dtype=torch.float32))
        )
        assert abs(ours - plain) < 1e-5 * plain, extra
    nothing = torch.full_like(given, -100)
    model = prepared(build()).train()
    loss = outputs(model, labels=nothing).loss
    loss.backward()
    assert bool(loss.isnan())
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def trainer_run(model: Model, folder: Path, **options: Any) -> dict[str, float]:
    from transformers import Trainer, TrainingArguments

    rows = [{key: value[0] for key, value in batch.items()} for batch in tiny.make_batches(4)]
    seen = dict[str, Any]()

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen["shape"] = prediction.predictions.shape
        return {"mean": float(prediction.predictions.mean())}

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **{key: value for key, value in options.items() if key != "with_metrics"},
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=compute_metrics if options.get("with_metrics") else None,
    )
    torch.manual_seed(11)
    trainer.train()
    if options.get("with_metrics"):
        assert seen["shape"] == (4, 24, 512)
    return {
        f"{number} {key}": value
        for number, line in enumerate(trainer.state.log_history)
        for key, value in line.items()
        if isinstance(value, int | float) and not key.endswith(("runtime", "per_second"))
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"with_metrics": True},
        {"label_smoothing_factor": 0.1},
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
        {"torch_compile": False, "average_tokens_across_devices": False},
    ],
    ids=str,
)
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """Losses, evaluations and metrics: those of a resident model with the same loss."""
    resident = slice_resident_loss(build())
    expected = trainer_run(resident, tmp_path / "a", **options)
    model = prepared(build())
    found = trainer_run(model, tmp_path / "b", **options)
    assert found == expected and len(found) > 8
    weights = dict(resident.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, weights[name])
    is_read = options.keys() & {"with_metrics", "label_smoothing_factor"}
    stats = poros.runtime(model).stats()
    if "label_smoothing_factor" in options:
        assert stats["head_num_bytes"] == 0, "the loss is the Trainer's, on whole logits"
    else:
        assert is_read or stats["head_num_bytes"] > 0


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
    model = prepared(build()).train()
    damage(model, monkeypatch)
    with pytest.raises(ParityError, match=r"lm_head\.weight"):
        model(**batches()[0])
    unchecked = prepared(build(), self_check="off").train()
    damage(unchecked, monkeypatch)
    monkeypatch.undo()


def no_wait_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    genuine = AdversarialStreams.wait
    buffers = SliceReader.__call__

    def call(self: SliceReader, width: int) -> Any:
        self._streams.wait = lambda event: None  # type: ignore[method-assign]
        return buffers(self, width)

    assert genuine is not None
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


def written(model: Model) -> None:
    with torch.no_grad():
        head_of(model).mul_(2)


@pytest.mark.parametrize("change", [cast, made_trainable, given_another_weight, written])
@pytest.mark.parametrize("loss", ["chunked", "reference"])
def test_a_head_in_host_memory_that_is_changed_is_refused(
    loss: str, change: Callable[[Model], None]
) -> None:
    """Before anything is computed with it; but a weight of one's own is a weight of one's own."""
    model = prepared(build(), loss=loss)
    if change is given_another_weight and loss == "reference":
        change(model)
        assert not outputs(model).logits.any()
        return
    with pytest.raises(PreparedModelError, match="weight"):
        change(model)
        model(**batches()[0]).loss.backward()


@pytest.mark.parametrize("kind", ["the head's", "of all modules"])
def test_backward_hooks_see_the_gradient_of_the_logits(kind: str) -> None:
    """So there are logits, and everything is as in a plain model."""

    def gradients(model: Model) -> list[object]:
        seen: list[torch.Tensor] = []

        def hook(module: torch.nn.Module, _: Any, outputs: Any) -> None:
            if module is model.get_output_embeddings():
                seen.append(outputs[0])

        if kind == "the head's":
            handle = model.get_output_embeddings().register_full_backward_hook(hook)
        else:
            handle = torch.nn.modules.module.register_module_full_backward_hook(hook)
        with handle:
            outputs(model.train()).loss.backward()
        assert len(seen) == 1 and seen[0].shape[-1] == 512
        return [
            digest(seen[0]),
            *(digest(p.grad) for p in model.parameters() if p.grad is not None),
        ]

    assert gradients(build()) == gradients(prepared(build()))


def test_a_resident_head_that_is_made_trainable_is_trained() -> None:
    def train(model: Model) -> Any:
        made_trainable(model)
        run(model)
        return digest(head_of(model))

    start = digest(head_of(build()))
    assert train(build()) == train(prepared(build(), stream_head=False)) != start
