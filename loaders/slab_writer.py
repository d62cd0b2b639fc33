"""Places the tensors of a model that is being loaded: those of layers into slabs.

The plan is made on a meta copy of the model that transformers has built, before anything is read:
for each decoder layer the parts that ``poros.prepare`` will move, with the dtypes they will have.
Then each tensor arrives, converted and renamed, and is written to its place. The few that come
another way (norms that stay float32, buffers computed from the configuration) are moved at the end.

Nothing here knows how transformers reads a checkpoint; see ``poros.loaders.hf_quantizer`` for that.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poros.errors import CheckpointFormatError, quoted
from poros.host.layout import BlockLayout, TensorSpec
from poros.host.limits import require_host_memory
from poros.host.slab import HostSlab
from poros.host.store import HostStore
from poros.kernels.nf4 import (
    BLOCKSIZES,
    DTYPES,
    MOVING,
    NESTED_BLOCKSIZE,
    QUANT_TYPES,
    Format,
    Parts,
    is_4bit,
    is_params4bit,
    own,
    part_name,
    part_tensors,
    state_of,
)
from poros.loaders.header import defect, shown
from poros.loaders.quantize import Quantizer, require_finite
from poros.model.inspect import find_frozen, find_layers
from poros.model.vision import drop_towers
from poros.stream.adapters import named_tensors

Allocate = Callable[[Sequence[BlockLayout]], HostStore]


class SlabWriter:
    """Writes the tensors of one model into its slabs, as they are read.

    Args:
        allocate: Makes the slabs; None reserves memory for them, if the model fits in it.
        drops_towers: Drop the towers of a multimodal model, while it is on the meta device.

    Attributes:
        store: One slab per decoder layer; empty before ``plan``.
        fallbacks: One line for each tensor that did not fit its place.
        floats: Names of the tensors that the configuration wants in floating point, 4-bit included.
        gives_all: Whether it has every tensor itself, by the model's names, and what ``write`` and
            ``quantize`` are given is a placeholder.
    """

    gives_all = False

    def __init__(
        self,
        path: Path,
        quantizer: Quantizer,
        allocate: Allocate | None = None,
        *,
        drops_towers: bool = False,
    ) -> None:
        self.path = path
        self.store = HostStore([])
        self.fallbacks: list[str] = []
        self.layers_name = ""
        self.floats: set[str] = set()
        self._allocate = allocate
        self._drops_towers = drops_towers
        self._quantizer = quantizer
        self._places: dict[str, tuple[HostSlab, TensorSpec]] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._is_4bit: set[str] = set()
        self._checked: set[str] = set()
        """Names of tensors that are known to be finite, and of computed buffers (masks)."""

    def plan(self, model: nn.Module, own_dtypes: Mapping[str, torch.dtype]) -> None:
        """Lay out the layers of ``model``, which is on the meta device, and reserve their memory.

        Args:
            model: The model, with its 4-bit modules in place.
            own_dtypes: Dtypes of parameters that keep one of their own, by patterns of their names.

        Raises:
            UnsupportedModelError: If it has no decoder layers that can be streamed.
            HostMemoryError: If the model would not fit in host memory.
        """
        if self._drops_towers:
            drop_towers(model)
        self._shapes = {name: tensor.shape for name, tensor in named_tensors(model)}
        self.floats = {name for name, tensor in named_tensors(model) if tensor.is_floating_point()}
        self._is_4bit = {name for name, tensor in named_tensors(model) if is_params4bit(tensor)}
        loaded = model.state_dict().keys()
        self._checked = self._shapes.keys() - loaded
        planned = copy.deepcopy(model).requires_grad_(False)
        for name, tensor in named_tensors(planned):
            if name in loaded and not is_params4bit(tensor):
                tensor.data = tensor.data.to(_own_dtype(name, own_dtypes) or tensor.dtype)
        quantize_on_meta(planned)
        self.layers_name, layers = find_layers(planned)
        blocks, _ = find_frozen(planned, self.layers_name, layers, block_size=1)
        layouts = [
            BlockLayout.pack((part.name, part.get()) for tensor in block for part in tensor.parts())
            for block in blocks
        ]
        in_layers = {spec.name for layout in layouts for spec in layout.tensors}
        outside = sum(
            part.nbytes
            for name, tensor in named_tensors(planned)
            for key, part in part_tensors(name, tensor).items()
            if key not in in_layers
        )
        num_bytes = outside + sum(layout.num_bytes for layout in layouts)
        what = f"the weights of {shown(self.path)}"
        require_host_memory(num_bytes if self._allocate is None else outside, what)
        self.store = (self._allocate or HostStore.allocate)(layouts)
        for slab in self.store.slabs:
            for spec in slab.layout.tensors:
                self._places[spec.name] = (slab, spec)

    def has_place(self, name: str, dtype: torch.dtype | None = None) -> bool:
        """Whether ``name`` lies in a slab as it is, and with that dtype if one is given."""
        if name not in self._places:
            return False
        return dtype is None or self._places[name][1].dtype == dtype

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Write a tensor that is not quantized to its place.

        Returns:
            The tensor in its place, or ``tensor`` itself if its place has another dtype: it is
            moved by ``finish``.
        """
        slab, spec = self._places[name]
        self._require_shape(name, tensor.shape, torch.Size(spec.shape))
        if tensor.dtype != spec.dtype:
            return tensor
        self._require_finite(name, tensor)
        return _copied(tensor, slab.tensor(spec))

    def quantize(
        self, name: str, tensor: torch.Tensor, format: Format, shape: Sequence[int]
    ) -> Any:
        """Quantize a weight into its place, or into new memory; return it and its state.

        Args:
            tensor: The weight, (N, K), in the dtype to load in.
        """
        self._require_shape(name, tensor.shape, torch.Size(shape))
        if tensor.dtype not in DTYPES.values():
            raise self.defect(name, "weights of 16 or 32-bit floats to quantize", tensor.dtype)
        targets = {
            part: self._target(part_name(name, part), expected)
            for part, expected in format.form(shape).items()
            if part in MOVING
        }
        state = self._quantizer.quantize_into(
            tensor,
            where=self._where(name),
            format=format,
            targets=targets,
        )
        return targets["packed"], state

    def copy(self, name: str, tensor: torch.Tensor, *, is_packed: bool = False) -> torch.Tensor:
        """Copy ``tensor`` to its place, or to new memory if it has none or does not fit.

        Packed bytes are taken as they are, whatever dtype they are stored as.
        """
        if not is_packed:
            self._require_finite(name, tensor)
        return _copied(tensor, self._target(name, tensor))

    def require_packed(self, name: str, parts: Parts, state: Any, shape: Sequence[int]) -> None:
        """Check a 4-bit weight and its state before any kernel reads it.

        bitsandbytes does not. Its kernels read 16 and 256 entries of the code books whatever their
        sizes are, and divide by the block size: a wrong state ends the process, or trains on
        numbers beyond the end of a tensor.
        """
        self._require_shape(name, torch.Size(state.shape or ()), torch.Size(shape))
        settings: list[tuple[str, Any, Sequence[Any]]] = [
            ("a block size", state.blocksize, BLOCKSIZES),
            ("a type", state.quant_type, QUANT_TYPES),
            ("a dtype", state.dtype, tuple(DTYPES.values())),
        ]
        if state.nested:
            settings.append(("a block size of scales", state.state2.blocksize, (NESTED_BLOCKSIZE,)))
            settings.append(("a dtype of scales", state.state2.dtype, (torch.float32,)))
        for what, found, known in settings:
            if type(found) is not type(known[0]) or found not in known:
                raise self.defect(name, f"{what} among {known}", found)
        storage = parts["packed"].dtype
        form = Format(state.quant_type, state.nested, storage, state.blocksize).form(shape)
        for part, expected in form.items():
            tensor = parts[part]
            if part in MOVING:
                self._require_shape(part_name(name, part), tensor.shape, expected.shape)
            if tensor.dtype != expected.dtype or tensor.numel() != expected.numel():
                raise self.defect(
                    name,
                    f"{expected.numel()} entries of {expected.dtype} in {part}",
                    (tensor.dtype, tuple(tensor.shape)),
                )
            if part not in MOVING:  # scales are checked where they are kept
                require_finite(tensor, f"{self._where(name)}.{part}")

    def finish(self, model: nn.Module) -> None:
        """Move tensors that came another way, and check that all are in their places."""
        self._quantizer.flush()
        for name, tensor in named_tensors(model):
            is_packed = state_of(tensor) is not None
            if name in self._is_4bit and not is_packed:
                raise self.dense(name, tensor)
            if name in self._shapes and not is_packed:
                self._require_shape(name, tensor.shape, self._shapes[name])
            if is_packed or self.is_placed(name, tensor):
                continue
            if name in self._places:
                tensor.data = self.copy(name, tensor.data)
            else:
                self._require_finite(name, tensor)

    def dense(self, name: str, tensor: torch.Tensor) -> CheckpointFormatError:
        """Make the error for a packed weight without its quantization state."""
        expected = "a 4-bit weight with its quantization state, as config.json says"
        return self.defect(name, expected, (tensor.dtype, tuple(tensor.shape)))

    def defect(self, name: str, expected: str, found: object) -> CheckpointFormatError:
        """Make the error for a tensor that is not what it should be."""
        return defect(
            self.path,
            f"expected {expected}, found {quoted(found)}",
            tensor=name,
            remedy="check that config.json and weights belong together, or fetch the checkpoint "
            "again",
        )

    def _target(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name in self._places:
            slab, spec = self._places[name]
            if (spec.shape, spec.dtype) == (tuple(like.shape), like.dtype):
                return slab.tensor(spec)
            self.fallbacks.append(
                f"{name} has memory of its own: {like.dtype} {tuple(like.shape)} was found where "
                f"{spec.dtype} {spec.shape} was planned"
            )
        return torch.empty_like(like, device="cpu")

    def is_placed(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a part is at its place in a slab."""
        if name not in self._places:
            return False
        slab, spec = self._places[name]
        return slab.holds(tensor, spec) or spec.num_bytes == 0

    def _where(self, name: str) -> str:
        return f"{shown(self.path)}: {quoted(name, is_bare=True)}"

    def _require_finite(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._checked:
            require_finite(tensor, self._where(name))
            self._checked.add(name)

    def _require_shape(self, name: str, found: torch.Size, expected: torch.Size) -> None:
        if found != expected:
            raise self.defect(name, f"shape {tuple(expected)} for this configuration", tuple(found))


def _copied(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return target.copy_(tensor)


def quantize_on_meta(model: nn.Module) -> None:
    """Give 4-bit modules whose weights have no memory the weights that quantizing would give."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if not isinstance(module, Linear4bit) or is_4bit(weight):
            continue
        format = Format.of(weight)
        form = format.form(weight.shape)
        state = format.state(form, weight.shape, module.compute_dtype or weight.dtype)
        packed = module._parameters["weight"] = format.weight(form["packed"], state, module)
        own(module, packed)


def _own_dtype(name: str, own_dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
    for pattern, dtype in own_dtypes.items():
        if re.search(pattern.replace("*", ".*"), name):
            return dtype
    return None
