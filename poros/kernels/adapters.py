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

from poros.kernels.autocast import autocast_dtype, cached_cast
from poros.kernels.forwards import Forward, has_own_forward, replace
from poros.kernels.hooks import has_hooks
from poros.kernels.lora import Added, add_lora, add_lora_ref, multiply_and_add
from poros.kernels.product import product_of
from poros.kernels.unformed import Unformed, forget

_CONTAINERS = ("lora_A", "lora_B", "lora_dropout")


class Tally:
    """How often adapted modules ran which way.

    Attributes:
        num_fused: Calls that took the operator.
        unfused: Calls that ran as PEFT has them, by reason.
        num_left_out: Calls in recomputations whose result nobody needed.
    """

    def __init__(self) -> None:
        self.num_fused = 0
        self.unfused: Counter[str] = Counter()
        self.num_left_out = 0
        self._left_out: list[tuple[_Forward, Unformed]] | None = None

    def begin(self) -> None:
        """A recomputation whose result is there already: what only adds to it may be left out."""
        self._left_out = []

    def end(self) -> None:
        """It is over: what was left out can no longer be computed."""
        left_out, self._left_out = self._left_out, None
        forget([tensor for _, tensor in left_out or ()])

    def settle(self) -> None:
        """The recomputation has run. What it has read after all is not left out again."""
        for forward, tensor in self._left_out or ():
            forward.is_read |= tensor.is_formed
            self.num_left_out += not tensor.is_formed

    def leaves_out(self, forward: "_Forward") -> bool:
        """Whether the result of that module need not be computed now."""
        return self._left_out is not None and forward.is_last and not forward.is_read

    def note(self, forward: "_Forward", result: torch.Tensor) -> None:
        """``result`` of that module is without values."""
        if self._left_out is not None and isinstance(result, Unformed):
            self._left_out.append((forward, result))


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
        self.is_last = False
        """Whether its result goes into that of the layer by sums alone."""
        self.is_read = False
        """Whether it was read all the same."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._tally, self._is_4bit)

    def run(self, module: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        lora: _Lora | str = "arguments besides the input"
        if torch.compiler.is_compiling():
            lora = "compiled"
        elif not args and not kwargs:
            lora = _lora_of(module, input)
        if not isinstance(lora, _Lora):
            if lora:
                self._tally.unfused[lora] += 1
            own: torch.Tensor = self.own(module, input, *args, **kwargs)
            return own
        a, b, bias = lora[:3]
        # Of a 4-bit module PEFT leaves dtypes to autocast, and asks for that of a GPU wherever the
        # module runs.
        rounds = self._is_4bit and not torch.is_autocast_enabled("cuda")
        casts = (rounds or not self._is_4bit) and getattr(module, "cast_input_dtype_enabled", True)
        seen = a.dtype if casts else input.dtype
        dtype = autocast_dtype(input.device)
        if dtype is None and seen != a.dtype:
            return self.own(module, input)  # which says what is wrong
        how = Added(lora.scaling, lora.dropout, seen, rounds, not self._is_4bit)
        self._tally.num_fused += 1
        base = module._modules["base_layer"]
        leaves_out = self._tally.leaves_out(self)
        product = product_of(base, input, leaves_out)
        result: Any = base(input) if product is None else None
        if dtype is not None:
            # In the order in which autocast makes them for linear: that of their gradients.
            a = _as_autocast(a, dtype)
            bias = None if bias is None else _as_autocast(bias, dtype)
            b = _as_autocast(b, dtype)
        if product is not None:
            sum_ = multiply_and_add(product, input, a, b, bias, how, self, leaves_out)
        elif type(result) is torch.Tensor or type(result) is Unformed:
            sum_ = add_lora(result, input, a, b, bias, how, self)
        else:
            return add_lora_ref(result, input, a, b, bias, how)
        if leaves_out:
            self._tally.note(self, sum_)
        return sum_


def note_last(results: Iterable[torch.Tensor]) -> None:
    """Note which adapted modules only add to the result of a layer.

    Args:
        results: What the layer gave, with its graph.
    """
    nodes = [result.grad_fn for result in results]
    while nodes:
        node: Any = nodes.pop()
        if node is None:
            continue
        if node.name() == "AddBackward0":
            nodes += [follower for follower, _ in node.next_functions]
        else:
            owner = getattr(node, "owner", None)
            if isinstance(owner, _Forward):
                owner.is_last = True


def take_over(modules: Iterable[nn.Module], tally: Tally) -> None:
    """Have PEFT's LoRA modules run by our operator, where it knows what they do.

    Modules of other classes, and those whose forward somebody has set, are left alone.
    ``poros.kernels.forwards.hand_back`` undoes it.
    """
    from peft.tuners.lora import Linear, Linear4bit

    def forward_of(module: nn.Module) -> Forward | None:
        if type(module) in (Linear, Linear4bit) and has_own_forward(type(module)):
            return _Forward(module, tally, is_4bit=type(module) is Linear4bit)
        return None

    replace(modules, forward_of)


def _lora_of(module: Any, input: torch.Tensor) -> _Lora | str:
    """What ``module`` adds to the result of its linear module.

    Returns:
        Or why the operator cannot; nothing said if nothing is added.
    """
    # At each call of each projection: looked up in dictionaries, since modules take a call for it.
    parts = module._modules
    all_a, all_b, all_dropout = (parts[key]._modules for key in _CONTAINERS)
    active = [name for name in module.active_adapters if name in all_a]
    if module.disable_adapters or module.merged or not active:
        return ""
    if len(active) > 1:
        return "several active adapters"
    (name,) = active
    if name in module.lora_variant:
        return type(module.lora_variant[name]).__name__
    first, second, dropout = all_a[name], all_b[name], all_dropout[name]
    if not (
        type(first) is nn.Linear
        and type(second) is nn.Linear
        and (type(dropout) is nn.Identity or type(dropout) is nn.Dropout)
        and has_own_forward(nn.Linear)
        and has_own_forward(type(dropout))
    ):
        return "modules of other classes in the adapter"
    if has_hooks(first, second, dropout):
        return "hooks in the adapter"
    if has_hooks(parts["base_layer"], but_ours=True):
        return "hooks on the linear module"  # which may give anything
    p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    if first._parameters.get("bias") is not None or p >= 1 or getattr(dropout, "inplace", False):
        return "a bias in A, or dropout of all, or in place"
    a: Any = first._parameters.get("weight")
    b: Any = second._parameters.get("weight")
    bias: Any = second._parameters.get("bias")
    for tensor in (input, a, b) if bias is None else (input, a, b, bias):
        if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
            # That may be because each use of a parameter is looked at, this once.
            return "" if hasattr(tensor, "is_watched") else f"a {type(tensor).__name__}"
        if tensor.device != input.device or not tensor.dtype.is_floating_point:
            return "tensors on several devices, or not of floats"
        if not tensor.is_contiguous():
            return "tensors that are not contiguous"  # other products would be taken
    if a.dtype != b.dtype or (bias is not None and bias.dtype != b.dtype):
        return "matrices of several dtypes"
    if input.dim() < 2 or input.numel() == 0:
        return "an empty input"
    scaling = module.scaling[name]
    if not isinstance(scaling, int | float):
        return "a scaling that is no number"
    if autocast_dtype(input.device) is not None:
        if torch.is_autocast_cache_enabled() and not torch.is_grad_enabled():
            return ""  # autocast keeps its casts for whoever comes next in its region
        if input.is_leaf and input.requires_grad:
            # Its cast would be shared with the other modules that get it.
            return "an input that is a leaf, under autocast"
    return _Lora(a, b, bias, scaling, p)


def _as_autocast(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What autocast makes of ``parameter``, through its cache if that is on."""
    if parameter.dtype == dtype or parameter.dtype == torch.float64:
        return parameter
    cast = cached_cast(parameter) if torch.is_autocast_cache_enabled() else None
    return parameter.to(dtype) if cast is None else cast.view(parameter.shape)
