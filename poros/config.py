"""The one policy object: how a model is streamed, and by which algorithm its loss is computed."""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from poros.errors import PolicyError

MIN_SLOTS = 2
LEAST_BUDGET = 200_000
"""Bytes. No model trains in less; a number below it was meant in another unit."""
MARGIN_SHARE = 0.1
LEAST_MARGIN = 2**30
"""Bytes. Without a budget at least this much of a GPU, and at least this share, is left free."""
SELF_CHECKS = ("strict", "warn", "off")
LOSSES = ("chunked", "reference")
ADAPTER_KERNELS = ("fused", "exact", "grouped", "peft")
LORA_ORDERS = ("peft", *(f"f{first}:b{second}" for first in (1, 2) for second in range(1, 6)))
_UNITS = {"": 1.0, "b": 1.0} | {
    f"{letter}{end}": float(base) ** power
    for power, letter in enumerate("kmgt", start=1)
    for base, ends in ((1000, ("", "b")), (1024, ("i", "ib")))
    for end in ends
}


@dataclass(frozen=True, kw_only=True)
class StreamingPolicy:
    """How the frozen base streams through the device.

    Only ``loss``, ``lora_paths``, ``adapter_kernels="grouped"`` and, with DoRA, ``adapter_kernels``
    can change the bits of a run.

    Args:
        block_size: Decoder layers per transfer, at least 1. Recomputation stays per layer.
        vram_budget: Device memory for training, in bytes or as text such as ``"8GiB"``. Poros
            chooses slots and kept layers to fill it, by an estimate, which on a GPU the measured
            first steps correct (see ``poros.model.sizing``). If it is None, and ``slots`` and
            ``keep_last`` are None as well, Poros takes the free memory of a GPU less a margin, and
            chooses nothing on a CPU.
        slots: Device slots, at least 2; a number above that of the blocks means all of them. If it
            is None, Poros chooses it, or takes 2 where it chooses nothing.
        keep_last: Layers at the end that keep their activations instead of being recomputed,
            rounded down to whole blocks; a number above that of the layers means all of them. Their
            blocks stay on the device and count among the slots, of which the others still have at
            least 2. If it is None, Poros chooses it, or takes 0 where it chooses nothing.
        offload_boundaries: Keep the inputs of recomputed layers in page-locked host memory between
            forward and backward, for long sequences. If it is None, Poros does so if nothing else
            makes the step fit, and not where it chooses nothing.
        stream_embedding: Keep the embedding in host memory and copy only the rows of the batch's
            tokens, if it is frozen, not adapted and not shared with the head. None does so from
            16 MiB on.
        loss: ``"reference"`` keeps the model's own head and loss: bit for bit those of plain
            transformers. ``"chunked"`` computes the loss in slices of the vocabulary, so that the
            logits of a batch never exist as a whole (see ``poros.head.loss``). It gives other bits,
            which in bfloat16 are nearer to the exact loss; everything else stays exact against a
            resident run with this loss. It needs a head that is a frozen linear module without
            adapters, and the loss of transformers for causal language models; otherwise a log line
            says that the reference loss is used.
        stream_head: Keep the head in host memory and copy it in slices for a chunked loss, if it is
            frozen and not adapted; rows of an embedding that shares its matrix are then copied one
            by one. None does so from 16 MiB on if the loss is chunked; once every block has a slot,
            the head gets a place on the device too. With ``loss="reference"`` it stays there.
        adapter_kernels: ``"fused"`` computes the LoRA branch of each projection by one operator
            (see ``poros.kernels.lora``), with the bits of PEFT's modules, in less time and memory;
            adapters that it does not support run PEFT's modules. DoRA over linear modules runs in
            factored form (see ``poros.kernels.dora``): its bits are within rounding of PEFT's, and
            equal to those of a resident run with ``poros.use_adapter_kernels``. ``"exact"`` takes
            only operators with the bits of PEFT's modules, so PEFT computes DoRA. ``"peft"`` keeps
            PEFT's modules everywhere. ``"grouped"`` computes LoRA of q, k and v in one operator,
            and of gate and up in another, with fewer and larger products (see
            ``poros.kernels.grouped``): its bits are within rounding of PEFT's, and equal to those
            of a resident run with ``poros.use_adapter_kernels(model, "grouped")``. It is for LoRA
            alone; modules that it does not know run as with ``"fused"``.
        lora_paths: The order of LoRA's matrix products (see ``poros.kernels.paths``). ``"peft"`` is
            PEFT's order, with its bits. ``"flops"`` takes for each shape the order that costs least
            by a fixed formula; a name such as ``"f2:b5"`` takes that order everywhere.
            All but ``"peft"`` are within rounding of PEFT's modules and bit for bit equal to
            ``poros.use_adapter_kernels`` with the same ``lora_paths``; they need
            ``adapter_kernels="fused"``.
        cuda_graphs: Record the forward and backward of layers as CUDA graphs and replay them, where
            that gives the same bits (see ``poros.replay.captures``): the host then starts a layer
            by one call instead of hundreds. This takes the memory of one layer's computation once
            more. None records whatever it can on a GPU if the budget has room; False records
            nothing; with True and ``self_check="strict"``, a recording that gives other bits raises
            an error.
        share_dense: Dequantize the 4-bit weights of a layer once for all micro-batches that go
            through the layers together, in forward and again in backward, instead of once for each.
            This gives the same bits and takes the memory of one dense layer (0.47 GB at 7B, 0.98 at
            32B). None does so on a GPU if the budget has room, before it adds slots; True does so
            on a CPU too.
        device: Device that the model trains on, such as ``"cuda:1"`` or ``"cpu"``. None takes the
            device of the adapters if that is a GPU, else the current GPU if there is one, else the
            CPU.
        self_check: ``"strict"`` checks every layer of the first training step against an ordinary
            autograd graph and raises ``ParityError`` if a bit differs; ``"warn"`` only logs it;
            ``"off"`` does not check, logs that, and refuses to train an architecture or a kind of
            adapters that no gate has run.

    Raises:
        PolicyError: If a value cannot work; the message names the field.
    """

    block_size: int = 1
    vram_budget: int | float | str | None = None
    slots: int | None = None
    keep_last: int | None = None
    offload_boundaries: bool | None = None
    stream_embedding: bool | None = None
    loss: str = "chunked"
    stream_head: bool | None = None
    adapter_kernels: str = "fused"
    lora_paths: str = "peft"
    cuda_graphs: bool | None = None
    share_dense: bool | None = None
    device: str | None = None
    self_check: str = "strict"

    def __post_init__(self) -> None:
        _require_int("block_size", self.block_size, at_least=1)
        if self.vram_budget is not None:
            _require_unit(self.vram_budget, "vram_budget")
        if self.slots is not None:
            _require_int("slots", self.slots, at_least=MIN_SLOTS)
        if self.keep_last is not None:
            _require_int("keep_last", self.keep_last, at_least=0)
        choices = ("offload_boundaries", "stream_embedding", "stream_head", "cuda_graphs")
        for name in (*choices, "share_dense"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, bool)):
                raise PolicyError(f"{name}: expected a bool or None, found {value!r}")
        named = {"loss": LOSSES, "adapter_kernels": ADAPTER_KERNELS, "self_check": SELF_CHECKS}
        for name, known in named.items():
            value = getattr(self, name)
            if value not in known:
                raise PolicyError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
        require_lora_paths(self.lora_paths, self.adapter_kernels)

    def override(self, **changes: Any) -> "StreamingPolicy":
        """This policy with some fields replaced; unknown names raise ``PolicyError``."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise PolicyError(
                    f"{name!r} is not a policy field; the fields are {', '.join(known)}"
                )
        return replace(self, **changes)


def require_lora_paths(paths: object, kernels: str) -> None:
    """Raise ``PolicyError`` unless adapters can run with these ``lora_paths`` and kernels."""
    if paths != "flops" and paths not in LORA_ORDERS:
        raise PolicyError(
            f"lora_paths: expected flops, or one of {', '.join(LORA_ORDERS)}, found {paths!r}"
        )
    if paths != LORA_ORDERS[0] and kernels != "fused":
        raise PolicyError(
            f'lora_paths: expected "peft" with adapter_kernels={kernels!r}, which has an order of '
            f'its own, found {paths!r}; set adapter_kernels="fused"'
        )


def _require_int(name: str, value: object, *, at_least: int) -> None:
    # bool is an int to Python, and slots=True would silently mean one slot.
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        why = " (one slot computes while the other is filled)" if name == "slots" else ""
        raise PolicyError(
            f"{name}: expected an integer of at least {at_least}{why}, found {value!r}"
        )


def _require_unit(value: int | float | str, what: str) -> None:
    """Refuse a number without a unit that is too small for bytes: 8 means GiB."""
    text = str(value).strip()
    num_bytes = parse_num_bytes(value, what)
    if not text[-1:].isalpha() and num_bytes < LEAST_BUDGET:
        unit = "GiB" if num_bytes < 1024 else "MiB"
        raise PolicyError(
            f"{what}: expected bytes, or a string with a unit, found {value!r}; did you mean "
            f"'{text}{unit}'?"
        )


def budget_of(free: int, whole: int) -> int:
    """Return the bytes that training may use on a GPU if no budget is given.

    The rest is for other processes, libraries, and what an evaluation needs beyond a training step.

    Args:
        free: Free memory of the GPU, in bytes.
        whole: All memory of the GPU, in bytes.
    """
    return max(0, free - max(LEAST_MARGIN, int(MARGIN_SHARE * whole)))


def parse_num_bytes(value: int | float | str, what: str, *, at_least: int = 1) -> int:
    """Bytes from a number or a string.

    ``"8GiB"`` and ``"8Gi"`` are 8 * 2**30, ``"8GB"`` and ``"8G"`` are 8e9, in small letters too.

    Raises:
        PolicyError: If it is anything else, not finite, or less than ``at_least``.
    """
    number = math.nan
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            number = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    if not (math.isfinite(number) and number >= at_least):
        raise PolicyError(
            f"{what}: expected bytes as a positive number or a string such as '8GiB' or '8GB', "
            f"found {value!r}"
        )
    return int(number)
