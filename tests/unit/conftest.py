"""The registry of the gates, as it is and an empty one in its place."""

from pathlib import Path

import pytest

from poros.gates import registry
from poros.gates.registry import Record, read_registry

REAL = registry.PATH


@pytest.fixture
def records() -> dict[str, Record]:
    """The real ones of families, whatever ``path`` puts in their place."""
    return dict(read_registry(REAL).records)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty registry in the place of the real one."""
    monkeypatch.setattr(registry, "PATH", tmp_path / "registry.json")
    return tmp_path / "registry.json"
