"""Splits a model into what its store keeps, and builds a model from an open store.

The slabs are stored as they are. The rest of the model goes by name: everything outside the layers,
and of each 4-bit weight the few constants that stay on the device. Buffers that transformers
computes from the configuration are computed again.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from poros.errors import quoted
from poros.host.disk import DiskStore
from poros.host.layout import BlockLayout, slabs_num_bytes
from poros.host.limits import require_host_memory
from poros.host.store import HostStore
from poros.kernels.nf4 import DTYPES, PARTS, Format, part_name, part_tensors, state_of
from poros.loaders.header import defect, shown
from poros.loaders.options import dtype_name
from poros.loaders.quantize import Quantizer
from poros.loaders.slab_writer import SlabWriter
from poros.loaders.store import REMEDY, OpenStore, forms_of
from poros.utils.formatting import size

logger = logging.getLogger(__name__)


def contents(
    model: nn.Module, slab_writer: SlabWriter
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what of a loaded model is in no slab, and the names that ``About`` has.

    Returns:
        Tensors by name; and the names of all dense tensors, and dtype and block size of each 4-bit
        weight.
    """
    rest: dict[str, torch.Tensor] = {}
    dense: list[str] = []
    weights: dict[str, tuple[str, int]] = {}
    loaded = model.state_dict(keep_vars=True).keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in loaded:
            continue
        state = state_of(tensor)
        if state is None:
            dense.append(name)
        else:
            weights[name] = dtype_name(state.dtype), state.blocksize
        for part, data in part_tensors(name, tensor, with_constants=True).items():
            if not slab_writer.is_placed(part, data):
                rest[part] = data.detach()
    return rest, {"dense": dense, "weights": weights}


class StoreReader(SlabWriter):
    """Builds a model from an open store, whose first slabs it reads, and maps the others.

    Args:
        budget: Bytes for the slabs in memory; None reads all.
    """

    gives_all = True

    def __init__(self, opened: OpenStore, budget: int | None) -> None:
        super().__init__(
            opened.path,
            Quantizer(torch.device("cpu")),  # quantizes nothing
            allocate=self._slabs,
            drops_towers=opened.about.vision == "drop",
        )
        self._opened = opened
        self._budget = budget
        self._rest = opened.rest()

    def placeholders(self) -> dict[str, torch.Tensor]:
        """Return something for each parameter and buffer that it has, for transformers to load."""
        about = self._opened.about
        empty = torch.empty(0, 0, dtype=getattr(torch, about.dtype))
        return {name: empty.clone() for name in (*about.dense, *about.weights)}

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense tensor of the store."""
        found = self._part(name)
        self._require_shape(name, found.shape, self._shapes[name])
        if found.is_floating_point() != (name in self.floats):
            kind = "a tensor in floating point" if name in self.floats else "whole numbers"
            raise self.defect(name, kind, found.dtype)
        return found

    def quantize(
        self, name: str, tensor: torch.Tensor, format: Format, shape: Sequence[int]
    ) -> Any:
        """Return a packed weight of the store, and its state."""
        if name not in self._opened.about.weights:
            raise self.dense(name, self._part(name))
        dtype, blocksize = self._opened.about.weights[name]
        names = sorted(PARTS[f"{name}.offset" in self._rest])
        parts = {part: self._part(part_name(name, part)) for part in names}
        state = replace(format, blocksize=blocksize).state(parts, shape, DTYPES[dtype])
        self.require_packed(name, parts, state, shape)
        return parts["packed"], state

    def copy(self, name: str, tensor: torch.Tensor, *, is_packed: bool = False) -> torch.Tensor:
        """As in ``SlabWriter``; equal bytes are not written again.

        A page of a mapped slab that is written to is no longer the file's.
        """
        target = self._target(name, tensor)
        as_bytes = [side.reshape(-1).view(torch.uint8) for side in (tensor, target)]
        return target if torch.equal(*as_bytes) else target.copy_(tensor)

    def _require_finite(self, name: str, tensor: torch.Tensor) -> None:
        """Do nothing: bytes with the right digest were checked when they were written."""

    def _part(self, name: str) -> torch.Tensor:
        # What did not fit its planned place lies with the rest.
        if name in self._rest:
            return self._rest[name]
        if name not in self._places:
            raise self.defect(name, "it in the store", None)
        slab, spec = self._places[name]
        return slab.tensor(spec)

    def _slabs(self, layouts: Sequence[BlockLayout]) -> HostStore:
        """Compare the model's layouts with the store's; read slabs, and map the others."""
        opened = self._opened
        planned, found = forms_of(layouts), opened.manifest.layouts
        if len(planned) != len(found):
            raise self._other_form(f"{len(planned)} layers, found {len(found)}")
        for index, (expected, each) in enumerate(zip(planned, found, strict=True)):
            if expected != each:
                both = (*expected, *each)
                names = [spec[0] for spec in both if spec not in expected or spec not in each][:3]
                raise self._other_form(f"layer {index}, found another form of {quoted(names)}")
            wanted, (num_bytes, _) = layouts[index].padded_num_bytes, opened.manifest.slabs[index]
            if num_bytes != wanted:
                raise self._other_form(f"{wanted} bytes of layer {index}, found {num_bytes}")
        first = len(layouts)
        while self._budget is not None and first and opened.starts[first] > self._budget:
            first -= 1
        require_host_memory(opened.starts[first], f"the first layers of {shown(opened.path)}")
        resident = HostStore.allocate(layouts[:first])
        opened.read_into(resident)
        if first == len(layouts):
            return resident
        opened.verify_slabs(first)
        logger.warning(
            "poros: %d of %d layers stay on the disk, in %s: training reads %s from there in each "
            "forward and again in each backward pass",
            len(layouts) - first,
            len(layouts),
            shown(opened.slabs),
            size(slabs_num_bytes(layouts[first:])),
        )
        return DiskStore.over_file(resident, opened.slabs, layouts, opened.identity)

    def _other_form(self, what: str) -> Exception:
        said = f"expected, as this configuration and this release of transformers have it, {what}"
        return defect(self._opened.path, said, remedy=REMEDY)
