"""Calls of one layer, one behind the other, of which the first was replayed: the others without it.

Micro-batches that share their passes call a layer in a row, with nobody's code in between. Looking
up what such a call is, making a node for it and having autograd run that node takes the host longer
than the device takes for the layer. So what the first of them has shown is used for the others:
each fills the memory of the recording, replays it, and copies what it gives.

Note: Without a node
    In backward the gradient of the input, and those of adapters, are what a node would have been
    asked for; they are added up here as autograd adds them: terms of the input in the order in
    which they arrive, then each adapter's gradient to its ``grad``, in place, or as its ``grad`` if
    there is none. Where somebody could see that no node has run, the node is made after all, and
    autograd runs it: hooks on adapters, nodes that accumulate gradients and that somebody holds
    (``DistributedDataParallel``), ranks that exchange gradients, a backward that is watched.

Exactness:
    Bits are those of calls that are replayed one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from poros.errors import RematerializationError
from poros.replay.call import LayerCall
from poros.replay.facts import CallFacts
from poros.replay.forms import Form, Replayed
from poros.replay.uses import Around, Source
from poros.slots.schedule import Phase
from poros.stream.body import LayerBody
from poros.stream.condition import Condition
from poros.stream.rng import RngStash

if TYPE_CHECKING:
    from poros.replay.captures import Captures

_GRAD: Any = torch._C.TensorBase.grad
_INPUT = Source(0)
_MARK = "poros: looked at"
NOT_DONE = False, None
"""Of ``RowVisit.differentiate``: a ``node`` is needed."""


class Row:
    """A call that was replayed, for others like it.

    Args:
        captures: Has replayed it.
        call: The call, with its tensors.
        form: Of it.
        facts: What is known of it.
        forward: Its recorded forward.
    """

    def __init__(
        self,
        captures: "Captures",
        call: LayerCall,
        form: Form,
        facts: CallFacts,
        forward: Replayed,
    ) -> None:
        self.captures, self.form, self.facts, self.forward = captures, form, facts, forward
        self.call = call.without_tensors()
        self._forms = [_form(each) for each in call.tensors]
        single = zip(facts.uses.given, facts.uses.single, strict=True)
        parameters = call.parameters
        self.adapters = [
            (parameters[source.number - len(self._forms)], use)
            for source, use in single
            if use is not None and source.number >= len(self._forms)
        ]
        self.terms = facts.uses.several.get(_INPUT) or [
            use
            for source, use in zip(facts.uses.given, facts.uses.single, strict=True)
            if use is not None and source == _INPUT
        ]
        self._condition: Condition | None = None
        self._backward: Replayed | None = None

    @classmethod
    def of(
        cls,
        captures: "Captures",
        call: LayerCall,
        form: Form,
        facts: CallFacts,
        forward: Replayed,
    ) -> "Row | None":
        """None if gradients have to find their way through the graph around such calls."""
        needs = [each.requires_grad for each in call.tensors]
        is_plain = (
            form.kind == "recomputed"
            and not facts.gives_casts
            and len(facts.forms) == 1
            and facts.forms[0][2]
            and needs == [number == 0 for number in range(len(needs))]
            and set(facts.uses.several) <= {_INPUT}
        )
        return cls(captures, call, form, facts, forward) if is_plain else None

    @property
    def layer(self) -> LayerBody:
        return self.call.layer

    def replay(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], start: RngStash
    ) -> "tuple[RowVisit, Any] | None":
        """Replay the forward of a call from the random states of now, ``start``.

        Args:
            args: Its arguments; the input, which comes first among their tensors, is of no graph.
            kwargs: Likewise.
            start: See above.

        Returns:
            The visit, for its backward, and the layer's result, without a graph; None if the call
            is not like the first one, and nothing has happened.

        Streams:
            See ``BlockVisit.occupy``.
        """
        call = self.call.again(args, kwargs, start)
        if call is None or [_form(each) for each in call.tensors] != self._forms:
            return None
        versions = [each._version for each in call.tensors]
        kept = call.offload_input()
        with call.layer.weights.occupy(Phase.FORWARD):
            results = self.forward.run(call.tensors, self.captures.memory)
        call.note_end()
        self.captures.num_replays += 1
        self.form.num_replays += 1
        visit = RowVisit(self, call, kept, versions[len(versions) - len(kept) :])
        return visit, self.facts.result_of(results)

    def backward(self) -> Replayed | None:
        """The recorded backward, if it may take the place of a node now."""
        # The same object says that nobody's code has run since.
        now = self.layer.condition()
        if now is not self._condition:
            self._condition, self._backward = now, self._find_backward()
        return self._backward

    def _find_backward(self) -> Replayed | None:
        found = self.form.backwards.get(Around.capture((True,), self.layer.device))
        is_usable = (
            found is not None
            and found.is_proved
            and self.form.is_there(self.call)
            and not self.call.is_seen()
            and not torch.is_anomaly_enabled()
            and all(_is_alone(each) for each, _ in self.adapters)
        )
        return found if is_usable else None


class RowVisit:
    """One call of a ``Row`` between its forward and its backward.

    Args:
        row: The row.
        call: The call, with its tensors.
        kept: Of its tensors, those that are kept here: its input may wait on the host.
        versions: Of these, at its forward.
    """

    def __init__(
        self, row: Row, call: LayerCall, kept: Sequence[torch.Tensor], versions: list[int]
    ) -> None:
        self._row, self._call, self._kept, self._versions = row, call, kept, versions
        call.tensors = ()

    def differentiate(self, gradient: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
        """Replay the backward, and add the gradients of adapters to theirs.

        Args:
            gradient: Of the layer's result.

        Returns:
            Whether that could be done, and the gradient of the input, if there is one.

        Raises:
            RematerializationError: If something of the call or of its layer has changed since.
        """
        row, call = self._row, self._call
        replayed = row.backward()
        if replayed is None:
            return NOT_DONE
        self._require_unwritten()
        call.require_unchanged()
        with torch.no_grad():
            with call.layer.weights.occupy(Phase.BACKWARD):
                tensors = call.with_input(self._kept)
                found = row.captures.replay_backward(call, replayed, tensors, [gradient])
            _accumulate([(each, found[use]) for each, use in row.adapters], gradient)
            terms = [each for each in (found[use] for use in row.terms) if each is not None]
            total = terms[0] if terms else None
            for each in terms[1:]:
                total = total + each
        call.offloaded = None
        row.captures.num_replays += 1
        return True, total

    def node(self, behind: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The edge behind a node for this call, as if its forward had made one.

        Args:
            behind: Gives the input, whose values are not read, its place in the graph.
        """
        self._require_unwritten()
        row, call = self._row, self._call
        given = behind(_without_values(*row.facts.specs[0], call.layer.device))
        call.tensors = [given, *self._kept[len(self._kept) - len(row.facts.specs) + 1 :]]
        result = _without_values(*row.facts.forms[0][:2], call.layer.device)
        with torch.enable_grad():
            output = row.captures.rematerialize(call, row.form, row.facts, [result], self._kept)
        return get_gradient_edge(output)

    def _require_unwritten(self) -> None:
        if [each._version for each in self._kept] != self._versions:
            raise RematerializationError(
                f"{self._call.layer.name}: its input or another tensor it was given was edited in "
                "place between forward and backward, so the forward cannot be recomputed; edit it "
                "after backward"
            )


def _without_values(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that takes no memory."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_alone(parameter: torch.Tensor) -> bool:
    """Whether nobody would notice that the gradient of ``parameter`` is added by hand.

    A node that accumulates gradients lives as long as somebody holds it, a graph or somebody who
    has hooks on it; a new one has no marks.
    """
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return False
    gradient = _GRAD.__get__(parameter)
    if gradient is not None and (type(gradient), *_form(gradient)) != (
        torch.Tensor,
        *_form(parameter),
    ):
        return False
    get_gradient_edge(parameter).node.metadata[_MARK] = True
    marks = get_gradient_edge(parameter).node.metadata
    return marks.pop(_MARK, None) is None and parameter.is_contiguous()


def _accumulate(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], arrived: torch.Tensor
) -> None:
    """Add gradients to those of parameters, as autograd does."""
    sums, terms = [], []
    # What somebody else has too is copied before it becomes a gradient, which is written to.
    shared = {id(arrived)}
    for parameter, term in pairs:
        if term is None:
            continue
        before = _GRAD.__get__(parameter)
        if before is None:
            _GRAD.__set__(parameter, term.clone() if id(term) in shared else term.detach())
            shared.add(id(term))
        else:
            sums.append(before)
            terms.append(term)
    if sums:
        torch._foreach_add_(sums, terms)
