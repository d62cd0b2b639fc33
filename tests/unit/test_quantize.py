"""Quantizing in pieces gives the bytes of quantizing at once, and refuses what is no weight."""

from itertools import product
from typing import Any, NamedTuple

import bitsandbytes.functional as bnb
import pytest
import torch

from poros.errors import CheckpointFormatError
from poros.kernels.nf4 import Format, streams
from poros.loaders.quantize import Quantizer
from tests.support import same_bits

CPU = torch.device("cpu")
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Result(NamedTuple):
    packed: torch.Tensor
    state: Any

    def parts(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, on the host."""
        state = self.state
        found = {"packed": self.packed, "absmax": state.absmax, "code": state.code}
        if state.nested:
            found |= {"offset": state.offset, "nested_absmax": state.state2.absmax}
            found["nested_code"] = state.state2.code
        return {name: part.cpu() for name, part in found.items()}


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Weights whose blocks differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[:1] + (1,) * (len(shape) - 1), generator=generator) + 0.1
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def at_once(tensor: torch.Tensor, **options: Any) -> Result:
    """What bitsandbytes makes of the whole tensor."""
    settings = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4", **options}
    return Result(*bnb.quantize_4bit(tensor.contiguous(), **settings))


def in_pieces(
    tensor: torch.Tensor,
    *,
    quant_type: str = "nf4",
    blocksize: int = 64,
    double_quant: bool = True,
    num_blocks: int = 3,
    quantizer: Quantizer | None = None,
) -> Result:
    """What the quantizer makes of it, in pieces of a few blocks."""
    format = Format(quant_type, double_quant, torch.uint8, blocksize)
    # Poisoned, so that bytes that are not written are seen.
    form = format.form(tensor.shape).items()
    targets = {part: torch.full_like(planned, 77, device=CPU) for part, planned in form}
    quantizer = quantizer or Quantizer(
        CPU, chunk_num_bytes=num_blocks * blocksize * tensor.element_size()
    )
    state = quantizer.quantize_into(tensor, where="w", format=format, targets=targets)
    quantizer.flush()
    assert state.absmax is targets["absmax"]
    assert not double_quant or state.state2.absmax is targets["nested_absmax"]
    return Result(targets["packed"], state)


def differences(left: Result, right: Result) -> list[str]:
    """Names of the parts and properties in which two results differ."""
    ours, theirs = left.parts(), right.parts()
    found = sorted(ours.keys() ^ theirs.keys())
    both = ours.keys() & theirs.keys()
    found += [name for name in both if not same_bits(ours[name], theirs[name])]
    states = (left.state, right.state, ""), (left.state.state2, right.state.state2, "state2.")
    for name, (one, other, where) in product(
        ("shape", "dtype", "blocksize", "quant_type", "nested"), states
    ):
        if getattr(one, name, None) != getattr(other, name, None):
            found.append(where + name)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("double_quant", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_pieces_give_the_bytes_of_the_whole(
    quant_type: str, double_quant: bool, blocksize: int, dtype: torch.dtype, device: str
) -> None:
    """For every format of bitsandbytes, at a size that is no multiple of a piece or a block."""
    tensor = draw(61, 7 * blocksize // 8 + 3, dtype=dtype)
    assert tensor.numel() % blocksize and tensor.numel() > 6 * blocksize
    piece = 3 * blocksize * tensor.element_size()
    quantizer = Quantizer(torch.device(device), chunk_num_bytes=piece)
    how: dict[str, Any] = {"quant_type": quant_type, "blocksize": blocksize}
    mine = in_pieces(tensor, double_quant=double_quant, quantizer=quantizer, **how)
    whole = at_once(tensor.to(device), compress_statistics=double_quant, **how)
    assert differences(mine, whole) == []


WEIGHTS: dict[str, torch.Tensor] = {
    # The absmax of all pieces together are quantized, across borders of 256.
    "two nested blocks": draw(300, 96),
    "transposed, as in Conv1D": draw(96, 50).T,
    "a zero block": draw(40, 64).index_fill(0, torch.tensor(7), 0),
    "odd": draw(7, 9),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_other_weights(case: str) -> None:
    """Other dtypes to store in: ``loading/test_loading``."""
    tensor = WEIGHTS[case]
    mine = in_pieces(tensor, num_blocks=5)
    assert tensor.is_contiguous() == ("transposed" not in case)
    assert mine.state.state2.absmax.numel() == 1 + (case == "two nested blocks")
    assert differences(mine, at_once(tensor)) == []


@pytest.mark.parametrize(("num_rows", "streamed"), [(16384, False), (16385, True)])
def test_a_large_nested_absmax_streams(num_rows: int, streamed: bool) -> None:
    """One of up to 64 KiB stays, as constants do; packed bytes and absmax never do."""
    double = Format("nf4", True, torch.uint8)
    for shape, more in (
        ((num_rows, 16384), {"nested_absmax"} if streamed else set()),
        ((1, 32), set()),
    ):
        streaming = {part for part, piece in double.form(shape).items() if streams(part, piece)}
        assert streaming == {"packed", "absmax"} | more


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [0, 5000, -1])
def test_nonfinite_weights_are_refused(value: float, index: int, device: str) -> None:
    """Wherever they are, by name; on a GPU bitsandbytes' own scales do not show a NaN."""
    tensor = draw(61, 96)
    tensor.view(-1)[index] = value
    quantizer = Quantizer(torch.device(device), chunk_num_bytes=1024)
    with pytest.raises(CheckpointFormatError, match=r"^w: expected finite weights"):
        in_pieces(tensor, quantizer=quantizer)


@pytest.mark.parametrize("device", DEVICES)
def test_one_quantizer_for_all_tensors(device: str) -> None:
    """Of several sizes and dtypes; on a GPU with the memory of the pieces before."""
    tensors = [draw(61, 96), draw(10, 64, dtype=torch.float32, seed=1), draw(200, 50, seed=2)]
    quantizer = Quantizer(torch.device(device), chunk_num_bytes=512)
    for tensor in tensors * 3:
        expected = at_once(tensor.to(device))
        assert differences(in_pieces(tensor, quantizer=quantizer), expected) == []


@pytest.mark.gpu
def test_bytes_are_in_their_place_however_late_the_device_is() -> None:
    """Behind kernels that take a while; the memory of a piece is used again only after them."""
    quantizer = Quantizer(torch.device("cuda"), chunk_num_bytes=1 << 16)
    tensor = draw(1000, 512)
    expected = at_once(tensor.cuda())
    for _ in range(3):
        torch.cuda._sleep(200_000_000)
        assert differences(in_pieces(tensor, quantizer=quantizer), expected) == []


@pytest.mark.gpu
def test_the_high_water_mark() -> None:
    """At most 100 MB for the largest projection of a 72B model, from another stream too."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = draw(29568, 8192)
    whole = at_once(tensor.to(device))
    expected = Result(whole.packed.cpu(), whole.state)
    del whole
    expected.state.to("cpu")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(torch.cuda.Stream()):
        mine = in_pieces(tensor, quantizer=Quantizer(device))
    assert torch.cuda.max_memory_allocated() - before <= 100e6
    assert differences(mine, expected) == []
