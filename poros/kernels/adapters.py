"""LoRA modules of PEFT that add what they add by one operator of ours.

The adapters are read from PEFT's modules at each call, so activating, disabling, merging, scaling
and deleting them stays PEFT's business. Whatever the operator does not know runs as PEFT has it,
module by module and call by call; both give the same bits.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.kernels.autocast import cached_cast
from poros.kernels.forwards import Forward, replace
from poros.kernels.lora import Added, add_lora

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Tally:
    """How often adapted modules ran which way.

    Attributes:
        num_fused: Calls that took the operator.
        unfused: Calls that ran as PEFT has them, by reason.
    """

    def __init__(self) -> None:
        self.num_fused = 0
        self.unfused: Counter[str] = Counter()


class _Lora(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    scaling: float
    dropout: float


class _Forward(Forward):
    """``forward`` of PEFT's ``lora.Linear`` and ``lora.Linear4bit``."""

    def __init__(self, module: nn.Module, tally: Tally, is_4bit: bool) -> None:
        super().__init__(module)
        self._tally = tally
        self._is_4bit = is_4bit

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._tally, self._is_4bit)

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = self._module()
        lora = "arguments besides the input" if args or kwargs else _lora_of(module, input)
        if not isinstance(lora, _Lora):
            if lora:
                self._tally.unfused[lora] += 1
            own: torch.Tensor = self._own(module, input, *args, **kwargs)
            return own
        self._tally.num_fused += 1
        result = module.base_layer(input)
        # Of a 4-bit module PEFT leaves dtypes to autocast, and asks for that of a GPU wherever the
        # module runs.
        rounds = self._is_4bit and not torch.is_autocast_enabled("cuda")
        casts = (rounds or not self._is_4bit) and getattr(module, "cast_input_dtype_enabled", True)
        dtype = lora.a.dtype if casts else input.dtype
        how = Added(lora.scaling, lora.dropout, dtype, rounds, not self._is_4bit)
        a, b, bias = lora[:3]
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            a, b = _as_autocast(a, dtype), _as_autocast(b, dtype)
            bias = None if bias is None else _as_autocast(bias, dtype)
        return add_lora(result, input, a, b, bias, how)


def take_over(modules: Iterable[nn.Module], tally: Tally) -> None:
    """Have PEFT's LoRA modules run by our operator, where it knows what they do.

    Modules of other classes, and those whose forward somebody has set, are left alone.
    ``poros.kernels.forwards.hand_back`` undoes it.
    """
    from peft.tuners.lora import Linear, Linear4bit

    def forward_of(module: nn.Module) -> Forward | None:
        if type(module) in (Linear, Linear4bit):
            return _Forward(module, tally, is_4bit=type(module) is Linear4bit)
        return None

    replace(modules, forward_of)


def _lora_of(module: Any, input: torch.Tensor) -> _Lora | str:
    """What ``module`` adds to the result of its linear module.

    Returns:
        Or why the operator cannot; nothing said if nothing is added.
    """
    if torch.compiler.is_compiling():
        return "compiled"
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or not active:
        return ""
    if len(active) > 1:
        return "several active adapters"
    (name,) = active
    if name in module.lora_variant:
        return type(module.lora_variant[name]).__name__
    first, second, dropout = _parts(module, name)
    if (
        (type(first), type(second)) != (nn.Linear, nn.Linear)
        or type(dropout) not in (nn.Dropout, nn.Identity)
        or any("forward" in part.__dict__ for part in (first, second, dropout))
    ):
        return "modules of other classes in the adapter"
    if has_hooks((first, second, dropout)):
        return "hooks in the adapter"
    lora = _Lora(
        first.weight,
        second.weight,
        second.bias,
        module.scaling[name],
        dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0,
    )
    if first.bias is not None or lora.dropout >= 1 or getattr(dropout, "inplace", False):
        return "a bias in A, or dropout of all, or in place"
    matrices = [each for each in lora[:3] if each is not None]
    if any(hasattr(type(each), "is_watched") for each in matrices):
        return ""  # each use of a parameter is looked at, this once
    if len({each.dtype for each in matrices}) > 1:
        return "matrices of several dtypes"
    for tensor in (input, *matrices):
        if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.is_floating_point():
            return f"a {type(tensor).__name__} of {tensor.dtype}"
        if tensor.device != input.device:
            return "tensors on several devices"
    if input.dim() < 2 or not input.is_contiguous() or input.numel() == 0:
        return "an input that is empty, or not contiguous"
    if input.is_leaf and input.requires_grad and torch.is_autocast_enabled(input.device.type):
        # Autocast's cast of it would be shared with the other modules that get it.
        return "an input that is a leaf, under autocast"
    return lora


def _parts(module: Any, name: str) -> list[Any]:
    return [module.lora_A[name], module.lora_B[name], module.lora_dropout[name]]


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether anybody is told of calls of any of these modules."""
    if any(getattr(nn.modules.module, f"_global{kind}") for kind in _HOOKS):
        return True
    return any(getattr(module, kind) for module in modules for kind in _HOOKS)


def _as_autocast(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What autocast makes of ``parameter``, through its cache if that is on."""
    if parameter.dtype == dtype or parameter.dtype == torch.float64:
        return parameter
    cast = cached_cast(parameter) if torch.is_autocast_cache_enabled() else None
    return parameter.to(dtype) if cast is None else cast.view(parameter.shape)
