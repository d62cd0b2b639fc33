"""DistributedDataParallel over a prepared model: ranks on a CPU, equal to the resident run.

Each rank trains resident and streamed in one process, on data and dropout of its own, from adapters
that only DDP's first broadcast makes equal. A third run without DDP shows that ranks do exchange
gradients. DDP_BACKEND is in the environment if it is not gloo: with nccl each rank has a GPU of its
own. What a cell gives goes to FOLDER/CELL-ARM-RANK.pt.
"""

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.nn.parallel import DistributedDataParallel

import poros
from poros.errors import UnsupportedModelError
from poros.gates import tiny
from tests.comparing import compare_mappings
from tests.exact.programs import trained as named_trained
from tests.loops import ON_HOST, at, slice_resident_loss, trained
from tests.support import make_model, prepare_plain
from tests.trainers import LOG, rows, train_with_trainer, trainer_arguments

NUM_STEPS, NUM_RANKS = 2, 3
UNUSED = "second"

Bits = dict[str, torch.Tensor]

BACKEND = os.environ.get("DDP_BACKEND", "gloo")


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if BACKEND == "nccl" else torch.device("cpu")


@dataclass(frozen=True)
class Cell:
    """How one comparison is run; both arms take the same."""

    accumulation: int = 2
    num_steps: int = NUM_STEPS
    no_sync: bool = False
    autocast: bool = False
    has_unused: bool = False
    trainer: bool = False
    sync_each: bool = False
    """Whether the trainer exchanges gradients for each micro-batch."""
    together: bool = False
    """Whether the streamed arm's micro-batches are grouped."""
    taking: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    """What code of the user does with the loss of each micro-batch."""
    reason: str = ""
    """Why its micro-batches run one after the other, if they are to be grouped."""
    error: str = ""
    """What it raises on all ranks, if it is to."""
    trains_embedding: bool = False
    input_grads: bool = False
    """Whether what goes into the layers requires gradients, as trainers have it."""
    quantize: bool = True
    num_layers: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of DistributedDataParallel."""
    policy: dict[str, Any] = field(default_factory=dict)
    """More of the streaming policy. A resident run has a loss of the same kind."""


def by_grad(model: Any, loss: torch.Tensor) -> torch.Tensor:
    wanted = trained(model)
    found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    return loss * (1 + sum(float(each.abs().sum()) for each in found if each is not None))


def at_the_end(taking: Any) -> Any:
    """For the micro-batch alone with which gradients are exchanged."""

    def take(model: Any, loss: torch.Tensor) -> torch.Tensor:
        is_last = getattr(model, "require_backward_grad_sync", False)
        return taking(model, loss) if is_last else loss

    return take


grouped = partial(Cell, no_sync=True, together=True, accumulation=3)
SMALL_BUCKETS, FIND_UNUSED = {"bucket_cap_mb": 0.02}, {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True, **SMALL_BUCKETS}
CELLS = {
    # No multiple of three ranks: a ring sums equal parts, and their ends have to cut layers.
    "default": Cell(accumulation=1, num_layers=5),
    "no_sync": Cell(no_sync=True, options=SMALL_BUCKETS),
    # Finding unused parameters, DDP sends the logits through a function of its own.
    "unused": Cell(
        has_unused=True, options=FIND_UNUSED, policy={**ON_HOST, "stream_embedding": True}
    ),
    "every_backward": Cell(options=VIEWS),
    "autocast": Cell(autocast=True, quantize=False, options=FIND_UNUSED),
    "static_graph": Cell(accumulation=1, options={"static_graph": True}),
    "together": grouped(num_layers=5, options=SMALL_BUCKETS),
    "together, bucket views": grouped(trains_embedding=True, options=VIEWS),
    "together, inputs that require gradients": grouped(input_grads=True),
    # These run one after the other.
    "together, unused": grouped(
        has_unused=True, options=FIND_UNUSED, reason="find_unused_parameters"
    ),
    "together, trainer": grouped(trainer=True),
    "together, synced": grouped(trainer=True, sync_each=True, reason="exchanged for each"),
    # Gradients that the code of the user takes for itself.
    "taken": grouped(taking=by_grad, reason="takes gradients of single"),
    "taken at the end": grouped(taking=at_the_end(by_grad), error="gradients of single parameters"),
    # On GPUs: visits are replayed within the steps of DDP.
    "replayed": Cell(
        num_steps=8, options=SMALL_BUCKETS, policy={"cuda_graphs": True}, no_sync=True
    ),
}


def build(cell: Cell, rank: int) -> Any:
    """The same base on every rank; adapters that only DDP's first broadcast makes equal."""
    model = make_model(
        "qwen2",
        num_layers=cell.num_layers,
        hidden_size=64,
        dropout=0.05,
        dtype=torch.float32 if cell.autocast else torch.bfloat16,
        quantize=cell.quantize,
    )
    if cell.has_unused:
        with torch.random.fork_rng(devices=[]):
            model.add_adapter(UNUSED, model.peft_config["default"])
        at(lambda module: module.requires_grad_(True), f".{UNUSED}")(model)
    model.get_input_embeddings().weight.requires_grad_(cell.trains_embedding)
    if cell.input_grads:
        model.enable_input_require_grads()
    with torch.no_grad():
        for parameter in named_trained(model).values():
            parameter.add_(0.01 * rank)
    return model


ARMS = ("resident", "streamed")


def loss_of(cell: Cell, model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss / cell.accumulation
    return loss if cell.taking is None else cell.taking(model, loss)


def run_loop(model: Any, cell: Cell, rank: int, is_together: bool) -> Bits:
    """A plain training loop; everything it computes, by name."""
    adapters = named_trained(model)
    ddp = DistributedDataParallel(model, **cell.options)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2)
    device = device_of(rank)
    batches = [
        {key: value.to(device) for key, value in batch.items()}
        for batch in tiny.make_batches(cell.num_steps * cell.accumulation, num_tokens=12, seed=rank)
    ]
    torch.manual_seed(100 + rank)
    ddp.train()
    found: Bits = {}

    def note_gradients(where: str) -> None:
        for name, parameter in adapters.items():
            if parameter.grad is not None:
                found[f"{where}: gradient of {name}"] = parameter.grad.clone()

    last = cell.accumulation - 1
    for step in range(cell.num_steps):
        parts = batches[step * cell.accumulation : (step + 1) * cell.accumulation]
        losses: list[torch.Tensor] = []
        if is_together:
            losses = poros.accumulate(ddp, parts, loss=cell.taking and partial(loss_of, cell))
            parts = []
        for micro, batch in enumerate(parts):
            hold_back = cell.no_sync and micro != last
            with ddp.no_sync() if hold_back else nullcontext():
                with torch.autocast(device.type, torch.bfloat16, enabled=cell.autocast):
                    loss = loss_of(cell, ddp, batch)
                loss.backward()
            losses.append(loss.detach())
            if not cell.together:
                note_gradients(f"step {step}, micro-batch {micro}")
        if cell.together:
            note_gradients(f"step {step}, micro-batch {last}")
        for micro, loss in enumerate(losses):
            found[f"step {step}, micro-batch {micro}: loss"] = loss * cell.accumulation
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in adapters.items():
            found[f"step {step}: weight {name}"] = parameter.detach().clone()
            for key, value in optimizer.state[parameter].items():
                found[f"step {step}: {key} of {name}"] = value.clone()
    is_cuda = device.type == "cuda"
    found["RNG"] = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
    return {name: each.cpu() for name, each in found.items()}


def run_trainer(model: Any, cell: Cell, folder: Path, trainer_class: Any = None) -> Bits:
    """The HF Trainer, which wraps the model by itself."""
    number = 2 * cell.num_steps * cell.accumulation
    arguments = trainer_arguments(
        folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=cell.num_steps,
        gradient_accumulation_steps=cell.accumulation,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False if cell.together else None,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": cell.sync_each}},
    )
    if arguments.world_size != dist.get_world_size():
        raise RuntimeError(f"the Trainer sees {arguments.world_size} ranks")
    given = rows(number * dist.get_world_size(), seed=0)
    trajectory = train_with_trainer(model, arguments, given, trainer_class=trainer_class)
    entries = trajectory.entries()
    # What is logged is a mean over the ranks.
    return {each.name: each.tensor for each in entries if each.quantity != LOG}


def main(folder: Path, cells: list[str], rank: int, world: int) -> None:
    torch.set_num_threads(1)
    # Before there is a process group: in one, transformers saves on the first rank only.
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    models = {(name, arm): build(CELLS[name], rank) for name in cells for arm in ARMS}
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    for (name, arm), model in models.items():
        cell = CELLS[name]
        if arm == "streamed":
            prepare_plain(model, device=str(device), slots=2, **cell.policy)
        else:
            model.to(device)
            if cell.policy.get("loss") == "chunked":
                slice_resident_loss(model)
        if cell.trainer:
            is_together = cell.together and arm == "streamed"
            trainer_class = poros.PorosTrainer if is_together else None
            found = run_trainer(model, cell, folder / arm, trainer_class)
        else:
            run = partial(run_loop, model, cell, rank, cell.together and arm == "streamed")
            if cell.error and arm == "streamed":
                with pytest.raises(UnsupportedModelError, match=cell.error):
                    run()
                continue
            found = run()
        if arm == "streamed":
            runtime = poros.runtime(model)
            if cell.together:
                fallbacks = runtime.stats()["fallbacks"]
                is_grouped = runtime.stats()["num_groups"] == cell.num_steps and not fallbacks
                found_how = name, runtime.stats()["num_groups"], fallbacks
                assert cell.reason in str(fallbacks) if cell.reason else is_grouped, found_how
            found["num_loads"] = torch.tensor(runtime.stats()["num_loads"])
            if cell.policy.get("cuda_graphs"):
                assert runtime.stats()["num_replayed_visits"] > 0
            found["checked"] = torch.tensor(runtime.self_check["status"] in ("passed", "off"))
        torch.save(found, folder / f"{name}-{arm}-{rank}.pt")
    dist.barrier()


def run_rank(folder: Path, cells: list[str], rank: int, world: int) -> None:
    """All that a process of a rank does; it ends in it."""
    gc.freeze()  # the trainers collect garbage, and to look at what is shared is to copy it
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        # Asked for by accelerate, not used: the ranks meet in a file.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ.update(environment)
    os.chdir(folder)
    AcceleratorState._reset_state(reset_partial_state=True)  # of trainers before the fork
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            with redirect_stdout(log), redirect_stderr(log):
                main(folder, cells, rank, world)
                status = 0
        except BaseException:
            traceback.print_exc(file=log)
            status = 1
    # destroy_process_group hangs at times, whatever the model.
    os._exit(status)


TIMEOUT_S = 400


def launch(folder: Path, cells: list[str], world: int) -> None:
    """Run the cells on all ranks; never longer than the timeout.

    Ranks are forks of this process, which has imported everything; CUDA does not survive that.
    """
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    trainer_arguments(folder)  # imports the trainers
    for cell in cells:
        build(CELLS[cell], 0)  # what ranks take copies of
    ranks = [context.Process(target=run_rank, args=(folder, cells, i, world)) for i in range(world)]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + TIMEOUT_S
        for rank in ranks:
            rank.join(max(deadline - time.monotonic(), 0))
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        logs = [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(len(ranks))]
    assert [rank.exitcode for rank in ranks] == [0] * world, "\n---\n".join(logs)


def load(folder: Path, cell: str, arm: str) -> list[Bits]:
    """What each rank has found."""
    return [torch.load(path) for path in sorted(folder.glob(f"{cell}-{arm}-?.pt"))]


def assert_exact(folder: Path, cell: str) -> list[Bits]:
    """Every bit of every rank agrees, and there was something to agree on."""
    resident, streamed = (load(folder, cell, arm) for arm in ARMS)
    for expected, found in zip(resident, streamed, strict=True):
        assert found.pop("checked").item() is True
        # 3 layers, 2 slots: at least the layer that is not held, forward and backward.
        assert found.pop("num_loads").item() >= 2 * NUM_STEPS
        assert [str(each) for each in compare_mappings(expected, found)] == []
        assert all(bool(each.isfinite().all()) for each in found.values())
    one, other = resident[:2]
    # The files of a saved adapter are the first rank's alone.
    for name in one.keys() & other.keys():
        equal = torch.equal(one[name], other[name])
        if "gradient of" in name:
            continue
        if "weight" in name or "exp_avg" in name:
            assert equal, f"{name} differs between the ranks"
        elif "loss" in name or name == "RNG":
            assert not equal, f"{name} is the same on both ranks"
    assert any("exp_avg_sq" in name and bool(each.any()) for name, each in one.items())
    return resident


REST = ("every_backward", "autocast", "static_graph", "together, unused", "together, bucket views")
REST += ("together, inputs that require gradients", "together, synced", "taken")
REFUSED = [name for name, cell in CELLS.items() if cell.error]
TOGETHER = [name for name, cell in CELLS.items() if cell.together and name not in (*REST, *REFUSED)]
"""Grouped; or one after the other, where gradients are taken or exchanged in between."""


@pytest.fixture(scope="module")
def essential(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is not slow, in one start of three ranks: starting costs more than training."""
    folder = tmp_path_factory.mktemp("ddp")
    launch(folder, ["no_sync", "unused", "default", *TOGETHER, *REFUSED], NUM_RANKS)
    return folder


def test_accumulation_with_no_sync_and_small_buckets(essential: Path) -> None:
    resident = assert_exact(essential, "no_sync")
    for step in range(NUM_STEPS):
        for name in resident[0]:
            if name.startswith(f"step {step}, ") and "gradient" in name:
                equal = torch.equal(resident[0][name], resident[1][name])
                # Only the last micro-batch exchanges gradients, of rows that differ by rank.
                assert equal == ("micro-batch 1" in name), name


def test_unused_parameters_are_found(essential: Path) -> None:
    resident = assert_exact(essential, "unused")
    gradients = [name for name in resident[0] if "gradient" in name]
    weights = [name for name in resident[0] if ": weight " in name]
    # The idle adapter is trained by nobody, and is there.
    assert gradients and not any(UNUSED in name for name in gradients)
    assert any(UNUSED in name for name in weights)


@pytest.mark.parametrize("cell", ["default", *TOGETHER])
def test_sums_are_in_the_order_of_a_resident_run(essential: Path, cell: str) -> None:
    """Buckets are filled in the order of arrival, and more than two sum by place in the bucket.

    Of micro-batches that go together there is one exchange of gradients a step.
    """
    assert len(assert_exact(essential, cell)) == NUM_RANKS


@pytest.mark.parametrize("cell", REFUSED)
def test_what_the_last_micro_batch_alone_does_is_refused_on_all_ranks(
    essential: Path, cell: str
) -> None:
    """And no rank waits for another: its start has ended."""
    assert not list(essential.glob(f"{cell}-streamed-*.pt"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    launch(folder, list(REST), 2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("cell", REST)
def test_other_ways_of_running_ddp(rest: Path, cell: str) -> None:
    assert_exact(rest, cell)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_BACKEND", "nccl")
    cells = ["default", "no_sync", "every_backward", "autocast", "replayed", "together"]
    launch(tmp_path, cells, 2)
    for cell in cells:
        assert len(assert_exact(tmp_path, cell)) == 2
