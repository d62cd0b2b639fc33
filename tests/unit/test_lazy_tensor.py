"""Tensors without values: computed when read, and only then, and never wrongly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poros.errors import RematerializationError
from poros.kernels.lazy_tensor import LazyTensor, forget, values_of
from tests.support import same_bits

SHAPE = (2, 3, 8)


def made(of: torch.Tensor | None = None) -> tuple[LazyTensor, torch.Tensor, list[int]]:
    """One that gives twice what it is made of; that; and how often it was computed."""
    source = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) if of is None else of
    computed: list[int] = []

    def form() -> torch.Tensor:
        computed.append(1)
        return source * 2

    return LazyTensor(SHAPE, source.dtype, source.device, form, [source]), source, computed


def test_sums_and_aliases_wait() -> None:
    tensor, source, computed = made()
    other = torch.ones(SHAPE)
    total = (other + (tensor.detach() + other)).detach()
    assert isinstance(total, LazyTensor) and not computed
    assert same_bits(values_of(total), other + (source * 2 + other))
    assert computed == [1] and tensor.is_formed
    # Sums with one that is there by now go on waiting for the other one.
    second, _, _ = made()
    assert not (total + second).is_formed  # type: ignore[attr-defined]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a product": lambda tensor: tensor * 3,
    "a sum of other shapes": lambda tensor: tensor + torch.ones(8),
    "a weighted sum": lambda tensor: torch.add(tensor, torch.ones(SHAPE), alpha=2),
    "a norm": lambda tensor: nn.functional.layer_norm(tensor, (8,)),
    "a view": lambda tensor: tensor.view(6, 8) @ torch.ones(8, 2),
    "a choice": lambda tensor: torch.where(tensor > 0, tensor, 0.0),
    "a number": lambda tensor: torch.tensor(tensor.sum().item()),
    "its writing": lambda tensor: tensor.mul_(3),
    "a sum in place": lambda tensor: tensor.add_(1),
    "a part of it in place": lambda tensor: (tensor[:, -1].add_(1), tensor.detach())[1],
}


@pytest.mark.parametrize("read", READS)
def test_what_reads_gets_the_values(read: str) -> None:
    tensor, source, computed = made()
    found = READS[read](tensor)
    assert same_bits(values_of(found), READS[read](source * 2))
    assert computed == [1]


def test_what_is_over_cannot_be_read() -> None:
    tensor, _, computed = made()
    total = tensor + torch.ones(SHAPE)
    forget([tensor, total, torch.ones(1)])
    for each in (tensor, total):
        with pytest.raises(RematerializationError, match="a use of it afterwards"):
            each * 2
    assert not computed


def test_a_source_that_was_written_to_is_found() -> None:
    tensor, source, _ = made()
    residual = torch.ones(SHAPE)
    total = tensor + residual
    residual.add_(1)
    with pytest.raises(RematerializationError, match="written to"):
        total * 2
    source.add_(1)
    with pytest.raises(RematerializationError, match="written to"):
        tensor * 2


def test_an_operand_that_was_written_to_is_found() -> None:
    tensor, _, _ = made()
    total = tensor + torch.ones(SHAPE)
    tensor.mul_(10)
    with pytest.raises(RematerializationError, match="written to"):
        total * 2


def test_gradients_need_no_values() -> None:
    _, source, computed = made()
    leaf = source.requires_grad_()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
            return made(input)[0]

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 2

    total = leaf + Twice.apply(leaf)
    assert isinstance(total, LazyTensor)
    (gradient,) = torch.autograd.grad(total, leaf, torch.ones(SHAPE))
    assert same_bits(gradient, torch.full(SHAPE, 3.0)) and not computed
