"""``prepare``, ``restore`` and ``runtime``: the public verbs."""

import logging
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from poros.config import MIN_SLOTS, StreamingPolicy, require_lora_paths
from poros.cuda_streams import streams_for
from poros.errors import PolicyError, PreparedModelError, VRAMBudgetError, quoted
from poros.kernels.adapters import KernelStats, tally_of
from poros.kernels.forwards import unpatch
from poros.kernels.paths import Paths
from poros.kernels.use import are_used, patch
from poros.model import resumed_paths
from poros.model.inspect import Inventory, find_layers, take_inventory
from poros.model.runtime import Runtime, find_runtime
from poros.model.sizing import Estimate, Shape, Wanted
from poros.model.stats import adapter_counts
from poros.model.targets import leave_out_dropped
from poros.replay.graphs import Recorder
from poros.slots.schedule import Action
from poros.stream.adapters import is_adapter_module
from poros.stream.settings import settle
from poros.streams import StreamContext
from poros.utils.devices import default_device, library_workspace, usable_device
from poros.utils.formatting import size
from poros.utils.logging_setup import show_info_by_default

if TYPE_CHECKING:
    from poros.planning.formula import MemoryPlan
    from poros.planning.planner import Planner

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)


def prepare(model: ModelT, policy: StreamingPolicy | None = None, **overrides: Any) -> ModelT:
    """Stream the frozen base of ``model`` through a few device slots, from now on.

    Call it after ``prepare_model_for_kbit_training`` (if used) and ``get_peft_model``, and before
    making the optimizer or the Trainer. The frozen tensors of the decoder layers move to host
    memory, block by block; adapters, embedding, norms outside the layers and head move to the
    device. Module tree, parameter names and parameter objects stay. Calling it again with the same
    policy does nothing.

    Args:
        model: A transformers causal language model, or such a decoder with a head for classes or
            without one, with PEFT adapters, on the CPU or one GPU. Changed in place.
        policy: How to stream; the default policy if None.
        **overrides: Fields of ``StreamingPolicy`` that replace those of ``policy``.

    Returns:
        ``model``, the same object.

    Exactness:
        Loss, gradients, adapter weights, optimizer state and random states of a training run are
        bitwise equal, on the same machine and software, to those of a resident run with the same
        loss and kernels; with ``loss="reference"`` and LoRA that is plain transformers and PEFT.
        On a CPU with AVX512-BF16 that model needs bitsandbytes' repacking of weights in eval mode
        switched off, as it is here: repacking rounds the weights.

    Raises:
        PolicyError: If a policy field is unknown or cannot work.
        UnsupportedModelError: If the model cannot be streamed exactly, or its family or a kind of
            its adapters is refused on record. One that no gate has run is prepared with a warning;
            with ``self_check="off"`` its first forward with gradients raises
            ``UnvalidatedArchitectureError``.
        PreparedModelError: If the model is prepared already, with another policy.
        HostMemoryError: If host memory for the base cannot be had.
        ParityError: If a 4-bit weight is not what ``poros.load`` has packed and was not written
            to; with ``self_check="strict"``.

    In each case the model is as it was before the call.

    Source:
        Poros technical report, section 3.
    """
    return prepare_with(model, (policy or StreamingPolicy()).override(**overrides))


def prepare_with(
    model: ModelT,
    policy: StreamingPolicy,
    *,
    streams: StreamContext | None = None,
    journal: list[Action] | None = None,
    recorder: Recorder | None = None,
    goes_by_records: bool = True,
) -> ModelT:
    """``prepare`` with streams and recorder given, and a journal of every action if wanted.

    ``goes_by_records`` is False for the gate, which writes the registry.
    """
    show_info_by_default()
    existing = find_runtime(model)
    if existing is not None:
        is_equal = existing.policy.override(lora_paths=policy.lora_paths) == policy
        wanted, found = (
            KernelStats(paths=Paths.of(policy.lora_paths)),
            existing.tally or KernelStats(),
        )
        if is_equal and wanted.lora_paths == found.lora_paths:
            return model
        raise PreparedModelError(
            f"expected a model that is not prepared, found one prepared with {existing.policy}; "
            "call poros.restore(model) before preparing it with another policy"
        )
    if isinstance(model, nn.Module) and are_used(model):
        raise PreparedModelError(
            "expected a model with its own modules, found one that runs adapter kernels already "
            "(poros.use_adapter_kernels); call poros.restore(model) first: poros.prepare uses them "
            "by itself"
        )
    # Tensors made under inference mode could not take part in training later.
    with torch.inference_mode(False):
        inventory = take_inventory(model, policy, goes_by_records=goes_by_records)
        device = streams.device if streams is not None else _choose_device(model, policy)
        if policy.cuda_graphs and device.type != "cuda" and recorder is None:
            raise PolicyError(f"cuda_graphs: expected a GPU to record them on, found {device}")
        settle(device)
        estimate = _estimate(model, policy, device)
        runtime = Runtime(
            model, inventory, policy, streams or streams_for(device), estimate, journal, recorder
        )
        try:
            _watch(runtime, inventory)
        except BaseException:
            runtime.detach()
            raise
    for config in getattr(model, "peft_config", {}).values():
        leave_out_dropped(model, config)
    stats = runtime.stats()
    if policy.slots is not None and runtime.num_slots < policy.slots and not policy.keep_last:
        logger.warning(
            "poros: slots=%d is more than the %d blocks; using %d",
            policy.slots,
            runtime.num_blocks,
            runtime.num_slots,
        )
    logger.info(
        "poros: %s is prepared: %d blocks, %s in host memory, %s %s (%s); %s",
        type(inventory.base).__name__,
        runtime.num_blocks,
        size(stats["host_num_bytes"]),
        f"pass through {runtime.num_slots} places on" if runtime.num_slots else "all stay on",
        runtime.device,
        size(stats["device_num_bytes"]),
        "the first step will be checked" if policy.self_check != "off" else "nothing is checked",
    )
    return model


def _watch(runtime: Runtime, inventory: Inventory) -> None:
    """Have the first step checked, if the policy wants that."""
    is_off = runtime.policy.self_check == "off"
    if inventory.untested:
        logger.warning(
            "poros: no gate has run %s; %s",
            inventory.untested,
            "self_check is off, so training it is refused" if is_off else "the self-check decides",
        )
    if is_off:
        runtime.unchecked = inventory.untested
        logger.warning("poros: self_check is off: the first step will not be checked")
        return
    from poros.self_check.check import SelfCheck

    check = SelfCheck(runtime, inventory.layers, runtime.policy.self_check)
    runtime.watch_with(check)


def _estimate(model: nn.Module, policy: StreamingPolicy, device: torch.device) -> Estimate:
    """Estimates of a step of ``model``, from what ``poros.plan`` does."""
    reference = weakref.ref(model)  # which holds this
    planner: list[Planner] = []

    def estimate(
        shape: Shape, budget: int | None, wanted: Wanted, is_checking: bool, replays: bool
    ) -> "MemoryPlan":
        from poros.planning.planner import Planner
        from poros.planning.request import PlanRequest

        living = reference()
        if not planner and living is not None:
            planner.append(Planner(living))
        is_gpu = device.type == "cuda"
        request = PlanRequest(
            **shape._asdict(),
            policy=policy.override(
                # With its unit: bytes are meant, however few they are.
                vram_budget=None if budget is None else f"{budget}B",
                slots=wanted.num_slots,
                keep_last=wanted.keep_last,
                offload_boundaries=wanted.offload_inputs,
                cuda_graphs=policy.cuda_graphs if is_gpu else False,
                share_dense=policy.share_dense if is_gpu else bool(policy.share_dense),
            ),
            self_check=is_checking,
            without_recordings=not replays,
            library_num_bytes=library_workspace(device),
            # Gradients may be there already: how many passes make a step is not known here.
            accumulation=2,
        )
        found = planner[0].estimate(request)
        if found.micro_batches < shape.micro_batches:
            raise VRAMBudgetError(
                f"vram_budget: expected room for {shape.micro_batches} micro-batches together, "
                f"found room for {found.micro_batches}"
            )
        return found

    return estimate


def use_adapter_kernels(model: ModelT, kernels: str = "fused", lora_paths: str = "peft") -> ModelT:
    """Have a resident model run the kernels that ``prepare`` uses, without streaming.

    In its decoder layers alone, as ``prepare`` does: adapters elsewhere (on the head, say) run as
    PEFT has them. What LoRA adds becomes one operator per projection, DoRA too, and takes no tensor
    of the size of the weight but the one dense weight (see ``poros.kernels.dora``); gated
    activations are made again in backward instead of being kept, and on a GPU 4-bit products are
    ours. Adapters that are added later need another call. Gradients of gradients are refused, and
    so is an input that was written to after its projection. Copy such a model by
    ``copy.deepcopy``; one that is copied shallowly, as ``nn.DataParallel`` does, would run the
    original's modules. ``restore`` undoes it.

    Args:
        model: A PEFT model, wherever it is. Changed in place, but for parameters and names.
        kernels: ``"fused"``, or ``"exact"`` to leave DoRA to PEFT; as ``adapter_kernels`` of
            ``StreamingPolicy``.
        lora_paths: In which order the products of LoRA are formed; as in ``StreamingPolicy``.

    Returns:
        ``model``, the same object.

    Exactness:
        Losses, gradients and random states are bit for bit those of PEFT's own modules, on the same
        machine and software; with DoRA and ``"fused"``, or ``lora_paths`` other than ``"peft"``,
        within rounding of them, and bit for bit those of a prepared model.

    Raises:
        PolicyError: If there are no such kernels or orders.
        PreparedModelError: If the model is prepared: then it runs them already. If it runs kernels
            with other ``lora_paths``.
        UnsupportedModelError: If the model has no decoder layers that ``prepare`` would find.
    """
    if kernels not in ("fused", "exact"):
        raise PolicyError(f"kernels: expected one of fused, exact, found {quoted(kernels)}")
    if find_runtime(model) is not None:
        raise PreparedModelError(
            "expected a resident model, found one that is prepared, which runs these kernels by "
            'itself unless adapter_kernels="peft"'
        )
    require_lora_paths(lora_paths, kernels)
    tally, before = (
        KernelStats(is_exact=kernels == "exact", paths=Paths.of(lora_paths)),
        tally_of(model),
    )
    if before is not None and before.lora_paths != tally.lora_paths:
        raise PreparedModelError(
            f"expected a model without adapter kernels, or with lora_paths={tally.lora_paths!r}, "
            f"found one with {before.lora_paths!r}; call poros.restore(model) first"
        )
    if before is not None and before.is_exact == tally.is_exact:
        tally = before  # one count for all of them
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for layer in find_layers(model)[1]:
        patch(layer, device, tally)
    resumed_paths.record(model)
    return model


def kernel_stats(model: nn.Module) -> dict[str, Any]:
    """Which way the adapted modules of a model ran since ``use_adapter_kernels`` or ``prepare``.

    Returns:
        ``num_fused_adapters``, ``num_unfused_adapters``, ``num_left_out_adapters``, ``lora_paths``,
        as ``Runtime.stats`` has them.

    Raises:
        PreparedModelError: If no adapter of the model runs a kernel of ours.
    """
    tally = tally_of(model)
    if tally is None:
        raise PreparedModelError(
            f"expected a model with adapter kernels, found a {type(model).__name__} without; call "
            "poros.use_adapter_kernels(model) first"
        )
    return adapter_counts(tally)


def patch_hf_model(model: ModelT, block_size: int = 4) -> ModelT:
    """``prepare`` with an explicit block size and two slots; nothing is planned."""
    return prepare(model, block_size=block_size, slots=MIN_SLOTS)


def restore(model: ModelT) -> ModelT:
    """Undo ``prepare``: the same object, with its bytes, devices and behaviour from before it.

    Or undo ``use_adapter_kernels``.

    Adapters keep what they have learnt. If the base does not fit where it was, the error of the
    failed allocation is raised and the model stays prepared. So it does if layers stay in a file
    that is no longer what was loaded.

    Raises:
        CheckpointFormatError: If that file was modified.
        PreparedModelError: If the model is not prepared.
    """
    if find_runtime(model) is None and are_used(model):
        unpatch(model.modules())
        resumed_paths.forget(model)
        return model
    existing = runtime(model)
    existing.host.require_intact()
    existing.detach()
    if existing.captures is not None:
        existing.captures.forget()
    return model


def runtime(model: nn.Module) -> Runtime:
    """The runtime of a prepared model.

    Raises:
        PreparedModelError: If the model is not prepared.
    """
    existing = find_runtime(model)
    if existing is None:
        raise PreparedModelError(
            f"expected a prepared model, found a {type(model).__name__} that is not; call "
            "poros.prepare(model) first"
        )
    return existing


def _choose_device(model: nn.Module, policy: StreamingPolicy) -> torch.device:
    if policy.device is not None:
        return usable_device(policy.device)
    for module in model.modules():
        if is_adapter_module(module):
            for parameter in module.parameters():
                if parameter.device.type == "cuda":
                    return parameter.device
    return default_device()
