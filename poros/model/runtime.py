"""What streams one prepared model: the one owner of its slabs, slots, constants and counts."""

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.config import MIN_SLOTS, StreamingPolicy
from poros.head.rows import RowReader
from poros.host.store import detach_store
from poros.io.digests import SourceDigests
from poros.kernels.adapters import KernelStats
from poros.kernels.packed_attention import attention_of
from poros.model.attach import Attachment, host_store
from poros.model.inspect import Inventory
from poros.model.measuring import MeasuredSizer, device_memory, held_num_bytes
from poros.model.passes import Passes
from poros.model.recorded import captures_for, dense_layer_for, workspace_for
from poros.model.sizing import Estimate, ResidencyPlan, Sizer
from poros.replay.captures import NEW
from poros.replay.graphs import Recorder
from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing
from poros.slots.schedule import divide
from poros.stream.boundary import StreamedLayer, is_streamed
from poros.stream.context import LayerCheck, ModelContext
from poros.stream.frozen import DeviceConstants, SmallTensors, bind_block
from poros.stream.offload import ActivationOffloader
from poros.stream.visit import Binding, LayerBindings
from poros.streams import StreamContext, gb_per_s
from poros.utils.formatting import counted, size

if TYPE_CHECKING:
    from poros.planning.formula import MemoryPlan

logger = logging.getLogger(__name__)

_KEY = "_poros_runtime"
"""Where a streamed layer has it in its ``__dict__``."""


class Runtime(Passes):
    """What streams a prepared model. Get it with ``poros.runtime(model)``.

    Args:
        model: The model, checked by ``poros.model.inspect.take_inventory``; held weakly.
        estimate: Of a step of this model, for its budget.

    Attributes:
        policy: The policy the model was prepared with.
        device: Where it trains.
        host: The frozen bytes of every block, in host memory or on a disk.
        is_adopted: Whether that memory is what a loader has left, and nothing was copied.
        blocks: The frozen tensors of each block.
        ring: The slots. Another one after each resize.
        manager: Moves blocks through them.
        constants: Small constants of 4-bit weights, on the device.
        small: Norms, biases and other small tensors of the layers, on the device.
        rows: Brings rows of embeddings that stay in host memory.
        head: Brings slices of the head's matrix if that is in host memory, else None.
        offloader: Inputs of layers that wait on the host.
        context: What the layers know of all this.
        sizer: Decides on the room that blocks get.
        room: The room they have.
        digests: Of what streams, as it was before it was moved; None if it is never compared.
        tally: Which way adapted modules ran; None with PEFT's own modules.
        captures: Recorded visits; None if no visit is recorded.
        unchecked: What of it neither a gate nor the self-check covers; "" if nothing.
        num_grouped: Micro-batches that go through the blocks together with the one that comes.
        accumulation: What ``poros.accumulation`` has found out about them.

    Raises:
        CheckpointFormatError: If layers stay in a file that is not what was loaded; the model is
            unchanged.
        HostMemoryError: If the host store cannot be had; the model is unchanged.
        torch.OutOfMemoryError: If the slots do not fit on the device; the model is unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        inventory: Inventory,
        policy: StreamingPolicy,
        streams: StreamContext,
        estimate: Estimate,
        recorder: Recorder | None = None,
    ) -> None:
        self.policy = policy
        self.device = streams.device
        self._streams = streams
        self._model = weakref.ref(model)
        self._layers = [weakref.ref(layer) for layer in inventory.layers]
        self.blocks = inventory.blocks
        self._findings: Callable[[], dict[str, Any]] = _nothing_checked
        self.unchecked = ""
        self._num_resizes = 0
        self.num_grouped = 1
        self.accumulation: Any = None
        self._matrices_num_bytes = sum(each.matrix.nbytes for each in inventory.embeddings)
        self.room = ResidencyPlan(
            policy.slots or MIN_SLOTS, policy.keep_last or 0, bool(policy.offload_boundaries)
        )
        self.host, self.is_adopted = host_store(inventory, policy.block_size)
        self.digests = SourceDigests() if policy.self_check != "off" else None
        self.tally = (
            KernelStats(policy.adapter_kernels, policy.lora_paths, is_constant=True)
            if policy.adapter_kernels != "peft"
            else None
        )
        self._attachment = Attachment(inventory, self.device, self.host, self.tally, self.digests)
        try:
            self._set_up(model, inventory, estimate, recorder)
        except BaseException:
            self._attachment.abandon()
            raise

    def _set_up(
        self, model: nn.Module, inventory: Inventory, estimate: Estimate, recorder: Recorder | None
    ) -> None:
        """Move tensors and attach the layers; what it takes is given back as the model detaches."""
        attachment, policy, streams = self._attachment, self.policy, self._streams
        attachment.at_detach(self.host.unpin)
        if self.digests is not None:
            attachment.at_detach(self.digests.close)
        self.small = SmallTensors(
            inventory.by_layer(), self.device, digests=self.digests is not None
        )
        attachment.move_to_host(model)
        attachment.move_small(self.small)
        self.rows = RowReader(streams)
        attachment.at_detach(self.rows.unlock)
        attachment.keep_embeddings(model, self.rows)
        self.head = attachment.take_head(model, self.rows, streams)
        attachment.move_to_device(model)
        if self.device.type == "cuda":
            self.host.pin(self.device)
        workspace = workspace_for(policy, self.device, inventory.blocks)
        self.constants = DeviceConstants(self.device, self.small.nested, workspace)
        self._dense = dense_layer_for(policy, self.device)
        self.ring = self._allocate_slots(self.room)
        self._hold_head(self.room)
        self.manager = BlockManager(self.host, self.ring, streams)
        self.offloader = ActivationOffloader(streams)
        attachment.at_detach(self.offloader.unpin)
        self.sizer = self._make_sizer(estimate)
        self.context = self._make_context(inventory, recorder)
        layers = self._make_layers(inventory)
        passes = self.begin_pass, self.end_pass
        attachment.attach_layers(model, layers, *passes, lambda: self.resize(self.room))
        attachment.at_detach(partial(_forget_runtime, self._layers))
        for layer in inventory.layers:
            layer.__dict__[_KEY] = self
        if not self.is_adopted:
            detach_store(inventory.base)

    def _make_sizer(self, estimate: Estimate) -> Sizer:
        memory = device_memory(self.device)
        if memory is None:
            return Sizer(self.policy, estimate)
        reference = weakref.ref(self)  # which holds the sizer

        def held() -> int:
            runtime = reference()
            return 0 if runtime is None else runtime._held_num_bytes()

        def terms_to_come() -> Sequence[str]:
            runtime = reference()
            captures = None if runtime is None else runtime.captures
            return () if captures is None else captures.terms_to_come

        return MeasuredSizer(self.policy, estimate, memory, held, self._model, terms_to_come)

    def _hold_head(self, room: ResidencyPlan) -> None:
        """Keep the head on the device if every block is there."""
        if self.head is None:
            return
        # One that has been asked for stays in host memory.
        if not self.policy.stream_head and room.num_slots >= self.num_blocks:
            self.head.load()
        else:
            self.head.evict()

    def _make_context(self, inventory: Inventory, recorder: Recorder | None) -> ModelContext:
        context = ModelContext(
            self._model,
            self.device,
            self.manager,
            inventory.tied_adapters,
            self._attachment.admit,
            self.sizer.explain,
            self.tally,
            self._dense,
            self.constants.workspace,
        )
        self.captures = captures_for(self.policy, self.device, recorder, inventory.blocks)
        context.captures = self.captures
        if self.room.offload_inputs:
            context.offloader = self.offloader
        return context

    def _make_layers(self, inventory: Inventory) -> list[tuple[nn.Module, StreamedLayer]]:
        """What each layer becomes, without changing it yet."""
        bindings = self._bindings()
        return [
            (
                layer,
                StreamedLayer(
                    layer,
                    index,
                    inventory.layer_name(index),
                    index // self.policy.block_size,
                    LayerBindings(bindings.get(index, [])),
                    self.context,
                ),
            )
            for index, layer in enumerate(inventory.layers)
        ]

    @property
    def num_blocks(self) -> int:
        """Blocks the layers are grouped into."""
        return len(self.blocks)

    @property
    def num_slots(self) -> int:
        """Slots that blocks stream through, without those of blocks that stay."""
        return len(self.ring.slots)

    @property
    def num_streamed_blocks(self) -> int:
        """Blocks that stream; the others stay on the device (``keep_last``)."""
        return self.manager.num_blocks

    @property
    def device_num_bytes(self) -> int:
        """Slots, small tensors, quantization constants, dense weights, and slices of the head."""
        dense = self._dense.num_bytes if self._dense else 0
        head = self.head.num_bytes if self.head else 0
        own = self.ring.num_bytes + self.small.num_bytes + self.constants.num_bytes
        return own + head + dense

    @property
    def plan(self) -> "MemoryPlan | None":
        """The estimate for the budget and the largest batch; None before the first step."""
        return self.sizer.plan

    @property
    def self_check(self) -> dict[str, Any]:
        """What the check of the first step has found so far.

        Returns:
            ``mode``, ``status`` (pending, passed, failed, unproven or off), ``message`` (the
            mismatch, if any), ``proved_with_deterministic_attention`` and ``not_provable`` (names
            of layers that do not repeat themselves: see ``poros.self_check.check``), ``kernels``
            (those of the layers that were compared with: PEFT's own, or ours where PEFT's do not
            fit into the budget).
        """
        return self._findings()

    def stats(self) -> dict[str, Any]:
        """Return what has happened since ``prepare`` as plain numbers.

        Returns:
            Copies: ``num_loads`` (copies of blocks that were queued), ``num_hits`` (visits of a
            block that was still in its slot), ``h2d_num_bytes`` (bytes of those copies), ``h2d_ms``
            and ``h2d_gb_per_s`` (time on the device and rate of the completed copies), ``stall_ms``
            (time for which the device only waited for a copy).

            Memory: ``device_num_bytes`` (slots, blocks that stay, small frozen tensors, constants
            of 4-bit weights), ``host_num_bytes`` and ``pinned_num_bytes`` (frozen bytes in host
            memory, and the page-locked part of them), ``disk_num_bytes`` and ``disk_stall_ms``
            (frozen bytes that stay on a disk, and time for which training waited for them),
            ``offloaded_num_bytes`` (host memory for inputs of layers), ``num_resizes`` (changes of
            the number of blocks on the device).

            Vocabulary: ``rows_num_bytes`` (bytes of rows of matrices in host memory that were
            copied to the device, for the tokens of a batch or for code that needs a part or all of
            a matrix), ``head_num_bytes`` (bytes of the slices of the head that were copied for the
            loss).

            Adapters: ``num_fused_adapters`` and ``num_unfused_adapters`` (calls of LoRA modules
            that ran ``poros.kernels.lora`` or ``.dora``, and calls that ran PEFT's modules),
            ``num_left_out_adapters`` (calls in recomputations whose result was not needed and not
            computed), ``lora_paths`` (the orders of products: see
            ``poros.kernels.adapters.KernelStats.counts``).

            ``num_replayed_visits`` (of which ``num_joined_visits`` in one go with those of other
            micro-batches, or of other layers) and ``num_eager_visits``: forwards and backwards of
            layers that were replayed from a recording, and that ran without one although recording
            is on.

            ``num_groups``: groups of micro-batches that went through the blocks together.

            ``attention``: the attention implementation of transformers that the layers call, such
            as ``sdpa`` or ``flash_attention_2``.

            ``fallbacks``: one line for each thing that ran in another way than usual.

        Streams:
            Reads counters on the host, and events; waits for nothing.
        """
        host, head, rows, manager = self.host, self.head, self.rows, self.manager
        captures, grouped, tally = self.captures, self.accumulation, self.tally
        timings = self._streams.timings()
        eager = captures.eager if captures is not None else {}
        alone = grouped.alone if grouped is not None else {}
        unfused = tally.unfused if tally is not None else {}
        return {
            "num_loads": manager.num_loads,
            "num_hits": manager.num_hits,
            "h2d_num_bytes": manager.h2d_num_bytes,
            "device_num_bytes": self.device_num_bytes,
            "host_num_bytes": host.num_bytes
            + self._matrices_num_bytes
            + (head.matrix.nbytes if head else 0),
            "pinned_num_bytes": host.pinned_num_bytes + rows.pinned_num_bytes,
            "disk_num_bytes": host.disk_num_bytes,
            "disk_stall_ms": host.disk_stall_ms,
            "offloaded_num_bytes": self.offloader.num_bytes,
            "h2d_ms": timings.copy_ms,
            "h2d_gb_per_s": gb_per_s(timings.num_bytes, timings.copy_ms),
            "stall_ms": timings.stall_ms,
            "rows_num_bytes": rows.h2d_num_bytes,
            "head_num_bytes": head.h2d_num_bytes if head else 0,
            "num_resizes": self._num_resizes,
            **(tally or KernelStats()).counts(),
            "num_replayed_visits": captures.num_replays if captures is not None else 0,
            "num_joined_visits": captures.rows.num_joined if captures is not None else 0,
            "num_eager_visits": sum(eager.values()),
            "attention": attention_of(self._model()),
            "num_groups": grouped.num_groups if grouped is not None else 0,
            "fallbacks": host.fallbacks
            + self.offloader.fallbacks
            + rows.fallbacks
            + [f"adapters ran PEFT's modules: {reason}" for reason in unfused]
            + [f"visits were not replayed: {reason}" for reason in eager if reason != NEW]
            + [f"micro-batches ran one after the other: {reason}" for reason in alone],
        }

    def __repr__(self) -> str:
        """Describe in a few lines where the blocks are, what happened and what was checked."""
        model, stats, room = self._model(), self.stats(), self.room
        name = "a model that is gone" if model is None else type(model).__name__
        kept = f", {counted(room.keep_last, 'layer')} not recomputed" if room.keep_last else ""
        inputs = ", inputs of layers in host memory" if room.offload_inputs else ""
        locked = "page-locked" if stats["pinned_num_bytes"] else "pageable"
        number = self.num_blocks if self.num_slots == 0 else room.num_slots
        lines = [
            f"Runtime of {name} on {self.device}",
            f"  {self.num_blocks} blocks, {number} on the device at a time{kept}{inputs}",
            f"  {size(stats['host_num_bytes'])} in host memory ({locked}), "
            f"{size(stats['device_num_bytes'])} on the device",
            f"  {stats['num_loads']} copies of blocks, {size(stats['h2d_num_bytes'])} at "
            f"{stats['h2d_gb_per_s']:.1f} GB/s; waited {stats['stall_ms']:.0f} ms for them",
            f"  check of the first step: {self.self_check['status']}",
        ]
        return "\n".join([*lines, *(f"  {line}" for line in stats["fallbacks"])])

    def host_slab(self, block: int) -> torch.Tensor:
        """The authoritative bytes of ``block``: (num_bytes,), uint8, on the host. Not a copy."""
        return self.host.slabs[block].bytes

    def watch_with(
        self,
        check: LayerCheck,
        watch_rows: Callable[[str, torch.Tensor, Any, torch.Tensor], None],
        findings: Callable[[], dict[str, Any]],
    ) -> None:
        """Have ``check`` see the first call of each layer, and ``watch_rows`` rows from the host.

        ``findings`` gives the value of ``self_check`` from now on.
        """
        self._findings = findings
        self.context.check = check
        self.rows.check = watch_rows
        if self.head is not None:
            self.head.check = watch_rows

    def share_dense(self) -> None:
        """Have memory for a layer's dense weights, if there is room."""
        if self._dense is None:
            return
        had = self._dense.num_bytes
        try:
            if self.sizer.shares_dense and not self.sizer.is_quicker_alone:
                self._dense.allocate()
                return
        except torch.OutOfMemoryError:
            self.sizer.shares_dense = False
            logger.warning(
                "poros: there is no memory to share a layer's dense weights, so each micro-batch "
                "dequantizes them for itself. The result is the same"
            )
        self._dense.free()
        if had and self.captures is not None:
            self.captures.forget()  # recorded visits read the memory that is gone

    def resize(self, room: ResidencyPlan) -> None:
        """Give the blocks other room on the device. Not within a visit; adapters and bytes stay.

        Raises:
            torch.OutOfMemoryError: If the device has not got it; the room is what it was.
        """
        self.context.visits.end_all()
        if self.captures is not None:
            self.captures.forget()  # blocks will lie elsewhere
        layers = list(self.streamed_layers())
        for layer in layers:
            layer.weights.bindings.require_at_rest()
        # Given up first, so that the new room can be had in the old one's place.
        for layer in layers:
            layer.weights.unbind()
        self._use(DeviceRing((), MIN_SLOTS, self._streams))
        failure: torch.OutOfMemoryError | None = None
        try:
            self._hold_head(room)
            self._use(self._allocate_slots(room))
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames hold the part that could be had
        if failure is not None:
            self._hold_head(self.room)
            self._use(self._allocate_slots(self.room))
        bindings = self._bindings()
        for layer in layers:
            layer.weights.bind(LayerBindings(bindings.get(layer.index, [])))
        if failure is not None:
            raise failure
        self.room = room
        self.context.offloader = self.offloader if room.offload_inputs else None
        self._num_resizes += 1

    def detach(self) -> None:
        """Make the model what it was. The slots and the page locks are gone afterwards.

        Raises:
            torch.OutOfMemoryError: If the base does not fit where it was; the model is as before.
        """
        self.context.visits.end_all()
        self._attachment.detach()

    def _allocate_slots(self, room: ResidencyPlan) -> DeviceRing:
        layouts = [slab.layout for slab in self.host.slabs]
        division = divide(len(self._layers), self.policy.block_size, room.num_slots, room.keep_last)
        return DeviceRing(layouts, division.ring_slots, self._streams, division.num_pinned)

    def _use(self, ring: DeviceRing) -> None:
        self.ring = ring
        self.manager.use(ring)

    def _bindings(self) -> dict[int, list[Binding]]:
        """The frozen tensors of each layer, with their views of slots."""
        bindings: dict[int, list[Binding]] = {}
        for block, (tensors, slab) in enumerate(zip(self.blocks, self.host.slabs, strict=True)):
            buffer = self.ring.slot(block).buffer
            bindings |= bind_block(tensors, slab.layout, buffer, self.constants, self._dense)
        return bindings

    def _held_num_bytes(self) -> int:
        """Bytes on the device that belong to the model, its slots included."""
        model = self._model()
        if model is None:
            return 0
        return held_num_bytes(model, self.device, self.small) + self.device_num_bytes


def _forget_runtime(layers: Sequence[weakref.ref[nn.Module]]) -> None:
    for reference in layers:
        layer = reference()
        if layer is not None:
            layer.__dict__.pop(_KEY, None)


def find_runtime(model: object) -> Runtime | None:
    """The runtime of a prepared model; None if it is not prepared."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if is_streamed(module):
            runtime: Runtime = module.__dict__[_KEY]
            return runtime
    return None


def _nothing_checked() -> dict[str, Any]:
    """``Runtime.self_check`` for a runtime without a self-check."""
    return {
        "mode": "off",
        "status": "off",
        "message": None,
        "proved_with_deterministic_attention": [],
        "not_provable": [],
        "kernels": None,
    }
