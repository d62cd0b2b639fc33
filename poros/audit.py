"""What a layer's graph must look like for its recomputation to be exact, checked where it shows.

Note: No strangers
    Nothing trainable may take part in a layer except through its inputs and its adapters: a
    gradient for anything else would be lost without an error. Walking the graph of a forward finds
    such a leaf; the graph has the same leaves at every call, so one walk per form of the layer is
    enough.

Note: Sums of an input's gradient
    Floating-point addition is not associative. If a layer uses its input h twice (a residual and a
    norm do), a resident run adds both contributions one after the other to whatever else flows back
    into h. A recomputed layer hands over their sum. As long as h goes nowhere else this is the
    same; with a loss on h as well, (loss + residual) + norm becomes loss + (residual + norm). So
    the gradient that arrives at h has to be the very tensor that the layer handed back.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import torch

from poros.errors import UnsupportedModelError


class GraphAudit:
    """The audit of one layer. Remembers what it has seen.

    Args:
        name: The layer's qualified name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._uses: dict[Hashable, tuple[int, ...]] = {}

    def uses(
        self,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        stand_ins: Sequence[torch.Tensor],
        hooks: Sequence[int],
    ) -> tuple[int, ...]:
        """How often the graph of ``results`` uses each of ``inputs``.

        Raises:
            UnsupportedModelError: If a leaf is neither an input nor a stand-in.
        """
        form = (tuple(each.requires_grad for each in inputs), len(stand_ins), tuple(hooks))
        if form not in self._uses:
            edges = self._count_edges(results)
            allowed = {id(each) for each in (*inputs, *stand_ins)}
            for variable, _ in edges.values():
                if id(variable) not in allowed:
                    raise UnsupportedModelError(
                        f"{self._name}: expected only its inputs and its own adapters to be "
                        f"trainable, found a tensor of shape {tuple(variable.shape)} from "
                        "elsewhere in its graph (from a hook?); its gradient would be lost"
                    )
            by_tensor = {id(variable): count for variable, count in edges.values()}
            self._uses[form] = tuple(by_tensor.get(id(each), 0) for each in inputs)
        return self._uses[form]

    @staticmethod
    def _count_edges(
        results: Sequence[torch.Tensor],
    ) -> dict[int, tuple[torch.Tensor, int]]:
        """Each leaf of the graph of ``results`` with the number of edges that end in it."""
        counts: Counter[int] = Counter()
        leaves: dict[int, torch.Tensor] = {}
        # Nodes are kept here so that their ids stay theirs.
        seen: dict[int, object] = {}
        queue = [result.grad_fn for result in results if result.grad_fn is not None]
        while queue:
            node = queue.pop()
            if id(node) in seen:
                continue
            seen[id(node)] = node
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if hasattr(following, "variable"):
                    variable = following.variable
                    leaves[id(variable)] = variable
                    counts[id(variable)] += 1
                else:
                    queue.append(following)
        return {key: (variable, counts[key]) for key, variable in leaves.items()}


class HandedBack:
    """The gradient that a layer's backward gave for one of its inputs."""

    __slots__ = ("_name", "_seen")

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: tuple[int, int] | None = None

    def set(self, gradient: torch.Tensor | None) -> None:
        self._seen = None if gradient is None else (gradient.data_ptr(), gradient._version)

    def check(self, gradient: torch.Tensor) -> None:
        """The hook on the input: ``gradient`` is all that has arrived at it.

        Raises:
            UnsupportedModelError: If it is not what the layer handed back, see "Sums of an input's
                gradient".
        """
        seen, self._seen = self._seen, None
        if seen is not None and seen != (gradient.data_ptr(), gradient._version):
            raise UnsupportedModelError(
                f"{self._name}: expected its input to be used by this layer alone, found gradients "
                "from elsewhere too (a loss on hidden states or on inputs_embeds, or a hook that "
                "changes them). A resident run adds them up in another order, so the result would "
                "not be exact; put the loss on the model's outputs"
            )
