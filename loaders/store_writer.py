"""Writes a store to disk (the format is in ``poros.loaders.store``).

Note: A store is there or not
    It is written in a hidden folder beside its place (``poros.io.writing``), flushed, and
    renamed: a writer that is killed leaves nothing in its place, and of two writers one waits.
"""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from xxhash import xxh3_128

from poros.host.layout import BlockLayout, slabs_num_bytes
from poros.host.slab import Arena
from poros.host.store import HostStore
from poros.io.digests import as_bytes, num_threads, sha256
from poros.io.writing import partial_folder, put_in_place, writing
from poros.loaders.store import (
    FORMAT,
    REST,
    SLABS,
    VERSION,
    About,
    Form,
    Manifest,
    form_of,
    forms_of,
)


class StoreWriter(ExitStack):
    """Writes a store: fill the slabs of ``host``, then ``commit``. A context manager.

    The slabs are mapped from the file itself, so a base larger than the memory can be written: the
    system writes pages out as it needs to. Leaving the context without ``commit`` removes all, and
    so does ``close``.

    Args:
        directory: Where the store will be. Its parent must exist; it must not, or be empty.
        layouts: One per decoder layer.
    """

    def __init__(self, directory: str | os.PathLike[str], layouts: Sequence[BlockLayout]) -> None:
        super().__init__()
        self.directory = Path(directory).resolve()
        self.host = HostStore([])
        self._layouts = list(layouts)
        try:
            with writing(self.directory):
                self._partial = self.enter_context(partial_folder(self.directory))
                self._map_slabs()
        except BaseException:
            self.close()
            raise

    def commit(
        self, rest: Mapping[str, torch.Tensor], about: About, files: Mapping[str, bytes]
    ) -> Path:
        """Write the remaining files, flush everything, and move the store to its folder.

        Args:
            rest: Every tensor that is in no slab, by name, on the CPU.
            files: Small files of the source by name, such as ``config.json``.
        """
        try:
            with writing(self.directory, (OSError, SafetensorError)):
                for name, text in files.items():
                    (self._partial / name).parent.mkdir(exist_ok=True)
                    (self._partial / name).write_bytes(text)
                rest = {name: tensor.detach().contiguous() for name, tensor in rest.items()}
                of_rest = described(rest)
                slabs = [slab.padded for slab in self.host.slabs]
                with ThreadPoolExecutor(num_threads()) as pool:
                    digests = list(pool.map(_digest, slabs))
                manifest = Manifest(
                    forms_of(self._layouts),
                    [(len(slab), found) for slab, found in zip(slabs, digests, strict=True)],
                    of_rest,
                    {name: sha256(text) for name, text in files.items()},
                    about,
                )
                save_rest(self._partial, rest, json.dumps(asdict(manifest)))
                for name in (SLABS, REST, *files):
                    _flush(self._partial / name)
                put_in_place(self._partial, self.directory)
                return self.directory
        finally:
            self.close()

    def _map_slabs(self) -> None:
        size = slabs_num_bytes(self._layouts)
        descriptor = os.open(self._partial / SLABS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.callback(os.close, descriptor)
        if size:
            # A page that found no room later would end the process with a signal.
            os.posix_fallocate(descriptor, 0, size)
        arena = Arena(size, file=descriptor) if size else Arena(0)
        self.host = HostStore.over(arena, self._layouts)
        self.callback(setattr, self, "host", HostStore([]))


def save_rest(
    folder: Path, rest: Mapping[str, torch.Tensor], manifest: str, **metadata: str
) -> None:
    """Write ``rest.safetensors`` with a manifest, and the SHA-256 of that."""
    said = {"format": FORMAT, "version": VERSION, "store": manifest, **metadata}
    save_file(dict(rest), folder / REST, {**said, "sha256": sha256(manifest.encode())})


def described(rest: Mapping[str, torch.Tensor]) -> dict[str, tuple[Form, str]]:
    """Return what a manifest says of the tensors that are in no slab."""
    return {name: (form_of(each), _digest(as_bytes(each))) for name, each in rest.items()}


def _digest(data: memoryview) -> str:
    return xxh3_128(data).hexdigest()


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream)
