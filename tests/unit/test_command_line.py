"""What the command line says before it imports anything slow, and in whose words."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from poros.cli import shared
from poros.cli.shared import dtype_name, quieten_libraries
from poros.errors import CheckpointFormatError
from poros.gates import tiny
from poros.loaders.names import is_repository, require_source
from poros.planning.cards import CARDS
from tests.command import poros_command, text

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("torch", "numpy", "transformers", "peft", "bitsandbytes", "huggingface_hub", "datasets")

# Runs commands one after the other in one process, and says after each what came in.
RUNNER = f"""
import json, sys
from typer.testing import CliRunner
from poros.cli.app import app
for arguments in json.load(sys.stdin):
    result = CliRunner().invoke(app, arguments, env={{"COLUMNS": "400"}})
    slow = sorted(set({SLOW!r}) & set(sys.modules))
    print(json.dumps([result.exit_code, result.output, slow]), flush=True)
"""


def run_apart(commands: list[list[str]], cwd: Path) -> list[tuple[int, str, list[str]]]:
    """Exit code, output and slow modules after each command, in a process of their own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(commands),
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


# Each is wrong by itself; the folder "model" is there.
WRONG: list[tuple[str, str]] = [
    ("plan model --seq abc", "Invalid value for '--seq'"),
    ("plan nowhere --seq 16", "MODEL: expected a folder or file that is there, or OWNER/NAME"),
    ("plan ./nowhere --seq 16", "found neither in './nowhere'"),
    ("plan /nowhere --seq 16", "found neither in '/nowhere'"),
    ("plan ~nowhere --seq 16", "found neither in '~nowhere'"),
    ("plan a/b/c --seq 16", "found neither in 'a/b/c'"),
    ("plan weights.safetensors --seq 16", "found neither in 'weights.safetensors'"),
    ("plan owner/weights.safetensors --seq 16", "found neither in"),
    ("plan model --seq 0", "seq_len (--seq): expected a positive whole number"),
    ("plan model --seq 16 --batch 0", "batch_size (--batch): expected a positive whole number"),
    ("plan model --seq 16 --rank 0", "rank: expected a positive whole number"),
    (
        "plan model --seq 16 --accumulate 0",
        "accumulation (--accumulate): expected a positive whole number",
    ),
    ("plan model --seq 16 --vram 8apples", "vram_budget (--vram): expected bytes"),
    ("plan model --seq 16 --vram 8", "did you mean '8GiB'?"),
    ("plan model --seq 16 --card rtx9999", "card: expected one of"),
    ("plan model --seq 16 --card l4 --measure", "either --card"),
    ("plan model --seq 16 --ram much", "--ram: expected bytes"),
    ("plan model --seq 16 --tokens five", "--tokens: expected a positive number"),
    ("plan model --seq 16 --adapter-dtype int8", "--adapter-dtype: expected one of bf16"),
    ("plan model --seq 16 --set optimizer=adam", "optimizer: expected one of adamw_torch_fused"),
    ("plan model --seq 16 --set loss=none", "loss: expected one of chunked, reference"),
    ("plan model --seq 16 --set adapter_kernels=x", "adapter_kernels: expected one of"),
    ("plan model --seq 16 --set slots=1", "slots: expected an integer of at least 2"),
    ("plan model --seq 16 --set block_size=0", "block_size: expected an integer"),
    ("plan model --seq 16 --set self_check=off", "self_check: expected a bool"),
    ("plan model --seq 16 --set library_num_bytes=1G", "library_num_bytes: expected bytes"),
    ("plan model --seq 16 --set apples=3", "'apples' is not a policy field"),
    ("plan model --seq 16 --set policy=3", "--set: expected FIELD=VALUE"),
    ("plan model --seq 16 --set apples", "--set: expected FIELD=VALUE"),
    ("plan model --seq 16 --copy-gb-per-s 25", "or neither"),
    ("plan model --seq 16 --copy-gb-per-s 0 --tflop-per-s 1", "copy_gb_per_s: expected a rate"),
    ("plan model --seq 16 --device cpu", "--device is where to --measure"),
    ("plan model --seq 16 --limit apples=3", "--limit: expected NAME=NUMBER"),
    ("plan model --seq 16 --limit num_layers=0", "expected num_layers as a positive whole number"),
    ("load nowhere --out new", "SOURCE: expected a folder or file that is there"),
    ("load a/b/c --out new", "found neither in 'a/b/c'"),
    ("load nowhere --verify", "SOURCE: expected a folder or file that is there"),
    ("load model", "give either --out DIR or --verify"),
    ("load model --verify --out new", "give either --out DIR or --verify"),
    ("load model --out new --dtype bfloat", "--dtype: expected one of bf16, fp16, fp32"),
    ("load model --out new --quantization int3", "--quantization: expected one of nf4, fp4, none"),
    ("load model --out file", "--out: expected a new folder, found the file"),
    ("check nowhere", "MODEL_DIR: expected a checkpoint folder with a config.json"),
    ("check model --slots 1", "slots: expected an integer of at least 2"),
    ("check --architecture qwen2 --block-size 0", "block_size: expected an integer"),
    ("check --architecture qwen2 --out .", "--out: expected a file to write, found the folder"),
    ("check", "give either MODEL_DIR or --architecture NAME"),
    ("check --registered --adapter vera", "--registered shows what is on record"),
    ("demo --device abacus", "--device: expected cpu or cuda"),
    ("demo --out model", "--out: expected an empty or new folder"),
]


def folder_with(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("no checkpoint")
    (tmp_path / "file").write_text("")
    return tmp_path


def test_wrong_arguments_are_answered_before_anything_slow_is_imported(tmp_path: Path) -> None:
    results = run_apart([command.split() for command, _ in WRONG], folder_with(tmp_path))
    assert len(results) == len(WRONG)
    for (command, expected), (exit_code, output, slow) in zip(WRONG, results, strict=True):
        assert exit_code == 2 and expected in output, (command, output)
        assert slow == [], command
        assert "Traceback" not in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


def test_the_test_above_would_see_what_is_imported(tmp_path: Path) -> None:
    """The folder is there: only reading it shows that it is no checkpoint."""
    command = ["load", "model", "--out", "new"]
    ((exit_code, output, slow),) = run_apart([command], folder_with(tmp_path))
    assert exit_code == 2 and "error: " in output and {"torch", "transformers"} <= set(slow)
    assert "owner" not in output and not (tmp_path / "new").exists()


# Names


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("Qwen/Qwen2.5-32B", True),
        ("gpt2", True),
        ("a/b/c", False),
        ("./x", False),
        ("../x", False),
        ("/x", False),
        ("~x", False),
        ("~/models/x", False),
        ("x.safetensors", False),
        ("owner/x.safetensors", False),
        ("owner/config.json", False),
        ("owner/", False),
        ("owner/..", False),
        ("a b/c", False),
    ],
)
def test_paths_are_no_names_of_repositories(name: str, is_one: bool) -> None:
    assert is_repository(name) is is_one


def test_a_source_is_there_or_has_an_owner_and_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "here").mkdir()
    for name in ("here", "gone", str(tmp_path), "owner/name"):
        require_source(name, "MODEL")
    for name in ("gpt2", "here/inside/it", "./owner", ""):
        with pytest.raises(CheckpointFormatError, match="MODEL: expected a folder or file"):
            require_source(name, "MODEL")


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16", "torch.bfloat16"])
def test_a_dtype_has_several_names(name: str) -> None:
    assert dtype_name("--dtype", name) == "bfloat16"
    assert shared.dtype_named("--dtype", name) is torch.bfloat16


def test_other_dtypes_by_name() -> None:
    names = {"fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    assert {name: dtype_name("", name) for name in names} == names
    assert dtype_name("", None) is None and dtype_name("", "auto", "auto") == "auto"
    with pytest.raises(typer.BadParameter, match=r"--dtype: expected one of .*found 'int8'"):
        dtype_name("--dtype", "int8")


# Notices


def test_the_notice_about_kernels_is_silenced_and_no_other() -> None:
    quieten_libraries()
    quieten_libraries()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "x")
        logger.warning("something else about %s", "gemm_4bit_forward")
    finally:
        logger.removeHandler(handler)
    assert seen == ["something else about gemm_4bit_forward"]
    assert logging.getLogger("bitsandbytes").level == logging.NOTSET


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny.write_checkpoint(
        tiny.small_config("qwen2", num_layers=3, hidden_size=64, dropout=0.0),
        folder,
        dtype=torch.bfloat16,
    )
    return folder


@pytest.mark.parametrize("arguments", [("plan", "{}", "--seq", "16"), ("check", "--registered")])
def test_commands_say_nothing_on_the_error_stream(
    arguments: tuple[str, ...], checkpoint: Path
) -> None:
    """In a process of its own, because the notice comes while a library is imported."""
    code = "import sys; from poros.cli.app import main; sys.argv[0] = 'poros'; main()"
    filled = [argument.format(checkpoint) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", code, *filled], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "forecast" in done.stdout or "families:" in done.stdout


# Completion


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("poros pl", {"plan"}),
        ("poros plan --card rtx409", {"rtx4090"}),
        ("poros load --quan", {"--quantization"}),
    ],
)
def test_the_shell_is_offered_what_may_come_next(typed: str, offered: set[str]) -> None:
    code = (
        "import atexit, sys; from poros.cli.app import main; sys.argv = ['poros']; "
        f"atexit.register(lambda: print(set({SLOW!r}) & set(sys.modules), file=sys.stderr)); main()"
    )
    words = typed.split(" ")
    environment = {
        **{"_POROS_COMPLETE": "complete_bash", "COMP_WORDS": typed},
        **{"COMP_CWORD": str(len(words) - 1), "PYTHONPATH": str(ROOT)},
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert set(done.stdout.split()) == offered and done.stderr == "set()\n"


def test_a_shell_can_be_shown_how_to_complete() -> None:
    environment = {**os.environ, "_POROS_COMPLETE": "source_bash", "PYTHONPATH": str(ROOT)}
    code = "import sys; from poros.cli.app import main; sys.argv = ['poros']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "complete -o default -F _poros_completion poros" in done.stdout
    assert "--show-completion" in text(poros_command("--help"))


# What is on record


def test_the_list_of_a_family_is_a_line_for_each() -> None:
    result = poros_command("check", "--registered", "qwen")
    lines = [line for line in result.stdout.splitlines() if line]
    words = dict(line.split()[:2] for line in lines)
    assert result.exit_code == 0 and words["qwen2"] == words["qwen3_moe"] == "exact"
    assert words["qwen4_exp"] == "untested" and all("qwen" in name for name in words)
    assert len(words) == len(lines) < 20


def test_a_line_says_why_a_family_is_refused() -> None:
    lines = poros_command("check", "--registered", "Roberta").stdout.splitlines()
    assert len(lines) > 3
    assert all(" refused " in line and "expected a decoder-only" in line for line in lines)
    kinds = poros_command("check", "--registered", "prefix").stdout
    assert "prefix_tuning  refused   expected adapters on modules" in kinds


def test_what_is_not_on_record_is_said_so() -> None:
    result = poros_command("check", "--registered", "apple")
    assert result.exit_code == 1
    assert "nothing on record has 'apple' in its name" in result.stdout


def test_the_whole_registry_is_a_few_lines() -> None:
    result = poros_command("check", "--registered")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) < 30
    assert " exact    not one bit differs" in result.stdout and "qwen2" in result.stdout


# The plan


def plan(checkpoint: Path, *options: str) -> Any:
    return poros_command("plan", str(checkpoint), "--seq", "16", *options)


def test_a_plan_answers_for_a_card_that_is_not_here(checkpoint: Path) -> None:
    result = plan(checkpoint, "--card", "RTX 4090", "--tokens", "5M", "--ram", "64G")
    assert result.exit_code == 0
    assert result.stdout.startswith("Fits an RTX 4090 (24 GB): 3 of 3 blocks stay on the card")
    for expected in (
        "of 64.00 GB",
        "tokens/s",
        "all tokens",
        "published rates of an RTX 4090",
    ):
        assert expected in " ".join(result.stdout.split())
    values = json.loads(plan(checkpoint, "--card", "rtx4090", "--json").stdout)
    assert values["terms"]["libraries"] == CARDS["rtx4090"].library_num_bytes
    assert values["copy_gb_per_s"] == 25 and values["vram_budget"] > 20 * 2**30
    part = plan(checkpoint, "--card", "rtx4090", "--vram", "8GiB").stdout
    assert part.startswith("Fits 8GiB of an RTX 4090 (24 GB):")
    assert plan(checkpoint, "--card", "4060 ti").stdout.startswith("Fits an RTX 4060 Ti 16 GB:")


def test_a_plan_that_does_not_fit_says_what_to_change_and_exits_with_1(checkpoint: Path) -> None:
    result = plan(checkpoint, "--vram", "400kB", "--batch", "8")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 1 and words.startswith("Does not fit your 400kB: the step needs")
    assert "each alone" in words and "batch_size" in words
    values = json.loads(plan(checkpoint, "--vram", "400kB", "--batch", "8", "--json").stdout)
    assert values["fits"] is False and "batch_size=" in values["advice"]
    assert values["total_num_bytes"] == sum(values["terms"].values()) > 400_000


def test_host_memory_that_is_too_small_is_told(checkpoint: Path) -> None:
    result = plan(checkpoint, "--vram", "1GiB", "--ram", "1G")
    assert result.exit_code == 1
    assert "but not the host memory" in " ".join(result.stdout.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_card_a_plan_says_what_is_needed(checkpoint: Path) -> None:
    words = " ".join(plan(checkpoint).stdout.split())
    assert words.startswith("Needs ") and "at the least on the card: 2 of 3 blocks" in words
    assert "Give --vram or --card" in words and "Time is not forecast" in words


def test_the_gpu_of_this_machine_is_taken_if_no_other_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (23 * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 3090")
    monkeypatch.setattr("poros.planning.request.PlanRequest.libraries", 0)
    values = json.loads(plan(checkpoint, "--json").stdout)
    assert values["vram_budget"] == 23 * 2**30 - int(2.4 * 2**30)
    assert "this machine's NVIDIA GeForce RTX 3090" in values["verdict"]
    assert values["forecast"] == "the published rates of an RTX 3090"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Apple Z9")
    assert json.loads(plan(checkpoint, "--json").stdout)["tokens_per_s"] is None
