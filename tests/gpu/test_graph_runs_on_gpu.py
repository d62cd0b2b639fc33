"""Whole runs with recorded visits on a GPU: 200 steps of a real size, TRL's trainers."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen2Config

import poros
from poros.gates import tiny
from tests.gpu.models import BF16, Model, same, same_runs, train, trained

pytestmark = pytest.mark.gpu

NUM_STEPS = 200
LENGTHS = (384, 256, 384)
HALF_A_BILLION = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=2048,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)


def losses_and_adapters(
    model: Model, lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Of 200 steps on batches of two lengths; the random state at the end.

    With attention that repeats itself: fused kernels need not, where others use the GPU as well.
    """
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for number in range(NUM_STEPS):
        length = lengths[number % len(lengths)]
        tokens = torch.randint(0, 2048, (1, length), generator=generator).cuda()
        region = torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32)
        with sdpa_kernel(SDPBackend.MATH), region:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    adapters = [each.detach().clone() for each in trained(model)]
    return [*losses, *adapters, torch.cuda.get_rng_state()]


def half_a_billion(folder: Path, dropout: float = 0.05) -> Model:
    if not folder.exists():
        tiny.write_checkpoint(HALF_A_BILLION, folder, dtype=BF16)
    base = tiny.load_base(folder, dtype=BF16, device="cuda")
    torch.manual_seed(0)
    return tiny.attach(base, rank=16, dropout=dropout).train()


def test_two_hundred_steps_of_half_a_billion_parameters(tmp_path: Path) -> None:
    expected = losses_and_adapters(half_a_billion(tmp_path / "base"))
    model = half_a_billion(tmp_path / "base")
    poros.prepare(model, slots=2, keep_last=0, loss="reference", cuda_graphs=True)
    found = losses_and_adapters(model)
    captures = poros.runtime(model).context.captures
    print(captures.num_replays, dict(captures.eager))
    assert same_runs(found, expected)
    assert captures.num_replays > 0.9 * NUM_STEPS * 24 * 2
    # Something was learned, and something drawn.
    assert not same(found[0], found[NUM_STEPS - 1])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "autocast"])
def test_two_hundred_steps_of_kept_layers_in_a_row(tmp_path: Path, dtype: torch.dtype) -> None:
    """24 layers in three segments; those of the second length are recomputed."""
    lengths = (384, 384, 384, 384, 256)
    resident = half_a_billion(tmp_path / "base", dropout=0.0)
    expected = losses_and_adapters(resident, lengths, dtype)
    del resident
    model = half_a_billion(tmp_path / "base", dropout=0.0)
    poros.prepare(model, slots=24, keep_last=24, loss="reference", cuda_graphs=True)
    assert same_runs(losses_and_adapters(model, lengths, dtype), expected)
    stats = poros.runtime(model).stats()
    print(stats["num_joined_visits"], stats["num_replayed_visits"], stats["num_eager_visits"])
    assert stats["num_joined_visits"] > 0.7 * NUM_STEPS * 24 * 2


@pytest.mark.parametrize(
    "policy",
    [{"slots": 2}, {"slots": 2, "share_dense": False}, {"slots": 24, "keep_last": 24}],
    ids=["dense weights shared", "each for itself", "kept"],
)
def test_groups_of_which_two_micro_batches_are_replayed_at_a_time(
    policy: dict[str, Any], tmp_path: Path
) -> None:
    run = partial(train, num_steps=20, size=6, lengths=(256,), autocast=True)
    resident = half_a_billion(tmp_path / "base", dropout=0.0)
    expected = run(resident)
    del resident
    model = half_a_billion(tmp_path / "base", dropout=0.0)
    poros.prepare(model, loss="reference", cuda_graphs=True, **policy)
    assert same_runs(run(model, together=True), expected)
    stats, captures = poros.runtime(model).stats(), poros.runtime(model).context.captures
    print(stats["num_joined_visits"], captures.num_recorded, dict(captures.eager))
    assert stats["num_joined_visits"] > 8 * 24 * 5


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trainers_of_trl(kind: str, keep_last: int, tmp_path: Path) -> None:
    """Batches of changing lengths, and DPO's reference pass, which takes no gradients."""
    trl = pytest.importorskip("trl", reason="trl is an optional dependency of the tests")
    from tests.trainers import PREFERENCES, TEXTS, TrlArms, check

    classes = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, TEXTS),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, PREFERENCES),
    }
    arms = TrlArms(tmp_path, *classes[kind], device="cuda", num_steps=12)
    policy = {"keep_last": keep_last, "slots": 2 + keep_last, "cuda_graphs": True}
    check(arms, policy, pad_to_multiple_of=4)
    assert poros.runtime(arms.model).stats()["num_replayed_visits"] > 0
