"""How the gradients of a recomputed layer reach the graph around it: in whose order, in which sums.

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
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from poros.errors import RematerializationError
from poros.replay.order import arrivals, operator_at
from poros.replay.uses import Place, Uses

Gradients = Sequence[torch.Tensor | None]


class Repeated:
    """The terms of the gradient of one input or parameter that a layer uses several times.

    Args:
        name: The layer's qualified name.
        places: Where it uses it, in the order in which a resident run adds the terms up.
    """

    def __init__(self, name: str, places: Sequence[Place]) -> None:
        self._name = name
        self._places = places
        self.terms: list[torch.Tensor | None] = []
        """Of the last backward, until they have been handed over."""
        self.num_terms = len(places)

    def watch(
        self,
        results: Sequence[torch.Tensor],
        gradients: Gradients,
        leaf: torch.Tensor,
    ) -> None:
        """Have the backward that comes keep the terms, and not add them up.

        Args:
            results: What the recomputation gave.
            gradients: What flows back to them.
            leaf: What stands in the recomputation for what is used several times.

        Raises:
            RematerializationError: If the recomputation does not use it as often as the forward.
        """
        self.terms = [None] * len(self._places)
        for number, (node, edge) in enumerate(self._uses(results, leaf)):
            if node is None:
                self.terms[number] = gradients[edge]
            else:
                self._keep(number, node, edge)

    def _uses(
        self, results: Sequence[torch.Tensor], leaf: torch.Tensor
    ) -> Sequence[tuple[Any, int]]:
        """The operators of the recomputation that use it, mostly those of the forward.

        Returns:
            Each with the number of its edge; None with the number of a result that is the leaf.
        """
        nodes = [
            (None, path[0]) if edge is None else (operator_at(path, results), edge)
            for path, edge in self._places
        ]
        if all(
            place.edge is None or _leaf_behind(node, edge) is leaf
            for place, (node, edge) in zip(self._places, nodes, strict=True)
        ):
            return nodes
        uses = [
            (use.node, use.edge if use.node is not None else use.path[0])
            for use in arrivals(results)
            if use.leaf is leaf
        ]
        if len(uses) != len(self._places):
            raise RematerializationError(
                f"{self._name}: a tensor of shape {tuple(leaf.shape)} was used "
                f"{len(self._places)} times in the forward and {len(uses)} times in its "
                "recomputation; the layer depends on state that is not its input"
            )
        return uses

    def _keep(self, number: int, node: Any, edge: int) -> None:
        terms = self.terms

        def keep(given: tuple[torch.Tensor | None, ...], _: Gradients) -> Any:
            terms[number] = given[edge]
            return (*given[:edge], None, *given[edge + 1 :])

        node.register_hook(keep)

    def take(self) -> list[torch.Tensor | None]:
        """The terms, in the order in which a resident run adds them up."""
        terms, self.terms = self.terms, []
        return terms or [None] * len(self._places)


def _leaf_behind(node: Any, edge: int) -> torch.Tensor | None:
    following = () if node is None else node.next_functions
    return getattr(following[edge][0], "variable", None) if edge < len(following) else None


def differentiate(
    results: Sequence[torch.Tensor],
    gradients: Gradients,
    sources: Sequence[torch.Tensor],
    repeated: Mapping[int, Repeated],
    keeps_graph: bool = False,
) -> Gradients:
    """The gradients of a layer's results, whose graph is its own.

    Args:
        results: Of the layer.
        gradients: Of the results, as they arrive; None where there is none.
        sources: What the graph leads to: inputs, then proxy leaves of adapters.
        repeated: By number among ``sources``, what keeps its terms. Those are not in what is
            returned.
        keeps_graph: Whether the graph stays.

    Returns:
        For each source that requires one.
    """
    wanted = [source for source in sources if source.requires_grad]
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, gradients, strict=True)
        if result.requires_grad and gradient is not None
    ]
    if not pairs:
        return [None] * len(wanted)
    ends, starts = zip(*pairs, strict=True)
    for number, terms in repeated.items():
        terms.watch(results, gradients, sources[number])
    return torch.autograd.grad(ends, wanted, starts, retain_graph=keeps_graph, allow_unused=True)


class OneByOne(torch.autograd.Function):
    """One tensor out of one alias for each of its uses, which get the terms of its gradient."""

    @staticmethod
    def forward(ctx: Any, repeated: Repeated, *aliases: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.repeated = repeated
        return aliases[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.repeated.take())


def hand_in(
    name: str,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    uses: Uses,
    through_cast: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], dict[int, Repeated]]:
    """What a layer's Function is given, so that gradients arrive as in a resident run.

    Args:
        name: The layer's qualified name.
        inputs: The tensors among its arguments.
        parameters: Its trainable parameters. One that is not used gets no gradient.
        uses: How it uses both.
        through_cast: Makes the alias for a use through a cast that an autocast region shares.

    Returns:
        A tensor for each input and each parameter; and the terms to be given, by number, for those
        that are used more than once.
    """
    given = [*inputs, *parameters]
    num_inputs, several = len(inputs), uses.several
    if through_cast is None and not several:
        for number in reversed(uses.order):
            if number >= num_inputs:
                given[number] = given[number][...]
        for number in set(range(num_inputs, len(given))).difference(uses.order):
            given[number] = given[number].detach()
        return given, {}
    aliases: dict[int, list[torch.Tensor]] = {number: [] for number in several}
    sources = list(given)
    for place in reversed(range(len(uses.order))):
        number = uses.order[place]
        source = sources[number]
        if through_cast is not None and place in uses.casts and source.is_leaf:
            alias = through_cast(source)  # autocast keeps its casts of leaves only
        elif number >= num_inputs or number in several:
            alias = source[...]
        else:
            continue  # it has its gradient before any parameter has, without an alias
        if number in several:
            aliases[number].append(alias)
        else:
            given[number] = alias
    repeated = {}
    for number, places in several.items():
        # Made after all aliases, so that none of them is waited for out of turn.
        repeated[number] = Repeated(name, places)
        given[number] = OneByOne.apply(repeated[number], *reversed(aliases[number]))
    for number in set(range(num_inputs, len(sources))).difference(uses.order):
        given[number] = sources[number].detach()
    return given, repeated


def leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same bytes as the inputs of a graph of their own."""
    return [
        tensor.detach().requires_grad_() if tensor.requires_grad else tensor for tensor in tensors
    ]
