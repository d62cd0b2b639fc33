"""Whether somebody watches what a layer computes, which a replay would not show."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from poros.replay.call import LayerCall


def is_seen(call: "LayerCall") -> bool:
    """Whether somebody wants to see what happens within this backward."""
    is_measured = call.layer.context.watching_graph() is not None
    return is_measured or torch._C._len_torch_dispatch_stack() > 0


def is_packed_by_others() -> bool:
    """Whether the caller wants to keep saved tensors elsewhere (``save_on_cpu``)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def obstacle_around() -> str | None:
    """What somebody does around this call that a replay would not show."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "operators that are watched"
    return "saved tensors that are packed" if is_packed_by_others() else None


def watchers() -> tuple[int, int, bool]:
    """How many modes see operators and functions, and whether somebody packs saved tensors."""
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        is_packed_by_others(),
    )
