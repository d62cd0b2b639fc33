"""Kernels in Triton's interpreter, against their references; and references against libraries.

The interpreter rounds float32 as a GPU does, but not bfloat16: that is for a GPU.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from poros.kernels.dense_memory import DenseWorkspace
from poros.kernels.dequantize import dequantize, dequantize_ref, has_kernel
from poros.kernels.online_softmax import OnlineSoftmaxState, add_logits_ref
from tests.support import interpreted
from tests.unit.rounding import UNITS

T, V, H, WIDTH = 5, 300, 70, 128
FP32 = torch.float32
U = UNITS[FP32]


def kernels_of(name: str, device: str) -> Any:
    module = f"poros.kernels.{name}_gpu"
    return interpreted(module) if device == "cpu" else import_module(module)


on_both = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", FP32), *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in UNITS)],
    ids=str,
)


@pytest.mark.parametrize("sizes", [(1,), (4096, 1, 5000), (3,) * 9, (2048, 0, 64)], ids=str)
def test_copies(sizes: Sequence[int]) -> None:
    copies_gpu = interpreted("poros.kernels.copies_gpu")
    sources = [torch.randn(size) for size in sizes]
    places = [torch.full_like(each, -7.0) for each in sources]
    beyond = places[-1].new_full((16,), -7.0)
    copies_gpu.copy([*zip(places, sources, strict=True), (beyond[:8], torch.ones(8))])
    assert all(map(torch.equal, places, sources)) and beyond.tolist() == [1.0] * 8 + [-7.0] * 8


@pytest.mark.parametrize("columns", [1, 6, 7, 1030])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_a_matrix(columns: int, dtype: torch.dtype) -> None:
    gather_gpu = interpreted("poros.kernels.gather_gpu")
    matrix = torch.randn(20, columns).to(dtype)
    matrix[3] = float("nan")
    indices = torch.tensor([3, 19, 0, 3], dtype=torch.int32)
    both = torch.zeros(5, columns, dtype=dtype)
    gather_gpu.gather(matrix, indices, both[:4])
    assert torch.equal(bits(both[:4]), bits(matrix[indices])) and not both[4].any()
    for index in (20, -1):
        with pytest.raises(RuntimeError, match=r"expected indices of rows .* below 20"):
            gather_gpu.gather(matrix, torch.tensor([index]), both[:1])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


LABELS = torch.tensor([0, 127, 128, 299, -100])
LOGITS = 4 * torch.randn(T, V, generator=torch.Generator().manual_seed(1))
SLOPES = {"one": 1.0, "a number": 0.25, "of each": torch.tanh(LOGITS)}


def part_of(values: torch.Tensor | float, first: int, device: str) -> torch.Tensor | float:
    is_tensor = isinstance(values, torch.Tensor)
    return values[:, first : first + WIDTH].clone().to(device) if is_tensor else values


@pytest.mark.cover("pairs")
@on_both
@pytest.mark.parametrize("masked", [[], [3], range(V // 2)], ids=["none", "one", "a slice"])
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("wanted", [True, False], ids=["rows", "no rows"])
def test_online_softmax(
    device: str,
    dtype: torch.dtype,
    masked: Sequence[int],
    slope: str,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As near as exponentials and the order of sums allow; what is only copied is equal."""
    gpu = kernels_of("online_softmax", device)
    monkeypatch.setattr(gpu, "_WIDTH", 64)  # several times
    logits = LOGITS.clone()
    logits[:, list(masked)] = float("-inf")
    head = torch.randn(V, H, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    labels = LABELS.to(device)
    ours, reference = (OnlineSoftmaxState.of(labels, H * wanted, dtype) for _ in range(2))
    for first in range(0, V, WIDTH):
        given, slopes = (part_of(each, first, device) for each in (logits, SLOPES[slope]))
        rows = head[first : first + WIDTH]
        found = gpu.launch(ours, H * wanted, first, given, slopes, rows)
        expected = add_logits_ref(reference, first, given.clone(), slopes, rows)
        assert (found is None) == (expected is None) == (not wanted)
        if found is not None and expected is not None:
            # Each exponential is good to a few roundoffs of its own size, by either device's.
            rtol = 32 * U + 2 * UNITS[dtype]
            atol = 2.0**-24  # where the exponents of float16 end
            torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
            ours.rows.addmm_(expected.float(), rows.float())
            reference.rows.addmm_(expected.float(), rows.float())
    for name in ("most", "of_label", "slope", "label_rows"):
        assert torch.equal(getattr(ours, name), getattr(reference, name)), name
    torch.testing.assert_close(ours.total, reference.total, rtol=(V + 16) * U, atol=0.0)
    exact = torch.logsumexp(logits.double(), 1)
    assert bool(((ours.total.log() + ours.most).double().cpu() - exact).abs().max() < 1e-5)
    if wanted:
        torch.testing.assert_close(ours.rows, reference.rows, rtol=1e-5, atol=1e-4)
        assert torch.equal(ours.label_rows[:4], head[labels[:4]])


@pytest.mark.parametrize("add_logits", ["kernel", "reference"])
def test_a_logit_that_is_no_number_is_not_lost(add_logits: str) -> None:
    def kernel(running: OnlineSoftmaxState, *given: Any) -> torch.Tensor | None:
        launch = kernels_of("online_softmax", "cpu").launch
        found: torch.Tensor | None = launch(running, running.rows.shape[1], *given)
        return found

    function = add_logits_ref if add_logits == "reference" else kernel
    running, logits = OnlineSoftmaxState.of(LABELS, H, FP32), LOGITS.clone()
    logits[2, 200] = float("nan")
    for first in range(0, V, WIDTH):
        part: Any = part_of(logits, first, "cpu")
        weights = function(running, first, part, 1.0, torch.ones(part.shape[1], H))
        assert bool(weights[2].isnan().any()) == (first == 128 or running.most[2].isnan())
    assert running.total.isnan().tolist() == [False, False, True, False, False]


SHAPES = [(64, 64), (7, 96), (3, 43), (130, 256)]


def defined(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The weight as ``poros.kernels.nf4`` defines it."""
    absmax = state.absmax
    if state.nested:
        nested = state.state2.absmax.repeat_interleave(256)[: len(absmax)]
        absmax = state.state2.code[absmax.long()] * nested + state.offset
    both = packed.flatten().long()
    places = torch.stack([both >> 4, both & 15], 1).flatten()[: state.shape.numel()]
    scales = absmax.repeat_interleave(state.blocksize)[: len(places)]
    return (state.code[places] * scales).view(state.shape)


@on_both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("blocksize", [64, 128])
def test_dequantize(
    device: str, dtype: torch.dtype, shape: tuple[int, int], nested: bool, blocksize: int
) -> None:
    """On a GPU also of a few megabytes."""
    launch = kernels_of("dequantize", device).launch
    rows = shape[0] * (300 if device == "cuda" else 1)
    weight = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(3)).to(device)
    packed, state = quantize_4bit(
        weight.to(dtype), blocksize=blocksize, compress_statistics=nested, quant_type="nf4"
    )
    assert has_kernel(packed, state)
    expected = defined(packed, state).to(dtype)
    # bitsandbytes' CPU kernel is wrong for other shapes.
    if shape[1] % blocksize == 0 or device == "cuda":
        assert torch.equal(bits(expected), bits(dequantize_4bit(packed, state)))
        assert torch.equal(bits(expected), bits(dequantize_ref(packed, state, dtype)))
    found = torch.empty_like(expected)
    assert torch.equal(bits(expected), bits(launch(packed, state, found)))
    packed[0] ^= 0x11
    assert not torch.equal(expected, launch(packed, state, found))


def test_other_kinds_are_left_to_bitsandbytes() -> None:
    weight = torch.randn(64, 64)
    packed, state = quantize_4bit(weight, quant_type="fp4")
    assert not has_kernel(packed, state)
    assert torch.equal(dequantize(packed, state, torch.float32), dequantize_4bit(packed, state))
    packed, state = quantize_4bit(weight, quant_type="nf4", quant_storage=torch.bfloat16)
    assert not has_kernel(packed, state)


def test_a_weight_takes_the_place_of_the_last_or_has_memory_of_its_own_if_it_is_too_large() -> None:
    """In memory for one dense weight at a time."""
    workspace = DenseWorkspace(4 * 6 * 2, torch.device("cpu"))
    first = workspace.take(torch.Size((4, 6)), torch.bfloat16).fill_(1)
    larger = workspace.take(torch.Size((4, 6)), torch.float32).fill_(2)
    assert bool((first == 1).all()) and larger.shape == (4, 6)
    second = workspace.take(torch.Size((2, 3)), torch.float32)
    assert second.data_ptr() == first.data_ptr()
    second.fill_(2)
    assert not bool((first == 1).all())  # certain: nobody may keep one
    with workspace.left_alone():
        assert workspace.take(torch.Size((2, 3)), torch.float32).data_ptr() != first.data_ptr()
    assert (second.shape, second.dtype, second.is_contiguous()) == ((2, 3), torch.float32, True)
