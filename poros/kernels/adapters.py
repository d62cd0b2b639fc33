"""LoRA and DoRA modules of PEFT that run by one operator of ours.

The adapters are read from PEFT's modules at each call, so activating, disabling, merging, scaling
and deleting them stays PEFT's business. Whatever the operators do not know runs as PEFT has it,
module by module and call by call. LoRA gives the same bits either way; DoRA does not.

Grouped adapters give other bits too; ``poros.kernels.grouped`` says how projections share inputs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from poros.kernels.autocast import autocast_dtype, cached_cast
from poros.kernels.dora import SquaresOfRows, magnitude_of, run_dora
from poros.kernels.forwards import PatchedForward, has_hooks, has_own_forward, replace
from poros.kernels.grouped import ATTENTION, Projection, Shared, project, share_inputs
from poros.kernels.lazy_tensor import LazyTensor, forget
from poros.kernels.lora import ActiveLora, Added, Call, add_lora
from poros.kernels.paths import PEFT, LoraShape, cheapest, merges, multiply_in_order
from poros.kernels.product import Product, product_of

_CONTAINERS = ("lora_A", "lora_B", "lora_dropout")


class KernelStats:
    """How adapted modules run, and how often they ran which way.

    Args:
        kernels: ``adapter_kernels`` as in ``StreamingPolicy``, but not ``"peft"``.
        lora_paths: Likewise.
        is_constant: Whether the bytes of frozen weights cannot change: they come from a host store.

    Attributes:
        is_exact: Whether only operators with the bits of PEFT's modules may run.
        is_grouped: Whether LoRA of projections that share an input runs by one operator.
        has_own_casts: Whether LoRA has operators with other bits than PEFT's, which also cast
            adapters.
        num_fused: Calls that took an operator of ours.
        num_grouped: Of these, calls that took the one of several projections, or its form for one.
        unfused: Calls that ran as PEFT has them, by reason.
        orders: Calls by shape and order of products, or by why that could only be PEFT's; none
            in PEFT's order or grouped.
        num_left_out: Calls in recomputations whose result nobody needed.
        left_out: What the recomputation that runs has left out; None if it may leave out nothing.
        is_recording: Whether what runs is recorded, to be replayed: then it keeps nothing.
        casts: Keeps casts of adapters meanwhile; None if each call makes its own.
        shared: The projections that may share an input in the call that runs; None outside of one.
    """

    def __init__(
        self, kernels: str = "fused", lora_paths: str = PEFT, is_constant: bool = False
    ) -> None:
        self.is_constant = is_constant
        self.kernels, self.lora_paths = kernels, lora_paths
        self.is_exact, self.is_grouped = kernels == "exact", kernels == "grouped"
        self.has_own_casts = self.is_grouped or lora_paths != PEFT
        self.shared: Shared | None = None
        self.num_fused = 0
        self.num_grouped = 0
        self.unfused: Counter[str] = Counter()
        self.orders: Counter[tuple[LoraShape | str, str]] = Counter()
        self.num_left_out = 0
        self.is_recording = False
        self.casts: Any = None
        self.left_out: list[LazyTensor] | None = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within it, what runs is not counted."""
        counts = self.num_fused, self.num_grouped, self.num_left_out
        tables = Counter(self.unfused), Counter(self.orders)
        try:
            yield
        finally:
            self.num_fused, self.num_grouped, self.num_left_out = counts
            self.unfused, self.orders = tables

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, what runs is recorded and not counted."""
        self.is_recording = True
        try:
            with self.uncounted():
                yield
        finally:
            self.is_recording = False

    @contextmanager
    def casting(self, casts: Any) -> Iterator[None]:
        """Within it, ``casts`` keeps those of adapters."""
        self.casts = casts
        try:
            yield
        finally:
            self.casts = None

    def counts(self) -> dict[str, Any]:
        """Count which way adapted modules ran, as in ``Runtime.stats``.

        ``lora_paths`` has ``chosen`` (calls of each order, such as ``f2:b5``), ``shapes`` (the
        order of each) and ``as_peft`` (calls that PEFT's order alone is defined for, by reason).
        """
        shapes = {what: order for what, order in self.orders if isinstance(what, LoraShape)}
        chosen: Counter[str] = Counter()
        for shape, order in shapes.items():
            chosen[order] += self.orders[shape, order]
        reasons = {
            what: self.orders[what, order] for what, order in self.orders if what not in shapes
        }
        return {
            "num_fused_adapters": self.num_fused,
            "num_grouped_adapters": self.num_grouped,
            "num_unfused_adapters": sum(self.unfused.values()),
            "num_left_out_adapters": self.num_left_out,
            "lora_paths": {
                "chosen": dict(chosen),
                "shapes": {str(shape): order for shape, order in shapes.items()},
                "as_peft": reasons,
            },
        }

    def leaves_out(self, forward: "_Forward") -> bool:
        """Whether the result of that module need not be computed now."""
        return self.left_out is not None and forward.is_last

    def as_peft(self, reason: str) -> None:
        """A call takes PEFT's order of products, whatever was wanted."""
        if self.lora_paths != PEFT:
            self.orders[reason, PEFT] += 1

    def note(self, result: torch.Tensor) -> None:
        """``result`` of a module may be without values."""
        if self.left_out is not None and isinstance(result, LazyTensor):
            self.left_out.append(result)


@contextmanager
def recomputing(tally: KernelStats | None, leaves_out: bool = True) -> Iterator[None]:
    """A layer is recomputed in the body.

    Results that were left out release their inputs at the end.

    Args:
        tally: Of the layer's model; None if its adapters run as PEFT has them.
        leaves_out: Whether the layer's result is there already, so that what only adds to it may be
            left out.
    """
    if tally is None:
        yield
        return
    left_out: list[LazyTensor] = []
    tally.left_out = left_out if leaves_out else None
    try:
        yield
        tally.num_left_out += sum(not tensor.is_formed for tensor in left_out)
    finally:
        tally.left_out = None
        forget(left_out)


class _Forward(PatchedForward):
    """``forward`` of PEFT's ``lora.Linear`` and ``lora.Linear4bit``."""

    def __init__(self, module: nn.Module, tally: KernelStats, is_4bit: bool) -> None:
        super().__init__(module, tally, is_4bit)
        self._tally = tally
        self._is_4bit = is_4bit
        self.is_last = False
        """Whether its result goes into that of the layer by sums alone."""
        self._squares = SquaresOfRows(tally.is_constant)

    @property
    def is_exact(self) -> bool:
        """Whether it gives the bits of the module's own forward: not with DoRA, or other orders."""
        module = self._module()
        return not self._tally.has_own_casts and (
            self._tally.is_exact
            or not any(name in module.lora_variant for name in module.active_adapters)
        )

    def run(self, module: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        lora: ActiveLora | str = "arguments besides the input"
        if not args and not kwargs:
            lora = _lora_of(module, input, self._tally)
        if not isinstance(lora, ActiveLora):
            self._note_unfused(lora)
            own: torch.Tensor = self.own(module, input, *args, **kwargs)
            return own
        if lora.magnitude is not None:
            return self._run_dora(module, input, lora)
        a, b = lora.a, lora.b
        # Of a 4-bit module PEFT leaves dtypes to autocast, and asks for that of a GPU wherever the
        # module runs.
        rounds = self._is_4bit and not torch.is_autocast_enabled("cuda")
        casts = (rounds or not self._is_4bit) and getattr(module, "cast_input_dtype_enabled", True)
        seen = a.dtype if casts else input.dtype
        dtype = autocast_dtype(input.device)
        if dtype is None and seen != a.dtype:
            return self.own(module, input)  # which says what is wrong
        if self._tally.is_grouped:
            found = self._run_grouped(module, input, lora, dtype)
            if found is not None:
                return found
        how = Added(lora.scaling, lora.dropout, seen, rounds, not self._is_4bit)
        base = module._modules["base_layer"]
        leaves_out = self._tally.leaves_out(self)
        product, order = self._in_order(base, input, lora, dtype)
        if order == PEFT:
            why = _why_own(input, lora.a) if self._tally.has_own_casts else None
            if why is not None:
                self._note_unfused(why)
                return self.own(module, input)
            product = product_of(base, input)
        self._tally.num_fused += 1
        result: Any = base(input) if product is None else None
        if dtype is not None:
            # In the order in which autocast makes them for linear: that of their gradients.
            a = _as_autocast(a, dtype)
            b = _as_autocast(b, dtype)
        call = Call(how, product, self, leaves_out and product is not None)
        if order == PEFT:
            sum_ = add_lora(result, input, a, b, call)
        else:
            sum_ = multiply_in_order(order, input.to(dtype or input.dtype), a, b, call)
        if leaves_out:
            self._tally.note(sum_)
        return sum_

    def _run_grouped(
        self, module: Any, input: torch.Tensor, lora: ActiveLora, autocast: torch.dtype | None
    ) -> torch.Tensor | None:
        """The result, together with those of modules that share the input; None if it cannot."""
        shared, tally = self._tally.shared, self._tally
        found = None if shared is None else shared.take(module, input, lora)
        if found is None:
            given = input if autocast is None else input.to(autocast)
            own = _projection_of(module, given, lora)
            if own is None:
                return None
            group: list[Projection] = [own]
            others: list[tuple[nn.Module, ActiveLora]] = []
            for other in () if shared is None else shared.behind(module):
                is_ours = isinstance(other.__dict__.get("forward"), _Forward)
                theirs = _lora_of(other, input, tally) if is_ours else ""
                if not isinstance(theirs, ActiveLora):
                    continue
                one = _projection_of(other, given, theirs)
                if one is not None:
                    group.append(one)
                    others.append((other, theirs))
            leaves_out = not others and tally.leaves_out(self)
            owner = None if others else self
            found, *rest = project(group, given, owner, leaves_out, tally.casts)
            if shared is not None and others:
                pairs = zip(others, rest, strict=True)
                shared.keep(input, {each: (theirs, result) for (each, theirs), result in pairs})
            if leaves_out:
                tally.note(found)
        tally.num_fused += 1
        tally.num_grouped += 1
        # As PEFT has it, and bitsandbytes.
        return found.to(input.dtype) if self._is_4bit else found

    def _note_unfused(self, reason: str) -> None:
        if reason:
            self._tally.unfused[reason] += 1
            self._tally.as_peft(reason)

    def _in_order(
        self, base: nn.Module, input: torch.Tensor, lora: ActiveLora, autocast: torch.dtype | None
    ) -> tuple[Product | None, str]:
        """The order of the products, and if it is not PEFT's, that of the linear module."""
        wanted = self._tally.lora_paths
        if wanted == PEFT:
            return None, PEFT
        # No bits of the module itself are promised here, so each product will do.
        product = product_of(base, input, dtype=autocast)
        if product is None:
            self._tally.as_peft("a linear module, or an input, whose product is not known")
        elif lora.dropout and merges(wanted):
            self._tally.as_peft("dropout, for which f2, b4 and b5 are not defined")
        else:
            shape = LoraShape(
                input.numel() // lora.a.shape[1],
                lora.a.shape[1],
                product.num_rows,
                lora.a.shape[0],
                autocast or input.dtype,
                autocast or lora.a.dtype,
                lora.dropout > 0,
                product.state is not None,
                torch.backends.cuda.matmul.fp32_precision == "tf32",
            )
            order = cheapest(shape) if wanted == "flops" else wanted
            self._tally.orders[shape, order] += 1
            return product, order
        return None, PEFT

    def _run_dora(self, module: Any, input: torch.Tensor, lora: ActiveLora) -> torch.Tensor:
        may_keep = not self._tally.is_recording
        found = run_dora(module, input, lora, self._is_4bit, self._squares, may_keep)
        if found is None:
            self._tally.unfused["DoRA over another kind of linear module"] += 1
            own: torch.Tensor = self.own(module, input)
            return own
        self._tally.num_fused += 1
        self._tally.as_peft("DoRA")
        return found


def _projection_of(module: Any, input: torch.Tensor, lora: ActiveLora) -> Projection | None:
    """What a module with a ``_Forward`` computes in a group; None: see "Which" in ``grouped``.

    ``input`` is in the dtype of autocast, if that is on.
    """
    if lora.magnitude is not None or lora.dropout:
        return None
    autocast = autocast_dtype(input.device)
    # Autocast leaves float64 as it is.
    if (lora.a.dtype != input.dtype) if autocast is None else (lora.a.dtype == torch.float64):
        return None
    product = product_of(module._modules["base_layer"], input, dtype=autocast)
    return None if product is None else Projection(product, lora.a, lora.b, lora.scaling)


def note_last(results: Iterable[torch.Tensor]) -> None:
    """Note which adapted modules only add to the ``results`` of a layer, which have its graph."""
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


def patch(modules: Iterable[nn.Module], tally: KernelStats) -> None:
    """Have PEFT's LoRA modules run by our operator, where it knows what they do.

    Modules of other classes, and those whose forward somebody has set, are left alone.
    ``poros.kernels.forwards.unpatch`` undoes it.
    """
    from peft.tuners.lora import Linear4bit

    def forward_of(module: nn.Module) -> PatchedForward | None:
        if _is_known(module):
            return _Forward(module, tally, is_4bit=type(module) is Linear4bit)
        return None

    def names_of(module: nn.Module) -> list[str]:
        parts = module._modules
        return [name for name in ATTENTION if name in parts and _is_known(parts[name])]

    modules = list(modules)
    replace(modules, forward_of)
    if tally.is_grouped:
        share_inputs(modules, tally, names_of)


def tally_of(model: nn.Module) -> KernelStats | None:
    """Where calls of adapters in ``model`` are counted; None if none runs an operator of ours."""
    found = (module.__dict__.get("forward") for module in model.modules())
    return next((each._tally for each in found if isinstance(each, _Forward)), None)


def _is_known(module: nn.Module | None) -> bool:
    """Whether ``module`` is a LoRA module of PEFT that may run by our operators."""
    from peft.tuners.lora import Linear, Linear4bit

    return type(module) in (Linear, Linear4bit) and has_own_forward(type(module))


def _lora_of(module: Any, input: torch.Tensor, tally: KernelStats) -> ActiveLora | str:
    """What ``module`` adds to the result of its linear module.

    Returns:
        Or why the operator cannot; nothing said if nothing is added.
    """
    # At each call of each projection: looked up in dictionaries, since modules take a call for it.
    parts = module._modules
    all_a, all_b, all_dropout = (parts[key]._modules for key in _CONTAINERS)
    if module.disable_adapters or module.merged:
        return ""
    active = [name for name in module.active_adapters if name in all_a]
    if not active:
        return ""
    if len(active) > 1:
        return "several active adapters"
    (name,) = active
    variant, magnitude = module.lora_variant.get(name), None
    if variant is not None:
        magnitude = None if tally.is_exact else magnitude_of(module, name, variant)
        if magnitude is None:
            return type(variant).__name__
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
    p: Any = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    if not isinstance(p, int | float | np.number):
        return "a rate of dropout that is no number"
    of_first, of_second = first._parameters, second._parameters
    if of_first.get("bias") is not None or of_second.get("bias") is not None:
        return "a bias in the adapter"
    if p >= 1 or getattr(dropout, "inplace", False):
        return "dropout of all, or in place"
    a: Any = of_first.get("weight")
    b: Any = of_second.get("weight")
    # These operators cast by themselves: there casts may be watched, or kept.
    has_own_casts = magnitude is not None or tally.has_own_casts
    for tensor in (input, a, b) if magnitude is None else (input, a, b, magnitude):
        kind = type(tensor)
        if (
            kind is not torch.Tensor
            and kind is not nn.Parameter
            and not getattr(kind, "is_plain", False)
            and not (has_own_casts and hasattr(tensor, "is_watched"))
        ):
            # That may be because each use of a parameter is looked at, this once.
            return "" if hasattr(tensor, "is_watched") else f"a {type(tensor).__name__}"
        if tensor.device != input.device or not tensor.dtype.is_floating_point:
            return "tensors on several devices, or not of floats"
        if not tensor.is_contiguous():
            return "tensors that are not contiguous"  # other products would be taken
    if a.dtype != b.dtype:
        return "matrices of several dtypes"
    if input.dim() < 2 or input.numel() == 0:
        return "an empty input"
    scaling = module.scaling[name]
    if not isinstance(scaling, int | float):
        return "a scaling that is no number"
    why = None if has_own_casts else _why_own(input, a)
    return ActiveLora(a, b, scaling, float(p), magnitude) if why is None else why


def _why_own(input: torch.Tensor, a: torch.Tensor) -> str | None:
    """Why PEFT's own module has to make its casts itself, as ``_lora_of``; None if it need not."""
    if hasattr(a, "is_watched"):
        return ""
    if autocast_dtype(input.device) is not None:
        if torch.is_autocast_cache_enabled() and not torch.is_grad_enabled():
            return ""  # autocast keeps its casts for whoever comes next in its region
        if input.is_leaf and input.requires_grad:
            # Its cast would be shared with the other modules that get it.
            return "an input that is a leaf, under autocast"
    return None


def _as_autocast(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What autocast makes of ``parameter``, through its cache if that is on."""
    if parameter.dtype == dtype or parameter.dtype == torch.float64:
        return parameter
    keeps = torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
    cast = cached_cast(parameter) if keeps else None
    return parameter.to(dtype) if cast is None else cast.view(parameter.shape)
