"""What is known of a form of call of a layer once calls have run, and making such a call again.

For those that record it (``poros.replay.recording``): its tensors lie elsewhere then.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from poros.errors import RematerializationError
from poros.kernels.adapters import Recomputation
from poros.kernels.lazy_tensor import forget
from poros.replay.call import LayerCall, tree_unflatten
from poros.replay.graphs import Spec
from poros.replay.routing import Gradients, differentiate
from poros.replay.uses import Around, Uses
from poros.stream.visit import proxy_leaves
from poros.stream.within import Within


class CallFacts:
    """Of one call, whose tensors it does not keep.

    Args:
        call: That has run in the graph around it.
        template: What it gave, with places instead of tensors.
        results: These.

    Attributes:
        leaves: What stands in for its trained parameters, of which a visit has to know.
        specs: Of its tensors.
        forms: Shape, dtype and whether it needs a gradient, of each result.
        uses: How its graph uses its tensors and adapters; empty until a backward has shown it.
        gives_casts: Whether gradients of adapters that autocast casts are those of the casts.
    """

    def __init__(self, call: LayerCall, template: Any, results: Sequence[torch.Tensor]) -> None:
        self._template = template
        self.forms = _forms(results)
        self._call = call.without_tensors()
        # Of its own, so that its graph meets no other one in them.
        self.leaves, own = proxy_leaves(call.condition.trained.places)
        self._own = list(own.values())
        self.specs = [Spec.of(tensor) for tensor in call.tensors]
        self._need_gradients = [tensor.requires_grad for tensor in call.tensors]
        self.uses, self.gives_casts = Uses((), ()), False

    def learn(self, uses: Uses) -> None:
        """A backward has shown the ``uses``."""
        self.uses = uses
        self.gives_casts = self._call.shares_casts or uses.has_meeting_casts(len(self.specs))

    def is_of_adapter(self, use: int) -> bool:
        """Whether the gradient for that use is an adapter's."""
        return self.uses.sources[use].number >= len(self.specs)

    def result_of(self, values: Sequence[Any]) -> Any:
        """A layer's result in its own form, with ``values`` in the places of its tensors."""
        return tree_unflatten(self._template, values)

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leaves over ``tensors``, which need gradients as those of the call did."""
        return [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(tensors, self._need_gradients, strict=True)
        ]

    def run(self, inputs: Sequence[torch.Tensor], has_graph: bool = True) -> list[torch.Tensor]:
        """The layer on ``inputs``, in the state of the call; within a visit with ``adapters``."""
        with self._call.surroundings(), torch.set_grad_enabled(has_graph):
            return self._call.run(inputs)

    def recompute(self, inputs: Sequence[torch.Tensor], leaves_out: bool) -> list[torch.Tensor]:
        """The same as a recomputation.

        Args:
            inputs: Leaves.
            leaves_out: Whether products may be left out whose values nobody needs.

        Raises:
            RematerializationError: If it gives tensors of another form than the forward.
        """
        with Recomputation(self._call.layer.context.tally, leaves_out):
            results = self.run(inputs)
        forget(results)
        if _forms(results) != self.forms:
            raise RematerializationError(
                f"{self._call.layer.name}: forward gave tensors of form {self.forms}, the "
                f"recomputation {_forms(results)}; the layer depends on state that is not its input"
            )
        return results

    def differentiate(
        self,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        gradients: Gradients,
        around: Around,
        keeps_graph: bool = False,
    ) -> list[torch.Tensor | None]:
        """The gradients of ``results``, one for each use of a source.

        Args:
            results: What the layer gave of ``inputs``.
            inputs: Leaves.
            gradients: Of the results, as they arrive.
            around: What the backward runs under.
            keeps_graph: Whether the graph of the results stays.
        """
        with Within(around.surroundings.enter):
            return differentiate(
                *(self._call.layer.name, results, gradients, inputs, self._own, self.uses),
                has_casts=self._call.has_casts,
                through_casts=self.gives_casts,
                keeps_graph=keeps_graph,
            )

    @contextmanager
    def recording(self, draws_anew: bool = False) -> Iterator[None]:
        """Nothing is kept or counted of what runs, from the random state of the call.

        Args:
            draws_anew: Whether the random state is that of now instead.
        """
        tally = self._call.layer.context.tally
        with ExitStack() as stack:
            if not draws_anew:
                stack.enter_context(self._call.ambient.rng.replay())
            if tally is not None:
                stack.enter_context(tally.recording())
            yield


def _forms(results: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype, bool]]:
    return [(each.shape, each.dtype, each.requires_grad) for each in results]
