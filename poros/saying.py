"""Lines that a person is to see by default: what was prepared, found and decided.

They are logged at INFO. A script that has set up no logging would not see that, so there they go to
the error output, as Python does with warnings. ``logging.getLogger("poros").setLevel("WARNING")``
silences them.
"""

import logging
import sys
import time
from collections.abc import Callable


def say(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a line, and show it where nobody has said what becomes of such lines.

    Args:
        logger: Of the module that says it.
        message: With places for ``values``, as in ``logging``.
    """
    logger.info(message, *values)
    if not logger.hasHandlers() and not _has_level(logger):
        print(message % values, file=sys.stderr, flush=True)


class Slowly:
    """How far something is, said every few seconds while it lasts; nothing, if it is done by then.

    Args:
        logger: As for ``say``, like the message.
        message: With places for the values of ``step``.
        seconds: Between two lines, and before the first.
        clock: Seconds that pass.
    """

    def __init__(
        self,
        logger: logging.Logger,
        message: str,
        *,
        seconds: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._message = logger, message
        self._seconds, self._clock = seconds, clock
        self._said = clock()

    def step(self, *values: object) -> None:
        """Once for each of many like things."""
        now = self._clock()
        if now - self._said >= self._seconds:
            self._said = now
            say(self._logger, self._message, *values)


def _has_level(logger: logging.Logger) -> bool:
    """Whether somebody has set a level for these lines; the root's own default is none."""
    found: logging.Logger | None = logger
    while found is not None and found is not logging.getLogger():
        if found.level != logging.NOTSET:
            return True
        found = found.parent
    return False
