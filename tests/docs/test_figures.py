"""What README and a page say that `poros plan` prints, it prints, for models of the real shapes."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import config_of
from tests.command import poros_command, text

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHOOSING = (ROOT / "docs" / "how-to" / "choosing.md").read_text(encoding="utf-8")
Plan = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def plan(planned_once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """Without a search of the longest rows that fit, which no page says of these models."""
    folder = tmp_path_factory.mktemp("configurations")

    def printed(size: str, *options: str) -> dict[str, Any]:
        config = config_of(f"qwen2.5-{size.lower()}")
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder / size)
        command = ("plan", str(folder / size), *options, "--accumulate", "8", "--ram", "128G")
        result = poros_command(*command, "--json")
        assert result.exit_code in (0, 1), text(result)
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poros.planning.report._longest", lambda *given, **options: 0)
        yield printed


def cells(page: str, pattern: str) -> list[list[str]]:
    """The rows of tables whose first cell is like that."""
    rows = re.findall(rf"^\| ((?:{pattern}) \|.*) \|$", page, re.MULTILINE)
    return [re.split(r" +\| *", row) for row in rows]


CARDS = {row[0]: row for row in cells(README, r"\d+B") if len(row) == 8}


@pytest.mark.parametrize("card", ["rtx3090", "rtx4090"])
@pytest.mark.parametrize("size", CARDS)
def test_the_table_of_cards(size: str, card: str, plan: Plan) -> None:
    _, _, _, host, _, slow, _, fast = CARDS[size]
    found = plan(size, "--card", card, "--seq", "512")
    assert f"about {slow if card == 'rtx3090' else fast} tokens/s" in found["verdict"]
    assert f"{found['host_num_bytes'] / 1e9:.1f} GB" == host
    if size == "7B":
        needed = f"{found['total_num_bytes'] / 1e9:.1f} GB"
        assert f"it does not count dropout (7B: {needed})" in README
        assert f"micro-batches of 7B keep the graphs of {found['keep_last']} layers" in README
    if (size, card) == ("14B", "rtx4090"):
        assert f"of 14B those of {found['keep_last']} (RTX 4090)" in README


# What a row of the page changes of rank 16 and 2,048 tokens.
CHANGES = {
    re.sub(r"^rank 16, ", "", name): (blocks, host)
    for name, blocks, host in cells(CHOOSING, r"rank \d+[^|]*|[\d,]+ tokens")
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_costs(change: str, plan: Plan) -> None:
    blocks, host = CHANGES[change]
    rank = (re.findall(r"rank (\d+)", change) or ["16"])[0]
    length = (re.findall(r"([\d,]+) tokens", change) or ["2048"])[0].replace(",", "")
    found = plan("7B", "--vram", "8GiB", "--seq", length, "--rank", rank)
    if not host:
        assert not found["fits"] and f"needs {found['total_num_bytes'] / 1e9:.1f} GB" in blocks
        return
    assert found["fits"] and f"{found['num_slots']} of 28" == blocks.partition(",")[0]
    assert f"{found['host_num_bytes'] / 1e9:.1f} GB" == host
    assert ("inputs of layers in host memory" in blocks) == found["offload_boundaries"]


def test_there_are_rows() -> None:
    assert len(CARDS) == 4 and len(CHANGES) == 7
