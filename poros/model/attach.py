"""Turns a resident model into a streamed one and back. Either completes, or changes nothing.

Note: Reversible, instance only
    Every change is to this model instance, and each pushes its own undoing. Moves of tensors are
    undone together: their new places are allocated first, so that running out of memory on the way
    back leaves the model prepared and working.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from poros.config import MIN_SLOTS, StreamingPolicy
from poros.digests import SourceDigests
from poros.host.store import drop_store, left_store
from poros.layer.frozen import (
    Binding,
    DeviceConstants,
    FrozenTensor,
    LayerBindings,
    bind_block,
    constant_parts,
)
from poros.layer.offload import Boundaries
from poros.layer.state import AutocastRegions
from poros.layer.staying import SmallTensors
from poros.layer.streamed import LayerRuntime, attach, detach, runtime_of, streamed_class
from poros.layer.visits import Visits
from poros.layout import BlockLayout
from poros.model.added_adapters import Initialisation, require_proven
from poros.model.adoption import host_store
from poros.model.guards import Guards
from poros.model.inspect import Inventory, is_adapter_module, staying_places
from poros.nf4 import Part, is_4bit
from poros.slots.manager import BlockManager
from poros.slots.ring import DeviceRing
from poros.slots.schedule import Action, divide
from poros.streams import StreamContext, Timings

logger = logging.getLogger(__name__)

_DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"


class Takeover:
    """The changes made to one model, and everything that streams it.

    Args:
        model: The model, checked by ``poros.model.inspect.take_inventory``.
        inventory: What it found.
        policy: How to stream.
        streams: The device's streams, or a stand-in.
        journal: See ``BlockManager``.

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
        journal: list[Action] | None,
    ) -> None:
        self.device = streams.device
        self._streams = streams
        self.model = weakref.ref(model)
        self._base = weakref.ref(inventory.base)
        self._layers_name = inventory.layers_name
        self._layers = [weakref.ref(layer) for layer in inventory.layers]
        self.blocks = inventory.blocks
        self._small = inventory.small
        self._kinds = inventory.kinds
        self.block_size = policy.block_size
        self.visits = Visits()
        self._undo = ExitStack()
        self._moved: list[tuple[Part, torch.device]] = []
        self.host, self.is_adopted = host_store(inventory, policy.block_size)
        layouts = [slab.layout for slab in self.host.slabs]
        self.digests = SourceDigests() if policy.self_check != "off" else None
        """Of what streams, as it was before it was moved; None if nobody will look."""
        try:
            self.small = SmallTensors(
                inventory.by_layer(), self.device, digests=self.digests is not None
            )
            self._move_to_host(inventory, layouts)
            self._move_small()
            self._move_to_device(model, inventory)
            if self.device.type == "cuda":
                self.host.pin(self.device)
            self.ring = DeviceRing((), MIN_SLOTS, streams)
            self.manager = BlockManager(self.host, self.ring, streams, journal)
            self._make_room(policy.slots or MIN_SLOTS, policy.keep_last or 0)
            self.boundaries = Boundaries(streams)
            self.constants = DeviceConstants(self.device, self.small.nested)
            self._engage(self._make_runtimes(inventory), model)
            self.offload_boundaries(bool(policy.offload_boundaries))
            if not self.is_adopted:
                drop_store(inventory.base)
        except BaseException:
            if self.digests is not None:
                self.digests.close()
            try:
                self._move_back()
            finally:
                self._undo.close()
                self.host.unpin()
            raise

    def resize(self, num_slots: int, keep_last: int) -> None:
        """Give the blocks other room on the device. Not within a visit; adapters and bytes stay.

        Args:
            num_slots: All slots, those of blocks that stay included.
            keep_last: Layers at the end that keep their graph.

        Raises:
            torch.OutOfMemoryError: If the device has not got it; the room is what it was.
        """
        self.visits.end_all()
        before = (self.num_slots, self.keep_last)
        for runtime in self._runtimes():
            runtime.bindings.require_at_rest()
        # Given up first, so that the new room can be had in the old one's place.
        for runtime in self._runtimes():
            runtime.leave()
        self._give_up_room()
        failure: torch.OutOfMemoryError | None = None
        try:
            self._make_room(num_slots, keep_last)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames hold the part that could be had
        if failure is not None:
            self._make_room(*before)
        self._rehouse()
        if failure is not None:
            raise failure

    def _renewer(self) -> Callable[[], None]:
        """Makes all slots anew, after somebody has written to one."""
        # Weakly: the model holds it.
        reference = weakref.ref(self)

        def renew() -> None:
            living = reference()
            if living is not None:
                living.resize(living.num_slots, living.keep_last)

        return renew

    def offload_boundaries(self, wanted: bool) -> None:
        """Whether the inputs of layers wait for their backward on the host from now on."""
        self.is_offloading = wanted
        for runtime in self._runtimes():
            runtime.boundaries = self.boundaries if wanted else None

    def _make_room(self, num_slots: int, keep_last: int) -> None:
        layouts = [slab.layout for slab in self.host.slabs]
        found = divide(len(self._layers), self.block_size, num_slots, keep_last)
        self._use(DeviceRing(layouts, found.ring_slots, self._streams, found.num_resident))
        self.num_slots, self.keep_last = num_slots, keep_last

    def _give_up_room(self) -> None:
        """No block has a place: what is left when even the old room cannot be had again."""
        self._use(DeviceRing((), MIN_SLOTS, self._streams))

    def _use(self, ring: DeviceRing) -> None:
        self.ring = ring
        self.manager.use(ring)

    def _rehouse(self) -> None:
        """Tell the layers where their blocks are now."""
        bindings = self._bind()
        for index, runtime in enumerate(self._runtimes()):
            runtime.move_in(LayerBindings(bindings.get(index, [])))

    def _bind(self) -> dict[int, list[Binding]]:
        """The frozen tensors of each layer, with their views of slots."""
        found: dict[int, list[Binding]] = {}
        for block, (tensors, slab) in enumerate(zip(self.blocks, self.host.slabs, strict=True)):
            buffer = self.ring.slot(block).buffer
            found |= bind_block(tensors, slab.layout, buffer, self.constants)
        return found

    def _runtimes(self) -> list[LayerRuntime]:
        layers = [layer for reference in self._layers if (layer := reference()) is not None]
        return [runtime_of(layer) for layer in layers]

    @property
    def device_num_bytes(self) -> int:
        """Slots, blocks that stay, small tensors, and quantization constants."""
        return self.ring.num_bytes + self.small.num_bytes + self.constants.num_bytes

    def timings(self) -> Timings:
        """How long copies of blocks have taken so far."""
        return self._streams.timings()

    def adapters(self) -> object:
        """Differs if what is trained in the first layer with adapters does."""
        for runtime in self._runtimes():
            found = runtime.tree().adapters()
            if found:
                return [(id(each.parameter), each.parameter.dtype) for each in found]
        return []

    def revert(self) -> None:
        """Make the model what it was. The slots and the page locks are gone afterwards.

        Tensors that came from host memory stay where they are: in the memory of the store.
        """
        self.visits.end_all()
        self._move_back()
        self._undo.close()
        self.host.unpin()
        self.boundaries.unpin()

    def _move_back(self) -> None:
        # All new places first: if one cannot be had, nothing has moved.
        moving = [
            (part, origin)
            for part, origin in self._moved
            if part.get().device != origin or self.small.holds(part.get())
        ]
        sources = self.host.at_rest([part.get() for part, _ in moving])
        staged = [
            (part, source.to(origin, copy=True))
            for (part, origin), source in zip(moving, sources, strict=True)
        ]
        for part, tensor in staged:
            _put(part, tensor)
        self._moved.clear()

    def _move_to_host(self, inventory: Inventory, layouts: Sequence[BlockLayout]) -> None:
        host = torch.device("cpu")
        self._base_origin = host
        left = left_store(inventory.base) or self.host
        for tensors, layout, slab in zip(inventory.blocks, layouts, self.host.slabs, strict=True):
            parts = [part for each in tensors for part in each.parts()]
            wanted = [
                (part, spec)
                for part, spec in zip(parts, layout.tensors, strict=True)
                if self.digests is not None or not slab.holds(part.get(), spec)
            ]
            sources = left.at_rest([part.get() for part, _ in wanted])
            for (part, spec), source in zip(wanted, sources, strict=True):
                if self.digests is not None:
                    self.digests.add(part.name, source, left.as_packed.of(part.owner))
                if slab.holds(part.get(), spec):
                    continue
                target = slab.tensor(spec)
                with torch.no_grad():
                    target.copy_(source)
                self._base_origin = part.get().device
                self._moved.append((part, self._base_origin))
                part.put(target)
            for each in tensors:
                if each.is_4bit:
                    constants = constant_parts(each.name, each.tensor)
                    for part in constants:
                        expected = left.as_packed.of(part.owner)
                        if self.digests is not None and expected is not None:
                            self.digests.add(part.name, part.get(), expected)
                    self._place(constants, host)

    def _move_small(self) -> None:
        """Norms, biases and buffers of the layers."""
        for part, copy in self.small.moves:
            self._moved.append((part, part.get().device))
            _put(part, copy)
        self.small.moves.clear()

    def _move_to_device(self, model: nn.Module, inventory: Inventory) -> None:
        """Everything that is not streamed: adapters, embedding, norms outside the layers, head."""
        groups = (*inventory.blocks, *inventory.small)
        seen_to = {id(each.tensor) for group in groups for each in group}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) in seen_to:
                continue
            parts = FrozenTensor(name, tensor).parts()
            if is_4bit(tensor):
                parts += constant_parts(name, tensor)
            self._place(parts, self.device)

    def settle(self, layer: nn.Module) -> None:
        """Bring what has come to ``layer`` since to the device: an adapter that was added.

        ``restore`` brings it to where the base goes then, wherever PEFT has put it.
        """
        require_proven(layer, self._kinds)
        known = {id(each.tensor) for block in self.blocks for each in block}
        known |= {id(part.owner) for part, _ in self._moved if part.owner.device == self.device}
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if id(tensor) not in known:
                for part in FrozenTensor(name, tensor).parts():
                    self._moved.append((part, self._base_origin))
                    if part.get().device != self.device:
                        _put(part, part.get().to(self.device))

    def _place(self, parts: Iterable[Part], device: torch.device) -> None:
        for part in parts:
            before = part.get()
            if before.device != device:
                after = before.to(device)
                self._moved.append((part, before.device))
                _put(part, after)

    def _make_runtimes(
        self, inventory: Inventory
    ) -> list[tuple[nn.Module, LayerRuntime, type[nn.Module]]]:
        """What each layer becomes, without changing it yet."""
        regions = AutocastRegions(self.device)
        classes: dict[type[nn.Module], type[nn.Module]] = {}
        # Weakly: the layers hold it, and the takeover must go with the runtime.
        reference = weakref.ref(self)

        def settle(layer: nn.Module) -> None:
            living = reference()
            if living is not None:
                living.settle(layer)

        bindings = self._bind()
        made = []
        for index, layer in enumerate(inventory.layers):
            block = index // self.block_size
            runtime = LayerRuntime(
                layer,
                index,
                inventory.layer_name(index),
                block,
                self.device,
                self.manager,
                LayerBindings(bindings.get(index, [])),
                is_adapter_module=is_adapter_module,
                staying_places=staying_places,
                settle=settle,
                regions=regions,
                visits=self.visits,
                tied_adapters=inventory.tied_adapters,
                boundaries=None,
            )
            base = type(layer)
            if base not in classes:
                classes[base] = streamed_class(base)
            made.append((layer, runtime, classes[base]))
        return made

    def _engage(
        self, layers: Sequence[tuple[nn.Module, LayerRuntime, type[nn.Module]]], model: nn.Module
    ) -> None:
        """Make the layers stream, and see to everything around them."""
        for layer, runtime, streamed in layers:
            self._undo.callback(_call_if_alive, weakref.ref(layer), detach)
            attach(layer, runtime, streamed)
        self._adjust(model)

    def _adjust(self, model: nn.Module) -> None:
        """Settings around the layers that would get in the way."""
        ancestors = _ancestors(model, self._layers_name)
        for _, module in ancestors:
            if getattr(module, "gradient_checkpointing", False):
                logger.info(
                    "poros: gradient checkpointing switched off: layers are recomputed anyway"
                )
                self._set(module, "gradient_checkpointing", False)
        if self.device.type == "cpu":
            # In eval mode bitsandbytes would repack the weights for AVX512, and round their absmax.
            for module in model.modules():
                if getattr(module, "support_avx512bf16_for_cpu", False):
                    self._set(module, "support_avx512bf16_for_cpu", False)
        for block in self.blocks:
            for each in block:
                for _, module in each.modules:
                    # A deep copy of a 4-bit module has two equal states instead of one.
                    if module.quant_state is not each.tensor.quant_state:  # type: ignore[attr-defined]
                        self._set(module, "quant_state", each.tensor.quant_state)  # type: ignore[attr-defined]
        base = self._base()
        if base is not None and getattr(base, "hf_device_map", None):
            self._set(base, "hf_device_map", {"": self.device})
        self._hide_from_ddp(model)
        guards = Guards()
        self._undo.callback(guards.remove)
        guards.install(ancestors, self.device, partial(Initialisation, renew=self._renewer()))

    def _hide_from_ddp(self, model: nn.Module) -> None:
        """DDP would broadcast the frozen tensors at its start, writing to the host copies.

        Of what stays, only buffers are hidden, which it would write at every forward: a norm may be
        trained by the time that DDP wraps the model.
        """
        hidden = {each.name for block in self.blocks for each in block}
        hidden |= {each.name for group in self._small for each in group if each.is_buffer}
        before = getattr(model, _DDP_IGNORED, None)
        self._undo.callback(_call_if_alive, weakref.ref(model), partial(_put_back, before=before))
        model.__dict__[_DDP_IGNORED] = sorted(hidden | set(before or ()))

    def _set(self, module: nn.Module, name: str, value: object) -> None:
        before = getattr(module, name)
        setattr(module, name, value)
        reference = weakref.ref(module)
        self._undo.callback(_call_if_alive, reference, lambda module: setattr(module, name, before))


def _put_back(model: nn.Module, before: object) -> None:
    del model.__dict__[_DDP_IGNORED]
    if before is not None:
        model.__dict__[_DDP_IGNORED] = before


def _put(part: Part, tensor: torch.Tensor) -> None:
    """Give ``part`` new bytes; a gradient follows its parameter."""
    gradient = getattr(part.holder, "grad", None) if part.attribute == "data" else None
    if gradient is not None:
        part.holder.grad = None
    part.put(tensor)
    if gradient is not None:
        part.holder.grad = gradient.to(tensor.device)


def _ancestors(model: nn.Module, layers_name: str) -> list[tuple[str, nn.Module]]:
    """The modules on the way from ``model`` to the ModuleList of layers, both included."""
    parts = layers_name.split(".") if layers_name else []
    names = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return [(name, model.get_submodule(name)) for name in names]


def _call_if_alive(reference: Any, action: Any) -> None:
    module = reference()
    if module is not None:
        action(module)
