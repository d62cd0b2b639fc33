"""The tools that count lines and draw mutants."""

import random
from pathlib import Path

import pytest

from tools import lines, mutants


@pytest.mark.slow
def test_a_warm_step_passes_through_the_files_that_stream() -> None:
    found = {str(path.relative_to(lines.ROOT)) for path in lines.files_run_by(lines.warm_step())}
    assert found >= {"poros/stream/visit.py", "poros/slots/manager.py", "poros/streams.py"}
    # What belongs to the first step, or to a run that is not there.
    assert not {"poros/api.py", "poros/self_check/check.py", "poros/finetune/run.py"} & found


@pytest.mark.parametrize("core", mutants.CORES)
def test_mutants_are_drawn_from_files_that_exist(core: str) -> None:
    """The same seed draws the same; each is another text than its file written out unchanged."""
    everything = list(mutants.mutants(core))
    drawn = random.Random(1).sample(everything, 20)
    assert drawn == random.Random(1).sample(list(mutants.mutants(core)), 20)
    assert len(everything) > 1000
    for mutant in drawn:
        assert mutants.mutated(mutant) != mutants.mutated(mutant._replace(number=-1))


@pytest.mark.slow
def test_a_group_is_given_up_after_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hangs has been noticed; a file that was changed is put back in any case."""
    (tmp_path / "core.py").write_text("limit = 1\n")
    copy = tmp_path / "copy"
    copy.mkdir()
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (copy / "test_slow.py").write_text("import time\n\ndef test_it():\n    time.sleep(60)\n")
    (copy / "test_it.py").write_text(
        "from core import limit\n\ndef test_it():\n    assert limit == 1\n"
    )
    changed = mutants.Mutant("core.py", 0, 1, "1 to 2")
    assert mutants.failing(copy, changed, ["test_slow.py"], 2.0) == "a test that hangs"
    assert mutants.failing(copy, changed, ["test_it.py"]).startswith("FAILED test_it.py")
    assert mutants.failing(copy, changed._replace(number=-1), ["test_it.py"]) == ""
    assert (copy / "core.py").read_text() == "limit = 1\n"
