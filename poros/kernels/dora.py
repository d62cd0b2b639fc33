"""What DoRA makes of a linear module: one autograd node, and nothing of the size of the weight.

For a frozen weight W, matrices A and B, a scaling s and a magnitude m (Liu et al. 2024, DoRA,
equations 5 and 11)

    y = W x + bias + (g - 1) * W x' + g * s * B(A x')        g = m / |W + s B A|, row by row

where x' is x after dropout; without dropout both products are one. PEFT forms B A, its sum with W
and, under dropout, a second dense product in the dtype of the adapters, in each forward. Here the
norm comes from its terms (``poros.kernels.row_norm``), everything takes the one dense weight that
is there for W x, and the sum is one kernel (``poros.kernels.compose``). As in PEFT the norm is a
constant for the gradient (section 4.3 of the paper).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.kernels.autocast import autocast_dtype
from poros.kernels.compose import compose, compose_backward
from poros.kernels.forwards import has_hooks, has_own_forward
from poros.kernels.lora import ActiveLora, drop, dropout_of
from poros.kernels.nodes import saved_tensors, times
from poros.kernels.product import Product, frozen_of
from poros.kernels.row_norm import divisor_of, row_norm, square_of_rows
from poros.kernels.swiglu import input_from, sources_of


class SquaresOfRows:
    """The sums of squares of one module's rows: the part of DoRA's norm that no adapter changes.

    They are computed at each use. Only where the bytes of the weight cannot change, because they
    are copied from a host store that refuses edits, is what was computed once kept. Neither its
    address nor its version would tell: edits through ``.data``, and of a 4-bit weight's scales,
    leave both as they were.

    Args:
        is_constant: Whether the bytes of the weight cannot change.
    """

    def __init__(self, is_constant: bool) -> None:
        self._is_constant = is_constant
        # Never replaced, since recordings read them where they lie.
        self._kept: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, dense: torch.Tensor, may_keep: bool) -> torch.Tensor:
        """Those of ``dense``, float32, of shape (rows,).

        Args:
            dense: The weight, of shape (rows, columns).
            may_keep: Whether the result may be kept; in a recording it lies in shared memory.
        """
        if not self._is_constant:
            return square_of_rows(dense)
        form = dense.dtype, dense.device
        found = self._kept.get(form)
        if found is None:
            found = square_of_rows(dense)
            if may_keep:
                self._kept[form] = found
        return found


def squares_num_bytes(model: nn.Module) -> int:
    """Bytes that ``SquaresOfRows`` of all modules of ``model`` with DoRA keep on the device."""
    vectors = [
        vector
        for module in model.modules()
        for vector in (module._modules.get("lora_magnitude_vector") or nn.ModuleDict()).children()
    ]
    float32 = torch.float32.itemsize
    return sum(float32 * own.numel() for vector in vectors for own in vector.parameters())


class Dora(NamedTuple):
    """How one module does it."""

    scaling: float
    dropout: float
    """Probability; 0 where there is none, or outside of training."""
    dtype: torch.dtype
    """Of the input as dropout sees it."""
    of_products: torch.dtype
    """Of those with A and B."""
    of_base: torch.dtype
    """Of those with the frozen weight."""
    of_sum: torch.dtype


class _Dora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        magnitude: torch.Tensor,
        frozen: Product,
        how: Dora,
        squares: SquaresOfRows,
        may_keep: bool,
    ) -> torch.Tensor:
        dense = frozen.dense(frozen.dtype)
        norm = row_norm(dense, squares.of(dense, may_keep), a, b, how.scaling)
        divisor = divisor_of(norm, frozen.dtype)
        g = magnitude.to(divisor.dtype) / divisor
        dense = dense.to(how.of_base)
        result = times(input.to(how.of_base), dense, _cast(frozen.bias, how.of_base))
        dropped, mask = dropout_of(input.to(how.dtype), how.dropout)
        base = None if mask is None else times(dropped.to(how.of_base), dense)
        del dense
        hidden = times(dropped.to(how.of_products), a.to(how.of_products))
        del dropped
        lora = times(hidden, b.to(how.of_products))
        sum_, inner = compose(
            result.to(how.of_sum),
            None if base is None else base.to(how.of_sum),
            lora,
            g,
            how.scaling,
            frozen.bias,
            ctx.needs_input_grad[3],
        )
        kept = (frozen.weight, b, a, hidden, mask, g, divisor, inner)
        ctx.save_for_backward(*kept, *sources_of(input))
        ctx.how, ctx.frozen = how, frozen._replace(weight=None)
        ctx.magnitude_dtype = magnitude.dtype
        ctx.input_form = input.shape, input.dtype
        ctx.set_materialize_grads(False)
        return sum_

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 8
        with torch._C.DisableTorchFunctionSubclass():
            return (*_backward(ctx, gradient), None, None, None, None)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of input, B, A and the magnitude."""
    weight, b, a, hidden, mask, g, divisor, inner, *sources = saved_tensors(ctx)
    how: Dora = ctx.how
    shape, dtype = ctx.input_form
    wants_input, wants_b, wants_a, wants_magnitude, *_ = ctx.needs_input_grad
    of_input = of_b = of_a = of_magnitude = None
    of_base, of_lora, of_g = compose_backward(
        gradient,
        g,
        how.scaling,
        inner if wants_magnitude else None,
        has_base=mask is not None,
        result_dtype=how.of_base,
        lora_dtype=how.of_products,
    )
    if of_g is not None:
        of_magnitude = (of_g / divisor).to(ctx.magnitude_dtype)
    of_lora, of_base = _rows(of_lora), _rows(of_base)
    if wants_b:
        of_b = of_lora.t().mm(_rows(hidden)).to(b.dtype)
    if wants_a or wants_input:
        of_hidden = of_lora.mm(b.to(how.of_products))
        del of_lora
        if wants_a:
            input = input_from(sources)
            dropped = drop(input, mask, how.dropout, how.dtype, how.of_products)
            del input
            of_a = of_hidden.t().mm(_rows(dropped)).to(a.dtype)
            del dropped
    if wants_input:
        dense = ctx.frozen._replace(weight=weight).dense(how.of_base)
        of_dropped = of_hidden.mm(a.to(how.of_products))
        of_dropped = of_dropped.to(torch.promote_types(how.of_products, how.of_base))
        of_dropped += of_base.mm(dense)
        of_dropped = of_dropped.view(shape)
        if mask is None:
            of_input = of_dropped.to(dtype)
        else:
            of_input = drop(of_dropped, mask, how.dropout, how.dtype, dtype, is_gradient=True)
            of_result = _rows(gradient.to(how.of_base)).mm(dense)
            of_input = of_input + of_result.view(shape).to(dtype)
    return of_input, of_b, of_a, of_magnitude


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def run_dora(
    module: Any,
    input: torch.Tensor,
    lora: ActiveLora,
    is_4bit: bool,
    squares: SquaresOfRows,
    may_keep: bool,
) -> torch.Tensor | None:
    """The result of an adapted linear module of PEFT; None if that is of another kind.

    Args:
        module: PEFT's ``lora.Linear``, or its ``Linear4bit`` if it ``is_4bit``.
        input: Of shape (..., columns), contiguous, not empty. Gets a gradient, as the adapter does.
        lora: With a magnitude.
        squares: Of the module; kept if ``may_keep``.

    Returns:
        Of shape (..., rows), in the dtype that PEFT's module gives.

    Streams:
        Queued on the current stream. Draws the random numbers that dropout draws. Kept for backward
        are ``input``, A, B, the product with A, the mask of dropout, the norms, and if the
        magnitude is trained one tensor of the shape and dtype of the result. Of an input that is a
        gated activation (``poros.kernels.swiglu``) gate and up are kept, and it is made again.

    Exactness:
        Equal bits for equal inputs, resident or streamed. Not the bits of PEFT's modules: within
        rounding of them, and with adapters in bfloat16 closer to exact arithmetic where g is close
        to 1. With adapters in other dtypes that is not shown.
    """
    base = module._modules["base_layer"]
    frozen = frozen_of(base)
    autocast = autocast_dtype(input.device)
    of_result = input.dtype if is_4bit else autocast or input.dtype
    of_base = autocast or (base.compute_dtype if is_4bit else None) or input.dtype
    if frozen is None or (frozen.state is None and frozen.dtype != of_base and not autocast):
        return None
    casts = getattr(module, "cast_input_dtype_enabled", True)
    # As PEFT has it: under autocast its 4-bit modules leave the sum in the magnitude's dtype.
    stays = is_4bit and torch.is_autocast_enabled("cuda")
    magnitude: Any = lora.magnitude
    how = Dora(
        scaling=lora.scaling,
        dropout=lora.dropout,
        dtype=lora.a.dtype if casts and not stays else input.dtype,
        of_products=autocast or lora.a.dtype,
        of_base=of_base,
        of_sum=torch.promote_types(of_result, magnitude.dtype) if stays else of_result,
    )
    given = (input, lora.b, lora.a, magnitude, frozen, how, squares, may_keep)
    # Neither a 4-bit weight nor an adapter that is watched has to pass through Python.
    with torch._C.DisableTorchFunctionSubclass():
        sum_: torch.Tensor = _Dora.apply(*given)
    return sum_


def magnitude_of(module: Any, name: str, variant: Any) -> Any:
    """The magnitude of a DoRA adapter of PEFT's linear modules; None if it is something else."""
    kind, vector_kind = dora_classes()
    vectors = module._modules.get("lora_magnitude_vector")
    vector = None if vectors is None else vectors._modules.get(name)
    if (
        type(variant) is not kind
        or type(vector) is not vector_kind
        or not (has_own_forward(kind) and has_own_forward(vector_kind))
        or vector.fan_in_fan_out
        or getattr(module, "fan_in_fan_out", False)
        or has_hooks(vector)
    ):
        return None
    return vector._parameters.get("weight")


@cache
def dora_classes() -> tuple[type, type[nn.Module]]:
    """PEFT's variant of LoRA that is DoRA over a linear module, and what holds its magnitude."""
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.lora.variants import DoraLinearVariant

    return DoraLinearVariant, DoraLinearLayer
