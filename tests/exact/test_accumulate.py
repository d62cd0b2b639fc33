"""Micro-batches that go through the blocks together: the bits of one after the other, resident."""

from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.api import prepare_with
from poros.gates import tiny
from poros.gates.tape import TapeRecorder
from poros.slots.schedule import Phase, count, walk
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.together import Batch, num_groups, own_loss, reasons, same, train, trained
from tests.support import AS_PLAIN, AdversarialPrepare, prepare_plain

Model = Any
BF16, FP32 = torch.bfloat16, torch.float32
NUM_LAYERS = 4


def build(bases: Bases, architecture: str = "qwen2", **options: Any) -> Model:
    return bases.build(architecture, num_layers=NUM_LAYERS, **options).train()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("base", ["nf4-bf16", "nf4-fp32", "dense-bf16", "dense-fp32"])
def test_equals_one_after_the_other(base: str, dropout: float, size: int, bases: Bases) -> None:
    """Groups smaller than the others, mixed shapes, padding, clipping."""
    options: Any = {
        "dtype": BF16 if "bf16" in base else FP32,
        "quantize": base.startswith("nf4"),
        "dropout": dropout,
    }
    run: Any = {"sizes": (size, size, size // 2, 1), "clip": 0.5, "padded": True}
    expected = train(build(bases, **options), together=False, **run)
    model = prepare_plain(build(bases, **options), slots=2)
    assert same(train(model, **run), expected)
    assert num_groups(model) == (3 if size > 2 else 2) and reasons(model) == []
    assert poros.runtime(model).self_check["status"] == "passed"
    prepared = prepare_plain(build(bases, **options), slots=2)
    assert same(train(prepared, together=False, **run), expected)


POLICIES: dict[str, dict[str, Any]] = {
    "all kept": {"slots": 4, "keep_last": 4},
    "two kept": {"slots": 4, "keep_last": 2},
    "all slots": {"slots": 4},
    "blocks of two layers": {"slots": 2, "block_size": 2},
    "inputs on the host": {"slots": 2, "offload_boundaries": True},
    "adapters of PEFT": {"slots": 2, "adapter_kernels": "peft"},
    "a budget": {"vram_budget": "1GiB"},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str, bases: Bases) -> None:
    expected = train(build(bases), together=False)
    model = prepare_plain(build(bases), **POLICIES[policy])
    assert same(train(model), expected)
    assert num_groups(model) == 3 and reasons(model) == []


def test_slices_of_the_head_and_rows_of_the_embedding(bases: Bases) -> None:
    policy: Any = {"slots": 2, "loss": "chunked", "stream_head": True, "stream_embedding": True}
    expected = train(poros.prepare(build(bases), **policy), together=False)
    model = poros.prepare(build(bases), **policy)
    assert same(train(model), expected) and num_groups(model) == 3


# Layers of gemma4 share a mapping, and router logits are recorded: these run one after the other.
ALONE = ("gemma4", "gemma4_shared_kv", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_promised_architectures(architecture: str, bases: Bases) -> None:
    expected = train(build(bases, architecture), together=False)
    model = prepare_plain(build(bases, architecture), slots=2)
    assert same(train(model), expected)
    assert num_groups(model) == (0 if architecture in ALONE else 3)
    assert bool(reasons(model)) == (architecture in ALONE)


DENSE: dict[str, Any] = {"quantize": False, "dtype": FP32}
OTHERS: dict[str, dict[str, Any]] = {
    "dora": {},
    "vera": {},
    "trainable_tokens": {},
    "prompt_tuning": {},
    "ia3": DENSE,
    "lokr": DENSE,
}


@pytest.mark.parametrize("adapter", OTHERS)
def test_other_adapters(adapter: str, bases: Bases) -> None:
    resident = build(bases, adapter=adapter, **OTHERS[adapter])
    model = prepare_plain(build(bases, adapter=adapter, **OTHERS[adapter]), slots=2)
    assert same(train(model), train(resident, together=False)) and num_groups(model) == 3


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_autocast_within_the_loss(dtype: torch.dtype, bases: Bases) -> None:
    def loss(model: Model, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return own_loss(model, batch)

    expected = train(build(bases, dtype=dtype), together=False, loss=loss)
    model = prepare_plain(build(bases, dtype=dtype), slots=2)
    assert same(train(model, loss=loss), expected) and num_groups(model) == 3


@pytest.mark.parametrize("which", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_trained_head_and_embedding(which: list[str], bases: Bases) -> None:
    make = partial(adapted, bases, lora_dropout=0.1, modules_to_save=which)
    expected = train(make(), together=False)
    model = prepare_plain(make(), slots=2)
    assert same(train(model), expected)
    assert num_groups(model) == 3 and reasons(model) == []


def test_hooks_on_parameters_see_each_micro_batch(bases: Bases) -> None:
    """In the order of one after the other, which is how these run."""

    def listened(model: Model) -> tuple[Model, list[tuple[str, float]]]:
        seen: list[tuple[str, float]] = []
        for name, each in model.named_parameters():
            if each.requires_grad:
                each.register_hook(lambda grad, name=name: seen.append((name, float(grad.sum()))))
                each.register_post_accumulate_grad_hook(
                    lambda p, name=name: seen.append((f"sum {name}", float(p.grad.sum())))
                )
        return model, seen

    resident, expected = listened(build(bases))
    model, found = listened(build(bases))
    prepare_plain(model, slots=2)
    assert same(train(model), train(resident, together=False))
    assert found == expected and reasons(model) == ["hooks on parameters"]


def test_gradients_that_were_there_before(bases: Bases) -> None:
    def between(model: Model, number: int) -> None:
        for each in trained(model):
            each.grad = torch.full_like(each, 0.1)

    expected = train(build(bases), together=False, between=between)
    model = prepare_plain(build(bases), slots=2)
    assert same(train(model, between=between), expected) and num_groups(model) == 3


def test_a_group_loads_each_block_once_a_pass(bases: Bases) -> None:
    model = build(bases)
    with AdversarialPrepare().watching() as prepare:
        prepare(model, slots=2)
        found = train(model, sizes=(8, 8, 8))
    assert same(found, train(build(bases), together=False, sizes=(8, 8, 8)))
    visits = [
        (block, phase)
        for _ in range(3)
        # Backward recomputes a layer, and then has its block until the gradients are there.
        for phase, blocks, times in (
            (Phase.FORWARD, range(NUM_LAYERS), 1),
            (Phase.BACKWARD, reversed(range(NUM_LAYERS)), 2),
        )
        for block in blocks
        for _ in range(8 * times)
    ]
    assert prepare.journal == list(walk(visits, NUM_LAYERS, 2))
    # 2 (K - S) in a warm group, whatever its size.
    assert count(prepare.journal, "prefetch") == 3 * 2 * (NUM_LAYERS - 2) + 2


@pytest.mark.parametrize("keep_last", [0, 4])
def test_recorded_visits(keep_last: int, bases: Bases) -> None:
    run: Any = {"sizes": (4,) * 6, "lengths": (12, 9)}
    expected = train(build(bases), together=False, **run)
    model = build(bases)
    policy = poros.StreamingPolicy(**AS_PLAIN, slots=4, keep_last=keep_last, device="cpu")
    prepare_with(model, policy, recorder=TapeRecorder())
    assert same(train(model, **run), expected) and num_groups(model) == 6
    captures: Any = poros.runtime(model).context.captures
    assert captures.num_replays > 0


def test_dropout_in_the_head_and_before_the_layers(bases: Bases) -> None:
    """What comes behind the last layer is not known before: the first group ends early."""

    def with_dropout(model: Model) -> Model:
        base = model.get_base_model()
        base.model.norm.register_forward_hook(
            lambda module, args, output: torch.nn.functional.dropout(output, 0.1)
        )
        base.model.embed_tokens.register_forward_hook(
            lambda module, args, output: torch.nn.functional.dropout(output, 0.1)
        )
        return model

    expected = train(with_dropout(build(bases)), together=False, lengths=(8,))
    model = prepare_plain(with_dropout(build(bases)), slots=2)
    assert same(train(model, lengths=(8,)), expected)
    # 1 + 3, then 4 and 4 together.
    assert num_groups(model) == 4 and reasons(model) == []


def test_layers_that_draw_differently(bases: Bases) -> None:
    """Measured once for each kind of layer."""

    def other_rates(model: Model) -> Model:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout) and ".1." in name:
                module.p = 0.0
        return model

    expected = train(other_rates(build(bases)), together=False)
    model = prepare_plain(other_rates(build(bases)), slots=2)
    assert same(train(model), expected)
    assert num_groups(model) == 3 and reasons(model) == []


def test_evaluation_and_single_micro_batches_between(bases: Bases) -> None:
    def between(model: Model, number: int) -> None:
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.arange(9)[None])
        model.train()

    expected = train(build(bases), together=False, between=between, sizes=(3, 1, 4))
    model = prepare_plain(build(bases), slots=2)
    assert same(train(model, between=between, sizes=(3, 1, 4)), expected)
    assert num_groups(model) == 2


def test_a_model_that_is_not_prepared_and_no_micro_batches(bases: Bases) -> None:
    expected = train(build(bases), together=False)
    assert same(train(build(bases)), expected)
    model = prepare_plain(build(bases), slots=2)
    assert poros.accumulate(model, []) == [] and num_groups(model) == 0


def test_the_models_own_loss_by_default(bases: Bases) -> None:
    tokens = torch.arange(12).view(2, 6)
    batch = {"input_ids": tokens, "labels": tokens}
    resident = build(bases, dropout=0.0)
    for _ in range(3):
        (resident(**batch).loss / 3).backward()
    model = prepare_plain(build(bases, dropout=0.0), slots=2)
    losses = poros.accumulate(model, [batch] * 3)
    assert len(losses) == 3 and not any(each.requires_grad for each in losses)
    assert same([p.grad for p in trained(model)], [p.grad for p in trained(resident)])
