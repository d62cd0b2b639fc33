"""Uses in the graph of a layer: those of casts, and what is refused. The others: tests/exact."""

from typing import Any

import pytest
import torch
from torch import nn

from poros.errors import RematerializationError, UnsupportedModelError
from poros.replay.routing import differentiate
from poros.replay.uses import Observation, Source, Uses, walk
from tests.loops import bf16

CPU = torch.device("cpu")


def graph() -> tuple[torch.Tensor, torch.Tensor, list[nn.Parameter]]:
    """A result, an input that is used twice, and parameters: of three uses, of one, of none."""
    given = torch.full((2, 2), 1.0, requires_grad=True) * 1
    one, other, idle = (nn.Parameter(torch.full((2, 2), 2.0)) for _ in range(3))
    hidden = given @ one + given * (one @ other)
    return hidden @ one, given, [one, other, idle]


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
    assert Uses(tuple(use.source for use in uses), (0, 1, 2), 1).has_meeting_casts


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


class OfFour(torch.autograd.Function):
    """One node of several parameters."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *[gradient.sum()] * 4


def test_parameters_of_one_node_have_the_order_that_autograd_took() -> None:
    """Which is not that of the node, if they are more than two."""
    parameters = [nn.Parameter(torch.ones(())) for _ in range(4)]
    given = torch.ones(3, requires_grad=True) * 1
    order: list[int] = []
    for number, each in enumerate(parameters, 1):
        each.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    result = OfFour.apply(given, *parameters)
    seen: list[Uses] = []
    uses = walk([result], [given], parameters, has_casts=False)
    observation = Observation(uses, 1, [result], CPU, lambda found, around: seen.append(found))
    result.sum().backward()
    found = [seen[0].sources[use].number for use in seen[0].order]
    assert [each for each in found if each] == order != sorted(order)
    del observation
