"""Which modules of a model run kernels of ours.

This is the one place where modules get them: a kind of modules that is to run another operator gets
a ``patch`` in a file of its own, which says how such modules are recognised, and a call here.
"""

import torch
from torch import nn

from poros.kernels import adapters, linear4bit, mlp
from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import PatchedForward
from poros.utils.devices import runs_triton


def patch(module: nn.Module, device: torch.device, tally: KernelStats | None) -> None:
    """Have what is in ``module`` run kernels of ours, where they come to the same.

    What does so already goes on. ``poros.kernels.forwards.unpatch`` undoes it.

    Args:
        module: A layer, or a model.
        device: Where it runs. 4-bit products are ours on a GPU.
        tally: Counts calls of adapters; None leaves those, and what is around them, to PEFT.
    """
    if runs_triton(device):
        linear4bit.patch(module.modules())
    if tally is not None:
        adapters.patch(module.modules(), tally)
        mlp.patch(module.modules(), tally)


def are_used(model: nn.Module) -> bool:
    """Whether anything in ``model`` runs kernels of ours."""
    return any(
        isinstance(module.__dict__.get("forward"), PatchedForward) for module in model.modules()
    )
