"""Which lines of the product each test runs: a plugin of pytest, which ``tools.mutants`` reads.

    REACHED=map python -m pytest -p tools.reached -n 2 -m "not gpu and not slow" tests

Each process of pytest writes one JSON file into the folder of ``REACHED``: ``tests``, for each test
its id, its seconds and whether it passed; and ``lines``, for each file and line the tests that ran
it, as the bits of a number in hexadecimal. Processes that tests start themselves are not seen.
Lines come from ``sys.monitoring``, so Python 3.12 or newer is needed; it costs next to nothing.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(f"{ROOT}{os.sep}{name}{os.sep}" for name in ("poros", "loaders"))


class Reached:
    """What the tests of one process have run so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tests: list[tuple[str, float, bool]] = []
        self._seconds, self._has_passed = 0.0, True
        self._lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._monitoring: Any = getattr(sys, "monitoring", None)
        if self._monitoring is None:
            raise pytest.UsageError(
                "tools.reached: expected Python 3.12 or newer, for sys.monitoring, found "
                f"{sys.version.split()[0]}"
            )
        tool, events = self._monitoring.COVERAGE_ID, self._monitoring.events
        self._monitoring.use_tool_id(tool, "poros")
        self._monitoring.register_callback(tool, events.LINE, self._ran)
        self._monitoring.set_events(tool, events.LINE)

    def _ran(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(_OURS):
            self._lines[code.co_filename][line] |= 1 << len(self._tests)
        return self._monitoring.DISABLE  # until the next test begins

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """One test: its fixtures, it, and what is taken down behind it."""
        self._monitoring.restart_events()
        self._seconds, self._has_passed = 0.0, True
        result = yield
        self._tests.append((item.nodeid, self._seconds, self._has_passed))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        self._has_passed &= report.passed

    def pytest_sessionfinish(self) -> None:
        """Write what was seen."""
        lines = {
            os.path.relpath(file, ROOT): {line: f"{bits:x}" for line, bits in found.items()}
            for file, found in self._lines.items()
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{os.getpid()}.json"
        path.write_text(json.dumps({"tests": self._tests, "lines": lines}))


def pytest_configure(config: pytest.Config) -> None:
    """Watch, where tests run: not in the process that hands them to others."""
    folder, is_controller = os.environ.get("REACHED"), not hasattr(config, "workerinput")
    if folder and not (is_controller and config.getoption("numprocesses", None)):
        config.pluginmanager.register(Reached(Path(folder)))


class Map:
    """The tests that run a line, as the processes of a run have written it."""

    def __init__(self, folder: Path) -> None:
        self._parts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    def tests(self, file: str, first: int, last: int) -> list[str]:
        """Ids of the tests that ran one of these lines of ``file`` and passed, the quickest first.

        If ``last`` is 0, of those that ran anything of the file.
        """
        found = set()
        for part in self._parts:
            by_line = part["lines"].get(file, {})
            bits = 0
            for line, those in by_line.items():
                if not last or first <= int(line) <= last:
                    bits |= int(those, 16)
            found |= {
                (seconds, name)
                for number, (name, seconds, has_passed) in enumerate(part["tests"])
                if has_passed and bits >> number & 1
            }
        return [name for _, name in sorted(found)]
