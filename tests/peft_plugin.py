"""A pytest plugin for PEFT's own tests: every LoRA module that they make runs our kernels.

    make peft-tests PEFT_SOURCE=~/peft-0.21.0     # the unpacked sdist of the installed PEFT

Says at the end how many calls took our operator, and why others did not; the run fails if none did.
"""

import os
from typing import Any

import peft
import pytest
from peft.tuners import lora

from poros.kernels.adapters import KernelStats, patch

_TALLY = pytest.StashKey[KernelStats]()


def pytest_configure(config: Any) -> None:
    if os.environ.get("PEFT_UNCHANGED"):
        return
    tally = config.stash[_TALLY] = KernelStats()
    kinds: list[Any] = [lora.Linear]
    if hasattr(lora, "Linear4bit"):
        kinds.append(lora.Linear4bit)
    for kind in kinds:
        _after_init(kind, tally)


def _after_init(kind: Any, tally: KernelStats) -> None:
    genuine = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        genuine(self, *args, **kwargs)
        patch([self], tally)

    kind.__init__ = init


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: Any) -> None:
    tally = config.stash.get(_TALLY, None)
    if tally is not None:
        terminalreporter.write_line(
            f"PEFT {peft.__version__}: {tally.num_fused} calls took our operator, others ran as "
            f"PEFT has them: {dict(tally.unfused)}"
        )


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    tally = session.config.stash.get(_TALLY, None)
    if tally is not None and not session.config.option.collectonly and not tally.num_fused:
        session.exitstatus = 1
