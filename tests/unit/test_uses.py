"""How the graph of a layer uses what it is given, and what a backward of it shows."""

from typing import Any

import pytest
import torch
from torch import nn

from poros.errors import RematerializationError, UnsupportedModelError
from poros.replay.routing import differentiate
from poros.replay.uses import Observation, Source, Uses, walk
from tests.snapshots import bf16

CPU = torch.device("cpu")


def graph(number: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[nn.Parameter]]:
    """A result, an input that is used twice, and parameters: of three uses, of one, of none."""
    given = torch.full((2, 2), 1.0 + number, requires_grad=True) * 1
    one, other, idle = (nn.Parameter(torch.full((2, 2), 2.0)) for _ in range(3))
    hidden = given @ one + given * (one @ other)
    return hidden @ one, given, [one, other, idle]


def observed(result: torch.Tensor, given: torch.Tensor, parameters: Any) -> list[Uses]:
    seen: list[Uses] = []
    uses = walk([result], [given], parameters, has_casts=False)
    Observation(uses, 1, [result], CPU, lambda found, around: seen.append(found))
    return seen


def test_a_whole_backward_shows_when_terms_are_added_and_gradients_complete() -> None:
    """The uses are found in the same order in graphs of one form."""
    result, given, parameters = graph(1)
    expected = [use.source for use in walk([result], [given], parameters, has_casts=False)]
    assert sorted(expected) == [Source(0)] * 2 + [Source(1)] * 3 + [Source(2)]
    result, given, parameters = graph()
    seen = observed(result, given, parameters)
    # One that takes some gradients shows nothing.
    torch.autograd.grad(result.sum(), parameters[1], retain_graph=True)
    torch.autograd.grad(result.sum(), given, retain_graph=True)
    assert seen == []
    arrived: list[int] = []
    for number, each in enumerate(parameters):
        each.register_post_accumulate_grad_hook(lambda _, n=number: arrived.append(n + 1))
    result.sum().backward()
    (uses,) = seen
    assert list(uses.sources) == expected
    numbers = [uses.sources[use].number for use in uses.order]
    assert sorted(numbers) == [0, 0, 1, 1, 1, 2]
    last = {number: place for place, number in enumerate(numbers) if number}
    assert sorted(last, key=last.__getitem__) == arrived
    assert {source.number: len(places) for source, places in uses.several.items()} == {0: 2, 1: 3}


def test_the_terms_of_a_gradient_are_those_that_autograd_adds() -> None:
    result, given, parameters = graph()
    seen = observed(result, given, parameters)
    result.sum().backward()
    result, _, parameters = graph()
    given = torch.ones(2, 2, requires_grad=True)
    one, other, _ = parameters
    result = (given @ one + given * (one @ other)) @ one
    found = differentiate(
        *("layers.0", [result], [torch.ones(2, 2)], [given], parameters, seen[0]),
        has_casts=False,
        through_casts=False,
        keeps_graph=True,
    )
    expected = torch.autograd.grad(result.sum(), [given, one, other])
    for number, gradient in enumerate(expected):
        total: Any = 0
        for use in seen[0].order:
            if seen[0].sources[use].number == number:
                total = total + found[use]
        assert torch.equal(total, gradient)


def test_uses_of_one_cast_end_at_it_whether_it_is_kept_or_not() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    given = torch.ones(2, 2, requires_grad=True)
    with bf16():
        kept = torch.matmul(torch.matmul(given, parameter), parameter)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        each = torch.matmul(torch.matmul(given, parameter), parameter)
    for result, ends in ((kept, 1), (each, 2)):
        uses = walk([result], [given], [parameter], has_casts=True)
        assert [use.source for use in uses].count(Source(1, is_cast=True)) == 2
        assert len({use.end for use in uses if use.source.is_cast}) == ends
    assert Uses(tuple(use.source for use in uses), (0, 1, 2)).has_meeting_casts(1)


def test_what_a_recording_would_lose_is_refused() -> None:
    result, given, parameters = graph()
    with pytest.raises(UnsupportedModelError, match="from elsewhere is trained"):
        walk([result], [given], parameters[:1], has_casts=False)
    with pytest.raises(UnsupportedModelError, match="returns a tensor that it was given"):
        walk([result, given], [given], parameters, has_casts=False)
    before = torch._C._autograd._get_sequence_nr()
    with pytest.raises(UnsupportedModelError, match="from elsewhere is trained"):
        walk([given * 2], [], [], has_casts=False, first=before)


def test_a_recomputation_with_other_uses_is_refused() -> None:
    leaf = torch.ones(2, requires_grad=True)
    seen: list[Uses] = []
    result = leaf * leaf
    uses = walk([result], [leaf], [], has_casts=False)
    Observation(uses, 1, [result], CPU, lambda found, around: seen.append(found))
    result.backward(torch.ones(2))
    for other in (leaf * 2, leaf.exp() * leaf + leaf):
        with pytest.raises(RematerializationError, match=r"layers\.0: .*\(2 times\), found other"):
            differentiate(
                *("layers.0", [other], [torch.ones(2)], [leaf], [], seen[0]),
                has_casts=False,
                through_casts=False,
            )
