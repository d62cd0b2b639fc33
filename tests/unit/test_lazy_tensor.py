"""Tensors without values: what is not computed, and what is refused.

That whatever reads one gets its values, and that sums wait, is seen in tests/exact.
"""

import pytest
import torch

from poros.errors import RematerializationError
from poros.kernels.lazy_tensor import LazyTensor, forget

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
