"""``prepare``, ``restore`` and ``runtime``: the public verbs."""

import logging
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from poros.config import ADAPTER_KERNELS, MIN_SLOTS, StreamingPolicy, require_lora_paths
from poros.cuda_streams import streams_for
from poros.errors import PolicyError, PreparedModelError, VRAMBudgetError, quoted
from poros.kernels.adapters import KernelStats, tally_of
from poros.kernels.forwards import unpatch
from poros.kernels.use import are_used, patch
from poros.model.adapter_kinds import require_groupable
from poros.model.inspect import Inventory, find_layers, take_inventory
from poros.model.runtime import Runtime, find_runtime
from poros.model.sizing import Estimate, Shape, Wanted
from poros.model.vision import leave_out_dropped
from poros.replay.graphs import Recorder
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
    """Stream the frozen base of ``model`` through a few device slots from now on.

    Call it after ``prepare_model_for_kbit_training`` (if used) and ``get_peft_model``, and before
    you make the optimizer or the Trainer. The frozen tensors of the decoder layers move to host
    memory, block by block; adapters and norms outside the layers move to the device, and so do
    embedding and head unless the policy keeps them in host memory. The module tree, parameter names
    and parameter objects stay the same. Calling it again with the same policy does nothing.

    Args:
        model: A transformers causal language model, or such a decoder with a head for classes or
            without one, with PEFT adapters, on the CPU or one GPU. Changed in place.
        policy: How to stream; the default policy if None.
        **overrides: Fields of ``StreamingPolicy``; they replace those of ``policy``.

    Returns:
        ``model``, the same object.

    Exactness:
        Loss, gradients, adapter weights, optimizer state and random states of a training run are
        bitwise equal, on the same machine and software, to those of a resident run with the same
        loss and kernels. With ``loss="reference"`` and LoRA, that run is plain transformers and
        PEFT, unless ``adapter_kernels="grouped"`` or ``lora_paths`` ask for other rounding. On a
        CPU with AVX512-BF16, bitsandbytes repacks weights in eval mode, which rounds them; it is
        switched off here and must be switched off for the resident model too.

    Raises:
        PolicyError: If a policy field is unknown or cannot work.
        UnsupportedModelError: If the model cannot be streamed exactly, or if its family or a kind
            of its adapters is on record as refused. A family without a record is prepared with a
            warning; with ``self_check="off"`` its first forward with gradients raises
            ``UnvalidatedArchitectureError``.
        PreparedModelError: If the model is already prepared with another policy.
        HostMemoryError: If there is not enough host memory for the base.
        ParityError: If a 4-bit weight differs from what ``poros.load`` packed although nothing has
            written to it; only with ``self_check="strict"``.

    In each case the model stays as it was before the call.

    Source:
        Poros technical report, section 3.
    """
    return prepare_with(model, (policy or StreamingPolicy()).override(**overrides))


def prepare_with(
    model: ModelT,
    policy: StreamingPolicy,
    *,
    streams: StreamContext | None = None,
    recorder: Recorder | None = None,
    goes_by_records: bool = True,
    planner: "Planner | None" = None,
) -> ModelT:
    """``prepare`` with streams and recorder given.

    Args:
        goes_by_records: False for the gate, which writes the registry.
        planner: Has planned steps of the configuration that the model was made from.
    """
    show_info_by_default()
    existing = find_runtime(model)
    if existing is not None:
        if existing.policy == policy:
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
        estimate = _estimate(model, policy, device, planner)
        runtime = Runtime(
            model, inventory, policy, streams or streams_for(device), estimate, recorder
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
        f"{runtime.num_slots} at a time on" if runtime.num_slots else "all stay on",
        runtime.device,
        size(stats["device_num_bytes"]),
        "the first step will be checked"
        if policy.self_check != "off"
        else "the first step will not be checked",
    )
    return model


def _watch(runtime: Runtime, inventory: Inventory) -> None:
    """Have the first step checked, if the policy wants that."""
    is_off = runtime.policy.self_check == "off"
    if inventory.untested:
        logger.warning(
            "poros: no gate has checked %s; %s",
            inventory.untested,
            "self_check is off, so training it is refused"
            if is_off
            else "the check of the first step decides whether it trains",
        )
    if is_off:
        runtime.unchecked = inventory.untested
        logger.warning("poros: self_check is off: the first step will not be checked")
        return
    from poros.self_check.check import SelfCheck

    check = SelfCheck(runtime, inventory.layers, runtime.policy.self_check)
    runtime.watch_with(check, check.watch_rows, check.findings)


def _estimate(
    model: nn.Module, policy: StreamingPolicy, device: torch.device, earlier: "Planner | None"
) -> Estimate:
    """Estimates of a step of ``model``, from what ``poros.plan`` does."""
    reference = weakref.ref(model)  # which holds this
    planner: list[Planner] = []

    def estimate(
        shape: Shape, budget: int | None, wanted: Wanted, is_checking: bool, replays: bool
    ) -> "MemoryPlan":
        from poros.planning.cards import card_of
        from poros.planning.planner import Planner
        from poros.planning.request import PlanRequest

        living = reference()
        is_gpu = device.type == "cuda"
        card = card_of(torch.cuda.get_device_name(device)) if is_gpu else None
        if not planner and living is not None:
            # There what steps take is measured, too.
            planned = Planner if earlier is None else earlier.for_model
            planner.append(planned(living, counts_all=is_gpu))
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
            speeds=None if card is None else card.speeds(max(1, shape.batch_size * shape.seq_len)),
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
    """Make a resident model run the kernels that ``prepare`` uses, without streaming.

    Like ``prepare``, this changes the decoder layers alone: adapters elsewhere (for example on the
    head) run PEFT's modules. The LoRA branch of each projection, and DoRA, becomes one operator,
    which needs no tensor of the weight's size except the one dense weight (see
    ``poros.kernels.dora``). SwiGLU activations are recomputed in backward instead of being kept,
    and on a GPU Poros' own kernels compute 4-bit products. Adapters that you add later need
    another call. Gradients of gradients are refused, and so is an input that was modified after its
    projection. Copy such a model with ``copy.deepcopy``: a shallow copy, as ``nn.DataParallel``
    makes it, would run the original's modules. ``restore`` undoes it.

    Args:
        model: A PEFT model on any device. Changed in place, except for parameters and names.
        kernels: ``"fused"``; or ``"exact"`` to leave DoRA to PEFT; or ``"grouped"``. As
            ``adapter_kernels`` of ``StreamingPolicy``.
        lora_paths: The order of LoRA's matrix products; as in ``StreamingPolicy``.

    Returns:
        ``model``, the same object.

    Exactness:
        Losses, gradients and random states are bit for bit those of PEFT's own modules, on the same
        machine and software; with DoRA and ``"fused"``, ``"grouped"``, or ``lora_paths`` other than
        ``"peft"``, within rounding of them, and bit for bit those of a prepared model.

    Raises:
        PolicyError: If ``kernels`` or ``lora_paths`` is unknown, or the layers have other adapters
            than LoRA and ``kernels`` is ``"grouped"``.
        PreparedModelError: If the model is prepared, because it then runs these kernels already; or
            if it runs others, or these with other ``lora_paths``.
        UnsupportedModelError: If the model has no decoder layers that ``prepare`` would find.
    """
    known = [each for each in ADAPTER_KERNELS if each != "peft"]
    if kernels not in known:
        raise PolicyError(f"kernels: expected one of {', '.join(known)}, found {quoted(kernels)}")
    if find_runtime(model) is not None:
        raise PreparedModelError(
            "expected a resident model, found one that is prepared, which runs these kernels by "
            'itself unless adapter_kernels="peft"'
        )
    require_lora_paths(lora_paths, kernels)
    tally = tally_of(model) or KernelStats(kernels, lora_paths)  # one count for all of them
    if (tally.kernels, tally.lora_paths) != (kernels, lora_paths):
        raise PreparedModelError(
            "expected a model without adapter kernels, or with the same, found one with "
            f"kernels={tally.kernels!r} and lora_paths={tally.lora_paths!r}; call "
            "poros.restore(model) first"
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    layers_name, layers = find_layers(model)
    if tally.is_grouped:
        require_groupable(layers_name, layers)
    for layer in layers:
        patch(layer, device, tally)
    return model


def kernel_stats(model: nn.Module) -> dict[str, Any]:
    """Count how adapted modules ran since ``use_adapter_kernels`` or ``prepare``.

    Returns:
        ``num_fused_adapters``, ``num_grouped_adapters`` (of the former, those of ``"grouped"``),
        ``num_unfused_adapters``, ``num_left_out_adapters``, ``lora_paths``,
        as ``Runtime.stats`` has them.

    Raises:
        PreparedModelError: If no adapter of the model runs one of Poros' kernels.
    """
    tally = tally_of(model)
    if tally is None:
        raise PreparedModelError(
            f"expected a model with adapter kernels, found a {type(model).__name__} without; call "
            "poros.use_adapter_kernels(model) first"
        )
    return tally.counts()


def patch_hf_model(model: ModelT, block_size: int = 4) -> ModelT:
    """Call ``prepare`` with an explicit block size and two slots, without planning."""
    return prepare(model, block_size=block_size, slots=MIN_SLOTS)


def restore(model: ModelT) -> ModelT:
    """Undo ``prepare`` or ``use_adapter_kernels``.

    The same object gets its bytes, devices and behaviour back. Adapters keep their trained weights.
    If the base does not fit where it was, the error of the failed allocation is raised and the
    model stays prepared. It also stays prepared if layers are in a file that has changed since it
    was loaded.

    Raises:
        CheckpointFormatError: If that file was modified.
        PreparedModelError: If the model is not prepared.
    """
    if find_runtime(model) is None and are_used(model):
        unpatch(model.modules())
        return model
    existing = runtime(model)
    existing.host.require_intact()
    existing.detach()
    if existing.captures is not None:
        existing.captures.forget()
    return model


def runtime(model: nn.Module) -> Runtime:
    """Return the runtime of a prepared model: its statistics, plan and self-check.

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
