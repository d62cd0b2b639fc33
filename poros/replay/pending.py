"""Results of layers whose calls wait for those of the layers behind them."""

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from poros.errors import UnsupportedModelError

OF_FORM = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")
        ),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.is_floating_point),
    }
)
"""What only looks at the form of a tensor."""


class Result:
    """What a call of a layer that waits gives, once it has run by itself; ``run`` has it run.

    Attributes:
        value: It.
    """

    value: torch.Tensor | None = None

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._pending: Callable[[], object | None] = lambda: None

    def is_held(self) -> bool:
        """Whether anybody has what stands for it."""
        return self._pending() is not None

    def hand_on(self, like: torch.Tensor) -> "Pending":
        """What stands for it: a tensor of the form of ``like``."""
        pending = Pending.like(like, self)
        self._pending = weakref.ref(pending)
        return pending

    def take(self) -> torch.Tensor:
        """The value.

        Raises:
            UnsupportedModelError: If the call was replayed with others: then nobody has it.
        """
        if self.value is None:
            self._run()
        if self.value is None:
            raise UnsupportedModelError(
                "expected hidden states between two layers to be passed on, or used before further "
                "layers run, found code that keeps those of one layer and uses them later. Use "
                "poros.prepare(model, cuda_graphs=False)"
            )
        return self.value


class Pending(torch.Tensor):
    """The result of a call that waits. Any use of it but a look at its form has the call run."""

    result: Result

    @staticmethod
    def like(tensor: torch.Tensor, result: Result) -> "Pending":
        """One of the form of ``tensor``."""
        made: Pending = torch.Tensor._make_wrapper_subclass(
            Pending, tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=True
        )
        made.result = result
        with torch._C.DisableTorchFunctionSubclass():
            # A node that takes it for a leaf would lose the gradient.
            made.register_hook(_refuse_use)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OF_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*with_values(args), **with_values(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _refuse_use()


def _refuse_use(*_: object) -> NoReturn:
    raise UnsupportedModelError(
        "expected hidden states between two layers to be used by functions of torch, found a "
        "torch.autograd.Function or an extension that takes them. Use "
        "poros.prepare(model, cuda_graphs=False)"
    )


def with_values(value: Any) -> Any:
    """``value`` with what waiting calls give in the place of each ``Pending``."""
    return tree_map_only(Pending, lambda each: each.result.take(), value)
