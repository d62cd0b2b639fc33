"""Whether a model is as it was each time its code runs: its layers, and what is around them.

Micro-batches that go together run a loss's code several times, and the layers at other times than
that code calls them. So nothing that decides what a layer or the code computes may change from one
micro-batch to the next, nor while the code runs.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from poros.errors import RematerializationError, UnsupportedModelError

_TABLES = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Entries of a module's ``__dict__`` that are looked at otherwise, or set by trainers each step."""
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
                each
                for each in chain.from_iterable(map(dict.values, filter(None, self._tables)))
                if each is not None and each.requires_grad
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
        for each in now:
            each.requires_grad_(id(each) in wanted)
        for each in parameters:
            each.requires_grad_(True)
        return set(map(id, now)) != wanted

    def _children_now(self) -> list[int]:
        tables = filter(None, self._child_tables)
        return list(map(id, chain.from_iterable(map(dict.values, tables))))


class Around:
    """The modules of a model that are in none of its layers: buffers and attributes.

    Args:
        modules: Of the model.
        inside: Those of its layers.
    """

    def __init__(self, modules: Iterable[nn.Module], inside: Iterable[nn.Module]) -> None:
        left_out = set(map(id, inside))
        self._held = [
            (module, _attributes(module), dict(module._buffers))
            for module in modules
            if id(module) not in left_out
        ]
        buffers = {
            id(buffer): buffer
            for _, _, own in self._held
            for buffer in own.values()
            if buffer is not None
        }
        self._buffers = [
            (buffer, buffer._version, buffer.clone() if buffer.nbytes < _SMALL_NUM_BYTES else None)
            for buffer in buffers.values()
        ]

    def is_same(self) -> bool:
        """Whether all is as it was."""
        return all(
            _same(attributes, _attributes(module)) and _same(buffers, module._buffers)
            for module, attributes, buffers in self._held
        ) and all(buffer._version == version for buffer, version, _ in self._buffers)

    def put_back(self) -> None:
        """Have buffers and numbers as they were.

        Other attributes stay: a note that something was registered has to stay with it.

        Raises:
            UnsupportedModelError: If a large buffer was edited in place.
        """
        for module, attributes, buffers in self._held:
            module.__dict__.update(
                {key: value for key, value in attributes.items() if type(value) in (int, float)}
            )
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


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if key not in _TABLES}


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        value is right[key] or (type(value) in (bool, int, float, str) and value == right[key])
        for key, value in left.items()
    )


class Gradients:
    """The gradients of parameters at one time, to see which have changed, and to undo that."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._held = [
            (each, each.grad, None if each.grad is None else each.grad._version)
            for each in parameters
        ]

    def changed(self) -> list[nn.Parameter]:
        """Parameters with other gradients than then."""
        return [
            each
            for each, before, version in self._held
            if each.grad is not before or (before is not None and before._version != version)
        ]

    def undo(self) -> bool:
        """Have the gradients as they were, if that can be: where there were none."""
        changed = {id(each) for each in self.changed()}
        if any(before is not None for each, before, _ in self._held if id(each) in changed):
            return False
        for each, _, _ in self._held:
            if id(each) in changed:
                each.grad = None
        return True

    def spoil(self) -> None:
        """Have whoever uses gradients get an error."""
        for each, _, _ in self._held:
            if each.grad is not None:
                each.grad = Spoilt(each)


class Spoilt(torch.Tensor):
    """In the place of a gradient that some micro-batches are part of, and others are not.

    Args:
        parameter: Whose gradient it was.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> "Spoilt":
        made: Spoilt = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "Spoilt()"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RematerializationError(
            "expected gradients of whole micro-batches, found some whose backward was interrupted, "
            "or ended with an error: layers have those of all micro-batches of a group, or of "
            "none. Call optimizer.zero_grad(set_to_none=True), and compute the step again"
        )

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]
