"""A short run of ``tests.fuzz`` from a fixed seed, and that it would find what it looks for."""

from pathlib import Path

import pytest

from tests.fuzz import make_bases, run


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    make_bases(folder)
    return folder


def test_programs_from_a_fixed_seed(bases: Path) -> None:
    """Refused by name, or loaded: no other error, no signal, no bytes that differ."""
    found = run(7, num_programs=40, bases=bases)
    assert found.failures == [] and found.num_programs == 40
    assert found.outcomes["refused"] > 10
    assert sum(number for name, number in found.outcomes.items() if "ran" in name) > 0


def test_control_what_it_looks_for_is_found(bases: Path) -> None:
    """An untyped error, a crash and a hang, each of which the programs after it survive."""
    found = run(
        7, num_programs=3, controls={0: "raise", 1: "crash", 2: "hang"}, hang_s=10, bases=bases
    )
    assert [each["outcome"] for each in found.failures] == ["untyped", "signal", "hang"]
    assert [each["number"] for each in found.failures] == [0, 1, 2]
    assert found.failures[1]["what"] == "SIGSEGV" and found.num_programs == 3
