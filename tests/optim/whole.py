"""The matrix of a projection, which is never stored."""

import torch

from poros.optim.projection import Projection


def whole(made: Projection) -> torch.Tensor:
    """The matrix itself: every product is with 0 or 1."""
    return made.decompress(torch.eye(made.rank, device=made.quantiles.device))
