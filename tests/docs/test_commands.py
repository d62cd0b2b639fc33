"""Each command and script of README and of the pages runs as it is written there.

Only the names of model and data are replaced: by a small checkpoint and small files.
"""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from poros.recipes.reading import read_recipe
from tests.command import poros_command, text
from tests.finetune.subjects import TEMPLATE, write_base, write_rows

pytest.importorskip("trl", reason="poros finetune needs TRL")
pytestmark = pytest.mark.usefixtures("planned_once")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODELS = re.compile(r"(?:Qwen/|\./Qwen)[\w.-]+")
# What installs packages, and what cannot be run; recipes have a test of their own.
NOT_RUN = {"console", "json", "yaml", "text"}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    lines: list[str]

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def __str__(self) -> str:
        return self.name


def blocks(page: Path) -> Iterator[Block]:
    language, found, begun = None, [], 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if language is None:
                language, found, begun = line[3:].strip(), [], number
            else:
                yield Block(page, begun, language, found)
                language = None
        elif language is not None:
            found.append(line)


def unlike(found: list[Block]) -> list[Block]:
    """Without those all of whose lines others have had, but for the name of the output."""
    seen: set[str] = set()
    chosen = []
    for block in found:
        lines = {re.sub(r"runs/[\w-]+", "runs/mine", line) for line in block.lines}
        if not lines <= seen:
            chosen.append(block)
        seen |= lines
    return chosen


ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = unlike([block for block in ALL if block.language == "sh"])
LONG = {*("choosing", "settings", "multimodal", "coming-from", "report"), *("preferences", "data")}
"""Pages whose commands `make test` checks by a dry run, as others train in the same way."""
SCRIPTS = [block for block in ALL if block.language == "python"]
RECIPES = [block for block in ALL if block.language == "yaml"]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    base = write_base(folder / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    write_rows(folder / "train.jsonl", "text", 8)
    write_rows(folder / "preferences.jsonl", "preferences", 8)
    run = ("finetune", str(base), str(folder / "train.jsonl"), "--out", str(folder / "runs/mine"))
    assert poros_command(*run).exit_code == 0
    return folder


@pytest.fixture
def folder(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for each in material.iterdir():
        if each.name != "runs":
            (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def test_there_are_blocks_of_each_kind() -> None:
    assert {block.language for block in ALL} >= {"sh", "python"}
    assert {block.language for block in ALL} <= {"sh", "python", *NOT_RUN}
    assert sum(block.language == "sh" for block in ALL) > 8


RUNS = [
    *(
        pytest.param(
            block, False, marks=[pytest.mark.slow] * (block.page.stem in LONG), id=str(block)
        )
        for block in COMMANDS
    ),
    *(
        pytest.param(block, True, id=f"{block}, dry")
        for block in COMMANDS
        if block.page.stem in LONG
    ),
]


@pytest.mark.parametrize(("block", "is_dry"), RUNS)
def test_a_block_of_commands(block: Block, is_dry: bool, folder: Path, material: Path) -> None:
    written = "\n".join(block.lines)
    if "runs/mine" in written and "--out runs/mine" not in written:
        (folder / "runs").mkdir()
        (folder / "runs" / "mine").symlink_to(material / "runs" / "mine")
    for line in block.lines:
        if not line.strip() or line.startswith("#"):
            continue
        command, _, target = MODELS.sub("./base", line).partition(" > ")
        words = shlex.split(command, comments=True)
        assert words[0] == "poros"
        if is_dry and words[1] != "finetune":
            continue
        words += ["--dry-run"] * (is_dry and "--dry-run" not in words)
        result = poros_command(*words[1:])
        assert result.exit_code == 0, f"{block.name}: {line}\n{text(result)[-2000:]}"
        if target:
            Path(target).write_text(result.stdout)


@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_a_recipe(block: Block, folder: Path) -> None:
    """Those of rows that are here, by a dry run; of others each setting is read."""
    written = MODELS.sub("./base", "\n".join(block.lines))
    Path("recipe.yaml").write_text(written)
    assert read_recipe(Path("recipe.yaml"), {}).problems == []
    if "report_to: tensorboard" in written:
        pytest.importorskip("tensorboardX", reason="TensorBoard's files need a package of it")
    if "data: train.jsonl" in written:
        result = poros_command("finetune", "recipe.yaml", "--dry-run")
        assert result.exit_code == 0, f"{block.name}\n{text(result)[-2000:]}"


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_script(block: Block, folder: Path) -> None:
    source = MODELS.sub("./base", "\n".join(block.lines))
    exec(compile(source, block.name, "exec"), {"__name__": "__main__"})
    if "trainer.train()" in source:
        assert os.path.getsize("adapter/adapter_model.safetensors") > 0
