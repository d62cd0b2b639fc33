"""Grouped adapters: elementwise error bounds, and a result left out."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import nn

from poros.errors import RematerializationError
from poros.kernels.grouped import Projection, project
from poros.kernels.lazy_tensor import LazyTensor, forget
from poros.kernels.product import product_of
from poros.kernels.swiglu import forget_sources, swiglu
from tests.support import same_bits
from tests.unit.rounding import UNITS, exact, gamma, shares, sizes

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
COLUMNS, TOKENS = 96, 40
ROWS, RANKS = (64, 32, 48), (8, 4, 16)
SCALINGS = (2.0, 1.0 / 3.0, 1.0)


def normal(*sizes: int, seed: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=FP64)


class Case(NamedTuple):
    """Projections of one input, and what arrives at their results."""

    input: torch.Tensor
    modules: Sequence[nn.Linear]
    all_a: Sequence[torch.Tensor]
    all_b: Sequence[torch.Tensor]
    scalings: Sequence[float]
    arriving: Sequence[torch.Tensor]

    @classmethod
    def random(
        cls, dtype: torch.dtype, rows: Sequence[int] = ROWS, columns: int = COLUMNS
    ) -> "Case":
        def of(kind: torch.dtype, *sizes: int, seed: int) -> torch.Tensor:
            return normal(*sizes, seed=seed).to(kind)

        modules = []
        for place, number in enumerate(rows):
            module = nn.Linear(columns, number, bias=False, dtype=dtype)
            module.weight.data = of(dtype, number, columns, seed=place) / columns**0.5
            modules.append(module.requires_grad_(False))
        ranks = RANKS[: len(rows)]
        pairs = list(enumerate(zip(rows, ranks, strict=True)))
        return cls(
            of(dtype, 2, TOKENS // 2, columns, seed=10),
            modules,
            [of(dtype, r, columns, seed=20 + n) / columns**0.5 for n, (_, r) in pairs],
            [of(dtype, o, r, seed=30 + n) for n, (o, r) in pairs],
            SCALINGS[: len(rows)],
            [of(dtype, 2, TOKENS // 2, o, seed=50 + n) for n, (o, _) in pairs],
        )

    def projections(self) -> list[Projection]:
        found = []
        for place, module in enumerate(self.modules):
            a, b = self.all_a[place], self.all_b[place]
            product = product_of(module, self.input)
            assert product is not None
            found.append(Projection(product, a, b, self.scalings[place]))
        return found

    def trained(self) -> list[torch.Tensor]:
        """The input, and A and B of each projection in turn."""
        two = zip(self.all_a, self.all_b, strict=True)
        return [self.input, *(each for these in two for each in these)]

    def run(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results, and the gradients of ``trained``."""
        leaves = [each.detach().requires_grad_() for each in self.trained()]
        case = self.with_trained(leaves)
        results = project(case.projections(), case.input)
        gradients = torch.autograd.grad(results, leaves, self.arriving)
        return [each.detach() for each in results], list(gradients)

    def with_trained(self, leaves: Sequence[torch.Tensor]) -> "Case":
        input, *others = leaves
        return self._replace(input=input, all_a=others[::2], all_b=others[1::2])

    def shares(
        self, results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> tuple[list[float], list[float]]:
        """The largest error of each result and of each gradient as a share of its bound.

        On the way to a result three products and a sum are rounded to the dtype. The gradient of
        the input is written once for each projection and once for the adapters, behind two
        products.
        """
        number, unit = len(self.modules), UNITS[self.input.dtype]
        weights = [each.weight for each in self.modules]
        given = self.trained(), [*weights, torch.tensor(self.scalings)], self.arriving
        true, absolute = exact(formula, *given), sizes(formula, *given)
        depth = TOKENS + sum(map(sum, (each.shape for each in weights))) + sum(RANKS) + number + 4
        off = [(1 + unit) ** n * (1 + gamma(depth)) - 1 for n in (4, number + 4)]
        return (
            shares(results, true[:number], [off[0] * each for each in absolute[:number]]),
            shares(gradients, true[number:], [off[1] * each for each in absolute[number:]]),
        )


def formula(input: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Of the input, A and B of each projection in turn, their weights, and their scalings."""
    *tensors, scalings = others
    number = len(tensors) // 3
    all_a, all_b, weights = (
        tensors[: 2 * number : 2],
        tensors[1 : 2 * number : 2],
        tensors[-number:],
    )
    return [
        input @ weight.T + s * (input @ a.T @ b.T)
        for weight, a, b, s in zip(weights, all_a, all_b, scalings, strict=True)
    ]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_results_and_gradients_are_within_their_bounds(dtype: torch.dtype) -> None:
    case = Case.random(dtype)
    results, gradients = case.run()
    assert [each.dtype for each in (*results, *gradients)] == [dtype] * 10
    assert all(max(each) <= 1 for each in case.shares(results, gradients))


def test_control_a_wrong_scale_is_out_of_the_bounds() -> None:
    case = Case.random(FP32)
    off = case._replace(scalings=[each * (1 + 2.0**-6) for each in case.scalings])
    of_results, of_gradients = case.shares(*off.run())
    assert min(of_results) > 1 and min(of_gradients) > 1


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_is_left_out_is_computed_of_gate_and_up(dtype: torch.dtype) -> None:
    case = Case.random(dtype, rows=(64, 64))
    behind = Case.random(dtype, rows=(32,), columns=64)
    leaves = [each.detach().requires_grad_() for each in (*case.trained(), *behind.trained()[1:])]
    case = case.with_trained(leaves[:5])
    behind = behind._replace(all_a=[leaves[5]], all_b=[leaves[6]])
    gate, up = case.projections()
    (down,) = behind.projections()
    found = []
    for leaves_out in (False, True):
        torch.manual_seed(3)
        product = swiglu(*project([gate, up], case.input))
        (result,) = project([down], product, leaves_out=leaves_out)
        assert isinstance(result, LazyTensor) == leaves_out
        forget_sources(product)
        del product
        result = result + 0  # reads it
        gradients = torch.autograd.grad(result, leaves, behind.arriving[0])
        found.append([result.detach(), *gradients, torch.get_rng_state()])
    assert all(map(same_bits, *found))


# Results without values: what is not computed, and what is refused. Others: tests/exact.

SHAPE = (2, 3, 8)


def made(of: torch.Tensor | None = None) -> tuple[LazyTensor, torch.Tensor, list[int]]:
    """One that gives twice what it is made of; that; and how often it was computed."""
    source = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) if of is None else of
    computed: list[int] = []

    def form() -> torch.Tensor:
        computed.append(1)
        return source * 2

    return LazyTensor(SHAPE, source.dtype, source.device, form, [source]), source, computed


def test_what_is_over_cannot_be_read() -> None:
    tensor, _, computed = made()
    total = tensor + torch.ones(SHAPE)
    forget([tensor, total, torch.ones(1)])
    for each in (tensor, total):
        with pytest.raises(RematerializationError, match="a use of it afterwards"):
            each * 2
    assert not computed


def test_a_source_or_operand_that_was_written_to_is_found() -> None:
    tensor, source, _ = made()
    residual, (other, *_) = torch.ones(SHAPE), made()
    total, of_other = tensor + residual, other + torch.ones(SHAPE)
    for written, reading in ((residual, total), (source, tensor), (other, of_other)):
        written.add_(1)
        with pytest.raises(RematerializationError, match="written to"):
            reading * 2
