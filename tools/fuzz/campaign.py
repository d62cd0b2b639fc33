"""Fuzzes training: draws programs, runs each resident and prepared, counts how they end.

Two ends of a program are allowed, see ``tools.fuzz.judge``. A failure is shrunk, and later
failures of the same sort that have everything the shrunk program has are counted with it, so that
one cause does not hide another and does not stop the run.

The programs run in a process of its own: a crash or a hang is a failure of the program it met, and
the run goes on with the next.
"""

import gc
import logging
import multiprocessing
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import PolicyError
from poros.io.writing import write_json
from tools.fuzz.draw import programs
from tools.fuzz.program import Program, features
from tools.fuzz.shrink import shrink

if TYPE_CHECKING:
    from rich.console import Group

    from tools.fuzz.judge import Verdict

Judge = Callable[[Program], "Verdict"]
Shrunk = tuple[Program, "Verdict"]

ENDS = ("equal", "refused", "raised", "skipped", "failed")
JOINED = "joined visits"
"""What programs have whose micro-batches were replayed in one go: more than what was drawn."""

_CHUNK = 100
_NUM_TRIES = 100
_HANG_S = 300.0
# Seeds of two runs do not meet within so many chunks.
_SEED_STRIDE = 1_000_000


@dataclass
class Finding:
    """One sort of failure."""

    sort: str
    kind: str
    detail: str
    program: Program
    """Shrunk."""
    drawn: Program
    seconds: float
    """Since the start of the run."""
    count: int = 1

    @property
    def features(self) -> frozenset[str]:
        return features(self.program)


@dataclass
class Tally:
    """What a run has seen."""

    seed: int = 0
    seconds: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    by_feature: dict[str, Counter[str]] = field(default_factory=dict)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    """By end, how often each kind came."""
    examples: dict[tuple[str, str], tuple[Program, str]] = field(default_factory=dict)
    """By end and kind, the first program and what was said."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def num_programs(self) -> int:
        return self.ends.total()

    def known(self, program: Program, verdict: "Verdict") -> Finding | None:
        """The finding of which this failure is one more case."""
        program_features = features(program)
        for finding in self.findings:
            if finding.sort == sort_of(verdict) and finding.features <= program_features:
                return finding
        return None

    def add(self, program: Program, verdict: "Verdict", shrunk: "Shrunk | None") -> None:
        """Count one program; ``shrunk`` comes with a failure that was not known."""
        self.ends[verdict.end] += 1
        for name in features(program) | ({JOINED} if verdict.num_joined else set()):
            self.by_feature.setdefault(name, Counter())[verdict.end] += 1
        self.kinds.setdefault(verdict.end, Counter())[verdict.kind] += 1
        self.examples.setdefault((verdict.end, verdict.kind), (program, verdict.detail))
        if verdict.end != "failed":
            return
        smallest, shrunk_verdict = shrunk or (program, verdict)
        known = self.known(program, verdict) or self.known(smallest, shrunk_verdict)
        if known:
            known.count += 1
            return
        seconds = round(self.seconds, 1)
        self.findings.append(
            Finding(
                sort_of(shrunk_verdict),
                shrunk_verdict.kind,
                shrunk_verdict.detail,
                smallest,
                program,
                seconds,
            )
        )

    def record(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "ends": {end: self.ends[end] for end in ENDS},
            "features": {name: dict(ends) for name, ends in sorted(self.by_feature.items())},
            "kinds": {end: dict(kinds.most_common()) for end, kinds in self.kinds.items()},
            "examples": {
                f"{end}, {kind}": {"program": repr(program), "detail": detail}
                for (end, kind), (program, detail) in self.examples.items()
                if end != "failed"
            },
            "findings": [
                {
                    "kind": finding.kind,
                    "count": finding.count,
                    "seconds": finding.seconds,
                    "program": repr(finding.program),
                    "drawn": repr(finding.drawn),
                    "detail": finding.detail,
                }
                for finding in self.findings
            ],
        }


def sort_of(verdict: "Verdict") -> str:
    """Failures of different sorts have different causes; of one sort, they may have."""
    return re.sub(r"[\dN]+| hook.*| (at|before) \w+:.*", "", verdict.kind)


def draw(seed: int, number: int) -> Iterator[Program]:
    """The first ``number`` programs of a seed.

    Raises:
        PolicyError: If hypothesis is not installed.
    """
    strategy = programs()
    drawn = chain.from_iterable(
        _draw_chunk(strategy, seed * _SEED_STRIDE + chunk) for chunk in count()
    )
    yield from islice(drawn, number)


def _draw_chunk(strategy: Any, seed: int) -> list[Program]:
    import hypothesis

    drawn: list[Program] = []

    @hypothesis.settings(
        max_examples=_CHUNK,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.seed(seed)
    @hypothesis.given(strategy)
    def collect(program: Program) -> None:
        if program not in drawn:
            drawn.append(program)

    collect()
    return drawn


def shrunk_failure(
    program: Program, verdict: "Verdict", judge: Judge, tally: Tally
) -> Shrunk | None:
    """``program`` made smaller, if it failed in a way that ``tally`` does not know."""
    if verdict.end != "failed" or tally.known(program, verdict) is not None:
        return None
    verdicts = {program: verdict}

    def fails(smaller: Program) -> bool:
        smaller_verdict = verdicts[smaller] = judge(smaller)
        return smaller_verdict.end == "failed" and sort_of(smaller_verdict) == sort_of(verdict)

    smallest = shrink(program, fails, num_tries=_NUM_TRIES)
    return smallest, verdicts[smallest]


def fuzz(
    minutes: float,
    seed: int,
    on_program: Callable[[Tally], None] | None = None,
    *,
    number: int | None = None,
) -> Tally:
    """Draw and run programs for so many minutes.

    Args:
        minutes: Of wall time; a program, and the shrinking of a failure, are not cut off.
        seed: The same seed draws the same programs.
        on_program: Called after each program.
        number: Of programs after which to stop, if that comes first.

    Raises:
        PolicyError: If hypothesis is not installed.
    """
    programs()
    if minutes <= 0:
        raise PolicyError(f"minutes: expected a positive number, found {minutes!r}")
    tally = Tally(seed)
    started = time.monotonic()
    start = (0, 0)

    def is_over() -> bool:
        tally.seconds = time.monotonic() - started
        return tally.seconds >= 60 * minutes or tally.num_programs == number

    while not is_over():
        start = _fuzz_in_process(tally, start, is_over, on_program)
    return tally


def _fuzz_in_process(
    tally: Tally,
    start: tuple[int, int],
    is_over: Callable[[], bool],
    on_program: Callable[[Tally], None] | None,
) -> tuple[int, int]:
    """Run from chunk and program ``start`` until the time is over or the process dies."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(tally, start, sender), daemon=True)
    process.start()
    sender.close()
    running: tuple[int, int, Program] | None = None
    reason = f"a hang: no end after {_HANG_S:.0f} s"
    try:
        while receiver.poll(_HANG_S):
            message, *values = receiver.recv()
            done = is_over()
            if message == "start":
                if done:
                    return start
                running = values[0]
                continue
            tally.add(*values)
            if on_program is not None:
                on_program(tally)
    except EOFError:
        process.join()
        reason = f"a crash: exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    from tools.fuzz.judge import Verdict

    if running is None:
        raise PolicyError(f"fuzz: expected programs to be drawn, found {reason}")
    chunk, index, program = running
    tally.add(program, Verdict("failed", reason, reason), None)
    return (chunk, index + 1)


def _work(tally: Tally, start: tuple[int, int], sender: Connection) -> None:
    """In its process: draw, announce, run, shrink, report; forever."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    judge = make_judge()
    strategy = programs()
    chunk, first = start
    while True:
        for index, program in enumerate(_draw_chunk(strategy, tally.seed * _SEED_STRIDE + chunk)):
            if index < first:
                continue
            sender.send(("start", (chunk, index, program)))
            verdict = judge(program)
            shrunk = shrunk_failure(program, verdict, judge, tally)
            tally.add(program, verdict, shrunk)
            sender.send(("end", program, verdict, shrunk))
        chunk, first = chunk + 1, 0
        gc.collect()
        gc.freeze()  # what is looked through for leaks stays small


def make_judge() -> Judge:
    """A judge that keeps the models it has built."""
    from tools.fuzz.judge import judge
    from tools.fuzz.models import Models

    models = Models()
    gc.collect()
    gc.freeze()
    return lambda program: judge(program, models)


def render(tally: Tally) -> "Group":
    """The report: ends, what was covered, and each finding with its shrunk program."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    seconds = f"{tally.seconds:.0f} s"
    num_joined = tally.by_feature.get(JOINED, Counter[str]()).total()
    programs_of = f"{tally.num_programs} programs ({num_joined} with {JOINED})"
    summary = Table(title=f"{programs_of}, seed {tally.seed}, {seconds}")
    for end in ENDS:
        summary.add_column(end, justify="right")
    summary.add_row(*(str(tally.ends[end]) for end in ENDS))
    covered = Table(title="Programs by what they have")
    covered.add_column("feature")
    for end in ENDS:
        covered.add_column(end, justify="right")
    for name, ends in sorted(tally.by_feature.items()):
        covered.add_row(name, *(str(ends[end] or "") for end in ENDS))
    parts: list[Any] = [covered]
    for end in ("refused", "raised", "skipped"):
        kinds = Table(title=f"Why {end}")
        kinds.add_column("programs", justify="right")
        kinds.add_column("kind")
        for kind, number in tally.kinds.get(end, Counter()).most_common():
            kinds.add_row(str(number), kind)
        parts.append(kinds)
    for finding in tally.findings:
        head = (
            f"\nFAILED {finding.count} times, first after {finding.seconds:.0f} s: {finding.kind}"
        )
        parts.append(Text(f"{head}\n{finding.detail}\n{finding.program!r}"))
    return Group(*parts, summary)


def write(tally: Tally, path: Path) -> None:
    """Write the report as JSON."""
    write_json(path, tally.record())
