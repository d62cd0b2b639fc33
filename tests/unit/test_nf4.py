"""What poros.kernels.nf4 says of a 4-bit weight is what bitsandbytes makes."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn

from poros.kernels import nf4
from poros.kernels.nf4 import Format, Parts
from poros.kernels.quantized import is_4bit, is_params4bit, is_plain, state_of
from tests.support import same_bits

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


def dequantized(weight: Any) -> torch.Tensor:
    return bnb.dequantize_4bit(weight.data, weight.quant_state)


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


def test_control_another_format_has_another_form() -> None:
    found = forms(nf4.parts_of(made_by_bitsandbytes(draw(300, 96), DOUBLE)))
    changes: tuple[Any, ...] = (
        {"double_quant": False},
        {"quant_storage": torch.float16},
        {"blocksize": 128},
    )
    for change in changes:
        assert forms(replace(DOUBLE, **change).form((300, 96))) != found
    assert forms(DOUBLE.form((300, 97))) != found


def test_the_constants_are_those_of_the_kernels() -> None:
    """Their checks, on shapes alone."""
    quantize, multiply = torch.ops.bitsandbytes.quantize_4bit, torch.ops.bitsandbytes.gemm_4bit
    weight, hidden = torch.empty(64, 64, device="meta"), torch.empty(1, 64, device="meta")

    def refuses(run: Any) -> bool:
        try:
            run()
        except Exception:
            return True
        return False

    def product(storage: torch.dtype) -> Any:
        parts = Format("nf4", False, storage).form((64, 64))
        return multiply(hidden, parts["packed"], (64, 64), parts["absmax"], 64, "nf4")

    sizes = [2**k for k in range(16)]
    kept = [n for n in sizes if not refuses(lambda n=n: quantize(weight, n, "nf4", torch.uint8))]
    assert tuple(kept) == nf4.BLOCKSIZES
    dtypes = [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    kept = [dtype for dtype in dtypes if not refuses(lambda dtype=dtype: product(dtype))]
    assert tuple(kept) == STORAGE_DTYPES
    assert bnb.QuantState.valid_quant_types == tuple(reversed(nf4.QUANT_TYPES))


@pytest.mark.parametrize("format", [SINGLE, DOUBLE], ids=["single", "double"])
@pytest.mark.parametrize("quant_type", nf4.QUANT_TYPES)
def test_the_parts_mean_what_is_said_of_them(quant_type: str, format: Format) -> None:
    """Bit for bit, dequantized by hand; and not with the halves of a byte exchanged.

    On rows of whole blocks: of others, bitsandbytes' kernel for CPUs takes some scales of others.
    """
    tensor = draw(300, 128)
    weight = made_by_bitsandbytes(
        tensor, Format(quant_type, format.double_quant, torch.uint8, format.blocksize)
    )
    parts = nf4.parts_of(weight)
    scales = parts["absmax"]
    if format.double_quant:
        nested = parts["nested_absmax"].repeat_interleave(nf4.NESTED_BLOCKSIZE)[: len(scales)]
        scales = parts["nested_code"][scales.int()] * nested + parts["offset"]
    scales = scales.repeat_interleave(format.blocksize)

    def values(*halves: torch.Tensor) -> torch.Tensor:
        indices = torch.stack(halves, dim=1).reshape(-1)
        return (parts["code"][indices.int()] * scales).view(300, 128)

    upper, lower = parts["packed"].view(-1) >> 4, parts["packed"].view(-1) & 15
    assert same_bits(values(upper, lower), dequantized(weight))
    assert not same_bits(values(lower, upper), dequantized(weight))


def test_without_a_state_the_weight_is_quantized_when_it_is_moved() -> None:
    tensor = draw(300, 96)
    planned = DOUBLE.weight(tensor, None, None)
    assert is_params4bit(planned) and not is_4bit(planned)
    moved = planned.to("cpu")
    expected = nf4.parts_of(made_by_bitsandbytes(tensor, DOUBLE))
    assert all(same_bits(piece, expected[part]) for part, piece in nf4.parts_of(moved).items())


def test_a_single_weight_is_rebound_without_nested_parts() -> None:
    weight = made_by_bitsandbytes(draw(8, 64), SINGLE)
    scales = weight.quant_state.absmax * 2
    assert same_bits(dequantized(nf4.rebound(weight, {"absmax": scales})), dequantized(weight) * 2)
    with pytest.raises(KeyError, match="offset"):
        nf4.rebound(weight, {"offset": torch.zeros(())})


def test_module_and_weight_are_kept_in_step() -> None:
    weight = made_by_bitsandbytes(draw(8, 64), DOUBLE)
    twin = copy.deepcopy(weight.module)
    assert twin.weight.module is not twin and twin.quant_state is not twin.weight.quant_state
    nf4.own(twin, twin.weight)
    assert twin.weight.module is twin and twin.quant_state is twin.weight.quant_state
    assert weight.module.quant_state is weight.quant_state


def test_what_is_a_4bit_weight() -> None:
    weight = made_by_bitsandbytes(draw(8, 64), DOUBLE)
    weight.module = None
    planned = Params4bit(draw(8, 64))
    dense = nn.Parameter(draw(8, 64), requires_grad=False)
    pickled = pickle.loads(pickle.dumps(weight))
    assert type(pickled) is nn.Parameter
    tests = (is_params4bit, is_4bit, is_plain, state_of)
    found = [[bool(test(kind)) for test in tests] for kind in (weight, planned, dense, pickled)]
    assert found == [
        [True, True, False, True],
        [True, False, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


@pytest.mark.parametrize("format", [SINGLE, DOUBLE], ids=["single", "double"])
def test_parts_by_name(format: Format) -> None:
    weight = made_by_bitsandbytes(draw(8, 64), format)
    found = nf4.part_tensors("w", weight, with_constants=True)
    names = ["w", *(f"w.{part}" for part in nf4.PARTS[format.double_quant][1:])]
    assert list(found) == names
    assert [piece.data_ptr() for piece in found.values()] == [
        piece.data_ptr() for piece in nf4.parts_of(weight).values()
    ]
    moving = nf4.part_tensors("w", weight)
    assert list(moving) == ["w", "w.absmax", "w.nested_absmax"][: 3 if format.double_quant else 2]
    assert list(nf4.part_tensors("w", nn.Parameter(draw(8, 64)), with_constants=True)) == ["w"]


@pytest.mark.parametrize(("num_rows", "streamed"), [(16384, False), (16385, True)])
def test_a_large_nested_absmax_streams(num_rows: int, streamed: bool) -> None:
    """One of up to 64 KiB stays, as constants do; packed bytes and absmax never do."""
    large, small = DOUBLE.form((num_rows, 16384)), DOUBLE.form((1, 32))
    always = {"packed", "absmax"}
    assert {part for part, piece in small.items() if nf4.streams(part, piece)} == always
    expected = always | ({"nested_absmax"} if streamed else set())
    assert {part for part, piece in large.items() if nf4.streams(part, piece)} == expected
