"""How the package's log lines reach a user who has not configured logging.

Lines at INFO report what was prepared, found and decided. In a script without any logging
configuration they go to the error output. ``logging.getLogger("poros").setLevel("WARNING")``
silences them.
"""

import logging
import sys
import time

_PACKAGE = "poros"
_SECONDS = 3.0  # between two lines of progress, and before the first


def show_info_by_default() -> None:
    """Print the package's INFO lines to stderr unless the program configures logging.

    Does nothing where the package's logger has a level or a handler, or the root logger has a
    handler. Where the program configures logging later, the next line undoes it. Called by
    ``poros.load`` and ``poros.prepare``; importing the package configures nothing.
    """
    logger = logging.getLogger(_PACKAGE)
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)


class _StderrHandler(logging.Handler):
    """Prints messages to the current ``sys.stderr``, which notebooks and tests replace."""

    def handle(self, record: logging.LogRecord) -> bool:
        logger = logging.getLogger(_PACKAGE)
        if not logging.getLogger().handlers and logger.handlers == [self]:
            return bool(super().handle(record))
        logger.removeHandler(self)
        if logger.level == logging.INFO:
            logger.setLevel(logging.NOTSET)
        return False

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class ProgressLog:
    """Logs the progress of a loop every few seconds; a short loop logs nothing.

    Unlike a progress bar, it is never closed, so a loop may be abandoned half way.

    Args:
        message: Has placeholders for the values of ``step``, as in ``logging``.
    """

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger, self._message = logger, message
        self._last = time.monotonic()

    def step(self, *values: object) -> None:
        """Count one iteration; log ``values`` if the last line is old enough."""
        now = time.monotonic()
        if now - self._last >= _SECONDS:
            self._last = now
            self._logger.info(self._message, *values)
