"""Projections of one input with adapters, beside float64: results and gradients, and error bounds.

The bounds are those that ``poros.kernels.grouped`` derives; ``gradient_shares`` has the same for
gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from poros.kernels.grouped import Projection, project
from poros.kernels.product import product_of

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
UNIT = {BF16: 2.0**-8, FP32: 2.0**-24}
SUMS_UNIT = 2.0**-24
"""Of the float32 in which products of both add up."""
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
        cls,
        dtype: torch.dtype,
        rows: Sequence[int] = ROWS,
        columns: int = COLUMNS,
        base_bias: bool = False,
    ) -> "Case":
        def of(kind: torch.dtype, *sizes: int, seed: int) -> torch.Tensor:
            return normal(*sizes, seed=seed).to(kind)

        modules = []
        for place, number in enumerate(rows):
            module = nn.Linear(columns, number, bias=base_bias, dtype=dtype)
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
            product = product_of(module, self.input, leaves_out=True)
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


def gamma(n: int, unit: float = SUMS_UNIT) -> float:
    return n * unit / (1 - n * unit)


def result_shares(case: Case, results: Sequence[torch.Tensor]) -> list[float]:
    """The largest error of each result as a share of its bound."""
    shares = []
    x = case.input.double().flatten(0, -2)
    u = UNIT[case.input.dtype]
    for place, module in enumerate(case.modules):
        w, s = module.weight.double(), case.scalings[place]
        a, b = case.all_a[place].double(), case.all_b[place].double()
        y, added = x @ w.T, s * x @ a.T @ b.T
        found = results[place].double().flatten(0, -2)
        first = (2 * u + u**2) * abs(s) * (x @ a.T).abs() @ b.abs().T + u * (y.abs() + found.abs())
        sums = x.abs() @ w.abs().T + abs(s) * x.abs() @ a.abs().T @ b.abs().T
        bound = first + (1 + u) ** 2 * gamma(x.shape[1] + a.shape[0] + 3) * sums
        shares.append(float(((found - y - added).abs() / bound).max()))
    return shares


def gradient_shares(case: Case, gradients: Sequence[torch.Tensor]) -> list[float]:
    """Likewise of the gradients: with the absolute values of all that is multiplied.

    Of two products in a row each is rounded once; the gradient of the input is written once for
    each projection, and once for the adapters.
    """
    shares = []
    x = case.input.double().flatten(0, -2)
    u, number = UNIT[case.input.dtype], len(case.modules)
    exact_input, size_input = torch.zeros_like(x), torch.zeros_like(x)
    pairs = []
    for place, module in enumerate(case.modules):
        w, s = module.weight.double(), case.scalings[place]
        a, b = case.all_a[place].double(), case.all_b[place].double()
        g = case.arriving[place].double().flatten(0, -2)
        exact_input += g @ w + s * g @ b @ a
        size_input += g.abs() @ w.abs() + abs(s) * g.abs() @ b.abs() @ a.abs()
        depth = gamma(len(x) + max(w.shape) + 4)
        off = 2 * u + u**2 + (1 + u) ** 2 * depth
        size = abs(s) * b.abs().T @ g.abs().T @ x.abs()
        pairs.append((s * b.T @ g.T @ x, off * size))
        size = abs(s) * g.abs().T @ x.abs() @ a.abs().T
        pairs.append((s * g.T @ x @ a.T, off * size))
    writes = number + 2
    deep = gamma(sum(len(module.weight) for module in case.modules) + sum(RANKS) + writes)
    pairs.insert(0, (exact_input, ((1 + u) ** writes * (1 + deep) - 1) * size_input))
    for found, (exact, bound) in zip(gradients, pairs, strict=True):
        error = (found.double().reshape(exact.shape) - exact).abs()
        shares.append(float((error / bound).max()))
    return shares


def exact_case(dtype: torch.dtype) -> Case:
    """Small powers of two over a base of zeros: whatever is computed is exact, and none cancels."""
    case = Case.random(dtype, rows=ROWS[:1], columns=8)

    def powers(like: torch.Tensor, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        values = 2.0 ** torch.randint(0, 2, like.shape, generator=generator)
        return values.to(like)

    case.modules[0].weight.data.zero_()
    return case._replace(
        input=powers(case.input, 1)[..., :8],
        all_a=[torch.eye(8).to(case.all_a[0])],
        all_b=[torch.eye(8).repeat(8, 1).to(case.all_b[0])],
        scalings=(1.0,),
    )
