"""How many random numbers layers draw, and the random state so many numbers later.

Dropout takes numbers from the generator of the device it runs on, as many as the shape of its input
says. A GPU's generator counts them: its state is a seed and an offset. A CPU's (Mersenne Twister,
Matsumoto and Nishimura 1998) is stepped until it arrives, which finds the count and checks it.
"""

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

import torch

from poros.accumulation.calls import NotGrouped
from poros.stream.rng import RngStash

_PERIOD = 624
"""Numbers that a CPU's generator makes at a time."""
_PLACE = 2
"""Which 64-bit word of its state counts how many of them are used up."""
MOST_DRAWS = 50_000_000
"""Of a CPU's generator, for which one layer is searched."""
_MOST_MISSES = 4
"""Of the plan for one shape, until its micro-batches run one after the other."""


class Draws(NamedTuple):
    """Numbers taken from the generator of the CPU, and the offset by which a GPU's has moved."""

    cpu: int
    device: int


NONE = Draws(0, 0)


def between(before: RngStash, after: RngStash) -> Draws | None:
    """What was drawn from ``before`` on to get to ``after``; None if no count explains it."""
    cpu = _steps(before.cpu, after.cpu)
    device = 0
    if before.device_state is not None and after.device_state is not None:
        start = _counting(before.device_state, before.device)
        end = _counting(after.device_state, after.device)
        if start.initial_seed() != end.initial_seed():
            return None
        device = end.get_offset() - start.get_offset()
    return None if cpu is None or device < 0 else Draws(cpu, device)


def later(state: RngStash, draws: Draws) -> RngStash:
    """The state after so many draws from ``state``. No generator in use is touched."""
    cpu, device_state = state.cpu, state.device_state
    if draws.cpu:
        generator = torch.Generator()
        generator.set_state(cpu)
        _step(generator, draws.cpu)
        cpu = generator.get_state()
    if draws.device and device_state is not None:
        generator = _counting(device_state, state.device)
        generator.set_offset(generator.get_offset() + draws.device)
        device_state = generator.get_state()
    return RngStash(cpu, device_state, state.device)


def _counting(state: torch.Tensor, device: torch.device) -> torch.Generator:
    """A GPU's generator in this state, which says how many numbers it has given."""
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


def _steps(before: torch.Tensor, after: torch.Tensor) -> int | None:
    """How many numbers a CPU's generator has to give to get from one state to the other."""
    if torch.equal(before, after):
        return 0
    generator = torch.Generator()
    generator.set_state(before)
    place, wanted = (int(state.view(torch.int64)[_PLACE]) for state in (before, after))
    num_steps = (wanted - place) % _PERIOD or _PERIOD
    _step(generator, num_steps)
    while not torch.equal(generator.get_state(), after):
        if num_steps > MOST_DRAWS:
            return None
        _step(generator, _PERIOD)
        num_steps += _PERIOD
    return num_steps


def _step(generator: torch.Generator, num_steps: int) -> None:
    # A 32-bit number each.
    torch.empty(num_steps, dtype=torch.int32, device="cpu").random_(generator=generator)


class DrawTable:
    """What layers have drawn so far, by their kind and the shapes they were called with."""

    def __init__(self) -> None:
        self._layers: dict[Hashable, Draws] = {}
        self._tails: dict[Hashable, Draws] = {}
        self._tail_in_layers: tuple[Draws, Draws] | None = None
        """Of the latest shape that was found out: behind the last layer, and in the first."""
        self._misses: Counter[Hashable] = Counter()

    def of_layer(self, kind: Hashable, shape: Hashable) -> Draws | None:
        return self._layers.get((kind, shape))

    def of_tail(self, shape: Hashable, first: Draws) -> Draws:
        """What comes behind the last layer.

        For a shape that is new, nothing; or, if it was anything before, as much in terms of what
        the first layer draws: a pass of a reference model draws with all of its layers.
        """
        known = self._tails.get(shape)
        if known is not None or self._tail_in_layers is None:
            return known or NONE
        tail, layer = self._tail_in_layers
        return Draws(*(b and c * a // b for a, b, c in zip(tail, layer, first, strict=True)))

    def note_layer(self, kind: Hashable, shape: Hashable, draws: Draws | None) -> None:
        self._note(self._layers, (kind, shape), shape, draws)

    def note_tail(self, shape: Hashable, draws: Draws | None, first: Draws) -> None:
        self._note(self._tails, shape, shape, draws)
        if draws is not None:
            self._tail_in_layers = draws, first

    def require_predictable(self, shape: Hashable) -> None:
        if self._misses[shape] >= _MOST_MISSES:
            raise NotGrouped("what is drawn at random does not depend on shapes alone")

    def _note(
        self,
        table: dict[Hashable, Draws],
        place: Hashable,
        shape: Hashable,
        draws: Draws | None,
    ) -> None:
        if place in table or draws is None:
            self._misses[shape] += 1 if draws is not None else _MOST_MISSES
        if draws is not None:
            table[place] = draws
