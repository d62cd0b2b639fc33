"""Processes of tests: anew, or forks of this one, which has imported what they would."""

import faulthandler
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, in the checkout."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_forked(
    code: str, *arguments: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run code in a fork, as ``python -c`` does: its own arguments, output and exit code.

    What was imported and set before stays so: code that asks what it imports, or how much address
    space it takes, is for ``run_python``. So is all of it where there is a GPU: no fork has that.
    """
    if torch.cuda.is_available():
        return run_python(code, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            os._exit(_run(code, arguments, files))
        ended = os.pidfd_open(child)
        try:
            if not select.select([ended], [], [], timeout_s)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise subprocess.TimeoutExpired(code, timeout_s)
        finally:
            os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [each.read_text(errors="replace") for each in files]
        return subprocess.CompletedProcess([code, *arguments], status, *said)


def _run(code: str, arguments: tuple[str, ...], files: list[Path]) -> int:
    """The exit code; every way out of the child ends here."""
    try:
        faulthandler.disable()  # pytest's, which writes to the terminal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(files, 1):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        sys.argv = ["-c", *arguments]
        status = 0
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        return status
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        return 1
