"""Streaming on a GPU, with layers of a real size: over 16 MB of frozen NF4 bytes in each.

Two resident runs on a GPU are equal only if its kernels are deterministic. Attention's fastest ones
are not in backward, so most tests run it as plain matrix products, and one asks torch for
deterministic kernels, whatever it then chooses.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.errors import ParityError
from poros.gates import tiny
from poros.gates.parity import ParityReport, run_parity
from poros.gates.reference import TrainingSpec, start_digests, train
from poros.head.takeover import slice_loss
from poros.slots.ring import SlotState
from tests.comparing import compare_mappings
from tests.gpu.models import requested, write_layers
from tests.held import OutOfOrder
from tests.hostile_streams import COMPUTE_AFTER_COPY, COPY_AFTER_RELEASE, MEGA, HostileStreams
from tests.loops import narrow_slices
from tests.support import prepare_plain

pytestmark = pytest.mark.gpu

# Asked for by deterministic cuBLAS, which reads it once, when it first works.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICE = torch.device("cuda", 0)
NUM_LAYERS = 5
NUM_TOKENS = 64
SPEC = TrainingSpec(num_steps=3, accumulation=2)
BATCHES = tiny.make_batches(SPEC.num_steps * SPEC.accumulation, num_tokens=NUM_TOKENS)

Prepare = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers-over-16-mb")
    return write_layers(folder, NUM_LAYERS, intermediate_size=10240)


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    """Attention as matrix products; afterwards the stream and the memory of before."""
    stream = torch.cuda.current_stream(DEVICE)
    # Workspaces stay allocated from the first product on; memory is compared without them.
    probe = torch.nn.Linear(64, 64, device=DEVICE, dtype=torch.bfloat16)
    probe(torch.ones(64, 64, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
    del probe
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.cuda.synchronize()
    torch.cuda.set_stream(stream)
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Every attention kernel that has a deterministic form is allowed again, in that form."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with sdpa_kernel(backends):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def load(checkpoint: Path, device: str = str(DEVICE)) -> Any:
    base = tiny.load_base(checkpoint, dtype=torch.bfloat16, device=device)
    return tiny.attach(base, rank=16, dropout=0.05)


def hostile(
    slots: int = 2,
    self_check: str = "strict",
    policy: Mapping[str, Any] | None = None,
    **options: Any,
) -> Prepare:
    """A ``prepare`` with hostile streams of these options, and more of the policy."""

    def prepare(model: Any) -> Any:
        streams = HostileStreams(DEVICE, **options)
        chosen = {"slots": slots, "self_check": self_check, "loss": "reference", **(policy or {})}
        given = StreamingPolicy(**chosen)
        prepare_with(model, given, streams=streams)
        return model

    return prepare


def gate(checkpoint: Path, prepare: Prepare, **options: Any) -> ParityReport:
    return run_parity(partial(load, checkpoint), BATCHES, SPEC, prepare, **options)


def check_exact(report: ParityReport, slots: int, is_checked: bool = True) -> None:
    assert report.exact, f"{report.verdict()}\n{report.traceback or ''}"
    num_adapters = 2 * 7 * NUM_LAYERS
    assert report.tallies["gradients"].num_tensors == SPEC.num_steps * num_adapters
    assert report.tallies["RNG end state"].num_tensors == 2  # of the CPU and of the GPU
    # As on a CPU: 2K - S loads in the first forward and backward, 2 (K - S) in each later one.
    warm = SPEC.num_steps * SPEC.accumulation - 1
    loads = 2 * NUM_LAYERS - slots + warm * 2 * (NUM_LAYERS - slots)
    # The check of the first step loads blocks for itself.
    num_loads = report.stats["num_loads"]
    assert num_loads > loads if is_checked else num_loads == loads
    assert report.stats["host_num_bytes"] > 16e6 * NUM_LAYERS
    assert report.stats["pinned_num_bytes"] == report.stats["host_num_bytes"]


@pytest.mark.parametrize("is_poisoning", [False, True], ids=["slow", "slow and poisoned"])
@pytest.mark.parametrize("slots", [2, 3])
def test_parity_with_hostile_streams(checkpoint: Path, slots: int, is_poisoning: bool) -> None:
    check_exact(gate(checkpoint, hostile(slots, is_poisoning=is_poisoning)), slots)
    unchecked = hostile(slots, self_check="off", is_poisoning=is_poisoning)
    check_exact(gate(checkpoint, unchecked), slots, is_checked=False)


HEAD_POLICIES: dict[str, dict[str, Any]] = {
    "resident head": {},
    "head in host memory": {"stream_head": True},
    "embedding too": {"stream_head": True, "stream_embedding": True},
}


@pytest.mark.parametrize("is_poisoning", [False, True], ids=["slow", "slow and poisoned"])
@pytest.mark.parametrize("kind", HEAD_POLICIES)
def test_parity_of_a_loss_in_slices(
    checkpoint: Path, kind: str, is_poisoning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a resident model with the same loss. The vocabulary has six slices."""
    narrow_slices(monkeypatch)
    policy = {"loss": "chunked", **HEAD_POLICIES[kind]}
    undo: dict[int, Callable[[], None]] = {}

    def make() -> Any:
        model = load(checkpoint)
        base = model.get_base_model()
        undo[id(model)] = slice_loss(base, base.get_output_embeddings())
        return model

    def prepare(model: Any) -> Any:
        undo[id(model)]()
        return hostile(policy=policy, is_poisoning=is_poisoning)(model)

    report = run_parity(make, BATCHES, SPEC, prepare)
    assert report.exact, f"{report.verdict()}\n{report.traceback or ''}"
    num_forwards = SPEC.num_steps * SPEC.accumulation
    is_streamed = "stream_head" in policy
    assert report.stats["head_num_bytes"] == num_forwards * 512 * 1024 * 2 * is_streamed
    assert report.stats["fallbacks"] == []


@pytest.mark.parametrize("slots", [2, NUM_LAYERS])
def test_parity_with_deterministic_kernels(checkpoint: Path, slots: int) -> None:
    with deterministic_kernels():
        check_exact(gate(checkpoint, partial(prepare_plain, slots=slots)), slots)


def test_parity_when_each_step_has_a_stream_of_its_own(checkpoint: Path) -> None:
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
    used: list[int] = []

    def switch(*_: Any) -> None:
        following = streams[len(used) % 2]
        following.wait_stream(torch.cuda.current_stream(DEVICE))
        torch.cuda.set_stream(following)
        used.append(following.cuda_stream)

    def prepare(model: Any) -> Any:
        hostile()(model).register_forward_pre_hook(switch)
        return model

    check_exact(gate(checkpoint, prepare), slots=2)
    assert len(used) == SPEC.num_steps * SPEC.accumulation and len(set(used)) == 2


WAITS = (COPY_AFTER_RELEASE, COMPUTE_AFTER_COPY)


def out_of_order(wait: str, self_check: str, streams: OutOfOrder | None = None) -> Prepare:
    """A ``prepare`` without one wait, where that certainly shows (see ``held``)."""

    def prepare(model: Any) -> Any:
        policy = StreamingPolicy(slots=2, self_check=self_check, loss="reference")
        return prepare_with(model, policy, streams=streams or OutOfOrder(DEVICE, wait))

    return prepare


@pytest.mark.parametrize("wait", WAITS)
def test_control_a_wait_left_out(checkpoint: Path, wait: str) -> None:
    """The other waits, which matter only when memory or streams change hands: test_cuda_hazards."""
    report = gate(checkpoint, out_of_order(wait, "off"), repeat_resident=False)
    assert not report.exact and report.error is None, report.verdict()
    assert report.tallies["loss"].num_differing_elements > 0


@pytest.mark.parametrize("wait", WAITS)
def test_the_self_check_sees_a_wait_left_out(checkpoint: Path, wait: str) -> None:
    streams = OutOfOrder(DEVICE, wait)
    model = out_of_order(wait, "strict", streams)(load(checkpoint))
    adapters = start_digests(model)
    try:
        with pytest.raises(ParityError, match="self-check failed in"):
            train(model, BATCHES, SPEC)
    finally:
        streams.release()  # the error may come before the layer that would have
    assert poros.runtime(model).self_check["status"] == "failed"
    assert start_digests(model) == adapters, "nothing was trained"


def answers(model: Any) -> dict[str, torch.Tensor]:
    """Logits of a whole row, and tokens and logits of a greedy continuation."""
    model.eval()
    row = {name: tensor[:1].to(DEVICE) for name, tensor in BATCHES[0].items()}
    with torch.no_grad():
        logits = model(**row).logits
        del row["labels"]
        found = model.generate(
            **row,
            do_sample=False,
            max_new_tokens=6,
            min_new_tokens=6,
            return_dict_in_generate=True,
            output_logits=True,
        )
    steps = {f"logits {index}": each for index, each in enumerate(found.logits)}
    assert len(steps) == 6
    return {"logits": logits, "tokens": found.sequences, **steps}


@pytest.mark.parametrize("origin", ["cpu", str(DEVICE)])
def test_prepare_moves_the_base_to_the_host_and_restore_back(checkpoint: Path, origin: str) -> None:
    base = requested()
    model = load(checkpoint, origin)
    before = start_digests(model)
    resident = requested() - base
    prepare_plain(model, device=str(DEVICE), slots=2)
    stats = poros.runtime(model).stats()
    frozen, slots = stats["host_num_bytes"], stats["device_num_bytes"]
    tensors = [*model.parameters(), *model.buffers()]
    staying = sum(each.numel() * each.element_size() for each in tensors if each.is_cuda)
    found = requested() - base
    assert abs(found - (staying + slots)) < 0.02 * frozen
    if origin != "cpu":
        assert abs((resident - found) - (frozen - slots)) < 0.02 * frozen
    streamed = answers(model)
    poros.restore(model)
    assert abs(requested() - base - resident) < 0.02 * frozen
    assert {str(each.device) for each in (*model.parameters(), *model.buffers())} == {origin}
    assert start_digests(model) == before
    assert compare_mappings(streamed, answers(model.to(DEVICE))) == []


def test_a_model_may_go_with_copies_in_flight(checkpoint: Path) -> None:
    # With three slots the last visit of a pass prefetches for the next one.
    model = hostile(slots=3, copy_cycles=100 * MEGA, always=True)(load(checkpoint))
    row = {name: tensor.to(DEVICE) for name, tensor in BATCHES[0].items()}
    with torch.no_grad():
        model.eval()(**row)
    slots = poros.runtime(model).ring.slots
    assert any(slot.state is SlotState.LOADING for slot in slots)
    sizes = [slot.buffer.numel() for slot in slots]
    del model, slots
    gc.collect()
    fresh = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in sizes * 2]
    torch.cuda.synchronize()
    assert not any(bool(each.any()) for each in fresh)
    del fresh
    check_exact(gate(checkpoint, hostile()), slots=2)
