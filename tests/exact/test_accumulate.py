"""Micro-batches that go through the blocks together: the bits of one after the other, resident."""

from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.gates import tiny
from poros.slots.schedule import Phase, count, walk
from tests.covers import with_slow
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.recorded import KEPT, recorded
from tests.exact.together import (
    Batch,
    Program,
    build,
    dense,
    ends,
    num_groups,
    program,
    same,
    train,
    trained,
)
from tests.support import AdversarialPrepare, prepare_plain

Model = Any
BF16, FP32 = torch.bfloat16, torch.float32
NUM_LAYERS = 4
four_layers = partial(build, num_layers=NUM_LAYERS)
MIXED: Any = {"sizes": (3, 1, 5), "clip": 0.5, "padded": True}
"""Groups smaller than the others, other shapes, padding, clipping."""


POLICIES: dict[str, dict[str, Any]] = {
    "two slots": {},
    "all kept": {"slots": 4, "keep_last": 4},
    "two kept": {"slots": 4, "keep_last": 2},
    "all slots": {"slots": 4},
    "blocks of two layers": {"block_size": 2},
    "inputs on the host": {"offload_boundaries": True},
    "adapters of PEFT": {"adapter_kernels": "peft"},
    "a budget": {"slots": None, "vram_budget": "1GiB"},
    "all on the host": {"loss": "chunked", "stream_head": True, "stream_embedding": True},
}


def of_policy(name: str, share_dense: bool) -> Program:
    make = four_layers if share_dense else partial(dense, num_layers=NUM_LAYERS)
    policy = {**POLICIES[name], "share_dense": share_dense}
    return program(base=make, policy=policy, sizes=(3, 3))


def of_base(*architecture: str, **options: Any) -> Program:
    return program(base=lambda bases: build(bases, *architecture, **options))


def evaluating(model: Model, number: int) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(9)[None])
    model.train()


# Layers of gemma4 share a mapping, and router logits are recorded: these run one after the other.
ALONE = {
    "gemma4": "layers share tensors",
    "gemma4_shared_kv": "layers share tensors",
    "mixtral": "outputs of layers are recorded",
    "qwen3_moe": "outputs of layers are recorded",
}
DENSE: dict[str, Any] = {"quantize": False, "dtype": FP32}
PROGRAMS = {
    **{
        f"{'nf4' if quantize else 'dense'} {dtype} {dropout}": program(
            base=partial(build, quantize=quantize, dtype=dtype, dropout=dropout), **MIXED
        )
        for quantize in (True, False)
        for dtype, dropout in ((BF16, 0.0), (BF16, 0.05), (FP32, 0.05))
    },
    **{name: of_policy(name, share_dense=False) for name in POLICIES},
    **{f"{name}, dense weights shared": of_policy(name, share_dense=True) for name in POLICIES},
    **{
        name: of_base(name, num_layers=NUM_LAYERS)._replace(end=ALONE.get(name))
        for name in tiny.ARCHITECTURES
        if name != "qwen2"  # that is all the others
    },
    **{
        name: of_base(adapter=name)
        for name in ("dora", "vera", "trainable_tokens", "prompt_tuning")
    },
    "ia3": of_base(adapter="ia3", **DENSE),
    "lokr": of_base(adapter="lokr", **DENSE),
    "a trained head and embedding": program(
        base=partial(adapted, lora_dropout=0.1, modules_to_save=["lm_head", "embed_tokens"])
    ),
    "evaluation and single ones between": program(between=evaluating, sizes=(3, 1, 2)),
}


# Of dtypes and dropout each comes, with 4 bits and dense; these have the operators of others.
SLOW = ("nf4 torch.bfloat16 0.0", "nf4 torch.float32 0.05", "dense torch.bfloat16 0.05")
SLOW += tuple(f"{name}, dense weights shared" for name in ("two slots", "all kept", "all slots"))
SLOW += ("two slots", "llama", "mistral", "qwen3", "gemma4_shared_kv", "qwen3_moe")


@pytest.mark.parametrize("which", with_slow(PROGRAMS, SLOW))
def test_programs(which: str, bases: Bases) -> None:
    assert ends(PROGRAMS[which], bases)


def test_a_group_loads_each_block_once_a_pass(bases: Bases) -> None:
    size, num_groups = 3, 2
    with AdversarialPrepare().watching() as prepare:
        model = prepare(four_layers(bases), slots=2)
        found = train(model, sizes=(size,) * num_groups)
    assert same(found, train(four_layers(bases), together=False, sizes=(size,) * num_groups))
    visits = [
        (block, phase)
        for _ in range(num_groups)
        # Backward recomputes a layer, and then has its block until the gradients are there.
        for phase, blocks, times in (
            (Phase.FORWARD, range(NUM_LAYERS), 1),
            (Phase.BACKWARD, reversed(range(NUM_LAYERS)), 2),
        )
        for block in blocks
        for _ in range(size * times)
    ]
    assert prepare.journal == list(walk(visits, NUM_LAYERS, 2))
    # 2 (K - S) in a warm group, whatever its size.
    assert count(prepare.journal, "prefetch") == num_groups * 2 * (NUM_LAYERS - 2) + 2


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("share_dense", [False, True], ids=["", "dense weights shared"])
def test_replayed_visits(share_dense: bool, policy: dict[str, Any], bases: Bases) -> None:
    run: Any = {"sizes": (4,) * 5, "lengths": (12, 12, 20, 12)}
    expected = train(adapted(bases, lora_dropout=0.1), False, **run)
    model = adapted(bases, lora_dropout=0.1)
    captures, _ = recorded(model, **policy, share_dense=share_dense)
    assert same(train(model, **run), expected)
    assert num_groups(model) == 5 and captures.num_replays > 10


@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
def test_replayed_visits_of_a_reference_between(policy: dict[str, Any], bases: Bases) -> None:
    """As DPO has it, of several lengths: kept graphs stay, whatever is replayed meanwhile."""

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        tokens = batch["input_ids"]
        policy = model(input_ids=tokens, use_cache=False).logits.float()
        with torch.no_grad(), model.disable_adapter():
            reference = model(input_ids=tokens, use_cache=False).logits.float()
        value: torch.Tensor = (policy - reference).pow(2).mean() + policy.logsumexp(-1).mean()
        return value

    run: Any = {"sizes": (4,) * 6, "lengths": (12, 20, 12, 9), "loss": loss}
    expected = train(adapted(bases), False, **run)
    model = adapted(bases)
    captures, _ = recorded(model, **policy)
    assert same(train(model, **run), expected) and captures.num_replays > 10


def test_control_code_that_runs_between_them_would_not_be_seen(bases: Bases) -> None:
    """Why nobody's code may: the rate of dropout that a layer had before is taken for its own."""
    model = adapted(bases, lora_dropout=0.1)
    recorded(model)
    layer = next(iter(poros.runtime(model).streamed_layers()))
    with layer.in_a_row():
        before = layer.condition()
        module = next(m for m in layer.contents().modules() if isinstance(m, torch.nn.Dropout))
        module.p = 0.4
        assert layer.condition() is before
    assert not before.equals(layer.condition())


def test_a_model_that_is_not_prepared_and_no_micro_batches(bases: Bases) -> None:
    assert same(train(dense(bases)), train(dense(bases), together=False))
    model = prepare_plain(dense(bases), slots=2)
    assert poros.accumulate(model, []) == [] and num_groups(model) == 0


def test_within_another_module(bases: Bases) -> None:
    """A module of the user's own that holds the prepared model."""

    class Outer(torch.nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            return self.model(**batch)

    expected = train(dense(bases), together=False)
    model = prepare_plain(dense(bases), slots=2)
    assert same(train(Outer(model)), expected) and num_groups(model) == 3


def test_the_models_own_loss_by_default(bases: Bases) -> None:
    tokens = torch.arange(12).view(2, 6)
    batch = {"input_ids": tokens, "labels": tokens}
    resident = dense(bases, dropout=0.0)
    for _ in range(3):
        (resident(**batch).loss / 3).backward()
    model = prepare_plain(dense(bases, dropout=0.0), slots=2)
    losses = poros.accumulate(model, [batch] * 3)
    assert len(losses) == 3 and not any(each.requires_grad for each in losses)
    assert same([p.grad for p in trained(model)], [p.grad for p in trained(resident)])
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        poros.accumulate(model, [batch] * 2)
