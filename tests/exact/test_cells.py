"""Streamed training equals resident training, bit for bit, in every cell that Poros promises.

A cell is a run (architecture, dtype, dropout, accumulation, autocast), a policy, and streams: those
that a CPU has ("eager"), the adversarial ones, which copy as late as the waits allow and poison
what they are about to overwrite, or these with every read of an operator observed ("watched").
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch

import poros
from poros.api import prepare_with
from poros.config import MIN_SLOTS, StreamingPolicy
from poros.errors import ParityError
from poros.gates import tiny
from poros.gates.reference import Trajectory, start_digests
from poros.host.layout import BlockLayout
from poros.host.store import HostStore
from poros.self_check.compare import Difference
from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing
from poros.stream.boundary import is_streamed
from poros.streams import EagerStreams, StreamContext
from tests.comparing import compare_trajectories
from tests.covers import cover
from tests.exact.arms import Model, Residents, Run
from tests.snapshots import layers_of
from tests.support import prepare_plain, same_bits
from tools.adversary import AdversarialStreams, SlotHazard

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Cell:
    run: Run
    streams: str = "eager"
    policy: Mapping[str, Any] = field(default_factory=dict)
    is_slow: bool = False

    def __str__(self) -> str:
        default = Run()
        changed = [v for k, v in vars(self.run).items() if v != getattr(default, k)]
        said = [*changed, self.streams, *(f"{k}={v}" for k, v in self.policy.items())]
        return " ".join(map(str, said)).replace("torch.", "")


GRID = [
    Run(dtype=dtype, dropout=dropout, accumulation=accumulation)
    for dtype in (BF16, FP32)
    for dropout in (0.0, 0.05)
    for accumulation in (1, 2, 4)
]
OFF = {"self_check": "off"}
# From two slots to everything resident with all layers kept; inputs on the device or on the host.
BUDGETS: list[dict[str, Any]] = [
    {"slots": 2},
    {"slots": 2, "offload_boundaries": True},
    {"slots": 3, **OFF},
    {"slots": 4, "offload_boundaries": True, **OFF},
    {"slots": 4, "keep_last": 2, "offload_boundaries": True},
    {"slots": 4, "keep_last": 4, **OFF},
]
AUTOCAST = Run(dtype=FP32, autocast=BF16, accumulation=2)
FIVE = Run(num_layers=5)
SIDE_CHANNELS = ("gemma4", "gemma4_shared_kv", "mixtral", "qwen3_moe")
pytestmark = pytest.mark.usefixtures("narrow")

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("eager", {}),
    ("watched", OFF),
    *(("adversarial", policy) for policy in BUDGETS),
]


def grid() -> Iterator[Cell]:
    """Every run in every way; of the shorter ones each way once, except in the slow tests."""
    points = list(product(GRID, range(len(WAYS))))
    short = [(run, way) for run, way in points if run.accumulation < 4]
    kept = cover([(run.dtype, run.dropout, run.accumulation, way) for run, way in short], 1)
    fast = [short[place] for place in kept]
    for run, way in points:
        yield Cell(run, *WAYS[way], is_slow=(run, way) not in fast)


def cells() -> Iterator[Cell]:
    yield from grid()
    for dtype in (BF16, FP32):
        for keep_last in (1, 2, 3, 4, 9):  # the last is more than there are
            run = Run(dtype=dtype, accumulation=2)
            is_slow = keep_last != (9 if dtype is BF16 else 2)
            yield Cell(run, policy={"slots": 3, "keep_last": keep_last}, is_slow=is_slow)
    # Of five layers, Gemma 4 with shared states computes three; the last two reuse two of them.
    for name in tiny.ARCHITECTURES:
        run = Run(architecture=name, num_layers=5 if name == "gemma4_shared_kv" else 3)
        twice = replace(run, num_layers=max(run.num_layers, 4), accumulation=2)
        # Others have the operators of qwen2, which the grid watches, and nothing beside them.
        is_apart = name in SIDE_CHANNELS
        yield Cell(run, is_slow=is_apart)  # below, in blocks of two
        yield Cell(run, "watched", OFF, is_slow=name not in ("gemma4_shared_kv", "mixtral"))
        if name in SIDE_CHANNELS:
            yield Cell(run, "adversarial", is_slow=True)
            yield Cell(twice, "adversarial", {"block_size": 2})
        if name in ("gemma3", "gemma4", "gemma4_shared_kv", "mixtral"):
            yield Cell(twice, policy={"keep_last": 3}, is_slow=True)
            policy = {"keep_last": 3, "block_size": 2}
            yield Cell(twice, policy=policy, is_slow=name != "gemma4")
        if name != "qwen2":
            for policy in BUDGETS:
                is_fast = name == "gemma4_shared_kv" and policy == BUDGETS[1]
                yield Cell(twice, "adversarial", policy, is_slow=not is_fast)
        wide = replace(twice, num_layers=8, hidden_size=256, num_tokens=64, num_steps=20)
        for block_size, slots in ((1, 3), (2, 2)):
            yield Cell(wide, policy={"block_size": block_size, "slots": slots}, is_slow=True)
    yield Cell(AUTOCAST)
    yield Cell(replace(AUTOCAST, is_watched=True), "watched", OFF)
    for policy in ({"keep_last": 2}, {"offload_boundaries": True}):
        is_slow = "keep_last" in policy
        yield Cell(replace(AUTOCAST, is_watched=True), "watched", {**OFF, **policy}, is_slow)
    # Five layers, so that the last block is a short one; all of them in one block at the end.
    for block_size in (1, 2, 3, 5):
        for slots in (2, 3, 5):
            # Two slots are checked; with more, every read is watched.
            streams, check = ("eager", {}) if slots == 2 else ("watched", OFF)
            is_slow = (block_size, slots) not in ((2, 3), (3, 2))
            policy = {"block_size": block_size, "slots": slots, **check}
            yield Cell(FIVE, streams, policy, is_slow=is_slow)

    # Gemma 4 has an embedding for each layer in one matrix, and scales it; its other one is tied.
    for name in ("qwen2", "gemma4"):
        run = Run(architecture=name, accumulation=2)
        for policy in ({}, {"slots": 4, "keep_last": 4}):
            given = {"stream_embedding": True, **policy}
            yield Cell(run, policy=given, is_slow=bool(policy) or name == "qwen2")
            yield Cell(run, "adversarial", given, is_slow=not policy or name == "gemma4")
        given = {"stream_embedding": True, **OFF}
        yield Cell(run, "watched", given, is_slow=name == "qwen2")
    yield Cell(AUTOCAST, policy={"stream_embedding": True})

    # The loss in slices, against a resident run with the same loss: the head resident or in host
    # memory, where Gemma's is the embedding too. Gemma 4 caps its logits, Mixtral adds to its loss.
    for name in ("qwen2", "gemma4", "mixtral"):
        run = Run(architecture=name, accumulation=2, loss="chunked")
        yield Cell(run, is_slow=name == "qwen2")
        for policy in ({}, {"slots": 4, "keep_last": 4}):
            given = {"stream_head": True, **policy}
            yield Cell(run, policy=given, is_slow=not policy or name == "mixtral")
            yield Cell(run, "adversarial", given, is_slow=bool(policy) or name == "gemma4")
        yield Cell(run, "watched", {"stream_head": True, **OFF}, is_slow=name != "gemma4")
    run = Run(dtype=FP32, loss="chunked")
    yield Cell(run, "adversarial", {"stream_head": True, "stream_embedding": True})
    yield Cell(replace(AUTOCAST, loss="chunked"), policy={"stream_head": True})
    # The model's own loss, with its head in host memory, whole for as long as it is used.
    yield Cell(Run(), policy={"stream_head": True})


def as_parameter(cell: Cell) -> Any:
    return pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] if cell.is_slow else [])


def run_streamed(
    cell: Cell, residents: Residents, spoil: Callable[[Model], object] = lambda model: None
) -> tuple[Model, Trajectory, StreamContext]:
    """Train the cell's streamed arm, from the bytes of the resident one."""
    is_eager = cell.streams == "eager"
    streams = EagerStreams(torch.device("cpu")) if is_eager else AdversarialStreams()
    model = cell.run.model(residents.bases)
    assert start_digests(model) == residents.trajectory(cell.run)[1]
    with streams.watch() if cell.streams == "watched" else nullcontext():  # type: ignore[attr-defined]
        given = {"slots": 2, "device": "cpu", "loss": cell.run.loss, **cell.policy}
        policy = StreamingPolicy(**given)
        prepare_with(model, policy, streams=streams)
        spoil(model)
        return model, cell.run.train(model), streams


@pytest.mark.parametrize("cell", [as_parameter(cell) for cell in cells()])
def test_a_cell_is_exact(
    cell: Cell, residents: Residents, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = residents.trajectory(cell.run)
    with caplog.at_level(logging.WARNING, logger="poros"):
        model, found, streams = run_streamed(cell, residents)
    assert [str(each) for each in compare_trajectories(expected, found)] == []
    assert expected.hash() == found.hash()
    require_streamed(cell, model, streams, [each.getMessage() for each in caplog.records])


def require_streamed(cell: Cell, model: Model, streams: Any, warnings: list[str]) -> None:
    """Every layer was streamed, and every block travelled as often as the walk says."""
    run, policy = cell.run, cell.policy
    runtime = poros.runtime(model)
    stats = runtime.stats()
    slots, keep_last = policy.get("slots", 2), policy.get("keep_last", 0)
    num_blocks = -(-run.num_layers // policy.get("block_size", 1))
    assert all(is_streamed(layer) for layer in layers_of(model))
    assert runtime.num_blocks == num_blocks and stats["fallbacks"] == []
    is_checked = policy.get("self_check") != "off"
    assert runtime.self_check["status"] == ("passed" if is_checked else "off")
    K, S, num_warm = runtime.num_streamed_blocks, runtime.num_slots, run.num_passes - 1
    walk = (2 * K - S) + num_warm * 2 * (K - S)
    # The check runs layers again.
    assert stats["num_loads"] >= walk if is_checked else stats["num_loads"] == walk
    if keep_last:
        num_kept = min(keep_last, run.num_layers) // policy.get("block_size", 1)
        assert num_blocks - num_kept >= K
        return
    assert [num_blocks, min(slots, num_blocks)] == [K, S]
    if not is_checked:
        assert stats["num_loads"] + stats["num_hits"] == run.num_passes * 2 * K
    # Every byte of the base travels at least once.
    assert stats["h2d_num_bytes"] >= runtime.host.num_bytes > 0
    if cell.streams != "eager" and not policy.get("offload_boundaries"):
        assert streams.num_copies == stats["num_loads"]
        assert streams.num_bytes == stats["h2d_num_bytes"]
    # A warning names the clamp; there is none without one.
    clamp = f"poros: slots={slots} is more than the {num_blocks} blocks; using {num_blocks}"
    clamps = [each for each in warnings if "slots=" in each]
    assert clamps == ([clamp] if slots > num_blocks else [])


# Layers that keep their graph.


def test_kept_blocks_leave_the_ring_and_run_once(residents: Residents) -> None:
    model = Run(num_layers=5).model(residents.bases).train()
    prepare_plain(model, device="cpu", slots=4, keep_last=2)
    runtime = poros.runtime(model)
    assert (runtime.num_blocks, runtime.num_streamed_blocks, runtime.num_slots) == (5, 3, 2)
    visits: list[int] = []
    for index, layer in enumerate(layers_of(model)):
        layer.mlp.register_forward_hook(lambda *_, index=index: visits.append(index))
    for _ in range(2):
        before = runtime.stats()["num_loads"]
        visits.clear()
        model(**tiny.make_batches(1, num_tokens=12)[0]).loss.backward()
    assert runtime.stats()["num_loads"] - before == 2 * (3 - 2)
    assert visits == [0, 1, 2, 3, 4, 2, 1, 0], "kept layers run once"


def test_at_full_budget_nothing_is_loaded_and_nothing_recomputed(residents: Residents) -> None:
    run = Run(accumulation=2)
    cell = Cell(run, policy={"keep_last": run.num_layers})
    calls: list[int] = []

    def count(model: Model) -> None:
        layers_of(model)[0].mlp.register_forward_hook(lambda *_: calls.append(1))

    model, found, _ = run_streamed(cell, residents, count)
    assert compare_trajectories(residents.trajectory(run)[0], found) == []
    runtime = poros.runtime(model)
    assert (runtime.num_streamed_blocks, runtime.num_slots) == (0, 0)
    assert len(calls) == run.num_passes and runtime.stats()["num_loads"] == 0
    assert runtime.self_check["status"] == "passed"
    batch = tiny.make_batches(1, num_tokens=12)[0]
    with torch.no_grad():
        logits = model.eval()(**batch).logits
        assert same_bits(logits, poros.restore(model)(**batch).logits)


# Negative controls: each fault has to show, alone with the comparison: the self-check is off. More
# (random states that are not restored, channels that are dropped): ``tests/faults/planted``.


def differences(
    residents: Residents, spoil: Callable[[Model], object] = lambda model: None, **changes: Any
) -> list[Difference]:
    cell = Cell(Run(**changes), policy=OFF)
    _, found, _ = run_streamed(cell, residents, spoil)
    return compare_trajectories(residents.trajectory(cell.run)[0], found)


@pytest.mark.parametrize(
    "ending", ["q_proj.base_layer.weight", "absmax", "nested_absmax", "bias", "layernorm.weight"]
)
def test_control_one_flipped_nibble_in_the_host_copy(ending: str, residents: Residents) -> None:
    """In each kind of tensor that travels or stays: were one not read, nothing would show."""

    def flip(model: Model) -> None:
        runtime = poros.runtime(model)
        slab = runtime.host.slabs[2]
        tensors = {spec.name: slab.tensor(spec) for spec in slab.layout.tensors}
        tensors |= {name: each.data for name, each in model.named_parameters()}
        tensors |= runtime.small.nested
        name = next(name for name in tensors if ".layers.2." in name and name.endswith(ending))
        # The highest nibble of the tensor's first element: of its exponent, if it is a float.
        tensor = tensors[name].view(-1)
        tensor.view(torch.uint8)[tensor.element_size() - 1] ^= 0x10

    assert differences(residents, flip)[0].name.startswith("step 0, ")


def test_control_a_damaged_kept_block_is_seen_by_the_self_check(residents: Residents) -> None:
    def damage(model: Model) -> None:
        poros.runtime(model).ring.slot(3).buffer[77] ^= 1

    with pytest.raises(ParityError, match=r"layers\.3: block 3 on the device"):
        run_streamed(Cell(Run(), policy={"keep_last": 2}), residents, damage)


def test_control_a_kept_block_that_is_not_waited_for(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockManager, "acquire", lambda self, block, phase: self._ring.slot(block))
    # Copies are queued in order: a wait for a later block of the ring would hide it.
    cell = Cell(Run(), "watched", {**OFF, "keep_last": 4})
    with pytest.raises(SlotHazard, match="read without waiting"):
        run_streamed(cell, residents)


def test_the_copy_of_a_kept_block_waits_for_the_memorys_last_owner() -> None:
    """As for the slots that blocks pass through: fresh memory may be read by what is queued."""
    waited: list[object] = []

    class Recording(EagerStreams):
        def record(self) -> object:
            return "allocated"

        def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: object) -> object:
            waited.append(after)
            return super().copy(target, source, after=after)

    layouts = [BlockLayout.pack([("w", torch.empty(64))])] * 2
    streams = Recording(torch.device("cpu"))
    ring = DeviceRing(layouts, MIN_SLOTS, streams, num_pinned=2)
    BlockManager(HostStore.allocate(layouts), ring, streams)
    assert waited == ["allocated"] * 2
