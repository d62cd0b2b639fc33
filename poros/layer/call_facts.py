"""What is known of a call of a layer once its forward has run, and making such a call again.

For those that record a call (``poros.layer.captured``): its tensors lie elsewhere then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from poros.graphs import Spec
from poros.kernels.unformed import forget
from poros.layer.handover import Repeated

if TYPE_CHECKING:
    from poros.layer.call import LayerCall


class CallFacts:
    """Of one call, whose tensors it does not keep.

    Attributes:
        adapters: The layer's, at that call.
        specs: Of its tensors.
        forms: Shape, dtype and whether it needs a gradient, of each result.
        uses: How its graph uses its tensors and adapters.
        is_unwatched: Whether its own code alone sees what is computed in it.
        result: Its result, with places instead of tensors.
    """

    def __init__(self, call: "LayerCall") -> None:
        self._call = call
        self.adapters = call.adapters
        self.specs = [Spec.of(tensor) for tensor in call.tensors]
        self._need_gradients = [tensor.requires_grad for tensor in call.tensors]
        self.forms = call.result_forms
        self.uses = call.uses
        self.is_unwatched = call.is_unwatched
        self.result = call.result_template

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leaves over ``tensors``, which need gradients as those of the call did."""
        return [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(tensors, self._need_gradients, strict=True)
        ]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The layer on ``inputs``; only inside a visit."""
        return self._call.run(inputs)

    def differentiate(
        self,
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        leaves_out: bool,
    ) -> list[torch.Tensor | None]:
        """Recompute the layer and take its gradients; only inside a visit.

        Args:
            inputs: Leaves.
            gradients: Of the results, as they arrive.
            leaves_out: Whether products may be left out whose values nobody needs.

        Returns:
            The gradients of the inputs and adapters that need one, then the terms of what is used
            several times.
        """
        sources = [*inputs, *self._call.stand_ins]
        wanted = [source for source in sources if source.requires_grad]
        tally = self._call.layer.context.tally
        name = self._call.layer.name
        repeated = {number: Repeated(name, places) for number, places in self.uses.several.items()}
        with torch.enable_grad():
            try:
                if tally is not None:
                    tally.begin(leaves_out and self.is_unwatched)
                results = self.run(inputs)
                if tally is not None:
                    tally.settle()
            finally:
                if tally is not None:
                    tally.end()
        forget(results)
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, gradients, strict=True)
            if result.requires_grad and gradient is not None
        ]
        outgoing: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs:
            ends, starts = zip(*pairs, strict=True)
            for number, terms in repeated.items():
                terms.watch(results, gradients, sources[number])
            outgoing = torch.autograd.grad(ends, wanted, starts, allow_unused=True)
        return [*outgoing, *(term for terms in repeated.values() for term in terms.take())]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The state around the call, and nothing kept in what is recorded."""
        call = self._call
        tally = call.layer.context.tally
        with call.replaying(), nullcontext() if tally is None else tally.recording():
            yield
