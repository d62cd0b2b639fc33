"""A layer's own forward, compiled, as long as a resident run's would certainly be compiled too.

Dynamo compiles a function anew for each form of its arguments, up to a limit (eight, by default);
from then on it runs uncompiled, silently, and gives other bits. A streamed layer and a resident one
are different functions to it and meet that limit at different points. So the forms are few enough
for both to stay below it: training at any length, or training and evaluation at one length.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from poros.errors import UnsupportedModelError


class CompiledForward:
    """Compiles what ``nn.Module.compile`` would compile of a resident layer.

    Args:
        layer: A streamed layer.
        name: Its qualified name.
        options: Those of ``torch.compile``.

    Raises:
        UnsupportedModelError: If the layer has dropout.
    """

    def __init__(
        self, layer: nn.Module, name: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        _refuse_dropout(layer, name)
        base: Any = type(layer).__mro__[2]
        self._name = name
        self._run = torch.compile(base.forward, *args, **options)
        self._lengths: set[object] = set()
        self._forms: set[object] = set()
        self._grad_modes: set[bool] = set()

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            UnsupportedModelError: If the compiler is at its limit.
        """
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            try:
                return self._run(layer, *args, **kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                raise self._error("the compiler's recompile limit") from error

    def require_few_forms(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ``UnsupportedModelError`` if a resident run might be at the compiler's limit."""
        values = [*tree_leaves(args), *tree_leaves([kwargs[key] for key in sorted(kwargs)])]
        self._lengths.add(tuple(map(_exact, values)))
        self._forms.add(tuple(map(_abstract, values)))
        self._grad_modes.add(torch.is_grad_enabled())
        if len(self._forms) > 1:
            raise self._error(
                "calls of different forms (with and without a mask or a cache, or of one row)"
            )
        if len(self._grad_modes) > 1 and len(self._lengths) > 1:
            raise self._error("training and evaluation at different lengths")

    def _error(self, obstacle: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._name}: expected few forms of calls in a compiled layer (training at any "
            "length, or training and evaluation at one length, use_cache=False), found "
            f"{obstacle}. The compiler gives up at other points in a resident run, so the result "
            "would not be exact. Pad to one length, evaluate after poros.restore(model), or train "
            "without compiling"
        )


def _refuse_dropout(layer: nn.Module, name: str) -> None:
    for inner, module in layer.named_modules():
        rates = (getattr(module, key, 0.0) for key in ("p", "attention_dropout"))
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise UnsupportedModelError(
                f"{name}: expected no dropout in a compiled layer, found it in {inner!r}. "
                "The compiler generates other masks here than in a resident run, so the result "
                "would not be exact; train without dropout, or without compiling"
            )


def _exact(value: Any) -> object:
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)


def _abstract(value: Any) -> object:
    """Sizes are what the compiler can leave open, apart from none and one."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(min(size, 2) for size in value.shape)
    return type(value)
