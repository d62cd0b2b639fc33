"""Which device is meant, and whether there is one."""

import torch

from poros.errors import PolicyError, quoted


def default_device() -> torch.device:
    """The current GPU, or the CPU if there is none that torch can use."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def usable_device(
    device: torch.device | str, *, expected: str = "a usable device", remedy: str = ""
) -> torch.device:
    """The device, with its index.

    Args:
        device: As somebody has named it.
        expected: What the error says that it should be.
        remedy: What the error ends with.

    Raises:
        PolicyError: If there is none such, or it is neither a CPU nor a CUDA device.
    """
    why = "only CPUs and CUDA devices are supported"
    cause: Exception | None = None
    try:
        # An empty tensor checks that the device exists and fills in its index.
        found = torch.empty(0, device=device).device
        if found.type in ("cpu", "cuda"):
            return found
    except (RuntimeError, AssertionError, TypeError) as error:
        why, cause = quoted(str(error).partition("\n")[0], is_bare=True), error
    raise PolicyError(
        f"device: expected {expected}, found {quoted(device)} ({why}){remedy}"
    ) from cause
