"""Feed-forward modules of models that compute their gated activation by one operator of ours.

Recognised are classes whose own forward is, as written, of the form

    self.down(self.activation(self.gate(x)) * self.up(x))

as in Llama, Mistral, Qwen, Gemma, OLMo and others. All parts are called as modules, as before.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import GELUTanh, SiLUActivation

from poros.kernels.forwards import Forward, replace
from poros.kernels.gated import gated
from poros.kernels.hooks import has_hooks

_ACTIVATIONS = (nn.SiLU, SiLUActivation, nn.GELU, GELUTanh, nn.ReLU)
"""Functions of their argument alone."""

_FORM = re.compile(
    r"self\.(?P<down>\w+)\(self\.(?P<activation>\w+)\(self\.(?P<gate>\w+)\((?P<input>\w+)\)\)"
    r" \* self\.(?P<up>\w+)\((?P=input)\)\)"
)


class _Names(NamedTuple):
    down: str
    activation: str
    gate: str
    up: str


class _Forward(Forward):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        names = names_in(type(module).forward)
        if names is None:
            raise TypeError(f"expected a gated feed-forward, found {type(module).__name__}")
        self._names = names

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        parts = module._modules
        activation = parts.get(self._names.activation)
        if (
            len(args) != 1
            or kwargs
            or torch.compiler.is_compiling()
            or type(activation) not in _ACTIVATIONS
            or has_hooks(activation)
            or getattr(activation, "inplace", False)
        ):
            return self.own(module, *args, **kwargs)
        (input,) = args
        gate = parts[self._names.gate](input)
        up = parts[self._names.up](input)
        if (
            type(gate) is torch.Tensor
            and type(up) is torch.Tensor
            and gate.shape == up.shape
            and gate.dtype == up.dtype
            and gate.is_contiguous()
            and up.is_contiguous()
        ):
            product = gated(gate, up, activation)
        else:
            product = activation(gate) * up
        return parts[self._names.down](product)


def take_over(modules: Iterable[nn.Module]) -> None:
    """Have feed-forward modules take our operator.

    Modules of other forms, and those whose forward somebody has set, are left alone.
    ``poros.kernels.forwards.hand_back`` undoes it.
    """

    def forward_of(module: nn.Module) -> Forward | None:
        if type(module).__module__.startswith(("torch.", "peft.")):
            return None
        return None if names_in(type(module).forward) is None else _Forward(module)

    replace(modules, forward_of)


@cache
def names_in(forward: Callable[..., Any]) -> _Names | None:
    """Under which names a module with this forward holds the parts of a gated feed-forward.

    None if it is none.
    """
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != 2:
        return None
    own = [argument.arg for argument in function.args.args]
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    match statements:
        case [ast.Return(value)]:
            pass
        case [ast.Assign([ast.Name(first)], value), ast.Return(ast.Name(second))]:
            if first != second:
                return None
        case _:
            return None
    found = _FORM.fullmatch(ast.unparse(value)) if value is not None else None
    if found is None or own != ["self", found["input"]]:
        return None
    return _Names(found["down"], found["activation"], found["gate"], found["up"])
