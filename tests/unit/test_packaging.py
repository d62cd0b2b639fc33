"""What is shipped is what is on disk, and importing it does nothing."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

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


# The command as it is installed, and where what it imports comes from.
INSTALLED = """
import json, sys
import poros, poros.examples, poros.gates, poros.loaders
print(json.dumps([each.__file__ for each in (poros, poros.loaders, poros.gates, poros.examples)]))
from poros.cli.app import main
sys.argv = ["poros", *sys.argv[1:]]
main()
"""


def test_a_wheel_from_the_sdist_holds_everything_and_runs_without_the_checkout(
    tmp_path: Path,
) -> None:
    """With the installed setuptools, and from a copy: building leaves nothing in the checkout."""
    copy, out, site = (tmp_path / name for name in ("copy", "out", "site"))
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} lacks __init__.py"
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as wheel:
        held = set(wheel.namelist())
        wheel.extractall(site)
    info = f"poros_runtime-{poros.__version__}.dist-info"
    assert {name for name in held if name.endswith(".py")} == modules_on_disk(ROOT)
    assert {"poros/py.typed", f"{info}/licenses/LICENSE"} <= held
    assert {name.split("/")[0] for name in held} == {"poros", info}
    (script,) = PROJECT["project"]["scripts"].values()
    assert script.split(":")[0].replace(".", "/") + ".py" in held
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for arguments, said in (
        (("--version",), poros.__version__),
        (("check", "--registered"), "qwen2"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", INSTALLED, *arguments],
            **{"capture_output": True, "text": True, "cwd": tmp_path, "env": environment},
        )
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
        files = json.loads(done.stdout.splitlines()[0])
        assert files == [str(site.joinpath(*name.split("."), "__init__.py")) for name in FOLDERS]


def test_what_readme_installs_is_there() -> None:
    (line,) = re.findall(r"^pip install (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    (what,) = shlex.split(line)
    assert what.startswith(".[") and what[2:-1] in PROJECT["project"]["optional-dependencies"]


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
