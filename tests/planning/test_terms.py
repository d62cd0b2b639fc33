"""The terms of a plan, written out by hand from a configuration and measured one by one.

    peak = slots + adapters (weights, gradients, moments) + stash of layer inputs
           + working set of one layer + what stays resident + inputs

The working set is that of one resident layer run alone. That they add up to the peak of a step is
seen in ``test_counted``, and on a GPU in ``test_plan_on_gpu``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.gates import tiny
from poros.slots.manager import BlockManager
from tests.planning.cells import USUAL, OperatorBytes, Steps, make, planned
from tests.support import prepare_plain

TOLERANCE = 0.05
CELL: dict[str, Any] = {
    **USUAL,
    "num_layers": 7,
    "intermediate_size": 256,
    "rank": 16,
    "dropout": 0.05,
    "batch_size": 2,
    "accumulation": 2,
}


def linears(config: Any) -> list[tuple[int, int]]:
    """Rows and columns of the weights of a qwen2's layer."""
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    KV = config.num_key_value_heads * (H // config.num_attention_heads)
    return [(H, H), (KV, H), (KV, H), (H, H), (I, H), (I, H), (H, I)]


def block_bytes(config: Any, block_size: int) -> list[int]:
    """Bytes of each block of a qwen2, from nothing but its configuration."""
    parts = []
    for rows, columns in linears(config):
        parts += [rows * columns // 2, rows * columns // 64]  # two weights to a byte, and scales
    layer = aligned(parts)
    pages = -(-layer // 65536) * 65536  # each layer of a block starts on a page
    L = config.num_hidden_layers
    return [pages * (min(block_size, L - first) - 1) + layer for first in range(0, L, block_size)]


def aligned(parts: list[int]) -> int:
    return sum(-(-part // 256) * 256 for part in parts)


def small_bytes(config: Any) -> int:
    """Bytes of what stays of the layers: two norms, three biases, a float per 256 scales."""
    H = config.hidden_size
    KV = config.num_key_value_heads * (H // config.num_attention_heads)
    scales = [4 * -(-(rows * columns // 64) // 256) for rows, columns in linears(config)]
    return config.num_hidden_layers * aligned([2 * H, 2 * H, 2 * H, 2 * KV, 2 * KV, *scales])


def slot_bytes(blocks: list[int], num_slots: int) -> list[int]:
    """Block k lives in slot k mod S, so each slot is as large as the largest block of its class."""
    num_slots = min(num_slots, len(blocks))
    return [max(blocks[slot::num_slots]) for slot in range(num_slots)]


@pytest.mark.parametrize("block_size", [1, 2, 9])
def test_terms_are_those_written_by_hand(block_size: int, tmp_path: Path) -> None:
    cell = {**CELL, "vocab_size": 8192, "block_size": block_size}
    model = make(tmp_path, cell)
    config = model.config
    B, T = cell["batch_size"], cell["seq_len"]
    L, H, V = config.num_hidden_layers, config.hidden_size, config.vocab_size
    # Both factors of each linear layer, in float32.
    adapters = 4 * L * sum(cell["rank"] * sum(sides) for sides in linears(config))
    # A code book of each kind, and a float for each quantized weight.
    constants = 4 * (16 + 256 + 7 * L)
    head_dim = H // config.num_attention_heads
    frequencies = 2 * 4 * head_dim // 2  # as they are, and as they were
    rotary, positions = 2 * 2 * T * head_dim, 8 * T
    expected = {
        "slots": sum(slot_bytes(block_bytes(config, block_size), 2)),
        "kept blocks": 0,
        "adapters": adapters,
        "optimizer": 2 * adapters,
        "gradients": adapters,
        "boundaries": L * B * T * H * 2,
        "kept graphs": 0,
        "embedding": V * H * 2,
        "head": V * H * 2,
        "other": H * 2 + small_bytes(config) + constants + frequencies,
        "inputs": 2 * B * T * 8 + rotary + positions,
        "recordings": 0,
        "dense layer": 0,
        "dense weight": 0,
        "libraries": 0,
    }
    found = dict(planned(model, cell).terms)
    # In float32 the logits' log-softmax, its gradient and theirs. They are gone before the first
    # layer is recomputed, and here they are more.
    assert found.pop("workspace") == pytest.approx(B * T * V * (4 + 4 + 4), rel=TOLERANCE)
    assert found == expected


@pytest.mark.cover("values")
@pytest.mark.parametrize("self_check", ["off", "strict"])
@pytest.mark.parametrize("is_faulty", [False, True], ids=["poros", "control"])
def test_nothing_of_a_slots_size_is_allocated_after_prepare(
    tmp_path: Path, is_faulty: bool, self_check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the self-check: after the first step, which it checks in memory of its own."""
    cell = {**CELL, "hidden_size": 64, "num_layers": 6, "intermediate_size": 128, "rank": 4}
    cell |= {"batch_size": 1, "seq_len": 8}
    model = make(tmp_path, cell)
    prepare_plain(model, device="cpu", block_size=2, self_check=self_check)
    smallest = min(slot_bytes(block_bytes(model.config, 2), 2))
    if is_faulty:
        acquire = BlockManager.acquire

        def acquire_a_copy(self: BlockManager, *args: Any) -> Any:
            slot = acquire(self, *args)
            slot.buffer.clone()
            return slot

        monkeypatch.setattr(BlockManager, "acquire", acquire_a_copy)
    steps = Steps(model, cell)
    if self_check != "off":
        steps.train()
        assert poros.runtime(model).self_check["status"] == "passed"
    with OperatorBytes() as made:
        steps.train()
        with torch.no_grad():
            model.eval()(**tiny.make_batches(1, batch_size=1, num_tokens=8)[0])
    assert made.largest > 0
    assert (made.largest >= smallest) == is_faulty
