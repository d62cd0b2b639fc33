"""``plan``: what a training step will need, from a configuration alone."""

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.config import StreamingPolicy, parse_num_bytes
from poros.errors import PolicyError, PorosError, UnsupportedModelError, VRAMBudgetError
from poros.loaders.settings import said
from poros.planning.advice import advice
from poros.planning.cost_model import CostModel, Request
from poros.planning.formula import MemoryPlan, Speeds
from poros.planning.meta_model import Recipe

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig

    from poros.loaders.limits import Limits


def plan(
    source: "str | os.PathLike[str] | PreTrainedConfig | nn.Module",
    *,
    seq_len: int,
    batch_size: int = 1,
    rank: int = 16,
    lora: "PeftConfig | None" = None,
    vram_budget: int | float | str | None = None,
    quantization: str | None = "nf4",
    dtype: torch.dtype = torch.bfloat16,
    limits: "Limits | None" = None,
    block_size: int = 1,
    num_slots: int | None = None,
    keep_last: int | None = None,
    offload_boundaries: bool | None = None,
    self_check: bool = False,
    optimizer: str = "adamw_torch_fused",
    optimizer_num_bytes: int | None = None,
    accumulation: int = 1,
    speeds: Speeds | None = None,
) -> MemoryPlan:
    """Plan a training step: memory term by term, slots and kept layers, bytes moved.

    The model is built without memory and one micro-batch is run on the meta device, so only a
    configuration is needed, a few seconds for 72B, and no GPU. ``Planner`` makes several plans of
    one model.

    Args:
        source: A folder or hub name with a ``config.json``, a configuration, or a transformers or
            PEFT model (then its own adapters and quantization count, not ``rank`` and ``lora``).
        seq_len: Tokens per row; rows are planned full.
        batch_size: Rows per micro-batch.
        rank: Of LoRA on every linear layer of the blocks.
        lora: Other adapters, as given to ``get_peft_model``.
        vram_budget: Bytes, or ``"8GiB"``; None plans two slots and reports what that needs.
        quantization: ``"nf4"``, ``"fp4"``, or None for a dense base.
        dtype: Of everything that is not quantized.
        limits: Bounds on what a ``config.json`` may ask for; None are the defaults.
        block_size: Layers per transfer.
        num_slots: Fixes the slots; None takes what the budget affords.
        keep_last: Fixes the layers that are not recomputed; None likewise.
        offload_boundaries: Whether inputs of recomputed layers wait in host memory; None does so
            only if the budget is too small otherwise.
        self_check: Plan for the first step too, in which every layer is checked.
        optimizer: As in ``TrainingArguments.optim``.
        optimizer_num_bytes: The state of an optimizer that is not known by name.
        accumulation: Micro-batches per optimizer step.
        speeds: For a forecast of the step's time.

    Raises:
        PolicyError: If a number makes no sense.
        UnsupportedModelError: If the model has no decoder layers that can be streamed.
        VRAMBudgetError: If the budget is below the floor; the message holds the terms, and what
            would make it fit.
    """
    planner = Planner(
        source, rank=rank, lora=lora, quantization=quantization, dtype=dtype, limits=limits
    )
    return planner.plan(
        seq_len=seq_len,
        batch_size=batch_size,
        vram_budget=vram_budget,
        block_size=block_size,
        num_slots=num_slots,
        keep_last=keep_last,
        offload_boundaries=offload_boundaries,
        self_check=self_check,
        optimizer=optimizer,
        optimizer_num_bytes=optimizer_num_bytes,
        accumulation=accumulation,
        speeds=speeds,
    )


class Planner:
    """Plans steps of one model. What does not depend on the batch is worked out once.

    Args:
        source: See ``plan``. A model is not kept alive; if its adapters have changed since the last
            plan (others, other dtypes, others trained), the next one starts anew.
        rank: See ``plan``.
        lora: See ``plan``.
        quantization: See ``plan``.
        dtype: See ``plan``.
        limits: See ``plan``.
    """

    def __init__(
        self,
        source: "str | os.PathLike[str] | PreTrainedConfig | nn.Module",
        *,
        rank: int = 16,
        lora: "PeftConfig | None" = None,
        quantization: str | None = "nf4",
        dtype: torch.dtype = torch.bfloat16,
        limits: "Limits | None" = None,
    ) -> None:
        from peft import LoraConfig

        _require_positive(rank=rank)
        self._given: Callable[[], nn.Module | None] = lambda: None
        self._adapters: object = None
        if isinstance(source, nn.Module):
            self._given = weakref.ref(source)
            self._recipe = Recipe.like(source)
            self._adapters = _adapters_of(source)
        else:
            wanted = lora or LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
            self._recipe = Recipe.of(source, quantization, dtype, wanted, limits)
        self._costs: CostModel | None = None

    def plan(
        self,
        *,
        seq_len: int,
        batch_size: int = 1,
        vram_budget: int | float | str | None = None,
        block_size: int = 1,
        num_slots: int | None = None,
        keep_last: int | None = None,
        offload_boundaries: bool | None = None,
        self_check: bool = False,
        optimizer: str = "adamw_torch_fused",
        optimizer_num_bytes: int | None = None,
        accumulation: int = 1,
        speeds: Speeds | None = None,
    ) -> MemoryPlan:
        """Plan a step; see ``poros.plan``. Random states stay as they are.

        May be called within a forward of the model, whatever surrounds it.
        """
        _require_positive(seq_len=seq_len, batch_size=batch_size, accumulation=accumulation)
        # The policy says what is wrong with the others.
        StreamingPolicy(
            block_size=block_size,
            slots=num_slots,
            keep_last=keep_last,
            vram_budget=vram_budget,
        )
        request = Request(
            seq_len=seq_len,
            batch_size=batch_size,
            block_size=block_size,
            num_slots=num_slots,
            keep_last=keep_last,
            offload_boundaries=offload_boundaries,
            self_check=self_check,
            optimizer=optimizer,
            optimizer_num_bytes=optimizer_num_bytes,
            accumulation=accumulation,
            speeds=speeds,
        )
        budget = None if vram_budget is None else parse_num_bytes(vram_budget, "vram_budget")
        text = self._recipe.config.get_text_config(decoder=True)
        limit = getattr(text, "max_position_embeddings", None)
        # A model that is there trains on what it is given.
        if isinstance(limit, int) and seq_len > limit and self._adapters is None:
            raise PolicyError(
                f"seq_len: expected at most the model's {limit} positions, found {seq_len}"
            )
        # In a thread and a context of its own, because a caller may be in the middle of a forward:
        # grad mode, autocast and saved-tensor hooks belong to a thread, what models record to a
        # context.
        with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(Context().run, self._plan, request, budget).result()
            except (PorosError, MemoryError):
                raise
            except Exception as error:
                if self._adapters is not None:
                    raise  # the model is there, and runs
                raise UnsupportedModelError(
                    "expected a configuration whose model can be run, found "
                    f"{said(error)}; check its settings, and the release of transformers"
                ) from error

    def measure(
        self, *, seq_len: int, batch_size: int = 1, device: torch.device | str | None = None
    ) -> Speeds:
        """Measure this machine's rates for the model and a batch, for ``plan(speeds=...)``.

        See ``poros.planning.speeds.measure_speeds``.
        """
        from poros.planning.speeds import measure_speeds

        _require_positive(seq_len=seq_len, batch_size=batch_size)
        with torch.random.fork_rng(devices=[]):
            return measure_speeds(self._cost_model().layers, batch_size * seq_len, device)

    def _plan(self, request: Request, budget: int | None) -> MemoryPlan:
        cost_model = self._cost_model()
        if budget is None:
            return cost_model.plan(request, None)
        try:
            return cost_model.plan(request, budget)
        except VRAMBudgetError as error:
            raise VRAMBudgetError(f"{error}\n{advice(cost_model, request, budget)}") from None

    def _cost_model(self) -> CostModel:
        model = self._given()
        if model is not None:
            adapters = _adapters_of(model)
            if adapters != self._adapters:
                self._adapters, self._costs = adapters, None
                self._recipe = Recipe.like(model)
        if self._costs is None:
            self._costs = CostModel(self._recipe)
        return self._costs


def _require_positive(**values: int) -> None:
    for what, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PolicyError(f"{what}: expected a positive whole number, found {value!r}")


def _adapters_of(model: Any) -> object:
    """Differs when a plan would."""
    trained = {
        name: (each.shape, each.dtype)
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    active = getattr(model, "active_adapters", None)
    return trained, active() if callable(active) else active


def render(plan: MemoryPlan) -> Any:
    """The plan as a table for the terminal."""
    from rich.table import Table

    table = Table(title="memory of a training step", show_header=True)
    table.add_column("term")
    table.add_column("GB", justify="right")
    for name, size in plan.terms.items():
        table.add_row(name, f"{size / 1e9:.3f}")
    table.add_section()
    table.add_row("total on the device", f"{plan.total_num_bytes / 1e9:.3f}")
    table.add_row("host memory", f"{plan.host_num_bytes / 1e9:.3f}")
    table.add_row("moved per micro-batch", f"{plan.bytes_per_step / 1e9:.3f}")
    table.add_section()
    rows: Sequence[tuple[str, str]] = [
        ("slots", f"{plan.num_slots} of {plan.num_blocks} blocks"),
        ("layers kept", str(plan.keep_last)),
        ("boundaries", "in host memory" if plan.offload_boundaries else "on the device"),
        ("adapter parameters", f"{plan.num_adapter_parameters:,}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    if plan.step_ms is not None and plan.speeds is not None:
        table.add_row("copy rate", f"{plan.speeds.copy_gb_per_s:.1f} GB/s")
        table.add_row("rate of products", f"{plan.speeds.tflop_per_s:.1f} TFLOP/s")
        table.add_row("forecast of a micro-batch", f"{plan.step_ms:.0f} ms")
    return table
