"""The command line: what it says before it imports anything slow, exit codes, and its answers."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

import poros
import poros.api
import poros.examples.demo
from poros.cli.app import app, main
from poros.cli.shared import BAD_INPUT
from poros.config import MIN_SLOTS, StreamingPolicy
from poros.examples.demo import run_demo
from poros.gates import tiny
from poros.planning.cards import CARDS
from poros.recipes.recipe import settings
from tests.children import run_python
from tests.command import poros_command, run_apart, text
from tests.comparing import compare_mappings
from tests.damage import field, flipped

pytestmark = pytest.mark.usefixtures("planned_once")
QUEUES = "CUDA_SCALE_LAUNCH_QUEUES"
# The command as it is installed.
MAIN = "import sys; from poros.cli.app import main; sys.argv[0] = 'poros'; main()"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = tiny.small_config("qwen2", num_layers=3, hidden_size=64, dropout=0.0)
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    return folder


# What is answered before anything slow is imported.
RIGHT: list[tuple[str, str]] = [
    ("--version", f"poros {poros.__version__}\n"),
    ("check --help", "--architecture"),
    ("check --registered", "families:"),
]
# Each is wrong by itself.
WRONG: list[tuple[str, str]] = [
    ("plan model --seq abc", "Invalid value for '--seq'"),
    ("plan nowhere --seq 16", "MODEL: expected a folder or file that exists, or OWNER/NAME"),
    ("plan model --seq 0", "seq_len (--seq): expected a positive whole number"),
    (
        "plan model --seq 16 --accumulate 0",
        "accumulation (--accumulate): expected a positive whole number",
    ),
    ("plan model --seq 16 --vram 8", "did you mean '8GiB'?"),
    ("plan model --seq 16 --card rtx9999", "card: expected one of"),
    ("plan model --seq 16 --adapter-dtype int8", "'int8' is not one of"),
    ("plan model --seq 16 --set optimizer=adam", "optimizer: expected one of adamw_torch_fused"),
    ("plan model --seq 16 --set apples=3", "'apples' is not a policy field"),
    ("load nowhere --out new", "SOURCE: expected a folder or file that exists"),
    ("load model", "give either --out DIR or --verify"),
    ("load model --verify --dtype float16", "--verify takes no --dtype"),
    ("load model --out new --dtype bfloat", "'bfloat' is not one of"),
    ("load model --out file", "--out: expected a new folder, found the file"),
    ("check nowhere", "MODEL_DIR: expected a checkpoint folder with a config.json"),
    ("check model --slots 1", "slots: expected an integer of at least 2"),
    ("check --architecture qwen2 --out .", "--out: expected a file to write, found"),
    ("check", "give either MODEL_DIR or --architecture NAME"),
    ("check --registered --adapter vera", "--registered lists recorded results"),
    ("demo --device abacus", "'abacus' is not one of"),
    ("demo --out model", "--out: expected an empty or new folder"),
    ("finetune base rows.jsonl", "rows.jsonl:1:"),
    ("finetune gone.yaml", "gone.yaml: expected a file"),
    ("finetune base rows.jsonl --rank x", "--rank: expected"),
    ("finetune base rows.jsonl --learning-rate 1", "expected --lr, found --learning-rate"),
    ("finetune base rows.jsonl --dpo --method sft", "training.method: expected one value, found"),
    ("finetune base rows.jsonl --set data.source=a", "data.source: expected one value, found 'a'"),
    ("finetune base rows.jsonl --adapter lora --set adapter.use_dora=true", "one value, found 'tr"),
    ("finetune base rows.jsonl --use-dora", "expected --set adapter.use_dora=VALUE, found"),
]


def test_nothing_slow_is_imported_for_help_lists_and_wrong_arguments(tmp_path: Path) -> None:
    """Control: whether a folder is a checkpoint only reading it shows."""
    files = {"model/notes.txt": "no checkpoint", "base/config.json": "{}", "file": ""}
    for name, content in {**files, "rows.jsonl": "{"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before = sorted(path.name for path in tmp_path.iterdir())
    reading = ("plan model --seq 16", "load model --out new")
    table = [(*row, 0) for row in RIGHT] + [(*row, BAD_INPUT) for row in WRONG]
    results = run_apart([*(command for command, *_ in table), *reading], tmp_path)
    assert len(results) == len(table) + len(reading)
    for (command, expected, code), (exit_code, output, slow) in zip(table, results, strict=False):
        assert exit_code == code and expected in output, (command, output)
        assert slow == [] and "Traceback" not in output, command
    for exit_code, output, slow in results[len(table) :]:
        assert exit_code == BAD_INPUT and "Traceback" not in output and "owner" not in output
        assert {"torch", "transformers"} <= set(slow)
    assert "error: " in results[-1][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# Help, notices, completion


def options(command: str) -> dict[str, Any]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {parameter.name: parameter for parameter in found.params}


def test_help_lists_exactly_the_commands_there_are_and_their_real_defaults() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) == {
        *("chat", "demo", "check", "finetune", "load", "merge", "plan", "report")
    }
    result = poros_command("--help")
    assert result.exit_code == 0 and "--show-completion" in text(result)
    assert all(name in text(result) for name in commands)
    policy = StreamingPolicy()
    assert options("check")["slots"].default == (policy.slots or MIN_SLOTS)
    assert options("check")["block_size"].default == policy.block_size
    assert options("demo")["steps"].show_default == str(run_demo.__kwdefaults__["num_steps"])
    for key, setting in settings().items():  # 0 is a default like any other
        if setting.flag.startswith("--") and setting.default is not None:
            assert options("finetune")[key.replace(".", "__")].show_default == str(setting.default)


def test_a_command_says_nothing_on_the_error_stream() -> None:
    """In a process of its own, because the notice comes while a library is imported."""
    done = run_python(MAIN, "check", "--registered")
    assert (done.returncode, done.stderr) == (0, "") and "families:" in done.stdout


QUICKLY = """
import gc, sys
from poros.cli.imports import quick_imports
with quick_imports():
    import poros.finetune.run, torch
    import bitsandbytes.backends.default.ops
    twice = torch.compile(lambda number: 2 * number, backend="eager")
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 10_000
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler"
assert torch.compile.__module__ == "torch" and twice(torch.tensor(3)) == 6
torch.compile(twice)
assert "torch._inductor.compile_fx" in sys.modules
"""


def test_commands_import_no_compiler() -> None:
    """Control: to compile imports it."""
    pytest.importorskip("trl", reason="poros finetune trains with TRL")
    done = run_python(QUICKLY)
    assert done.returncode == 0, done.stderr


# poros check and poros demo

CHECKS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "exact": (("--slots", "3", "--block-size", "2"), 0, "EXACT: qwen2: 0 differing bits"),
    "vera": (("--adapter", "vera"), 0, "EXACT: qwen2 with vera: 0 differing bits"),
    "refused": (("--adapter", "prefix_tuning"), 1, "FAILED: qwen2 with prefix_tuning"),
    "no kind": (("--adapter", "none"), BAD_INPUT, "error: expected a kind of adapter that"),
    "no family": (("--architecture", "none"), BAD_INPUT, "error: expected an architecture that"),
    "a wrong bit": ((), 1, "DIFFERENT: qwen2"),
    "a run that stops": ((), 1, "FAILED: qwen2"),
}


@pytest.mark.parametrize("case", CHECKS)
def test_check_says_its_verdict_and_writes_the_report(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options, exit_code, verdict = CHECKS[case]
    prepare_with = poros.api.prepare_with

    def broken(model: Any, policy: StreamingPolicy, **given: Any) -> Any:
        if case == "a run that stops":
            raise poros.SlotStateError("deliberate")
        model = prepare_with(model, policy.override(self_check="off"), **given)
        poros.runtime(model).host_slab(1)[0] ^= 1
        return model

    if not options:
        monkeypatch.setattr(poros.api, "prepare_with", broken)
    out = tmp_path / "folder" / "report.json"
    command = ("check", "--architecture", "qwen2", "--steps", "2")
    result = poros_command(*command, *options, "--out", str(out))
    assert result.exit_code == exit_code and verdict in text(result), result.output
    assert "Traceback" not in text(result)
    assert ("deliberate" in text(result)) == (case == "a run that stops")
    if exit_code != BAD_INPUT:
        record = json.loads(out.read_text())
        assert record["exact"] == (exit_code == 0)
        assert (record["num_differences"] > 0) == (case == "a wrong bit")
        assert record["settings"]["training"]["num_steps"] == 2
        if case == "exact":
            assert record["stats"]["num_blocks"] == 3 and record["stats"]["num_slots"] == 3
            assert record["settings"]["policy"] == {"slots": 3, "block_size": 2}


@pytest.mark.parametrize("passed", [True, False])
def test_the_demo_exits_by_its_result(
    passed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo itself is in test_demo.py; here only what the command makes of its report."""
    seen = []

    def stand_in(out_dir: Path, *, num_steps: int, device: str | None) -> SimpleNamespace:
        seen.append((out_dir, num_steps, device))
        return SimpleNamespace(passed=passed)

    monkeypatch.setattr(poros.examples.demo, "run_demo", stand_in)
    result = poros_command("demo", "--out", str(tmp_path), "--steps", "7", "--device", "cpu")
    assert result.exit_code == (0 if passed else 1)
    assert seen == [(tmp_path, 7, "cpu")]


# poros load and poros plan


def test_load_writes_a_store_that_verifies_and_opens(checkpoint: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    written = poros_command("load", str(checkpoint), "--out", str(store))
    assert written.exit_code == 0, written.output
    refused = poros_command("load", str(checkpoint), "--verify")
    assert refused.exit_code == BAD_INPUT and "expected a store" in refused.output
    verified = poros_command("load", str(store), "--verify")
    assert verified.exit_code == 0 and "3 layers" in verified.output
    model = poros.load(store)
    expected = poros.load(checkpoint)
    assert compare_mappings(expected.state_dict(), model.state_dict()) == []
    flipped(store / "slabs.bin")
    damaged = poros_command("load", str(store), "--verify")
    assert damaged.exit_code == BAD_INPUT and "slabs.bin" in damaged.output


def plan(checkpoint: Path, *options: str) -> Any:
    length = [] if "--batch" in options else ["--seq", "16"]
    return poros_command("plan", str(checkpoint), *length, *options)


# Options, exit code, what is said, and facts of the figures.
PLANS: dict[str, tuple[list[str], int, str, Callable[[Any], bool]]] = {
    "a budget": (
        ["--vram", "1GiB", "--set", "block_size=1", "--set", "stream_embedding=false"],
        0,
        "^Fits",
        lambda found: found["num_blocks"] == found["num_slots"] == found["keep_last"] == 3,
    ),
    "a card that is not here": (
        ["--card", "RTX 4090", "--ram", "64G"],
        0,
        r"^Fits an RTX 4090 \(24 GB\): 3 of 3 .*of 64\.00 GB.*tokens/s",
        lambda found: (
            found["terms"]["libraries"] == CARDS["rtx4090"].library_num_bytes
            and found["copy_gb_per_s"] == 25
            and found["vram_budget"] > 20 * 2**30
        ),
    ),
    "a part of it": (
        ["--card", "rtx4090", "--vram", "8GiB"],
        0,
        "^Fits 8GiB of an RTX 4090",
        lambda found: found["vram_budget"] == 8 * 2**30,
    ),
    "too little host memory": (
        ["--vram", "1GiB", "--ram", "1G"],
        1,
        "but not the host memory",
        lambda found: found["fits"] is False,
    ),
    "rows that are too long": (
        ["--batch", "1", "--seq", "200", "--vram", "1500kB"],
        1,
        r"each change alone: --seq (\d+) .*longest rows that fit, in tokens \1 ",
        lambda found: f"--seq {found['longest_seq_len']}" in found["advice"],
    ),
    "no length": (
        ["--vram", "1GiB", "--batch", "2"],
        0,
        "^rows of 256 tokens, the model's positions.*Fits",
        lambda found: found["fits"],
    ),
    "no card": (
        [],
        0,
        "^Needs at least .* 2 of 3 blocks.*Give --vram or --card.*Time is not forecast",
        lambda found: found["tokens_per_s"] is None,
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_answers_and_prints_its_terms(case: str, checkpoint: Path) -> None:
    options, exit_code, said, is_so = PLANS[case]
    if not options and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    result = plan(checkpoint, *options)
    words = " ".join(result.output.split())
    assert result.exit_code == exit_code and re.search(said, words), words
    assert "workspace" not in words
    if case == "a budget":
        assert "workspace" in plan(checkpoint, *options, "--terms").output
    figures = json.loads(plan(checkpoint, *options, "--json").stdout)
    assert is_so(figures) and figures["total_num_bytes"] == sum(figures["terms"].values())


def test_a_classifier_is_planned_without_a_head_for_tokens(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Control: a language model of the same sizes."""
    shutil.copy(checkpoint / "config.json", tmp_path)
    field("architectures", to=["Qwen2ForSequenceClassification"])(tmp_path / "config.json")
    own, other = (json.loads(plan(each, "--json").stdout) for each in (tmp_path, checkpoint))
    assert own["terms"]["head"] == 0 < other["terms"]["head"]
    assert own["terms"]["embedding"] == other["terms"]["embedding"]


def test_the_gpu_of_this_machine_is_taken_if_no_other_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (23 * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr("poros.planning.request.PlanRequest.libraries", 0)
    values = json.loads(plan(checkpoint, "--json").stdout)
    assert values["vram_budget"] == 23 * 2**30 - int(2.4 * 2**30)
    assert "this machine's NVIDIA GeForce RTX 3090" in values["verdict"]
    assert values["forecast"] == "the published rates of an RTX 3090"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Apple Z9")
    assert json.loads(plan(checkpoint, "--json").stdout)["tokens_per_s"] is None


def test_room_in_the_queues_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for before CUDA begins, unless somebody has asked for other room."""
    monkeypatch.setattr("sys.argv", ["poros", "--version"])
    for before, after in (("2x", "2x"), (None, "4x")):
        monkeypatch.setenv(QUEUES, before or "")
        if before is None:
            monkeypatch.delenv(QUEUES)
        with pytest.raises(SystemExit):
            main()
        assert os.environ[QUEUES] == after
