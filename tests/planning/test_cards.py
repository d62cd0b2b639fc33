"""Cards by name: what is published of them, what is assumed, and how far the assumptions hold."""

import pytest
import torch

from poros.config import budget_of
from poros.errors import PolicyError
from poros.planning.cards import CARDS, LINK_GB_PER_S, card_of, find_card
from poros.utils.devices import library_workspace

TITLES = {
    "rtx4090": "RTX 4090",
    "RTX 4090": "RTX 4090",
    "4090": "RTX 4090",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "rtx3060": "RTX 3060 12 GB",
    "4060 Ti": "RTX 4060 Ti 16 GB",
    "a100-80GB": "A100 80 GB",
    "NVIDIA H200": "H200",
    "rtx4070": "RTX 4070",
}


def test_a_card_is_found_however_it_is_spelled_or_refused_with_those_that_are_near() -> None:
    assert {name: find_card(name).title for name in TITLES} == TITLES
    for name, near in {"a100": "a100-40gb, a100-80gb", "rtx9090": "rtx", "": "h200"}.items():
        with pytest.raises(PolicyError, match="card: expected one of") as caught:
            find_card(name)
        assert near in str(caught.value) and "--vram" in str(caught.value)


def test_a_card_is_found_by_the_name_that_its_driver_gives_it() -> None:
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA GeForce RTX 4090": "rtx4090"}
    assert {name: card_of(name) for name in names} == {n: CARDS[c] for n, c in names.items()}
    assert card_of("NVIDIA GeForce RTX 4090 Laptop GPU") is None


def test_every_card_has_a_link_whose_rate_is_below_what_it_is_built_for() -> None:
    per_lane = {3: 0.985, 4: 1.97, 5: 3.94}  # GB/s, PCIe base specification
    for card in CARDS.values():
        most = per_lane[card.pcie_generation] * card.num_lanes
        assert 0.7 * most < card.copy_gb_per_s < 0.9 * most, card
    assert {(card.pcie_generation, card.num_lanes) for card in CARDS.values()} <= set(LINK_GB_PER_S)


def test_a_card_grants_what_prepare_takes_of_one() -> None:
    gib = 2**30
    assert budget_of(23 * gib, 24 * gib) == 23 * gib - int(2.4 * gib)
    assert budget_of(7 * gib, 8 * gib) == 6 * gib and budget_of(1, 8 * gib) == 0
    assert find_card("rtx4090").budget == 24 * gib - gib // 2 - int(2.4 * gib)


@pytest.mark.parametrize(("name", "capability"), [("rtx4090", (8, 9)), ("h200", (9, 0))])
def test_libraries_take_what_they_take_of_such_a_gpu_at_hand(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = library_workspace(torch.device("cuda", 0))
    assert CARDS[name].library_num_bytes == found > 0


MEASURED = [
    # benchmarks/results: operations of a step (products of layers and head, attention) over its
    # time. graphs_h200, 7B with two slots, where kernels are the floor; 512 tokens: all kept.
    ("h200", 512, 199.0),
    ("h200", 2048, 323.0),
    ("h200", 8192, 360.0),
    # lora_h100: kernels of one layer, 7B and 32B.
    ("h100", 512, 196.0),
    ("h100", 512, 254.0),
]


@pytest.mark.parametrize(("name", "num_tokens", "tflop_per_s"), MEASURED)
def test_rates_are_within_a_third_of_those_that_were_measured(
    name: str, num_tokens: int, tflop_per_s: float
) -> None:
    found = CARDS[name].speeds(num_tokens).tflop_per_s
    assert found / tflop_per_s * 1.01 > 3 / 4 and found / tflop_per_s < 4 / 3
