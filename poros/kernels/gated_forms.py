"""Recognises gated feed-forward modules by what their forward does.

Those are classes whose own forward compiles to the same bytecode as one of ``_FORMS`` below, by
whatever names: those of Llama, Mistral, Qwen, Gemma, OLMo and others are of the first two forms,
those of Phi-3 and GLM of the third.
"""

from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Names(NamedTuple):
    """Under which names a module holds its parts."""

    down: str
    activation: str
    gate: str
    up: str | None
    """None if one projection gives both."""


def _direct(self: Any, input: Any) -> Any:
    return self.down(self.activation(self.gate(input)) * self.up(input))


def _named(self: Any, input: Any) -> Any:
    result = self.down(self.activation(self.gate(input)) * self.up(input))
    return result


def _in_one(self: Any, input: Any) -> Any:
    up = self.gate_up(input)
    gate, up = up.chunk(2, dim=-1)
    up = up * self.activation(gate)
    return self.down(up)


_FORMS = (_direct, _named, _in_one)


@cache
def names_in(forward: Callable[..., Any]) -> Names | None:
    """The parts of a module that has this forward; None if it is not a gated feed-forward."""
    if not isinstance(forward, FunctionType) or forward.__defaults__:
        return None
    code = forward.__code__
    for form in _FORMS:
        if _shape_of(code) == _shape_of(form.__code__):
            by_role = dict(zip(form.__code__.co_names, code.co_names, strict=True))
            if by_role.get("chunk", "chunk") != "chunk":
                return None
            if form is _in_one:
                return Names(by_role["down"], by_role["activation"], by_role["gate_up"], None)
            return Names(*(by_role[part] for part in ("down", "activation", "gate", "up")))
    return None


def _shape_of(code: CodeType) -> tuple[object, ...]:
    """What it does, whatever its names are; without a text that is its docstring."""
    values = tuple(each for each in code.co_consts if each is not None and type(each) is not str)
    return code.co_code, values, code.co_argcount, code.co_flags, len(code.co_names)
