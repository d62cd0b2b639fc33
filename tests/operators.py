"""What operators are given and make while tests run something."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Calls ``note(operator, arguments, result)`` behind each operator of the body."""

    def __init__(self, note: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, result)
        return result


def made_by(run: Callable[[], object], *known: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that operators make as ``run`` is called, all alive until the end.

    Views, and other tensors in the memory of ``known`` ones, are left out.
    """
    there = {each.untyped_storage().data_ptr() for each in known}
    found: list[torch.Tensor] = []

    def note(func: Any, args: Any, result: Any) -> None:
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if not func.is_view:
            found.extend(each for each in made if each.untyped_storage().data_ptr() not in there)

    with Operators(note):
        run()
    return found
