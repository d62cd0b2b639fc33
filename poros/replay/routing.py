"""How the gradients of a replayed layer reach the graph around it: in whose order, in which sums.

Note: Order
    A Function hands all its gradients over at once. So each adapter parameter gets a node of its
    own between the Function and itself, made in the reverse of the order in which a resident run
    would hand the gradients over: autograd differentiates what was made last first. The node is an
    alias, which passes on the very tensor that it gets, so that autograd still sees who else holds
    it before it keeps it as ``.grad``.

Note: Sums
    Floating-point addition is not associative. What a layer uses once gives one term, which
    autograd adds to those from elsewhere (another forward, a loss on hidden states, a penalty on
    the weights) as it does in a resident run. What it uses several times gives several terms: an
    input that goes into a norm and into a residual connection, an adapter of a module that is
    called twice. A resident run adds them one by one to what has arrived before, so (loss +
    residual) + norm, and not loss + (residual + norm). So they are handed over one by one, each
    through a node of its own.

Note: Through the cast of the region
    Inside one region autocast casts a parameter once, at its first use by anybody, and all uses
    share the cast. So a resident run hands a gradient over when autograd gets to that one cast,
    which may be far behind the layer: after everything that was made later. And it sums the
    gradients of all these uses in the low precision, and casts the sum back. So what a layer gives
    is the gradient of the cast, in the low precision, and goes to the cast that the region keeps,
    which it has the region make if there is none yet: autograd does the rest. A cast that is older
    than an update of its parameter is what a resident run goes on with, until the region ends. A
    replayed layer has cast anew; so this is refused. Where nobody else can use its casts
    (``ModelContext.confines_casts``), and it uses each of its adapters once, none is made,
    and a layer gives the gradient of the parameter.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge

from poros.errors import RematerializationError
from poros.kernels.autocast import cached_cast, require_current
from poros.replay.graphs import Fixed
from poros.replay.uses import CAST, Source, Uses, walk

OF_ADAPTERS = 1
"""The group of their gradients in fixed memory."""

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


def differentiate(
    name: str,
    results: Sequence[torch.Tensor],
    gradients: Gradients,
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    uses: Uses,
    has_casts: bool,
    through_casts: bool,
    keeps_graph: bool = False,
) -> list[torch.Tensor | None]:
    """The gradients of a layer's results, whose graph is its own: one for each use.

    Args:
        name: The layer's qualified name.
        results: Of the layer.
        gradients: Of the results, as they arrive; None where there is none.
        tensors: Leaves that it was given.
        parameters: What stands in for its trained parameters; leaves.
        uses: What the graph of its forward was seen to use.
        has_casts: As ``walk`` takes it.
        through_casts: Whether a gradient is that of the cast, in its precision.
        keeps_graph: Whether the graph stays.

    Raises:
        RematerializationError: If the graph uses other sources.
    """
    found = walk(results, tensors, parameters, has_casts)
    if tuple(each.source for each in found) != uses.sources:
        raise RematerializationError(
            f"{name}: expected the recomputation to use its inputs and adapters as the forward did "
            f"({len(uses.sources)} times), found other uses ({len(found)}); the layer depends on "
            "state that is not its input"
        )
    terms: list[torch.Tensor | None] = [None] * len(found)
    leaves = (*tensors, *parameters)
    wanted: list[Any] = [
        leaves[source.number]
        if use is None or not (source.is_cast and through_casts)
        else GradientEdge(found[use].end, 0)
        for source, use in zip(uses.by_source, uses.single, strict=True)
    ]
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, gradients, strict=True)
        if result.requires_grad and gradient is not None
    ]
    if not (pairs and wanted):
        return terms
    handles = [
        _keep(terms, number, found[number].node, found[number].edge)
        for numbers in uses.several.values()
        for number in numbers
    ]
    ends, starts = zip(*pairs, strict=True)
    try:
        single = torch.autograd.grad(
            ends, wanted, starts, retain_graph=keeps_graph, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    for use, gradient in zip(uses.single, single, strict=True):
        if use is not None:
            terms[use] = gradient
    return terms


def _keep(terms: list[torch.Tensor | None], number: int, node: Any, edge: int) -> Any:
    """Have the backward that comes keep that gradient of ``node``, and not add it up."""

    def keep(given: tuple[torch.Tensor | None, ...], _: Gradients) -> Any:
        terms[number] = given[edge]
        return (*given[:edge], None, *given[edge + 1 :])

    return node.register_hook(keep)


class Recorded(Protocol):
    """A recorded backward: ``poros.replay.forms.Replayed``."""

    gives: Fixed


class GradientSums:
    """Adds to ``.grad`` of a layer's parameters, for one micro-batch after the other.

    As autograd does at the end of a backward, but by one kernel for all of them, unless somebody
    holds a parameter's node of autograd: hooks may be registered there. A parameter without a
    gradient gets a copy of the first.

    To be used while nobody's code runs: who holds what is looked up once.

    Attributes:
        behind: The recording that gave the last ones; None if none did.

    Exactness:
        Equal bits: the same sums of two terms, in the gradient's dtype.

    Source:
        pytorch: ``AccumulateGrad`` in torch/csrc/autograd/functions/accumulate_grad.h;
        ``torch.utils.swap_tensors`` asks for that node likewise.
    """

    def __init__(self) -> None:
        self.behind: Any = None
        self._recorded: Recorded | None = None
        self._total = self._piece = torch.empty(0)

    def add(
        self, arrived: Sequence[tuple[torch.Tensor, torch.Tensor]], recorded: Recorded | None = None
    ) -> None:
        """Add the gradients of parameters that ``arrived``, all of them from ``recorded`` if given.

        They are not kept.
        """
        if not arrived:
            return
        piece = None if recorded is None else self.may_begin(arrived, recorded)
        if piece is not None:
            self.begin(arrived, recorded, piece, piece)
            return
        parameters, gradients = zip(*arrived, strict=True)
        sums = [each.grad for each in parameters]
        places = [each.data_ptr() for each in sums if each is not None]
        is_plain = all(map(_has_plain_sum, parameters, sums, gradients))
        if not is_plain or len(set(places)) < len(places):
            self.behind = None  # hooks may run
            # As torch.autograd.backward, without its comparison of each shape.
            torch.autograd.Variable._execution_engine.run_backward(
                *(parameters, tuple(each.clone() for each in gradients), False, False, ()),
                allow_unreachable=True,
                accumulate_grad=True,
            )
            return
        for parameter, total, gradient in zip(parameters, sums, gradients, strict=True):
            if total is None:
                parameter.grad = gradient.clone()
        there = [pair for pair in zip(sums, gradients, strict=True) if pair[0] is not None]
        if there:
            torch._foreach_add_(*map(list, zip(*there, strict=True)))

    def may_begin(
        self, arrived: Sequence[tuple[torch.Tensor, torch.Tensor]], recorded: Recorded
    ) -> torch.Tensor | None:
        """The memory of gradients that ``recorded`` gives, if there are none before that."""
        piece = recorded.gives.piece_of(OF_ADAPTERS)
        is_first = bool(arrived) and all(parameter.grad is None for parameter, _ in arrived)
        if piece is None or not is_first:
            return None
        is_plain = all(_has_plain_sum(parameter, None, gradient) for parameter, gradient in arrived)
        gradients = [gradient for _, gradient in arrived]
        return piece if is_plain and _are_apart_in(piece, gradients) else None

    def begin(
        self,
        arrived: Sequence[tuple[torch.Tensor, torch.Tensor]],
        recorded: Recorded | None,
        piece: torch.Tensor,
        total: torch.Tensor,
    ) -> None:
        """Have the first sums, in ``total`` as gradients are in a ``piece`` of memory.

        Sums that lie as the gradients do are made by one addition of all.
        """
        self._recorded, self._total, self._piece = recorded, total.clone(), piece
        for parameter, gradient in arrived:
            place = gradient.size(), gradient.stride(), gradient.storage_offset()
            # No view: code may edit one with a graph, or detach it in place.
            parameter.grad = self._total.as_strided(*place).data

    def add_all(self, recorded: Recorded | None) -> bool:
        """Add what it has given, if it gave the first ones too; whether it did."""
        if recorded is None or recorded is not self._recorded:
            return False
        self._total.add_(self._piece)
        return True


def _are_apart_in(piece: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all of them lie in that memory, each in a place of its own."""
    begin = piece.data_ptr()
    places = {each.data_ptr() for each in tensors}
    return len(places) == len(tensors) and all(begin <= at < begin + piece.nbytes for at in places)


def _has_plain_sum(parameter: Any, total: torch.Tensor | None, gradient: torch.Tensor) -> bool:
    """Whether nobody sees the gradient arrive, and all are of one form."""
    return (
        parameter._use_count() == 1
        and not parameter._backward_hooks
        and not getattr(parameter, "_post_accumulate_grad_hooks", None)
        and parameter.dtype is gradient.dtype
        and parameter.shape == gradient.shape
        and parameter.stride() == gradient.stride()
        and (
            total is None
            or (
                type(total) is torch.Tensor
                and total.dtype is gradient.dtype
                and total.layout is torch.strided
                and not total.requires_grad
            )
        )
    )


class Terms:
    """The terms of the gradient of what a layer uses several times, until they are handed over."""

    def __init__(self) -> None:
        self.given: Gradients = ()

    def take(self) -> Gradients:
        """Them, in the order in which a resident run adds them up."""
        given, self.given = self.given, ()
        return given


class OneByOne(torch.autograd.Function):
    """One tensor out of one alias for each of its uses, which get the terms of its gradient."""

    @staticmethod
    def forward(ctx: Any, terms: Terms, *aliases: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.terms, ctx.number = terms, len(aliases)
        return aliases[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *(ctx.terms.take() or [None] * ctx.number))


def hand_in(
    tensors: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.Tensor],
    uses: Uses,
    gives_casts: bool,
    name: str,
) -> tuple[list[torch.Tensor], Mapping[Source, Terms]]:
    """What a layer's Function is given, so that gradients arrive as in a resident run.

    Args:
        tensors: What the layer was given; None for what is not to be handed in.
        parameters: Its trained parameters.
        uses: How it uses both.
        gives_casts: Whether gradients go through the casts that the autocast region keeps.
        name: The layer's qualified name.

    Returns:
        A tensor for each source; and the terms to be given of those that are used several times.

    Raises:
        UnsupportedModelError: If a cast is of its parameter before an update.
    """
    several, sources = uses.several, (*tensors, *parameters)
    first = torch._C._autograd._get_sequence_nr()
    reused: list[tuple[torch.Tensor, torch.Tensor]] = []
    empty: dict[int, torch.Tensor] = {}
    aliases: dict[Source, list[torch.Tensor]] = {}
    for use in reversed(uses.order):
        source = uses.sources[use]
        tensor = sources[source.number]
        if tensor is None:
            continue
        cast = cached_cast(tensor, empty) if gives_casts and source.is_cast else None
        if cast is not None:
            node: Any = cast.grad_fn
            while node is not None and node.name() != CAST:  # a vector is a matrix there
                node = node.next_functions[0][0]
            if node is None or node._sequence_nr() < first:
                reused.append((cast, tensor))
            tensor = cast if cast.shape == tensor.shape else cast.view(tensor.shape)
        # A tensor has its gradient before any parameter has, and a cast has a node of its own.
        is_aliased = source in several or (source.number >= len(tensors) and cast is None)
        aliases.setdefault(source, []).append(tensor[...] if is_aliased else tensor)
    require_current(name, reused)
    terms = {source: Terms() for source in several if source in aliases}
    # Made after all aliases, so that none of them is waited for out of turn.
    return [
        OneByOne.apply(terms[source], *reversed(aliases[source]))
        if source in several
        else aliases[source][0]
        for source in uses.by_source
        if source in aliases
    ], terms
