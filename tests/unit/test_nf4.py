"""What poros.kernels.nf4 says of a 4-bit weight is what bitsandbytes makes."""

from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit

from poros.kernels import nf4
from poros.kernels.nf4 import Format, Parts

SHAPES = [(8, 64), (24, 40), (300, 96), (1, 32), (2, 4, 40)]
ODD = [(3, 5), (7, 9)]
STORAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
"""What packed bytes may pass for: those that bitsandbytes multiplies by."""

SINGLE, DOUBLE = Format("nf4", False, torch.uint8), Format("nf4", True, torch.uint8)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Weights whose blocks differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[:1] + (1,) * (len(shape) - 1), generator=generator) + 0.1
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def made_by_bitsandbytes(tensor: torch.Tensor, format: Format) -> Any:
    """The weight as bitsandbytes quantizes it."""
    linear = Linear4bit(1, 1, bias=False, quant_type=format.quant_type)
    linear.weight = Params4bit(
        tensor,
        requires_grad=False,
        blocksize=format.blocksize,
        compress_statistics=format.double_quant,
        quant_type=format.quant_type,
        quant_storage=format.quant_storage,
        module=linear,
    )
    return linear.to("cpu").weight


def forms(parts: Parts) -> dict[str, Any]:
    return {part: (piece.shape, piece.dtype) for part, piece in parts.items()}


@pytest.mark.parametrize("storage", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("double_quant", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("blocksize", nf4.BLOCKSIZES)
def test_the_form_is_that_of_bitsandbytes(
    blocksize: int, double_quant: bool, storage: torch.dtype
) -> None:
    format = Format("nf4", double_quant, storage, blocksize)
    for shape in SHAPES + (ODD if storage == torch.uint8 else []):
        weight = made_by_bitsandbytes(draw(*shape), format)
        form = format.form(shape)
        assert all(piece.is_meta for piece in form.values())
        assert forms(form) == forms(nf4.parts_of(weight))
        assert tuple(form) == tuple(nf4.parts_of(weight)) == nf4.PARTS[double_quant]
        assert Format.of(weight) == format


@pytest.mark.parametrize(("num_rows", "streamed"), [(16384, False), (16385, True)])
def test_a_large_nested_absmax_streams(num_rows: int, streamed: bool) -> None:
    """One of up to 64 KiB stays, as constants do; packed bytes and absmax never do."""
    large, small = DOUBLE.form((num_rows, 16384)), DOUBLE.form((1, 32))
    always = {"packed", "absmax"}
    assert {part for part, piece in small.items() if nf4.streams(part, piece)} == always
    expected = always | ({"nested_absmax"} if streamed else set())
    assert {part for part, piece in large.items() if nf4.streams(part, piece)} == expected
