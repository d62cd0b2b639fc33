"""The fuzzer itself: each sort of failure is reported, and a run survives what it meets.

Every control breaks the runtime, or the run, on purpose and for certain. What it has found:
``test_written_programs``.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.errors import PolicyError, UnsupportedModelError
from poros.self_check.check import SelfCheck
from poros.stream.condition import Condition
from poros.stream.general import RecomputedCall
from poros.stream.rng import RngStash
from tests.replaced import Patch, Plant, in_place_of
from tools.fuzz import campaign
from tools.fuzz import judge as judging
from tools.fuzz import program as language
from tools.fuzz.__main__ import main
from tools.fuzz.arm import Arm
from tools.fuzz.judge import Verdict
from tools.fuzz.program import (
    EditAdapter,
    Evaluate,
    Forward,
    Hook,
    Policy,
    Program,
    Random,
    Step,
    Subject,
    Term,
    features,
)
from tools.fuzz.shrink import shrink

NUM_DRAWN = 2


def test_new_programs_end_equal_or_refused_in_time(judge: campaign.Judge) -> None:
    """Less than a minute; the same programs at every run. `python -m tools.fuzz` draws others."""
    tally = campaign.Tally(0)
    for program in campaign.draw(0, NUM_DRAWN):
        verdict = judge(program)
        tally.add(program, verdict, campaign.shrunk_failure(program, verdict, judge, tally))
    assert tally.num_programs == NUM_DRAWN
    report = [f"{each.kind}\n{each.detail}\n{each.program!r}" for each in tally.findings]
    assert tally.ends["failed"] == 0, "\n\n".join(report)
    # Mostly programs that run through: refusals alone would show nothing.
    assert tally.ends["equal"] > NUM_DRAWN / 3


PLAIN = Program(
    subject=Subject(num_layers=2, dropout=0.1), policy=Policy(self_check="off"), steps=(Step(),) * 2
)
JOINED = Program(
    subject=Subject(num_layers=2, dropout=0.0),
    policy=Policy(self_check="off", recorded=True),
    steps=(Step(forwards=(Forward(mask="full"),) * 4, backward="together"),) * 9,
)


# Each sort of failure.


def no_replay(patch: Patch) -> None:
    patch.setattr(RngStash, "replay", lambda self: nullcontext())
    patch.setattr(RngStash, "equals", lambda self, other: True)


@in_place_of(Condition, "require_as")
def foreign(genuine: Any, *_: Any) -> None:
    raise KeyError("an error that says nothing")


@in_place_of(Condition, "require_as")
def too_late(genuine: Any, layer: Any, condition: Any, staying: Any) -> None:
    """An error of the right type, behind a wrong update."""
    with torch.no_grad():
        for each in condition.parameters:
            each.zero_()
    raise UnsupportedModelError("a refusal")


KEPT: list[RecomputedCall] = []


@in_place_of(RecomputedCall, "forward")
def keeps_calls(genuine: Any, self: RecomputedCall, *given: Any) -> Any:
    KEPT.append(self)
    return genuine(self, *given)


@in_place_of(judging, "restore")
def bad_restore(genuine: Any, model: Any) -> Any:
    genuine(model)
    with torch.no_grad():
        next(p for p in model.parameters() if p.dim() == 1 and not p.requires_grad).add_(1)
    return model


@in_place_of(SelfCheck, "_mismatch")
def accuses(genuine: Any, *values: Any) -> str:
    return "a gradient that is as it should be"


def test_joined_visits_are_reached_and_counted(judge: campaign.Judge) -> None:
    """Control of what follows: without a failure these end equal."""
    tally = campaign.Tally(0)
    for program in (JOINED, PLAIN):
        tally.add(program, judge(program), None)
    assert tally.by_feature[campaign.JOINED].total() == 1 and tally.ends["equal"] == 2


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (no_replay, "silent difference: gradient"),
        (foreign, "foreign KeyError"),
        (too_late, "wrong weights at UnsupportedModelError"),
        (keeps_calls, "restore: N calls of layers are alive"),
        (bad_restore, "restore: restore changes"),
        (accuses, "false accusation: ParityError"),
    ],
)
def test_each_sort_of_failure_is_reported(
    fault: Plant, kind: str, judge: campaign.Judge, monkeypatch: Patch
) -> None:
    program = PLAIN if fault is not accuses else replace(PLAIN, policy=Policy())
    fault(monkeypatch)
    verdict = judge(program)
    KEPT.clear()
    assert verdict.end == "failed" and verdict.kind.startswith(kind), verdict


def test_what_raises_resident_has_to_raise_prepared(
    judge: campaign.Judge, monkeypatch: Patch
) -> None:
    twice = Program(steps=(Step(backward="again"),))
    assert judge(twice).end == "raised"
    assert judge(Program(steps=(Step(forwards=(Forward(terms=(Term("raise"),)),)),))).end == "equal"

    own = Arm._backward

    def backward(self: Any, losses: Any, how: str, where: str) -> None:
        prepared = type(self.layers[0]).__mro__[1].__name__ == "StreamedLayerMixin"
        own(self, losses, "sum" if prepared else how, where)

    monkeypatch.setattr(Arm, "_backward", backward)
    assert judge(twice).kind == "no error where resident raises"


def test_a_resident_run_that_does_not_repeat_itself_is_skipped(
    judge: campaign.Judge, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda seed: torch.seed())
    assert judge(PLAIN).end == "skipped"


# Drawing and shrinking.


def test_a_seed_draws_the_same_programs_and_their_reprs_give_them_back() -> None:
    first, again, other = (list(campaign.draw(seed, 150)) for seed in (1, 1, 2))
    assert first == again != other
    names = vars(language)
    for program in first:
        assert eval(repr(program), dict(names)) == program
    assert len(set(first)) >= 140
    seen = set().union(*(map(features, (*first, *other))))
    assert {each.__name__ for each in language.Action.__subclasses__()} <= {
        name.split("@")[0] for name in seen
    }


def test_a_program_is_shrunk_to_what_it_needs() -> None:
    def fails(program: Program) -> bool:
        return any(
            isinstance(action, Hook) and action.does == "scale" and step.autocast == "each"
            for step in program.steps
            for action in step.before
        )

    drawn = Program(
        subject=Subject(architecture="mixtral", dropout=0.1),
        policy=Policy(slots=3, self_check="off"),
        before=(Evaluate(), Random()),
        steps=(
            Step(autocast="around"),
            Step(
                before=(EditAdapter(), Hook(does="scale", layer=1, part="mlp"), Evaluate()),
                forwards=(Forward(length=4, terms=(Term("norm"),)), Forward()),
                autocast="each",
            ),
        ),
        optimizer="sgd",
    )
    assert shrink(drawn, fails) == Program(
        steps=(Step(before=(Hook(does="scale"),), autocast="each"),)
    )
    assert shrink(drawn, fails, num_tries=1) != shrink(drawn, fails)


# The run.


def test_a_crash_and_a_hang_are_failures_and_the_run_goes_on(monkeypatch: Patch) -> None:
    drawn = list(campaign.draw(3, 20))

    def judge(program: Program) -> Verdict:
        if program == drawn[2]:
            os._exit(7)
        if program == drawn[4]:
            import threading

            threading.Event().wait()
        return Verdict("equal")

    monkeypatch.setattr(campaign, "make_judge", lambda: judge)
    monkeypatch.setattr(campaign, "_HANG_S", 2.0)
    tally = campaign.fuzz(60, 3, number=20)
    kinds = {each.kind: each.drawn for each in tally.findings}
    assert kinds["a crash: exit code 7"] == drawn[2]
    assert kinds["a hang: no end after 2 s"] == drawn[4]
    assert tally.ends == {"equal": 18, "failed": 2}


def test_without_hypothesis_it_says_what_to_install(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(PolicyError, match="pip install hypothesis"):
        campaign.fuzz(1.0, 0)


@pytest.mark.parametrize("is_bad", [False, True])
def test_the_command_reports_and_its_exit_code_says_whether_all_held(
    is_bad: bool, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict("failed", "silent difference: loss", "x") if is_bad else Verdict("equal")
    monkeypatch.setattr(campaign, "make_judge", lambda: lambda program: verdict)
    monkeypatch.setattr(campaign, "fuzz", partial(campaign.fuzz, number=12))
    out = tmp_path / "report.json"
    assert main(["--minutes", "60", "--seed", "5", "--out", str(out)]) == is_bad
    printed = capsys.readouterr().out
    assert "seed 5" in printed and ("FAILED" in printed) == is_bad
    report = json.loads(out.read_text())
    assert report["seed"] == 5 and report["ends"]["failed" if is_bad else "equal"] == 12
    assert bool(report["findings"]) == is_bad and report["features"]
