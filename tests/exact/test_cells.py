"""Streamed training equals resident training, bit for bit, in every cell that Poros promises.

A cell is a run (architecture, dtype, dropout, accumulation, autocast), a policy, and streams: those
that a CPU has ("eager"), the adversarial ones, which copy as late as the waits allow and poison
what they are about to overwrite, or these with every read of an operator observed ("watched").
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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

    def __str__(self) -> str:
        default = Run()
        changed = [v for k, v in vars(self.run).items() if v != getattr(default, k)]
        said = [*changed, self.streams, *(f"{k}={v}" for k, v in self.policy.items())]
        return " ".join(map(str, said)).replace("torch.", "")


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
pytestmark = pytest.mark.usefixtures("narrow")

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("eager", {}),
    ("watched", OFF),
    *(("adversarial", policy) for policy in BUDGETS),
    ("adversarial", {"block_size": 2, "keep_last": 3}),
]
SCALED = {"slots": 4, "keep_last": 4}


def of(architecture: str, **options: Any) -> Run:
    """Of five layers, Gemma 4 with shared states computes three; the last two reuse two of them."""
    num_layers = 5 if architecture == "gemma4_shared_kv" else 4
    return Run(architecture=architecture, num_layers=num_layers, **options)


def cells() -> Iterator[Cell]:
    yield Cell(of("mixtral", accumulation=2), "watched", OFF)
    yield Cell(of("gemma4_shared_kv", accumulation=2), "adversarial", {"block_size": 2})
    # Five layers, so that the last block is a short one; all of them in one block at the end.
    for size, slots in ((1, 5), (2, 3), (3, 2), (5, 3)):
        yield Cell(Run(num_layers=5), "watched", {"block_size": size, "slots": slots, **OFF})
    for dtype, keep_last in ((BF16, 9), (FP32, 2)):  # the former is more than there are
        run = Run(dtype=dtype, accumulation=2)
        yield Cell(run, policy={"slots": 3, "keep_last": keep_last})
    yield Cell(AUTOCAST)
    for policy in (OFF, {**OFF, "offload_boundaries": True}, {**OFF, "keep_last": 2}):
        yield Cell(replace(AUTOCAST, is_watched=True), "watched", policy)
    # Gemma 4 has an embedding for each layer in one matrix, and scales it; its other one is tied.
    embedding = {"stream_embedding": True}
    gemma4, qwen2 = (Run(architecture=name, accumulation=2) for name in ("gemma4", "qwen2"))
    yield Cell(gemma4, policy=embedding)
    yield Cell(gemma4, "watched", {**embedding, **OFF})
    yield Cell(qwen2, "adversarial", {**embedding, **SCALED})
    yield Cell(AUTOCAST, policy=embedding)
    # The loss in slices, against a resident run with the same loss: the head resident or in host
    # memory, where Gemma's is the embedding too. Gemma 4 caps its logits, Mixtral adds to its loss.
    head = {"stream_head": True}
    mixtral, gemma4, qwen2 = (
        Run(architecture=name, accumulation=2, loss="chunked")
        for name in ("mixtral", "gemma4", "qwen2")
    )
    yield from (Cell(mixtral), Cell(gemma4), Cell(mixtral, "adversarial", head))
    yield Cell(gemma4, "watched", {**head, **OFF})
    yield Cell(gemma4, policy={**head, **SCALED})
    yield Cell(qwen2, "adversarial", {**head, **SCALED})
    yield Cell(Run(dtype=FP32, loss="chunked"), "adversarial", {**head, **embedding})
    yield Cell(replace(AUTOCAST, loss="chunked"), policy=head)
    # The model's own loss, with its head in host memory, whole for as long as it is used.
    yield Cell(Run(), policy=head)


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


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_a_cell_is_exact(
    cell: Cell, residents: Residents, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = residents.trajectory(cell.run)
    with caplog.at_level(logging.WARNING, logger="poros"):
        model, found, streams = run_streamed(cell, residents)
    assert [str(each) for each in compare_trajectories(expected, found)] == []
    assert expected.hash() == found.hash()
    require_streamed(cell, model, streams, [each.getMessage() for each in caplog.records])


RUNS = [of(name, accumulation=2) for name in tiny.ARCHITECTURES]
RUNS += [Run(dropout=0.0), Run(dtype=FP32, accumulation=4), Run(dtype=FP32, dropout=0.0)]


@pytest.mark.cover("values")
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(Cell(run)))
def test_the_grid(
    run: Run,
    way: tuple[str, dict[str, Any]],
    residents: Residents,
    caplog: pytest.LogCaptureFixture,
) -> None:
    test_a_cell_is_exact(Cell(run, *way), residents, caplog)


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
