"""What is around a call of code, and calling it in the same from elsewhere."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch

from poros.stream.settings import Settings
from poros.stream.state import AutocastState, autocast_of
from poros.stream.within import Within


class Surroundings(NamedTuple):
    """Autocast, the settings that pick kernels, and who watches, at one time."""

    autocast: tuple[AutocastState, ...]
    has_cache: bool
    """Whether autocast keeps what it has cast."""
    settings: Settings
    watchers: tuple[int, int, bool]
    """How many modes see operators and functions, and whether somebody packs saved tensors."""

    @classmethod
    def capture(cls, device: torch.device) -> "Surroundings":
        """Those of now, for work on ``device``."""
        has_cache = torch.is_autocast_cache_enabled()
        return cls(autocast_of(device), has_cache, Settings.capture(), _watchers())

    @property
    def is_autocast(self) -> bool:
        return any(each.enabled for each in self.autocast)

    def entering(self, now: "Surroundings") -> Callable[[], AbstractContextManager[object]]:
        """What has the body in these, where those of ``now`` are around; watchers left out.

        Each body is an autocast region of its own.
        """
        if self[:3] == now[:3] and not self.is_autocast:
            return nullcontext

        def fill(stack: ExitStack) -> None:
            for each in self.autocast:
                if each.enabled:
                    stack.enter_context(
                        torch.autocast(each.device_type, each.dtype, cache_enabled=self.has_cache)
                    )
            stack.enter_context(self.settings.replay())

        return lambda: Within(fill)


def _watchers() -> tuple[int, int, bool]:
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
    )
