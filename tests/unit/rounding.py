"""Results and gradients of chains of products in float64, and how far rounding may be from them.

A sum of n products in a float format of unit roundoff u, each product and partial sum rounded, is
off by at most ``gamma(n)`` times the sum of the products' absolute values, in any order (Higham
2002, Accuracy and Stability of Numerical Algorithms, section 3.1). So what a chain of products
gives is off by at most ``gamma(depth)`` times what it gives of absolute values, depth being the
number of roundings on the longest way to an element. Its gradients are such chains, too.
"""

from collections.abc import Callable, Sequence

import torch

Tensors = Sequence[torch.Tensor]
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
Formula = Callable[..., Sequence[torch.Tensor]]
"""Of trained and frozen tensors: all that is added in it is added, or a number times a tensor."""


def gamma(n: int) -> float:
    """In float32."""
    unit = UNITS[torch.float32]
    return n * unit / (1 - n * unit)


def exact(
    formula: Formula, trained: Tensors, frozen: Tensors, arriving: Tensors
) -> list[torch.Tensor]:
    """In float64 the results, and the gradients of ``trained``."""
    leaves = [each.detach().double().requires_grad_() for each in trained]
    results = formula(*leaves, *(each.double() for each in frozen))
    gradients = torch.autograd.grad(results, leaves, [each.double() for each in arriving])
    return [*(each.detach() for each in results), *gradients]


def sizes(
    formula: Formula, trained: Tensors, frozen: Tensors, arriving: Tensors
) -> list[torch.Tensor]:
    """The same of absolute values."""
    given = [[each.detach().abs() for each in some] for some in (trained, frozen, arriving)]
    return exact(formula, *given)


def shares(found: Tensors, true: Tensors, bounds: Tensors) -> list[float]:
    """The largest error of each as a share of its bound; 0 where nothing is off."""
    errors = [
        (value.double().reshape(each.shape) - each).abs()
        for value, each in zip(found, true, strict=True)
    ]
    pairs = zip(errors, bounds, strict=True)
    return [float((error / bound.clamp_min(1e-300)).max()) for error, bound in pairs]
