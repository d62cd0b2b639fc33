"""The command line: commands, exit codes, messages, and what it imports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import poros
import poros.api
import poros.examples.demo
from poros.cli.app import app
from poros.cli.shared import BAD_INPUT
from poros.config import MIN_SLOTS, StreamingPolicy
from poros.examples.demo import DemoSettings
from poros.examples.demo_report import DemoReport
from poros.gates import tiny
from tests.command import poros_command, text
from tests.support import same_bits

ROOT = Path(__file__).resolve().parents[2]
TWO_STEPS = ("check", "--architecture", "qwen2", "--steps", "2")


def options(command: str) -> dict[str, Any]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {parameter.name: parameter for parameter in found.params}


def test_help_lists_exactly_the_commands_there_are() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) == {
        *("chat", "demo", "check", "finetune", "load", "merge", "plan", "report", "tune-paths"),
    }
    result = poros_command("--help")
    assert result.exit_code == 0
    assert all(name in text(result) for name in commands)


def test_version() -> None:
    result = poros_command("--version")
    assert (result.exit_code, result.output) == (0, f"poros {poros.__version__}\n")


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from poros.cli.app import app; "
        "result = CliRunner().invoke(app, ['check', '--help']); "
        "slow = {'torch', 'transformers', 'peft', 'bitsandbytes', 'numpy'} & set(sys.modules); "
        "sys.exit(f'{result.exit_code} {slow}' if result.exit_code or slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_defaults_in_the_help_are_the_real_ones() -> None:
    policy = StreamingPolicy()
    assert options("check")["slots"].default == (policy.slots or MIN_SLOTS)
    assert options("check")["block_size"].default == policy.block_size
    assert options("demo")["steps"].show_default == str(DemoSettings().num_steps)


def test_check_of_an_exact_architecture_succeeds_and_writes_the_report(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "report.json"
    result = poros_command(*TWO_STEPS, "--slots", "3", "--block-size", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "EXACT: qwen2: 0 differing bits" in text(result)
    record = json.loads(out.read_text())
    assert record["exact"] is True and record["num_differences"] == 0
    assert record["settings"]["training"]["num_steps"] == 2
    assert record["stats"]["num_blocks"] == 3 and record["stats"]["num_slots"] == 3


@pytest.mark.parametrize(
    ("adapter", "exit_code", "verdict"),
    [
        ("vera", 0, "EXACT: qwen2 with vera: 0 differing bits"),
        ("prefix_tuning", 1, "FAILED: qwen2 with prefix_tuning"),
    ],
)
def test_check_of_a_kind_of_adapter(adapter: str, exit_code: int, verdict: str) -> None:
    result = poros_command(*TWO_STEPS, "--adapter", adapter)
    assert result.exit_code == exit_code and verdict in text(result), result.output


def test_check_fails_when_a_streamed_bit_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare_with = poros.api.prepare_with

    def broken(model: Any, policy: StreamingPolicy, **options: Any) -> Any:
        model = prepare_with(model, policy.override(self_check="off"), **options)
        poros.runtime(model).host_slab(1)[0] ^= 1
        return model

    monkeypatch.setattr(poros.api, "prepare_with", broken)
    out = tmp_path / "report.json"
    result = poros_command(*TWO_STEPS, "--out", str(out))
    assert result.exit_code == 1, result.output
    assert "DIFFERENT: qwen2" in text(result)
    assert json.loads(out.read_text())["num_differences"] > 0


def test_check_fails_when_the_streamed_run_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise poros.SlotStateError("deliberate")

    monkeypatch.setattr(poros.api, "prepare_with", broken)
    result = poros_command(*TWO_STEPS)
    assert result.exit_code == 1
    assert "FAILED: qwen2" in text(result) and "deliberate" in text(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--architecture", "no-such-model"], "error: expected an architecture that the gates"),
        (
            ["--architecture", "qwen2", "--adapter", "none"],
            "error: expected a kind of adapter that",
        ),
        (
            ["{folder}"],
            "error: MODEL_DIR: expected a checkpoint folder with a config.json, found none at",
        ),
        (["{folder}/absent"], "error: MODEL_DIR: expected a checkpoint folder with a config.json"),
        (["--architecture", "qwen2", "--steps", "0"], "Invalid value"),
        (["--architecture", "qwen2", "{folder}"], "either MODEL_DIR or --architecture NAME"),
    ],
)
def test_bad_input_to_check_is_told_without_a_traceback(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    result = poros_command("check", *filled)
    assert result.exit_code == 2
    assert message in text(result) and "Traceback" not in text(result)


@pytest.mark.parametrize("passed", [True, False])
def test_the_demo_exits_by_its_result(
    passed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo itself is in test_demo.py; here only what the command makes of its report."""
    seen = []

    class Report(DemoReport):
        @property
        def passed(self) -> bool:
            return passed

    def run_demo(out_dir: Path, *, settings: DemoSettings, device: str | None) -> DemoReport:
        seen.append((out_dir, settings.num_steps, device))
        return Report("cpu", {"checkpoint": out_dir})

    monkeypatch.setattr(poros.examples.demo, "run_demo", run_demo)
    result = poros_command("demo", "--out", str(tmp_path), "--steps", "7", "--device", "cpu")
    assert result.exit_code == (0 if passed else 1)
    assert seen == [(tmp_path, 7, "cpu")]


def test_bad_input_to_the_demo_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    result = poros_command("demo", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "error: --out: expected an empty or new folder" in text(result)
    assert "Traceback" not in text(result)


# poros load and poros plan.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = tiny.small_config("qwen2", num_layers=3, hidden_size=64, dropout=0.0)
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    return folder


def test_load_writes_a_store_that_verifies_and_opens(checkpoint: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    written = poros_command("load", str(checkpoint), "--out", str(store))
    assert written.exit_code == 0, written.output
    verified = poros_command("load", str(store), "--verify")
    assert verified.exit_code == 0 and "3 layers" in verified.output
    model = poros.load(store)
    expected = poros.load(checkpoint)
    for name, tensor in expected.state_dict().items():
        assert same_bits(model.state_dict()[name], tensor), name
    slabs = store / "slabs.safetensors"
    content = bytearray(slabs.read_bytes())
    content[-100] ^= 1
    slabs.write_bytes(content)
    damaged = poros_command("load", str(store), "--verify")
    assert damaged.exit_code == BAD_INPUT and "slabs.safetensors" in damaged.output


def test_plan_prints_the_terms(checkpoint: Path) -> None:
    found = poros_command("plan", str(checkpoint), "--seq", "16", "--json", "--vram", "1GiB")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert values["total_num_bytes"] == sum(values["terms"].values()) < 2**30
    assert values["num_blocks"] == values["num_slots"] == values["keep_last"] == 3
    speeds = ("--copy-gb-per-s", "25", "--tflop-per-s", "50")
    answer = poros_command("plan", str(checkpoint), "--seq", "16", *speeds)
    assert answer.exit_code == 0 and "workspace" not in answer.output and "ms" in answer.output
    table = poros_command("plan", str(checkpoint), "--seq", "16", *speeds, "--terms")
    assert table.exit_code == 0 and "workspace" in table.output


def test_plan_measures_the_rates_of_its_forecast(checkpoint: Path) -> None:
    measured = ("--seq", "16", "--measure", "--device", "cpu")
    found = poros_command("plan", str(checkpoint), *measured, "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert values["copy_gb_per_s"] > 0 and values["tflop_per_s"] > 0 and values["step_ms"] > 0
    table = poros_command("plan", str(checkpoint), *measured)
    assert table.exit_code == 0 and "TFLOP/s" in table.output and "GB/s" in table.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_plan_measures_on_a_gpu_or_says_that_there_is_none(checkpoint: Path) -> None:
    found = poros_command("plan", str(checkpoint), "--seq", "16", "--measure")
    assert found.exit_code == BAD_INPUT
    assert "expected a CUDA device to measure on" in text(found)


def test_plan_takes_slots_and_leaves_the_embedding_where_it_is_told(checkpoint: Path) -> None:
    command = ("plan", str(checkpoint), "--seq", "16", "--json")
    usual, more, moved = (
        json.loads(poros_command(*command, *options).stdout)
        for options in ((), ("--set", "slots=3"), ("--set", "stream_embedding=true"))
    )
    assert (usual["num_slots"], more["num_slots"]) == (2, 3)
    assert usual["terms"]["embedding"] > 0 == moved["terms"]["embedding"]
    saved = usual["total_num_bytes"] - moved["total_num_bytes"]
    assert saved == usual["terms"]["embedding"]
    assert saved == moved["host_num_bytes"] - usual["host_num_bytes"]


def test_plan_says_where_boundaries_are_and_what_the_check_needs(checkpoint: Path) -> None:
    command = ("plan", str(checkpoint), "--seq", "16", "--set", "optimizer=sgd", "--json")
    values = json.loads(poros_command(*command).stdout)
    assert values["offload_boundaries"] is False and values["terms"]["self-check"] > 0
    fields = ("offload_boundaries=true", "self_check=false", "optimizer=adamw_torch")
    options = [word for each in fields for word in ("--set", each)]
    others = json.loads(poros_command(*command, *options).stdout)
    assert others["offload_boundaries"] is True and "self-check" not in others["terms"]
    assert others["terms"]["optimizer"] > 0 == values["terms"]["optimizer"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--vram", "-1GiB"), "-1GiB"),
        (("--vram", "nan"), "nan"),
        (("--seq", "100000"), "seq_len (--seq): expected at most the model's 256 positions"),
        (("--measure", "--device", "apples"), "device: expected"),
    ],
)
def test_plan_refuses_what_cannot_be_planned(
    options: tuple[str, ...], expected: str, checkpoint: Path
) -> None:
    found = poros_command("plan", str(checkpoint), "--seq", "16", *options)
    assert found.exit_code == BAD_INPUT and expected in text(found), found.output


def test_plan_refuses_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert poros_command("plan", str(tmp_path), "--seq", "16").exit_code == BAD_INPUT
