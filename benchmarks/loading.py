"""Load a checkpoint of real shapes: time, GPU high-water mark, host memory, and the same bytes.

    python -m benchmarks.loading qwen2.5-7b --folder /tmp/checkpoint --standard

Writes a bf16 checkpoint of the model's shapes (random weights; with --sparse holes that take no
disk and read as zeros), loads it with ``poros.load``, on request also with ``from_pretrained`` on
the GPU, and compares every byte. Each loader runs in a process of its own. Beside the load time
stand a plain read of the files and quantizing the same tensors back to back.
"""

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import config_of
from poros.kernels.nf4 import double_quantization, part_tensors

_SHARD_NUM_BYTES = 4 << 30


def write_checkpoint(config: Any, folder: Path, is_sparse: bool) -> int:
    """A bf16 checkpoint in shards; returns its bytes."""
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1 << 24, generator=generator).mul_(0.02).bfloat16().view(torch.uint8)
    tile = noise.numpy().tobytes()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        num_bytes = 2 * torch.Size(shape).numel()
        if size and size + num_bytes > _SHARD_NUM_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += num_bytes
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name, shape in shard.items():
            start, end = end, end + 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            index[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            if is_sparse:
                out.truncate(8 + len(text) + end)
            else:
                for start in range(0, end, len(tile)):
                    shift = 2 * ((start // len(tile) * 4099) % (len(tile) // 4))
                    piece = min(len(tile), end - start)
                    out.write((tile[shift:] + tile[:shift])[:piece])
        total += end
    about = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(about))
    return total


class HostPeak(threading.Thread):
    """Samples anonymous and shared memory of this process; mapped file pages do not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.base = self._now()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, self._now() - self.base)

    def finish(self) -> int:
        self._ended.set()
        self.join()
        return max(self.peak, self._now() - self.base)

    @staticmethod
    def _now() -> int:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return sum(int(fields[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssShmem"))


def digests(model: Any) -> dict[str, str]:
    """SHA-256 of every byte of every parameter, scale and constant, by name."""
    by_name = {}
    for name, tensor in model.named_parameters():
        for part, source in part_tensors(name, tensor, with_constants=True).items():
            data = source.detach().cpu().contiguous()
            data = data.reshape(-1).view(torch.uint8)
            by_name[part] = hashlib.sha256(data.numpy()).hexdigest()
    return by_name


def load_with(loader: str, folder: Path, out: Path, is_hashed: bool) -> None:
    """One loader in this process; figures to ``out``."""
    # Imported first: libraries take seconds and memory of their own.
    import bitsandbytes  # noqa: F401
    from transformers import AutoModelForCausalLM

    import poros.loaders.load

    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.zeros(1, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    host = HostPeak()
    host.start()
    began = time.perf_counter()
    if loader == "poros":
        model = poros.loaders.load.load(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            device_map={"": "cuda" if is_gpu else "cpu"},
            quantization_config=double_quantization(torch.bfloat16),
        )
    if is_gpu:
        torch.cuda.synchronize()
    figures: dict[str, Any] = {"loader": loader, "load_s": round(time.perf_counter() - began, 2)}
    figures["host_peak_gb"] = round(host.finish() / 1e9, 3)
    if is_gpu:
        figures["gpu_peak_gb"] = round((torch.cuda.max_memory_allocated() - base) / 1e9, 4)
    if loader == "poros":
        from poros.host.store import attached_store

        store = attached_store(model)
        figures["store_gb"] = round(store.num_bytes / 1e9, 3) if store else None
        figures["fallbacks"] = store.fallbacks if store else None
    if is_hashed:
        figures["digests"] = digests(model)
    out.write_text(json.dumps(figures))


def plain_read(folder: Path) -> float:
    """Seconds to read the shards once into a buffer."""
    buffer = bytearray(64 << 20)
    began = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - began


def quantize_back_to_back(config: Any) -> float:
    """Seconds to move each 4-bit weight's bytes to the GPU and quantize it there, nothing else."""
    import bitsandbytes.functional as F

    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [
        tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    ]
    sources = {shape: torch.randn(shape).bfloat16().mul_(0.02) for shape in set(shapes)}
    began = time.perf_counter()
    for shape in shapes:
        F.quantize_4bit(
            sources[shape].to(device), compress_statistics=True, quant_type="nf4", blocksize=64
        )
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--standard", action="store_true")
    parser.add_argument("--loader", choices=["poros", "standard"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.loader:
        load_with(options.loader, options.folder, options.out, options.standard)
        return 0
    config = config_of(options.model, options.layers)
    began = time.perf_counter()
    num_bytes = write_checkpoint(config, options.folder, options.sparse)
    row: dict[str, Any] = {
        "model": options.model,
        "layers": config.num_hidden_layers,
        "checkpoint_gb": round(num_bytes / 1e9, 2),
        "written_s": round(time.perf_counter() - began, 1),
        "read_s": round(plain_read(options.folder), 2),
        "quantize_s": round(quantize_back_to_back(config), 2),
    }
    results = []
    for loader in ("poros", "standard") if options.standard else ("poros",):
        out = options.folder / f"{loader}.json"
        command = [sys.executable, "-m", "benchmarks.loading", options.model, "--loader", loader]
        command += ["--folder", str(options.folder), "--out", str(out)]
        done = subprocess.run([*command, *(["--standard"] if options.standard else [])])
        if done.returncode:
            print(json.dumps({"loader": loader, "failed": done.returncode}))
            continue
        results.append(json.loads(out.read_text()))
        os.remove(out)
    hashes = [figures.pop("digests", None) for figures in results]
    if len(hashes) == 2:
        row["tensors"] = len(hashes[0])
        row["differing_tensors"] = sum(
            hashes[0].get(name) != value for name, value in hashes[1].items()
        ) + len(hashes[0].keys() - hashes[1].keys())
    if results:
        row["over_floor"] = round(results[0]["load_s"] / max(row["read_s"], row["quantize_s"]), 2)
    print(json.dumps(row))
    for figures in results:
        print(json.dumps(figures), flush=True)
    shutil.rmtree(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
