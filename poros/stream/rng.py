"""The random state a layer was run with, and running it again with the same one.

Dropout draws from the CPU generator or from the device's. A layer recomputed in backward must draw
the same masks as in forward, and must leave no trace: the generators end where the resident run
leaves them. (Poros technical report, Algorithm 1, lines 3-6 and 13-17.) Code of the user may draw
from Python's generator and NumPy's too.
"""

import random
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from poros.stream.within import Within


@dataclass(frozen=True, slots=True)
class RngStash:
    """States of the CPU generator and of one device's generator."""

    cpu: torch.Tensor
    device_state: torch.Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> "RngStash":
        """The states now. Copies; nothing advances and the host does not wait for the device."""
        on_gpu = device.type == "cuda"
        return cls(
            torch.default_generator.get_state(),
            _generator(device).get_state() if on_gpu else None,
            device,
        )

    def replay(self) -> AbstractContextManager[object]:
        """Run the body from these states; afterwards the generators are as they were before it."""

        def fill(stack: ExitStack) -> None:
            stack.callback(RngStash.capture(self.device).restore)
            self.restore()

        return Within(fill)

    def equals(self, other: "RngStash") -> bool:
        """Whether both hold the same states, bit for bit."""
        if self is other:
            return True
        if not torch.equal(self.cpu, other.cpu):
            return False
        if self.device_state is None or other.device_state is None:
            return self.device_state is other.device_state
        return torch.equal(self.device_state, other.device_state)

    def restore(self) -> None:
        """Have these states from now on."""
        torch.default_generator.set_state(self.cpu)
        if self.device_state is not None:
            _generator(self.device).set_state(self.device_state)


class Start(NamedTuple):
    """Random states at which code of the user begins: PyTorch's, Python's and NumPy's.

    Those of PyTorch can be planned, the others only be kept.
    """

    pytorch: RngStash
    python: object
    numpy: Any

    @classmethod
    def capture(cls, device: torch.device) -> "Start":
        """The states now."""
        return cls(RngStash.capture(device), random.getstate(), np.random.get_state())

    def replay(self) -> AbstractContextManager[object]:
        """Run the body from these states; afterwards all are as they were before it."""

        def fill(stack: ExitStack) -> None:
            stack.callback(Start.capture(self.pytorch.device).restore)
            self.restore()

        return Within(fill)

    def restore(self) -> None:
        """Have these states from now on."""
        self.pytorch.restore()
        random.setstate(self.python)  # type: ignore[arg-type]
        np.random.set_state(self.numpy)

    def equals(self, other: "Start") -> bool:
        """Whether both hold the same states."""
        return all(map(is_same_state, self, other))


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two states of one generator, as ``Start`` holds them, are the same."""
    if one is other:
        return True
    if isinstance(one, RngStash):
        return one.equals(other)
    return len(one) == len(other) and all(map(_is_same_part, one, other))


def _is_same_part(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def _generator(device: torch.device) -> torch.Generator:
    """A GPU's own. PyTorch's functions for its state take a detour several times as long."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
