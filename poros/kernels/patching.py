"""Gives modules forwards of ours, exchanges them for others for a while, and takes them away."""

from collections.abc import Callable, Iterable

from torch import nn

from poros.kernels.forwards import PatchedForward


def replace(
    modules: Iterable[nn.Module], forward_of: Callable[[nn.Module], PatchedForward | None]
) -> None:
    """Give modules forwards of ours: those that ``forward_of`` gives one.

    One whose forward somebody has set is left alone.
    """
    for module in modules:
        forward = None if "forward" in module.__dict__ else forward_of(module)
        if forward is not None:
            module.__dict__["forward"] = forward


def use_others(modules: Iterable[nn.Module], are_own: bool) -> Callable[[], None]:
    """Have modules run what ours are to be compared with; call what is returned to undo it.

    Args:
        are_own: Whether that is the modules' own forwards, where ours give the same bits. Ours that
            do not are compared with new ones of their kind.
    """
    taken = []
    for module in modules:
        forward = module.__dict__.get("forward")
        if isinstance(forward, PatchedForward):
            taken.append((module.__dict__, forward))
            if not forward.is_exact:
                module.__dict__["forward"] = forward.afresh(module)
            elif are_own:
                del module.__dict__["forward"]

    def undo() -> None:
        for owner, forward in taken:
            owner["forward"] = forward

    return undo


def unpatch(modules: Iterable[nn.Module]) -> None:
    """Have modules run their own forwards."""
    for module in modules:
        forward = module.__dict__.get("forward")
        if isinstance(forward, PatchedForward) and forward.before is not None:
            module.__dict__["forward"] = forward.before
        elif isinstance(forward, PatchedForward):
            del module.__dict__["forward"]
