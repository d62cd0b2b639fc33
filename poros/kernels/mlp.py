"""SwiGLU feed-forward modules of models, which compute their activation by one operator of ours.

All their parts are called as modules, as before. Gated feed-forward modules are recognised by what
their forward does: those are classes whose own forward compiles to the same bytecode as one of
``_FORMS`` below, by whatever names: those of Llama, Mistral, Qwen, Gemma, OLMo and others are of
the first two forms, those of Phi-3 and GLM of the third.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import SiLUActivation

from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import PatchedForward, has_hooks, has_own_forward, replace
from poros.kernels.grouped import share_inputs, sharing_within
from poros.kernels.swiglu import forget_sources, swiglu


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


class _Forward(PatchedForward):
    def __init__(self, module: nn.Module, tally: KernelStats, names: Names) -> None:
        super().__init__(module, tally, names)
        self._tally, self._names = tally, names

    @property
    def is_exact(self) -> bool:
        return not self._tally.is_grouped

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        parts, names = module._modules, self._names
        activation, down = parts.get(names.activation), parts.get(names.down)
        if (
            len(args) != 1
            or kwargs
            or not _is_silu(activation)
            or not has_own_forward(type(activation))
            or down is None
            # Nobody else is to see the product: it may be made again.
            or has_hooks(activation, down, down._modules.get("base_layer", down), but_ours=True)
            or not (names.gate in parts and (names.up is None or names.up in parts))
        ):
            return self.own(module, *args, **kwargs)
        (input,) = args
        if names.up is None:
            both = parts[names.gate](input)
            given = [both]
            gate, up = both.chunk(2, dim=-1)
        else:
            first, second = parts[names.gate], parts[names.up]
            tally, pair = self._tally, [first, second]
            with sharing_within(tally, pair) if tally.is_grouped else nullcontext():
                gate, up = given = [first(input), second(input)]
        is_plain = all(type(each) is torch.Tensor and each.is_contiguous() for each in given)
        if not is_plain or gate.shape != up.shape or gate.dtype != up.dtype:
            return down(activation(gate) * up)
        product = swiglu(gate, up)
        try:
            return down(product)
        finally:
            forget_sources(product)


def _is_silu(activation: Any) -> bool:
    is_known = type(activation) in (nn.SiLU, SiLUActivation)
    return is_known and not getattr(activation, "inplace", False)


def patch(modules: Iterable[nn.Module], tally: KernelStats) -> None:
    """Have SwiGLU modules take our operator; with grouped adapters gate and up are one.

    Modules of other forms are left alone, and so are those whose forward somebody has set. Where
    that is Liger's, or the activation is another one, gate and up are one all the same.
    ``poros.kernels.forwards.unpatch`` undoes it.
    """

    def forward_of(module: nn.Module) -> PatchedForward | None:
        names = names_in(type(module).forward)
        is_ours = names is not None and _is_silu(module._modules.get(names.activation))
        return _Forward(module, tally, names) if names is not None and is_ours else None

    def names_of(module: nn.Module) -> list[str]:
        names = names_in(type(module).forward)
        return [] if names is None or names.up is None else [names.gate, names.up]

    modules = list(modules)
    replace(modules, forward_of)
    if tally.is_grouped:
        share_inputs(modules, tally, names_of)
