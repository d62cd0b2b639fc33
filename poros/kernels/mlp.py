"""Feed-forward modules of models that compute their gated activation by one operator of ours.

Recognised are classes whose own forward is, as written, of the form

    self.down(self.activation(self.gate(x)) * self.up(x))

as in Llama, Mistral, Qwen, Gemma, OLMo and others, or, as in Phi-3 and GLM,

    both = self.gate_up(x)
    gate, up = both.chunk(2, dim=-1)
    self.down(up * self.activation(gate))

All parts are called as modules, as before.
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

from poros.kernels.forwards import Forward, has_own_forward, replace
from poros.kernels.gated import forget_parts, gated
from poros.kernels.hooks import has_hooks

_ACTIVATIONS = (nn.SiLU, SiLUActivation, nn.GELU, GELUTanh, nn.ReLU)
"""Functions of their argument alone."""

_FORMS = [
    re.compile(
        r"return self\.(?P<down>\w+)\(self\.(?P<activation>\w+)\(self\.(?P<gate>\w+)\("
        r"(?P<input>\w+)\)\) \* self\.(?P<up>\w+)\((?P=input)\)\)"
    ),
    re.compile(
        r"(?P<both>\w+) = self\.(?P<gate>\w+)\((?P<input>\w+)\)\n"
        r"(?P<first>\w+), (?P<second>\w+) = (?P=both)\.chunk\(2, dim=-1\)\n"
        r"(?P<product>\w+) = (?P=second) \* self\.(?P<activation>\w+)\((?P=first)\)\n"
        r"return self\.(?P<down>\w+)\((?P=product)\)"
    ),
]


class Names(NamedTuple):
    """Under which names a module holds its parts."""

    down: str
    activation: str
    gate: str
    up: str | None
    """None if one projection gives both."""


class _Forward(Forward):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        names = names_in(type(module).forward)
        if names is None:
            raise TypeError(f"expected a gated feed-forward, found {type(module).__name__}")
        self._names = names

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        parts, names = module._modules, self._names
        activation, down = parts.get(names.activation), parts.get(names.down)
        if (
            len(args) != 1
            or kwargs
            or torch.compiler.is_compiling()
            or type(activation) not in _ACTIVATIONS
            or not has_own_forward(type(activation))
            or getattr(activation, "inplace", False)
            or down is None
            # Nobody else is to see the product: it may be made again.
            or has_hooks(activation, down, down._modules.get("base_layer", down), but_ours=True)
            or not (names.gate in parts and (names.up is None or names.up in parts))
        ):
            return self.own(module, *args, **kwargs)
        (input,) = args
        gate = parts[names.gate](input)
        if names.up is None:
            is_plain = type(gate) is torch.Tensor and gate.is_contiguous()
            gate, up = gate.chunk(2, dim=-1)
        else:
            up = parts[names.up](input)
            is_plain = (
                type(gate) is torch.Tensor
                and type(up) is torch.Tensor
                and gate.is_contiguous()
                and up.is_contiguous()
            )
        if is_plain and gate.shape == up.shape and gate.dtype == up.dtype:
            product = gated(gate, up, activation)
            try:
                return down(product)
            finally:
                forget_parts(product)
        return down(activation(gate) * up)


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
def names_in(forward: Callable[..., Any]) -> Names | None:
    """The parts of a module that has this forward; None if it is not a gated feed-forward."""
    if not inspect.isfunction(forward) or forward.__qualname__ != forward.__code__.co_qualname:
        return None  # something wrapped around another function, which has taken its names
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != 2:
        return None
    if function.decorator_list:
        return None
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    match statements:
        case [ast.Assign([ast.Name(first)], value), ast.Return(ast.Name(second))]:
            if first == second:
                statements = [ast.Return(value)]
    written = "\n".join(map(ast.unparse, statements))
    for form in _FORMS:
        found = form.fullmatch(written)
        if found is not None and function.args.args[1].arg == found["input"]:
            parts = found.groupdict()
            # One name for both of the halves would be the second alone.
            if parts.get("first") is None or parts["first"] != parts["second"]:
                return Names(parts["down"], parts["activation"], parts["gate"], parts.get("up"))
    return None
