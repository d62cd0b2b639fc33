"""What a process holds: device memory as four peaks, host memory, and the machine it runs on."""

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_STATUS = {"VmRSS": "host_rss", "RssAnon": "host_anonymous", "RssShmem": "host_shared"}
_KINDS = ("allocated", "requested")
_GPU_FIELDS = "driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit,memory.total"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty(device: torch.device) -> dict[str, int]:
    """Hand cached memory back, libraries' workspaces included; returns what is still in use.

    A workspace that an earlier arm made would otherwise be missing from the peaks of this one.
    """
    if device.type != "cuda":
        return {}
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats(device)
    # A device that nothing was ever allocated on has no statistics.
    return {kind: stats.get(f"{kind}_bytes.all.current", 0) for kind in _KINDS}


def reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_peaks(device: torch.device, base: Mapping[str, int]) -> dict[str, int]:
    """Peaks since ``reset_peaks`` in bytes; empty on a CPU.

    ``peak_allocated`` and ``peak_requested`` (before the allocator rounds up) are above ``base``;
    ``peak_reserved`` is what the allocator took from the driver; ``peak_process`` is that and all
    else in use on the card, context and other processes included, as nvidia-smi shows it.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = stats["reserved_bytes.all.peak"]
    return {
        **{f"peak_{kind}": stats[f"{kind}_bytes.all.peak"] - base[kind] for kind in _KINDS},
        "peak_reserved": reserved,
        "peak_process": total - free - stats["reserved_bytes.all.current"] + reserved,
    }


def host_memory() -> dict[str, int]:
    """Resident bytes of this process now: all, anonymous, shared. Linux; empty elsewhere."""
    path = Path("/proc/self/status")
    if not path.exists():
        return {}
    sizes = {}
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key in _STATUS:
            sizes[_STATUS[key]] = int(value.split()[0]) * 1024
    return sizes


def environment(device: torch.device) -> dict[str, str]:
    """The machine and the software, read from the running process."""
    import accelerate
    import bitsandbytes
    import peft
    import transformers

    import poros

    facts = {
        "device": device.type,
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor(),
        "cpu cores": str(len(os.sched_getaffinity(0))),
        "host memory": _line("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "torch threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        "commit": _output("git", "describe", "--always", "--dirty") or "not known",
    }
    for module in (torch, transformers, peft, accelerate, bitsandbytes, poros):
        facts[module.__name__] = str(module.__version__)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts["device"] = torch.cuda.get_device_name(device)
        facts["device memory in use at the start"] = f"{(total - free) / 1e9:.2f} GB"
        values = _output("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader")
        names = _GPU_FIELDS.split(",")
        first = values.splitlines()[0].split(",") if values else []
        facts |= {name: value.strip() for name, value in zip(names, first, strict=False)}
    return facts


def _line(path: str, key: str) -> str:
    file = Path(path)
    for line in file.read_text().splitlines() if file.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _output(*command: str) -> str:
    try:
        process: Any = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
