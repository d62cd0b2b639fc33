"""Published memory, link and rates of graphics cards, for plans without the card.

Published: memory, its bandwidth, and the link are those of the vendor's data sheets. The rate of
products is the peak for dense bfloat16 with sums in float32, from NVIDIA's white papers on the
GA102, Ada and RTX Blackwell GPUs (GeForce, RTX A6000) and the data sheets of the others. Where the
table of a white paper has no row for a card it is computed as those rows are: multiprocessors x
boost clock x 512 operations on a GeForce, x 1024 on the professional cards of the same chips.
GeForce cards take float32 sums at half of the rate that is advertised for float16 sums; data sheets
of professional cards advertise twice the dense rate, for matrices that are half zeros.

Assumed: what a link carries of copies from page-locked memory (``LINK_GB_PER_S``), and how far a
training step comes to the peaks. Per product of a linear layer with T tokens, each weight costs

    2 T / (PRODUCT_SHARE x peak)      the product itself
    2 T TOKEN_NUM_BYTES / bandwidth   what adapters, norms and activations read and write around it
    WEIGHT_NUM_BYTES / bandwidth      making its 4 bits dense: half a byte read, two written and two
                                      read by the product

The shares fit the kernels of steps in bf16 autocast with Liger's kernels that were measured on an
H200 and an H100 (benchmarks/results) to 15 %, but for one of 13 to 30 %;
``tests/planning/test_cards.py`` holds them to it. Rows were of 512 and 2,048 tokens; longer ones
have not been measured in that mode. Where the host is slower than the kernels (short
micro-batches on such cards) steps take longer. On other cards nothing has been measured, so times
on them are a forecast; a few steps on the machine are better.

Imports nothing slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from poros.config import budget_of
from poros.errors import PolicyError, quoted
from poros.planning.request import Speeds

LINK_GB_PER_S: Mapping[tuple[int, int], float] = MappingProxyType(
    {(3, 16): 12.0, (4, 8): 12.5, (4, 16): 25.0, (5, 8): 27.0, (5, 16): 54.0}
)
"""Copies from page-locked memory over a PCIe link, by generation and lanes: about 0.8 of the 15.8,
31.5 and 63 GB/s of 16 lanes, and 0.85 for generation 5, of which 55 were measured (transfer_h200).
A board or a slot with fewer lanes, or an older generation, halves it."""

PRODUCT_SHARE = 0.7
TOKEN_NUM_BYTES = 0.002
WEIGHT_NUM_BYTES = 4.5

LIBRARIES, HOPPER_LIBRARIES = (2 * (size + 2**20) for size in (8320 * 2**10, 2**25))
"""Workspaces of cuBLAS; ``poros.utils.devices.library_workspace`` has those of the current GPU."""

CONTEXT_NUM_BYTES = 2**29
"""Memory that CUDA and a desktop use before training allocates any."""


@dataclass(frozen=True)
class Card:
    """A card as it is published; GiB are 2**30 bytes, GB 1e9."""

    title: str
    memory_gib: int
    pcie_generation: int
    num_lanes: int
    tflop_per_s: float
    """Peak of dense bfloat16 products with float32 sums."""
    memory_gb_per_s: float
    library_num_bytes: int = LIBRARIES

    @property
    def budget(self) -> int:
        """The bytes that training may have of it."""
        return budget_of(self.memory_gib * 2**30 - CONTEXT_NUM_BYTES, self.memory_gib * 2**30)

    @property
    def copy_gb_per_s(self) -> float:
        """The assumed rate of its link from page-locked memory."""
        return LINK_GB_PER_S[self.pcie_generation, self.num_lanes]

    def speeds(self, num_tokens: int) -> Speeds:
        """Return rates to forecast a micro-batch of so many tokens; see the module's docstring."""
        product = 1 / (PRODUCT_SHARE * self.tflop_per_s)
        # TB/s of memory: both are then in picoseconds for each operation.
        memory = (TOKEN_NUM_BYTES + WEIGHT_NUM_BYTES / (2 * num_tokens)) / (
            self.memory_gb_per_s / 1e3
        )
        return Speeds(self.copy_gb_per_s, 1 / (product + memory), self.dense_tokens)

    @property
    def dense_tokens(self) -> float:
        """Tokens whose product with a weight takes as long as making its 4 bits dense twice."""
        memory = self.memory_gb_per_s / 1e3
        token = 1 / (PRODUCT_SHARE * self.tflop_per_s) + TOKEN_NUM_BYTES / memory
        return WEIGHT_NUM_BYTES / memory / token


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "rtx3060-12gb": Card("RTX 3060 12 GB", 12, 4, 16, 25.5, 360),
        "rtx3080": Card("RTX 3080", 10, 4, 16, 59.5, 760),
        "rtx3090": Card("RTX 3090", 24, 4, 16, 71.0, 936),
        "rtx3090ti": Card("RTX 3090 Ti", 24, 4, 16, 80.0, 1008),
        "rtx4060ti-16gb": Card("RTX 4060 Ti 16 GB", 16, 4, 8, 44.1, 288),
        "rtx4070": Card("RTX 4070", 12, 4, 16, 58.3, 504),
        "rtx4070ti": Card("RTX 4070 Ti", 12, 4, 16, 80.2, 504),
        "rtx4070tisuper": Card("RTX 4070 Ti SUPER", 16, 4, 16, 88.2, 672),
        "rtx4080": Card("RTX 4080", 16, 4, 16, 97.5, 717),
        "rtx4090": Card("RTX 4090", 24, 4, 16, 165.2, 1008),
        "rtx5060ti-16gb": Card("RTX 5060 Ti 16 GB", 16, 5, 8, 47.4, 448),
        "rtx5070": Card("RTX 5070", 12, 5, 16, 61.7, 672),
        "rtx5070ti": Card("RTX 5070 Ti", 16, 5, 16, 87.9, 896),
        "rtx5080": Card("RTX 5080", 16, 5, 16, 112.6, 960),
        "rtx5090": Card("RTX 5090", 32, 5, 16, 209.5, 1792),
        "rtxa6000": Card("RTX A6000", 48, 4, 16, 154.8, 768),
        "rtx6000ada": Card("RTX 6000 Ada", 48, 4, 16, 364.2, 960),
        "a10": Card("A10", 24, 4, 16, 125.0, 600),
        "a100-40gb": Card("A100 40 GB", 40, 4, 16, 312.0, 1555),
        "a100-80gb": Card("A100 80 GB", 80, 4, 16, 312.0, 2039),
        "l4": Card("L4", 24, 4, 16, 121.0, 300),
        "l40s": Card("L40S", 48, 4, 16, 362.0, 864),
        "h100": Card("H100 SXM", 80, 5, 16, 989.0, 3350, HOPPER_LIBRARIES),
        "h100-pcie": Card("H100 PCIe", 80, 5, 16, 756.0, 2000, HOPPER_LIBRARIES),
        "h200": Card("H200", 141, 5, 16, 989.0, 4800, HOPPER_LIBRARIES),
    }
)
"""Cards by the names that ``poros plan --card`` takes."""

_OF_DRIVERS: Mapping[str, str] = MappingProxyType(
    {
        "NVIDIA A100-PCIE-40GB": "a100-40gb",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA A100 80GB PCIe": "a100-80gb",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
    }
)
"""Names of drivers that are not those of cards."""


def find_card(name: str) -> Card:
    """Find a card by its name, however it is spelled: ``RTX 4090``, ``4090``, ``rtx-4090``.

    Raises:
        PolicyError: If there is none, or several; it says which are near.
    """
    wanted, plain = _plain(name), {_plain(known): known for known in CARDS}
    if wanted in plain:
        return CARDS[plain[wanted]]
    found = [known for each, known in plain.items() if wanted and each.startswith(wanted)]
    if len(found) == 1:
        return CARDS[found[0]]
    near = found or [plain[each] for each in get_close_matches(wanted, plain, n=4)] or list(CARDS)
    raise PolicyError(
        f"card: expected one of {', '.join(near)}, found {quoted(name)}; for another card give "
        "--vram"
    )


def card_of(name: str) -> Card | None:
    """Find the card of a GPU by the name that its driver gives it; None if it is unknown."""
    try:
        return find_card(_OF_DRIVERS.get(name, name))
    except PolicyError:
        return None


def _plain(name: str) -> str:
    """Reduce a name to letters and digits, without the vendor and "RTX"."""
    text = "".join(letter for letter in name.lower() if letter.isalnum())
    return text.removeprefix("nvidia").removeprefix("geforce").removeprefix("rtx")
