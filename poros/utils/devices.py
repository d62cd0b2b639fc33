"""Selects and checks the device, and reads what it offers."""

import os
import re
from functools import cache
from importlib.util import find_spec

import torch

from poros.config import budget_of
from poros.errors import PolicyError, quoted
from poros.utils.formatting import first_line


def default_device() -> torch.device:
    """The current GPU, or the CPU if there is none that torch can use."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@cache
def runs_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run there: it is installed, and the GPU computes in bfloat16.

    PyTorch's builds for CUDA bring it, but for Windows.
    """
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_spec("triton") is not None
    )


def free_budget(device: torch.device | None = None) -> int:
    """Return the bytes that training may still allocate on a GPU: see ``poros.config.budget_of``.

    Args:
        device: The GPU; None is the current one.
    """
    free, whole = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.memory.get_per_process_memory_fraction(device) * whole)
    reserved = torch.cuda.memory_reserved(device)
    cached = reserved - torch.cuda.memory_allocated(device)
    return budget_of(min(free, allowed - reserved) + cached, whole)


def library_workspace(device: torch.device) -> int:
    """Bytes that cuBLAS keeps on a GPU for itself once a forward and a backward have run.

    PyTorch gives a workspace to each thread that multiplies: the caller's and autograd's. Its size
    is set by ``CUBLAS_WORKSPACE_CONFIG``, or 32 MiB on Hopper and 8.1 MiB on others; cuBLASLt has
    1 MiB more. Measured with torch 2.11 on an H100; that the large GPUs after it are like it, and
    the others as PyTorch documents, is assumed.

    Args:
        device: The device; a CPU needs 0 bytes.
    """
    if device.type != "cuda":
        return 0
    is_large = (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)
    chosen = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    size = sum(int(kib) * int(number) for kib, number in chosen) * 1024
    return 2 * ((size or (32 * 2**20 if is_large else 8320 * 1024)) + 2**20)


def usable_device(device: torch.device | str) -> torch.device:
    """The device, with its index.

    Raises:
        PolicyError: If there is no such device, or it is neither a CPU nor a CUDA device.
    """
    why = "only CPUs and CUDA devices are supported"
    cause: Exception | None = None
    try:
        # An empty tensor checks that the device exists and fills in its index.
        found = torch.empty(0, device=device).device
        if found.type in ("cpu", "cuda"):
            return found
    except (RuntimeError, AssertionError, TypeError) as error:
        why, cause = quoted(first_line(error), is_bare=True), error
    raise PolicyError(
        f"device: expected a usable device, found {quoted(device)} ({why})"
    ) from cause
