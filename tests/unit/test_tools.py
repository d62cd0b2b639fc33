"""The tools that count lines and draw mutants."""

import random

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
