"""Attention whose backward does not repeat itself, and making it do so.

On a GPU the backward of fused attention adds up in the order in which its thread blocks happen to
finish, from about 2048 tokens on: two runs of one layer from one state differ, resident or
streamed. Each of these kernels has a deterministic form (memory-efficient and flash attention), or
stands aside for one that has (cuDNN's), while PyTorch's deterministic flag is on and not "warn
only".

The flag goes on for attention alone, around its forward and around its backward node. Over a whole
layer cuBLAS would refuse to work without an environment variable that has to be set before the
process first uses the GPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from poros.kernels.nodes import nodes_from
from poros.kernels.packed_attention import flash_attention
from poros.stream.settings import deterministic_flags, set_deterministic_flags
from poros.stream.within import FunctionMode, Within

_NODES = ("ScaledDotProduct", "varlen_attn")
"""What names of attention's backward nodes contain."""
_STEADY = (True, False)


class AttentionKernels(FunctionMode):
    """Watches the calls of fused attention (``is_attention``) in its body.

    Args:
        deterministic: Let them repeat themselves, bit for bit, in forward and in backward, wherever
            and whenever the latter runs (inside ``unchanged_flags``).

    Attributes:
        may_vary: Whether a call took a kernel whose backward need not repeat itself.
    """

    def __init__(self, deterministic: bool = False) -> None:
        super().__init__()
        self._is_deterministic = deterministic
        self.may_vary = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_attention(func):
            return func(*args, **kwargs)
        if not self._is_deterministic:
            self.may_vary |= varies(func, *args, **kwargs)
            return func(*args, **kwargs)
        return _deterministically(func, args, kwargs)


def is_attention(func: Callable[..., Any]) -> bool:
    """Whether ``func`` is PyTorch's fused attention, by mask or by documents."""
    return func in (torch.nn.functional.scaled_dot_product_attention, flash_attention)


def varies(func: Any, query: torch.Tensor, *others: Any, **options: Any) -> bool:
    """Whether the kernel that PyTorch takes for these may give other gradients each time."""
    return query.is_cuda and _choice(func, query, *others, **options) is not SDPBackend.MATH


def unchanged_flags(flags: tuple[bool, bool] | None = None) -> AbstractContextManager[object]:
    """Put the deterministic flags back at the end: a backward node that fails leaves one on.

    ``flags``: what PyTorch's are in the body, for this process, if others than they are.
    """

    def fill(stack: ExitStack) -> None:
        before = deterministic_flags()
        stack.callback(set_deterministic_flags, before)
        set_deterministic_flags(flags or before)

    return Within(fill)


def _deterministically(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with unchanged_flags(_STEADY):
        choice = _choice(func, *args, **kwargs)
        output = func(*args, **kwargs) if choice is not SDPBackend.MATH else None
    if output is None:
        # Plain matrix products repeat themselves, and under the flag cuBLAS would refuse them.
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **kwargs)
    given = [argument.grad_fn for argument in args if isinstance(argument, torch.Tensor)]
    for node in nodes_from([output.grad_fn], given):
        if not any(each in node.name() for each in _NODES):
            continue
        held: list[tuple[bool, bool]] = []
        node.register_prehook(lambda _, held=held: _enter(held))
        node.register_hook(lambda *_, held=held: _leave(held))
    return output


def _choice(func: Any, *args: Any, **kwargs: Any) -> SDPBackend:
    if func is flash_attention:
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend(torch._fused_sdp_choice(*args, **kwargs))


def _enter(held: list[tuple[bool, bool]]) -> None:
    held.append(deterministic_flags())
    set_deterministic_flags(_STEADY)


def _leave(held: list[tuple[bool, bool]]) -> None:
    set_deterministic_flags(held.pop())
