"""Steps of small models on a GPU, streamed in every way: losses, gradients and adapters to the bit.

Visits are replayed as CUDA graphs or not, layers keep their graph, and micro-batches go through the
blocks together or one after the other. A resident model trains once for each kind of model and run.
"""

import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.gates import tiny
from poros.kernels import dense_memory
from poros.replay.graphs import CudaRecorder
from tests.comparing import compare_trajectories
from tests.gpu.models import BF16, Model, model_of, same_runs, train, trained
from tests.support import leaves_keys_always, prepare_plain, same_bits
from tests.trainers import FULL, NUM_LAYERS, RESUME_AT, Arms, check_not_vacuous, logged

pytestmark = pytest.mark.gpu

FP32 = torch.float32
Options = dict[str, Any]


class Cell(NamedTuple):
    """What is compared.

    Args:
        model: Options of ``model_of``.
        steps: Options of ``train``.
        policy: Beside two slots, no kept layers and the model's own loss.
        resident: Kernels of the resident model; None: PEFT's own modules.
        replays: Whether visits are replayed, and None if either will do.
        is_joined: Whether visits of micro-batches have to be replayed in one go.
    """

    model: Options
    steps: Options
    policy: Options
    resident: str | None = None
    replays: bool | None = True
    is_joined: bool = False


Resident = dict[str, list[torch.Tensor]]
OTHERS = ("olmo2", "granite", "starcoder2", "stablelm")
ALONE = ("gemma4_shared_kv", "mixtral", "qwen3_moe")
"""Their layers hand on more than hidden states, so micro-batches run one after the other."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GRAPHS = {"cuda_graphs": True}
FOUR: Options = {"size": 4}
TOGETHER: Options = {"size": 4, "together": True}
DTYPES, DROPOUT, BOTH = (BF16, FP32), (0.0, 0.05), (False, True)
WAYS: list[tuple[Options, Options]] = [
    (FOUR, {}),
    (FOUR, {"block_size": 2, "offload_boundaries": True}),
    (FOUR, {"slots": 4, "keep_last": 3}),
    (TOGETHER, {}),
    (TOGETHER, {"slots": 4, "keep_last": 2, "share_dense": True}),
]


def evaluate(model: Model, number: int) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8, device="cuda")[None])
    model.train()


def swap(model: Model, number: int) -> None:
    if number == 5:
        for each in trained(model):
            each.data = each.data * 1.5


def assign(model: Model, number: int) -> None:
    """Other parameters in the place of those that recordings read."""
    if number == 5:
        trained_now = {n: each for n, each in model.named_parameters() if each.requires_grad}
        state = {name: each.detach() * 1.5 for name, each in trained_now.items()}
        model.load_state_dict(state, strict=False, assign=True)


def swap_frozen(model: Model, number: int) -> None:
    """As LoRA-FA has one factor."""
    for name, each in model.named_parameters():
        if "lora_A" in name:
            each.requires_grad_(False)
            if number == 5:
                each.data = each.data * 1.5


def use_second(model: Model, number: int) -> None:
    """Another adapter for some steps, then the first again."""
    if number == 5:
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model.add_adapter("second", config)
        model.set_adapter("second")
    if number == 7:
        model.set_adapter("default")


EXCHANGES = (evaluate, swap, assign, swap_frozen, use_second)


def of(architecture: str) -> Options:
    # PEFT has no dropout for adapters of fused experts.
    dropout = 0.0 if architecture in ("mixtral", "qwen3_moe") else 0.05
    return {"architecture": architecture, "dropout": dropout}


CELLS = [
    # Replayed, one micro-batch after the other.
    *(
        Cell({"dtype": dtype, "dropout": dropout}, {"autocast": autocast, "size": size}, GRAPHS)
        for dtype, dropout, autocast, size in product(DTYPES, DROPOUT, BOTH, (1, 2))
    ),
    *(
        Cell({"architecture": name}, {}, GRAPHS)
        for name in ("llama", "mistral", "gemma3", "gemma4", "phi3", "qwen3")
    ),
    # Shared keys and values, routed experts: what cannot be replayed runs, to the same bits.
    *(
        Cell({"architecture": name, "target_modules": ATTENTION}, {}, GRAPHS, replays=None)
        for name in ALONE
    ),
    *(
        Cell({}, {}, {**GRAPHS, **policy})
        for policy in (
            {"slots": 4},
            {"block_size": 2},
            {"offload_boundaries": True},
            {"adapter_kernels": "peft"},
        )
    ),
    *(Cell({}, {"between": each, "num_steps": 12}, GRAPHS) for each in EXCHANGES),
    Cell({"use_dora": True}, {}, GRAPHS, "fused"),
    # Layers that keep their graph.
    *(
        Cell(
            {"dtype": dtype, **options},
            {"num_steps": 10, "size": size},
            {**GRAPHS, "slots": 4, "keep_last": keep_last},
            "fused" if "use_dora" in options else None,
        )
        for options, keep_last, dtype, size in product(
            ({"dropout": 0.0}, {"dropout": 0.05}, {"use_dora": True}), (2, 4), DTYPES, (1, 2)
        )
    ),
    # Promised architectures and some others in five ways.
    *(
        Cell(of(name), steps, policy, replays=None)
        for name, (steps, policy) in product((*tiny.ARCHITECTURES, *OTHERS), WAYS)
    ),
    # Micro-batches together.
    *(
        Cell({"dtype": dtype, "dropout": dropout}, TOGETHER, {"cuda_graphs": graphs}, None, graphs)
        for dtype, dropout, graphs in product(DTYPES, DROPOUT, BOTH)
    ),
    *(
        Cell({}, TOGETHER, policy, replays=None)
        for policy in (
            {"slots": 4},
            {"slots": 4, "keep_last": 2},
            {"slots": 4, "keep_last": 4},
            {"block_size": 2},
            {"offload_boundaries": True},
            {"adapter_kernels": "peft"},
        )
    ),
    Cell({"dtype": FP32}, {**TOGETHER, "autocast": True, "size": 8}, {}, replays=None),
    *(
        Cell(
            {"dtype": dtype, "dropout": 0.0},
            {**TOGETHER, "lengths": (64,), "num_steps": 10, "autocast": dtype is BF16},
            {"adapter_kernels": kernels, **GRAPHS, **policy},
            kernels if kernels == "grouped" else None,
            is_joined=True,
        )
        for kernels, dtype, policy in (
            ("grouped", BF16, {}),
            ("grouped", FP32, {"slots": 4, "keep_last": 1}),
            ("exact", BF16, {"share_dense": True}),
        )
    ),
    *(
        # Adapters in float32 are grouped where they multiply in the dtype of the base.
        Cell(
            {"dtype": dtype, "dropout": 0.0},
            {**TOGETHER, "autocast": dtype is BF16},
            {"adapter_kernels": "grouped", **policy},
            "grouped",
        )
        for policy, dtype in product(
            ({}, {"slots": 4, "keep_last": 4}, {"offload_boundaries": True}), DTYPES
        )
    ),
]


@pytest.fixture(scope="module")
def residents() -> Resident:
    return {}


def streamed(folder: Path, residents: Resident, cell: Cell) -> dict[str, Any]:
    """Train both; returns the statistics of the streamed one."""
    alone = {**cell.steps, "together": False}
    name = str((cell.model, alone, cell.resident))
    if name not in residents:
        model = model_of(folder, **cell.model)
        if cell.resident is not None:
            poros.use_adapter_kernels(model, cell.resident)
        residents[name] = train(model, **alone)
    model = model_of(folder, **cell.model)
    poros.prepare(model, **{"slots": 2, "keep_last": 0, "loss": "reference", **cell.policy})
    assert same_runs(train(model, **cell.steps), residents[name])
    runtime = poros.runtime(model)
    stats = runtime.stats()
    eager = dict(runtime.context.captures.eager) if runtime.context.captures else {}
    print({key: stats[key] for key in ("num_groups", "num_replayed_visits", "fallbacks")}, eager)
    assert runtime.self_check["status"] in ("passed", "off") or "architecture" in cell.model
    assert cell.replays is None or (stats["num_replayed_visits"] > 0) == cell.replays
    if cell.replays:
        assert "other bits" not in str(eager)
    if cell.policy.get("cuda_graphs"):
        assert stats["num_replayed_visits"] or eager
    if cell.is_joined:
        assert stats["num_joined_visits"] > 0
    architecture = cell.model.get("architecture")
    is_alone = architecture in ALONE or (architecture == "gemma4" and leaves_keys_always())
    if cell.resident == "grouped":
        assert stats["num_grouped_adapters"] > 0
    goes_together = cell.steps.get("together", False) and not is_alone
    assert (stats["num_groups"] > 0) == goes_together
    if goes_together and "architecture" not in cell.model:
        assert stats["num_groups"] == cell.steps.get("num_steps", 8)
        assert not [line for line in stats["fallbacks"] if line.startswith("micro-batches")]
    return stats


def name(cell: Cell) -> str:
    return re.sub(r"<function (\w+) at \w+>", r"\1", str(tuple(cell)))


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_equals_resident(
    cell: Cell, residents: Resident, tmp_path_factory: pytest.TempPathFactory
) -> None:
    streamed(tmp_path_factory.getbasetemp(), residents, cell)


def test_micro_batches_do_not_wait_for_the_gpu(tmp_path: Path) -> None:
    """Unless they have masks: models of transformers ask the GPU whether these hide anything."""
    model = poros.prepare(model_of(tmp_path, dropout=0.0), self_check="off", slots=2)
    tokens = torch.randint(0, 100, (4, 2, 96)).cuda()
    plain = [{"input_ids": each, "labels": each, "use_cache": False} for each in tokens]
    masked = [{**each, "attention_mask": torch.ones_like(each["input_ids"])} for each in plain]
    for _ in range(12):  # until all visits are recorded, alone and in rows
        poros.accumulate(model, plain)
    torch.cuda.set_sync_debug_mode("error")
    try:
        poros.accumulate(model, plain)
        with pytest.raises(RuntimeError, match="synchronizing"):
            poros.accumulate(model, masked)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_slices_of_the_head(tmp_path: Path) -> None:
    policy: Options = {"slots": 2, "keep_last": 0, "stream_head": True, "stream_embedding": True}
    models = [poros.prepare(model_of(tmp_path), **policy) for _ in range(2)]
    assert same_runs(train(models[0], **TOGETHER), train(models[1], **FOUR))
    assert poros.runtime(models[0]).stats()["num_groups"] == 8


@pytest.mark.parametrize("adapters", ["fused", "exact"])
@pytest.mark.parametrize("keep_last", [0, 4])
def test_shared_dense_weights(
    keep_last: int,
    adapters: str,
    residents: Resident,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each weight is made dense once a pass and group, also by visits that are replayed."""
    num_fills = 0
    genuine, record = dense_memory.dequantize_into, dense_memory.DenseLayer.record

    def counted(*args: Any) -> None:
        nonlocal num_fills
        num_fills += 1
        genuine(*args)

    def recorded(self: Any, layer: int, weights: Any, make: Any) -> None:
        def made(run: Any) -> Any:
            nonlocal num_fills
            before, replay = num_fills, make(run)
            num_fills = before

            def replayed() -> None:
                nonlocal num_fills
                num_fills += len(weights)
                replay()

            return replayed

        record(self, layer, weights, made)

    monkeypatch.setattr(dense_memory, "dequantize_into", counted)
    monkeypatch.setattr(dense_memory.DenseLayer, "record", recorded)
    policy = {"slots": 4, "keep_last": keep_last, "adapter_kernels": adapters}
    streamed(tmp_path, residents, Cell({}, TOGETHER, {**policy, "share_dense": True}))
    # Seven matrices. The first group's forwards are discarded where dropout was not known yet, and
    # it may run one after the other then. Four micro-batches, each for itself, would make four
    # times as many.
    per_layer, rest = divmod(num_fills, 7)
    once = 2 * 4 - 1  # four layers, the last one's are there at the turn
    assert rest == 0 and 7 * once <= per_layer < 2 * 8 * once
    before = num_fills
    streamed(tmp_path, residents, Cell({}, TOGETHER, {**policy, "share_dense": False}, None, None))
    assert num_fills == before


TRAINERS: dict[str, tuple[Options, Options]] = {
    "streamed": ({"slots": 2}, {}),
    "in TF32": ({"slots": 2}, {"tf32": True}),
    "replayed": ({"slots": NUM_LAYERS, "keep_last": 0, **GRAPHS}, {}),
    "all kept": ({"slots": NUM_LAYERS, "keep_last": NUM_LAYERS, **GRAPHS}, {}),
    "together": ({"slots": 2}, {"gradient_accumulation_steps": 4}),
}


@pytest.fixture
def settings() -> Iterator[None]:
    """Attention that repeats itself; what TrainingArguments(tf32=True) sets is put back."""
    before = torch.backends.fp32_precision
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.fp32_precision = before


@pytest.mark.parametrize("how", TRAINERS)
def test_a_trainer_that_evaluates_and_resumes(how: str, tmp_path: Path, settings: None) -> None:
    """Against the same Trainer, resident."""
    policy, options = TRAINERS[how]
    options = {**FULL, **options}
    prepare = partial(prepare_plain, **policy)
    arms = Arms(tmp_path, FP32, "cuda")
    expected = arms.run("resident", **options)
    if how != "together":  # of the usual number of micro-batches
        check_not_vacuous(expected)
    kind = {"trainer_class": poros.PorosTrainer} if how == "together" else {}
    assert compare_trajectories(expected, arms.run("streamed", prepare, **kind, **options)) == []
    stats = [poros.runtime(arms.model).stats()]
    if how == "together":
        assert stats[0]["num_groups"] > 0
        return
    resumed = arms.run("resumed", prepare, arms.checkpoint("streamed", RESUME_AT), **options)
    assert logged(resumed).items() < logged(expected).items()
    for name, weight in expected.steps[-1].weights.items():
        assert same_bits(weight, resumed.steps[-1].weights[name]), name
    stats.append(poros.runtime(arms.model).stats())
    assert "cuda_graphs" not in policy or all(each["num_replayed_visits"] > 0 for each in stats)


@pytest.mark.parametrize("is_held", [True, False])
def test_what_a_recording_holds_stays_while_earlier_ones_are_replayed(is_held: bool) -> None:
    """Its control: memory that it shares with theirs is overwritten."""
    device = torch.device("cuda")
    recorder = CudaRecorder(device)
    source, result = torch.ones(2**20, device=device), torch.empty(2**20, device=device)
    held: list[torch.Tensor] = []
    earlier = recorder.record(lambda: torch.add(source.mul(7), 1, out=result))
    holding = recorder.record(lambda: held.append(source.mul(3)), is_held=is_held)
    holding.replay()
    earlier.replay()
    assert bool((held[0] == 3).all()) == is_held
