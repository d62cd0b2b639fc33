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

Note: Which
    Those without dropout where A and B multiply in the dtype of the base: under autocast, which
    casts them within the node (gradients have their own dtype), or where they have that dtype.
    Others run as with ``"fused"``: masks are drawn for each projection, so the inputs of products
    with A would differ, and sums in two dtypes are not made in place.

Note: Sharing
    Which modules share an input is said around them: an attention module opens a call in which q, k
    and v may share, a feed-forward one for gate and up; whether it runs its own forward or one of
    Liger's. In it the first computes the results of those behind it too. Each of these
    takes its own if it is called within that call, with that very tensor, which nobody has written
    to since, with the same adapter, and with gradients and autocast as they were. Otherwise it
    computes for itself, as modules with hooks do: what those do to a tensor may not be counted.
    What nobody has taken is gone when the call ends, however it ends.

Note: Bound
    Let u be the unit roundoff of the dtype, and gamma_n = nv / (1 - nv) with v that of the dtype in
    which products sum up, float32 for 16-bit floats (Higham, Accuracy and Stability, lemma 3.1 and
    equation 3.13). For k columns and rank r, elementwise and against exact arithmetic on the same
    x, W, A and B, a result differs by no more than

        (2u + u^2) |s| |x A^T| |B|^T + u (|y| + |y'|)
            + (1 + u)^2 gamma_(k + r + 3) (|x| |W|^T + |s| |x| |A|^T |B|^T).

    The first line is rounding to the dtype: y, which the library writes before it is read again; h;
    s h B^T, if the library writes it by itself; and the sum. The second line is what the inner sums
    lose: k terms of x W^T and of x A^T, r of h B^T, the scaling and the sum; absolute values,
    because rounding errors do not cancel as terms do. In float32 it is the larger part, in bfloat16
    the smaller. It holds where a product is written once, not if the library may reduce parts of it
    in 16 bits (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``), which adds u
    for each.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from poros.kernels.autocast import autocast_dtype, without_autocast
from poros.kernels.copies import copy_all
from poros.kernels.forwards import PatchedForward, has_hooks, is_forward_of_liger
from poros.kernels.lazy_tensor import LazyTensor
from poros.kernels.nodes import saved_tensors
from poros.kernels.product import Product
from poros.kernels.swiglu import input_from, sources_of

Optional = torch.Tensor | None

ATTENTION = ("q_proj", "k_proj", "v_proj")
"""Names of what shares an input in an attention module, in the order of the calls."""

Waiting = Mapping[nn.Module, tuple[tuple[Any, ...], torch.Tensor]]
"""By module, what it adds to its linear module, and its result."""


class Projection(NamedTuple):
    """A frozen linear module and the LoRA that is added to it."""

    product: Product
    a: torch.Tensor
    """Of shape (rank, columns)."""
    b: torch.Tensor
    """Of shape (rows, rank)."""
    scaling: float


def project(
    projections: Sequence[Projection],
    input: torch.Tensor,
    owner: object = None,
    leaves_out: bool = False,
    casts: Any = None,
) -> tuple[torch.Tensor, ...]:
    """The results of projections of one input, as one autograd node.

    Args:
        projections: One or more. A and B get gradients.
        input: Of shape (..., columns), contiguous, not empty, in the dtype that the products were
            made for. Gets a gradient.
        owner: Whoever calls; the node has it as ``owner``.
        leaves_out: Whether the values of the only result are computed only if somebody reads them.
        casts: ``poros.replay.casts.AdapterCasts``, which keeps A and B in the dtype of the input;
            by default the node casts them.

    Returns:
        For each a result of shape (..., rows), memory of its own, in the dtype of the input. A
        ``LazyTensor`` if it is left out.

    Streams:
        Queued on the current stream. Of an input that is a gated activation
        (``poros.kernels.swiglu``) gate and up are kept, and it is made again.

    Exactness:
        Equal bits for equal calls. Not those of PEFT's modules: see the bound above.
    """
    group = _Group(
        [each.product for each in projections],
        [each.scaling for each in projections],
        [each.a.shape[0] for each in projections],
        owner,
        leaves_out,
        casts,
    )
    # Aliases have nodes of their own, and what was made last is differentiated first: B before A,
    # and the last projection first, as in PEFT. Without them chance would order the parameters.
    with torch._C.DisableTorchFunctionSubclass():
        matrices = [tensor[...] for each in projections for tensor in (each.a, each.b)]
    found: Any = _Project.apply(group, input, *matrices)
    return tuple(found)


class _Group(NamedTuple):
    """Projections of one input, without A and B."""

    products: Sequence[Product]
    scalings: Sequence[float]
    ranks: list[int]
    owner: object
    leaves_out: bool
    casts: Any

    def cast(
        self, matrices: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """All A, one below the other, and all B, in ``dtype``; by one call if all are cast."""
        all_a, all_b = matrices[::2], [each.detach() for each in matrices[1::2]]
        if len(all_a) == 1 and all(each.dtype is dtype for each in matrices):
            return all_a[0].detach(), all_b
        shape = sum(self.ranks), all_a[0].shape[1]
        others = [each for each in all_b if each.dtype is not dtype]
        shapes = [shape, *(each.shape for each in others)]
        kept = None
        if self.casts is not None and all(each.is_contiguous() for each in matrices):
            kept = self.casts.places(shapes, dtype)
        stacked, *places = kept or [all_a[0].new_empty(each, dtype=dtype) for each in shapes]
        pairs = list(zip(places, others, strict=True))
        pairs += zip(stacked.split(self.ranks), all_a, strict=True)
        if self.casts is None or kept is None:
            copy_all(*zip(*pairs, strict=True))
        else:
            self.casts.add(pairs)
        made = iter(places)
        return stacked, [each if each.dtype is dtype else next(made) for each in all_b]

    def results(
        self, input: torch.Tensor, hidden: torch.Tensor, all_b: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The results of all projections, given the products with A."""
        found = []
        parts = zip(self.products, self.scalings, hidden.split(self.ranks, 1), all_b, strict=True)
        for product, scaling, columns, b in parts:
            result = product.of(input).contiguous()
            result.view(-1, product.num_rows).addmm_(columns, b.t(), alpha=scaling)
            # Where the module's own result is a view, nobody could write to it in place.
            found.append(torch.ops.aten._unsafe_view(result, result.shape))
        return found


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: _Group, input: torch.Tensor, *matrices: Any) -> Any:
        stacked, all_b = group.cast(matrices, input.dtype)
        hidden = _rows(input).mm(stacked.t())
        sources = sources_of(input)
        weights = [each.weight for each in group.products]
        ctx.save_for_backward(hidden, stacked, *all_b, *weights, *sources)
        # If weights stream, autograd alone keeps them.
        products = [each._replace(weight=None) for each in group.products]
        ctx.group = group._replace(products=products, casts=None)
        ctx.owner, ctx.shape = group.owner, input.shape
        ctx.dtypes = [each.dtype for each in matrices]
        ctx.set_materialize_grads(False)
        if not group.leaves_out:
            return tuple(group.results(input, hidden, all_b))

        def form() -> torch.Tensor:
            return group.results(input_from(sources), hidden, all_b)[0]

        shape = (*input.shape[:-1], group.products[0].num_rows)
        return (LazyTensor(shape, input.dtype, input.device, form, [*sources, hidden, *all_b]),)

    @staticmethod
    def backward(ctx: Any, *gradients: Optional) -> tuple[Optional, ...]:
        if all(each is None for each in gradients):
            return (None,) * (2 + 2 * len(gradients))
        # A region around the backward alone would cast for some of its products, and not for all.
        with without_autocast(next(each.device for each in gradients if each is not None)):
            return _backward(ctx, list(gradients))


def _backward(ctx: Any, gradients: list[Optional]) -> tuple[Optional, ...]:
    group: _Group = ctx.group
    number = len(gradients)
    hidden, stacked, *flat = saved_tensors(ctx)
    all_b, weights, sources = flat[:number], flat[number : 2 * number], flat[2 * number :]
    _, wants_input, *needs = ctx.needs_input_grad
    wants_a, wants_b = needs[::2], needs[1::2]
    of_a: list[Optional] = [None] * number
    of_b: list[Optional] = [None] * number
    of_hidden = torch.empty_like(hidden)
    parts = zip(hidden.split(group.ranks, 1), of_hidden.split(group.ranks, 1), strict=True)
    for place, (own, into) in enumerate(parts):
        gradient, b, scaling = gradients[place], all_b[place], group.scalings[place]
        if gradient is None:
            into.zero_()
            continue
        rows = _rows(gradient)
        # With beta=0 what is there is not read.
        if wants_b[place]:
            of_b[place] = torch.empty_like(b).addmm_(rows.t(), own, beta=0, alpha=scaling)
        into.addmm_(rows, b, beta=0, alpha=scaling)
        del gradient, rows
    if any(wants_a):
        together = of_hidden.t().mm(_rows(input_from(sources)))
        for place, part in enumerate(together.split(group.ranks)):
            if wants_a[place] and gradients[place] is not None:
                of_a[place] = part
    of_input: Optional = None
    for place in range(number if wants_input else 0):
        gradient, gradients[place] = gradients[place], None
        if gradient is not None:
            rows = _rows(gradient)
            dense = group.products[place]._replace(weight=weights[place]).dense(rows.dtype)
            of_input = rows.mm(dense) if of_input is None else of_input.addmm_(rows, dense)
            del gradient, rows, dense  # before the next one is there
    if of_input is not None:
        of_input = of_input.addmm_(of_hidden, stacked).view(ctx.shape)
    of_matrices = [each for two in zip(of_a, of_b, strict=True) for each in two]
    found, pairs = _cast_later(of_matrices, ctx.dtypes)
    if pairs:
        copy_all(*zip(*pairs, strict=True))
    return (None, of_input, *found)


def _cast_later(
    tensors: Sequence[Optional], dtypes: Sequence[torch.dtype]
) -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tensors in these dtypes, and what is yet to be copied: into which of them, and from where."""
    found, pairs = list(tensors), []
    for place, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if tensor is not None and tensor.dtype is not dtype:
            made = found[place] = torch.empty_like(tensor, dtype=dtype)
            pairs.append((made, tensor))
    return found, pairs


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class Shared:
    """Modules that may share an input, in the order of their calls, and results that wait."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._input: torch.Tensor | None = None
        self._state: object = None
        self._waiting: dict[nn.Module, tuple[tuple[Any, ...], torch.Tensor]] = {}

    def behind(self, module: nn.Module) -> Sequence[nn.Module]:
        """Those that are called after ``module`` and may take results; none if it may not give."""
        known = self._modules
        if module not in known or has_hooks(module, but_ours=True):
            return ()
        following = known[known.index(module) + 1 :]
        return [each for each in following if not has_hooks(each, but_ours=True)]

    def take(
        self, module: nn.Module, input: torch.Tensor, added: tuple[Any, ...]
    ) -> torch.Tensor | None:
        """The result of ``module`` if it waits and is that of a call with this input now.

        ``added`` is what it adds, as ``keep`` was told it: tensors and numbers.
        """
        found = self._waiting.pop(module, None)
        if found is None or input is not self._input or _state_of(input) != self._state:
            return None
        pairs = zip(found[0], added, strict=True)
        is_same = all(a is b or (isinstance(a, int | float) and a == b) for a, b in pairs)
        return found[1] if is_same else None

    def keep(self, input: torch.Tensor, waiting: Waiting) -> None:
        """Have the results for ``input`` wait."""
        self._input, self._state, self._waiting = input, _state_of(input), dict(waiting)


@contextmanager
def sharing_within(tally: Any, modules: Sequence[nn.Module]) -> Iterator[None]:
    """These may share an input in the body, in this order."""
    before, tally.shared = tally.shared, Shared(modules)
    try:
        yield
    finally:
        tally.shared = before


class SharingForward(PatchedForward):
    """``forward`` of a module with projections that share their input: ``names``, in order.

    The ``KernelStats`` are told of it while the module runs.
    """

    def __init__(
        self,
        module: nn.Module,
        tally: Any,
        names: Sequence[str],
        before: Callable[..., Any] | None,
    ) -> None:
        super().__init__(module, tally, names, before)
        self._tally, self._names, self.before = tally, names, before

    @property
    def is_exact(self) -> bool:
        return False

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        with sharing_within(self._tally, [module._modules[name] for name in self._names]):
            return self.own(module, *args, **kwargs)


def share_inputs(
    modules: Iterable[nn.Module],
    tally: Any,
    names_of: Callable[[nn.Module], Sequence[str]],
) -> None:
    """Have modules say to ``tally`` which of their projections share an input.

    Those whose forward somebody has set are left alone, but for forwards of Liger's, which call
    the projections as the modules' own do. ``poros.kernels.forwards.unpatch`` undoes it.

    Args:
        names_of: The projections of a module, in order; fewer than two leave it alone.
    """
    for module in modules:
        before = module.__dict__.get("forward")
        names = names_of(module) if before is None or is_forward_of_liger(before) else ()
        if len(names) > 1:
            module.__dict__["forward"] = SharingForward(module, tally, names, before)


def _state_of(input: torch.Tensor) -> tuple[object, ...]:
    """What a result depends on, besides the tensor and what is added."""
    version = 0 if input.is_inference() else input._version
    return version, torch.is_grad_enabled(), autocast_dtype(input.device)
