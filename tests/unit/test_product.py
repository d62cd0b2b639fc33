"""One node for the product of a frozen module and what LoRA adds: the bits of two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poros.errors import RematerializationError
from poros.kernels.lazy_tensor import LazyTensor, values_of
from poros.kernels.lora import Added, add_lora, multiply_and_add
from poros.kernels.product import product_of
from tests.support import same_bits

SHAPE, ROWS, RANK = (2, 3, 8), 4, 2


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(SHAPE[-1], ROWS, bias=bias, dtype=dtype).requires_grad_(False)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def both(module: nn.Linear, dtype: torch.dtype, dropout: float, leaves_out: bool) -> list[Any]:
    """By one node, and by the module and ``add_lora``: the sum, its gradients, its values."""
    how = Added(0.7, dropout, torch.float32, rounds=True, keeps_dtype=False)
    found = []
    for is_one in (True, False):
        input = normal(*SHAPE, dtype=dtype).requires_grad_()
        a, b = normal(RANK, SHAPE[-1]).requires_grad_(), normal(ROWS, RANK).requires_grad_()
        torch.manual_seed(3)
        if is_one:
            product = product_of(module, input, leaves_out)
            assert product is not None
            sum_ = multiply_and_add(product, input, a, b, None, how, leaves_out=leaves_out)
        else:
            sum_ = add_lora(module(input), input, a, b, None, how)
        arriving = normal(*sum_.shape, dtype=sum_.dtype)
        # Another use before and after it, so that the order of the sum shows.
        total = (input * 3).sum() + (sum_ * arriving).sum() if not leaves_out else None
        if total is None:
            gradients = torch.autograd.grad(sum_, (input, b, a), arriving, retain_graph=True)
        else:
            gradients = torch.autograd.grad(total, (input, b, a))
        found.append((sum_, gradients))
    return found


@pytest.mark.parametrize("leaves_out", [False, True], ids=["formed", "left out"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_one_node_has_the_bits_of_two(
    bias: bool, dtype: torch.dtype, dropout: float, leaves_out: bool
) -> None:
    (found, ours), (expected, theirs) = both(linear(bias, dtype), dtype, dropout, leaves_out)
    assert all(map(same_bits, ours, theirs))
    assert isinstance(found, LazyTensor) == leaves_out
    assert not leaves_out or not found.is_formed
    assert same_bits(values_of(found).detach(), expected.detach())


def test_control_another_weight_is_noticed() -> None:
    module = linear()
    (found, ours), _ = both(module, torch.float32, 0.0, leaves_out=False)
    module.weight[0, 0] += 1
    _, (expected, theirs) = both(module, torch.float32, 0.0, leaves_out=False)
    assert not same_bits(found.detach(), expected.detach()) and not same_bits(ours[0], theirs[0])


def test_a_weight_written_to_before_backward_is_an_error() -> None:
    """As it is with plain torch."""
    module, input = linear(), normal(*SHAPE).requires_grad_()
    a, b = normal(RANK, SHAPE[-1]), normal(ROWS, RANK)
    product = product_of(module, input, leaves_out=False)
    assert product is not None
    how = Added(0.7, 0.0, torch.float32, rounds=True, keeps_dtype=False)
    sum_ = multiply_and_add(product, input, a, b, None, how)
    module.weight.mul_(2)
    with pytest.raises(RematerializationError, match="written to in place"):
        sum_.sum().backward()


def trained(module: nn.Module) -> None:
    module.requires_grad_(True)


def cast(module: nn.Module) -> None:
    module.bfloat16()


def trained_bias(module: nn.Linear) -> None:
    module.bias.requires_grad_(True)


@pytest.mark.parametrize("change", [trained, cast, trained_bias])
def test_what_is_not_certain_runs_as_it_is(change: Callable[[nn.Linear], None]) -> None:
    module = linear()
    assert product_of(module, torch.randn(SHAPE), leaves_out=True) is not None
    change(module)
    assert product_of(module, torch.randn(SHAPE), leaves_out=True) is None


def test_one_token_other_classes_and_autocast_run_as_they_are() -> None:
    module = linear()
    assert product_of(module, torch.randn(1, 1, SHAPE[-1]), leaves_out=True) is None
    assert product_of(nn.Identity(), torch.randn(SHAPE), leaves_out=True) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product_of(module, torch.randn(SHAPE), leaves_out=True) is None
