"""Host memory that may be used: the machine, control groups and ulimits, from copies of /proc."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from poros.errors import HostMemoryError, PorosError
from poros.host.limits import (
    RESERVE_NUM_BYTES,
    explain_pin_budget,
    host_memory_left,
    require_host_memory,
)

GIB = 2**30


def machine(root: Path, available: int = 64 * GIB, cgroup: str = "0::/") -> Path:
    """A root directory as Linux shows it."""
    write(root, "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n")
    write(root, "proc/self/cgroup", cgroup + "\n")
    write(root, "proc/self/statm", "1000 500 100 10 0 400 0\n")
    write(root, "proc/sys/kernel/osrelease", "6.8.0-generic\n")
    return root


def write(root: Path, name: str, text: str | int) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}")


def group2(root: Path, path: str, limit: int | str, usage: int, stat: str = "") -> None:
    folder = f"sys/fs/cgroup/{path}".rstrip("/")
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.current", usage)
    write(root, f"{folder}/memory.stat", stat)


def group1(root: Path, path: str, limit: int, usage: int, stat: str = "") -> None:
    folder = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    write(root, f"{folder}/memory.limit_in_bytes", limit)
    write(root, f"{folder}/memory.usage_in_bytes", usage)
    write(root, f"{folder}/memory.stat", stat)


def left(root: Path) -> int:
    room = host_memory_left(root)
    assert room is not None
    return room.num_bytes


def test_the_machine(tmp_path: Path) -> None:
    assert left(machine(tmp_path, 3 * GIB)) == 3 * GIB


def test_a_system_that_says_nothing_refuses_nothing(tmp_path: Path) -> None:
    assert host_memory_left(tmp_path) is None
    require_host_memory(2**60, "everything", tmp_path)


def test_a_container_of_version_2(tmp_path: Path) -> None:
    root = machine(tmp_path)
    group2(root, "", 16 * GIB, 6 * GIB)
    assert left(root) == 10 * GIB


def test_no_limit_of_version_2(tmp_path: Path) -> None:
    root = machine(tmp_path)
    group2(root, "", "max", 6 * GIB)
    assert left(root) == 64 * GIB


def test_page_cache_is_given_back_and_memory_files_are_not(tmp_path: Path) -> None:
    root = machine(tmp_path)
    group2(root, "", 16 * GIB, 15 * GIB, f"anon 1\nfile {8 * GIB}\nshmem {3 * GIB}\n")
    assert left(root) == 1 * GIB + 5 * GIB


@pytest.mark.parametrize("tightest", [0, 1, 2])
def test_every_group_above_counts(tightest: int, tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/batch/job")
    for depth, path in enumerate(("", "batch", "batch/job")):
        group2(root, path, (8 if depth == tightest else 32) * GIB, 2 * GIB)
    assert left(root) == 6 * GIB


def test_the_path_of_the_host_inside_a_container(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/docker/0123abcd")
    group2(root, "", 4 * GIB, 1 * GIB)
    assert left(root) == 3 * GIB


def test_version_1(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="5:cpu,cpuacct:/x\n4:memory:/job\n1:name=systemd:/")
    group1(root, "", 2**63 - 4096, 50 * GIB)
    group1(root, "job", 8 * GIB, 7 * GIB, f"total_cache {3 * GIB}\ntotal_shmem {1 * GIB}\n")
    assert left(root) == 3 * GIB


def test_over_the_limit_is_nothing_left(tmp_path: Path) -> None:
    root = machine(tmp_path)
    group2(root, "", 2 * GIB, 3 * GIB)
    assert left(root) == 0


def test_a_refusal_has_the_figures_and_the_way_out(tmp_path: Path) -> None:
    root = machine(tmp_path)
    group2(root, "", 16 * GIB, 6 * GIB)
    require_host_memory(9 * GIB, "a model", root)
    with pytest.raises(HostMemoryError) as caught:
        require_host_memory(9 * GIB + 1, "the frozen base of X", root)
    assert isinstance(caught.value, PorosError) and isinstance(caught.value, MemoryError)
    message = str(caught.value)
    for each in (
        "9.66 GB of host memory for the frozen base of X",
        "1.07 GB for everything else",
        "10.74 GB left",
        "control group /: 6.44 GB of 17.18 GB used",
        "host_budget=9663676416",
    ):
        assert each in message, message
    assert RESERVE_NUM_BYTES == GIB


LIMITED = """
import resource, sys
sys.path[:0] = [{root!r}]
from poros.host.limits import host_memory_left, require_host_memory
limit = getattr(resource, {name!r})
resource.setrlimit(limit, (2**40, 2**40))
wide = host_memory_left()
used = 2**31 if {name!r} == "RLIMIT_DATA" else 2**33
resource.setrlimit(limit, (used, used))
room = host_memory_left()
assert room.num_bytes < used, room
assert {option!r} in room.limit, room
try:
    require_host_memory(used, "a model")
except MemoryError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("name", "option"), [("RLIMIT_AS", "ulimit -v"), ("RLIMIT_DATA", "ulimit -d")]
)
def test_limits_of_the_process(name: str, option: str) -> None:
    """In a process of its own, with real limits."""
    assert hasattr(resource, name)
    program = LIMITED.format(root=str(Path(__file__).parents[1]), name=name, option=option)
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.stdout == "HostMemoryError\n", found.stderr


def test_this_machine_has_some_memory_left() -> None:
    assert left(Path("/")) > 0


def test_the_pin_hint(tmp_path: Path) -> None:
    root = machine(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4_000_000, before[1]))
    try:
        hint = explain_pin_budget(root)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert "ulimit -l" in hint and "4 MB here" in hint and "WSL" not in hint
    write(root, "proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    assert ".wslconfig" in explain_pin_budget(root)
