"""The order in which gradients arrive at the leaves of a graph, told without running a backward.

A resident run hands each adapter its gradient as soon as the last operator that uses it has been
differentiated. What depends on that order: hooks on parameters, which may draw noise, and the
buckets that DistributedDataParallel fills, in which three or more ranks sum by offset. So a
recomputed layer has to hand its gradients over in the same order, and has to know it beforehand.

Note: The engine's order
    Autograd differentiates, among the nodes whose gradient is complete, the one made last; leaves
    come before all others. Nodes carry the number of their making, so the order follows from the
    graph alone. Only leaves can tie, such as weight and bias of one linear operator: those leave
    the queue as a binary heap gives them out, of which the same steps are taken here.

Note: Casts that a region shares
    A layer is run without autocast's cache, so each use of an adapter makes a cast of its own. A
    resident run makes one, at the first use: its number may be lower than that of the cast that
    shows, if the first use is not part of the graph. So that number can be given.

Source:
    PyTorch: ``ReadyQueue`` and ``Engine::evaluate_function`` in torch/csrc/autograd/engine.cpp.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

CAST = "ToCopyBackward0"

Path = tuple[int, ...]
"""The number of a result, then that of the edge to take at each operator."""


class Use(NamedTuple):
    """One edge of a graph that ends in a leaf."""

    leaf: torch.Tensor
    node: Any
    """The operator that uses the leaf; None if the leaf is itself a result."""
    edge: int
    """Which of the gradients that the operator gives is the leaf's."""
    path: Path
    """The way to the operator. Graphs of equal form have it in common."""

    @property
    def is_cast(self) -> bool:
        return self.node is not None and self.node.name() == CAST


def arrivals(
    results: Sequence[torch.Tensor],
    ends: Sequence[torch.Tensor] = (),
    first_casts: Mapping[int, int] | None = None,
) -> list[Use]:
    """All uses of leaves in the graph of ``results``, as a backward reaches them.

    A leaf's last use stands where its gradient is complete and its hooks run.

    Args:
        results: Where the backward starts.
        ends: Tensors that pass for leaves although the graph goes on behind them.
        first_casts: Numbers of the first cast, by id of the leaf; see "Casts that a region shares".
    """
    by_node = {id(tensor.grad_fn): tensor for tensor in ends if tensor.grad_fn is not None}

    def leaf_of(node: Any) -> torch.Tensor | None:
        end = by_node.get(id(node))
        return end if end is not None else getattr(node, "variable", None)

    roots = {number: _root(result) for number, result in enumerate(results) if result.requires_grad}
    edges, missing, origins = _survey(roots, leaf_of)
    ready = _ReadyQueue(by_node, _numbers(edges, leaf_of, first_casts or {}))
    complete: dict[int, list[Use]] = {}
    uses: list[Use] = []

    def arrive(node: Any, use: Use | None) -> None:
        missing[id(node)] -= 1
        is_ready = missing[id(node)] == 0
        if use is not None and not is_ready:
            uses.append(use)
        elif use is not None:
            complete[id(node)] = [use]
        if is_ready:
            ready.push(node)

    for result, root in roots.items():
        leaf = leaf_of(root)
        arrive(root, None if leaf is None else Use(leaf, None, 0, (result,)))
    while ready:
        node = ready.pop()
        if id(node) in complete:
            uses += complete[id(node)]
        for number, following in enumerate(edges.get(id(node), ())):
            if following is not None:
                leaf = leaf_of(following)
                use = leaf if leaf is None else Use(leaf, node, number, _path(node, origins))
                arrive(following, use)
    return uses


def operator_at(path: Path, results: Sequence[torch.Tensor]) -> Any:
    """The operator at the end of ``path`` in the graph of ``results``; None if it ends before."""
    result, *numbers = path
    node = _root(results[result])
    try:
        for number in numbers:
            node = node.next_functions[number][0]
    except (AttributeError, IndexError):
        return None
    return node


def _root(result: torch.Tensor) -> Any:
    return get_gradient_edge(result).node


_Origins = dict[int, tuple[Any, int]]
"""By id of a node: the one from which it was reached first, and by which edge; for a root, None and
the number of its result."""


def _path(node: Any, origins: _Origins) -> Path:
    path = []
    while node is not None:
        node, number = origins[id(node)]
        path.append(number)
    return tuple(reversed(path))


def _survey(
    roots: Mapping[int, Any], leaf_of: Callable[[Any], torch.Tensor | None]
) -> tuple[dict[int, list[Any]], Counter[int], _Origins]:
    """What follows each node, how many gradients each waits for, and how each is reached.

    The lists hold all nodes but the roots, so that their ids stay theirs.
    """
    edges: dict[int, list[Any]] = {}
    missing = Counter(map(id, roots.values()))
    origins: _Origins = {}
    for result, root in roots.items():
        origins.setdefault(id(root), (None, result))
    queue = deque(roots.values())
    while queue:
        node = queue.popleft()
        if id(node) in edges or leaf_of(node) is not None:
            continue
        following = edges[id(node)] = [follower for follower, _ in node.next_functions]
        for number, follower in enumerate(following):
            if follower is not None:
                missing[id(follower)] += 1
                origins.setdefault(id(follower), (node, number))
                queue.append(follower)
    return edges, missing, origins


def _numbers(
    edges: Mapping[int, Sequence[Any]],
    leaf_of: Callable[[Any], torch.Tensor | None],
    first_casts: Mapping[int, int],
) -> dict[int, int]:
    """The numbers of casts made anew that a resident run would have made before, by node."""
    numbers = {}
    if first_casts:
        for node in {id(node): node for following in edges.values() for node in following}.values():
            if node is not None and node.name() == CAST and leaf_of(node) is None:
                leaf = leaf_of(node.next_functions[0][0])
                if id(leaf) in first_casts:
                    numbers[id(node)] = first_casts[id(leaf)]
    return numbers


_OF_LEAVES = 2**64 - 1
"""The number that the engine gives leaves: before all others."""


class _ReadyQueue:
    """The heap of the engine, step for step: of equals, its shape decides."""

    def __init__(self, leaves: Collection[int], numbers: Mapping[int, int]) -> None:
        self._heap: list[tuple[int, Any]] = []
        self._leaves = leaves
        self._numbers = numbers

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, node: Any) -> None:
        own = _OF_LEAVES if id(node) in self._leaves else node._sequence_nr()
        number = self._numbers.get(id(node), own)
        self._heap.append((number, node))
        self._rise(len(self._heap) - 1)

    def pop(self) -> Any:
        heap = self._heap
        top, last = heap[0], heap.pop()
        if heap:
            # The hole sinks to the bottom, past the larger child each; then the last one rises.
            hole = 0
            while (child := 2 * hole + 1) < len(heap):
                if child + 1 < len(heap) and heap[child + 1][0] >= heap[child][0]:
                    child += 1
                heap[hole] = heap[child]
                hole = child
            heap[hole] = last
            self._rise(hole)
        return top[1]

    def _rise(self, index: int) -> None:
        heap = self._heap
        item = heap[index]
        while index and heap[(index - 1) // 2][0] < item[0]:
            heap[index] = heap[(index - 1) // 2]
            index = (index - 1) // 2
        heap[index] = item
