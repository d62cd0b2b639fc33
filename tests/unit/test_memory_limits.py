"""Host memory that may be used: the machine and control groups, from copies of /proc."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from poros.errors import HostMemoryError, PorosError
from poros.host.limits import RESERVE_NUM_BYTES, host_memory_left, require_host_memory

GIB = 2**30
NAMES = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}
"""Of limit and usage, in versions 1 and 2."""


@dataclass(frozen=True)
class Machine:
    """What Linux shows of one, and the memory that is left of it, in GiB."""

    name: str
    left: float
    available: int = 64
    cgroup: str = "0::/"
    groups: dict[str, tuple[object, int, str]] = field(default_factory=dict)
    """By path: limit, usage (in bytes), and the text of memory.stat."""
    version: int = 2

    def write(self, root: Path) -> Path:
        write(root, "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {self.available * 2**20} kB\n")
        write(root, "proc/self/cgroup", self.cgroup + "\n")
        write(root, "proc/sys/kernel/osrelease", "6.8.0-generic\n")
        above = "memory/" if self.version == 1 else ""
        for path, (limit, usage, stat) in self.groups.items():
            folder = f"sys/fs/cgroup/{above}{path}".rstrip("/")
            for name, value in zip(NAMES[self.version], (limit, usage), strict=True):
                write(root, f"{folder}/memory.{name}", f"{value}")
            write(root, f"{folder}/memory.stat", stat)
        return root


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def group(limit: int, usage: int, stat: str = "") -> tuple[object, int, str]:
    return limit * GIB, usage * GIB, stat


def tightest(depth: int) -> Machine:
    paths = ("", "batch", "batch/job")
    groups = {path: group(8 if at == depth else 32, 2) for at, path in enumerate(paths)}
    return Machine(f"group {depth} is the tightest", 6, cgroup="0::/batch/job", groups=groups)


CONTAINER = Machine("a container of version 2", 10, groups={"": group(16, 6)})
MACHINES = [
    Machine("the machine", 3, available=3),
    CONTAINER,
    Machine("no limit of version 2", 64, groups={"": ("max", 6 * GIB, "")}),
    # Page cache is given back, memory files are not.
    Machine(
        "page cache",
        1 + 5,
        groups={"": group(16, 15, f"anon 1\nfile {8 * GIB}\nshmem {3 * GIB}\n")},
    ),
    *map(tightest, (0, 1, 2)),
    Machine("the host's path inside", 3, cgroup="0::/docker/0123abcd", groups={"": group(4, 1)}),
    Machine(
        "version 1",
        3,
        cgroup="5:cpu,cpuacct:/x\n4:memory:/job\n1:name=systemd:/",
        groups={
            "": (2**63 - 4096, 50 * GIB, ""),
            "job": group(8, 7, f"total_cache {3 * GIB}\ntotal_shmem {1 * GIB}\n"),
        },
        version=1,
    ),
    Machine(
        "no limit of version 1",
        64,
        cgroup="4:memory:/",
        groups={"": (2**63 - 4096, 5 * GIB, f"total_cache {3 * GIB}\n")},
        version=1,
    ),
    Machine("over the limit", 0, groups={"": group(2, 3)}),
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_what_is_left(tmp_path: Path, machine: Machine) -> None:
    room = host_memory_left(machine.write(tmp_path))
    assert room is not None and room.num_bytes == machine.left * GIB


def test_a_system_that_says_nothing_refuses_nothing(tmp_path: Path) -> None:
    """And this machine has some memory left."""
    room = host_memory_left(Path("/"))
    assert room is not None and room.num_bytes > 0
    assert host_memory_left(tmp_path) is None
    require_host_memory(2**60, "everything", tmp_path)


def test_a_refusal_has_the_figures_and_the_way_out(tmp_path: Path) -> None:
    root = CONTAINER.write(tmp_path)
    require_host_memory(9 * GIB, "a model", root)
    with pytest.raises(HostMemoryError) as caught:
        require_host_memory(9 * GIB + 1, "the frozen base of X", root)
    assert isinstance(caught.value, PorosError) and isinstance(caught.value, MemoryError)
    for said in (
        "9.66 GB of host memory for the frozen base of X",
        "1.07 GB for everything else",
        "10.74 GB left",
        "control group /: 6.44 GB of 17.18 GB used",
        "host_budget=9663676416",
    ):
        assert said in str(caught.value)
    assert RESERVE_NUM_BYTES == GIB
