"""One decoder layer as one node of the graph: its backward recomputes it, or replays a recording.

For a layer f with frozen weights W, adapters a, input h and random state s, forward computes

    h' = f(h; W, a, s)

and keeps only (h, s) and references to what else f was given. Backward brings W back, recomputes
f(h; W, a, s) with a graph, and returns dL/dh and dL/da from one call to ``torch.autograd.grad``.
The local graph is the one the resident run builds, fed with the same bits, so the gradients are the
same bits (Poros technical report, Algorithm 1 and Proposition 1; Chen et al. 2016 for the
recomputation).

It is taken where visits are replayed from recordings (``poros.replay.captures``), for calls with
nothing unusual about them; all others keep the graph of their forward (``poros.stream.general``).

Two choices differ from the report. Recomputation is per layer even if several layers travel as one
block, because the smallest graph needs the least memory. And the forward runs *with* gradients
enabled and drops its graph: a kernel that looks at the grad mode (a fused attention backend, a
compiled layer) then takes the same path in the forward, in the recomputation and in a resident run.

What may change between a forward and its backward: see ``poros.replay.call``.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from poros.errors import RematerializationError
from poros.kernels.unformed import forget
from poros.replay.call import LayerCall
from poros.replay.routing import differentiate, hand_in, leaves
from poros.slots.schedule import Phase

_REQUIRES = attrgetter("requires_grad")


class RematerializeLayer(torch.autograd.Function):
    """Runs a ``LayerCall`` keeping inputs only, and recomputes it in backward.

    Inputs are the call, its tensors, then its adapter parameters: as inputs of the Function these
    get their gradients from autograd itself, so hooks, clipping, accumulation and DDP see nothing
    unusual.

    Exactness:
        Outputs and gradients are bitwise equal to running the layer in the surrounding graph, if
        the layer is a deterministic function of its inputs, its weights, its adapters and the state
        in ``AmbientState``.

    Raises:
        RematerializationError: In backward, for each change listed in ``poros.replay.call``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: LayerCall,
        results: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        call.wanted = list(map(_REQUIRES, (*call.tensors, *call.proxies)))
        ctx.save_for_backward(*kept)
        outputs = tuple(result.detach() for result in results)
        ctx.mark_non_differentiable(
            *(
                output
                for output, result in zip(outputs, results, strict=True)
                if not result.requires_grad
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: LayerCall = ctx.call
        # once_differentiable lets a constant incoming gradient pass, and drops the second order.
        if torch.is_grad_enabled():
            raise RematerializationError(
                f"{call.layer.name}: expected a backward without create_graph, found one that asks "
                "for gradients of gradients, which recomputation does not give"
            )
        tensors: Sequence[torch.Tensor] = _saved_tensors(ctx, call.layer.name)
        call.require_unchanged()
        captures = call.captures
        outgoing = captures.backward(call, tensors, gradients)
        if outgoing is None:
            with call.layer.visit(Phase.BACKWARD, call.adapters):
                tensors = call.with_input(tensors)
                inputs = leaves(tensors)
                outgoing = _differentiated(call, inputs, [*inputs, *call.proxies], gradients)
            captures.prove_backward(call, tensors, gradients, outgoing)
        # As autograd lets go of saved tensors, with or without the graph that held them.
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            call.offloaded = None
            captures.release(call)
        given = iter(outgoing)
        return (None, None, None, *(next(given) if each else None for each in call.wanted))


def rematerialize(
    call: LayerCall, results: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
) -> Any:
    """Have the backward of ``call`` recompute it; the layer's result in its own form.

    Args:
        call: The call.
        results: Of its forward, which tells in which order, and in which terms, gradients arrive.
        kept: Of its tensors, those that autograd is to keep.
    """
    casts = call.shared_casts
    through_cast = casts.through if casts is not None and call.shares_casts() else None
    given, call.repeated = hand_in(
        call.layer.name, call.tensors, call.parameters, call.uses, through_cast
    )
    if casts is not None:
        casts.require_current()
    outputs = RematerializeLayer.apply(call, results, kept, *given)
    # Autograd keeps them from here on, and lets go of them after backward.
    call.tensors = ()
    return call.unpack_results(outputs)


def _differentiated(
    call: LayerCall,
    inputs: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> Sequence[torch.Tensor | None]:
    """Recompute the layer; the gradients of ``sources``, and terms where they are kept."""
    tally = call.layer.context.tally
    try:
        if tally is not None:
            # A mode that sees operators would see tensors without values.
            tally.begin(not torch._C._len_torch_dispatch_stack())
        results = call.recompute(inputs)
        if tally is not None:
            tally.settle()
    finally:
        if tally is not None:
            tally.end()
    forget(results)
    # Outside of the replayed state: a resident run takes gradients in the caller's.
    return differentiate(results, gradients, sources, call.repeated)


def _saved_tensors(ctx: Any, name: str) -> tuple[torch.Tensor, ...]:
    """What layer ``name`` was given, as it was.

    Raises:
        RematerializationError: If some of it was edited in place since.
    """
    try:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        return saved
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RematerializationError(
            f"{name}: its input, another tensor it was given or one of its adapters was edited in "
            "place between forward and backward (an optimizer step in between?), so the forward "
            f"cannot be recomputed; edit it after backward. PyTorch says: {error}"
        ) from error
