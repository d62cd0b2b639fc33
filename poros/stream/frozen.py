"""The frozen tensors of a block: their places in the model, at rest on the host and on the device.

Each frozen parameter or buffer of a layer that streams exists twice. *At rest* the module holds the
original object, whose bytes have been moved into the block's host slab: so state_dict,
save_pretrained and parameter counts see the authoritative host copy without any special code, and a
read of it during training fails on a GPU instead of seeing another block's bytes. *During a visit*
the module holds another, built once, whose storage is a view of the block's slot
(``poros.stream.visit`` exchanges them).

What is small stays on the device: a norm, a bias or a buffer keeps its place, its object and its
name in the model. Only its bytes move, into a buffer that all small tensors of a layer share; from
then on it is an ordinary tensor of the device, which its owner may edit, cast, replace or train as
in a resident model (``poros.stream.condition`` watches for edits within a step). Each has a storage
of its own over the buffer's memory, so that no saver takes two neighbours for one shared tensor.

bitsandbytes' 4-bit weights (Dettmers et al. 2023, QLoRA, section 3) move as two tensors: packed
weight and absmax. If the quantization is double, the nested absmax has a copy on the device, as
code books and offsets have; at rest all of them are on the host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from poros.host.layout import BlockLayout, TensorSpec, is_small, view
from poros.io.digests import digest
from poros.kernels.dense_memory import DenseLayer, DenseWorkspace
from poros.kernels.dequantize import has_kernel
from poros.kernels.nf4 import MOVING, Part, is_4bit, places, rebound, state_of, streams
from poros.stream.visit import Binding


@dataclass(eq=False)
class FrozenTensor:
    """A frozen parameter or buffer and every place where the model refers to it."""

    name: str
    tensor: torch.Tensor
    is_adapted: bool = False
    """Whether an adapter sits on the tensor itself (fused experts), not on its module."""
    is_buffer: bool = False
    places: list[tuple[int, dict[str, Any], str]] = field(default_factory=list)
    """(layer, owner dictionary, key)."""
    modules: list[tuple[int, nn.Module]] = field(default_factory=list)
    """(layer, module) of 4-bit modules, which refer to the QuantState a second time."""

    @property
    def is_4bit(self) -> bool:
        return is_4bit(self.tensor)

    @property
    def dense_num_bytes(self) -> int:
        """Of the dense weight that a kernel of ours makes of it on a GPU; 0 if none does."""
        state: Any = state_of(self.tensor)
        if state is None or not has_kernel(self.tensor, state):
            return 0
        return prod(state.shape) * int(state.dtype.itemsize)

    @property
    def stays(self) -> bool:
        """Whether it stays on the device: see "What is small stays" in ``poros.host.layout``."""
        return not self.is_4bit and is_small(self.tensor, is_buffer=self.is_buffer)

    def parts(self) -> list[Part]:
        """The tensors of it that must move."""
        if not self.is_4bit:
            return [Part(self.name, self.tensor, "data")]
        parts = places(self.name, self.tensor)
        return [part for key, part in parts.items() if streams(key, part.get())]


@dataclass(eq=False)
class DeviceConstants:
    """Small quantization constants that stay on the device: code books once, offsets by value."""

    device: torch.device
    nested: Mapping[str, torch.Tensor]
    """The device copies of nested absmax, by the name of the part."""
    workspace: DenseWorkspace | None = None
    """Where 4-bit weights are made dense; None if each takes memory of its own."""
    _known: dict[tuple[torch.dtype, tuple[int, ...], bytes], torch.Tensor] = field(
        default_factory=dict
    )

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device copy of ``tensor``, shared between all tensors of equal bits."""
        host = tensor.detach().cpu().contiguous()
        key = (host.dtype, tuple(host.shape), bytes(host.reshape(-1).view(torch.uint8).tolist()))
        if key not in self._known:
            self._known[key] = host.to(self.device, copy=True)
        return self._known[key]

    @property
    def num_bytes(self) -> int:
        """Without the nested absmax, which lie in buffers of others."""
        workspace = 0 if self.workspace is None else self.workspace.num_bytes
        return workspace + sum(each.numel() * each.element_size() for each in self._known.values())


def bind_block(
    tensors: Sequence[FrozenTensor],
    layout: BlockLayout,
    slot: torch.Tensor,
    constants: DeviceConstants,
    dense: DenseLayer | None = None,
) -> Mapping[int, list[Binding]]:
    """One block's tensors on the device, views of its slot, as the bindings of each layer.

    ``dense`` is where calls of a layer may share its dense weights.
    """
    specs = iter(layout.tensors)
    by_layer: dict[int, list[Binding]] = {}
    quantized: dict[int, list[Any]] = {}
    for frozen in tensors:
        on_device = _device_tensor(frozen, lambda: view(slot, next(specs)), constants)
        for layer, owner, key in frozen.places:
            by_layer.setdefault(layer, []).append(
                Binding(frozen.name, owner, key, frozen.tensor, on_device)
            )
        if frozen.is_4bit and len({layer for layer, *_ in frozen.places}) == 1:
            quantized.setdefault(frozen.places[0][0], []).append(on_device.quant_state)  # type: ignore[attr-defined]
        for layer, module in frozen.modules:
            state = frozen.tensor.quant_state  # type: ignore[attr-defined]
            by_layer.setdefault(layer, []).append(
                Binding(
                    frozen.name,
                    module.__dict__,
                    "quant_state",
                    state,
                    on_device.quant_state,  # type: ignore[attr-defined]
                )
            )
    if dense is not None:
        for layer, states in quantized.items():
            for state, place in zip(states, dense.places(layer, states), strict=True):
                state.dense_place = place
    return by_layer


def constant_parts(name: str, tensor: torch.Tensor) -> list[Part]:
    """The parts of a 4-bit weight that stay: code books and offset, a small nested absmax."""
    parts = places(name, tensor)
    return [part for key, part in parts.items() if not streams(key, part.get())]


class SmallTensors:
    """Device copies of the small tensors of all layers. Nothing of the model is changed.

    ``layers`` has for each layer the frozen tensors that stay, and those that stream: the nested
    absmax of these stay. ``digests`` has a digest of each compared with that of its source.

    Attributes:
        moves: What stays, with its new bytes.
        nested: Device copies of nested absmax, by the name of the part.
        damaged: For each layer the names of tensors that have not arrived as they were.

    Raises:
        torch.OutOfMemoryError: If the device has no room for them.
    """

    def __init__(
        self,
        layers: Iterable[tuple[Sequence[FrozenTensor], Sequence[FrozenTensor]]],
        device: torch.device,
        digests: bool = False,
    ) -> None:
        self.moves: list[tuple[Part, torch.Tensor]] = []
        self.nested: dict[str, torch.Tensor] = {}
        self.damaged: list[list[str]] = []
        self._buffers: list[torch.Tensor] = []
        for staying, streamed in layers:
            parts = small_parts(staying, streamed)
            layout = BlockLayout.pack((part.name, part.get()) for part in parts)
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
            self._buffers.append(buffer)
            damaged: list[str] = []
            self.damaged.append(damaged)
            for part, spec in zip(parts, layout.tensors, strict=True):
                copy = _own_view(buffer, spec)
                source = part.get()
                before = digest(source.cpu().contiguous()) if digests else b""
                with torch.no_grad():
                    copy.copy_(source)
                if digests and digest(copy.cpu()) != before:
                    damaged.append(part.name)
                if part.attribute == "data":
                    self.moves.append((part, copy))
                else:
                    self.nested[part.name] = copy

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in one of the buffers."""
        place = tensor.data_ptr()
        return any(
            buffer.device == tensor.device
            and buffer.data_ptr() <= place < buffer.data_ptr() + max(buffer.numel(), 1)
            for buffer in self._buffers
        )

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)


def small_parts(staying: Sequence[FrozenTensor], streamed: Sequence[FrozenTensor]) -> list[Part]:
    """What of a layer lies in its buffer: tensors that stay, then constants of 4-bit weights."""
    parts = [part for tensor in staying for part in tensor.parts()]
    for tensor in streamed:
        if tensor.is_4bit:
            constants = constant_parts(tensor.name, tensor.tensor)
            parts += [part for part in constants if part.attribute == "absmax"]
    return parts


def _own_view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor over part of ``buffer``, with a storage of its own that keeps the memory alive."""
    if not spec.num_bytes:
        return torch.empty(spec.shape, dtype=spec.dtype, device=buffer.device)
    flat = buffer[spec.offset : spec.offset + spec.num_bytes]
    own: torch.Tensor = from_dlpack(flat)
    return own.view(spec.dtype).view(spec.shape)


def _device_tensor(
    frozen: FrozenTensor, next_view: Callable[[], torch.Tensor], constants: DeviceConstants
) -> torch.Tensor:
    original = frozen.tensor
    if not frozen.is_4bit:
        data = next_view()
        if frozen.is_adapted:
            # At each forward PEFT registers a parametrization for it, and torch then sets it to
            # itself. No byte changes, but it counts as a write; with a count of its own it does not
            # pass for a write to the rest of the slot.
            data = data.data
        is_parameter = isinstance(original, nn.Parameter)
        return nn.Parameter(data, requires_grad=False) if is_parameter else data
    tensors = {}
    for key, part in places(frozen.name, original).items():
        if part.name in constants.nested:
            tensors[key] = constants.nested[part.name]
        else:
            tensors[key] = next_view() if key in MOVING else constants.get(part.get())
    made = rebound(original, tensors)
    made.quant_state.dense_workspace = constants.workspace
    return made
