"""Adapters of projections that share an input, in few products: other bits than PEFT's.

For an input x and projections i of it, each with a frozen W_i, matrices A_i and B_i and a scaling
s_i (Hu et al. 2021, LoRA, equation 3)

    h = x [A_1; A_2; ...]^T           one product for all
    y_i' = y_i + s_i h_i B_i^T        where y_i = x W_i^T, added in place by ``addmm_``

and in backward

    dh_i = s_i dy_i B_i               columns of one matrix
    dB_i = s_i dy_i^T h_i
    [dA_1; dA_2; ...] = dh^T x        one product for all
    dx = dy_1 W_1 + dy_2 W_2 + ... + dh [A_1; A_2; ...]    each added in place

So no tensor of the size of a result is there besides the result, and nothing but products reads or
writes one. A decoder layer has a node of autograd for q, k and v, one for o, one for gate and up,
and one for down. What they keep for backward are x, h, A and B in the dtype of the products, and
of the input of down gate and up (``poros.kernels.swiglu``).

Note: Dropout
    Each projection draws a mask of its own, in PEFT's order. Then their inputs differ: the products
    with A, and their gradients, are one for each projection; the rest stays as above.

Note: Dtypes
    Under autocast A and B are cast within the node, and get their gradients in their own dtype. A
    product is added in place where it has the dtype of the base; with float32 adapters over a
    bfloat16 base and no autocast, adapters compute in float32, as PEFT's do, and are then added.

Note: Bound
    Let u be the unit roundoff of the dtype, and gamma_n = nv / (1 - nv) with v that of the dtype in
    which products sum up, float32 for 16-bit floats (Higham, Accuracy and Stability, lemma 3.1 and
    equation 3.13). For k columns and rank r, elementwise and against exact arithmetic on the same
    x, W, A and B, a result differs by no more than

        (2u + u^2) |s| |x A^T| |B|^T + u (|y| + |y'|)
            + (1 + u)^2 gamma_(k + r + 3) (|x| |W|^T + |s| |x| |A|^T |B|^T).

    The first line is rounding to the dtype: y, which the library writes before it is read again; h,
    one factor 1 + u; s h B^T, another if it is written by itself, as where ``addmm_`` cannot be
    taken; and the sum. The second line is what the inner sums lose: k terms of x W^T and of x A^T,
    r of h B^T, the scaling and the sum; absolute values, because rounding errors do not cancel as
    terms do. In float32 it is the larger part, in bfloat16 the smaller. It holds where a product is
    written once, not if the library may reduce parts of it in 16 bits
    (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``), which adds u for each.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from poros.kernels.autocast import autocast_as
from poros.kernels.lazy_tensor import LazyTensor
from poros.kernels.lora import Added, add_scaled, drop, dropout_of, sum_dtype
from poros.kernels.nodes import saved_tensors, times
from poros.kernels.product import Product
from poros.kernels.swiglu import parts_of

Optional = torch.Tensor | None


class Projection(NamedTuple):
    """A frozen linear module and the LoRA that is added to it."""

    product: Product
    a: torch.Tensor
    """Of shape (rank, columns)."""
    b: torch.Tensor
    """Of shape (rows, rank)."""
    bias: Optional
    """Of B, of shape (rows,)."""
    how: Added
    dtype: torch.dtype
    """In which A and B multiply."""


def project(
    projections: Sequence[Projection],
    input: torch.Tensor,
    owner: object = None,
    leaves_out: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The results of projections of one input, as one autograd node.

    Args:
        projections: One or more, with equal ``dtype``. A, B and biases get gradients.
        input: Of shape (..., columns), contiguous, not empty, in the dtype that the products were
            made for. Gets a gradient.
        owner: Whoever calls; the node has it as ``owner``.
        leaves_out: Whether the values of the only result are computed only if somebody reads them.

    Returns:
        For each a result of shape (..., rows), memory of its own, in the dtype of the input or, if
        ``how`` says so, of the adapters. A ``LazyTensor`` if it is left out.

    Streams:
        Queued on the current stream. Draws the random numbers that dropout draws. Of an input that
        is a gated activation (``poros.kernels.swiglu``) gate and up are kept, and it is made again.

    Exactness:
        Equal bits for equal calls. Not those of PEFT's modules: see the bound above.
    """
    group = _Group(
        [each.product for each in projections],
        [each.how for each in projections],
        [each.a.shape[0] for each in projections],
        projections[0].dtype,
        owner,
        leaves_out,
    )
    # Aliases have nodes of their own, and what was made last is differentiated first: B before A,
    # and the last projection first, as in PEFT. Without them chance would order the parameters.
    with torch._C.DisableTorchFunctionSubclass():
        matrices = [
            None if tensor is None else tensor[...]
            for each in projections
            for tensor in (each.a, each.b, each.bias)
        ]
    found: Any = _Project.apply(group, input, *matrices)
    return tuple(found)


class _Kept(NamedTuple):
    """What the backward of a group needs, besides its input."""

    hidden: torch.Tensor
    """The products with A, of shape (tokens, sum of ranks)."""
    stacked: torch.Tensor
    """All A, of shape (sum of ranks, columns), in the dtype of the products."""
    all_b: Sequence[torch.Tensor]
    """In the same dtype."""
    masks: Sequence[Optional]
    weights: Sequence[Any]
    """Of the base. If they stream, autograd alone keeps them."""

    def flat(self) -> list[Any]:
        return [self.hidden, self.stacked, *self.all_b, *self.masks, *self.weights]

    @classmethod
    def of(cls, flat: Sequence[Any], number: int) -> "_Kept":
        """Undo ``flat`` for so many projections."""
        lists = [flat[begin : begin + number] for begin in range(2, 2 + 3 * number, number)]
        return cls(flat[0], flat[1], *lists)


class _Group(NamedTuple):
    """Projections of one input, without A and B."""

    products: Sequence[Product]
    hows: Sequence[Added]
    ranks: list[int]
    dtype: torch.dtype
    """In which A and B multiply."""
    owner: object
    leaves_out: bool

    @property
    def has_dropout(self) -> bool:
        return any(how.dropout for how in self.hows)

    def columns(self, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """Those of each projection, as views."""
        return hidden.split(self.ranks, 1)

    def begin(self, input: torch.Tensor, matrices: Sequence[Any]) -> _Kept:
        """The products with A."""
        all_a = [each.detach() for each in matrices[::3]]
        all_b = [each.detach().to(self.dtype) for each in matrices[1::3]]
        stacked = (all_a[0] if len(all_a) == 1 else torch.cat(all_a)).to(self.dtype)
        masks: list[Optional] = [None] * len(all_a)
        if self.has_dropout:
            hidden = stacked.new_empty(input.numel() // input.shape[-1], len(stacked))
            parts = zip(self.columns(hidden), stacked.split(self.ranks), self.hows, strict=True)
            for place, (into, a, how) in enumerate(parts):
                dropped, masks[place] = dropout_of(input.to(how.dtype), how.dropout)
                torch.mm(_rows(dropped.to(self.dtype)), a.t(), out=into)
                del dropped
        else:
            hidden = _rows(input.to(self.dtype)).mm(stacked.t())
        return _Kept(hidden, stacked, all_b, masks, [each.weight for each in self.products])

    def results(
        self, input: torch.Tensor, kept: _Kept, matrices: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The results of all projections."""
        found = []
        for place, hidden in enumerate(self.columns(kept.hidden)):
            product, how, b = self.products[place], self.hows[place], kept.all_b[place]
            bias = matrices[3 * place + 2]
            result = product.of(input)
            if bias is None and result.dtype == hidden.dtype and result.is_contiguous():
                result.view(-1, product.num_rows).addmm_(hidden, b.t(), alpha=how.scaling)
                # Where the module's own result is a view, nobody could write to it in place.
                found.append(torch.ops.aten._unsafe_view(result, result.shape))
            else:
                added = times(hidden, b, None if bias is None else bias.to(self.dtype))
                # No view of it: the sum may take its memory, and is the result of the node.
                added = torch.ops.aten._unsafe_view(added, result.shape)
                found.append(add_scaled(result, added, how))
        return found

    def backward(
        self,
        gradients: list[Optional],
        source: Callable[[], torch.Tensor],
        kept: _Kept,
        of_input: torch.dtype | None,
        wants: Sequence[torch.dtype | None],
    ) -> tuple[Optional, list[Optional]]:
        """The gradients of the input, of shape (tokens, columns), and of A, B and bias in turn.

        Args:
            gradients: Of the results; None where there is none. Each is dropped after its last use.
            source: Gives the input.
            kept: Of the forward.
            of_input: The dtype of the gradient of the input; None if that is not wanted.
            wants: Likewise of A, B and bias of each projection in turn.
        """
        all_a, all_b, all_bias = wants[::3], wants[1::3], wants[2::3]
        of_a, of_b, of_bias = ([None] * len(gradients) for _ in range(3))
        arrives = [gradient is not None for gradient in gradients]
        of_hidden = torch.empty_like(kept.hidden)
        parts = zip(self.columns(kept.hidden), self.columns(of_hidden), strict=True)
        for place, (hidden, into) in enumerate(parts):
            gradient, b, scaling = gradients[place], kept.all_b[place], self.hows[place].scaling
            if gradient is None:
                into.zero_()
                continue
            rows = _rows(gradient.to(self.dtype))
            if all_bias[place]:
                of_bias[place] = rows.sum(0).mul_(scaling).to(all_bias[place])
            if all_b[place]:
                # With beta=0 what is there is not read.
                of_one = torch.empty_like(b).addmm_(rows.t(), hidden, beta=0, alpha=scaling)
                of_b[place] = of_one.to(all_b[place])
            into.addmm_(rows, b, beta=0, alpha=scaling)
            del gradient, rows
        if any(all_a):
            found = self._of_a(of_hidden, source(), kept, all_a)
            of_a = [each if has else None for each, has in zip(found, arrives, strict=True)]
        sum_ = self._of_input(gradients, of_hidden, kept, of_input) if of_input else None
        each = zip(of_a, of_b, of_bias, strict=True)
        return sum_, [gradient for three in each for gradient in three]

    def _of_a(
        self,
        of_hidden: torch.Tensor,
        input: torch.Tensor,
        kept: _Kept,
        wants: Sequence[torch.dtype | None],
    ) -> list[Optional]:
        """The gradients of all A that are wanted."""
        if not self.has_dropout:
            together = of_hidden.t().mm(_rows(input.to(self.dtype)))
            # Once for all; there is no dtype between that would round.
            first = next(each for each in wants if each is not None)
            parts = zip(together.to(first).split(self.ranks), wants, strict=True)
            return [None if dtype is None else part.to(dtype) for part, dtype in parts]
        found: list[Optional] = []
        for place, part in enumerate(self.columns(of_hidden)):
            dtype, how, mask = wants[place], self.hows[place], kept.masks[place]
            if dtype is None:
                found.append(None)
                continue
            dropped = drop(input, mask, how.dropout, how.dtype, self.dtype)
            found.append(part.t().mm(_rows(dropped)).to(dtype))
            del dropped
        return found

    def _of_input(
        self, gradients: list[Optional], of_hidden: torch.Tensor, kept: _Kept, dtype: torch.dtype
    ) -> Optional:
        """The gradient of the input in ``dtype``; drops those of the results one by one."""
        sum_: Optional = None
        for place, product in enumerate(self.products):
            gradient, gradients[place] = gradients[place], None
            if gradient is not None:
                rows = _rows(gradient.to(dtype))
                dense = product._replace(weight=kept.weights[place]).dense(rows.dtype)
                sum_ = rows.mm(dense) if sum_ is None else sum_.addmm_(rows, dense)
                del gradient, rows, dense  # before the next one is there
        if sum_ is None:
            return None
        if not self.has_dropout:
            if sum_.dtype == self.dtype:
                return sum_.addmm_(of_hidden, kept.stacked)
            return sum_.add_(of_hidden.mm(kept.stacked))
        all_a = kept.stacked.split(self.ranks)
        for place, part in enumerate(self.columns(of_hidden)):
            how, mask, of_one = self.hows[place], kept.masks[place], part.mm(all_a[place])
            if mask is not None:
                of_one = of_one.view(mask.shape)
            of_one = drop(of_one, mask, how.dropout, how.dtype, sum_.dtype, is_gradient=True)
            sum_.add_(of_one.view(sum_.shape))
        return sum_


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: _Group, input: torch.Tensor, *matrices: Any) -> Any:
        kept = group.begin(input, matrices)
        parts = parts_of(input)
        ctx.making = None if parts is None else parts.making
        sources = (input,) if parts is None else (parts.gate, parts.up)
        ctx.save_for_backward(*kept.flat(), *sources)
        # Weights are kept by autograd alone.
        ctx.group = group._replace(products=[each._replace(weight=None) for each in group.products])
        ctx.owner, ctx.shape, ctx.dtype = group.owner, input.shape, input.dtype
        ctx.dtypes = [None if each is None else each.dtype for each in matrices]
        ctx.set_materialize_grads(False)
        if not group.leaves_out:
            return tuple(group.results(input, kept, matrices))
        source = partial(_itself, input) if parts is None else partial(parts.making.again, *sources)
        shape = (*input.shape[:-1], group.products[0].num_rows)
        dtype = sum_dtype(input.dtype, group.dtype, group.hows[0])
        read = [*sources, kept.hidden, *kept.all_b]
        form = partial(_only_result, group, source, kept, matrices)
        return (LazyTensor(shape, dtype, input.device, form, read),)

    @staticmethod
    def backward(ctx: Any, *gradients: Optional) -> tuple[Optional, ...]:
        if all(each is None for each in gradients):
            return (None,) * (2 + 3 * len(gradients))
        *flat, last = saved_tensors(ctx)
        source = partial(_itself, last)
        if ctx.making is not None:
            source = partial(ctx.making.again, flat.pop(), last)
        kept = _Kept.of(flat, len(gradients))
        needs = zip(ctx.dtypes, ctx.needs_input_grad[2:], strict=True)
        wants = [dtype if is_needed else None for dtype, is_needed in needs]
        of_input = ctx.dtype if ctx.needs_input_grad[1] else None
        with autocast_as(None, last.device):
            found, others = ctx.group.backward(list(gradients), source, kept, of_input, wants)
        return (None, None if found is None else found.view(ctx.shape), *others)


def _only_result(
    group: _Group, source: Callable[[], torch.Tensor], kept: _Kept, matrices: Sequence[Any]
) -> torch.Tensor:
    """The result of a group of one, of the input that ``source`` gives."""
    return group.results(source(), kept, matrices)[0]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
