"""DoRA's composition and norm on a GPU: to the bit, and within derived bounds of float64."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from poros.kernels import row_norm_gpu
from poros.kernels.compose import compose, compose_backward, compose_backward_ref, compose_ref
from poros.kernels.row_norm import (
    assembled_ref,
    row_norm,
    row_norm_ref,
    square_of_rows,
    square_of_rows_ref,
)
from tests.gpu.models import same

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(3584, 3584), (512, 3584), (18944, 3584), (3584, 18944)]
ROWS = [3584, 512, 18944, 33]
TOKENS = [7, 512, 2048]
RANKS = [1, 16, 64, 384, 768]
DTYPES = [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, FP32), (FP32, BF16)]
SCALING = 2 / 3
U, OF_INNER = 2.0**-24, {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}


def normal(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


# ------------------------------------------------------------------- composition


def tensors(rows: int, tokens: int, dtype: torch.dtype, of_lora: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(rows + tokens)
    return {
        "result": normal(2, tokens, rows, dtype=dtype),
        "base": normal(2, tokens, rows, dtype=dtype),
        "lora": normal(2, tokens, rows, dtype=of_lora),
        "g": 1 + 1e-2 * normal(rows),
        "bias": normal(rows, dtype=dtype),
    }


def forms(given: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**given, "bias": None}, {**given, "base": None}, {**given, "base": None, "bias": None}]


def of_backward(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "has_base": given["base"] is not None,
        "result_dtype": given["result"].dtype,
        "lora_dtype": given["lora"].dtype,
    }


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_composition_has_the_bits_of_its_reference(
    dtypes: tuple[torch.dtype, torch.dtype], rows: int, tokens: int
) -> None:
    """Of the sum over n tokens there is a bound: n u of the sizes of its products."""
    for given in forms(tensors(rows, tokens, *dtypes)):
        sum_, inner = compose_ref(**given, scaling=SCALING, wants_inner=True)
        gradient = normal(*sum_.shape, dtype=dtypes[0])
        how = of_backward(given)
        expected = compose_backward_ref(gradient, given["g"], SCALING, inner, **how)
        assert inner is not None
        terms = (gradient.double() * inner.double()).flatten(0, -2)
        bound = 1.01 * len(terms) * U * terms.abs().sum(0)
        found = compose(**given, scaling=SCALING, wants_inner=True)
        assert same(found[0], sum_) and same(found[1], inner)
        found = compose(**given, scaling=SCALING)
        assert same(found[0], sum_) and found[1] is None
        backward = compose_backward(gradient, given["g"], SCALING, inner, **how)
        assert same(backward[0], expected[0]) and same(backward[1], expected[1])
        for of_g in (backward[2], expected[2]):
            assert of_g is not None and of_g.dtype == FP32
            assert bool(((of_g.double() - terms.sum(0)).abs() <= bound).all())
            # Certain to be seen: a token more or less.
            assert not bool(((of_g.double() - terms[1:].sum(0)).abs() <= bound).all())
        without = compose_backward(gradient, given["g"], SCALING, None, **how)
        assert all(map(same, without, (*expected[:2], None)))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_near_one_the_stable_form_is_closer_than_the_naive(dtype: torch.dtype) -> None:
    given = tensors(3584, 512, dtype, FP32)
    given["g"] = 1 + 2.0**-12 * normal(3584)
    given["lora"] *= 2.0**-12
    base, term = given["base"].double(), SCALING * given["lora"].double()
    expected = (given["g"].double() - 1) * base + given["g"].double() * term
    zero = torch.zeros_like(given["result"])
    found, _ = compose(zero, given["base"], given["lora"], given["g"], SCALING)
    parts = (given["g"].double() - 1).abs() * base.abs() + (given["g"].double() * term).abs()
    bound = (8 * U + OF_INNER[dtype]) * 1.01 * parts + 2.0**-25
    low = (SCALING * given["lora"]).to(dtype)
    naive = given["g"].to(dtype) * (low + given["base"]) - given["base"]
    assert bool(((found.double() - expected).abs() <= bound).all())
    assert not bool(((naive.double() - expected).abs() <= bound).all())


def test_composition_a_hundred_times_the_same() -> None:
    given = forms(tensors(3584, 1000, BF16, FP32))[1]
    gradient = normal(*given["result"].shape, dtype=BF16)

    def run() -> list[torch.Tensor | None]:
        sum_, inner = compose(**given, scaling=SCALING, wants_inner=True)
        how = of_backward(given)
        backward = compose_backward(gradient, given["g"], SCALING, inner, **how)
        return [sum_, inner, *backward]

    expected = run()
    for _ in range(100):
        assert all(map(same, run(), expected))


def test_of_more_elements_than_32_bits_can_count() -> None:
    rows, tokens = 18944, 120_000
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("expected 40 GB of free memory on the device")
    g, gradient = 1 + 1e-2 * normal(rows), torch.ones(tokens, rows, device="cuda", dtype=BF16)
    given = {"result": gradient, "base": None, "lora": gradient, "g": g, "bias": None}
    sum_, inner = compose(**given, scaling=SCALING, wants_inner=True)
    backward = compose_backward(gradient, g, SCALING, inner, **of_backward(given))
    assert inner is not None and backward[2] is not None
    # Every row of a tensor of ones is the same.
    for each in (sum_, inner, *backward[:2]):
        assert torch.equal(each[-1], each[0]) and torch.equal(each[tokens // 2], each[0])
    expected = tokens * float(inner[0, 0].float())
    assert bool(((backward[2] - expected).abs() < 1e-3 * expected).all())


# ------------------------------------------------------------------- norm


def adapters(
    shape: tuple[int, int], rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    a = normal(rank, shape[1]) * shape[1] ** -0.5
    return a.to(dtype), normal(shape[0], rank).to(dtype)


def norm_bound(dense: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of the norm's square: as in tests/unit/test_row_norm.py, with 4u in place of u.

    Tensor cores sum in float32, but cut off where others round: 2u for each number, and 2u for
    what is shifted out before it is added.
    """
    w, a, b = dense.double().abs(), a.double().abs(), b.double().abs()
    rank, columns = a.shape
    square = (w * w).sum(1)
    cross = 2 * SCALING * ((w @ a.T) * b).sum(1)
    gram = SCALING**2 * ((b @ (a @ a.T)) * b).sum(1)
    error = (columns + 8) * square + (columns + rank + 8) * cross + (columns + 2 * rank + 12) * gram
    return 4 * U * 1.01 * error


def exact_norm(dense: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = dense.double().addmm_(b.double(), a.double(), alpha=SCALING)
    norm: torch.Tensor = torch.linalg.norm(whole, dim=1)
    return norm


def is_within(found: torch.Tensor, exact: torch.Tensor, of_square: torch.Tensor) -> bool:
    bound = torch.minimum(of_square / exact, of_square.sqrt()) + 2 * U * exact
    return bool(((found.double() - exact).abs() <= bound).all())


@pytest.fixture(params=[False, True], ids=["", "tf32"])
def tf32(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether or not products may be in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_is_within_its_bound(shape: tuple[int, int], rank: int) -> None:
    for dtype, of_adapters in product([BF16, FP16, FP32], [FP32, BF16]):
        torch.manual_seed(rank)
        dense = 0.02 * normal(*shape, dtype=dtype)
        a, b = adapters(shape, rank, of_adapters)
        found = row_norm(dense, square_of_rows(dense), a, b, SCALING)
        exact = exact_norm(dense, a, b)
        assert found.dtype == FP32 and not found.isnan().any()
        assert is_within(found, exact, norm_bound(dense, a, b)), (dtype, of_adapters)
        # The bound is the worst case. What is rounded, not cut off, errs either way, and of a sum
        # of random errors far less is expected.
        without_b = row_norm(dense, square_of_rows(dense), a, 0 * b, SCALING)
        relative, of_control = (
            float(((each.double() - exact) / exact).norm() / len(found) ** 0.5)
            for each in (found, without_b)
        )
        assert relative < 64 * U < of_control, (dtype, of_adapters, relative, of_control)


def test_assembly_has_the_same_bits() -> None:
    terms = [normal(100_000) for _ in range(3)]
    terms[0][7] = float("nan")
    for scaling in (SCALING, -1.7, 1e-3):
        found, expected = (run(*terms, scaling) for run in (row_norm_gpu.assembled, assembled_ref))
        assert found.isnan().nonzero().tolist() == expected.isnan().nonzero().tolist() == [[7]]
        assert same(found.nan_to_num(), expected.nan_to_num())
        # On a GPU, PyTorch's own root of float32 is rounded correctly too.
        total = terms[0] + 2 * scaling * terms[1] + scaling * scaling * terms[2]
        assert same(found.nan_to_num(), total.clamp_min(0).sqrt().nan_to_num())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [*SHAPES, (33, 70)], ids=str)
def test_squares_are_within_their_bound(shape: tuple[int, int], dtype: torch.dtype) -> None:
    dense = normal(*shape, dtype=dtype)
    exact = dense.double().square().sum(1)
    for run in (square_of_rows, square_of_rows_ref):
        assert bool(((run(dense).double() - exact).abs() <= 1.01 * shape[1] * U * exact).all())


@pytest.mark.parametrize("way", [row_norm, row_norm_ref])
def test_what_is_not_a_number_reaches_its_row(way: Any) -> None:
    dense = normal(512, 3584, dtype=BF16)
    a, b = adapters((512, 3584), 24, FP32)
    for tensor, rows in ((dense, [3]), (b, [3]), (a, range(512))):
        changed = tensor.clone()
        changed[3, 1] = float("nan")
        dense_, a_, b_ = (changed if each is tensor else each for each in (dense, a, b))
        found = way(dense_, square_of_rows(dense_), a_, b_, SCALING)
        assert found.isnan().nonzero().flatten().tolist() == list(rows)


@pytest.mark.parametrize("rank", RANKS)
def test_norm_a_hundred_times_the_same(rank: int) -> None:
    dense = normal(3584, 3584, dtype=BF16)
    a, b = adapters((3584, 3584), rank, FP32)
    square = square_of_rows(dense)
    expected = row_norm(dense, square, a, b, SCALING)
    for _ in range(100):
        assert same(square_of_rows(dense), square)
        assert same(row_norm(dense, square, a, b, SCALING), expected)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_makes_no_copy(shape: tuple[int, int], rank: int) -> None:
    dense = normal(*shape, dtype=BF16)
    a, b = adapters(shape, rank, FP32)
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
