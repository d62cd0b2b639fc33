"""Random projections of FLORA: their bits on every device, their moments, their products."""

import hashlib
import math

import pytest
import torch

from poros.optim.projection import (
    Projection,
    Stream,
    normal_quantiles,
    philox,
    round_stochastically,
)
from tests.optim.whole import whole
from tests.support import interpreted

N, M, RANK = 24, 96, 8
QUANTILES = normal_quantiles()
FP32 = 2.0**-24


def projection(draw: int, rank: int = RANK, width: int = M, matrix: int = 3) -> Projection:
    return Projection(QUANTILES, rank, width, 5, matrix, draw, Stream.ACCUMULATION)


# From the known-answer file of Random123 (Salmon et al., SC 2011), philox4x32-10: every word of
# counter and key is this.
KNOWN = {
    0x0: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    0xFFFFFFFF: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
}


@pytest.mark.parametrize("word", KNOWN)
def test_philox_gives_the_published_answers(word: int) -> None:
    words = philox(word << 32 | word, torch.full((2,), word), word, word, word)
    assert [each.tolist() for each in words] == [[answer] * 2 for answer in KNOWN[word]]


def test_quantiles_are_those_of_every_platform() -> None:
    digest = hashlib.sha256(QUANTILES.numpy().tobytes()).hexdigest()
    assert digest.startswith("e8cfff23047b7e58")
    moments = [(QUANTILES.double() ** power).mean().item() for power in (1, 2, 4)]
    assert moments == pytest.approx([0, 1, 3], abs=1e-3)


def test_triton_makes_the_same_bits() -> None:
    gpu = interpreted("poros.optim.projection_gpu")
    for rank, width, seed in ((8, 96, 0), (5, 77, 1), (16, 40, 2**63 - 1)):
        made = Projection(QUANTILES, rank, width, seed, 7, 2**31 + 5, Stream.MOMENTUM)
        num_counters = -(-width // 8)
        tile = gpu.tile(made, num_counters, 1, num_counters)
        assert torch.equal(tile[:, : width - 8], whole(made)[:, 8:])


@pytest.mark.gpu
def test_cpu_and_gpu_make_the_same_bits() -> None:
    for rank, width in ((8, 96), (256, 4096), (64, 18944), (300, 5003)):
        here = Projection(QUANTILES, rank, width, 11, 7, 2, Stream.ACCUMULATION)
        there = Projection(QUANTILES.cuda(), rank, width, 11, 7, 2, Stream.ACCUMULATION)
        assert torch.equal(whole(here), whole(there).cpu())
    value = torch.randn(1000, 300)
    rounded = round_stochastically(value.cuda(), 1, 2, 3).cpu()
    assert torch.equal(rounded, round_stochastically(value, 1, 2, 3))


@pytest.mark.parametrize("width", [M, 40_003])
def test_tiles_make_one_matrix(width: int) -> None:
    made = projection(0, rank=64, width=width)
    matrix = whole(made)
    assert matrix.shape == (64, width)
    gradient = torch.randn(3, width)
    compressed = made.compress(gradient)
    # Sums of `width` terms, in another order: (width + 1) roundings of the sum of magnitudes.
    bound = (width + 1) * FP32 * (gradient.abs().double() @ matrix.abs().double().T)
    assert ((compressed - gradient.double() @ matrix.double().T).abs() <= bound).all()
    back = made.decompress(compressed)
    bound = 65 * FP32 * (compressed.abs().double() @ matrix.abs().double())
    assert ((back - compressed.double() @ matrix.double()).abs() <= bound).all()


def test_decompressed_gradients_are_unbiased_and_longer_by_the_formula() -> None:
    gradient = torch.randn(N, M)
    num_draws, mean, square = 2000, torch.zeros(N, M, dtype=torch.float64), 0.0
    for draw in range(num_draws):
        made = projection(draw)
        back = made.decompress(made.compress(gradient)).double()
        mean += back / num_draws
        square += (back.square().sum() / num_draws).item()
    length = gradient.double().square().sum().item()
    # E |G A'A|^2 = (1 + (m + 1) / r) |G|^2, so each draw is off by (m + 1) / r |G|^2.
    expected = 1 + (M + 1) / RANK
    off = (mean - gradient).square().sum().item() / length
    assert off == pytest.approx((expected - 1) / num_draws, rel=0.2)
    assert square / length == pytest.approx(expected, rel=0.02)


def test_rounding_is_unbiased_and_keeps_what_is_not_finite() -> None:
    value = torch.full((200_000,), 1 + 2.0**-10)  # an eighth of the way to the next bfloat16
    rounded = round_stochastically(value, 1, 2, 3)
    assert set(rounded.tolist()) == {1.0, 1 + 2.0**-7}
    share = (rounded > 1).double().mean().item()
    assert share == pytest.approx(1 / 8, abs=5 * math.sqrt(7 / 64 / value.numel()))
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.5])
    kept = round_stochastically(odd, 1, 2, 3).float()
    assert kept[2].isnan()
    kept[2] = odd[2]
    assert torch.equal(kept.view(torch.int32), odd.view(torch.int32))
