"""One decoder layer as one node of the graph: its forward and its backward are replayed.

For a layer f with frozen weights W, adapters a, input h and random state s, forward computes

    h' = f(h; W, a, s)

and keeps only (h, s) and references to what else f was given. Backward brings W back, recomputes
f(h; W, a, s) with a graph, and returns dL/dh and dL/da from one call to ``torch.autograd.grad``.
The local graph is the one the resident run builds, fed with the same bits, so the gradients are the
same bits (Poros technical report, Algorithm 1 and Proposition 1; Chen et al. 2016 for the
recomputation).

Two choices differ from the report. Recomputation is per layer even if several layers travel as one
block, because the smallest graph needs the least memory. And the forward is recorded *with*
gradients enabled: a kernel that looks at the grad mode (a fused attention backend) then takes the
same path in the forward, in the recomputation and in a resident run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from poros.errors import RematerializationError
from poros.kernels.nodes import unwritten_tensors
from poros.replay.call import LayerCall, total
from poros.replay.forms import Form, Replayed
from poros.replay.recording import different_ones
from poros.replay.routing import Gradients, GradientSums, Tensors, Terms
from poros.replay.uses import Around, Source
from poros.slots.schedule import Phase
from poros.stream.rng import RngStash

Differentiate = Callable[..., tuple[Gradients, Replayed | None]]
"""``poros.replay.captures.Captures.backward``."""


class RematerializeLayer(torch.autograd.Function):
    """Gives what the replayed forward of a ``LayerCall`` gave; its backward is replayed, or runs.

    What is used, the last inputs, gets its gradients from autograd itself, so hooks, clipping,
    accumulation and DDP see nothing unusual.

    Exactness:
        Outputs and gradients are bitwise equal to running the layer in the surrounding graph, if
        the layer is a deterministic function of its inputs, its weights, its adapters and the state
        around it (``poros.stream.body.Call``).

    Raises:
        RematerializationError: In backward, if something of that has changed since.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: LayerCall,
        form: Form,
        differentiate: Differentiate,
        terms: Mapping[Source, Terms],
        results: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.form, ctx.differentiate, ctx.terms = call, form, differentiate, terms
        ctx.save_for_backward(*kept)
        outputs = tuple(result.detach() for result in results)
        ctx.mark_non_differentiable(
            *(
                output
                for output, (_, _, requires_grad) in zip(outputs, form.facts.forms, strict=True)
                if not requires_grad
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: LayerCall = ctx.call
        # once_differentiable lets a constant incoming gradient pass, and drops the second order.
        if torch.is_grad_enabled():
            call.refuse_second_order()
        tensors = unwritten_tensors(ctx, written(call))
        call.require_same_tensors()
        found, _ = ctx.differentiate(call, ctx.form, tensors, gradients)
        # As autograd releases saved tensors, with or without the graph that held them.
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            call.offloaded = None
            ctx.form.release(call)
        uses = ctx.form.facts.uses
        for source, terms in ctx.terms.items():
            terms.given = [found[use] for use in uses.several[source]]
        return (*[None] * 6, *[None if use is None else found[use] for use in uses.single])


class ReplayedVisit:
    """A replayed forward of a ``LayerCall`` that is no node of a graph: it ``may_be_apart``.

    Whoever has it takes its gradients, once. It keeps of the call's tensors those ``kept``.

    Attributes:
        run: How many were replayed right behind one another, this one among them: one number, of
            all of them.
    """

    def __init__(
        self,
        call: LayerCall,
        form: Form,
        kept: Sequence[torch.Tensor],
        differentiate: Differentiate,
        run: list[int] | None = None,
    ) -> None:
        self.call, self.form, self.run = call, form, [0] if run is None else run
        self.run[0] += 1
        self._kept, self._versions = kept, [each._version for each in kept]
        self._differentiate = differentiate
        call.tensors = ()

    def again(self, call: LayerCall, kept: Sequence[torch.Tensor]) -> "ReplayedVisit":
        """That of another call of the layer, which was replayed likewise, right behind it."""
        return ReplayedVisit(call, self.form, kept, self._differentiate, self.run)

    def intact(self) -> Sequence[torch.Tensor]:
        """What it keeps; raises as ``RematerializeLayer``."""
        if self._versions != [each._version for each in self._kept]:
            raise RematerializationError(written(self.call))
        self.call.require_unchanged()
        return self._kept

    def release(self) -> None:
        """Its backward has been taken: nothing of it is needed any more."""
        self.call.offloaded, self._kept = None, ()
        self.form.release(self.call)

    def backward(self, gradient: torch.Tensor, sums: GradientSums) -> torch.Tensor | None:
        """Add the gradients of parameters to ``sums``, as autograd does; that of the hidden states.

        Exactness:
            Terms of what it uses several times are added in the order in which autograd adds them
            ("Sums" in ``poros.replay.routing``).

        Raises:
            RematerializationError: As ``RematerializeLayer``.
        """
        call, uses = self.call, self.form.facts.uses
        with torch.no_grad():
            # They may lie in fixed memory, until the next replay.
            found, replayed = self._differentiate(
                *(call, self.form, self.intact(), (gradient,)), in_place=True, behind=sums.behind
            )
            sums.behind = replayed
            self.release()
            hidden = total(found[use] for each in uses.of_tensors for use in each)
            if hidden is not None and replayed is not None and any(hidden is x for x in found):
                hidden = hidden.clone()
            if not sums.add_all(replayed):
                arrived = [
                    (call.parameters[number], summed)
                    for number, terms in uses.of_parameters
                    if (summed := total(found[each] for each in terms)) is not None
                ]
                sums.add(arrived, replayed if uses.has_single_parameters else None)
        return hidden


class Behind(NamedTuple):
    """The next call of a micro-batch, right behind that of another one."""

    arguments: LayerCall
    """A call of another layer with the same arguments but for hidden states."""
    hidden: torch.Tensor
    rng: RngStash
    """The random states that it begins with."""


@dataclass
class Together:
    """Calls of one layer by micro-batches that go together, one behind the other."""

    behind: Sequence[Behind] = ()
    """Those behind the call that comes next, if they may be replayed with it."""
    made: list[tuple[Any, ReplayedVisit]] = field(default_factory=list)
    """What those gave that were replayed."""


class Backward(NamedTuple):
    """One backward of a call whose forward was replayed."""

    call: LayerCall
    form: Form
    tensors: Tensors
    gradients: Gradients
    """Of its results."""
    around: Around

    def with_input(self) -> "Backward":
        """With all tensors of the call, not only those that were kept on the device."""
        return self._replace(tensors=self.call.with_input(self.tensors))

    def run(self) -> Gradients:
        """Recompute the layer and differentiate it, within a visit."""
        facts, call = self.form.facts, self.call
        inputs = facts.inputs(self.tensors)
        with call.rng.replay():
            results = facts.recompute(inputs)
            call.require_same_end()
        return facts.differentiate(results, inputs, self.gradients, self.around)

    def replay(
        self, replayed: Replayed, in_place: bool = False, is_again: bool = False
    ) -> Gradients:
        """Replay a recording of it; ``in_place`` and ``is_again`` are as ``Replayed.run``."""
        call, arrived = self.call, [each for each in self.gradients if each is not None]
        if self.form.kind == "kept" and replayed is not self.form.steady:
            return replayed.run(arrived, in_place)
        if replayed.is_proved and not call.has_drawn:  # nor has what it was proved beside
            return replayed.run([*self.tensors, *arrived], in_place, is_again)
        with call.rng.replay():
            found = replayed.run([*self.tensors, *arrived], in_place, is_again)
            call.require_same_end()
        return found

    def differs(self, replayed: Replayed, wanted: Gradients) -> str | None:
        """What a replay gives otherwise than ``wanted``."""
        try:
            with self.call.layer.weights.occupy(Phase.BACKWARD):
                found = self.replay(replayed)
        except RematerializationError:
            return "random numbers"
        return different_ones(found, wanted, "gradient")


def written(call: LayerCall) -> str:
    """What is raised if something that a node of ``call`` has kept was edited."""
    return (
        f"{call.layer.name}: its input, another tensor it was given or one of its adapters was "
        "edited in place between forward and backward (an optimizer step in between?), so the "
        "forward cannot be recomputed; edit it after backward"
    )
