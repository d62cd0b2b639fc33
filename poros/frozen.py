"""The frozen tensors of a block: their places in the model, host bytes and device twins.

Each frozen parameter or buffer of a layer exists twice. *At rest* the module holds the original
object, whose bytes have been moved into the block's host slab: so state_dict, save_pretrained and
parameter counts see the authoritative host copy without any special code, and a read of it during
training fails on a GPU instead of seeing another block's bytes. *During a visit* the module holds a
twin, built once, whose storage is a view of the block's slot.

Only entries of ``module._parameters``, ``module._buffers`` and bitsandbytes' ``module.quant_state``
are exchanged. Swapping ``.data`` instead would reach into graphs that saved the parameter, and
exchanging tensors inside one QuantState would pull them out from under a matmul that still refers
to it.

bitsandbytes' 4-bit weights (Dettmers et al. 2023, QLoRA, section 3) move as three tensors: packed
weight, absmax, and nested absmax if the quantization is double. Their code books and offsets are a
few bytes and stay on the device.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.errors import PreparedModelError
from poros.layout import BlockLayout, TensorSpec, view


class Part(NamedTuple):
    """One tensor that moves: attribute ``attribute`` of ``holder``, under a qualified name."""

    name: str
    holder: Any
    attribute: str

    def get(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.holder, self.attribute)
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        setattr(self.holder, self.attribute, tensor)


@dataclass(eq=False)
class FrozenTensor:
    """A frozen parameter or buffer and every place where the model refers to it."""

    name: str
    tensor: torch.Tensor
    places: list[tuple[int, dict[str, Any], str]] = field(default_factory=list)
    """(layer, owner dictionary, key)."""
    modules: list[tuple[int, nn.Module]] = field(default_factory=list)
    """(layer, module) of 4-bit modules, which refer to the QuantState a second time."""

    @property
    def is_4bit(self) -> bool:
        return is_4bit(self.tensor)

    def parts(self) -> list[Part]:
        """The tensors of it that must move."""
        parts = [Part(self.name, self.tensor, "data")]
        if self.is_4bit:
            state = self.tensor.quant_state  # type: ignore[attr-defined]
            parts.append(Part(f"{self.name}.absmax", state, "absmax"))
            if state.nested:
                parts.append(Part(f"{self.name}.nested_absmax", state.state2, "absmax"))
        return parts


class Binding(NamedTuple):
    """One dictionary entry that is exchanged at each visit of a layer."""

    name: str
    owner: dict[str, Any]
    key: str
    at_rest: Any
    twin: Any


@dataclass(eq=False)
class LayerBindings:
    """Exchanges the frozen tensors of one layer, and notices if someone else did."""

    bindings: list[Binding]
    _resting: list[tuple[Binding, int, int]] = field(default_factory=list)
    _casts: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._resting = [
            (each, each.at_rest.data_ptr(), each.at_rest._version)
            for each in self.bindings
            if isinstance(each.at_rest, torch.Tensor)
        ]
        self._casts = [
            (each.twin, each.twin.detach())
            for each in self.bindings
            if each.key == "bias" and isinstance(each.twin, nn.Parameter)
        ]

    def swap_in(self) -> None:
        """Put the twins in place.

        Raises:
            PreparedModelError: If a frozen tensor was replaced, cast or written since it was put to
                rest; nothing has been exchanged then.
        """
        for binding, pointer, version in self._resting:
            now = binding.owner.get(binding.key)
            if now is not binding.at_rest or now.data_ptr() != pointer or now._version != version:
                raise PreparedModelError(
                    f"{binding.name}: expected the frozen tensor that poros.prepare took over, "
                    "found it replaced, cast or written. Call poros.restore(model) before "
                    "changing the base (merging, prepare_model_for_kbit_training, loading "
                    "weights), then prepare again"
                )
        for binding in self.bindings:
            binding.owner[binding.key] = binding.twin

    def swap_out(self) -> None:
        """Put the originals back."""
        for binding in self.bindings:
            binding.owner[binding.key] = binding.at_rest
        for twin, slot_view in self._casts:
            # bitsandbytes casts a bias to the compute dtype for good, which would leave the twin
            # with memory of its own.
            if twin.data_ptr() != slot_view.data_ptr():
                twin.data = slot_view

    def hide(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Take parameters and buffers out of their modules; ``unhide`` takes the result."""
        hidden = [(each.owner, each.key, each.at_rest) for each, _, _ in self._resting]
        for owner, key, _ in hidden:
            owner[key] = None
        return hidden

    @staticmethod
    def unhide(hidden: list[tuple[dict[str, Any], str, Any]]) -> None:
        for owner, key, tensor in hidden:
            owner[key] = tensor


class DeviceConstants:
    """Small quantization constants that stay on the device: code books once, offsets by value."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[torch.dtype, tuple[int, ...], bytes], torch.Tensor] = {}

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device copy of ``tensor``, shared between all tensors of equal bits."""
        host = tensor.detach().cpu().contiguous()
        key = (host.dtype, tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy().tobytes())
        if key not in self._known:
            self._known[key] = host.to(self._device, copy=True)
        return self._known[key]

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self._known.values())


def bind_block(
    tensors: Sequence[FrozenTensor],
    layout: BlockLayout,
    slot: torch.Tensor,
    constants: DeviceConstants,
) -> Mapping[int, list[Binding]]:
    """Build the device twins of one block, as views of its slot, and the bindings of each layer."""
    specs = iter(layout.tensors)
    by_layer: dict[int, list[Binding]] = {}
    for each in tensors:
        twin = _twin(each, lambda: view(slot, next(specs)), constants)
        for layer, owner, key in each.places:
            by_layer.setdefault(layer, []).append(Binding(each.name, owner, key, each.tensor, twin))
        for layer, module in each.modules:
            state = each.tensor.quant_state  # type: ignore[attr-defined]
            by_layer.setdefault(layer, []).append(
                Binding(
                    each.name,
                    module.__dict__,
                    "quant_state",
                    state,
                    twin.quant_state,  # type: ignore[attr-defined]
                )
            )
    return by_layer


def move_to_slab(
    tensors: Sequence[FrozenTensor],
    layout: BlockLayout,
    host_tensor: Callable[[TensorSpec], torch.Tensor],
) -> Iterator[tuple[Part, torch.Tensor]]:
    """Move the bytes of one block into its slab, yielding each part with what it held before."""
    specs = iter(layout.tensors)
    for each in tensors:
        for part in each.parts():
            before = part.get()
            target = host_tensor(next(specs))
            with torch.no_grad():
                target.copy_(before)
            part.put(target)
            yield part, before


def is_4bit(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a quantized bitsandbytes 4-bit parameter."""
    return (
        type(tensor).__name__ == "Params4bit" and getattr(tensor, "quant_state", None) is not None
    )


def constant_parts(name: str, tensor: torch.Tensor) -> list[Part]:
    """The constants of a 4-bit parameter: code books and offset."""
    state = tensor.quant_state  # type: ignore[attr-defined]
    parts = [Part(f"{name}.code", state, "code")]
    if state.nested:
        parts.append(Part(f"{name}.offset", state, "offset"))
        parts.append(Part(f"{name}.nested_code", state.state2, "code"))
    return parts


def _twin(
    each: FrozenTensor, next_view: Callable[[], torch.Tensor], constants: DeviceConstants
) -> torch.Tensor:
    original = each.tensor
    if not each.is_4bit:
        data = next_view()
        is_parameter = isinstance(original, nn.Parameter)
        return nn.Parameter(data, requires_grad=False) if is_parameter else data
    packed: Any = original
    data = next_view()
    state = copy.copy(packed.quant_state)
    state.absmax = next_view()
    state.code = constants.get(state.code)
    if state.nested:
        state.offset = constants.get(state.offset)
        state.state2 = copy.copy(state.state2)
        state.state2.absmax = next_view()
        state.state2.code = constants.get(state.state2.code)
    twin: torch.Tensor = type(packed)(
        data,
        requires_grad=False,
        quant_state=state,
        blocksize=packed.blocksize,
        compress_statistics=packed.compress_statistics,
        quant_type=packed.quant_type,
        quant_storage=packed.quant_storage,
        module=packed.module,
        bnb_quantized=True,
    )
    return twin
