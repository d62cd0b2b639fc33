"""``plan``: plans a training step from a configuration alone."""

import os
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from poros.errors import (
    PolicyError,
    PorosError,
    UnsupportedModelError,
    VRAMBudgetError,
    quoted,
)
from poros.kernels.packed_attention import attention_of, takes_cu_seqlens
from poros.loaders.settings import describe_error
from poros.model.sizing import SURELY_KEPT, keeps_most, share_kept
from poros.model.vision import base_of
from poros.planning.cost_model import CostModel
from poros.planning.formula import MemoryPlan
from poros.planning.meta_model import Recipe
from poros.planning.request import PlanRequest
from poros.utils.formatting import size

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig

_Result = TypeVar("_Result")

LEAST_TOKENS = 64
"""The shortest rows that are advised; shorter ones are of no use in training."""


class Remedy(NamedTuple):
    """A field of a request or its policy, with a value that needs less memory."""

    knob: str
    value: int | bool
    saved_num_bytes: int
    """Memory that the change saves."""
    fits: bool


def plan(
    source: "str | os.PathLike[str] | PreTrainedConfig | nn.Module",
    *,
    seq_len: int,
    batch_size: int = 1,
    rank: int = 16,
    lora: "PeftConfig | None" = None,
    quantization: str | None = "nf4",
    dtype: torch.dtype = torch.bfloat16,
    adapter_dtype: torch.dtype | None = None,
    vision: str = "keep",
    accumulation: int = 1,
    micro_batches: int = 1,
    **others: Any,
) -> MemoryPlan:
    """Plan a training step: memory term by term, slots and kept layers, bytes moved.

    Poros builds the model on the meta device, without memory, and runs one micro-batch there. It
    needs only a configuration and no GPU, and takes a few seconds for 72B. ``Planner`` makes
    several plans of one model.

    Args:
        source: A folder or hub name with a ``config.json``, a configuration (one whose
            ``architectures`` name a classifier is planned as such), or a transformers or PEFT
            model (whose own adapters and quantization replace ``rank`` and ``lora``).
        seq_len: Tokens per row; the plan assumes full rows.
        batch_size: Rows per micro-batch.
        rank: LoRA rank on every linear layer of the language model except routers.
        lora: Other adapters, as passed to ``get_peft_model``.
        quantization: ``"nf4"``, ``"fp4"``, or None for a dense base.
        dtype: Dtype of the tensors that are not quantized.
        vision: As in ``poros.load``: whether to count towers for images and sound.
        adapter_dtype: Dtype of the adapters; None is PEFT's choice, float32. A model has its own.
        accumulation: Micro-batches per optimizer step.
        micro_batches: Number of these that go through the blocks together.
        **others: Fields of ``StreamingPolicy``, such as ``vram_budget``, with ``slots`` as
            ``num_slots``; or a whole ``policy``. Further fields of
            ``poros.planning.request.PlanRequest``, which documents each: ``self_check`` (True plans
            for the first step too), ``optimizer``, ``optimizer_num_bytes``,
            ``library_num_bytes``, ``speeds``.

    Raises:
        PolicyError: If a value is invalid or a field is unknown.
        UnsupportedModelError: If the model has no decoder layers that can be streamed.
        VRAMBudgetError: If the budget is below the floor; the message lists the terms and what
            would make it fit.
    """
    planner = Planner(
        source,
        rank=rank,
        lora=lora,
        quantization=quantization,
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        vision=vision,
    )
    request = PlanRequest.of(
        seq_len=seq_len,
        batch_size=batch_size,
        accumulation=accumulation,
        micro_batches=micro_batches,
        **others,
    )
    return planner.plan(request)


class Planner:
    """Plans steps of one model. Results that do not depend on the batch are computed once.

    Args:
        source: As for ``plan``. A model is not kept alive; if its adapters have changed since the
            last plan (others, other dtypes, others trained), they are computed again.
        **of_model: ``rank``, ``lora``, ``quantization``, ``dtype``, ``adapter_dtype`` and
            ``vision`` of ``plan``; of a model ``counts_all`` of ``Recipe``.
    """

    def __init__(
        self,
        source: "str | os.PathLike[str] | PreTrainedConfig | nn.Module",
        **of_model: Any,
    ) -> None:
        self._given: Callable[[], nn.Module | None] = lambda: None
        self._adapters: object = None
        if isinstance(source, nn.Module):
            self._given = weakref.ref(source)
            self._recipe = Recipe.like(source, of_model.get("counts_all", False))
            self._adapters = _adapters_of(source)
        else:
            self._recipe = Recipe.of(source, **of_model)
        self._known: CostModel | None = None

    def for_model(self, model: nn.Module, **of_model: Any) -> "Planner":
        """Return a planner of the model in memory that this one's configuration has become.

        What is known of that is kept, if the model is as it was planned: with the same modules,
        attention, kernels of Liger and parameters, in shape and dtype, trained or not.
        """
        found = Planner(model, **of_model)
        is_same = self._recipe.has_liger == found._recipe.has_liger
        if is_same and self._known is not None and _form_of(self._known.model) == _form_of(model):
            found._known = self._known
        return found

    def plan(self, request: PlanRequest) -> MemoryPlan:
        """Plan a step; the errors are those of ``plan``. Random states stay as they are.

        May be called within a forward of the model, whatever surrounds it.
        """
        return self._apart(lambda request: self._quickest(self._plan(request), request), request)

    def estimate(self, request: PlanRequest) -> MemoryPlan:
        """Plan micro-batches that go together, even if they were faster otherwise."""
        return self._apart(self._plan, request)

    def find(self, request: PlanRequest) -> MemoryPlan | None:
        """Plan a step; None where ``plan`` raises ``VRAMBudgetError`` and searches remedies."""
        try:
            return self._apart(
                lambda request: self._quickest(self._cost_model().plan(request), request), request
            )
        except VRAMBudgetError:
            return None

    def least(self, request: PlanRequest) -> MemoryPlan:
        """Plan a step with the least memory, whether that fits its budget or not."""
        return self._apart(lambda request: self._cost_model().least(request), request)

    def remedies(self, request: PlanRequest) -> list[Remedy]:
        """Find what would make a step fit, each change alone; some seconds for 72B."""
        return self._apart(lambda request: _remedies(self._cost_model(), request), request)

    @property
    def max_seq_len(self) -> int | None:
        """Positions of the model; None if its configuration has none, or for a model in memory."""
        text = self._recipe.config.get_text_config(decoder=True)
        limit = getattr(text, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and self._adapters is None else None

    @property
    def model_type(self) -> str:
        """The model type of the language model, as in the registry."""
        return str(base_of(self._cost_model().model).config.model_type)

    def _apart(self, work: Callable[[PlanRequest], _Result], request: PlanRequest) -> _Result:
        limit = self.max_seq_len
        if limit is not None and request.seq_len > limit:
            raise PolicyError(
                f"seq_len: expected at most the model's {limit} positions, found {request.seq_len}"
            )
        # In a thread and a context of its own, because a caller may be in the middle of a forward:
        # grad mode, autocast and saved-tensor hooks belong to a thread, what models record to a
        # context.
        with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(Context().run, work, request).result()
            except (PorosError, MemoryError):
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"expected a model of type {quoted(self._recipe.config.model_type)} that can "
                    f"be run on shapes alone, found {describe_error(error)}; check its settings, "
                    "and the release of transformers"
                ) from error

    def _plan(self, request: PlanRequest) -> MemoryPlan:
        cost_model = self._cost_model()
        try:
            return cost_model.plan(request)
        except VRAMBudgetError as error:
            advice = format_remedies(_remedies(cost_model, request))
            raise VRAMBudgetError(f"{error}\n{advice}") from None

    def _quickest(self, found: MemoryPlan, request: PlanRequest) -> MemoryPlan:
        """Return ``found``, or the plan of separate micro-batches if that is faster."""
        is_chosen = (request.policy.slots, request.policy.keep_last) == (None, None)
        if found.micro_batches == 1 or found.vram_budget is None or not is_chosen:
            return found
        alone = self._cost_model().plan(request.override(micro_batches=1))
        others = found.micro_batches, share_kept(found)
        return alone if keeps_most(alone, SURELY_KEPT, *others) else found

    def _cost_model(self) -> CostModel:
        model = self._given()
        if model is not None:
            adapters = _adapters_of(model)
            if adapters != self._adapters:
                self._adapters, self._known = adapters, None
                self._recipe = Recipe.like(model, self._recipe.counts_all)
        if self._known is None:
            self._known = CostModel(self._recipe)
        return self._known


def _remedies(cost_model: CostModel, request: PlanRequest) -> list[Remedy]:
    """Find for each setting the least change that fits, or the largest saving."""
    budget = request.budget or 0
    before = cost_model.least(request).total_num_bytes

    def changed(knob: str, value: int | bool) -> Remedy:
        needed = cost_model.least(request.override(**{knob: value})).total_num_bytes
        return Remedy(knob, value, before - needed, needed <= budget)

    ranges = {
        "block_size": (1, request.policy.block_size),
        "seq_len": (LEAST_TOKENS, request.seq_len),
        "batch_size": (1, request.batch_size),
    }
    may_offload = request.policy.offload_boundaries is not False
    tried = [] if may_offload else [changed("offload_boundaries", True)]
    for knob, (lowest, most) in ranges.items():
        if most <= lowest:
            continue
        found = changed(knob, lowest)
        if found.fits:
            larger = range(lowest + 1, most)
            number = bisect_left(larger, True, key=lambda each: not changed(knob, each).fits)
            found = changed(knob, lowest + number)
        tried.append(found)
    return [found for found in tried if found.saved_num_bytes > 0]


def format_remedies(remedies: Sequence[Remedy]) -> str:
    """Format remedies: a line of those that make it fit, and a line of the others."""
    fitting = [f"{found.knob}={found.value}" for found in remedies if found.fits]
    saving = [
        f"{found.knob}={found.value} ({size(found.saved_num_bytes)})"
        for found in remedies
        if not found.fits
    ]
    line = f"What would make it fit, each change alone: {'; '.join(fitting) or 'only more memory'}"
    if not saving:
        return line
    return f"{line}\nWhat would save memory, but not enough alone: {'; '.join(saving)}"


def _form_of(model: Any) -> object:
    """Return a key of what costs depend on, beside configurations."""
    attention = attention_of(base_of(model))
    return (
        "sdpa" if takes_cu_seqlens(attention) else attention,  # as a cost model has it
        [(name, type(module).__name__) for name, module in model.named_modules()],
        {
            name: (parameter.shape, parameter.dtype, parameter.requires_grad)
            for name, parameter in model.named_parameters()
        },
    )


def _adapters_of(model: Any) -> object:
    """Return a key that differs when a plan would."""
    trained = {
        name: (parameter.shape, parameter.dtype)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    active = getattr(model, "active_adapters", None)
    return trained, active() if callable(active) else active
