"""What every test runs under: one thread, no tokenizer threads, a GPU for the tests that need one.

The markers are declared in pyproject.toml; `cover` is explained in tests/covers.py.
"""

import gc
import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version

# Read by tokenizers when it first works, so it is set before any test imports transformers.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# For processes that tests start, too: threads that wait for each other's core spin.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests.covers import leave_out

gc.set_threshold(50_000)  # with 700, a tenth of the time: models are many objects
if not torch.cuda.is_available():
    # Read by Triton when it is imported: kernels run in its interpreter, on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Run torch on one CPU thread: the number of threads changes the order of sums, and so bits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def looked_up_once() -> Iterator[None]:
    """Releases of libraries, and what Jinja makes of a template: a tenth of a short fine-tuning."""
    from jinja2 import Environment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poros.utils.versions.version", cache(version))
        patch.setattr(Environment, "compile", cache(Environment.compile))
        yield


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_what_is_new() -> Iterator[None]:
    """Leave the libraries' objects out of garbage collections: tests of leaks force hundreds.

    Fine-tuning takes them in again as it ends; here that is for the end of the module.
    """
    gc.collect()
    gc.freeze()
    before, unfreeze = gc.get_freeze_count(), gc.unfreeze
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    if gc.get_freeze_count() > before:  # what was trained
        unfreeze()


@pytest.fixture(scope="module")
def planned_once() -> Iterator[None]:
    """Steps of equal models are planned once in this process, where plans are not what is shown."""
    from tests.planning.known import costs_computed_once

    with pytest.MonkeyPatch.context() as patch:
        costs_computed_once(patch)
        yield


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """What ``torch.compile`` has made is forgotten."""
    yield
    torch._dynamo.reset()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what covers leave out; skip the tests marked `gpu` where torch sees no CUDA device."""
    leave_out(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


class NamesFailures:
    """Names each test as it fails: a run that a time limit cuts off has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            reason = str(report.longrepr).strip().splitlines()[-1:]
            terminal.write_line(f"\nfailed so far: {report.nodeid} {' '.join(reason)[:200]}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NamesFailures(config))
