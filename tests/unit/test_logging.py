"""What is logged by default, and how it is silenced."""

import logging
from pathlib import Path

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
model = tiny.attach_lora(tiny.load_base({folder!r}, dtype=torch.bfloat16))
poros.prepare(model, slots=2).train()
tokens = torch.arange(8)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    config = tiny.small_config("qwen2", num_layers=3, hidden_size=64)
    tiny.write_checkpoint(config, path / "base", dtype=torch.bfloat16)
    return path / "base"


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, list[str]]:
    """By the setup, what a script says of poros."""
    found = {}
    for setup in SETUPS:
        done = run_forked(CODE.format(setup=setup, folder=str(folder)))
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        found[setup] = [line for line in lines if line.startswith("poros: ")]
    return found


def test_a_plain_script_sees_a_line_each_for_preparing_and_checking(
    said: dict[str, list[str]],
) -> None:
    prepared, checked = said[SETUPS[0]]
    assert "PeftModel" in prepared or "Qwen2" in prepared
    assert "3 blocks" in prepared and "2 at a time on cpu" in prepared
    assert "3 layers give the bits" in checked


@pytest.mark.parametrize("setup", SETUPS[1:])
def test_it_can_be_silenced(setup: str, said: dict[str, list[str]]) -> None:
    assert said[setup] == []


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


def test_a_long_loop_logs_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    """A line every three seconds by its clock; control: nothing, if it is over by then."""
    now = [0.0]
    progress = ProgressLog(logging.getLogger("poros.x"), "poros: %d of %d", clock=lambda: now[0])
    with caplog.at_level(logging.INFO, logger="poros"):
        for number in range(10):
            now[0] = number * 0.29
            progress.step(number, 50)
        assert caplog.messages == []
        for number in range(10, 50):
            now[0] = number * 0.5
            progress.step(number, 50)
    assert caplog.messages == [f"poros: {number} of 50" for number in range(10, 50, 6)]
