"""Whether a model is as it was each time its code runs: its layers, and what is around them.

Micro-batches that go together run a loss's code several times, and the layers at other times than
that code calls them. So nothing that decides what a layer or the code computes may change from one
micro-batch to the next, nor while the code runs.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from poros.accumulation.names import Names, attributes, of_code
from poros.errors import UnsupportedModelError
from poros.stream.layer_index import values_of

_SMALL_NUM_BYTES = 2**20
"""Of buffers that are copied, to be put back."""


class Modules:
    """All modules of a model, and its trained parameters, looked up at little cost each time.

    Args:
        model: Held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._all: list[nn.Module] = []
        self._children: list[int] = []
        self._tables: list[dict[str, Any]] = []
        self._child_tables: list[dict[str, Any]] = []

    def are_of(self, model: nn.Module) -> bool:
        """Whether they are those of ``model``."""
        return self._model() is model

    def now(self) -> list[nn.Module]:
        """Each of them once."""
        model = self._model()
        if model is not None and (not self._all or self._children != self._children_now()):
            self._all = list(model.modules())
            self._child_tables = [module._modules for module in self._all]
            self._tables = [module._parameters for module in self._all]
            self._children = self._children_now()
        return self._all

    def trained(self) -> list[nn.Parameter]:
        """Each place of each, as of the modules that ``now`` has found."""
        # Of bitsandbytes' weights each look at an attribute would be a call of Python.
        with torch._C.DisableTorchFunctionSubclass():
            return [
                each for each in values_of(self._tables) if each is not None and each.requires_grad
            ]

    def have_shared(self) -> bool:
        """Whether a trained parameter is in several places, or in a module that is."""
        trained = list(map(id, self.trained()))
        if len(set(trained)) < len(trained):
            return True
        shared = {child for child, number in Counter(self._children).items() if number > 1}
        return any(
            id(parameter) in trained
            for module in self._all
            if id(module) in shared
            for parameter in module.parameters()
        )

    def mark(self, parameters: Sequence[nn.Parameter]) -> object:
        """Equal ones mean: the same modules, and none of the parameters was edited."""
        return self._children_now(), [each._version for each in parameters]

    def train_again(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Have these trained and no others; whether others were."""
        now, wanted = self.trained(), set(map(id, parameters))
        if set(map(id, now)) == wanted:
            return False
        for each in now:
            each.requires_grad_(id(each) in wanted)
        for each in parameters:
            each.requires_grad_(True)
        return True

    def _children_now(self) -> list[int]:
        return list(map(id, values_of(self._child_tables)))


class Around:
    """What code of the user may change outside the layers: buffers, attributes, names of its own.

    Args:
        modules: Of the model.
        inside: Those of its layers.
        code: See ``of_code``.
    """

    def __init__(
        self, modules: Iterable[nn.Module], inside: Iterable[nn.Module], code: Iterable[Any]
    ) -> None:
        left_out = set(map(id, inside))
        self._outside = [module for module in modules if id(module) not in left_out]
        self._names = Names(map(attributes, self._outside))
        self._own = Names(of_code(code))
        self._take_buffers()

    def _take_buffers(self) -> None:
        self._held = [(module, dict(module._buffers)) for module in self._outside]
        found = {id(each): each for _, own in self._held for each in own.values()}
        self._buffers = [
            (each, each._version, each.clone() if each.nbytes < _SMALL_NUM_BYTES else None)
            for each in found.values()
            if each is not None
        ]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the body binds."""
        with self._names.noting(), self._own.noting():
            yield

    def is_same(self) -> bool:
        """Whether the model is as it was; names of the code's own may be bound anew."""
        return self._names.are_same and self._are_buffers_same()

    def _are_buffers_same(self) -> bool:
        return all(_same(own, module._buffers) for module, own in self._held) and all(
            each._version == version for each, version, _ in self._buffers
        )

    def keep(self) -> None:
        """Have what there is now as that to begin from."""
        self._names.keep()
        self._own.keep()
        if not self._are_buffers_same():
            self._take_buffers()

    def put_back(self) -> None:
        """Have buffers and plain values as they were; see ``Names``.

        Raises:
            UnsupportedModelError: If a large buffer was edited in place.
        """
        self._names.put_back()
        self._own.put_back()
        for module, buffers in self._held:
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, version, copy in self._buffers:
                if buffer._version == version:
                    continue
                if copy is None:
                    raise UnsupportedModelError(
                        "expected a model whose forward leaves its buffers alone, found one of "
                        f"shape {tuple(buffer.shape)} edited in place. Call backward for each "
                        "micro-batch, without poros.accumulate or block-major trainers"
                    )
                buffer.copy_(copy)


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(value is right[key] for key, value in left.items())
