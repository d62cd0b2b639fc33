"""Code that stops in the middle, and goes on later on a stack of its own.

All of it runs on the thread that asks for it, one piece at a time. So what PyTorch keeps for each
thread (device, stream, handles of its libraries and their workspaces, the order of nodes) is that
of a plain call; autocast, the gradient mode and settings, which code may have entered before it
stopped, are exchanged.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from poros.stream.settings import Surroundings


class Stopped(BaseException):
    """Raised in code that is to go on no more."""


class Regions(NamedTuple):
    """The regions around of autocast and gradients, and the settings that pick kernels, then."""

    surroundings: Surroundings
    has_gradients: bool
    """Whether gradients are enabled."""
    has_cache: bool
    """Whether they keep what they have cast."""
    depth: int

    @classmethod
    def capture(cls, device: torch.device) -> "Regions":
        """Those of now, for work on ``device``."""
        torch.autocast_increment_nesting()
        depth = torch.autocast_decrement_nesting()
        has_cache, has_gradients = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
        return cls(Surroundings.capture(device), has_gradients, has_cache, depth)

    def replace(self, now: "Regions") -> None:
        """Have these in place of those of ``now``."""
        wanted, found = self.surroundings, now.surroundings
        for mine, other in zip(wanted.autocast, found.autocast, strict=True):
            if mine != other:
                torch.set_autocast_enabled(mine.device_type, mine.enabled)
                torch.set_autocast_dtype(mine.device_type, mine.dtype)
        torch.set_autocast_cache_enabled(self.has_cache)
        torch._C._set_grad_enabled(self.has_gradients)
        if wanted.settings != found.settings:
            wanted.settings.restore()
        for _ in range(now.depth, self.depth):
            torch.autocast_increment_nesting()
        for _ in range(self.depth, now.depth):
            torch.autocast_decrement_nesting()


class ParkedCode:
    """Code that can be stopped by ``park``, called from within it.

    Attributes:
        result: What it has returned.
        error: What it has raised.
        is_over: Whether it has ended.
        has_changed_settings: Whether it has left other regions or settings behind.
        regions: Those that it is in; None before it begins.
    """

    def __init__(self, run: Callable[[], Any], device: torch.device) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = self.has_changed_settings = False
        self._run: Callable[[], Any] | None = run
        self._device = device
        self.regions: Regions | None = None
        self._stack = greenlet(self._run_through)
        self._stack.gr_context = copy_context()

    def resume(self) -> None:
        """Run it until it parks or ends; what it raises is kept.

        An autocast region keeps no cast beyond the place where it parks, unless one is around all.
        """
        around = self._enter()
        try:
            self._stack.parent = getcurrent()
            self._stack.switch()
        finally:
            self._leave(around)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run the body in the regions and the settings that the code is in."""
        around = self._enter()
        try:
            yield
        finally:
            self._leave(around)

    def _enter(self) -> Regions:
        around = Regions.capture(self._device)
        if self.regions not in (None, around):
            self.regions.replace(around)
        return around

    def _leave(self, around: Regions) -> None:
        self.regions = Regions.capture(self._device)
        if not around.surroundings.is_autocast:
            torch.clear_autocast_cache()
        if self.is_over:
            self.has_changed_settings = self.regions != around
        elif self.regions != around:
            around.replace(self.regions)

    def run_in_context(self, run: Callable[[], Any]) -> Any:
        """What ``run`` gives, called with the context variables that the code has set."""
        context = self._stack.gr_context
        return run() if context is None else context.run(run)

    def reraise(self) -> None:
        """Raise what it has raised, if anything; it is not held from then on."""
        # It holds frames that hold this: what contexts of theirs have left to undo would be undone
        # whenever Python's collector comes by, within a visit for one.
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    @property
    def is_running(self) -> bool:
        return getcurrent() is self._stack

    def park(self) -> None:
        """Stop here until it is resumed."""
        self._stack.parent.switch()

    def stop(self) -> None:
        """Have it end where it is parked, by an exception that is no error."""
        while self._stack and not self._stack.dead:
            with self.inside():
                self._stack.parent = getcurrent()
                self._stack.throw(Stopped)

    def _run_through(self) -> None:
        run, self._run = self._run, None
        try:
            if run is not None:
                self.result = run()
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
