"""Feed-forward modules of models that compute their gated activation by one operator of ours.

Recognised are classes whose own forward compiles to the same bytecode as one of ``_FORMS`` below,
by whatever names: those of Llama, Mistral, Qwen, Gemma, OLMo and others are of the first two forms,
those of Phi-3 and GLM of the third. All parts are called as modules, as before.
"""

from collections.abc import Callable, Iterable
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import GELUTanh, SiLUActivation

from poros.kernels.adapters import KernelStats, adapter_forward, projection_of
from poros.kernels.autocast import autocast_dtype
from poros.kernels.forwards import PatchedForward, has_own_forward, replace
from poros.kernels.grouped import gated_layer
from poros.kernels.hooks import has_hooks
from poros.kernels.sharing import sharing_within
from poros.kernels.swiglu import forget_parts, swiglu

_ACTIVATIONS = (nn.SiLU, SiLUActivation, nn.GELU, GELUTanh, nn.ReLU)
"""Functions of their argument alone."""


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


class _Forward(PatchedForward):
    def __init__(self, module: nn.Module, tally: KernelStats) -> None:
        super().__init__(module)
        self._tally = tally
        names = names_in(type(module).forward)
        if names is None:
            raise TypeError(f"expected a gated feed-forward, found {type(module).__name__}")
        self._names = names

    @property
    def is_exact(self) -> bool:
        return not self._tally.is_grouped

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._tally)

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
        if self._tally.is_grouped and names.up is not None:
            first, second = parts[names.gate], parts[names.up]
            whole = self._run_whole(first, second, down, input, activation)
            if whole is not None:
                return whole
            with sharing_within(self._tally, [first, second]):
                return self._run_parts(parts, input)
        return self._run_parts(parts, input)

    def _run_whole(
        self, gate: nn.Module, up: nn.Module, down: nn.Module, input: torch.Tensor, activation: Any
    ) -> torch.Tensor | None:
        """All of it by one operator; None if it cannot, or if somebody hooks into a part."""
        modules, tally, autocast = (gate, up, down), self._tally, autocast_dtype(input.device)
        owner = adapter_forward(down)
        if not (adapter_forward(gate) and adapter_forward(up) and owner):
            return None
        # What multiplies in another dtype than it is given is cast by its module.
        if input.dtype != (autocast or input.dtype) or has_hooks(*modules, but_ours=True):
            return None
        first, second = projection_of(gate, input), projection_of(up, input)
        if first is None or second is None or first.dtype != second.dtype:
            return None
        forms = {
            (each.product.num_rows, each.result_dtype(input.dtype)) for each in (first, second)
        }
        if len(forms) > 1:
            return None
        ((columns, dtype),) = forms
        # Like what comes to ``down``; its memory is there for the first of the results.
        like = input.new_empty((*input.shape[:-1], columns), dtype=dtype)
        last = projection_of(down, like)
        del like
        if last is None:
            return None
        leaves_out = tally.leaves_out(owner)
        result = gated_layer(first, second, last, input, activation, owner, leaves_out)
        tally.num_fused += 3
        tally.num_grouped += 3
        if leaves_out:
            tally.note(owner, result)
        return result

    def _run_parts(self, parts: Any, input: Any) -> Any:
        """Each part as the module that it is."""
        names = self._names
        activation, down = parts[names.activation], parts[names.down]
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
            product = swiglu(gate, up, activation)
            try:
                return down(product)
            finally:
                forget_parts(product)
        return down(activation(gate) * up)


def patch(modules: Iterable[nn.Module], tally: KernelStats) -> None:
    """Have feed-forward modules take our operator; with grouped adapters one for all of them.

    Modules of other forms, and those whose forward somebody has set, are left alone.
    ``poros.kernels.forwards.unpatch`` undoes it.
    """

    def forward_of(module: nn.Module) -> PatchedForward | None:
        if type(module).__module__.startswith(("torch.", "peft.")):
            return None
        return None if names_in(type(module).forward) is None else _Forward(module, tally)

    replace(modules, forward_of)


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
