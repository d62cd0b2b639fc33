"""The registry: what is on record, what ``poros.prepare`` makes of it, and who writes it."""

import logging
import os
import re
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.errors import UnsupportedModelError, UnvalidatedArchitectureError
from poros.gates import registry, tiny
from poros.gates.kinds import KINDS
from poros.gates.registry import Outcome, Record, Registry, read_registry
from poros.gates.report import ParityReport
from tests.command import poros_command
from tests.support import make_model
from tools import sweep, ways

QUICK = "starcoder2"
REAL = registry.PATH
IDS = torch.arange(3, 11).view(1, 8)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another registry in the place of the real one, without records."""
    monkeypatch.setattr(registry, "PATH", tmp_path / "registry.json")
    sweep.write_registry(Registry())
    return tmp_path / "registry.json"


def make(adapter: str = "lora") -> Any:
    return tiny.make_model("qwen2", num_layers=2, hidden_size=32, adapter=adapter)


# What is on record.


def test_every_family_and_kind_is_on_record() -> None:
    """With the transformers release of the sweep; whoever adds a kind sweeps it."""
    found = read_registry(REAL)
    assert all(found.family(name).outcome == "exact" for name in tiny.ARCHITECTURES.values())
    assert set(found.adapters) == set(KINDS)
    records = (*found.families.values(), *found.adapters.values())
    assert {record.outcome for record in records} <= registry.OUTCOMES.keys()
    made_with = {record.versions["transformers"] for record in found.families.values()}
    if made_with != {version("transformers")}:
        pytest.skip(f"the records were made with transformers {made_with}")
    assert set(found.families) == {tiny.model_type_of(name) for name in sweep.architectures()}


# What `poros.prepare` makes of it.

SUBJECTS = {"architecture": "lora", "adapters": "vera"}


def put(subject: str, outcome: Outcome, reason: str | None = "because") -> None:
    exact = Record("exact")
    families, adapters = {"qwen2": exact}, {"vera": exact}
    (families if subject == "architecture" else adapters).update(
        {"qwen2" if subject == "architecture" else "vera": Record(outcome, reason)}
    )
    sweep.write_registry(Registry(families, adapters))


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("outcome", ["refused", "failed"])
def test_what_is_refused_on_record_is_refused_with_its_reason(
    subject: str, outcome: Outcome, path: Path
) -> None:
    put(subject, outcome)
    model = make(SUBJECTS[subject])
    for check in ("strict", "off"):
        with pytest.raises(UnsupportedModelError, match=f"{subject} .*refused .*: because") as told:
            poros.prepare(model, self_check=check)
        assert not isinstance(told.value, UnvalidatedArchitectureError)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_untested_trains_behind_a_warning_and_the_self_check(
    subject: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(subject, "untested")
    model = make(SUBJECTS[subject])
    with caplog.at_level(logging.WARNING, "poros"):
        poros.prepare(model)
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
    warnings = [each.getMessage() for each in caplog.records if "no gate" in each.getMessage()]
    assert len(warnings) == 1 and "`poros check --architecture qwen2" in warnings[0]
    assert poros.runtime(model).self_check["status"] == "passed"
    caplog.clear()
    put(subject, "exact", None)
    poros.prepare(make(SUBJECTS[subject]))
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_without_the_check_what_is_untested_does_not_train(subject: str, path: Path) -> None:
    put(subject, "untested")
    model = make(SUBJECTS[subject]).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    poros.prepare(model, self_check="off", loss="reference")
    with pytest.raises(UnvalidatedArchitectureError, match='self_check="strict"'):
        model(input_ids=IDS, labels=IDS)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, expected)
    poros.restore(model)
    put(subject, "exact", None)
    poros.prepare(model, self_check="off")
    model(input_ids=IDS, labels=IDS).loss.backward()


# The command.


def test_the_registry_is_listed(path: Path) -> None:
    """In a few lines; what has a word in its name, families and kinds, a line for each."""
    whole = Registry(
        read_registry(REAL).families,
        {"vera": Record("untested", "no"), "prefix": Record("refused", "no module")},
    )
    whole.families["qwen2"] = Record("exact", None, {"torch": "2.0"})
    sweep.write_registry(whole)
    for word, expected in (
        ("", "qwen2"),
        ("QWEN", "qwen2 exact torch 2.0"),
        ("prefix", "prefix refused no module"),
        ("vera", "vera untested no"),
    ):
        listed = poros_command("check", "--registered", *word.split(), columns=200)
        lines = [" ".join(each.split()) for each in listed.output.splitlines()]
        assert listed.exit_code == 0 and len(lines) < 30
        assert any(expected in line for line in lines)
        assert not word or all(word.lower() in line.split()[0] for line in lines)
    nothing = poros_command("check", "--registered", "apple")
    assert nothing.exit_code == 1 and "no record has 'apple'" in nothing.output


# The sweep.


def test_a_sweep_replaces_what_it_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {("gemma4_shared_kv", None): "failed", ("gemma3", "vera"): "untested"}

    def run(name: str, adapter: str | None, time_limit_s: float) -> Record:
        return Record(outcomes.get((name, adapter), "exact"))  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "_in_process", run)
    other = Record("refused", "because", {"torch": "2.0"})
    sweep.write_registry(Registry({"bert": other, "gemma4_text": Record("exact")}))
    sweep.sweep(sweep.subjects(["gemma4", "vera"]))
    found = read_registry()
    assert found.families == {"bert": other, "gemma4_text": Record("failed")}
    assert found.adapters == {"vera": Record("untested")}


@pytest.mark.parametrize("self_check", ["strict", "off"])
def test_a_fault_in_streaming_is_recorded_as_failed(
    self_check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_with = poros.api.prepare_with

    def broken(model: Any, policy: Any, **options: Any) -> Any:
        model = prepare_with(model, policy, **options)
        poros.runtime(model).host_slab(1)[0] ^= 1
        return model

    monkeypatch.setattr(poros.api, "prepare_with", broken)
    mode = {**sweep.OTHER_MODES[0], "self_check": self_check}
    monkeypatch.setattr(sweep, "OTHER_MODES", (mode,))
    record = sweep.make_record(QUICK)
    assert record.outcome == "failed", record
    assert ("ParityError" in str(record.reason)) is (self_check == "strict")


def test_outcomes_are_told_apart() -> None:
    record = sweep.make_record("bert")
    assert record.outcome == "refused" and "decoder-only" in str(record.reason)
    record = sweep.make_record("t5")
    assert record.outcome == "untested" and "causal language model" in str(record.reason)
    for names in (("no-such-model",), ("qwen2", "no-such-kind")):
        with pytest.raises(UnsupportedModelError, match="no-such"):
            sweep.make_record(*names)
    broken = ParityReport("x", error="the streamed arm raised RuntimeError: y")
    assert sweep.judge(broken)[0] == "failed"
    unstreamed = ParityReport("x", error="1 of 3 decoder layers of the streamed arm were not")
    assert sweep.judge(unstreamed)[0] == "failed"
    different = ParityReport("x", error="the resident run recorded no loss", num_differences=1)
    assert sweep.judge(replace(different, differences=["first"]))[0] == "failed"  # type: ignore
    assert sweep.judge(replace(different, resident_repeats=False))[0] == "untested"
    assert sweep.judge(ParityReport("x"))[0] != "exact"


def test_a_process_that_hangs_or_dies_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "make_record", lambda *_: time.sleep(60))
    record = sweep._in_process(QUICK, None, 0.5)
    assert record.outcome == "untested" and "longer than" in str(record.reason)
    monkeypatch.setattr(sweep, "make_record", lambda *_: os._exit(3))
    record = sweep._in_process(QUICK, None, 30.0)
    assert record.outcome == "failed" and "exit code 3" in str(record.reason)


def test_families_are_looked_at_in_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In few steps, visits replayed among them. Control: other adapters."""
    monkeypatch.setattr(tiny, "make_model", make_model)
    monkeypatch.setattr(ways, "NUM_STEPS", 3)
    monkeypatch.setattr(ways, "NUM_TOGETHER", 2)
    numbers = re.fullmatch(r"equal \(visits replayed: \[([\d, ]+)\]\)", ways.look("qwen2", "cpu"))
    assert numbers and all(int(each) > 0 for each in numbers[1].split(","))
    assert len(numbers[1].split(",")) == len(ways.WAYS)
    monkeypatch.setattr(ways, "NUM_STEPS", 1)

    def edit(model: Any) -> None:
        next(each for each in model.parameters() if each.requires_grad).data += 0.01

    found = ways.look("qwen2", "cpu", edit)
    assert all(f"{way}: " in found for way in ways.WAYS) and "tensors differ" in found
