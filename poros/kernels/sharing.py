"""Modules that are given the same input: the first that is called computes for all of them.

Which they are is said around them: an attention module opens a call in which q, k and v may share.
In it the first computes the results of those behind it too (``poros.kernels.grouped``). Each of
these takes its own if it is called within that call, with that very tensor, which nobody has
written to since, with the same adapter, and with gradients and autocast as they were. Otherwise it
computes for itself, as modules with hooks do: what those do to a tensor may not be counted. What
nobody has taken is gone when the call ends, however it ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from poros.kernels.autocast import autocast_dtype
from poros.kernels.forwards import PatchedForward, has_hooks

_NAMES = ("q_proj", "k_proj", "v_proj")
"""Of what shares an input in an attention module, in the order of the calls."""

Waiting = Mapping[nn.Module, tuple[tuple[Any, ...], torch.Tensor]]
"""By module, what it adds to its linear module, and its result."""


class Shared:
    """Modules that may share an input, and results that wait to be taken.

    Args:
        modules: In the order of their calls.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._input: torch.Tensor | None = None
        self._state: object = None
        self._waiting: dict[nn.Module, tuple[tuple[Any, ...], torch.Tensor]] = {}

    def behind(self, module: nn.Module) -> Sequence[nn.Module]:
        """Those that are called after ``module`` and may take results; none if it may not give."""
        known = self._modules
        if module not in known or has_hooks(module, but_ours=True):
            return ()
        following = known[known.index(module) + 1 :]
        return [each for each in following if not has_hooks(each, but_ours=True)]

    def take(
        self, module: nn.Module, input: torch.Tensor, added: tuple[Any, ...]
    ) -> torch.Tensor | None:
        """The result of ``module`` if it waits and is that of a call with this input now.

        Args:
            module: Its result waits no longer.
            input: As the module was given it.
            added: What it adds, as ``keep`` was told it: tensors and numbers.
        """
        found = self._waiting.pop(module, None)
        if found is None or input is not self._input or _state_of(input) != self._state:
            return None
        pairs = zip(found[0], added, strict=True)
        is_same = all(a is b or (isinstance(a, int | float) and a == b) for a, b in pairs)
        return found[1] if is_same else None

    def keep(self, input: torch.Tensor, waiting: Waiting) -> None:
        """Have the results for ``input`` wait."""
        self._input, self._state, self._waiting = input, _state_of(input), dict(waiting)


class Sharer(Protocol):
    """Who knows which modules share in the call that runs."""

    shared: Shared | None


@contextmanager
def sharing_within(sharer: Sharer, modules: Sequence[nn.Module]) -> Iterator[None]:
    """These may share an input in the body, in this order."""
    before, sharer.shared = sharer.shared, Shared(modules)
    try:
        yield
    finally:
        sharer.shared = before


def sharing(module: nn.Module) -> list[nn.Module]:
    """The projections in an attention module that may share its input, in order."""
    found = [module._modules.get(name) for name in _NAMES]
    return [each for each in found if each is not None]


class SharingForward(PatchedForward):
    """``forward`` of an attention module whose projections share their input."""

    def __init__(self, module: nn.Module, sharer: Sharer) -> None:
        super().__init__(module)
        self._sharer = sharer

    @property
    def is_exact(self) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._sharer)

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        with sharing_within(self._sharer, sharing(module)):
            return self.own(module, *args, **kwargs)


def _state_of(input: torch.Tensor) -> tuple[object, ...]:
    """What a result depends on, besides the tensor and what is added."""
    version = 0 if input.is_inference() else input._version
    return version, torch.is_grad_enabled(), autocast_dtype(input.device)
