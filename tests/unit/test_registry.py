"""The registry: its records are fresh, measured, and what discovery goes by."""

import json
import os
import time
import tomllib
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner, Result

import poros.api
from poros.cli.app import app
from poros.errors import UnsupportedModelError, UnvalidatedArchitectureError
from poros.gates import registry, sweep, tiny
from poros.gates.registry import (
    Record,
    Registry,
    RegistryError,
    code_hash,
    read_registry,
    source_hash,
)
from poros.gates.report import ParityReport, environment
from poros.model.inspect import _check_validated, validated_model_types
from tests.records import adapter_record

ROOT = Path(__file__).resolve().parents[2]
# Decide no bit of either arm: messages, commands, audits after the fact, and the registry itself;
# and kernels of a GPU, which no record was made with.
NOT_HASHED = {
    f"{package}.{module}"
    for package, modules in {
        "poros": "api chatting config devices digests errors graphs labels output reads saying "
        "telemetry",
        "poros.host": "disk limits mapped",
        "poros.head": "regularized",
        # Only micro-batches that go together share dense weights.
        "poros.kernels": "compose_gpu dense_layer dequantize_gpu gated_gpu launching lora_gpu "
        "online_softmax_gpu row_norm_gpu",
        # Records are made on a CPU, on which no visits are recorded.
        "poros.layer": "attention call_facts captured forms proving recording refused_calls "
        "watched",
        "poros.model": "adapter_kinds added_adapters foreign guards measuring recorded saving "
        "sizing stats step_watch",
        "poros.planning": "answer answer_text cards cost_model formula meta_model optimizers "
        "planner request speeds",
        # Records are made of one micro-batch after the other.
        "poros.accumulation": "calls cuts distributed draws group head loop micro_batch "
        "reasons start surroundings trainer unchanged watching",
        "poros.self_check": "check evidence proof switches",
        "poros.merging": "adapter merge",
        "poros.reporting": "charts events page",
        "poros.recipes": "checks reading recipe values",
        "poros.finetune": "adapters data forms packing panel resuming run screen stopping "
        "templates tokens trainers",
        "poros.cli": "app chat check demo finetune load merge plan report shared",
        "poros.gates": "registry registry_table report tape trainer_parity",
        "poros.gates.fuzz": "actions alive arm campaign draft draw hooks judge models motifs "
        "program shrink",
    }.items()
    for module in modules.split()
}
QUICK = "starcoder2"
REAL = registry.PATH


def ranges() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(each) for each in project["dependencies"]]
    wanted = {"torch", "transformers", "peft", "accelerate", "bitsandbytes"}
    return {each.name: each.specifier for each in found if each.name in wanted}


def rewrite(path: Path, record: Record, change: Any) -> None:
    """Put one record into the file with an edit that no gate made."""
    raw = asdict(record)
    change(raw)
    path.write_text(json.dumps({"records": [raw]}))


# ------------------------------------------------------------------- the records as they stand


def test_every_record_is_fresh() -> None:
    code, allowed = code_hash(), ranges()
    registered = read_registry(REAL)
    records = {**registered.records, **registered.adapters}
    assert len(allowed) == 5 and registered.records and registered.adapters
    stale = {
        name: found for name, each in records.items() if (found := each.problems(code, allowed))
    }
    assert not stale, f"run `python -m poros.gates.sweep`: {stale}"


def test_every_promised_architecture_is_exact(records: dict[str, Record]) -> None:
    assert {name: records[name].outcome for name in tiny.ARCHITECTURES} == dict.fromkeys(
        tiny.ARCHITECTURES, "exact"
    )
    assert all(records[name].model_type == each for name, each in tiny.ARCHITECTURES.items())


def test_every_causal_language_model_is_on_record(records: dict[str, Record]) -> None:
    """With the transformers release that the records were made with."""
    made_with = {record.versions["transformers"] for record in records.values()}
    if made_with != {version("transformers")}:
        pytest.skip(f"the records were made with transformers {made_with}")
    assert set(records) == set(sweep.architectures())


def test_discovery_accepts_exactly_the_model_types_that_are_exact() -> None:
    raw = json.loads(registry.PATH.read_text())["records"]
    outcomes: dict[str, set[str]] = {}
    for each in raw:
        outcomes.setdefault(each["model_type"], set()).add(each["outcome"])
    expected = {name for name, found in outcomes.items() if found == {"exact"}}
    accepted = set()
    for name in [*outcomes, "never-heard-of"]:
        base: Any = SimpleNamespace(config=SimpleNamespace(model_type=name))
        try:
            _check_validated(base, {}, allow_unvalidated=False)
        except UnvalidatedArchitectureError as error:
            assert f"`poros check --architecture {name}`" in str(error)
        else:
            accepted.add(name)
    assert accepted == expected == validated_model_types()
    assert set(tiny.ARCHITECTURES.values()) <= accepted < set(outcomes)


def test_prepare_goes_by_the_registry(path: Path, records: dict[str, Record]) -> None:
    model = tiny.make_model("qwen2", num_layers=2, hidden_size=32)
    with pytest.raises(UnvalidatedArchitectureError, match="'qwen2'"):
        poros.api.prepare(model)
    Registry({"qwen2": records["qwen2"]}).write()
    poros.api.restore(poros.api.prepare(model))
    Registry({"qwen2": replace(records["qwen2"], outcome="failed", reason="x").sealed()}).write()
    with pytest.raises(UnvalidatedArchitectureError, match="'qwen2'"):
        poros.api.prepare(model)


def test_one_failed_variant_takes_the_model_type_out(records: dict[str, Record]) -> None:
    found = Registry(records)
    assert "gemma4_text" in found.exact_model_types()
    failed = replace(records["gemma4_shared_kv"], outcome="failed", reason="x")
    assert "gemma4_text" not in found.including(failed).exact_model_types()


# ------------------------------------------------------------------- negative controls


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(date="2031-01-01"),
        lambda raw: raw.update(outcome="failed", reason="x"),
        lambda raw: raw.update(code="0" * 64),
        lambda raw: raw["versions"].update(torch="2.12.0"),
        lambda raw: raw["modes"][0].update(num_steps=200),
        lambda raw: raw["modes"][0]["hashes"].update(streamed="0" * 64),
        lambda raw: raw["modes"].pop(),
        lambda raw: raw.update(seal=""),
    ],
)
def test_a_record_changed_by_hand_is_found(
    change: Any, path: Path, records: dict[str, Record]
) -> None:
    rewrite(path, records["qwen2"], lambda raw: None)
    assert read_registry().records["qwen2"].problems(code_hash()) == []
    rewrite(path, records["qwen2"], change)
    with pytest.raises(RegistryError, match=r"'qwen2'.*changed; run `poros check"):
        read_registry()
    with pytest.raises(RegistryError):
        poros.api.prepare(tiny.make_model("qwen2", num_layers=2, hidden_size=32))
    raw = json.loads(path.read_text())["records"][0]
    assert "it was changed after the gate wrote it" in Record(**raw).problems(code_hash())


def test_a_refused_family_cannot_be_relabelled(records: dict[str, Record]) -> None:
    """Not even with a new seal: the measurements are not there."""
    refused = next(record for record in records.values() if record.outcome == "refused")
    forged = replace(refused, outcome="exact", reason=None).sealed()
    assert any(
        "did not find the two runs equal" in problem for problem in forged.problems(code_hash())
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda mode: {**mode, "num_steps": mode["num_steps"] - 1}, "other modes"),
        (lambda mode: {**mode, "is_adversarial": False}, "other modes"),
        (lambda mode: {**mode, "num_elements": 0}, "did not find"),
        (lambda mode: {**mode, "num_differing_bits": 1}, "did not find"),
        (lambda mode: {**mode, "hashes": {}}, "did not find"),
        (lambda mode: {**mode, "hashes": {"resident": "a", "streamed": "b"}}, "did not find"),
    ],
)
def test_a_sealed_record_needs_the_measurements(
    change: Any, problem: str, records: dict[str, Record]
) -> None:
    record = records["qwen2"]
    changed = replace(record, modes=[change(record.modes[0]), *record.modes[1:]]).sealed()
    assert any(problem in each for each in changed.problems(code_hash()))
    fewer = replace(record, modes=record.modes[:1]).sealed()
    assert any("other modes" in problem for problem in fewer.problems(code_hash()))


def test_a_stale_record_is_found(records: dict[str, Record]) -> None:
    record, code = records["qwen2"], code_hash()
    assert record.problems(code, ranges()) == []
    assert any("code of the gate" in problem for problem in record.problems("0" * 64))
    for old in ("1.0", "999.0"):
        aged = replace(record, versions={**record.versions, "peft": old}).sealed()
        assert [problem[:27] for problem in aged.problems(code, ranges())] == [
            f"it ran with peft {old}, expected"[:27]
        ]
    unnamed = {name: each for name, each in record.versions.items() if name != "torch"}
    assert replace(record, versions=unnamed).sealed().problems(code, ranges())


def test_a_file_that_is_not_a_registry_is_refused(path: Path) -> None:
    for text in ("", "[]", '{"records": [{}]}', '{"records": 3}'):
        path.write_text(text)
        with pytest.raises(RegistryError, match="expected records of the gate"):
            read_registry()


def test_the_code_hash_sees_code_and_nothing_else() -> None:
    source = (ROOT / "poros" / "layer" / "remat.py").read_text()
    same = "# A remark.\n\n\n" + source.replace('"""', '"""Other words. ', 1) + "\n# The end.\n"
    assert same != source and source_hash(same) == source_hash(source)
    plain = 'def f(x: int) -> int:\n    """Say."""\n    return x + 1\n'
    for other in ("x - 1", "x + 2", "x + 1.0", "y + 1", "(x + 1,)"):
        assert source_hash(plain.replace("x + 1", other)) != source_hash(plain)
    assert source_hash(plain.replace('    """Say."""\n', "")) == source_hash(plain)


def test_the_code_hash_leaves_out_only_what_decides_no_bit() -> None:
    """A new module fails this: put it into `_CODE`, or say here that it decides nothing."""
    on_disk = {
        ".".join((package, *each.relative_to(ROOT / folder).with_suffix("").parts))
        for package, folder in (("poros", "poros"), ("poros.gates", "gates"))
        for each in (ROOT / folder).rglob("*.py")
        if each.stem != "__init__"
    }
    assert set(registry._CODE) | NOT_HASHED == on_disk
    assert not set(registry._CODE) & NOT_HASHED
    assert code_hash(registry._CODE[1:]) != code_hash()


# ------------------------------------------------------------------- making records


def test_a_record_can_be_made_again(records: dict[str, Record]) -> None:
    """Nothing but a run gives these hashes."""
    again = sweep.make_record(QUICK)
    assert (again.outcome, again.reason) == ("exact", None)
    assert again.problems(code_hash(), ranges()) == []
    known = records[QUICK]
    assert again.modes[0]["num_elements"] == known.modes[0]["num_elements"]
    if (again.environment, again.versions) == (known.environment, known.versions):
        assert again.modes == known.modes


@pytest.mark.parametrize("self_check", ["strict", "off"])
def test_a_fault_in_streaming_is_recorded_as_failed(
    self_check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_with = poros.api.prepare_with

    def broken(model: Any, policy: Any, **options: Any) -> Any:
        model = prepare_with(model, policy, **options)
        poros.api.runtime(model).host_slab(1)[0] ^= 1
        return model

    monkeypatch.setattr(poros.api, "prepare_with", broken)
    mode = {**registry.OTHER_MODES[0], "self_check": self_check}
    monkeypatch.setattr(registry, "OTHER_MODES", (mode,))
    record = sweep.make_record(QUICK)
    assert record.outcome == "failed", record
    assert ("ParityError" in str(record.reason)) is (self_check == "strict")
    assert Registry({QUICK: record}).exact_model_types() == frozenset()


def test_outcomes_are_told_apart() -> None:
    record = sweep.make_record("bert")
    assert record.outcome == "refused" and "decoder-only" in str(record.reason)
    assert record.problems(code_hash()) == []
    record = sweep.make_record("t5")
    assert record.outcome == "untested" and "causal language model" in str(record.reason)
    with pytest.raises(UnsupportedModelError, match="no-such-model"):
        sweep.make_record("no-such-model")
    broken = ParityReport("x", error="the streamed arm raised RuntimeError: y")
    assert sweep.judge(broken)[0] == "failed"
    unstreamed = ParityReport("x", error="1 of 3 decoder layers of the streamed arm were not")
    assert sweep.judge(unstreamed)[0] == "failed"
    different = ParityReport("x", error="the resident run recorded no loss", num_differences=1)
    assert sweep.judge(replace(different, differences=["first"]))[0] == "failed"  # type: ignore
    assert sweep.judge(replace(different, resident_repeats=False))[0] == "untested"
    assert sweep.judge(ParityReport("x"))[0] != "exact"


def test_a_sweep_goes_on_where_it_was(
    path: Path, records: dict[str, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(name: str, adapter: str | None, code: str, time_limit_s: float) -> Record:
        ran.append((name, adapter))
        return adapter_record(records[name], adapter) if adapter else records[name]

    monkeypatch.setattr(sweep, "_in_process", run)
    stale = replace(records["llama"], code="0" * 64).sealed()
    Registry({"llama": stale, "qwen2": records["qwen2"]}).write()
    sweep.sweep([("qwen2", None), ("llama", None), (QUICK, None), ("qwen2", "vera")])
    assert ran == [("llama", None), (QUICK, None), ("qwen2", "vera")]
    found = read_registry()
    assert dict(found.records) == {name: records[name] for name in ("llama", "qwen2", QUICK)}
    assert list(found.adapters) == ["vera on qwen2"] and found.of("qwen2", "vera") is not None


def test_a_process_that_hangs_or_dies_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "make_record", lambda name, **_: time.sleep(60))
    record = sweep._in_process(QUICK, None, code_hash(), 0.5)
    assert record.outcome == "untested" and "longer than" in str(record.reason)
    monkeypatch.setattr(sweep, "make_record", lambda name, **_: os._exit(3))
    record = sweep._in_process(QUICK, None, code_hash(), 30.0)
    assert record.outcome == "failed" and "exit code 3" in str(record.reason)
    assert record.problems(code_hash()) == []


# ------------------------------------------------------------------- the command


def check(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_records_and_lists(path: Path, records: dict[str, Record]) -> None:
    result = check("--architecture", QUICK, "--record")
    assert result.exit_code == 0 and f"recorded: {QUICK} exact" in result.output
    assert list(read_registry().records) == [QUICK]
    refused = check("--architecture", "bert", "--record")
    assert refused.exit_code == 1 and "recorded: bert refused" in refused.output
    listed = check("--registered")
    assert listed.exit_code == 0
    assert "1 exact families" in listed.output and "1 refused" in listed.output
    assert f"torch {environment_versions()['torch']}" in listed.output
    result = check("--architecture", "qwen2", "--adapter", "prefix_tuning", "--record")
    assert result.exit_code == 1, result.output
    assert "recorded: prefix_tuning on qwen2 refused" in result.output
    result = check("--architecture", "qwen2", "--adapter", "ln_tuning", "--record")
    assert result.exit_code == 0 and "recorded: ln_tuning on qwen2 exact" in result.output
    listed = check("--registered")
    assert "1 exact families, 1 exact kinds of adapters" in listed.output
    assert "prefix_tuning on qwen2" in listed.output and listed.exit_code == 0
    stale = replace(records["llama"], code="0" * 64).sealed()
    read_registry().including(stale).write()
    listed = check("--registered")
    assert listed.exit_code == 1
    assert "1 exact families" in listed.output and "1 stale" in listed.output


def environment_versions() -> dict[str, str]:
    import torch

    found: dict[str, str] = environment(torch.device("cpu"))["versions"]
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("--registered", "--record"),
        ("--registered", "--architecture", "qwen2"),
        ("--registered", "--adapter", "vera"),
        ("--record", "--adapter", "vera"),
        ("--record", "--architecture", "qwen2", "--adapter", "no-such-kind"),
        ("--record",),
        ("--record", "--architecture", "qwen2", "--steps", "2"),
        ("--record", "--architecture", "qwen2", "--slots", "3"),
        ("--record", "."),
        ("--record", "--architecture", "no-such-model"),
    ],
)
def test_bad_combinations_change_nothing(arguments: tuple[str, ...], path: Path) -> None:
    assert check(*arguments).exit_code == 2
    assert not path.exists()


def test_the_real_registry_is_listed(records: dict[str, Record]) -> None:
    listed = check("--registered")
    assert listed.exit_code == 0, listed.output
    assert f"{len(validated_model_types())} exact families" in listed.output
