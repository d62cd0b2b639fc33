"""What is shipped is what is on disk, and importing it does nothing."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import poros

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "poros": "poros",
    "poros.loaders": "loaders",
    "poros.gates": "gates",
    "poros.examples": "examples",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_on_disk(root: Path) -> set[str]:
    """Dotted name of every folder with Python files below the mapped folders."""
    return {
        ".".join((name, *path.parent.relative_to(root / folder).parts))
        for name, folder in FOLDERS.items()
        for path in (root / folder).rglob("*.py")
    }


def modules_on_disk(root: Path) -> set[str]:
    """Where each Python file must lie inside a wheel."""
    return {
        f"{name.replace('.', '/')}/{path.relative_to(root / folder).as_posix()}"
        for name, folder in FOLDERS.items()
        for path in (root / folder).rglob("*.py")
    }


def pins(file: str) -> dict[str, Version]:
    """The versions that a constraints file pins."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): Version(version) for name, version in pairs}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that building leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


def test_package_list_equals_the_folders_on_disk(tmp_path: Path) -> None:
    """Control: one that was forgotten shows, of which setuptools would not say a word."""
    assert PROJECT["project"]["version"] == poros.__version__
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk(ROOT)
    assert PROJECT["tool"]["setuptools"]["package-dir"] == FOLDERS
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} lacks __init__.py"
    (tmp_path / "poros" / "forgotten").mkdir(parents=True)
    (tmp_path / "poros" / "forgotten" / "__init__.py").touch()
    assert packages_on_disk(tmp_path) == {"poros.forgotten"}


def test_wheel_from_sdist_holds_everything(checkout: Path, tmp_path: Path) -> None:
    """With the installed setuptools."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(checkout)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as wheel:
        held = set(wheel.namelist())
    info = f"poros_runtime-{poros.__version__}.dist-info"
    assert {name for name in held if name.endswith(".py")} == modules_on_disk(ROOT)
    assert {"poros/py.typed", f"{info}/licenses/LICENSE"} <= held
    assert {name.split("/")[0] for name in held} == {"poros", info}
    (script,) = PROJECT["project"]["scripts"].values()
    assert script.split(":")[0].replace(".", "/") + ".py" in held


class Installed:
    """An environment with what the line of README installs from source, away from the checkout.

    What that depends on is taken from the environment of the tests, through a line in a .pth file:
    that makes packages importable without running what lies beside them, an editable install's
    finder included.
    """

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.user = folder / "user"
        self.user.mkdir()
        self.bin = folder / "venv" / "bin"
        self.python = str(self.bin / "python")
        venv = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
        subprocess.run(venv, check=True, timeout=120)
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        libraries = [path for path in sys.path if path.endswith("site-packages")]
        (self.site / "dependencies.pth").write_text("\n".join(libraries) + "\n")
        (line,) = re.findall(r"^pip install (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
        (what,) = shlex.split(line)
        assert what.startswith(".[") and what[2:-1] in PROJECT["project"]["optional-dependencies"]
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        pip += ["install", "-q", "--no-deps", "--no-index", "--no-build-isolation", what]
        subprocess.run(pip, check=True, timeout=300, cwd=checkout)

    def run(self, *command: str) -> str:
        """Run a command in the user's folder, with nothing of ours in the environment."""
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.user),
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=self.user, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(checkout, tmp_path_factory.mktemp("installed"))


SMOKE = """
import json, torch
torch.set_num_threads(1)
import poros, poros.examples, poros.gates, poros.gates.registry, poros.loaders
from poros.gates import tiny
from poros.gates.reference import TrainingSpec, train
from poros.self_check.compare import hash_tensor

batches, spec = tiny.make_batches(2, num_tokens=8), TrainingSpec(num_steps=2)
arms = [tiny.make_model("qwen2", num_layers=3, hidden_size=64, dropout=0.05) for _ in range(2)]
poros.prepare(arms[1], loss="reference")
runs = [train(model, batches, spec) for model in (*arms, arms[0])]
hashes = [[hash_tensor(entry.tensor) for entry in run.entries()] for run in runs]
files = [module.__file__ for module in (poros, poros.loaders, poros.gates, poros.examples)]
families = poros.gates.registry.read_registry().families
print(json.dumps([files, hashes, poros.runtime(arms[1]).self_check["status"], len(families)]))
"""


def test_what_is_installed_trains_exactly_and_tells_its_version(installed: Installed) -> None:
    assert poros.__version__ in installed.run(str(installed.bin / "poros"), "--version")
    files, hashes, status, num_families = json.loads(installed.run(installed.python, "-c", SMOKE))
    assert files == [
        str(installed.site.joinpath(*name.split("."), "__init__.py")) for name in FOLDERS
    ]
    # The third run starts from what the first has learnt: another run, another hash.
    assert hashes[0] == hashes[1] != hashes[2]
    assert status == "passed" and num_families > 100


PROBE = """
import json, os, sys
modules, before = set(sys.modules), dict(os.environ)
{statement}
loaded = {{name.split(".")[0] for name in set(sys.modules) - modules}}
after = dict(os.environ)
changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
print(json.dumps([sorted(loaded - sys.stdlib_module_names), changed]))
"""


def probe(statement: str, cwd: Path) -> tuple[list[str], list[str]]:
    """Run `statement` in a fresh interpreter; return what it loads and what it sets.

    Returns:
        The top-level modules from outside the standard library, and the environment variables.
    """
    code = PROBE.format(statement=statement)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(1, {str(ROOT)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    loaded, changed = json.loads(done.stdout)
    return loaded, changed


def test_importing_poros_loads_nothing_else_and_sets_nothing(tmp_path: Path) -> None:
    """Control: a torch of our own, which is loaded and sets a variable."""
    assert probe("import poros", tmp_path) == (["poros"], [])
    (tmp_path / "torch.py").write_text("import os\nos.environ['POROS_PROBE'] = '1'\n")
    assert probe("import poros, torch", tmp_path) == (["poros", "torch"], ["POROS_PROBE"])


def test_ranges_admit_what_was_run_and_no_more() -> None:
    """Upper bounds end at the pinned minor version; lower bounds are the oldest environment's."""
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    for requirement in map(Requirement, PROJECT["project"]["dependencies"]):
        bound = {part.operator: Version(part.version) for part in requirement.specifier}
        assert bound.keys() == {">=", "<"}, f"{requirement}: expected >= and <"
        pin = newest[requirement.name]
        assert bound["<"] == Version(f"{pin.major}.{pin.minor + 1}"), requirement
        if requirement.name != "torch":  # its lower bound is the CUDA tests' version
            assert bound[">="] == oldest[requirement.name], requirement
    # bitsandbytes looks for a package named kernels and, if it is there, downloads code.
    assert "kernels" not in newest.keys() | oldest.keys()
