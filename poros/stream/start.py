"""The random states at which code of the user begins: PyTorch's, Python's and NumPy's."""

import random
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from poros.stream.rng import RngStash
from poros.stream.within import Within


class Start(NamedTuple):
    """All of them at one time. Those of PyTorch can be planned, the others only be kept."""

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
        return (
            self.pytorch.equals(other.pytorch)
            and self.python == other.python
            and all(map(np.array_equal, self.numpy, other.numpy))
        )
