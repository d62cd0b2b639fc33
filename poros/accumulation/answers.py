"""What a model asks the device before its layers, kept for when its code runs again.

The code of a micro-batch runs more than once. A question to the device, such as whether rows are
packed, which transformers asks before it makes a mask, makes the host wait for all that is queued:
for the layers of all micro-batches, when the code runs again. The answer is known by then if the
question is the same; whether it is, is compared on the device, and raised with the rest of what is
compared (``MicroBatch.differs``). Tokens whose embeddings are in host memory are kept likewise: the
host has to see them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from poros.accumulation.calls import NotGrouped
from poros.head.host_matrix import HostMatrix

_SCALARS = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.item,
    }
)


class _Question(NamedTuple):
    """One that was asked, and its answer."""

    function: Any
    asked: torch.Tensor
    """The scalar, or tokens; a copy: code may edit what it has asked about."""
    answer: Any
    """The number, or the tokens on the host."""


class Answers(TorchFunctionMode):
    """Notes what is asked between ``begin`` and ``end``, and answers what was asked before.

    Attributes:
        differs: Whether a question was another one than before: bools on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.differs: list[torch.Tensor] = []
        self._known: list[_Question] = []
        self._number = 0
        """Of the next question among those that are known; negative if none is answered."""
        self._is_on = False

    def prepare(self, answers: bool) -> None:
        """The code of the micro-batch runs; ``answers``: whether questions are answered."""
        self._number, self.differs = (0 if answers else -1), []
        if not answers:
            self._known = []

    def begin(self) -> None:
        """From now on: the model is called."""
        if not self._is_on:
            self._is_on = True
            self.__enter__()

    def end(self) -> None:
        """No more.

        Raises:
            NotGrouped: If somebody else watches operators since.
        """
        if not self._is_on:
            return
        if _get_current_function_mode() is not self:
            raise NotGrouped("somebody watches operators or packs saved tensors within the loss")
        self._is_on = False
        self.__exit__(None, None, None)

    def forget(self) -> None:
        """The code does not run again."""
        self._known = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SCALARS:
            return self._ask(func, args[0], func)
        if func is functional.embedding and len(args) > 1 and isinstance(args[1], HostMatrix):
            tokens = self._ask(func, args[0], torch.Tensor.cpu)
            return func(tokens, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _ask(self, function: Any, asked: torch.Tensor, ask: Callable[[torch.Tensor], Any]) -> Any:
        known = self._known[self._number] if 0 <= self._number < len(self._known) else None
        if known is None or not _is_like(known, function, asked):
            answer = ask(asked)
            if self._number < 0:
                copy = asked.detach().clone()
                self._known.append(
                    _Question(function, copy, answer if answer is not asked else copy)
                )
            else:
                self._number = len(self._known)  # it goes another way
            return answer
        self._number += 1
        self.differs.append((bytes_of(asked) != bytes_of(known.asked)).any())
        return known.answer


def _is_like(known: _Question, function: Any, asked: torch.Tensor) -> bool:
    """Whether it is the same question, but for the values of ``asked``."""
    return known.function is function and (
        (known.asked.shape, known.asked.dtype, known.asked.device)
        == (asked.shape, asked.dtype, asked.device)
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, one after the other: a NaN equals itself in them."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
