"""How to bring a checkpoint's bytes into a buffer: memory mapping against positioned reads.

    python benchmarks/reading.py FOLDER [--num-gb 2] [--rounds 5] [--work-ms 8]

Writes a safetensors file of random bytes into FOLDER, brings it into one reused 16 MiB buffer by
each arm, and deletes it. Every arm sees the same pieces in the same order, and the bytes that it
brought are compared with the plain reads by SHA-256 before anything is timed.

States: "cold" drops the file from the system's cache before each run (and fails unless the kernel
counts the bytes as read from the disk), "warm" reads it once before. "busy" is cold with WORK
milliseconds of sleep after each piece, in the place of a device that quantizes it: it shows which
arms read on meanwhile.

Arms of one round follow one another and rounds are interleaved, so a slow spell of the disk hits
all of them. Times are medians; the ratio is to plain positioned reads of the same state.
"""

import argparse
import hashlib
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from poros.loaders.checkpoint import Checkpoint

PIECE_NUM_BYTES = 16 * 2**20
TENSOR_NUM_BYTES = 128 * 2**20

Arm = Callable[[Path, torch.Tensor], Iterator[int]]
"""Yields the length of each piece once it lies in the buffer."""


def plain(folder: Path, buffer: torch.Tensor) -> Iterator[int]:
    """Positioned reads straight into the buffer: the floor without read-ahead of our own."""
    with Checkpoint.open(folder) as checkpoint:
        entries = [checkpoint.entry(name) for name in checkpoint.names]
    memory = memoryview(buffer.numpy())
    descriptor = os.open(folder / "model.safetensors", os.O_RDONLY)
    try:
        for entry in entries:
            end = entry.offset + entry.num_bytes
            for at in range(entry.offset, end, PIECE_NUM_BYTES):
                num_bytes = min(PIECE_NUM_BYTES, end - at)
                if os.preadv(descriptor, [memory[:num_bytes]], at) != num_bytes:
                    raise RuntimeError("expected a full read")
                yield num_bytes
    finally:
        os.close(descriptor)


def touched(folder: Path, buffer: torch.Tensor) -> Iterator[int]:
    """Mapped; pages come as they are touched."""
    with Checkpoint.open(folder) as checkpoint:
        entries = [checkpoint.entry(name) for name in checkpoint.names]
    with (folder / "model.safetensors").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for entry in entries:
        yield from _copy(
            torch.frombuffer(
                mapping, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset
            ),
            buffer,
        )


def fetched(folder: Path, buffer: torch.Tensor) -> Iterator[int]:
    """Reads into new memory, a tensor at a time."""
    with Checkpoint.open(folder) as checkpoint:
        for name in checkpoint.names:
            yield from _copy(checkpoint.fetch(name), buffer)


def ahead(folder: Path, buffer: torch.Tensor) -> Iterator[int]:
    """Reads as the loader does: the tensors that follow are read ahead."""
    with Checkpoint.open(folder) as checkpoint:
        for tensor_slice in checkpoint.slices().values():
            yield from _copy(tensor_slice[...], buffer)


def library_mapped(folder: Path, buffer: torch.Tensor) -> Iterator[int]:
    """safetensors' own mapping."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield from _copy(file.get_tensor(name), buffer)


def library_reads(folder: Path, buffer: torch.Tensor) -> Iterator[int]:
    """safetensors' positioned reads, a tensor at a time."""
    with safe_open(folder / "model.safetensors", framework="pt", backend="pread") as file:
        for name in file.keys():  # noqa: SIM118
            yield from _copy(file.get_tensor(name), buffer)


def _copy(tensor: torch.Tensor, buffer: torch.Tensor) -> Iterator[int]:
    flat = tensor.view(-1).view(torch.uint8)
    for piece in flat.split(PIECE_NUM_BYTES):
        buffer[: len(piece)].copy_(piece)
        yield len(piece)


ARMS: dict[str, Arm] = {
    "plain positioned reads": plain,
    "mapped, touched": touched,
    "fetched": fetched,
    "fetched, read-ahead": ahead,
    "safetensors, mapped": library_mapped,
    "safetensors, positioned": library_reads,
}


def run(arm: Arm, folder: Path, buffer: torch.Tensor, work_ms: float = 0.0) -> float:
    """Seconds to bring every piece into the buffer, with work after each."""
    start = time.perf_counter()
    for _ in arm(folder, buffer):
        if work_ms:
            time.sleep(work_ms / 1e3)
    return time.perf_counter() - start


def digest(arm: Arm, folder: Path, buffer: torch.Tensor) -> str:
    """SHA-256 of the pieces in their order."""
    hasher = hashlib.sha256()
    for num_bytes in arm(folder, buffer):
        hasher.update(memoryview(buffer[:num_bytes].numpy()))
    return hasher.hexdigest()


def drop(file: Path) -> None:
    """Take a file out of the system's cache; works once nothing maps it."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def num_bytes_from_disk() -> int:
    """What the kernel counts as read from a disk for this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def measure(folder: Path, rounds: int, work_ms: float) -> dict[tuple[str, str], list[float]]:
    """Seconds of each arm and state, one per round."""
    file = folder / "model.safetensors"
    buffer = torch.empty(PIECE_NUM_BYTES, dtype=torch.uint8)
    expected = digest(plain, folder, buffer)
    for name, arm in ARMS.items():
        if digest(arm, folder, buffer) != expected:
            raise RuntimeError(f"{name} brought other bytes than plain reads")
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for state in ("warm", "cold", "busy"):
            for name, arm in ARMS.items():
                if state == "warm":
                    run(plain, folder, buffer)
                else:
                    drop(file)
                before = num_bytes_from_disk()
                took = run(arm, folder, buffer, work_ms if state == "busy" else 0.0)
                read = (num_bytes_from_disk() - before) / file.stat().st_size
                if (read < 0.95) != (state == "warm"):
                    raise RuntimeError(f"{name} {state}: {read:.0%} came from the disk")
                seconds.setdefault((state, name), []).append(took)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work-ms", type=float, default=8.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory(dir=arguments.folder, prefix="poros-reading-") as name:
        folder = Path(name)
        num_tensors = max(1, round(arguments.num_gb * 1e9 / TENSOR_NUM_BYTES))
        shape = (TENSOR_NUM_BYTES // 2048, 1024)
        tensors = {
            f"layers.{index}.weight": torch.randint(0, 2**15, shape, dtype=torch.int16)
            for index in range(num_tensors)
        }
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        del tensors
        num_gb = (folder / "model.safetensors").stat().st_size / 1e9
        seconds = measure(folder, arguments.rounds, arguments.work_ms)
    print(
        f"{num_gb:.2f} GB in {num_tensors} tensors, {arguments.rounds} rounds, work "
        f"{arguments.work_ms} ms per 16 MiB; torch {torch.__version__}, Linux {platform.release()}"
    )
    print("| state | arm | median s | min to max s | GB/s | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (state, name), took in sorted(seconds.items(), key=lambda item: item[0][0]):
        median = statistics.median(took)
        floor = statistics.median(seconds[state, next(iter(ARMS))])
        print(
            f"| {state} | {name} | {median:.3f} | {min(took):.3f} to {max(took):.3f} "
            f"| {num_gb / median:.2f} | {median / floor:.2f} |"
        )


if __name__ == "__main__":
    main()
