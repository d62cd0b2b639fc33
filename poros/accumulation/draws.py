"""How many random numbers micro-batches draw, and the random state so many numbers later.

Dropout takes numbers from the generator of the device it runs on, as many as the shape of its input
says. A GPU's generator counts them: its state is a seed and an offset. A CPU's (Mersenne Twister,
Matsumoto and Nishimura 1998) is stepped until it arrives, which finds the count and checks it.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from poros.stream.condition import Condition
from poros.stream.rng import RngStash

_PERIOD = 624
"""Numbers that a CPU's generator makes at a time."""
_PLACE = 2
"""Which 64-bit word of its state counts how many of them are used up."""
MOST_DRAWS = 50_000_000
"""Of a CPU's generator, for which one layer is searched."""
UNPREDICTABLE = "what is drawn at random does not depend on shapes alone"
_MOST_MISSES = 2
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
    old, new = before.device_state, after.device_state
    if old is not None and new is not None and not torch.equal(old, new):
        start, end = _counting(old, before.device), _counting(new, after.device)
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


class Drawn(NamedTuple):
    """What one micro-batch has drawn, by what was drawn in its first layer."""

    first: Draws
    layers: Draws
    """In all layers, and between them."""
    tail: Draws
    """Behind them."""

    @classmethod
    def of(cls, states: Sequence[RngStash]) -> "Drawn | None":
        """What was drawn between these; None if no count explains it."""
        before, behind_first, behind, end = states
        first, layers = between(before, behind_first), between(before, behind)
        tail = between(behind, end)
        return None if first is None or layers is None or tail is None else cls(first, layers, tail)

    def multiples(self) -> tuple[int | None, ...]:
        """How many times as much as in the first layer; None where that is no whole number."""
        pairs = [
            (part, one) for draws in self[1:] for part, one in zip(draws, self[0], strict=True)
        ]
        return tuple(
            0 if not part else None if not one or part % one else part // one for part, one in pairs
        )


class DrawTable:
    """What micro-batches have drawn so far, by the shapes that layers were called with."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Drawn] = {}
        self._multiples: dict[bool, tuple[int | None, ...]] = {}
        """Of what was drawn in the first layer, if anything was: as a forward draws the same in
        each layer, and one of a reference model behind it once more. None if it was not always."""
        self._misses: Counter[Hashable] = Counter()
        self._layers: object = None

    def begin(self, now: Condition) -> None:
        """Forget what was drawn if layers have another dropout, say, in their condition ``now``."""
        layers = id(now.contents), now.adapter_state, now.training, now.attributes.values
        if self._layers not in (None, layers):
            self._known.clear()
            self._multiples.clear()
        self._layers = layers

    def plan(self, shape: Hashable, first: Draws) -> Drawn | None:
        """What a micro-batch of this shape will have drawn, by its first layer, if it is known."""
        known = self._known.get(shape)
        if known is not None and known.first == first:
            return known
        times = self._multiples.get(first != NONE, (None,))
        if None in times:
            return None
        layers, tail = (
            Draws(*(number * one for number, one in zip(part, first, strict=True)))  # type: ignore[operator]
            for part in (times[:2], times[2:])
        )
        return Drawn(first, layers, tail)

    def note(self, shape: Hashable, drawn: Drawn) -> None:
        """Know what a micro-batch has drawn."""
        known = self._known.get(shape)
        self._misses[shape] += known is not None and known != drawn
        self._known[shape] = drawn
        draws, times = drawn.first != NONE, drawn.multiples()
        if self._multiples.setdefault(draws, times) != times:
            self._multiples[draws] = (None,)

    def forget(self, shape: Hashable) -> None:
        """A plan was wrong: micro-batches of this shape run alone until they are known anew."""
        self._misses[shape] += 1
        self._known.pop(shape, None)
        self._multiples.clear()

    def is_predictable(self, shape: Hashable) -> bool:
        """Whether plans for this shape were hardly ever wrong."""
        return self._misses[shape] < _MOST_MISSES
