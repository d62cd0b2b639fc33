"""Whether anybody else takes part in the call of a module."""

from torch import nn

from poros.kernels.forwards import PatchedForward

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_ALL_KINDS = [f"_global{kind}" for kind in _KINDS]
_OF_ALL = vars(nn.modules.module)


def has_hooks(*modules: nn.Module, but_ours: bool = False) -> bool:
    """Whether any module has hooks (its own or global ones), or a forward set on the instance.

    Args:
        but_ours: Whether our own forwards do not count.
    """
    for module in modules:
        own = module.__dict__
        forward = own.get("forward")
        if forward is not None and not (but_ours and isinstance(forward, PatchedForward)):
            return True
        for kind in _KINDS:
            if own[kind]:
                return True
    return any(map(_OF_ALL.__getitem__, _OF_ALL_KINDS))
