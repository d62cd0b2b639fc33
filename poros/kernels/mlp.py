"""SwiGLU feed-forward modules of models, which compute their activation by one operator of ours.

All their parts are called as modules, as before.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import PatchedForward, has_hooks, has_own_forward, replace
from poros.kernels.gated_forms import Names, names_in
from poros.kernels.grouped import share_inputs, sharing_within
from poros.kernels.swiglu import forget_sources, swiglu


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
