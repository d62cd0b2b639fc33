"""The norm of rows under LoRA: the reference, and the kernels in Triton's interpreter and on a GPU.

The interpreter cannot multiply bfloat16, so parts of numbers are multiplied as float32, which is
exact as well; it cuts parts off where a GPU rounds them, so three still make up a float32.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from poros.kernels import row_norm as module
from poros.kernels.row_norm import assembled_ref, row_norm, row_norm_ref, square_of_rows
from tests.support import interpreted, same_bits

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
U = 2.0**-24
RANKS, GPU_RANKS = [1, 16, 130], [1, 16, 64, 384, 768]
SHAPES = [(70, 200), (5, 1100), (130, 33), (1, 1)]
GPU_SHAPES = [(3584, 3584), (512, 3584), (18944, 3584), (3584, 18944)]
SCALING = 2 / 3
ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)
# Of a base and of its adapters.
DTYPES = [(FP32, FP32), (FP16, FP32), (BF16, FP32), (BF16, BF16), (BF16, FP16), (BF16, FP64)]


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether ``row_norm`` takes the kernels, for tensors of a CPU too; or runs on a GPU."""
    if request.param == "kernel":
        import triton.language as tl

        kernels = interpreted("poros.kernels.row_norm_gpu")
        monkeypatch.setattr(kernels, "_MULTIPLIED_AS", tl.float32)
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    return str(request.param)


both_ways = pytest.mark.parametrize("way", ["reference", "kernel"], indirect=True)


def tensors(
    shape: tuple[int, int],
    rank: int,
    dtype: torch.dtype = FP32,
    of_adapters: torch.dtype = FP32,
    way: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = "cuda" if way == "gpu" else "cpu"
    generator = torch.Generator(device).manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    a = normal(rank, shape[1]) * shape[1] ** -0.5
    return normal(*shape).to(dtype), a.to(of_adapters), normal(shape[0], rank).to(of_adapters)


def found_norm(
    dense: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float = SCALING
) -> torch.Tensor:
    return row_norm(dense, square_of_rows(dense), a, b, scaling)


def exact_norm(dense: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = dense.double().addmm_(b.double(), a.double(), alpha=SCALING)
    norm: torch.Tensor = torch.linalg.norm(whole, dim=1)
    return norm


def norm_bound(
    dense: torch.Tensor, a: torch.Tensor, b: torch.Tensor, unit: float = U
) -> torch.Tensor:
    """Of the distance of the norm from the exact one, for each row.

    A float32 sum of n products is off by at most n u times the sum of their sizes, in any order
    (Higham 2002, Accuracy and Stability, section 3.1), u being 2^-24; 4u more are for products that
    are made of parts, of which those below 2^-23 are left out. For a row of c columns and rank r:
    |W|^2 by (c + 4)u |W|^2, the cross term by (c + r + 4)u of |B| |A| |W|, and the last one by
    (c + 2r + 8)u of |B| |A| |A^T| |B|. The scalars and the two sums add 4u of the sizes of all.
    With e the error of the square, the root is off by at most e / norm, and by the square root
    of e; it is rounded once more. 1.01 is for products of errors.

    On a GPU ``unit`` is 4u: tensor cores sum in float32, but cut off where others round, 2u for
    each number, and 2u for what is shifted out before it is added.
    """
    w, a, b = dense.double().abs(), a.double().abs(), b.double().abs()
    rank, columns = a.shape
    square = (w * w).sum(1)
    cross = 2 * SCALING * ((w @ a.T) * b).sum(1)
    gram = SCALING**2 * ((b @ (a @ a.T)) * b).sum(1)
    error = (columns + 8) * square + (columns + rank + 8) * cross + (columns + 2 * rank + 12) * gram
    return 1.01 * unit * error


def is_within(found: torch.Tensor, exact: torch.Tensor, of_square: torch.Tensor) -> bool:
    bound = torch.minimum(of_square / exact, of_square.sqrt()) + 2 * U * exact
    return bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.cover("pairs")
@both_ways
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_within_the_bound_of_float32(
    way: str, dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, int], rank: int
) -> None:
    dense, a, b = tensors(shape, rank, *dtypes)
    found = found_norm(dense, a, b)
    assert square_of_rows(dense).dtype == found.dtype == FP32 and found.shape == shape[:1]
    assert is_within(found, exact_norm(dense, a, b), norm_bound(dense, a, b))


@both_ways
@pytest.mark.parametrize("term", ["cross", "gram", "a row of A", "a column"])
def test_control_a_term_left_out_is_seen(way: str, term: str) -> None:
    dense, a, b = tensors((70, 200), 5)
    bound, exact = norm_bound(dense, a, b), exact_norm(dense, a, b)
    wrong = {
        "cross": lambda: (
            found_norm(dense, a, b).square() / 2 + found_norm(dense, a, -b).square() / 2
        ).sqrt(),
        "gram": lambda: (
            (found_norm(dense, a, b).square() - (SCALING * b @ a).square().sum(1))
            .clamp_min(0)
            .sqrt()
        ),
        "a row of A": lambda: found_norm(dense, a[:-1], b[:, :-1]),
        "a column": lambda: found_norm(dense[:, :-1], a[:, :-1], b),
    }
    assert is_within(found_norm(dense, a, b), exact, bound)
    assert not is_within(wrong[term](), exact, bound)


@both_ways
def test_zeros(way: str) -> None:
    dense, a, b = tensors((70, 200), 16)
    square = square_of_rows(dense)
    root = square.double().sqrt().float()
    assert same_bits(found_norm(dense, a, 0 * b.abs()), root)
    assert same_bits(found_norm(dense, a, b, 0.0), root)
    # Nothing else is looked at.
    nothing = torch.full_like(a, float("nan")), torch.full_like(b, float("nan"))
    assert same_bits(row_norm(dense, square, *nothing, 0.0), root)
    assert found_norm(0 * dense, 0 * a, b).tolist() == [0.0] * 70
    assert found_norm(*tensors((0, 9), 2)).shape == (0,)


@pytest.mark.parametrize(
    ("way", "norm"),
    [
        *(("reference", row_norm), ("kernel", row_norm)),
        *(pytest.param("gpu", each, marks=pytest.mark.gpu) for each in (row_norm, row_norm_ref)),
    ],
    indirect=["way"],
)
def test_what_is_not_a_number_reaches_its_row(way: str, norm: Any) -> None:
    dense, a, b = tensors((70, 200), 5, way=way)
    for tensor, rows in ((dense, [3]), (b, [3]), (a, range(70)), (None, [])):
        given = [each.clone() for each in (dense, a, b)]
        for changed, each in zip(given, (dense, a, b), strict=True):
            if each is tensor:
                changed[3, 1] = float("nan")
        found = norm(given[0], square_of_rows(given[0]), *given[1:], SCALING)
        assert found.isnan().nonzero().flatten().tolist() == list(rows)


@both_ways
def test_a_square_below_zero_is_zero(way: str) -> None:
    """B A takes W away, and what float32 leaves of it may be negative."""
    _, a, b = tensors((300, 64), 5)
    dense = (-SCALING * b.double() @ a.double()).float()
    square = square_of_rows(dense)
    found = row_norm(dense, square, a, b, SCALING)
    assert not found.isnan().any() and bool((found == 0).any())
    assert is_within(found, exact_norm(dense, a, b), norm_bound(dense, a, b))


@pytest.mark.parametrize("way", ["kernel", ON_GPU], indirect=True)
def test_assembly_has_the_same_bits(way: str) -> None:
    from poros.kernels.row_norm_gpu import assembled

    terms = [each[:, 0].contiguous() for each in tensors((1000, 1000), 1000, way=way)]
    terms[0][:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    terms[1][5] = float("nan")
    for scaling in (SCALING, -1.7, 1e-3):
        found, expected = (run(*terms, scaling) for run in (assembled, assembled_ref))
        assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().sum() == 2
        assert same_bits(found.nan_to_num(), expected.nan_to_num())
        assert bool((found == 0).any())
    other = assembled(terms[0], terms[1], terms[2] * (1 + 2 * U), SCALING)
    expected = assembled_ref(*terms, SCALING)
    assert not same_bits(other.nan_to_num(), expected.nan_to_num())


# At real sizes, on a GPU.


@pytest.fixture(params=[False, True], ids=["", "tf32"])
def tf32(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether or not products may be in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("rank", GPU_RANKS)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_on_a_gpu_within_the_bound(shape: tuple[int, int], rank: int) -> None:
    for dtypes in product([BF16, FP16, FP32], [FP32, BF16]):
        dense, a, b = tensors(shape, rank, *dtypes, way="gpu")
        dense *= 0.02
        found = found_norm(dense, a, b)
        exact = exact_norm(dense, a, b)
        assert found.dtype == FP32 and not found.isnan().any()
        assert is_within(found, exact, norm_bound(dense, a, b, unit=4 * U)), dtypes
        # The bound is the worst case. What is rounded, not cut off, errs either way, and of a sum
        # of random errors far less is expected.
        relative, of_control = (
            float(((each.double() - exact) / exact).norm() / len(found) ** 0.5)
            for each in (found, found_norm(dense, a, 0 * b))
        )
        assert relative < 64 * U < of_control, (dtypes, relative, of_control)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", GPU_RANKS)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_no_copy_is_made(shape: tuple[int, int], rank: int) -> None:
    dense, a, b = tensors(shape, rank, BF16, way="gpu")
    square = square_of_rows(dense)
    row_norm(dense, square, a, b, SCALING)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # What is asked for: what the allocator gives may be up to 1 MiB more, if it has that left over.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    row_norm(dense, square, a, b, SCALING)
    found = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    # What is never made: A in parts, A times W, a copy of W. Below rank 16 sums in parts are more.
    if rank >= 64:
        assert found <= 4 * (shape[0] * rank + rank * rank) + 4 * 2**20 + 2**17
    assert found < 4 * shape[0] * shape[1]
