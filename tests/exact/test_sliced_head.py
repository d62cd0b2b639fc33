"""A prepared model whose loss is computed in slices, and whose head may lie in host memory.

Here: which models have it, what others keep, programs that look at the logits or do not, what
moves, and what notices damage.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer

import poros
from poros.errors import ParityError, PreparedModelError
from poros.gates import tiny
from poros.head.host_matrix import HostMatrix
from poros.head.logits import LazyLogits
from poros.head.slices import SliceReader
from poros.model.sizing import ResidencyPlan
from tests.comparing import assert_same_run, compare_trajectories, digest
from tests.exact.programs import forward_replaced, turned_around
from tests.loops import (
    NUM_LAYERS,
    ON_HOST,
    adapted,
    batches,
    build,
    run,
    slice_resident_loss,
    streamed,
)
from tests.operators import Operators
from tests.replaced import Patch, in_place_of, raising
from tests.trainers import Arms, logged

Model = Any
Change = Callable[[Model], Model]
pytestmark = pytest.mark.usefixtures("narrow")

# Heads and embeddings of small models, changed as PEFT and users change them.


def head_of(model: Model) -> torch.Tensor:
    return model.get_output_embeddings().weight


def outputs(model: Model, **inputs: Any) -> Any:
    torch.manual_seed(5)
    return model(**{**batches()[1], **inputs})


def peft_model(model: Model, config: Any) -> Model:
    """The base of ``model`` with these adapters instead."""
    torch.manual_seed(3)
    return get_peft_model(model.unload(), config).train()


def with_lora(model: Model, **options: Any) -> Model:
    """On the head, unless ``options`` say otherwise."""
    usual = {"r": 4, "target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.05}
    return peft_model(model, LoraConfig(**{**usual, "init_lora_weights": False, **options}))


def with_a_second_that_saves_the_head(model: Model) -> Model:
    """A second adapter, which trains alone."""
    torch.manual_seed(4)
    saved = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    model.add_adapter("two", LoraConfig(r=4, init_lora_weights=False, **saved))
    model.set_adapter("two")
    return model


def saved_whole(model: Model, name: str = "lm_head") -> Model:
    return peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[name]))


def trained(model: Model) -> Model:
    head_of(model).requires_grad_(True)
    return model


def with_a_loss_of_its_own(model: Model) -> Model:
    def loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))

    model.get_base_model().loss_function = loss
    return model


def with_a_forward_of_its_own(model: Model) -> Model:
    head = model.get_output_embeddings()
    head.forward = partial(type(head).forward, head)
    return model


def with_another_user(model: Model) -> Model:
    base = model.get_base_model()
    base.other = torch.nn.Linear(1, 1, bias=False)
    base.other.weight = base.lm_head.weight
    return model


def tied(model: Model) -> Model:
    base = model.get_base_model()
    base.model.embed_tokens.weight = base.lm_head.weight
    return model


def trained_embedding(model: Model) -> Model:
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def few(**options: Any) -> Model:
    """A model with two adapters a layer: they have no bearing on the head."""
    given = {"num_layers": NUM_LAYERS, "target_modules": ["q_proj", "down_proj"], **options}
    return adapted(lora_dropout=0.05, **given).eval()


with_sliced_loss: Callable[..., Model] = partial(streamed, slots=2, **ON_HOST)
"""Prepared, with its head in host memory."""


# What is taken over; how it comes back: ``tests/faults/test_restore``.

FAMILIES = ["qwen2", "gemma2", "cohere", "granite", "falcon_h1", "mixtral", "gpt2", "phi"]


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
    scaled = {key: ["multiply"] for key in ("cohere", "falcon_h1")} | capped
    assert [step.kind for step in found.logits.steps] == scaled.get(architecture, [])
    # In bfloat16 the whole logits are rounded to three digits.
    assert abs(float(found.loss.detach()) - float(expected.loss.detach())) < 0.01
    assert torch.equal(found.logits, expected.logits)


class Head(NamedTuple):
    """A head or an embedding, and what becomes of it in a prepared model."""

    change: Change
    said: str = ""
    """Why it stays as it is, on the device or with its own loss."""
    is_sliced: bool = True
    """Whether its loss is; it is then compared with a resident run with the same loss."""
    own: int = 0
    """Tensors of the head that are trained."""
    policy: dict[str, Any] = {}  # noqa: RUF012


EMBEDDING = {"loss": "reference", "stream_head": False, "stream_embedding": True}
embedding = partial(
    Head, said="the embedding stays on the device", is_sliced=False, policy=EMBEDDING
)
HEADS = {
    # Of a head that is adapted or trained the logits are computed whole.
    "LoRA": Head(with_lora, "its head is a", False, 2),
    "DoRA": Head(partial(with_lora, use_dora=True), "its head is a", False, 3),
    "trained": Head(trained, "its head is trained", False, 1),
    "saved whole": Head(saved_whole, "its head is a ModulesToSaveWrapper", False, 1),
    "another user": Head(
        with_another_user, "the head stays on the device: something else uses its weight"
    ),
    "a loss of its own": Head(with_a_loss_of_its_own, "its loss is loss", False),
    "another forward": Head(
        with_a_forward_of_its_own, "its head's forward has been replaced", False
    ),
    "a trained embedding": embedding(trained_embedding),
    "a tied embedding": embedding(tied),
    "LoRA on the embedding": embedding(
        partial(with_lora, target_modules=["q_proj", "embed_tokens"])
    ),
    "an embedding saved whole": embedding(partial(saved_whole, name="embed_tokens")),
}


@pytest.mark.parametrize("which", HEADS)
def test_it_trains_as_a_resident_one(which: str, caplog: pytest.LogCaptureFixture) -> None:
    """And if it stays as it was, that is said."""
    change, said, is_sliced, own, policy = HEADS[which]
    resident = change(few())
    expected = run(slice_resident_loss(resident) if is_sliced else resident)
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = with_sliced_loss(change(few()), **policy)
    assert said in caplog.text and not (is_sliced and "keeps its own" in caplog.text)
    assert_same_run(expected, run(model))
    found = {n: g for n, g in expected.steps[0].gradients.items() if "lm_head" in n}
    assert len(found) == own and all(bool(each.any()) for each in found.values())
    if is_sliced or said:
        assert isinstance(model(**batches()[0]).logits, LazyLogits) == is_sliced
    if "stays on the device" in said:
        assert not any(isinstance(each, HostMatrix) for each in model.parameters())


LATER: dict[str, Change] = {
    # PEFT copies the head, and all that is in it; the copy is the one that is read.
    "a trained copy": with_a_second_that_saves_the_head,
    "it is made trainable": trained,
}


@pytest.mark.parametrize("which", LATER)
def test_what_comes_to_a_resident_head_later_is_trained(which: str) -> None:
    expected = run(LATER[which](slice_resident_loss(few())))
    found = run(LATER[which](with_sliced_loss(few(), stream_head=False)))
    assert_same_run(expected, found)
    assert any("lm_head" in name and g.any() for name, g in found.steps[0].gradients.items())


def test_what_was_tied_while_it_was_prepared_stays_tied() -> None:
    model = poros.restore(tied(with_sliced_loss(few())))
    base = model.get_base_model()
    assert base.model.embed_tokens.weight is base.lm_head.weight
    assert torch.equal(outputs(model).loss, outputs(tied(few())).loss)


def test_by_itself_only_a_large_matrix_leaves_the_device(monkeypatch: Patch) -> None:
    """A head only if its loss is sliced."""

    def on_host(**policy: Any) -> tuple[bool, bool]:
        given = {"stream_head": None, **policy}
        model = poros.prepare(few(), **given)
        weights = head_of(model), model.get_input_embeddings().weight
        return isinstance(weights[0], HostMatrix), isinstance(weights[1], HostMatrix)

    assert on_host(loss="chunked") == (False, False)
    monkeypatch.setattr("poros.head.choice.LEAST_NUM_BYTES", head_of(few()).nbytes)
    assert on_host(loss="chunked") == (True, True)
    assert on_host(loss="reference", stream_embedding=False) == (False, False)
    monkeypatch.setattr("poros.head.choice.LEAST_NUM_BYTES", head_of(few()).nbytes + 1)
    assert on_host(loss="chunked") == (False, False)


# What looks at the logits.


def test_large_logits_that_are_read_are_mentioned_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("poros.head.takeover._LOUD_NUM_BYTES", 1)
    model = with_sliced_loss(few())
    with caplog.at_level(logging.WARNING, logger="poros.head.takeover"):
        outputs(model).loss.backward()
        assert caplog.text == ""
        for _ in range(2):
            outputs(model).logits.sum()
    assert caplog.text.count("reads the logits") == 1


@pytest.mark.parametrize("options", [{"loss": "chunked"}, ON_HOST], ids=["resident", "on the host"])
def test_a_forward_that_its_class_gets_later_runs(options: dict[str, Any]) -> None:
    model = streamed(build(), **options)
    assert isinstance(outputs(model).logits, LazyLogits)
    with forward_replaced(nn.Linear, turned_around(nn.Linear)):
        found, expected = outputs(model).logits, outputs(build()).logits
    assert torch.equal(found, expected)


def test_labels_for_some_positions_only() -> None:
    """Shifted by the caller, divided by a number of items, ignored by another number."""
    given = batches()[0]["labels"]
    shifted = F.pad(given, (0, 1), value=-100)[..., 1:].contiguous()
    models = [few(dtype=torch.float32).eval() for _ in range(2)]
    with_sliced_loss(models[0])
    for extra in (
        *({"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}),
        *({"shift_labels": shifted, "num_items_in_batch": 7}, {"ignore_index": int(given[0, 3])}),
    ):
        ours, plain = (
            float(outputs(model, labels=given, **extra).loss.detach()) for model in models
        )
        assert abs(ours - plain) < 1e-5 * plain, extra
    nothing = torch.full_like(given, -100)
    model = with_sliced_loss(few()).train()
    loss = outputs(model, labels=nothing).loss
    loss.backward()
    assert bool(loss.isnan())
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


WATCHES: dict[str, Any] = {
    "hook": lambda output: output.logits.register_hook(lambda gradient: gradient * 0),
    "retain_grad": lambda output: output.logits.retain_grad(),
    "hook on a follower": lambda output: output.logits.float().register_hook(print),
    "grad": lambda output: torch.autograd.grad(output.loss, output.logits, allow_unused=True),
    "grad by keyword": lambda output: torch.autograd.grad(output.loss, inputs=[output.logits]),
}


@pytest.mark.parametrize("name", WATCHES)
def test_the_gradient_of_logits_that_the_loss_goes_around_is_refused(name: str) -> None:
    model = with_sliced_loss(few()).train()
    with pytest.raises(PreparedModelError, match="expected no use of their gradient"):
        WATCHES[name](outputs(model))
    WATCHES["hook"](outputs(model, labels=None))  # no loss was taken of these


class WithMetrics(Trainer):  # type: ignore[misc]
    """Reads the logits of evaluations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, compute_metrics=self.metrics)

    def metrics(self, prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (4, 20, 512)
        return {"mean": float(prediction.predictions.mean())}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Trainer, {"torch_compile": False, "average_tokens_across_devices": False}),
        (WithMetrics, {"bf16": True}),
        (Trainer, {"label_smoothing_factor": 0.1}),
    ],
    ids=str,
)
def test_trainer(kind: type[Trainer], options: dict[str, Any], tmp_path: Path) -> None:
    """Losses, evaluations and metrics: those of a resident model with the same loss."""
    arms = Arms(tmp_path, torch.bfloat16)
    given = {"trainer_class": kind, "max_steps": 2, "eval_steps": 1, **options}
    given |= {"save_strategy": "steps", "save_steps": 2}
    prepares = (lambda model, **_: slice_resident_loss(model)), with_sliced_loss
    runs = [arms.run(name, prepare, **given) for name, prepare in zip("ab", prepares, strict=True)]
    assert compare_trajectories(*runs) == []
    assert any("eval_mean" in name for name in logged(runs[0])) == (kind is WithMetrics)
    is_whole = "label_smoothing_factor" in options
    stats = poros.runtime(arms.model).stats()
    assert (stats["head_num_bytes"] == 0) == is_whole, "the loss is the Trainer's, on whole logits"


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

    assert gradients(few()) == gradients(with_sliced_loss(few()))


# What moves, and what is there.


def test_no_tensor_of_the_vocabulary_is_made_in_a_step() -> None:
    """Neither tokens x vocabulary nor vocabulary x hidden states."""
    batch = tiny.make_batches(1, num_tokens=20)[0]

    def most(**policy: Any) -> int:
        model = with_sliced_loss(few(), stream_embedding=True, self_check="off", **policy).train()
        sizes: list[int] = []

        def note(operator: Any, given: Any, made: Any) -> None:
            if isinstance(made, torch.Tensor) and operator is not torch.ops.aten.detach.default:
                sizes.append(made.numel())

        with Operators(note):
            model(**batch).loss.backward()
        return max(sizes)

    vocabulary, num_tokens, columns = 512, batch["input_ids"].numel(), 64
    assert most() < min(vocabulary * num_tokens, vocabulary * columns)
    assert most(loss="reference", stream_head=False) >= vocabulary * num_tokens, "control"
    assert most(loss="reference") >= vocabulary * columns, "control"


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_the_head_has_a_place_once_every_block_has_one(
    architecture: str, monkeypatch: Patch
) -> None:
    """Copied once, sliced as before; and it leaves with the slots."""
    monkeypatch.setattr("poros.head.choice.LEAST_NUM_BYTES", 1)
    expected = run(with_sliced_loss(build(architecture)))
    policy = {**ON_HOST, "stream_head": None}
    model = with_sliced_loss(build(architecture), **policy, slots=NUM_LAYERS)
    runtime, matrix = poros.runtime(model), head_of(model)
    plan = poros.plan(model, seq_len=16, batch_size=2, **policy, num_slots=NUM_LAYERS)
    assert_same_run(expected, run(model))
    assert runtime.head is not None and runtime.head.holds_all
    assert runtime.stats()["head_num_bytes"] == matrix.nbytes
    assert plan.terms["head"] == matrix.nbytes + 2 * 96 * matrix[0].nbytes
    whole = runtime.stats()["device_num_bytes"]
    runtime.resize(ResidencyPlan(2, 0))
    assert not runtime.head.holds_all
    assert runtime.stats()["device_num_bytes"] <= whole - matrix.nbytes
    runtime.resize(ResidencyPlan(NUM_LAYERS, 0))
    assert runtime.stats()["device_num_bytes"] == whole
    # One that was asked for stays in host memory.
    asked = poros.runtime(with_sliced_loss(build(architecture), slots=NUM_LAYERS))
    assert asked.head is not None and not asked.head.holds_all


def test_no_room_for_the_head_leaves_everything_as_it_was(monkeypatch: Patch) -> None:
    monkeypatch.setattr("poros.head.choice.LEAST_NUM_BYTES", 1)
    model = with_sliced_loss(few(), **{**ON_HOST, "stream_head": None})
    runtime = poros.runtime(model)
    before = runtime.stats()["device_num_bytes"]
    with monkeypatch.context() as patch:
        patch.setattr(SliceReader, "load", raising(torch.OutOfMemoryError, "no room"))
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            runtime.resize(ResidencyPlan(NUM_LAYERS, 0))
    assert runtime.room == ResidencyPlan(2, 0) and runtime.stats()["device_num_bytes"] == before
    assert_same_run(run(with_sliced_loss(few())), run(model))


def test_tied_matrices_are_on_the_host_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = with_sliced_loss(build("gemma3"), stream_embedding=True)
    assert "embedding" not in caplog.text, "nothing was asked for in vain"
    assert head_of(model) is model.get_input_embeddings().weight
    runtime = poros.runtime(model)
    expected = runtime.host.num_bytes + head_of(model).nbytes
    assert runtime.stats()["host_num_bytes"] == expected
    run(model)
    num_tokens = sum(batch["input_ids"].numel() for batch in batches())
    assert runtime.stats()["rows_num_bytes"] == num_tokens * head_of(model)[0].nbytes
    assert runtime.stats()["head_num_bytes"] > 0


# What notices damage.

Damage = Callable[[Model, Patch], object]


def flip_a_row_that_no_batch_asks_for(model: Model, patch: Patch) -> None:
    matrix = model.get_input_embeddings().weight
    asked = {int(token) for batch in batches() for token in batch["input_ids"].flatten()}
    row = next(row for row in range(matrix.shape[0]) if row not in asked)
    matrix.host[row].view(torch.uint8)[3] ^= 1


def copies_of_rows(copy: Callable[..., Any]) -> Damage:
    """``copy(genuine, target, source, after)`` copies them."""
    return lambda model, patch: in_place_of(poros.runtime(model).rows._streams, "copy")(copy)(patch)


def rolled(genuine: Any, target: torch.Tensor, source: torch.Tensor, *, after: Any) -> Any:
    return genuine(target, source.roll(1, 0), after=after)


def none(genuine: Any, target: torch.Tensor, source: torch.Tensor, *, after: Any) -> None:
    target.view(torch.uint8).fill_(0xFF)  # memory that was had may hold the right rows already


def flip_a_byte_of_the_head(model: Model, patch: Patch) -> None:
    head_of(model).host.view(torch.uint8)[-1, 3] ^= 1  # type: ignore[attr-defined]


@in_place_of(SliceReader, "_bring")
def swapped(genuine: Any, self: SliceReader, first: int, *given: Any) -> Any:
    _, event = genuine(self, first, *given)
    return genuine(self, 96 if first == 192 else first, *given)[0], event


@in_place_of(SliceReader, "_bring")
def late(genuine: Any, self: SliceReader, first: int, *given: Any) -> Any:
    rows, event = genuine(self, first, *given)
    if first == 96:
        rows.view(torch.uint8).fill_(0xFF)  # what was there before
    return rows, event


OF_ROWS = r"embed_tokens\.weight: .*rows on the device are not"
OF_BYTES = r"embed_tokens\.weight: .*bytes in host memory are not"
# How it was prepared, what is done before its first step, and what the self-check says.
DAMAGE: dict[str, tuple[dict[str, Any], Damage, str]] = {
    "a flipped row": (EMBEDDING, flip_a_row_that_no_batch_asks_for, OF_BYTES),
    "other rows": (EMBEDDING, copies_of_rows(rolled), OF_ROWS),
    "rows that do not come": (EMBEDDING, copies_of_rows(none), OF_ROWS),
    "a flipped byte of the head": (ON_HOST, flip_a_byte_of_the_head, r"lm_head\.weight"),
    "slices in another order": (ON_HOST, lambda model, patch: swapped(patch), r"lm_head\.weight"),
    "a slice that comes late": (ON_HOST, lambda model, patch: late(patch), r"lm_head\.weight"),
}


@pytest.mark.parametrize("which", DAMAGE)
def test_the_first_step_notices_damage(which: str, monkeypatch: Patch) -> None:
    policy, damage, said = DAMAGE[which]
    model = with_sliced_loss(few(), **policy)
    damage(model, monkeypatch)
    with pytest.raises(ParityError, match=said):
        run(model)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("which", ["other rows", "a slice that comes late"])
def test_control_without_the_check_it_would_have_trained_on(which: str, monkeypatch: Patch) -> None:
    policy, damage, _ = DAMAGE[which]
    expected, model = (with_sliced_loss(few(), **policy, self_check="off") for _ in "ab")
    loss = outputs(expected.train()).loss
    damage(model, monkeypatch)
    assert not torch.equal(outputs(model.train()).loss, loss)


def another_weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(512, 64, dtype=torch.bfloat16), requires_grad=False)


CHANGES: dict[str, Callable[[Model], object]] = {
    "cast": lambda model: model.get_output_embeddings().float(),
    "made trainable": lambda model: head_of(model).requires_grad_(True),
    "other data": lambda model: setattr(head_of(model), "data", another_weight().data),
    "another weight": lambda m: setattr(m.get_output_embeddings(), "weight", another_weight()),
    "swapped": lambda model: torch.utils.swap_tensors(head_of(model), another_weight()),
}


@pytest.mark.parametrize("which", CHANGES)
def test_a_head_in_host_memory_that_is_changed_is_refused(which: str) -> None:
    """Before anything is computed with it. Writes: ``tests/unit/test_host_matrix``."""
    model = with_sliced_loss(few())
    with pytest.raises(PreparedModelError, match="weight"):
        CHANGES[which](model)
        model(**batches()[0]).loss.backward()
