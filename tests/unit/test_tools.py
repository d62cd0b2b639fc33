"""The tools: they count lines and draw mutants, and the stand-in for copy engines has power.

That the stand-in catches each broken protocol: ``faults/test_missing_waits``.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tools import lines, mutants
from tools.adversary import POISON, AdversarialStreams, SlotHazard
from tools.reached import Map


@pytest.mark.slow
def test_a_warm_step_passes_through_the_files_that_stream() -> None:
    found = {str(path.relative_to(lines.ROOT)) for path in lines.files_run_by(lines.warm_step())}
    assert found >= {"poros/stream/visit.py", "poros/slots/manager.py", "poros/eager_streams.py"}
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


def test_a_map_gives_the_tests_that_ran_a_line(tmp_path: Path) -> None:
    """The quickest first, of all processes; without those that failed."""
    for number, tests in enumerate(
        ([["slow", 2.0, True], ["bad", 0.1, False]], [["quick", 1.0, True]])
    ):
        lines = {"a.py": {"3": "3", "4": "2" if number == 0 else "1"}}
        (tmp_path / f"{number}.json").write_text(json.dumps({"tests": tests, "lines": lines}))
    found = Map(tmp_path)
    assert found.tests("a.py", 3, 3) == ["quick", "slow"] == found.tests("a.py", 1, 0)
    assert found.tests("a.py", 4, 5) == ["quick"] and found.tests("a.py", 5, 9) == []
    assert found.tests("b.py", 1, 0) == []


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "a part": lambda slot: slot[8:16].sum(),
    "in a list": lambda slot: torch.cat([torch.zeros(1, dtype=torch.uint8), slot]),
    "out=": lambda slot: torch.add(torch.zeros(64, dtype=torch.uint8), 1, out=slot),
    "in place": lambda slot: slot.add_(1),
    "as a parameter": lambda slot: torch.nn.functional.linear(
        torch.ones(1, 4, dtype=torch.bfloat16),
        torch.nn.Parameter(slot[:32].view(torch.bfloat16).view(4, 4), requires_grad=False),
    ),
}


@pytest.mark.parametrize("name", READS)
def test_any_operator_that_reads_before_the_wait_is_caught(name: str) -> None:
    """And without a watch it reads poison; what is on the host at the wait is what arrives."""
    streams, read = AdversarialStreams(), READS[name]
    slot = streams.allocate(64)
    source = torch.full((64,), 7, dtype=torch.uint8)
    streams.wait(streams.copy(slot, source, after=streams.record()))
    assert slot.tolist() == [7] * 64
    with streams.watch():
        read(slot)  # waited for: allowed
        done = streams.copy(slot, source, after=streams.record())
        with pytest.raises(SlotHazard, match="read without waiting for copy 2"):
            read(slot)
        assert (slot.numpy() == POISON).all()
        source.fill_(2)
        streams.wait(done)
        assert (slot.numpy() == 2).all()
        read(slot)
