"""Memory for one dense weight at a time."""

import torch

from poros.kernels.dequantize import DenseWorkspace


def test_the_next_weight_takes_the_place_of_the_last() -> None:
    workspace = DenseWorkspace(4 * 6 * 2, torch.device("cpu"))
    first = workspace.take(torch.Size((4, 6)), torch.bfloat16)
    first.fill_(1)
    second = workspace.take(torch.Size((2, 3)), torch.float32)
    assert second.data_ptr() == first.data_ptr()
    second.fill_(2)
    assert not bool((first == 1).all())  # certain: nobody may keep one
    assert (second.shape, second.dtype, second.is_contiguous()) == ((2, 3), torch.float32, True)


def test_a_weight_that_is_too_large_has_memory_of_its_own() -> None:
    workspace = DenseWorkspace(4 * 6 * 2, torch.device("cpu"))
    first = workspace.take(torch.Size((4, 6)), torch.bfloat16).fill_(1)
    larger = workspace.take(torch.Size((4, 6)), torch.float32).fill_(2)
    assert bool((first == 1).all()) and larger.shape == (4, 6)
