"""Tries untrusted patterns and templates in a child process with a time limit.

A regular expression can backtrack for ever, and a template can loop. Neither can be stopped where
it runs: both hold Python's lock, and the libraries have no limits. So they are run once before the
work, in a child whose processor time and memory the system limits; what the child survives is used.
Texts that come later are bounded as far as these are like them.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from poros.errors import CheckpointFormatError, quoted
from poros.loaders import bounded_child
from poros.loaders.header import defect

SECONDS = 5
"""Of processor time, and as much again for each MB of a tokenizer."""

_NUM_BYTES = 8 * 2**30
_SECONDS_BY_THE_CLOCK = 600
_PLAIN_NAME = re.compile(r"[\w.-]*")


def require_bounded_tokenizer(file: Path, texts: Sequence[str] = ()) -> None:
    """Load a ``tokenizer.json`` and let it read texts, in a child.

    Args:
        file: The ``tokenizer.json``.
        texts: Besides those that are always tried.

    Raises:
        CheckpointFormatError: If that takes too long or too much memory, or ends the process.
    """
    seconds = SECONDS + SECONDS * file.stat().st_size // 1_000_000
    _require(file, seconds, "a tokenizer", {"tokenizer": str(file), "texts": list(texts)})


def require_bounded_template(where: Path, template: str, tokens: dict[str, Any]) -> None:
    """Render a chat template, in a child.

    Args:
        where: The folder of its tokenizer, for the message.
        template: Its text.
        tokens: Special tokens by name, as the template takes them.

    Raises:
        CheckpointFormatError: If that takes too long or too much memory, or ends the process.
    """
    work = {"template": template, "tokens": tokens}
    _require(where, SECONDS, "chat_template: a template", work)


def require_bounded_patterns(where: Path, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Match regular expressions with names of modules, in a child; plain names are skipped.

    Raises:
        CheckpointFormatError: If that takes too long.
    """
    tried = sorted({each for each in patterns if not _PLAIN_NAME.fullmatch(each)})
    if tried:
        what = f"patterns of modules ({quoted(', '.join(tried), is_bare=True)})"
        _require(where, SECONDS, what, {"patterns": tried, "names": sorted(names)})


def _require(where: Path, seconds: int, what: str, work: dict[str, Any]) -> None:
    work |= {"seconds": seconds, "num_bytes": _NUM_BYTES}
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    try:
        done = subprocess.run(
            # -P: what lies beside the script is not to be found under a bare name.
            [sys.executable, "-P", bounded_child.__file__],
            input=json.dumps(work),
            capture_output=True,
            text=True,
            env=environment,
            timeout=_SECONDS_BY_THE_CLOCK,
        )
    except subprocess.TimeoutExpired as error:
        raise _unbounded(where, what, f"one that was not done in {error.timeout:.0f} s") from error
    if done.returncode == bounded_child.PANIC:
        raise _unbounded(where, what, quoted(done.stdout.strip()))
    if done.returncode == bounded_child.NO_MEMORY:
        raise _unbounded(where, what, f"one that takes more than {_NUM_BYTES / 2**30:.0f} GiB")
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _unbounded(where, what, f"one that was not done in {seconds} s of processor time")
    if done.returncode:
        reason = quoted(done.stderr.strip().rpartition("\n")[2])
        raise _unbounded(where, what, f"one that ends its process ({done.returncode}): {reason}")


def _unbounded(where: Path, what: str, found: str) -> CheckpointFormatError:
    return defect(
        where,
        f"expected {what} that can be used on short texts, found {found}",
        remedy="take one from a source that you trust",
    )
