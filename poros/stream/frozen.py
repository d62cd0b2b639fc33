"""The frozen tensors of a block: their places in the model, at rest on the host and on the device.

Each frozen parameter or buffer of a layer that streams exists twice (the others stay on the device:
see ``poros.stream.staying``). *At rest* the module holds the original
object, whose bytes have been moved into the block's host slab: so state_dict, save_pretrained and
parameter counts see the authoritative host copy without any special code, and a read of it during
training fails on a GPU instead of seeing another block's bytes. *During a visit* the module holds a
another, built once, whose storage is a view of the block's slot.

Only entries of ``module._parameters``, ``module._buffers`` and bitsandbytes' ``module.quant_state``
are exchanged. Swapping ``.data`` instead would reach into graphs that saved the parameter, and
exchanging tensors inside one QuantState would pull them out from under a matmul that still refers
to it.

bitsandbytes' 4-bit weights (Dettmers et al. 2023, QLoRA, section 3) move as two tensors: packed
weight and absmax. If the quantization is double, the nested absmax has a copy on the device, as
code books and offsets have; at rest all of them are on the host.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.errors import PreparedModelError
from poros.kernels.dense_layer import DenseLayer, DenseWeight
from poros.kernels.dequantize import DenseWorkspace, has_kernel
from poros.layout import BlockLayout, is_small, view
from poros.nf4 import MOVING, Part, is_4bit, places, rebound, state_of, streams
from poros.stream.within import on_plain_tensors


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
        """Whether it stays on the device: see "What is small stays" in ``poros.layout``."""
        return not self.is_4bit and is_small(self.tensor, is_buffer=self.is_buffer)

    def parts(self) -> list[Part]:
        """The tensors of it that must move."""
        if not self.is_4bit:
            return [Part(self.name, self.tensor, "data")]
        parts = places(self.name, self.tensor)
        return [part for key, part in parts.items() if streams(key, part.get())]


class Binding(NamedTuple):
    """One dictionary entry that is exchanged at each visit of a layer."""

    name: str
    owner: dict[str, Any]
    key: str
    at_rest: Any
    on_device: Any


class LayerBindings:
    """Exchanges the frozen tensors of one layer, and notices if someone else did."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self._bindings = bindings
        self._resting = [
            (binding, binding.at_rest.data_ptr(), binding.at_rest._version)
            for binding in bindings
            if isinstance(binding.at_rest, torch.Tensor)
        ]
        self._states = [
            (binding, _marks_of(binding.at_rest))
            for binding in bindings
            if binding.key == "quant_state"
        ]
        self.dense_weights = _dense_weights(bindings)
        """Its 4-bit weights on the device that have a place to be dense in."""
        self._biases = [
            (binding.on_device, binding.on_device.detach())
            for binding in bindings
            if binding.key == "bias" and isinstance(binding.on_device, nn.Parameter)
        ]

    def without_device_tensors(self) -> "LayerBindings":
        """The same tensors at rest, with nothing of them on the device."""
        return LayerBindings(
            [binding._replace(on_device=binding.at_rest) for binding in self._bindings]
        )

    def require_owners(self, owners: Collection[int]) -> None:
        """Raise ``PreparedModelError`` unless every frozen tensor hangs in one of ``owners``."""
        for binding, _, _ in self._resting:
            if id(binding.owner) not in owners:
                raise PreparedModelError(
                    f"{binding.name}: expected its module in the model, found it replaced. Call "
                    "poros.restore(model) before replacing modules, then prepare again"
                )

    @property
    def tensor_ids(self) -> set[int]:
        """Ids of the tensors at rest."""
        return {id(binding.at_rest) for binding, _, _ in self._resting}

    def require_at_rest(self) -> None:
        """Raise ``PreparedModelError`` if a frozen tensor was changed since it was put to rest."""
        # A 4-bit weight is a tensor subclass, whose attributes take a detour through Python.
        on_plain_tensors(self._require_at_rest)

    def _require_at_rest(self) -> None:
        for binding, pointer, version in self._resting:
            now = binding.owner.get(binding.key)
            if (
                now is not binding.at_rest
                or now.data_ptr() != pointer
                or now._version != version
                or now.requires_grad
            ):
                raise PreparedModelError(
                    f"{binding.name}: expected the frozen tensor that poros.prepare took over, "
                    "found it replaced, cast, written or made trainable. Call "
                    "poros.restore(model) before changing the base (merging, "
                    "prepare_model_for_kbit_training, loading weights), then prepare again"
                )

        for binding, scales in self._states:
            now = binding.owner.get(binding.key)
            if now is not binding.at_rest or scales != _marks_of(now):
                raise PreparedModelError(
                    f"{binding.name}: expected the quantization state that poros.prepare took "
                    "over, found it replaced or written. Call poros.restore(model) before "
                    "changing the base, then prepare again"
                )

    def swap_in(self) -> None:
        """Put the tensors on the device in place."""
        for binding in self._bindings:
            binding.owner[binding.key] = binding.on_device

    def require_device_tensors(self) -> None:
        """Raise ``PreparedModelError`` if the layer's own forward exchanged a frozen tensor."""
        for binding in self._bindings:
            now = binding.owner.get(binding.key)
            # PEFT's DoRA puts an alias of a 4-bit weight in its place on a CPU.
            if now is not binding.on_device and not _is_alias(now, binding.on_device):
                raise PreparedModelError(
                    f"{binding.name}: expected the layer's forward to leave it in place, found it "
                    "replaced (a counter, a running statistic?); the new value would be lost"
                )

    def device_marks(self) -> list[tuple[int, int]]:
        """What changes if somebody writes to a device tensor, or gives it other memory."""
        marks: list[tuple[int, int]] = on_plain_tensors(self._device_marks)
        return marks

    def _device_marks(self) -> list[tuple[int, int]]:
        return [
            (tensor.data_ptr(), tensor._version)
            for binding in self._bindings
            if isinstance(tensor := binding.on_device, torch.Tensor)
        ]

    def swap_out(self) -> None:
        """Put the originals back, whatever is in their place."""
        for binding in self._bindings:
            binding.owner[binding.key] = binding.at_rest
        for bias, slot_view in self._biases:
            # bitsandbytes casts a bias to the compute dtype for good, which would leave the tensor
            # with memory of its own.
            if bias.dtype != slot_view.dtype:
                bias.data = slot_view

    def hide(self) -> None:
        """Take parameters and buffers out of their modules, until ``swap_out``."""
        for binding, _, _ in self._resting:
            binding.owner[binding.key] = None


def _dense_weights(bindings: Sequence[Binding]) -> list[DenseWeight]:
    found = {
        id(state): DenseWeight(binding.on_device, state, state.dense_place)
        for binding in bindings
        if (state := state_of(binding.on_device)) is not None and hasattr(state, "dense_place")
    }
    return list(found.values())


def _marks_of(state: Any) -> list[int]:
    """What changes if a scale is written or replaced. The nested one is in no slab: it may move."""
    marks = [state.absmax.data_ptr(), state.absmax._version]
    if state.nested:
        marks += [id(state.state2.absmax), state.state2.absmax._version]
    return marks


def _is_alias(now: Any, expected: Any) -> bool:
    return (
        isinstance(now, torch.Tensor)
        and isinstance(expected, torch.Tensor)
        and now.data_ptr() == expected.data_ptr()
        and now.dtype == expected.dtype
        and now.shape == expected.shape
    )


class DeviceConstants:
    """Small quantization constants that stay on the device: code books once, offsets by value.

    Args:
        device: Where.
        nested: The device copies of nested absmax, by the name of the part.
        workspace: Where 4-bit weights are made dense; None if each takes memory of its own.
    """

    def __init__(
        self,
        device: torch.device,
        nested: Mapping[str, torch.Tensor],
        workspace: DenseWorkspace | None = None,
    ) -> None:
        self._device = device
        self.workspace = workspace
        self._known: dict[tuple[torch.dtype, tuple[int, ...], bytes], torch.Tensor] = {}
        self.nested = nested

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device copy of ``tensor``, shared between all tensors of equal bits."""
        host = tensor.detach().cpu().contiguous()
        key = (host.dtype, tuple(host.shape), bytes(host.reshape(-1).view(torch.uint8).tolist()))
        if key not in self._known:
            self._known[key] = host.to(self._device, copy=True)
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
