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

from poros.head.choice import keep_on_host
from poros.head.rows import RowReader
from poros.head.slices import SliceReader, keep_head
from poros.head.takeover import slice_loss
from poros.host.layout import BlockLayout
from poros.host.store import HostStore, attached_store
from poros.io.digests import SourceDigests
from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import unpatch
from poros.kernels.nf4 import Part, is_4bit
from poros.kernels.use import patch
from poros.model.guards import guards_of, require_proven
from poros.model.inspect import Inventory
from poros.model.vision import base_of
from poros.stream.boundary import (
    StreamedLayer,
    attach_layer,
    detach_layer,
    is_streamed,
    streamed_class,
)
from poros.stream.frozen import FrozenTensor, SmallTensors, constant_parts
from poros.streams import StreamContext
from poros.utils.formatting import size

logger = logging.getLogger(__name__)

_DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"


def host_store(inventory: Inventory, block_size: int) -> tuple[HostStore, bool]:
    """Return the store of the blocks, and whether it is the loader's (``poros.host.store``).

    Raises:
        CheckpointFormatError: If layers stay in a file that is not what was loaded.
        HostMemoryError: If there is no memory for a new one.
    """
    layers = [
        [(part.name, part.get()) for tensor in streamed for part in tensor.parts()]
        for _, streamed in inventory.by_layer()
    ]
    blocks = [layers[first : first + block_size] for first in range(0, len(layers), block_size)]
    left = attached_store(inventory.base)
    if left is not None:
        left.require_intact()
    adopted = left.adopt(blocks) if left is not None else None
    if adopted is not None:
        return adopted, True
    if left is not None and left.slabs:
        logger.warning(
            "poros: the base is no longer where poros.load put it, because weights were replaced "
            "or cast since. It is copied, so up to %s of host memory are held twice",
            size(left.num_bytes),
        )
    layouts = [BlockLayout.join([BlockLayout.pack(layer) for layer in block]) for block in blocks]
    host = HostStore.allocate(layouts)
    if left is not None:
        host.fallbacks += left.fallbacks
    return host, False


class Attachment:
    """The changes made to one model. ``detach`` undoes those that were made so far.

    Args:
        inventory: What ``poros.model.inspect.take_inventory`` found in the model.
        tally: Counts calls of adapters that run our kernels; None runs PEFT's modules.
        digests: Hash what leaves for host memory, on the way; None if it is never compared.
    """

    def __init__(
        self,
        inventory: Inventory,
        device: torch.device,
        host: HostStore,
        tally: KernelStats | None,
        digests: SourceDigests | None,
    ) -> None:
        self._device = device
        self._host = host
        self._tally = tally
        self._digests = digests
        self._layers_name = inventory.layers_name
        self._blocks = inventory.blocks
        self._small = inventory.small
        self._kinds = inventory.kinds
        self._embeddings = inventory.embeddings
        self._head = inventory.head
        self._undo = ExitStack()
        self._moved: list[tuple[Part, torch.device]] = []
        self._base_origin = torch.device("cpu")
        self._buffers: SmallTensors | None = None

    def move_to_host(self, model: nn.Module) -> None:
        """Move the frozen tensors that stream into the slabs."""
        left = attached_store(base_of(model)) or self._host
        for tensors, slab in zip(self._blocks, self._host.slabs, strict=True):
            parts = [part for tensor in tensors for part in tensor.parts()]
            left.require_intact()
            for part, spec in zip(parts, slab.layout.tensors, strict=True):
                self._hash(part.name, part.get())
                if slab.holds(part.get(), spec):
                    continue
                target = slab.tensor(spec)
                with torch.no_grad():
                    target.copy_(part.get())
                self._base_origin = part.get().device
                self._moved.append((part, self._base_origin))
                part.put(target)
            for tensor in tensors:
                if tensor.is_4bit:
                    constants = constant_parts(tensor.name, tensor.tensor)
                    self._place(constants, torch.device("cpu"))

    def move_small(self, small: SmallTensors) -> None:
        """Move norms, biases and buffers of the layers into their buffers on the device."""
        self._buffers = small
        for part, copy in small.moves:
            self._moved.append((part, part.get().device))
            _put(part, copy)
        small.moves.clear()

    def keep_embeddings(self, model: nn.Module, rows: RowReader) -> None:
        """Move embeddings' matrices to host memory, where chosen; rows are read on demand."""
        for embedding in self._embeddings:
            self._hash(embedding.name, embedding.matrix)
            self._place(FrozenTensor(embedding.name, embedding.matrix).parts(), torch.device("cpu"))
            users = [embedding.module]
            rows.lock(embedding.matrix.detach(), "the embedding")
            self._undo.callback(keep_on_host(model, embedding.name, users, rows))

    def take_head(
        self, model: nn.Module, rows: RowReader, streams: StreamContext
    ) -> SliceReader | None:
        """Move the head's matrix to host memory and slice the loss, as chosen.

        Returns:
            The reader of the matrix; None if that stays on the device.
        """
        head, reader = self._head, None
        if head is None:
            return None
        if head.is_on_host:
            self._hash(head.name, head.matrix)
            (part,) = FrozenTensor(head.name, head.matrix).parts()
            origin, reader = part.get().device, keep_head(head, rows, streams)
            self._moved.append((part, origin))
            part.put(reader.matrix)
            self._undo.callback(keep_on_host(model, head.name, head.users, rows))
        self._undo.callback(slice_loss(base_of(model), head.module, reader))
        return reader

    def move_to_device(self, model: nn.Module) -> None:
        """Move everything that is not streamed: adapters, norms outside the layers, head."""
        groups = (*self._blocks, *self._small)
        seen_to = {id(tensor.tensor) for group in groups for tensor in group}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) in seen_to:
                continue
            parts = FrozenTensor(name, tensor).parts()
            if is_4bit(tensor):
                parts += constant_parts(name, tensor)
            self._place(parts, self._device)

    def attach_layers(
        self,
        model: nn.Module,
        layers: Sequence[tuple[nn.Module, StreamedLayer]],
        begin: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
        end: Callable[..., None],
        renew: Callable[[], None],
    ) -> None:
        """Make the layers stream, and set up everything around them.

        Args:
            layers: Each layer, with the streamed layer that it becomes.
            begin: Is called with the module that holds the layers, and the arguments of its call.
            end: Is called as that has run, or has raised.
            renew: Allocates all slots anew, after one was written to.
        """
        classes = {base: streamed_class(base) for base in {type(layer) for layer, _ in layers}}
        for layer, streamed in layers:
            self._at_detach(layer, detach_layer)
            self._at_detach(layer, lambda layer: unpatch(layer.modules()))
            attach_layer(layer, streamed, classes[type(layer)])
            patch(layer, self._device, self._tally)
        ancestors = _ancestors(model, self._layers_name)
        # The innermost module that is called: code that bypasses the outer ones calls it too.
        holder = ancestors[-2][1] if len(ancestors) > 1 else model
        for handle in (
            holder.register_forward_pre_hook(begin, with_kwargs=True),
            holder.register_forward_hook(end, always_call=True),
        ):
            self._undo.callback(handle.remove)
        self._switch_off(model, ancestors)
        self._hide_from_ddp(model)
        for module, name, guard in guards_of(ancestors, self._device, renew):
            if name not in module.__dict__:
                module.__dict__[name] = guard
                self._at_detach(module, partial(_remove, name=name))

    def admit(self, layer: nn.Module) -> None:
        """Move tensors added to ``layer`` since to the device, such as a new adapter's.

        It takes our kernels then, as those that were there do.

        ``restore`` brings it to where the base goes then, wherever PEFT has put it.

        Raises:
            UnvalidatedArchitectureError: If no check covers a kind of adapters that came.
        """
        require_proven(layer, self._kinds)
        if is_streamed(layer):
            patch(layer, self._device, self._tally)
        known = {id(tensor.tensor) for block in self._blocks for tensor in block}
        known |= {id(part.owner) for part, _ in self._moved if part.owner.device == self._device}
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if id(tensor) not in known:
                for part in FrozenTensor(name, tensor).parts():
                    self._moved.append((part, self._base_origin))
                    if part.get().device != self._device:
                        _put(part, part.get().to(self._device))

    def at_detach(self, action: Callable[[], object]) -> None:
        """Have ``detach`` and ``abandon`` call ``action``; what came last goes first."""
        self._undo.callback(action)

    def detach(self) -> None:
        """Restore the model.

        Tensors that came from host memory stay where they are: in the memory of the store.

        Raises:
            torch.OutOfMemoryError: If the base does not fit where it was; the model is as before.
        """
        self._move_back()
        self._undo.close()

    def abandon(self) -> None:
        """``detach`` after a failure: undoes as much as possible."""
        try:
            self._move_back()
        finally:
            self._undo.close()

    def _hash(self, name: str, tensor: torch.Tensor) -> None:
        if self._digests is not None:
            self._digests.add(name, tensor)

    def _move_back(self) -> None:
        # All new places first: if one cannot be had, nothing has moved.
        moving = [
            (part, origin)
            for part, origin in self._moved
            if part.get().device != origin
            or (self._buffers is not None and self._buffers.holds(part.get()))
        ]
        self._host.require_intact()
        staged = [(part, part.get().to(origin, copy=True)) for part, origin in moving]
        for part, tensor in staged:
            _put(part, tensor)
        self._moved.clear()

    def _place(self, parts: Iterable[Part], device: torch.device) -> None:
        for part in parts:
            before = part.get()
            if before.device != device:
                after = before.to(device)
                self._moved.append((part, before.device))
                _put(part, after)

    def _switch_off(self, model: nn.Module, ancestors: Sequence[tuple[str, nn.Module]]) -> None:
        """Switch off settings around the layers that conflict with streaming."""
        for _, module in ancestors:
            if getattr(module, "gradient_checkpointing", False):
                logger.info(
                    "poros: gradient checkpointing is switched off, because streamed layers are "
                    "recomputed anyway"
                )
                self._set(module, "gradient_checkpointing", False)
        if self._device.type == "cpu":
            # In eval mode bitsandbytes would repack the weights for AVX512, and round their absmax.
            for module in model.modules():
                if getattr(module, "support_avx512bf16_for_cpu", False):
                    self._set(module, "support_avx512bf16_for_cpu", False)
        for tensor in (tensor for block in self._blocks for tensor in block):
            for _, module in tensor.modules:
                # A deep copy of a 4-bit module has two equal states instead of one.
                state = tensor.tensor.quant_state  # type: ignore[attr-defined]
                if module.quant_state is not state:
                    self._set(module, "quant_state", state)
        base = base_of(model)
        if getattr(base, "hf_device_map", None):
            self._set(base, "hf_device_map", {"": self._device})

    def _hide_from_ddp(self, model: nn.Module) -> None:
        """DDP would broadcast the frozen tensors at its start, writing to the host copies.

        Of what stays, only buffers are hidden, which it would write at every forward: a norm may be
        trained by the time that DDP wraps the model.
        """
        hidden = {tensor.name for block in self._blocks for tensor in block}
        hidden |= {embedding.name for embedding in self._embeddings}
        if self._head is not None and self._head.is_on_host:
            hidden |= set(self._head.all_names)
        hidden |= {tensor.name for group in self._small for tensor in group if tensor.is_buffer}
        before = getattr(model, _DDP_IGNORED, None)
        self._at_detach(model, partial(_put_back, before=before))
        model.__dict__[_DDP_IGNORED] = sorted(hidden | set(before or ()))

    def _set(self, module: nn.Module, name: str, value: object) -> None:
        before = getattr(module, name)
        setattr(module, name, value)
        self._at_detach(module, lambda module: setattr(module, name, before))

    def _at_detach(self, module: nn.Module, action: Callable[[nn.Module], object]) -> None:
        """Have ``detach`` call ``action`` with ``module``, if that is still alive."""
        reference = weakref.ref(module)

        def undo() -> None:
            living = reference()
            if living is not None:
                action(living)

        self._undo.callback(undo)


def _remove(module: nn.Module, name: str) -> None:
    module.__dict__.pop(name, None)


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
    """List the modules on the path from ``model`` to the ModuleList of layers, both included."""
    parts = layers_name.split(".") if layers_name else []
    names = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return [(name, model.get_submodule(name)) for name in names]
