"""Training programs by their axes: kinds of adapters, optimizers, grouping, recording, residency.

One program with all that comes between steps. On a CPU programs of the fuzzer's language show the
same: ``tests/exact/test_written_programs``.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import nn

import poros
from poros.errors import PorosError
from tests.covers import cover
from tests.exact.arms import Bases
from tests.support import same_bits

Model = Any
Facts = dict[str, torch.Tensor]
NUM_STEPS = 5
NUM_LAYERS = 3
GROUP = 2


class Cell(NamedTuple):
    """One value of each axis."""

    adapter: str
    optimizer: str
    is_grouped: bool
    is_recorded: bool
    is_kept: bool
    exchange: str
    is_autocast: bool

    def name(self) -> str:
        flags = {
            "grouped": self.is_grouped,
            "recorded": self.is_recorded,
            "kept": self.is_kept,
            "autocast": self.is_autocast,
        }
        return ", ".join([self.adapter, self.optimizer, self.exchange, *filter(flags.get, flags)])


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    lr = 0.01
    if name == "8-bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=lr, min_8bit_size=256)  # type: ignore[no-any-return]
    if name == "Lion":
        from bitsandbytes.optim import Lion

        return Lion(parameters, lr=lr)  # type: ignore[no-any-return]
    if name == "schedule-free":
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree(parameters, lr=lr)  # type: ignore[no-any-return]
    if name == "SGD fused":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
    fused = name == "AdamW fused"
    return torch.optim.AdamW(parameters, lr=lr, fused=fused, foreach=not fused)


ADAPTERS = ("LoRA", "DoRA", "LoRA-FA", "second frozen")
OPTIMIZERS = ("AdamW fused", "AdamW for-each", "8-bit", "Lion", "schedule-free", "SGD fused")


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


# How a checkpoint is loaded, or frozen tensors are exchanged, between two steps.


def load(model: Model, state: Facts) -> None:
    model.load_state_dict(state, strict=False)


def load_assign(model: Model, state: Facts) -> None:
    model.load_state_dict({name: _copied(each) for name, each in state.items()}, False, assign=True)


def load_by_peft(model: Model, state: Facts) -> None:
    for name in model.peft_config:
        own = {
            key.replace(f".{name}.", ".").removesuffix(f".{name}"): _copied(each)
            for key, each in state.items()
            if f".{name}" in key
        }
        if own:
            set_peft_model_state_dict(model, own, adapter_name=name, low_cpu_mem_usage=True)


def load_data(model: Model, state: Facts) -> None:
    for name, each in model.named_parameters():
        if name in state:
            each.data = _copied(state[name])


def load_in_place(model: Model, state: Facts) -> None:
    for name, each in model.named_parameters():
        if name in state:
            each.data.copy_(state[name])


def cast(model: Model, state: Facts) -> None:
    """To another dtype, values of the checkpoint."""
    for name, each in model.named_parameters():
        if name in state:
            other = torch.bfloat16 if each.dtype == torch.float32 else torch.float32
            each.data = state[name].to(other)


EXCHANGES: dict[str, Callable[[Model, Facts], None]] = {
    "load": load,
    "assign": load_assign,
    "set_peft_model_state_dict": load_by_peft,
    "data": load_data,
    "in place": load_in_place,
    "cast": cast,
}


def with_two(use_dora: bool, bases: Bases, device: str) -> Model:
    """With two adapters that are not zero."""
    base = bases.base("qwen2", num_layers=NUM_LAYERS, dropout=0.05, device=device)
    options = {"use_dora": use_dora, "lora_dropout": 0.05}
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = get_peft_model(base, config)
    second = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model.add_adapter("second", second)
    generator = torch.Generator().manual_seed(1)
    for name, each in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            each.data.copy_(0.1 * torch.randn(each.shape, generator=generator))
    return model.to(device)


class Program:
    """A model of one cell, and its training."""

    def __init__(self, cell: Cell, bases: Bases, device: str) -> None:
        self.cell = cell
        self.device = device
        make = partial(with_two, cell.adapter == "DoRA", bases, device)
        key = f"axes {cell.adapter == 'DoRA'}"
        # Memory of a GPU is measured.
        self.model: Model = bases.once(key, make) if device == "cpu" else make()
        self.activate()
        self.model.train()

    def activate(self) -> None:
        """The adapters of the cell, and what of them is frozen."""
        both = ["default", "second"] if self.cell.adapter == "second frozen" else ["default"]
        self.model.base_model.set_adapter(both)
        for name, each in self.model.named_parameters():
            is_of_second = ".second." in name or name.endswith(".second")
            is_frozen = is_of_second or (self.cell.adapter == "LoRA-FA" and "lora_A" in name)
            if "lora_" in name:
                each.requires_grad_(not is_frozen)

    def frozen(self) -> list[tuple[str, nn.Parameter]]:
        """Of the adapters that act."""
        acting = (".default", ".second") if self.cell.adapter == "second frozen" else (".default",)
        return [
            (name, each)
            for name, each in self.model.named_parameters()
            if "lora_" in name and not each.requires_grad and any(one in name for one in acting)
        ]

    def trained(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def step(self, batches: Sequence[dict[str, torch.Tensor]], together: bool) -> Iterator[Any]:
        """The losses of one step; gradients are left in ``.grad``."""

        def loss_of(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.cell.is_autocast):
                loss: torch.Tensor = model(**batch, use_cache=False).loss
            return loss / len(batches)

        if together:
            yield from poros.accumulate(self.model, batches, loss=loss_of)
            return
        for batch in batches:
            loss = loss_of(self.model, batch)
            loss.backward()
            yield loss.detach()

    def run(self, together: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """All that training computes, in order."""
        cell, model = self.cell, self.model
        torch.manual_seed(5)
        optimizer: Any = optimizer_of(cell.optimizer, self.trained())
        has_modes = hasattr(optimizer, "train")
        generator = torch.Generator().manual_seed(2)
        checkpoint: Facts = {}
        for number in range(NUM_STEPS):
            if has_modes:
                optimizer.train()
            drawn = [torch.randint(0, 100, (2, 12), generator=generator) for _ in range(GROUP)]
            batches = [{"input_ids": each.to(self.device)} for each in drawn]
            for batch in batches:
                batch["labels"] = batch["input_ids"]
            for place, loss in enumerate(self.step(batches, together)):
                yield f"step {number}: loss {place}", loss
            for name, each in model.named_parameters():
                if each.grad is not None:
                    yield f"step {number}: gradient of {name}", each.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            if has_modes:
                optimizer.eval()
            if number == 1:
                checkpoint = {
                    name: _copied(each)
                    for name, each in model.named_parameters()
                    if "lora_" in name and (each.requires_grad or "default" in name)
                }
                generator_of = torch.Generator().manual_seed(3)
                checkpoint |= {
                    name: _copied(each)
                    + (0.1 * torch.randn(each.shape, generator=generator_of)).to(each)
                    for name, each in self.frozen()
                }
            if number == 2:
                model.eval()
                with torch.no_grad():
                    yield "evaluation", model(**batches[0]).logits
                model.train()
                frozen = {name for name, _ in self.frozen()}
                others = {name: each for name, each in checkpoint.items() if name not in frozen}
                load_in_place(model, others)
                exchanged = {n: each for n, each in checkpoint.items() if n in frozen} or others
                if cell.exchange in ("assign", "cast") and not frozen:
                    load(model, exchanged)
                else:
                    EXCHANGES[cell.exchange](model, exchanged)
            if number == 3:
                model.set_adapter("second")
                with torch.no_grad():
                    yield "of the second", model(**batches[1]).logits
                self.activate()
        for name, each in model.named_parameters():
            if "lora_" in name:
                yield f"end: {name}", each.detach()
                for key, value in optimizer.state.get(each, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"end: {key} of {name}", value
        yield "end: random state", torch.get_rng_state()
        if self.device == "cuda":
            yield "end: random state of the device", torch.cuda.get_rng_state()


def resident(cell: Cell, bases: Bases, device: str) -> Facts:
    """What the cell computes with the whole model on the device, one after the other."""
    program = Program(cell, bases, device)
    poros.use_adapter_kernels(program.model)
    return recorded_facts(program, together=False)


def recorded_facts(program: Program, together: bool) -> Facts:
    """Copies of all that it computes. An error of a library is the last of it."""
    facts: Facts = {}
    try:
        for name, each in program.run(together):
            facts[name] = each.cpu().clone()
    except PorosError:
        raise
    except Exception as error:  # such as of adapters in two dtypes: both arms have to end in it
        facts[f"error: {type(error).__name__}"] = torch.zeros(())
    return facts


def prepared(program: Program, self_check: str = "strict") -> Model:
    """Its model, prepared as the cell has it."""
    cell, device = program.cell, program.device
    policy = poros.StreamingPolicy(
        loss="reference",
        device=device,
        slots=2,
        keep_last=NUM_LAYERS if cell.is_kept else 0,
        cuda_graphs=None if cell.is_recorded else False,
        self_check=self_check,
    )
    return poros.prepare(program.model, policy)


def streamed(cell: Cell, bases: Bases, device: str) -> tuple[Facts, Model]:
    """The same as ``resident``, prepared as the cell has it."""
    program = Program(cell, bases, device)
    model = prepared(program)
    return recorded_facts(program, together=cell.is_grouped), model


def difference(cell: Cell, bases: Bases, device: str, known: dict[Cell, Facts]) -> str | None:
    """The first fact in which a prepared run differs from the resident one; None if none does.

    Args:
        cell: Which run.
        bases: Makes the models.
        device: "cpu" or "cuda".
        known: Resident runs, by what decides them; added to.

    Returns:
        Or what an error of Poros says.
    """
    same = cell._replace(is_grouped=False, is_recorded=False, is_kept=False)
    if same not in known:
        known[same] = resident(same, bases, device)
    expected = known[same]
    try:
        found, model = streamed(cell, bases, device)
    except PorosError as error:
        return f"refused: {type(error).__name__}: {error}"
    if list(found) != list(expected):
        return f"ended after {list(found)[-1]}, the resident run after {list(expected)[-1]}"
    stats = poros.runtime(model).stats()
    if cell.is_recorded and not (cell.is_kept and cell.is_autocast):  # which shares casts
        assert stats["num_replayed_visits"] > 0, stats
    if cell.is_grouped:
        assert stats["num_groups"] > 0, stats["fallbacks"]
    return next((name for name in expected if not same_bits(found[name], expected[name])), None)


def is_installed(optimizer: str) -> bool:
    package = {"8-bit": "bitsandbytes", "Lion": "bitsandbytes", "schedule-free": "schedulefree"}
    return importlib.util.find_spec(package.get(optimizer, "torch")) is not None


def all_cells() -> list[Cell]:
    optimizers = [each for each in OPTIMIZERS if is_installed(each)]
    flags = (False, True)
    axes = (ADAPTERS, optimizers, flags, flags, flags, tuple(EXCHANGES), flags)
    return [Cell(*values) for values in product(*axes)]


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Few of them in which each pair of values of two axes comes that comes in ``cells``."""
    return [cells[place] for place in sorted(cover(cells, 2))]
