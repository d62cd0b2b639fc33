"""What is around a call of a layer, besides its arguments: taken at one time, and had again.

Note: Rematerialization equality
    The recomputed forward must see the same bits as the forward did. Besides arguments and the
    layer itself (compared: ``poros.stream.condition``) that is: random states, autocast, the
    training flags of the layer's modules, and the process-wide settings that pick kernels. Each is
    captured at the layer's forward and *replayed* at its recomputation, then put back. Not covered:
    the generators of Python and NumPy.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from poros.stream.rng import RngStash
from poros.stream.settings import Settings
from poros.stream.within import Within


class AutocastState(NamedTuple):
    """Autocast of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls, device_type: str) -> "AutocastState":
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )

    def now(self) -> "AutocastState":
        """Of the same device type, at this moment."""
        return self.capture(self.device_type)

    def enter(self) -> torch.autocast:
        """The same autocast, without its cache of cast weights.

        The cache is keyed by tensor: a cast of an adapter that is there would be reused, and the
        graph of a recomputation would not be its own.
        """
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


class Surroundings(NamedTuple):
    """Autocast and the settings that pick kernels, at one time."""

    autocast: tuple[AutocastState, ...]
    """Of each device type that takes part."""
    settings: Settings

    @classmethod
    def capture(cls, device: torch.device) -> "Surroundings":
        """Those of now, for work on ``device``."""
        device_types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        return cls(tuple(map(AutocastState.capture, device_types)), Settings.capture())

    @property
    def is_autocast(self) -> bool:
        return any(each.enabled for each in self.autocast)

    def enter(self, stack: ExitStack) -> None:
        """Have them until ``stack`` is closed."""
        for each in self.autocast:
            if each.enabled or torch.is_autocast_enabled(each.device_type):
                stack.enter_context(each.enter())
        stack.enter_context(self.settings.replay())


@dataclass(frozen=True, slots=True)
class AmbientState:
    """The state around one forward of one layer. See "Rematerialization equality"."""

    rng: RngStash
    surroundings: Surroundings
    training: tuple[bool, ...]
    """Of the modules of the layer."""

    def at(self, rng: RngStash) -> "AmbientState":
        """The same with other random states."""
        return AmbientState(rng, self.surroundings, self.training)

    def but_random(self, modules: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Run the body in this state, random states as they are; then all is as it was before."""

        def fill(stack: ExitStack) -> None:
            self.surroundings.enter(stack)
            if tuple(map(_TRAINING, modules)) != self.training:
                for module, wanted in zip(modules, self.training, strict=True):
                    if module.training != wanted:
                        stack.callback(setattr, module, "training", module.training)
                        module.training = wanted

        return Within(fill)


_TRAINING = attrgetter("training")
