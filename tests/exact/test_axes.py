"""Kinds of adapters, optimizers, grouping, recording and residency, each pair of them together.

And programs that once gave other bits than resident without a word: what decides a layer was
recognized by a tensor's version, or left frozen adapters out.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

import poros
from poros.errors import PorosError, RematerializationError
from poros.io.digests import checksum
from tests.exact.arms import Bases
from tests.exact.axes import (
    EXCHANGES,
    Cell,
    Facts,
    Model,
    Program,
    all_cells,
    difference,
    optimizer_of,
    pairwise,
    prepared,
)
from tests.exact.recorded import autocast
from tests.support import same_bits

PLAIN = Cell("LoRA", "AdamW fused", False, False, False, "load", False)


@pytest.fixture(scope="module")
def known() -> dict[Cell, Facts]:
    return {}


def are_unrelated(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    """Whether neither knows of the other.

    An optimizer changes tensors between steps, behind what DoRA and recordings remember of them.
    What is exchanged is frozen tensors: none of LoRA and DoRA, and those of LoRA-FA as a second's.
    """
    values = dict([one, other])
    adapter = values.get("adapter")
    if "optimizer" in values:
        return adapter != "DoRA" and "is_recorded" not in values
    return "exchange" in values and adapter not in (None, "second frozen")


FAST = pairwise(all_cells(), are_unrelated)
REST = [cell for cell in pairwise(all_cells()) if cell not in FAST]


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=cell.name()) for cell in FAST),
        *(pytest.param(cell, id=cell.name(), marks=pytest.mark.slow) for cell in REST),
    ],
)
def test_a_cell_is_exact(cell: Cell, bases: Bases, known: dict[Cell, Facts]) -> None:
    assert difference(cell, bases, "cpu", known) is None


# Programs.

Action = Callable[[Program, int], Any]
SINCE, NUM_STEPS = 5, 7
"""By then visits are replayed: two have run, and one beside the first replay."""


def nothing(program: Program, number: int) -> None:
    pass


def steps(
    before: Action = nothing,
    between: Action = nothing,
    around: Callable[[int], Any] | None = None,
    num_grouped: int = 1,
) -> Callable[[Program], Iterator[Any]]:
    """A training run with actions before each forward, and between it and its backward."""

    def run(program: Program) -> Iterator[Any]:
        torch.manual_seed(5)
        optimizer = optimizer_of("AdamW fused", program.trained())
        generator = torch.Generator().manual_seed(2)
        for number in range(NUM_STEPS):
            yield before(program, number)
            if num_grouped > 1:
                drawn = torch.randint(0, 100, (num_grouped, 2, 12), generator=generator)
                batches = [{"input_ids": each, "labels": each} for each in drawn]
                yield from program.step(batches, together=True)
                yield from [_gradient(each) for each in program.trained()]
                optimizer.step()
                optimizer.zero_grad()
                continue
            tokens = torch.randint(0, 100, (2, 12), generator=generator)
            call = {"input_ids": tokens, "labels": tokens, "use_cache": False}
            loss = program.call(program.model, call).loss
            between(program, number)
            with nullcontext() if around is None else around(number):
                loss.backward()
            yield loss.detach()
            yield from [_gradient(each) for each in program.trained()]
            optimizer.step()
            optimizer.zero_grad()

    return run


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


def others(program: Program) -> Facts:
    """Other values for the frozen tensors."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.2 * torch.randn(each.shape, generator=generator).to(each)
        for name, each in program.frozen()
    }


def exchange(way: str) -> Action:
    def before(program: Program, number: int) -> None:
        if number == SINCE:
            EXCHANGES[way](program.model, others(program))

    return before


def evaluate_with_others(program: Program, number: int) -> torch.Tensor:
    """Without gradients, recorded too."""
    call = {"input_ids": torch.arange(12)[None]}
    with torch.no_grad():
        if number == SINCE:
            logits: Any = torch.func.functional_call(
                program.model, others(program), kwargs=call
            ).logits
        else:
            logits = program.model(**call).logits
    return logits  # type: ignore[no-any-return]


def train_with_others(program: Program, number: int) -> None:
    def call(model: Model, values: dict[str, Any]) -> Any:
        return torch.func.functional_call(model, others(program), kwargs=values)

    program.call = call if number == SINCE else Program.call


def edit(how: Callable[[torch.Tensor], object]) -> Action:
    def between(program: Program, number: int) -> None:
        if number == SINCE:
            with torch.no_grad():
                for _, each in program.frozen():
                    how(each)

    return between


def flip_signs(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] *= -1


def autocast_later(number: int) -> Any:
    """Around backward alone: it runs, though its forward is replayed."""
    return autocast() if number >= SINCE else nullcontext()


EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda each: each.data.mul_(1.5),
    "mul_": lambda each: each.mul_(1.5),
    "mul_ by one": lambda each: each.mul_(1),
    "numpy": flip_signs,
    "other memory": lambda each: setattr(each, "data", each.data * 1.5),
}


class Row(NamedTuple):
    name: str
    adapter: str
    run: Callable[[Program], Iterator[Any]]
    has_to_raise: bool = False
    """Unless graphs are kept, as in a resident run."""


def rows() -> Iterator[Row]:
    yield Row("an eager backward behind a replayed forward", "DoRA", steps(around=autocast_later))
    yield Row("two together", "DoRA", steps(num_grouped=2))
    adapter = "second frozen"
    for way in EXCHANGES:
        yield Row(f"exchanged: {way}", adapter, steps(exchange(way)))
    yield Row("functional_call, no gradients", adapter, steps(evaluate_with_others))
    yield Row("functional_call", adapter, steps(train_with_others), has_to_raise=True)
    for way, how in EDITS.items():
        yield Row(f"edited: {way}", adapter, steps(between=edit(how)), has_to_raise=True)
    adapter = "LoRA-FA"
    yield Row("exchanged: assign", adapter, steps(exchange("assign")))
    for way in ("data", "mul_"):
        yield Row(f"edited: {way}", adapter, steps(between=edit(EDITS[way])), has_to_raise=True)


@pytest.mark.cover("values")
@pytest.mark.parametrize("is_kept", [False, True], ids=["2 slots", "kept"])
@pytest.mark.parametrize("is_recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("row", [pytest.param(x, id=f"{x.adapter}, {x.name}") for x in rows()])
def test_a_program_is_exact_or_refused(
    row: Row, is_recorded: bool, is_kept: bool, bases: Bases, runs: dict[str, Any]
) -> None:
    cell = PLAIN._replace(adapter=row.adapter, is_recorded=is_recorded, is_kept=is_kept)
    key = f"{row.adapter}, {row.name}"
    if key not in runs:
        program = Program(cell, bases, "cpu")
        poros.use_adapter_kernels(program.model)
        runs[key] = ended(row.run(program))
    expected, raised = runs[key]
    model = prepared(program := Program(cell, bases, "cpu"), self_check="off")
    found, error = ended(row.run(program))
    assert all(map(same_bits, found, expected))  # as far as both go
    if error is None:
        assert raised is None and len(found) == len(expected)
    else:
        assert isinstance(error, PorosError) or type(error) is type(raised), error
    if row.has_to_raise and not is_kept:
        assert isinstance(error, RematerializationError), error
    if is_recorded:
        assert poros.runtime(model).stats()["num_replayed_visits"] > 0


def ended(run: Iterator[Any]) -> tuple[list[torch.Tensor], Exception | None]:
    """Copies of what a run gives, and what ended it."""
    found: list[torch.Tensor] = []
    try:
        for each in run:
            found += [] if each is None else [each.clone()]
    except Exception as error:  # of any kind: the test says which are right
        return found, error
    return found, None


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_checksum_tells_what_regular_edits_do(dtype: torch.dtype) -> None:
    """Signs, a single bit, neighbours exchanged, rows in another order."""
    values = (torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    other = torch.ones(3, dtype=torch.bfloat16)
    flipped = values.clone()
    flipped.view(torch.uint8)[0, 0] ^= 1
    swapped = values.clone()
    swapped[0, :2] = values[0, :2].flip(0)
    edited = [-values, values.flip(0), flipped, swapped, values * 2]
    found = {int(checksum([each, other])) for each in (values, *edited)}
    assert len(found) == 1 + len(edited)
    assert int(checksum([values.clone(), other])) in found
