"""How long it takes to reopen a store, beside a plain read of the same bytes into fresh memory.

    python benchmarks/reopening.py FOLDER [--layers 16] [--megabytes 64] [--rounds 5]

Writes a store of random slabs to FOLDER, then alternates between the two, with the file in the
page cache ("warm") and dropped from it before each run ("cold"; the request is only a hint to the
system). Prints the median of each and the ratio of the medians. The bytes are compared once, so
that a fast but wrong reader cannot win.
"""

import argparse
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from poros.host import HostStore
from poros.layout import BlockLayout
from poros.loaders.store import open_store
from poros.loaders.writer import write_store

_PIECE_NUM_BYTES = 16 * 2**20


def reopen(store: Path) -> HostStore:
    """Check the store and read all slabs."""
    with open_store(store) as opened:
        host = HostStore.allocate(opened.layouts)
        opened.read_into(host)
    return host


def read_plainly(store: Path) -> mmap.mmap:
    """One thread, large reads, into memory that is as fresh as that of a new host store."""
    file = store / "slabs.safetensors"
    memory = mmap.mmap(-1, file.stat().st_size)
    with file.open("rb", buffering=0) as stream, memoryview(memory) as target:
        done = 0
        while count := stream.readinto(target[done : done + _PIECE_NUM_BYTES]):
            done += count
    return memory


def forget(store: Path) -> None:
    """Ask the system to drop the file from its cache."""
    with (store / "slabs.safetensors").open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(body: Callable[[Path], object], store: Path, *, cold: bool) -> float:
    """Seconds of one run."""
    if cold:
        forget(store)
    begin = time.perf_counter()
    body(store)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=64, help="of each layer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    store = options.folder / "reopening"
    host = HostStore.allocate([BlockLayout((), options.megabytes * 10**6)] * options.layers)
    for slab in host.slabs:
        slab.bytes.random_(256)
    write_store(store, host, {}, {})
    try:
        found = reopen(store)
        for left, right in zip(host.slabs, found.slabs, strict=True):
            if not torch.equal(left.bytes, right.bytes):
                raise SystemExit("the bytes that came back are others")
        gigabytes = host.num_bytes / 1e9
        del host, found
        print(
            f"{gigabytes:.2f} GB, median of {options.rounds} alternating runs, "
            f"{os.cpu_count()} cores"
        )
        for cold in (False, True):
            times: dict[str, list[float]] = {"reopen": [], "plain": []}
            for _ in range(options.rounds):
                times["reopen"].append(measure(reopen, store, cold=cold))
                times["plain"].append(measure(read_plainly, store, cold=cold))
            ours, plain = (statistics.median(each) for each in times.values())
            print(
                f"{'cold' if cold else 'warm'}: reopen {ours:.2f} s ({gigabytes / ours:.2f} GB/s), "
                f"plain {plain:.2f} s ({gigabytes / plain:.2f} GB/s), ratio {ours / plain:.2f}"
            )
    finally:
        shutil.rmtree(store)


if __name__ == "__main__":
    main()
