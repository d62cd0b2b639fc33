"""What decides what a layer computes, besides its arguments.

Note: Rematerialization equality
    The recomputed forward must see the same bits as the forward did. Besides arguments and adapters
    (guarded by version counters, ``poros.stream.unchanged``) that is: random states, autocast, the
    training flags of the layer's modules, and the process-wide settings that pick kernels
    (``poros.stream.settings``). Each is captured at the layer's forward and *replayed* at its
    recomputation, then put back. Not covered: the generators of Python and NumPy.

    The set of active adapters, their scalings and whether they are disabled or merged is captured
    too, but a change of it between forward and backward *raises*: PEFT keeps it in many places, and
    training on after such a change is hardly ever meant.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

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


@dataclass(frozen=True, slots=True)
class AmbientState:
    """The state around one forward of one layer. See "Rematerialization equality"."""

    rng: RngStash
    autocast: tuple[AutocastState, ...]
    settings: Settings
    training: tuple[bool, ...]

    @classmethod
    def capture(cls, device: torch.device, training: tuple[bool, ...]) -> "AmbientState":
        """Now; ``training``: of the modules of the layer."""
        device_types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        return cls(
            rng=RngStash.capture(device),
            autocast=tuple(map(AutocastState.capture, device_types)),
            settings=Settings.capture(),
            training=training,
        )

    @property
    def is_autocast(self) -> bool:
        return any(autocast.enabled for autocast in self.autocast)

    def but_random(self, modules: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Run the body in this state, random states as they are; then all is as it was before."""

        def fill(stack: ExitStack) -> None:
            enter_autocast(self.autocast, stack)
            stack.enter_context(self.settings.replay())
            if _training_flags(modules) != self.training:
                for module, wanted in zip(modules, self.training, strict=True):
                    if module.training != wanted:
                        stack.callback(setattr, module, "training", module.training)
                        module.training = wanted

        return Within(fill)


def autocast_of(device: torch.device) -> tuple[AutocastState, ...]:
    """Autocast now, of each device type that takes part in work on ``device``."""
    device_types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    return tuple(map(AutocastState.capture, device_types))


def enter_autocast(states: Sequence[AutocastState], stack: ExitStack) -> None:
    """Have autocast as in ``states`` until ``stack`` is closed, without its cache."""
    for state in states:
        if state.enabled or torch.is_autocast_enabled(state.device_type):
            stack.enter_context(state.enter())


def _training_flags(modules: Sequence[nn.Module]) -> tuple[bool, ...]:
    return tuple(map(attrgetter("training"), modules))


def adapter_state(modules: Sequence[nn.Module]) -> tuple[object, ...]:
    """Which adapters act in these modules, and how; equal values mean equal arithmetic."""
    tuners: Sequence[Any] = modules
    return tuple(
        (
            tuple(tuner.active_adapters),
            tuner.disable_adapters,
            tuple(tuner.merged_adapters),
            tuple(tuner.scaling.items()) if hasattr(tuner, "scaling") else (),
        )
        for tuner in tuners
    )
