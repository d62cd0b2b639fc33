"""Formats bytes, durations and forecasts for people."""

import math


def size(num_bytes: int) -> str:
    """Format bytes in the largest unit that does not round them to 0; GB are 1e9 bytes."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= one / 10:
            return f"{num_bytes / one:.{2 if unit == 'GB' else 1}f} {unit}"
    return counted(num_bytes, "byte")


def counted(number: int, what: str) -> str:
    """Format a number of things: ``1 step``, ``1,000 steps``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format seconds, such as ``4 h 12 min``."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes / 1440:.1f} days"


def two_digits(value: float) -> str:
    """Round a forecast to two significant digits."""
    if value <= 0:
        return "0"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def first_line(error: Exception) -> str:
    """What an error says, without the traces of other languages behind it."""
    return str(error).partition("\n")[0]
