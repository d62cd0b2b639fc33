"""How the gradients of a recomputed layer reach the graph around it: in whose order, in which sums.

Note: Order
    A Function hands all its gradients over at once. So each adapter parameter gets a node of its
    own between the Function and itself, made in the reverse of the order in which a resident run
    would hand the gradients over: autograd differentiates what was made last first. The node is an
    alias, which passes on the very tensor that it gets, so that autograd still sees who else holds
    it before it keeps it as ``.grad``.

Note: Sums of a parameter's gradient
    Floating-point addition is not associative. What a layer uses once gives one term, which
    autograd adds to those from elsewhere (another forward, a penalty on the weights) as it does in
    a resident run. What it uses several times gives several terms, and a resident run adds them one
    by one to what has arrived before. So they are handed over one by one, each through a node of
    its own.

Note: Sums of an input's gradient
    If a layer uses its input h twice (a residual and a norm do), a resident run adds both terms one
    after the other to whatever else flows back into h. A recomputed layer hands over their sum. As
    long as h goes nowhere else this is the same; with a loss on h as well, (loss + residual) + norm
    becomes loss + (residual + norm). So the gradient that arrives at h has to be the very tensor
    that the layer handed back.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from poros.arrival import arrivals
from poros.errors import PreparedModelError, RematerializationError, UnsupportedModelError


class HandedBack:
    """The gradient that a layer's backward gave for one of its inputs."""

    __slots__ = ("_name", "_seen")

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: tuple[int, int, int] | None = None

    def set(self, gradient: torch.Tensor | None) -> None:
        self._seen = None if gradient is None else _identity(gradient)

    def check(self, gradient: torch.Tensor) -> None:
        """The hook on the input: ``gradient`` is all that has arrived at it.

        Raises:
            UnsupportedModelError: If it is not what the layer handed back, see "Sums of an input's
                gradient".
        """
        seen, self._seen = self._seen, None
        found = _identity(gradient)
        # One of an earlier backward, which stopped above the input, says nothing about this one.
        if seen is not None and seen[0] == found[0] and seen != found:
            raise UnsupportedModelError(
                f"{self._name}: expected its input to be used by this layer alone, found gradients "
                "from elsewhere too (a loss on hidden states or on inputs_embeds, or a hook that "
                "changes them). A resident run adds them up in another order, so the result would "
                "not be exact; put the loss on the model's outputs"
            )


def _identity(gradient: torch.Tensor) -> tuple[int, int, int]:
    return torch._C._current_graph_task_id(), gradient.data_ptr(), gradient._version


class Repeated:
    """The terms of the gradient of one parameter that a layer uses several times.

    Args:
        name: The layer's qualified name.
        num_uses: How often.
    """

    def __init__(self, name: str, num_uses: int) -> None:
        self._name = name
        self._num_uses = num_uses
        self._terms: list[torch.Tensor | None] = []

    def watch(self, places: Sequence[tuple[Any, int]]) -> None:
        """Keep what these nodes will give: each a node and the number of its gradient."""
        if len(places) != self._num_uses:
            raise RematerializationError(
                f"{self._name}: an adapter parameter was used {self._num_uses} times in the "
                f"forward and {len(places)} times in its recomputation; the layer depends on "
                "state that is not its input"
            )
        terms: list[torch.Tensor | None] = [None] * self._num_uses
        self._terms = terms

        def keep(place: int, edge: int, gradients: Sequence[torch.Tensor | None]) -> None:
            terms[place] = gradients[edge]

        for place, (node, edge) in enumerate(places):
            node.register_hook(lambda given, _, place=place, edge=edge: keep(place, edge, given))

    def take(self) -> list[torch.Tensor | None]:
        """The terms, in the order in which a resident run adds them up."""
        terms, self._terms = self._terms, []
        return terms or [None] * self._num_uses


class OneByOne(torch.autograd.Function):
    """One parameter out of one alias for each of its uses, which get the terms of its gradient."""

    @staticmethod
    def forward(ctx: Any, repeated: Repeated, *aliases: torch.Tensor) -> torch.Tensor:
        ctx.repeated = repeated
        return aliases[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.repeated.take())


def hand_in(
    name: str,
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    alias_of: Callable[[int, torch.Tensor], torch.Tensor],
) -> tuple[list[torch.Tensor], dict[int, Repeated]]:
    """What a layer's Function is given for its parameters, so that gradients arrive in ``order``.

    Args:
        name: The layer's qualified name.
        parameters: The parameters.
        order: Their numbers, one for each use, as the gradients arrive in a resident run. A
            parameter that is not in it takes no part, and gets no gradient.
        alias_of: Makes the alias of a parameter for the use at that place in ``order``.

    Returns:
        A tensor for each parameter; and the terms to be given, by number, for those that are used
        more than once.
    """
    if len(set(order)) == len(order):
        once: list[torch.Tensor | None] = [None] * len(parameters)
        for place, number in reversed(list(enumerate(order))):
            once[number] = alias_of(place, parameters[number])
        pairs = zip(once, parameters, strict=True)
        return [own.detach() if alias is None else alias for alias, own in pairs], {}
    aliases: dict[int, list[torch.Tensor]] = {}
    for place, number in reversed(list(enumerate(order))):
        aliases.setdefault(number, []).append(alias_of(place, parameters[number]))
    repeated = {n: Repeated(name, count) for n, count in Counter(order).items() if count > 1}
    given = []
    for number, parameter in enumerate(parameters):
        if number in repeated:
            # Made after all aliases, so that none of them is waited for out of turn.
            terms = reversed(aliases[number])
            given.append(OneByOne.apply(repeated[number], *terms))
        else:
            given.append(aliases[number][0] if number in aliases else parameter.detach())
    return given, repeated


def watch_terms(
    results: Sequence[torch.Tensor],
    stand_ins: Sequence[torch.Tensor],
    repeated: dict[int, Repeated],
) -> None:
    """Have the backward through ``results`` keep the terms of what is used more than once."""
    places: dict[int, list[tuple[Any, int]]] = {id(stand_ins[number]): [] for number in repeated}
    for use in arrivals(results):
        if id(use.leaf) in places and use.node is not None:
            places[id(use.leaf)].append((use.node, use.edge))
    for number, each in repeated.items():
        each.watch(places[id(stand_ins[number])])


class NotThrough(torch.autograd.Function):
    """An alias of a tensor for a graph that is dropped: what flows back to it, nobody may use.

    It leads on to the tensor, so that autograd takes the way to it for one that it has to go: it
    then waits for it before it hands anything to the tensor, and raises before that.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise _refusal("an adapter or the input of a layer", gradients[0])


def sealed(leaf: torch.Tensor) -> torch.Tensor:
    """``leaf``, of a graph that is dropped; raises if a gradient reaches it all the same."""
    leaf.register_post_accumulate_grad_hook(_refuse_gradient)
    return leaf


def _refuse_gradient(leaf: torch.Tensor) -> None:
    # Runs when a gradient is accumulated, which recomputation never does.
    leaf.grad = None
    what = "an adapter" if isinstance(leaf, torch.nn.Parameter) else "the input of a layer"
    raise _refusal(what, leaf)


def _refusal(what: str, tensor: torch.Tensor) -> PreparedModelError:
    return PreparedModelError(
        f"expected gradients of {what} of shape {tuple(tensor.shape)} through the outputs of "
        "its layer only, found one through a tensor taken from inside the layer (by a hook?). It "
        "cannot be recomputed; take the tensor from what a layer returns"
    )
