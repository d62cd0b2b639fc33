"""Reads how much host memory this process may still use.

Two limits stop an allocation that the system has granted: the memory of the machine, and that of a
control group (of a container or a batch system). The lower one counts. On a system that reports no
limits nothing is refused. With a limit on the address space of the process (``ulimit -v``) the
system refuses the allocation itself.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from poros.errors import HostMemoryError
from poros.utils.formatting import size

RESERVE_NUM_BYTES = 2**30
"""Memory that is left for everything else: interpreter, one tensor in transit, page cache."""

_NO_LIMIT = 2**60
"""Version 1 writes a number of about 2**63 where there is no limit."""


class MemoryLimit(NamedTuple):
    """The bytes that one limit still grants."""

    num_bytes: int
    limit: str
    """Description of the limit, with its figures."""


def host_memory_left(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the host memory that this process may still use, or None if it is not reported.

    Args:
        root: Folder of the file systems ``proc`` and ``sys`` (for tests).
    """
    machine = [
        MemoryLimit(num_bytes, f"the machine has {size(num_bytes)} available")
        for num_bytes in _meminfo(root, "MemAvailable")
    ]
    return min([*machine, *(left for _, left in _control_groups(root))], default=None)


def host_memory() -> int | None:
    """Return the bytes of host memory that this machine and its control groups grant, or None."""
    root = Path("/")
    whole = [*_meminfo(root, "MemTotal"), *(limit for limit, _ in _control_groups(root))]
    return min(whole, default=None)


def require_host_memory(num_bytes: int, what: str, root: Path = Path("/")) -> None:
    """Refuse an allocation that would not fit, before anything is read or written.

    Args:
        num_bytes: Bytes that are going to be allocated, and written to.
        what: Purpose of the memory, for the message: "the frozen base of Qwen2.5-32B".
        root: See ``host_memory_left``.

    Raises:
        HostMemoryError: If less than ``num_bytes`` and ``RESERVE_NUM_BYTES`` is left. The message
            names the limit, and what to do.
    """
    needed = num_bytes + RESERVE_NUM_BYTES
    room = host_memory_left(root)
    if room is not None and room.num_bytes < needed:
        gc.collect()  # a model that was deleted, or a load that failed, may still be there
        room = host_memory_left(root)
    if room is None or needed <= room.num_bytes:
        return
    raise HostMemoryError(
        f"expected {size(num_bytes)} of host memory for {what} and {size(RESERVE_NUM_BYTES)} for "
        f"everything else, found {size(room.num_bytes)} left ({room.limit}). Raise that limit, "
        "free memory, or keep only the first blocks in memory and stream the rest from disk: "
        f"poros.load(..., store=DIR, host_budget={max(room.num_bytes - RESERVE_NUM_BYTES, 0)})"
    )


def _meminfo(root: Path, field: str) -> list[int]:
    """Return the bytes that the kernel reports under that name, if it does."""
    found = _fields(root / "proc/meminfo").get(f"{field}:")
    return [] if found is None else [1024 * found]


def _control_groups(root: Path) -> Iterator[tuple[int, MemoryLimit]]:
    """Yield the limit of each group above this process, of versions 1 and 2, and what it leaves."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            top, names, cached = mounts, ("max", "current"), ("file", "shmem")
        elif "memory" in controllers.split(","):
            top, names = mounts / "memory", ("limit_in_bytes", "usage_in_bytes")
            cached = ("total_cache", "total_shmem")
        else:
            continue
        inside = Path(path.lstrip("/"))
        # In a container the path may be that of the host, and only the top is mounted.
        for group in dict.fromkeys([inside, *inside.parents, Path()]):
            limit, usage = (_number(top / group / f"memory.{name}") for name in names)
            if limit is None or usage is None or limit >= _NO_LIMIT:
                continue
            fields = _fields(top / group / "memory.stat")
            # The page cache counts as used, but goes when memory is needed. What is shared or
            # in memory files is page cache too, and stays.
            pages, shared = (fields.get(name, 0) for name in cached)
            cache = max(pages - shared, 0)
            said = f"control group {path}: {size(usage)} of {size(limit)} used"
            yield limit, MemoryLimit(min(max(limit - usage, 0) + cache, limit), said)


def _fields(path: Path) -> dict[str, int]:
    """Read names and numbers, line by line; a unit may follow."""
    lines = (line.split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
