"""Writes a store to disk (the format is in ``poros.loaders.store``).

Note: A store is there or not
    It is written in a hidden folder beside its place (``poros.io.writing``), flushed, and
    renamed: a writer that is killed leaves nothing that opens, and of two writers one waits.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from poros.host.layout import BlockLayout, slabs_num_bytes
from poros.host.slab import Arena
from poros.host.store import HostStore
from poros.io.digests import as_bytes, digest_of, num_threads, sha256
from poros.io.writing import partial_folder, put_in_place, writing
from poros.loaders.manifest import REST, SLABS, Manifest, rest_header, slabs_header


class StoreWriter:
    """Writes a store: fill the slabs of ``host``, then ``commit``. A context manager.

    The slabs are mapped from the file itself, so a base larger than the memory can be written: the
    system writes pages out as it needs to. Leaving the context without ``commit`` removes all.

    Args:
        directory: Where the store will be. Its parent must exist; it must not, or be empty.
        layouts: One per decoder layer.

    Raises:
        StoreWriteError: If there is no room on the disk or something else is in the way.
    """

    def __init__(self, directory: str | os.PathLike[str], layouts: Sequence[BlockLayout]) -> None:
        self.directory = Path(directory).resolve()
        self.host = HostStore([])
        self._layouts = list(layouts)
        self._undo = ExitStack()
        try:
            with writing(self.directory):
                self._partial = self._undo.enter_context(partial_folder(self.directory))
                self._map_slabs()
        except BaseException:
            self.close()
            raise

    def commit(
        self,
        rest: Mapping[str, torch.Tensor],
        about: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Write the remaining files, flush everything, and move the store to its folder.

        Args:
            rest: Every tensor that is in no slab, by name, on the CPU.
            about: What the store holds and who made it, as plain JSON values: source fingerprint,
                quantization, versions, device, threads.
            files: Small files of the source by name, such as ``config.json``.

        Raises:
            StoreWriteError: If the disk is full or another store came first. Nothing is left.
            ValueError: If ``about`` is not plain JSON.
        """
        files = files or {}
        try:
            with writing(self.directory):
                for name, text in files.items():
                    (self._partial / name).parent.mkdir(exist_ok=True)
                    _write(self._partial / name, [text])
                rest = {name: tensor.detach().contiguous() for name, tensor in rest.items()}
                with ThreadPoolExecutor(max_workers=num_threads()) as pool:
                    slab_digests = [digest_of([slab.padded], pool) for slab in self.host.slabs]
                    rest_digest = digest_of([*map(as_bytes, rest.values())], pool)
                manifest = Manifest(
                    self._layouts,
                    slab_digests,
                    rest_digest,
                    {name: sha256(text) for name, text in files.items()},
                    about,
                )
                os.fsync(self._file)
                pieces = [rest_header(manifest, rest), *map(as_bytes, rest.values())]
                _write(self._partial / REST, pieces)
                put_in_place(self._partial, self.directory)
                return self.directory
        finally:
            self.close()

    def close(self) -> None:
        """Release the slabs and remove an uncommitted folder. Idempotent."""
        self.host = HostStore([])
        self._undo.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _map_slabs(self) -> None:
        header = slabs_header(self._layouts)
        size = slabs_num_bytes(self._layouts)
        _write(self._partial / SLABS, [header])
        self._file = os.open(self._partial / SLABS, os.O_RDWR | os.O_CLOEXEC)
        self._undo.callback(os.close, self._file)
        # A page that found no room later would end the process with a signal.
        os.posix_fallocate(self._file, 0, len(header) + size)
        arena = Arena(size, file=self._file, offset=len(header)) if size else Arena(0)
        self.host = HostStore.over(arena, self._layouts)


def _write(file: Path, pieces: Iterable[Any]) -> None:
    with file.open("xb") as stream:
        for piece in pieces:
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
