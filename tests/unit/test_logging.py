"""What is logged by default, and how it is silenced."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from poros.gates import tiny
from poros.utils.logging_setup import ProgressLog, show_info_by_default
from tests.children import run_forked

SETUPS = (
    "pass",
    "logging.getLogger('poros').setLevel('WARNING')",
    "logging.basicConfig(level='WARNING')",
)
# A script for each of the setups, in a fork whose logging is that of a new process.
CODE = """
import logging, torch
for logger in (logging.getLogger(), logging.getLogger("poros")):
    logger.handlers.clear()
    logger.setLevel("WARNING" if logger is logging.root else "NOTSET")
{setup}
import poros
from poros.gates import tiny
model = tiny.attach(tiny.load_base({folder!r}, dtype=torch.bfloat16))
poros.prepare(model, slots=2).train()
tokens = torch.arange(8)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
"""


def test_a_plain_script_sees_a_line_each_for_preparing_and_checking_unless_it_is_silenced(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "base"
    config = tiny.small_config("qwen2", num_layers=3, hidden_size=64)
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    said = []
    for setup in SETUPS:
        done = run_forked(CODE.format(setup=setup, folder=str(folder)))
        assert done.returncode == 0, done.stderr
        said.append([line for line in done.stderr.splitlines() if line.startswith("poros: ")])
    prepared, checked = said[0]
    assert "PeftModel" in prepared or "Qwen2" in prepared
    assert "3 blocks" in prepared and "2 at a time on cpu" in prepared
    assert "3 layers give the bits" in checked
    assert said[1:] == [[], []]


def test_logging_that_is_configured_later_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, root = logging.getLogger("poros"), logging.getLogger()
    for each in (logger, root):
        monkeypatch.setattr(each, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    show_info_by_default()
    assert logger.isEnabledFor(logging.INFO) and len(logger.handlers) == 1
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
    logging.getLogger("poros.x").warning("the first line behind basicConfig")
    assert logger.handlers == [] and logger.level == logging.NOTSET


def test_a_long_loop_logs_its_progress(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line every three seconds by its clock; control: nothing, if it is over by then."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("poros.utils.logging_setup.time", clock)
    progress = ProgressLog(logging.getLogger("poros.x"), "poros: %d of %d")
    with caplog.at_level(logging.INFO, logger="poros"):
        for number in range(10):
            now[0] = number * 0.29
            progress.step(number, 50)
        assert caplog.messages == []
        for number in range(10, 50):
            now[0] = number * 0.5
            progress.step(number, 50)
    assert caplog.messages == [f"poros: {number} of 50" for number in range(10, 50, 6)]
