"""A stand-in for the driver that page-locks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class FakeDriver:
    """Counts page-locks; refuses from registration number ``refuse_at`` (from 0) on."""

    def __init__(self, refuse_at: int = 1_000_000) -> None:
        self.refuse_at = refuse_at
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        if self.calls.count("register") >= self.refuse_at:
            self.calls.append("refused")
            return 2
        self.calls.append("register")
        assert pointer not in self.locked and flags == 0
        self.locked[pointer] = num_bytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append("unregister")
        del self.locked[pointer]
        return 0


@contextmanager
def _no_device(device: torch.device) -> Iterator[None]:
    yield


def install(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    def synchronize(device: Any = None) -> None:
        driver.calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", _no_device)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return driver
