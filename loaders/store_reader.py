"""Splits a model into what its store keeps, and builds a model from an open store.

The slabs are stored as they are. The rest of the model goes by name: everything outside the layers,
and of each 4-bit weight the few constants that stay on the device. Buffers that transformers
computes from the configuration are computed again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from poros.errors import quoted
from poros.host.layout import BlockLayout
from poros.host.store import HostStore
from poros.kernels.nf4 import DTYPES, PARTS, Format, part_name, part_tensors, state_of
from poros.loaders.auxiliary_files import read_auxiliary_files
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.loaders.manifest import REMEDY
from poros.loaders.options import dtype_name
from poros.loaders.quantize import Quantizer
from poros.loaders.slab_writer import SlabWriter
from poros.loaders.store import OpenStore


def contents(
    model: nn.Module, slab_writer: SlabWriter
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what of a loaded model is in no slab, and how to rebuild the model.

    Returns:
        Tensors by name; and as JSON values the names of all dense tensors, and dtype and block size
        of each 4-bit weight.
    """
    rest: dict[str, torch.Tensor] = {}
    dense: list[str] = []
    weights: dict[str, list[Any]] = {}
    loaded = model.state_dict(keep_vars=True).keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in loaded:
            continue
        state = state_of(tensor)
        if state is None:
            dense.append(name)
        else:
            weights[name] = [dtype_name(state.dtype), state.blocksize]
        for part, data in part_tensors(name, tensor, with_constants=True).items():
            if not slab_writer.is_placed(part, data):
                rest[part] = data.detach()
    return rest, {"dense": dense, "weights": weights}


def small_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the small files that a store keeps, by name."""
    return {**read_auxiliary_files(checkpoint.path), **checkpoint.texts}


class StoreReader(SlabWriter):
    """Builds a model from an open store, whose slabs were read or mapped."""

    gives_all = True

    def __init__(self, opened: OpenStore, host: HostStore) -> None:
        super().__init__(
            opened.path,
            Quantizer(torch.device("cpu")),  # quantizes nothing
            allocate=self._given,
            drops_towers=opened.manifest.about.get("vision") == "drop",
        )
        self._opened = opened
        self._host = host
        self._rest = opened.rest()
        about = opened.manifest.about
        try:
            self._dense = {str(name) for name in about["dense"]}
            self._weights = {
                name: (DTYPES[dtype], blocksize)
                for name, (dtype, blocksize) in about["weights"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._defect(
                f"expected the names of its tensors, found {quoted(error)}"
            ) from error

    def names(self) -> list[str]:
        """List the parameters and buffers that it has."""
        return [*self._dense, *self._weights]

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense tensor of the store.

        Raises:
            CheckpointFormatError: If the store has not what the model needs; ``quantize`` too.
        """
        found = self._part(name)
        self._require_shape(name, found.shape, self._shapes[name])
        if found.is_floating_point() != (name in self.floats):
            kind = "a tensor in floating point" if name in self.floats else "whole numbers"
            raise self._defect(f"expected {kind}, found {found.dtype}", tensor=name)
        return found

    def quantize(
        self, name: str, tensor: torch.Tensor, format: Format, shape: Sequence[int]
    ) -> Any:
        """Return a packed weight of the store, and its state."""
        if name not in self._weights:
            raise self.dense(name, self._part(name))
        dtype, blocksize = self._weights[name]
        names = sorted(PARTS[f"{name}.offset" in self._rest])
        parts = {part: self._part(part_name(name, part)) for part in names}
        state = replace(format, blocksize=blocksize).state(parts, shape, dtype)
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
            raise self._defect("expected it in the store, found it nowhere", tensor=name)
        slab, spec = self._places[name]
        return slab.tensor(spec)

    def _given(self, layouts: Sequence[BlockLayout]) -> HostStore:
        for index, (expected, found) in enumerate(zip(layouts, self._opened.layouts, strict=False)):
            if expected != found:
                differing = set(expected.tensors) ^ set(found.tensors)
                names = sorted({spec.name for spec in differing})[:3]
                raise self._defect(
                    f"expected layer {index} as this configuration and this release of "
                    f"transformers have it, found another form of "
                    f"{quoted(', '.join(names), is_bare=True) or 'its end'}"
                )
        if len(layouts) != len(self._opened.layouts):
            raise self._defect(f"expected {len(layouts)} layers, found {len(self._opened.layouts)}")
        return self._host

    def _defect(self, found: str, tensor: str | None = None) -> Exception:
        return defect(self._opened.path, found, tensor=tensor, remedy=REMEDY)
