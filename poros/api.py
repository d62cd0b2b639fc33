"""``prepare``, ``restore`` and ``runtime``: the public verbs."""

import logging
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from poros.budget import Budget
from poros.config import MIN_SLOTS, StreamingPolicy
from poros.devices import default_device, usable_device
from poros.errors import PreparedModelError
from poros.layer.settings import settle
from poros.layer.streamed import is_streamed, runtime_of
from poros.model.attach import Takeover
from poros.model.inspect import Inventory, is_adapter_module, take_inventory
from poros.slots.schedule import Action
from poros.streams import StreamContext, gb_per_s, streams_for

if TYPE_CHECKING:
    from poros.planning.formula import MemoryPlan
    from poros.self_check.check import SelfCheck

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)


class Runtime:
    """What streams a prepared model. Get it with ``poros.runtime(model)``.

    Attributes:
        policy: The policy the model was prepared with.
        device: Where it trains.
        budget: Makes room for the blocks.
    """

    def __init__(
        self, policy: StreamingPolicy, takeover: Takeover, self_check: "SelfCheck | None"
    ) -> None:
        self.policy = policy
        self.device = takeover.device
        self.budget = Budget(policy, takeover, self_check)
        self._takeover = takeover
        self._self_check = self_check

    @property
    def num_blocks(self) -> int:
        """Blocks the layers are grouped into."""
        return len(self._takeover.blocks)

    @property
    def num_slots(self) -> int:
        """Slots that blocks stream through: the policy's, without the blocks that stay."""
        return len(self._takeover.ring.slots)

    @property
    def num_streamed_blocks(self) -> int:
        """Blocks that stream; the others stay on the device (``keep_last``)."""
        return self._takeover.manager.num_blocks

    @property
    def self_check(self) -> dict[str, Any]:
        """What the check of the first step has found so far.

        Returns:
            ``mode``, ``status`` (pending, passed, failed, unproven or off), ``message`` (the
            mismatch, if any), ``proved_with_deterministic_attention`` and ``not_provable`` (names
            of layers that do not repeat themselves: see ``poros.self_check.check``).
        """
        check = self._self_check
        return {
            "mode": check.mode if check else "off",
            "status": check.status if check else "off",
            "message": check.message if check else None,
            "proved_with_deterministic_attention": list(check.proved_otherwise) if check else [],
            "not_provable": list(check.not_provable) if check else [],
        }

    def stats(self) -> dict[str, Any]:
        """What has happened since ``prepare``, as plain numbers.

        Returns:
            ``num_loads`` (block copies queued), ``num_hits`` (visits of a block that was still in
            its slot), ``h2d_num_bytes`` (bytes of those copies), ``device_num_bytes`` (slots,
            blocks that stay, small frozen tensors, constants of 4-bit weights),
            ``host_num_bytes`` and ``pinned_num_bytes`` (frozen bytes in host memory, and the
            page-locked part of them),
            ``disk_num_bytes`` and ``disk_stall_ms`` (frozen bytes that stay on a disk, and for how
            long training has waited for them), ``offloaded_num_bytes`` (host memory for inputs of
            layers), ``h2d_ms`` and ``h2d_gb_per_s`` (how long the copies of blocks took that are
            complete, on the device, and their rate), ``stall_ms`` (for how long the device had
            nothing to do but wait for one of them), ``fallbacks`` (one line each).

        Streams:
            Reads counters on the host, and events; waits for nothing.
        """
        takeover = self._takeover
        timings = takeover.timings()
        return {
            "num_loads": takeover.manager.num_loads,
            "num_hits": takeover.manager.num_hits,
            "h2d_num_bytes": takeover.manager.h2d_num_bytes,
            "device_num_bytes": takeover.device_num_bytes,
            "host_num_bytes": takeover.host.num_bytes,
            "pinned_num_bytes": takeover.host.pinned_num_bytes,
            "disk_num_bytes": takeover.host.disk_num_bytes,
            "disk_stall_ms": takeover.host.disk_stall_ms,
            "offloaded_num_bytes": takeover.boundaries.num_bytes,
            "h2d_ms": timings.copy_ms,
            "h2d_gb_per_s": gb_per_s(timings.num_bytes, timings.copy_ms),
            "stall_ms": timings.stall_ms,
            "fallbacks": takeover.host.fallbacks + takeover.boundaries.fallbacks,
        }

    @property
    def plan(self) -> "MemoryPlan | None":
        """What the budget was planned into; None without one, or before the first step."""
        return self.budget.plan

    def is_model(self, module: object) -> bool:
        """Whether ``module`` is the prepared model itself."""
        return module is not None and module is self._takeover.model()

    def has_trainable_parameter(self) -> bool:
        """Whether any parameter of the model requires a gradient now."""
        model = self._takeover.model()
        return model is not None and any(each.requires_grad for each in model.parameters())

    def host_slab(self, block: int) -> torch.Tensor:
        """The authoritative bytes of ``block``: (num_bytes,), uint8, on the host. Not a copy."""
        return self._takeover.host.slabs[block].bytes


def prepare(model: ModelT, policy: StreamingPolicy | None = None, **overrides: Any) -> ModelT:
    """Stream the frozen base of ``model`` through a few device slots, from now on.

    Call it after ``prepare_model_for_kbit_training`` (if used) and ``get_peft_model``, and before
    making the optimizer or the Trainer. The frozen tensors of the decoder layers move to host
    memory, block by block; adapters, embedding, norms outside the layers and head move to the
    device. Module tree, parameter names and parameter objects stay. Calling it again with the same
    policy does nothing.

    Args:
        model: A transformers causal language model with PEFT adapters, on the CPU or one GPU.
            Changed in place.
        policy: How to stream; the default policy if None.
        **overrides: Fields of ``StreamingPolicy`` that replace those of ``policy``.

    Returns:
        ``model``, the same object.

    Exactness:
        Loss, gradients, adapter weights, optimizer state and random states of a training run are
        bitwise equal to those of the same model without ``prepare``, on the same machine and
        software.
        On a CPU with AVX512-BF16 that model needs bitsandbytes' repacking of weights in eval mode
        switched off, as it is here: repacking rounds the weights.

    Raises:
        PolicyError: If a policy field is unknown or cannot work.
        UnsupportedModelError: If the model cannot be streamed exactly.
        UnvalidatedArchitectureError: If no gate has covered the architecture and
            ``allow_unvalidated`` is False.
        PreparedModelError: If the model is prepared already, with another policy.
        HostMemoryError: If host memory for the base cannot be had.
        ParityError: If a 4-bit weight is not what ``poros.load`` has packed and nobody has written
            to it; with ``self_check="strict"``.

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
) -> ModelT:
    """``prepare`` with the stream context given, and a journal of every action if wanted."""
    existing = _find(model)
    if existing is not None:
        if existing.policy == policy:
            return model
        raise PreparedModelError(
            f"expected a model that is not prepared, found one prepared with {existing.policy}; "
            "call poros.restore(model) before preparing it with another policy"
        )
    # Tensors made under inference mode could not take part in training later.
    with torch.inference_mode(False):
        inventory = take_inventory(model, policy.block_size, policy.allow_unvalidated)
        device = streams.device if streams is not None else _choose_device(model, policy)
        settle(device)
        takeover = Takeover(model, inventory, policy, streams or streams_for(device), journal)
        try:
            runtime = _supervise(takeover, inventory, policy)
        except BaseException:
            takeover.revert()
            raise
    stats = runtime.stats()
    if policy.slots is not None and runtime.num_slots < policy.slots and not policy.keep_last:
        logger.warning(
            "poros: slots=%d is more than the %d blocks; using %d",
            policy.slots,
            runtime.num_blocks,
            runtime.num_slots,
        )
    logger.info(
        "poros: %d blocks (%.3f GB on the host) stream through %d slots (%.3f GB on %s)",
        runtime.num_blocks,
        stats["host_num_bytes"] / 1e9,
        runtime.num_slots,
        stats["device_num_bytes"] / 1e9,
        runtime.device,
    )
    return model


def _supervise(takeover: Takeover, inventory: Inventory, policy: StreamingPolicy) -> Runtime:
    """The runtime, known to the layers, and their check."""
    self_check = None
    if policy.self_check != "off":
        from poros.self_check.check import SelfCheck

        self_check = SelfCheck(takeover, inventory.layers, policy.self_check)
    else:
        logger.warning("poros: self_check is off: the first step will not be checked")
    runtime = Runtime(policy, takeover, self_check)
    for layer in inventory.layers:
        runtime_of(layer).owner = runtime
        if self_check is not None:
            runtime_of(layer).check = self_check.watch
            runtime_of(layer).check_bytes = self_check.watch_bytes
    return runtime


def patch_hf_model(model: ModelT, block_size: int = 4) -> ModelT:
    """``prepare`` with an explicit block size and two slots; nothing is planned."""
    return prepare(model, block_size=block_size, slots=MIN_SLOTS)


def restore(model: ModelT) -> ModelT:
    """Undo ``prepare``: the same object, with its bytes, devices and behaviour from before it.

    Adapters keep what they have learnt. If the base does not fit where it was, the error of the
    failed allocation is raised and the model stays prepared. So it does if layers stay in a file
    that is no longer what was loaded.

    Raises:
        CheckpointFormatError: If somebody has written to that file.
        PreparedModelError: If the model is not prepared.
    """
    existing = runtime(model)
    existing._takeover.host.require_intact()
    existing._takeover.revert()
    return model


def runtime(model: nn.Module) -> Runtime:
    """The runtime of a prepared model.

    Raises:
        PreparedModelError: If the model is not prepared.
    """
    existing = _find(model)
    if existing is None:
        raise PreparedModelError(
            f"expected a prepared model, found a {type(model).__name__} that is not; call "
            "poros.prepare(model) first"
        )
    return existing


def _find(model: nn.Module) -> Runtime | None:
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if is_streamed(module):
            found: Runtime = runtime_of(module).owner
            return found
    return None


def _choose_device(model: nn.Module, policy: StreamingPolicy) -> torch.device:
    if policy.device is not None:
        return usable_device(policy.device)
    for module in model.modules():
        if is_adapter_module(module):
            for parameter in module.parameters():
                if parameter.device.type == "cuda":
                    return parameter.device
    return default_device()
