"""Collects the counters of a prepared model."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.head.host_matrix import HostMatrix
from poros.kernels.adapters import KernelStats
from poros.kernels.paths import LoraShape
from poros.replay.captures import EXPECTED
from poros.stream.frozen import SmallTensors
from poros.streams import Timings, gb_per_s
from poros.utils.formatting import size

if TYPE_CHECKING:
    from poros.model.runtime import Runtime


def collect(
    runtime: "Runtime",
    model: nn.Module | None,
    timings: Timings,
    host_num_bytes: int,
    num_resizes: int,
) -> dict[str, Any]:
    """Collect the values of ``Runtime.stats``.

    Args:
        runtime: Of the model.
        model: If it is still there.
        timings: Of the copies of blocks.
        host_num_bytes: Frozen bytes in host memory besides blocks and head.
        num_resizes: How often blocks got other slots.

    Returns:
        Of copies: ``num_loads`` (block copies queued), ``num_hits`` (visits of a block that was
        still in its slot), ``h2d_num_bytes`` (bytes of those copies), ``h2d_ms`` and
        ``h2d_gb_per_s`` (how long those took that are complete, on the device, and their rate),
        ``stall_ms`` (for how long the device had nothing to do but wait for one of them).

        Of memory: ``device_num_bytes`` (slots, blocks that stay, small frozen tensors, constants of
        4-bit weights), ``host_num_bytes`` and ``pinned_num_bytes`` (frozen bytes in host memory,
        and the page-locked part of them), ``disk_num_bytes`` and ``disk_stall_ms`` (frozen bytes
        that stay on a disk, and for how long training has waited for them),
        ``offloaded_num_bytes`` (host memory for inputs of layers), ``num_resizes``.

        Of the vocabulary: ``num_index_transfers`` and ``rows_num_bytes`` (tensors of token numbers
        that came to the host, and bytes of the rows of matrices in host memory that went to the
        device for them, or for what needs a part or all of one), ``head_num_bytes`` (bytes of the
        slices of the head that went there for the loss).

        Of adapters: ``num_fused_adapters`` and ``num_unfused_adapters`` (calls of LoRA modules that
        took ``poros.kernels.lora`` or ``.dora``, and that ran as PEFT has them),
        ``num_left_out_adapters`` (those in recomputations whose result nobody needed, and which was
        not computed). ``lora_paths``: which orders of products were taken (see
        ``adapter_counts``).

        ``num_replayed_visits`` and ``num_eager_visits``: visits of layers, forwards and backwards,
        that were replayed from a recording, and that ran although visits are recorded.

        ``num_groups``: groups of micro-batches that went through the blocks together.

        ``attention``: the attention implementation of transformers that the layers call, such as
        ``sdpa`` or ``flash_attention_2``.

        ``fallbacks``: one line each.
    """
    host, head, rows = runtime.host, runtime.head, runtime.rows
    manager, offloader, tally = runtime.manager, runtime.offloader, runtime.tally
    captures = runtime.captures
    eager = captures.eager if captures is not None else {}
    grouped = runtime.accumulation
    alone = grouped.alone if grouped is not None else {}
    unfused = tally.unfused if tally is not None else {}
    return {
        "num_loads": manager.num_loads,
        "num_hits": manager.num_hits,
        "h2d_num_bytes": manager.h2d_num_bytes,
        "device_num_bytes": runtime.device_num_bytes,
        "host_num_bytes": host.num_bytes + host_num_bytes + head.num_bytes,
        "pinned_num_bytes": host.pinned_num_bytes + head.pinned_num_bytes,
        "disk_num_bytes": host.disk_num_bytes,
        "disk_stall_ms": host.disk_stall_ms,
        "offloaded_num_bytes": offloader.num_bytes,
        "h2d_ms": timings.copy_ms,
        "h2d_gb_per_s": gb_per_s(timings.num_bytes, timings.copy_ms),
        "stall_ms": timings.stall_ms,
        "num_index_transfers": rows.num_index_transfers,
        "rows_num_bytes": rows.h2d_num_bytes,
        "head_num_bytes": head.h2d_num_bytes,
        "num_resizes": num_resizes,
        **adapter_counts(tally),
        "num_replayed_visits": captures.num_replays if captures is not None else 0,
        "num_eager_visits": sum(eager.values()),
        "attention": attention_of(model),
        "num_groups": grouped.num_groups if grouped is not None else 0,
        "fallbacks": host.fallbacks
        + offloader.fallbacks
        + runtime.context.fallbacks
        + rows.fallbacks
        + [f"adapters ran as PEFT has them: {reason}" for reason in unfused]
        + [f"visits were not replayed: {reason}" for reason in eager if reason not in EXPECTED]
        + [f"micro-batches ran one after the other: {reason}" for reason in alone],
    }


def adapter_counts(tally: KernelStats | None) -> dict[str, Any]:
    """Count which way adapted modules ran, as in ``collect``.

    ``lora_paths`` has ``chosen`` (calls of each order, such as ``f2:b5``), ``shapes`` (the order of
    each) and ``as_peft`` (calls that PEFT's order alone is defined for, by reason).
    """
    tally = KernelStats() if tally is None else tally
    shapes = {what: order for what, order in tally.orders if isinstance(what, LoraShape)}
    chosen: Counter[str] = Counter()
    for shape, order in shapes.items():
        chosen[order] += tally.orders[shape, order]
    reasons = {
        what: tally.orders[what, order] for what, order in tally.orders if what not in shapes
    }
    return {
        "num_fused_adapters": tally.num_fused,
        "num_unfused_adapters": sum(tally.unfused.values()),
        "num_left_out_adapters": tally.num_left_out,
        "lora_paths": {
            "chosen": dict(chosen),
            "shapes": {str(shape): order for shape, order in shapes.items()},
            "as_peft": reasons,
        },
    }


def attention_of(model: nn.Module | None) -> str | None:
    """Return the attention implementation of a transformers model; None if it has none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    found: str | None = getattr(config, "_attn_implementation", None)
    return found


def described(runtime: "Runtime", model: nn.Module | None) -> str:
    """Describe in a few lines where the blocks are, what has happened, what was checked."""
    stats, room = runtime.stats(), runtime.room
    name = "a model that is gone" if model is None else type(model).__name__
    kept = f", {room.keep_last} layers keep their graph" if room.keep_last else ""
    inputs = ", inputs of layers in host memory" if room.offload_inputs else ""
    locked = "page-locked" if stats["pinned_num_bytes"] else "pageable"
    number = runtime.num_blocks if runtime.num_slots == 0 else room.num_slots
    lines = [
        f"Runtime of {name} on {runtime.device}",
        f"  {runtime.num_blocks} blocks, {number} on the device at a time{kept}{inputs}",
        f"  {size(stats['host_num_bytes'])} in host memory ({locked}), "
        f"{size(stats['device_num_bytes'])} on the device",
        f"  {stats['num_loads']} copies of blocks, {size(stats['h2d_num_bytes'])} at "
        f"{stats['h2d_gb_per_s']:.1f} GB/s; waited {stats['stall_ms']:.0f} ms for them",
        f"  check of the first step: {runtime.self_check['status']}",
    ]
    return "\n".join([*lines, *(f"  {line}" for line in stats["fallbacks"])])


def held_num_bytes(model: nn.Module, device: torch.device, small: SmallTensors) -> int:
    """Count the device bytes of a model's tensors and gradients, except those in ``small``."""
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors += [gradient for gradient in gradients if gradient is not None]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device == device
        and not isinstance(tensor, HostMatrix)
        and not small.holds(tensor)
    }
    return sum(storages.values())


def nothing_checked() -> dict[str, Any]:
    """``Runtime.self_check`` for a runtime without a self-check."""
    return {
        "mode": "off",
        "status": "off",
        "message": None,
        "proved_with_deterministic_attention": [],
        "not_provable": [],
        "kernels": None,
    }
