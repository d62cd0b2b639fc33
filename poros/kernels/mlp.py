"""Feed-forward modules of models that compute their gated activation by one operator of ours.

``poros.kernels.gated_forms`` recognises them. All parts are called as modules, as before.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUTanh, SiLUActivation

from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import PatchedForward, has_hooks, has_own_forward
from poros.kernels.gated_forms import names_in
from poros.kernels.grouped import share_inputs, sharing_within
from poros.kernels.patching import replace
from poros.kernels.swiglu import forget_parts, swiglu

_ACTIVATIONS = (nn.SiLU, SiLUActivation, nn.GELU, GELUTanh, nn.ReLU)
"""Functions of their argument alone."""


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
        if names.up is None:
            both = parts[names.gate](input)
            is_plain = type(both) is torch.Tensor and both.is_contiguous()
            gate, up = both.chunk(2, dim=-1)
        else:
            first, second = parts[names.gate], parts[names.up]
            if self._tally.is_grouped:
                with sharing_within(self._tally, [first, second]):
                    gate, up = first(input), second(input)
            else:
                gate, up = first(input), second(input)
            is_plain = (
                type(gate) is type(up) is torch.Tensor
                and gate.is_contiguous()
                and up.is_contiguous()
            )
        if not is_plain or gate.shape != up.shape or gate.dtype != up.dtype:
            return down(activation(gate) * up)
        product = swiglu(gate, up, activation)
        try:
            return down(product)
        finally:
            forget_parts(product)


def patch(modules: Iterable[nn.Module], tally: KernelStats) -> None:
    """Have feed-forward modules take our operator; with grouped adapters gate and up are one.

    Modules of other forms are left alone, and so are those whose forward somebody has set; where it
    is Liger's, gate and up are one all the same.
    ``poros.kernels.patching.unpatch`` undoes it.
    """

    def forward_of(module: nn.Module) -> PatchedForward | None:
        if type(module).__module__.startswith(("torch.", "peft.")):
            return None
        return None if names_in(type(module).forward) is None else _Forward(module, tally)

    def names_of(module: nn.Module) -> list[str]:
        names = names_in(type(module).forward)
        return [] if names is None or names.up is None else [names.gate, names.up]

    modules = list(modules)
    replace(modules, forward_of)
    if tally.is_grouped:
        share_inputs(modules, tally, names_of)
