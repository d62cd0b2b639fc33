"""The norm of rows under LoRA: the reference, and the kernels in Triton's interpreter.

The interpreter cannot multiply bfloat16, so parts of numbers are multiplied as float32, which is
exact as well; it cuts parts off where a GPU rounds them, so three still make up a float32.
"""

from typing import Any

import pytest
import torch

from poros.kernels import row_norm as module
from poros.kernels.row_norm import (
    assembled_ref,
    row_norm,
    square_of_rows,
    square_of_rows_ref,
)
from tests.support import interpreted, same_bits

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
U = 2.0**-24
RANKS = [1, 16, 130]
SHAPES = [(70, 200), (5, 1100), (130, 33), (1, 1)]
SCALING = 2 / 3
WAYS = ["reference", "kernel"]
# Of a base and of its adapters.
DTYPES = [(FP32, FP32), (FP16, FP32), (BF16, FP32), (BF16, BF16), (BF16, FP16), (BF16, FP64)]


@pytest.fixture
def gpu() -> Any:
    return interpreted("poros.kernels.row_norm_gpu")


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether ``row_norm`` takes the kernels, for tensors of a CPU too."""
    if request.param == "kernel":
        import triton.language as tl

        kernels = interpreted("poros.kernels.row_norm_gpu")
        monkeypatch.setattr(kernels, "_MULTIPLIED_AS", tl.float32)
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    return str(request.param)


both_ways = pytest.mark.parametrize("way", WAYS, indirect=True)


def tensors(
    shape: tuple[int, int], rank: int, dtype: torch.dtype = FP32, of_adapters: torch.dtype = FP32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    a = normal(rank, shape[1]) * shape[1] ** -0.5
    return normal(*shape).to(dtype), a.to(of_adapters), normal(shape[0], rank).to(of_adapters)


def found_norm(
    dense: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float = SCALING
) -> torch.Tensor:
    return row_norm(dense, square_of_rows(dense), a, b, scaling)


def exact_norm(
    dense: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float = SCALING
) -> torch.Tensor:
    product = b.double() @ a.double()
    norm: torch.Tensor = torch.linalg.norm(dense.double() + scaling * product, dim=1)
    return norm


def norm_bound(
    dense: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float = SCALING
) -> torch.Tensor:
    """Of the distance of the norm from the exact one, for each row.

    A float32 sum of n products is off by at most n u times the sum of their sizes, in any order
    (Higham 2002, Accuracy and Stability, section 3.1), u being 2^-24; 4u more are for products that
    are made of parts, of which those below 2^-23 are left out. For a row of c columns and rank r:
    |W|^2 by (c + 4)u |W|^2, the cross term by (c + r + 4)u of |B| |A| |W|, and the last one by
    (c + 2r + 8)u of |B| |A| |A^T| |B|. The scalars and the two sums add 4u of the sizes of all.
    With e the error of the square, the root is off by at most e / norm, and by the square root
    of e; it is rounded once more. 1.01 is for products of errors.
    """
    w, a, b = dense.double().abs(), a.double().abs(), b.double().abs()
    rank, columns = a.shape
    square = (w * w).sum(1)
    cross = 2 * abs(scaling) * ((w @ a.T) * b).sum(1)
    gram = scaling**2 * (((b @ a) @ a.T) * b).sum(1)
    error = (columns + 8) * square + (columns + rank + 8) * cross + (columns + 2 * rank + 12) * gram
    return 1.01 * U * error


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
    """With squares of either way."""
    dense, a, b = tensors(shape, rank, *dtypes)
    for square in (square_of_rows(dense), square_of_rows_ref(dense)):
        found = row_norm(dense, square, a, b, SCALING)
        assert square.dtype == found.dtype == FP32 and found.shape == shape[:1]
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


@both_ways
def test_what_is_not_a_number_reaches_its_row(way: str) -> None:
    dense, a, b = tensors((70, 200), 5)
    for tensor, rows in ((dense, [3]), (b, [3]), (a, range(70))):
        changed = tensor.clone()
        changed[3, 1] = float("nan")
        given = [changed if each is tensor else each for each in (dense, a, b)]
        found = found_norm(*given)
        assert found.isnan().nonzero().flatten().tolist() == list(rows)
    assert not found_norm(dense, a, b).isnan().any()


@both_ways
def test_a_square_below_zero_is_zero(way: str) -> None:
    """B A takes W away, and what float32 leaves of it may be negative."""
    _, a, b = tensors((300, 64), 5)
    dense = (-SCALING * b.double() @ a.double()).float()
    square = square_of_rows(dense)
    found = row_norm(dense, square, a, b, SCALING)
    assert not found.isnan().any() and bool((found == 0).any())
    assert is_within(found, exact_norm(dense, a, b), norm_bound(dense, a, b))


def test_assembly_has_the_same_bits(gpu: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(1000, generator=generator) for _ in range(3)]
    terms[0][:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    terms[1][5] = float("nan")
    for scaling in (SCALING, -1.7, 1e-3):
        found, expected = (run(*terms, scaling) for run in (gpu.assembled, assembled_ref))
        assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().sum() == 2
        assert same_bits(found.nan_to_num(), expected.nan_to_num())
        assert bool((found == 0).any())
    other = gpu.assembled(terms[0], terms[1], terms[2] * (1 + 2 * U), SCALING)
    expected = assembled_ref(*terms, SCALING)
    assert not same_bits(other.nan_to_num(), expected.nan_to_num())
