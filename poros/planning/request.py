"""What a plan is asked for: one step's shape, budget and policy, as one value passed whole."""

import math
from dataclasses import dataclass

from poros.config import StreamingPolicy, parse_num_bytes
from poros.errors import PolicyError


@dataclass(frozen=True)
class Speeds:
    """Measured or given rates, for the forecast of time."""

    copy_gb_per_s: float
    """From page-locked host memory to the device, and as fast the other way at the same time."""
    tflop_per_s: float
    """Of the model's linear layers as they run, with dequantization; taken for all products."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One training step to plan. Which model trains is another question: see ``Planner``.

    Args:
        seq_len: Tokens per row; rows are planned full.
        batch_size: Rows per micro-batch.
        accumulation: Micro-batches per optimizer step: with several, all gradients are there while
            the layers' inputs are.
        micro_batches: Of these, how many are to go through the blocks together; as many do as fit,
            all of them, half of them, and so on. With a budget that lets most layers keep their
            graph they are planned one after the other, which is quicker then.
        vram_budget: Bytes, or ``"8GiB"``; None plans two slots and reports what that needs.
        block_size: Layers per transfer.
        num_slots: Fixes the slots; None takes what the budget affords.
        keep_last: Fixes the layers that are not recomputed; None likewise.
        offload_boundaries: Whether inputs of recomputed layers wait in host memory; None does so
            only if the budget is too small otherwise.
        stream_embedding: As in ``StreamingPolicy``.
        loss: Likewise.
        adapter_kernels: Likewise.
        lora_paths: Likewise; what an order needs for W + sAB and X'dY counts as workspace.
        share_dense: Likewise; None plans for a GPU.
        cuda_graphs: Likewise; None plans for a GPU.
        without_recordings: With ``cuda_graphs=None``, plan a run in which nothing is recorded, as
            where there is no room for it.
        stream_head: Likewise; with ``loss="reference"`` the head counts as if it were resident.
        self_check: Plan for the first step too, in which every layer is checked.
        optimizer: As in ``TrainingArguments.optim``.
        optimizer_num_bytes: The state, in bytes, of an optimizer that is not known by name.
        library_num_bytes: What matrix libraries keep on the device for themselves; None is what
            they keep on the GPU at hand, and nothing without one.
        speeds: For a forecast of the step's time.

    Raises:
        PolicyError: If a value makes no sense.
    """

    seq_len: int
    batch_size: int = 1
    accumulation: int = 1
    micro_batches: int = 1
    vram_budget: int | float | str | None = None
    block_size: int = 1
    num_slots: int | None = None
    keep_last: int | None = None
    offload_boundaries: bool | None = None
    stream_embedding: bool | None = None
    loss: str = "chunked"
    stream_head: bool | None = None
    adapter_kernels: str = "fused"
    lora_paths: str = "peft"
    cuda_graphs: bool | None = None
    without_recordings: bool = False
    share_dense: bool | None = None
    self_check: bool = False
    optimizer: str = "adamw_torch_fused"
    optimizer_num_bytes: int | None = None
    library_num_bytes: int | None = None
    speeds: Speeds | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "accumulation", "micro_batches"):
            require_positive(name, getattr(self, name))
        for name in ("copy_gb_per_s", "tflop_per_s"):
            rate = getattr(self.speeds, name, 1.0)
            if not (math.isfinite(rate) and rate > 0):
                raise PolicyError(f"{name}: expected a rate above zero, found {rate!r}")
        # The policy says what is wrong with the others.
        StreamingPolicy(
            block_size=self.block_size,
            slots=self.num_slots,
            keep_last=self.keep_last,
            vram_budget=self.vram_budget,
            loss=self.loss,
            stream_head=self.stream_head,
            adapter_kernels=self.adapter_kernels,
            lora_paths=self.lora_paths,
            cuda_graphs=self.cuda_graphs,
            share_dense=self.share_dense,
        )

    @property
    def libraries(self) -> int:
        """``library_num_bytes``, as it is or as it will be."""
        if self.library_num_bytes is None:
            # A request can be made and checked before anything slow is imported.
            from poros.devices import default_device, library_workspace

            return library_workspace(default_device())
        return self.library_num_bytes

    @property
    def budget(self) -> int | None:
        """``vram_budget`` in bytes."""
        if self.vram_budget is None:
            return None
        return parse_num_bytes(self.vram_budget, "vram_budget")


def require_positive(name: str, value: object) -> None:
    """Raise ``PolicyError`` unless ``value`` is a whole number above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"{name}: expected a positive whole number, found {value!r}")
