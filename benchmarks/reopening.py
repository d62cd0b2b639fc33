"""How long it takes to reopen a store: beside a plain read, and beside itself without hashing.

    python -m benchmarks.reopening FOLDER [--layers 16] [--megabytes 64] [--rounds 5]
    python -m benchmarks.reopening FOLDER --model qwen2.5-7b [--rounds 9]

The first writes a store of random slabs to FOLDER, then alternates between opening it and reading
the same bytes plainly into fresh memory. The second writes a checkpoint of the model's shapes,
quantizes it into a store, which is left there for the next run, and alternates between
``poros.load`` of the store and the same with no byte hashed. Files are in the page cache ("warm")
or dropped from it before each run ("cold"; the request is only a hint to the system). Printed are
the medians, their quartiles and the ratio. The bytes are compared once, so that a fast but wrong
reader cannot win; without hashing, a flipped bit must pass, and with it, not.
"""

import argparse
import gc
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.loading import write_checkpoint
from benchmarks.models import config_of
from poros.errors import CheckpointFormatError
from poros.host.layout import BlockLayout
from poros.host.store import HostStore
from poros.loaders.store import open_store
from poros.loaders.store_writer import StoreWriter

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


def load(store: Path) -> Any:
    """A model of the store, every byte hashed."""
    import poros.loaders.load

    return poros.loaders.load.load(store)


def load_unchecked(store: Path) -> Any:
    """The same, with nothing hashed and nothing compared."""
    with (
        patch("poros.loaders.store.hash_piece", lambda piece: b""),
        patch("poros.loaders.store.require_digest", lambda *_: None),
    ):
        return load(store)


def forget(store: Path) -> None:
    """Ask the system to drop the files from its cache."""
    for name in ("slabs.safetensors", "rest.safetensors"):
        with (store / name).open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(body: Callable[[Path], object], store: Path, *, cold: bool) -> float:
    """Seconds of one run."""
    if cold:
        forget(store)
    begin = time.perf_counter()
    result = body(store)
    taken = time.perf_counter() - begin
    del result
    gc.collect()
    return taken


def compare_hashing(folder: Path, model: str, layers: int | None, rounds: int) -> None:
    """``poros.load`` of a store with every byte hashed, and with none."""
    import poros.loaders.load

    checkpoint, store = folder / f"{model}-checkpoint", folder / f"{model}-store"
    if not store.exists():
        write_checkpoint(config_of(model, layers), checkpoint, is_sparse=False)
        poros.loaders.load.load(checkpoint, store=store)
        shutil.rmtree(checkpoint)
    sizes = [file.stat().st_size / 1e9 for file in sorted(store.glob("*.safetensors"))]
    print(
        f"{model}: store of {sum(sizes):.2f} GB (outside layers {sizes[0]:.2f}, layers "
        f"{sizes[1]:.2f}), {rounds} alternating runs, {os.cpu_count()} cores"
    )
    for cold in (False, True):
        times: dict[str, list[float]] = {"hashed": [], "not hashed": []}
        for turn in range(rounds + 1):
            taken = {"hashed": measure(load, store, cold=cold)}
            taken["not hashed"] = measure(load_unchecked, store, cold=cold)
            for name in taken if turn else ():  # the first of each warms up
                times[name].append(taken[name])
        medians = []
        for name, seconds in times.items():
            first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
            medians.append(middle)
            print(
                f"{'cold' if cold else 'warm'}, {name}: {middle:.3f} s "
                f"(quartiles {first:.3f} to {third:.3f})"
            )
        print(f"{'cold' if cold else 'warm'}: ratio {medians[0] / medians[1]:.3f}")
    flip(store)
    try:
        load_unchecked(store)
        load(store)
    except CheckpointFormatError:
        print("control: a flipped bit is found with hashing, and passes without")
    else:
        raise SystemExit("a flipped bit was not found")
    finally:
        flip(store)


def flip(store: Path) -> None:
    """One bit of the last slab."""
    with (store / "slabs.safetensors").open("r+b") as stream:
        stream.seek(-70_000, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-70_000, os.SEEK_END)
        stream.write(bytes([byte ^ 1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="compare hashing at its shapes, such as qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="16 without a model, all of them with one")
    parser.add_argument("--megabytes", type=int, default=64, help="of each layer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.model:
        options.folder.mkdir(parents=True, exist_ok=True)
        compare_hashing(options.folder, options.model, options.layers, options.rounds)
        return
    store = options.folder / "reopening"
    like = torch.empty(options.megabytes * 10**6, dtype=torch.uint8, device="meta")
    layouts = [BlockLayout.pack([(f"{index}", like)]) for index in range(options.layers or 16)]
    host = HostStore.allocate(layouts)
    with StoreWriter(store, layouts) as writer:
        for slab, written in zip(host.slabs, writer.host.slabs, strict=True):
            slab.bytes.random_(256)
            written.bytes.copy_(slab.bytes)
        writer.commit({}, {})
    try:
        reopened = reopen(store)
        for left, right in zip(host.slabs, reopened.slabs, strict=True):
            if not torch.equal(left.bytes, right.bytes):
                raise SystemExit("the bytes that came back are others")
        gigabytes = host.num_bytes / 1e9
        del host, reopened
        print(
            f"{gigabytes:.2f} GB, median of {options.rounds} alternating runs, "
            f"{os.cpu_count()} cores"
        )
        for cold in (False, True):
            times: dict[str, list[float]] = {"reopen": [], "plain": []}
            for _ in range(options.rounds):
                times["reopen"].append(measure(reopen, store, cold=cold))
                times["plain"].append(measure(read_plainly, store, cold=cold))
            ours, plain = (statistics.median(seconds) for seconds in times.values())
            print(
                f"{'cold' if cold else 'warm'}: reopen {ours:.2f} s ({gigabytes / ours:.2f} GB/s), "
                f"plain {plain:.2f} s ({gigabytes / plain:.2f} GB/s), ratio {ours / plain:.2f}"
            )
    finally:
        shutil.rmtree(store)


if __name__ == "__main__":
    main()
