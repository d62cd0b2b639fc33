"""What is known of a call of a layer once its forward has run, and making such a call again.

For those that record a call (``poros.replay.recording``): its tensors lie elsewhere then.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.graphs import Spec
from poros.kernels.unformed import forget
from poros.replay.routing import Repeated, differentiate
from poros.stream.layer_index import Adapter
from poros.stream.state import enter_autocast
from poros.stream.within import Within

if TYPE_CHECKING:
    from poros.replay.call import LayerCall
    from poros.replay.forms import Around

Gradients = Sequence[torch.Tensor | None]


class CallFacts:
    """Of one call, whose tensors it does not keep.

    Attributes:
        adapters: Those that are exchanged for proxy leaves, of which a visit has to know.
        specs: Of its tensors.
        forms: Shape, dtype and whether it needs a gradient, of each result.
        uses: How its graph uses its tensors and adapters.
        result: Its result, with places instead of tensors.
    """

    def __init__(self, call: "LayerCall", adapters: Sequence[Adapter]) -> None:
        self._call = call.without_tensors()
        # Of its own, so that its graph meets no other one in them.
        own = {id(each): nn.Parameter(each.detach()) for each in call.parameters}
        self._proxies = list(own.values())
        self.adapters = [each._replace(proxy=own[id(each.parameter)]) for each in adapters]
        self.specs = [Spec.of(tensor) for tensor in call.tensors]
        self._need_gradients = [tensor.requires_grad for tensor in call.tensors]
        self.forms = call.result_forms
        self.uses = call.uses
        self.result = call.result_template

    def is_of_adapter(self, number: int) -> bool:
        """Whether that of the gradients that ``differentiate`` returns is an adapter's."""
        place = number - sum(self._need_gradients)
        return 0 <= place < len(self._proxies)

    def are_current(self, addresses: Any) -> bool:
        """Whether the layer would do now what it did, with its tensors at ``addresses``.

        Not if it has got hooks since: a recording would run them once more than the user's program.
        """
        now = self._call.layer.condition()
        return self._call.is_current() and not now.has_hooks and now.addresses == addresses

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
        """
        tally = self._call.layer.context.tally
        if tally is None:
            return self.run(inputs)
        try:
            tally.begin(leaves_out)
            results = self.run(inputs)
            tally.settle()
        finally:
            tally.end()
        forget(results)
        return results

    def differentiate(
        self,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        gradients: Gradients,
        around: "Around",
        keeps_graph: bool = False,
    ) -> list[torch.Tensor | None]:
        """The gradients of ``results``.

        Args:
            results: What the layer gave of ``inputs``.
            inputs: Leaves.
            gradients: Of the results, as they arrive.
            around: What the backward runs under.
            keeps_graph: Whether the graph of the results stays.

        Returns:
            The gradients of the inputs and adapters that need one, then the terms of what is used
            several times.
        """
        sources = [*inputs, *self._proxies]
        name = self._call.layer.name
        repeated = {number: Repeated(name, places) for number, places in self.uses.several.items()}
        with _around(around):
            outgoing = differentiate(results, gradients, sources, repeated, keeps_graph)
        return [*outgoing, *(term for terms in repeated.values() for term in terms.take())]

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


def _around(around: "Around") -> AbstractContextManager[Any]:
    def fill(stack: ExitStack) -> None:
        enter_autocast(around.autocast, stack)
        stack.enter_context(around.settings.replay())

    return Within(fill)
