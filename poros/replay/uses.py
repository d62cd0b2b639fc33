"""Where the graph of a layer uses what it is given, and in which order their gradients arrive.

A resident run hands each adapter its gradient as soon as the last operator that uses it has been
differentiated, and adds the terms of what is used several times one by one, in the order in which
the operators come up. Hooks on parameters, which may draw noise, and the buckets of
DistributedDataParallel depend on the former, bits on the latter. So a layer whose visits are
replayed has to hand its gradients over in the same order, and has to know it beforehand: it is seen
in a backward of the graph that a forward of the same form has left (``Observation``).

Note: Casts
    Autocast makes one cast of a parameter in a region and keeps it, so the gradients of all its
    uses meet at that cast, in the low precision. A use through a cast therefore is one of the cast:
    ``Source.is_cast``.

Note: No strangers
    Nothing trainable may take part in a layer except through its inputs and its adapters: a
    recording would not hand on a gradient for anything else. The walk finds such a leaf.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from poros.errors import UnsupportedModelError
from poros.kernels.nodes import weakly
from poros.stream.settings import Surroundings

CAST = "ToCopyBackward0"


class Source(NamedTuple):
    """A tensor that a layer was given, or one of its trained parameters."""

    number: int
    """Among its tensors, then its parameters."""
    is_cast: bool = False
    """Whether it is autocast's cast of that parameter."""


class Use(NamedTuple):
    """One edge of a graph that ends in a source."""

    source: Source
    node: Any
    """The operator that uses it."""
    edge: int
    """Which of the gradients that the operator gives is the source's."""
    end: Any
    """The node that the edge leads to."""


class Around(NamedTuple):
    """What a backward ran under. Equal ones do the same work."""

    arriving: tuple[bool, ...]
    """Which results have a gradient."""
    surroundings: Surroundings


class Uses:
    """How one form of call of a layer uses its sources.

    Args:
        sources: The source of each use, in the order of ``walk``.
        order: The uses, as their gradients arrive. A source's last use stands where its gradient is
            complete and its hooks run.
        num_tensors: Sources of lower numbers are tensors that the layer was given.

    Attributes:
        by_source: The uses of each source, in the order in which the terms add up.
        several: Those of what is used more than once.
        single: For each of ``by_source``, its only use; None if there are several.
        of_tensors: The uses of each tensor.
        of_parameters: The number of each parameter that is used, and its uses.
        has_single_parameters: Whether each parameter is used once.
        has_meeting_casts: Whether gradients of a parameter meet in it, one of them at a cast.
    """

    def __init__(
        self, sources: tuple[Source, ...], order: tuple[int, ...], num_tensors: int
    ) -> None:
        self.sources = sources
        self.order = order
        self.by_source: dict[Source, list[int]] = {source: [] for source in sources}
        for use in order:
            self.by_source[sources[use]].append(use)
        found = self.by_source.items()
        self.several = {source: uses for source, uses in found if len(uses) > 1}
        self.single = [None if len(uses) > 1 else uses[0] for _, uses in found]
        self.of_tensors = [uses for source, uses in found if source.number < num_tensors]
        self.of_parameters = [
            (source.number - num_tensors, uses)
            for source, uses in found
            if source.number >= num_tensors
        ]
        self.has_single_parameters = all(len(uses) == 1 for _, uses in self.of_parameters)
        of_parameters = [source for source in sources if source.number >= num_tensors]
        counts = Counter(source.number for source in of_parameters)
        self.has_meeting_casts = any(
            source.is_cast and counts[source.number] > 1 for source in of_parameters
        )


def walk(
    results: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    has_casts: bool,
    first: int = 0,
) -> list[Use]:
    """All uses of sources in the graph of ``results``; in the same order in graphs of one form.

    Args:
        tensors: What the layer was given, whatever graph is behind it.
        parameters: Its trained parameters, or what stands in for them.
        has_casts: Whether a cast of a parameter is autocast's, which ends the graph of the layer.
        first: Nodes below this number are not of the layer.

    Raises:
        UnsupportedModelError: If something else is trained in it, or it returns what it was given.
    """
    ends = {}
    for number, each in enumerate((*tensors, *parameters)):
        if each.requires_grad:
            node, place = get_gradient_edge(each)[:2]
            ends[node, place] = Source(number)

    def source_of(node: Any, place: int) -> Source | None:
        source = ends.get((node, place))
        if source is None and has_casts and node.name() == CAST:
            behind = ends.get(node.next_functions[0])
            if behind is not None and behind.number >= len(tensors):
                source = Source(behind.number, is_cast=True)
        return source

    waiting: list[tuple[Any, int, Any, int]] = [
        (None, number, *get_gradient_edge(result)[:2])
        for number, result in enumerate(results)
        if result.requires_grad
    ]
    waiting.reverse()
    found: list[Use] = []
    seen = set()
    while waiting:
        user, edge, node, place = waiting.pop()
        source = source_of(node, place)
        if source is not None:
            if user is None:
                raise UnsupportedModelError("it returns a tensor that it was given")
            found.append(Use(source, user, edge, node))
        elif hasattr(node, "variable") or node._sequence_nr() < first:
            raise UnsupportedModelError("a tensor from elsewhere is trained in it")
        elif node not in seen:
            seen.add(node)
            following = [(node, n, *each) for n, each in enumerate(node.next_functions) if each[0]]
            waiting += reversed(following)
    return found


class Observation:
    """Sees one backward of the graph of one call, and tells what it has seen.

    It holds nothing of the graph, which holds it. A cast that was there before the call has its
    gradient when others want it, so a call with such a one shows nothing.

    Args:
        uses: Of the graph; their sources from ``num_tensors`` on are parameters.
        results: What the layer gave, on ``device``.
        learn: Is called once, when a backward has taken all gradients there are, with the uses and
            with what that backward ran under.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        num_tensors: int,
        results: Sequence[torch.Tensor],
        device: torch.device,
        learn: Callable[[Uses, Around], None],
    ) -> None:
        self._sources = tuple(each.source for each in uses)
        self._num_results, self._num_tensors = len(results), num_tensors
        self._device = device
        self._learn = learn
        self._task: int | None = None
        self._handles: dict[Source, Any] = {}
        self._begin()
        for number, result in enumerate(results):
            if result.requires_grad:
                node, place = get_gradient_edge(result)[:2]
                node.register_prehook(partial(self._arrived, number, place))
        of_nodes: dict[Any, list[int]] = {}
        for number, use in enumerate(uses):
            of_nodes.setdefault(use.node, []).append(number)
        for node, numbers in of_nodes.items():
            node.register_hook(partial(self._ran, numbers))
        # Nodes that outlive the graph: what is registered there goes with it.
        complete = weakly(self._complete)
        self._handles = {
            use.source: use.end.register_prehook(partial(complete, use.source))
            for use in {use.source: use for use in uses}.values()
            if use.source.number >= num_tensors
        }

    def __del__(self) -> None:
        for each in self._handles.values():
            each.remove()

    def _begin(self) -> None:
        """Forget what a backward before has shown: another one may take other gradients."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._events: list[Sequence[int] | Source] = []
            self._arriving: set[int] = set()

    def _arrived(self, number: int, place: int, gradients: Sequence[object]) -> None:
        self._begin()
        if gradients[place] is not None:
            self._arriving.add(number)

    def _ran(self, numbers: Sequence[int], *_: object) -> None:
        self._begin()
        self._events.append(numbers)
        self._tell()

    def _complete(self, source: Source, _: object) -> None:
        self._begin()
        self._events.append(source)
        self._tell()

    def _order(self, sources: Sequence[Source], last: Mapping[Source, int]) -> list[int] | None:
        """Uses in the order in which their gradients are taken; None if this does not show it.

        Autograd has a parameter take its gradient right behind its ``last`` use: of the parameters
        of one node, two in the node's order, more of them in any. If one took it later, it waited
        for the term of somebody else (of a penalty), who need not be there the next time.
        """
        order: list[int] = []
        for number, each in enumerate(self._events):
            if isinstance(each, Source):
                order += [last[each]] if each.is_cast else []
                continue
            waiting = {use for use in each if sources[use] in self._handles}
            waiting = {use for use in waiting if last[sources[use]] == use}
            ends = {use for use in waiting if not sources[use].is_cast}
            if len(ends) <= 2:
                order += [use for use in each if use in ends or use not in waiting]
                continue
            behind = takewhile(lambda event: isinstance(event, Source), self._events[number + 1 :])
            taken = [last[one] for one in behind if isinstance(one, Source) and not one.is_cast]
            if set(taken) != ends:
                return None
            order += [*(use for use in each if use not in waiting), *taken]
        return order

    def _tell(self) -> None:
        """Say it, as soon as it is all there."""
        groups = [each for each in self._events if not isinstance(each, Source)]
        num_seen = sum(map(len, groups)) + len(self._events) - len(groups)
        if num_seen < len(self._sources) + len(self._handles) or not self._sources:
            return
        self._sources, sources = (), self._sources
        order = self._order(sources, {sources[use]: use for use in chain.from_iterable(groups)})
        if order is None:
            return
        arriving = tuple(number in self._arriving for number in range(self._num_results))
        around = Around(arriving, Surroundings.capture(self._device))
        self._learn(Uses(sources, tuple(order), self._num_tensors), around)
