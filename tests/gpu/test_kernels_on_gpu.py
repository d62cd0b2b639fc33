"""Kernels on a GPU: against bitsandbytes' to the bit, and against their references."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
import poros.kernels.product
from poros.cuda_streams import streams_for
from poros.errors import ParityError
from poros.gates import tiny
from poros.head.loss import sliced_cross_entropy
from poros.head.rows import RowReader
from poros.io.digests import sums_of_bits
from poros.kernels.copies import copy_all
from poros.kernels.dequantize import dequantize
from poros.kernels.forwards import unpatch, use_others
from poros.kernels.linear4bit import multiply, patch
from poros.kernels.product import Product, takes_fused_kernel
from poros.replay.graphs import CudaRecorder
from tests.children import run_python

pytestmark = pytest.mark.gpu

FP32 = 2.0**-24
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(3584, 3584), (512, 3584), (4864, 896), (896, 4864), (640, 96)]


def quantized(shape: tuple[int, int]) -> tuple[torch.Tensor, QuantState]:
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    return packed, state


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [3584, 1001, 6])
def test_the_gpu_reads_rows_of_locked_memory(columns: int, dtype: torch.dtype) -> None:
    """The host waits for nothing; where the memory is not locked it waits for the indices."""
    matrix = torch.randn(300, columns).to(dtype)
    indices = torch.randint(0, 300, (2, 70), device="cuda")
    reader = RowReader(streams_for(torch.device("cuda", torch.cuda.current_device())))
    reader.lock(matrix, "the embedding")
    assert reader.pinned_num_bytes == matrix.nbytes and matrix.is_pinned()
    reader.check = lambda *_: None
    reader.rows("matrix", matrix, indices)  # compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = reader.rows("matrix", matrix, indices)
        with pytest.raises(RuntimeError, match="synchronizing"):
            reader.rows("another", matrix.clone(), indices)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(bits(found.cpu()), bits(matrix[indices.cpu()]))
    again = RowReader(reader._streams)
    again.lock(matrix, "the embedding")  # as another's lock would end before it, it takes none
    assert again.pinned_num_bytes == 0 and len(again.fallbacks) == 1
    again.lock(matrix.t(), "the embedding")  # whose rows do not lie side by side
    assert len(again.fallbacks) == 1
    assert torch.equal(
        bits(again.rows("t", matrix.t(), indices[:1, :4] % 6)),
        bits(matrix.t()[indices[:1, :4].cpu() % 6].cuda()),
    )
    reader.unlock()
    assert reader.pinned_num_bytes == 0 and not matrix.is_pinned()
    assert torch.equal(bits(reader.rows("matrix", matrix, indices)), bits(found))


OUT_OF_RANGE = """
import torch
from poros.head.rows import RowReader
from poros.cuda_streams import streams_for
matrix = torch.randn(300, 8)
reader = RowReader(streams_for(torch.device("cuda", 0)))
reader.lock(matrix, "the embedding")
reader.rows("matrix", matrix, torch.tensor([299, INDEX], device="cuda")).sum().item()
"""


@pytest.mark.parametrize("index", [0, 300, -1])
def test_an_index_out_of_range_stops_the_gpu(index: int) -> None:
    ran = run_python(OUT_OF_RANGE.replace("INDEX", str(index)))
    assert (ran.returncode == 0) == (index == 0), ran.stderr
    assert ("expected indices of rows" in ran.stdout + ran.stderr) == (index != 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_that_are_recorded(dtype: torch.dtype) -> None:
    """Casts from each dtype, special values among them, into a part of a larger place."""
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 65520.0])
    sources, places = list[torch.Tensor](), list[torch.Tensor]()
    for source, shape in product(DTYPES, [(16, 3584), (7,), (5, 1001), (0,), (1,)] * 2):
        values = torch.randn(shape, device="cuda", dtype=source)
        values.view(-1)[: len(special)] = special[: values.numel()].to(source)
        sources.append(values)
        places.append(torch.full((values.numel() + 64,), 3.0, device="cuda", dtype=dtype))
    expected = [each.clone() for each in places]
    for each, source in zip(expected, sources, strict=True):
        each[: source.numel()].view(source.shape).copy_(source)
    into = [
        each[: source.numel()].view(source.shape)
        for each, source in zip(places, sources, strict=True)
    ]
    recorded = CudaRecorder(torch.device("cuda", 0)).record(lambda: copy_all(into, sources))
    torch.cuda.synchronize()
    assert all(bool((each == 3).all()) for each in places)  # nothing yet
    recorded.replay()
    for ours, own in zip(places, expected, strict=True):
        assert torch.equal(ours.isnan(), own.isnan())
        assert torch.equal(bits(ours.nan_to_num(1.0)), bits(own.nan_to_num(1.0)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_the_product_is_bitsandbytes(shape: tuple[int, int], bias: bool) -> None:
    """At numbers of tokens for which it multiplies with and without a dense weight."""
    packed, state = quantized(shape)
    own = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16) if bias else None
    fused = set()
    for num_tokens in (1, 3, 6, 16, 40, 64, 200, 512, 1537, 2048):
        inputs = [
            torch.randn(1, num_tokens, shape[1], device="cuda", dtype=torch.bfloat16)
            .repeat(2, 1, 1)[:1]
            .requires_grad_()
        ] * 2
        fused.add(takes_fused_kernel(inputs[0], state))
        outputs = [
            multiply(Product(packed, state, own, shape[0]), inputs[0]),
            bitsandbytes.matmul_4bit(inputs[1], packed, state, bias=own),
        ]
        assert torch.equal(*map(bits, outputs)), num_tokens
        arriving = torch.randn_like(outputs[0])
        gradients = [
            torch.autograd.grad(output, input, arriving)[0]
            for output, input in zip(outputs, inputs, strict=True)
        ]
        assert torch.equal(*map(bits, gradients)), num_tokens
    # Its kernel wants whole blocks in a row.
    assert fused == ({True, False} if shape[1] % 64 == 0 else {False})


def test_modules_are_taken_over_and_given_back() -> None:
    module = bitsandbytes.nn.Linear4bit(
        128, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    ).cuda()
    own = module.forward
    patch([module, torch.nn.Linear(3, 3)])
    assert module.forward != own
    input = torch.randn(2, 300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    again = use_others([module], are_own=True)
    assert module.forward == own
    expected = module(input)
    again()
    found = module(input)
    assert "_Multiply" in type(found.grad_fn).__name__ and torch.equal(found, expected)
    # What only bitsandbytes does.
    assert module(input[:, :0]).shape == (2, 0, 256)
    assert torch.equal(module(input.float()), module.forward(input.float()))
    unpatch([module])
    assert module.forward == own


def test_the_self_check_covers_the_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.small_config("qwen2", num_layers=3, hidden_size=256)
    tiny.write_checkpoint(config, tmp_path / "checkpoint", dtype=torch.bfloat16)

    def wrong(packed: torch.Tensor, state: QuantState, dtype: torch.dtype) -> torch.Tensor:
        weight = dequantize(packed, state, dtype)
        weight[0, 0] += 2**-6
        return weight

    def first_step() -> str:
        base = tiny.load_base(tmp_path / "checkpoint", dtype=torch.bfloat16, device="cuda")
        model = tiny.attach(base)
        poros.prepare(model, slots=2)
        batch = torch.randint(0, 100, (4, 512), device="cuda")
        with sdpa_kernel(SDPBackend.MATH):
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        return str(poros.runtime(model).self_check["status"])

    assert first_step() == "passed"
    monkeypatch.setattr(poros.kernels.product, "dequantize", wrong)
    with pytest.raises(ParityError):
        first_step()


def rows_of(head: torch.Tensor, _: int) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(0, len(head), 512):
        yield first, head[first : first + 512]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_is_near_that_of_the_cpu(dtype: torch.dtype) -> None:
    """All of it: products of narrow operands that add up in float32, in place."""
    torch.manual_seed(0)
    hidden, head = torch.randn(40, 256).to(dtype), (0.3 * torch.randn(20000, 256)).to(dtype)
    labels = torch.randint(0, len(head), (40,))
    labels[3] = -100
    found = []
    for device in ("cpu", "cuda"):
        on_device, input = head.to(device), hidden.detach().to(device).requires_grad_()
        read = partial(rows_of, on_device)
        loss = sliced_cross_entropy(input, labels.to(device), read, len(head))
        loss.backward()
        assert input.grad is not None
        found.append((loss.detach().cpu().double(), input.grad.cpu().double()))
    assert found[1][0].item() == pytest.approx(found[0][0].item(), rel=2e-6)
    roundoff = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}[dtype]
    assert (found[1][1] - found[0][1]).norm() <= 2 * roundoff * found[0][1].norm()
    assert not found[1][1][3].any()


def test_sums_of_bits_take_next_to_no_memory() -> None:
    matrix = torch.randn(65_536, 1024, device="cuda", dtype=torch.bfloat16)
    sums_of_bits(matrix)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    sums_of_bits(matrix)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peak - before <= matrix.nbytes / 64
