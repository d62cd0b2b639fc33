"""Random projections made from counters: the same bits on every device, and never stored.

A projection A [rank, width] has independent entries of mean 0 and variance 1 / rank (FLORA, Hao,
Cao and Mou, ICML 2024, Algorithm 1). Philox 4x32-10 (Salmon et al., SC 2011) turns seed, matrix,
draw, stream and place of an entry into 16 random bits, which choose one of 65,536 quantiles of the
normal distribution: integers, a table and one product in float32, the same on a CPU and a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from statistics import NormalDist

import torch

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_QUANTILES = 1 << 16
_GRID = 2.0**-20
_PER_COUNTER = 8
"""Entries of one call of Philox: four words of two halves."""
_TILE_NUM_ELEMENTS = 1 << 20


class Stream(IntEnum):
    """The purpose of random numbers; each purpose has its own sequence."""

    ACCUMULATION = 0
    MOMENTUM = 1
    ROUNDING = 2


def philox(seed: int, counter: torch.Tensor, *more: int) -> list[torch.Tensor]:
    """Philox 4x32-10: four words below 2**32 for each counter, all int64.

    The key is ``seed`` (64 bits); ``counter`` and three ``more`` are the counter's words.
    """
    key = [seed & _MASK, seed >> 32 & _MASK]
    words = [counter, *(torch.full_like(counter, word) for word in more)]
    for _ in range(_ROUNDS):
        # The product of two words may pass 2**63; it wraps, and its bits are right.
        low, high = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((high >> 32) & _MASK) ^ words[1] ^ key[0],
            high & _MASK,
            ((low >> 32) & _MASK) ^ words[3] ^ key[1],
            low & _MASK,
        ]
        key = [(part + weyl) & _MASK for part, weyl in zip(key, _WEYL, strict=True)]
    return words


def normal_quantiles() -> torch.Tensor:
    """float32 [65536] on the CPU: the quantiles of N(0, 1) at (i + 1/2) / 65536.

    Scaled to variance 1 (their fourth moment is 2.9992) and rounded to multiples of 2**-20, which
    the last digits of a platform's logarithm do not reach.
    """
    normal = NormalDist()
    half = [-normal.inv_cdf((i + 0.5) / _NUM_QUANTILES) for i in range(_NUM_QUANTILES // 2)]
    scale = (sum(value * value for value in reversed(half)) * 2 / _NUM_QUANTILES) ** -0.5
    half = [round(value * scale / _GRID) * _GRID for value in half]
    return torch.tensor([-value for value in half] + half[::-1], dtype=torch.float32)


@dataclass(frozen=True)
class Projection:
    """A projection of rows of ``width`` numbers to ``rank`` numbers, made in tiles of columns.

    Sums over tiles are in float32 and have a fixed order.
    """

    quantiles: torch.Tensor
    """``normal_quantiles()`` on the device of what is projected."""
    rank: int
    width: int
    seed: int
    matrix: int
    """Number of the matrix, below 2**32."""
    draw: int
    """Number of the matrix's projection, below 2**32."""
    stream: Stream

    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        """G A', float32 [n, rank], of ``gradient`` [n, width] in any float dtype."""
        compressed = gradient.new_zeros((gradient.shape[0], self.rank), dtype=torch.float32)
        for start, tile in self._tiles():
            columns = gradient[:, start : start + tile.shape[1]].float()
            compressed.addmm_(columns, tile.T)
        return compressed

    def decompress(self, compressed: torch.Tensor) -> torch.Tensor:
        """C A, float32 [n, width], of C = G A' [n, rank] in float32: an unbiased estimate of G."""
        gradient = compressed.new_empty((compressed.shape[0], self.width))
        for start, tile in self._tiles():
            torch.mm(compressed, tile, out=gradient[:, start : start + tile.shape[1]])
        return gradient

    def transfer(self, compressed: torch.Tensor, target: "Projection") -> torch.Tensor:
        """C A A_target', float32 [n, rank]: C in another subspace (Algorithm 2, line 13)."""
        between = compressed.new_zeros((self.rank, target.rank))
        for (_, tile), (_, other) in zip(self._tiles(), target._tiles(), strict=True):
            between.addmm_(tile, other.T)
        return compressed @ between

    def _tiles(self) -> Iterator[tuple[int, torch.Tensor]]:
        """First column and entries, float32 [rank, columns]."""
        num_counters = -(-self.width // _PER_COUNTER)
        step = max(1, _TILE_NUM_ELEMENTS // (_PER_COUNTER * self.rank))
        for first in range(0, num_counters, step):
            last = min(first + step, num_counters)
            start = first * _PER_COUNTER
            yield start, self._tile(num_counters, first, last)[:, : self.width - start]

    def _tile(self, num_counters: int, first: int, last: int) -> torch.Tensor:
        device = self.quantiles.device
        if device.type == "cuda":
            from poros.optim import projection_gpu

            return projection_gpu.tile(self, num_counters, first, last)
        row = torch.arange(self.rank, device=device)[:, None] * num_counters
        counters = row + torch.arange(first, last, device=device)
        chosen = _halves(self.seed, counters, self.matrix, self.draw, self.stream)
        return self.quantiles[chosen.view(self.rank, -1)] * self.rank**-0.5


def _halves(seed: int, counters: torch.Tensor, *more: int) -> torch.Tensor:
    """Eight 16-bit numbers for each counter, int64, one after the other."""
    words = philox(seed, counters, *(int(word) for word in more))
    return torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)


def round_stochastically(value: torch.Tensor, seed: int, matrix: int, draw: int) -> torch.Tensor:
    """bfloat16 neighbours of float32 ``value``, drawn so that their mean is ``value``.

    Values that are not finite are converted as they are. The numbers are those of ``Projection``.
    """
    flat = value.reshape(-1)
    rounded = torch.empty(flat.shape, dtype=torch.bfloat16, device=value.device)
    for start in range(0, flat.numel(), _TILE_NUM_ELEMENTS):
        part = flat[start : start + _TILE_NUM_ELEMENTS].contiguous()
        first, last = start // _PER_COUNTER, -(-(start + part.numel()) // _PER_COUNTER)
        counters = torch.arange(first, last, device=value.device)
        noise = _halves(seed, counters, matrix, draw, Stream.ROUNDING).view(-1)
        noise = noise[: part.numel()].to(torch.int32)
        kept = (part.view(torch.int32) + noise) & -0x10000
        kept = torch.where(part.isfinite(), kept, part.view(torch.int32))
        rounded[start : start + part.numel()] = kept.view(torch.float32).to(torch.bfloat16)
    return rounded.view(value.shape)
