"""Questions about positions, on a device that answers none."""

from collections.abc import Callable

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as modes
from transformers.masking_utils import find_packed_sequence_indices

from poros.accumulation.host_values import HostValues

META = torch.device("meta")


def positions() -> torch.Tensor:
    """As models of transformers make them."""
    return (torch.arange(6, device=META) + 0).unsqueeze(0)


def edited() -> torch.Tensor:
    found = positions()
    found[0, 3] = 0
    return found


def edited_uncounted() -> torch.Tensor:
    found = positions()
    found[0].data[3] = 0
    return found


def begin_anew() -> torch.Tensor:
    first, second = torch.arange(2, device=META), torch.arange(4, device=META)
    return torch.cat((first, second)).unsqueeze(0)


def test_whether_rows_are_packed_is_answered() -> None:
    with HostValues():
        assert find_packed_sequence_indices(positions()) is None
        assert find_packed_sequence_indices(positions().expand(3, -1)) is None
        # From 0 to 4, then 2: where it goes down, another row begins.
        assert positions()[:, [0, 1, 2, 3, 4, 2]].tolist() == [[0, 1, 2, 3, 4, 2]]
        apart = find_packed_sequence_indices(positions()[:, [0, 1, 2, 3, 0, 1]])
        assert apart is not None and apart.tolist() == [[0, 0, 0, 0, 1, 1]]
        assert not (positions() == 2).all()
        assert (positions() != 7).all()


@pytest.mark.parametrize(
    "make",
    [
        edited,
        edited_uncounted,
        begin_anew,
        lambda: torch.arange(6.0, device=META),
        lambda: torch.arange(6, device=META)[torch.empty(6, dtype=torch.long, device=META)],
        lambda: torch.randint(9, (1, 6), device=META),
    ],
    ids=[
        "edited",
        "edited through .data",
        "by an operator that is not followed",
        "floats",
        "by indices",
        "random",
    ],
)
def test_control_what_is_not_known_is_asked_of_the_device(
    make: Callable[[], torch.Tensor],
) -> None:
    with HostValues(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        make().tolist()


def test_compiled_code_computes_as_it_does() -> None:
    compiled = torch.compile(
        lambda number: torch.arange(4) + number, backend="eager", fullgraph=True
    )
    with HostValues():
        assert compiled(2).tolist() == [2, 3, 4, 5]


def test_inference_mode() -> None:
    with HostValues(), torch.inference_mode():
        assert torch.arange(3).tolist() == [0, 1, 2]


def test_modes_that_were_entered_since_stay() -> None:
    values, above = HostValues(), HostValues()
    with values:
        above.__enter__()
        values.__exit__()
        assert modes() == [above]
    assert modes() == [above]
    above.__exit__()
    assert modes() == []
