"""Sizes a run on a GPU by the measured memory of its steps.

The peak of a step is read without touching PyTorch's peak statistics, which belong to the user. The
allocator returns memory only when its cache is emptied. So if that is done at the beginning of a
step, the memory that it holds at the end is the peak of the step. If other code has emptied the
cache within the step, the peak is unknown, and the room stays as it is.

Note: Larger batches
    The memory of a batch grows at most as ``growth`` says. If that does not fit the budget, room is
    given up before the batch trains: first layers that keep their graph, then slots, since another
    number of slots moves every block. Its step is then measured, and from then on room is left for
    steps that need half as much again, so that slowly growing lengths do not resize each time.

Note: Micro-batches that go together
    If their step leaves room for most layers to keep their graph, they run one after the other from
    then on, which is measured anew. If a larger batch needs that room, they go together for good.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import nn

from poros.config import MIN_SLOTS, StreamingPolicy, budget_of
from poros.errors import PorosError, VRAMBudgetError
from poros.model.sizing import (
    LEAST_KEPT,
    SURELY_KEPT,
    BlockSizes,
    Estimate,
    Needs,
    ResidencyPlan,
    Shape,
    Sizer,
    Wanted,
    affordable,
    growth,
    is_quicker_alone,
    most_of,
    room_of,
    step_num_bytes,
    with_shape,
)
from poros.utils.formatting import size

if TYPE_CHECKING:
    from poros.planning.formula import MemoryPlan

logger = logging.getLogger(__name__)

RESERVE = 1.5
"""Factor by which a later step may need more, once a batch has not fitted."""
MAX_ROUNDS = 3
"""Rounds of measuring and spending; then the room only shrinks, until a larger batch comes."""
MAX_PUT_OFF = 2
"""Steps in a row that are not measured because visits were recorded in them."""
SPARE_SHARE = 0.02
"""Share of the budget that is left free where room grows: gaps between tensors differ from step to
step, and room that has to shrink again costs seconds at the beginning of a run."""


class StepWatch:
    """Notices that an optimizer has stepped, by some elements of trained parameters.

    Args:
        model: The model, of which the last few trainable parameters are watched. The first step of
            a LoRA changes at least the matrix that starts at zero.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._watched = [(parameter, _sample(parameter)) for parameter in trained[-8:]]

    def has_stepped(self) -> bool:
        """Whether a step has changed the watched elements since the last one that was noticed.

        Also true if a watched parameter is no longer trained. May wait for the device.
        """
        stepped = any(
            not parameter.requires_grad or not torch.equal(_sample(parameter), before)
            for parameter, before in self._watched
        )
        if stepped:
            self._watched = [(parameter, _sample(parameter)) for parameter, _ in self._watched]
        return stepped


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Copy some elements of a parameter; an optimizer's step that changes any changes these."""
    return parameter.detach().reshape(-1)[:64].clone()


class DeviceMemory:
    """Memory that PyTorch's allocator of this process holds on a GPU, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        """Bytes of live tensors, of cached memory and of gaps between tensors."""
        return torch.cuda.memory_reserved(self._device)

    def give_back(self) -> None:
        """Return cached memory to the device."""
        torch.cuda.empty_cache()

    def num_given_back(self) -> int:
        """Number of segments that were returned to the device so far, by any code."""
        return int(torch.cuda.memory_stats(self._device).get("segment.all.freed", 0))

    def free(self) -> int:
        """Bytes that training may still allocate; see ``poros.config.budget_of``."""
        free, whole = torch.cuda.mem_get_info(self._device)
        allowed = int(torch.cuda.memory.get_per_process_memory_fraction(self._device) * whole)
        cached = self.reserved() - self.allocated()
        return budget_of(min(free, allowed - self.reserved()) + cached, whole)


class Stage(Enum):
    """Progress of a run's measurement; the value says how long the stage lasts."""

    WARMING = "until the self-check has passed and the optimizer has stepped"
    MEASURING = "a whole step, from now to the end of an optimizer's step"
    SETTLED = "until a larger batch comes"


class MeasuredSizer(Sizer):
    """Decides on the room of one run, by measurement.

    Args:
        estimate: Estimates the floor (see ``Estimate``).
        held: Returns the bytes on the device that belong to the model, its slots included.
        model: Returns the model; None once it is gone.
        will_record: Returns whether visits are to be recorded and none is yet.

    Attributes:
        graph_num_bytes: Maximum of what the graph of a layer kept, as measured.
    """

    def __init__(
        self,
        policy: StreamingPolicy,
        estimate: Estimate,
        memory: DeviceMemory,
        sizes: BlockSizes,
        held: Callable[[], int],
        model: Callable[[], nn.Module | None],
        will_record: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(policy, estimate)
        self._is_given = self.budget is not None
        """Whether the user set the budget. One that was read from the device refuses nothing."""
        is_fixed = (policy.slots, policy.keep_last) != (None, None)
        self.decides = self._is_given or not is_fixed
        """Nothing is measured where the room is fixed, or where the device had no more of it."""
        self._memory = memory
        self._sizes = sizes
        self._held = held
        self._model = model
        self._will_record = will_record
        self._stage = Stage.WARMING
        self._others_num_bytes = 0
        """Bytes that this process held when the first step began, without the model."""
        self._measured: list[tuple[Shape, Needs]] = []
        """Shapes that were measured, and what a step with the largest of them takes."""
        self._estimated: list[Shape] = []
        """Shapes for which the floor was estimated."""
        self._has_recorded, self._num_put_off = False, 0
        """Whether visits were recorded in the step that is measured, and steps that were not."""
        self._seen: list[Shape] = []
        """Shapes since measuring began."""
        self._reserve = 1.0
        self._rounds = 0
        self._watched: set[int] = set()
        """Layers of which a call was watched since measuring began."""
        self._may_be_alone = self.wanted[:2] == (None, None)
        self._num_given_back = 0
        self._watch: StepWatch | None = None
        self._shape: Shape | None = None
        self._room: ResidencyPlan | None = None
        """The latest batch that was larger than those before it, and the latest room."""
        self._planned: tuple[object, MemoryPlan | None] = (None, None)
        self.graph_num_bytes = 0

    @property
    def plan(self) -> "MemoryPlan | None":
        if self._shape is None or self._room is None:
            return None
        known = (self._shape, self._room, self._conditions, self.replays)
        if self._planned[0] != known:
            try:
                plan = self._estimate(self._shape, None, Wanted(*self._room), False, self.replays)
            except PorosError:
                plan = None  # a kind of adapters that cannot be estimated
            self._planned = (known, plan)
        return self._planned[1]

    def watching_graph(self) -> AbstractContextManager[None] | None:
        """A context that notes what a layer's recomputation keeps; None if it is not wanted now."""
        return self._noting_graph() if self._is_first_round else None

    def watches(self, layer: int) -> bool:
        """Whether the call that comes of a layer is not to be replayed, so that its graph is noted.

        So it is once for each layer, in the first of several measurements alone: graphs in memory
        of their own count beside those in memory of recordings.
        """
        if not self._is_first_round or layer in self._watched:
            return False
        self._watched.add(layer)
        return True

    @property
    def _is_first_round(self) -> bool:
        return self._stage is Stage.MEASURING and self._rounds == 0

    @contextmanager
    def _noting_graph(self) -> Iterator[None]:
        before = self._memory.allocated()
        yield
        self.graph_num_bytes = max(self.graph_num_bytes, self._memory.allocated() - before)

    def begin(
        self, shape: Shape, room: ResidencyPlan, is_checking: bool, adapters: object
    ) -> ResidencyPlan:
        model = self._model()
        if model is None:
            return room
        if self._watch is None:
            self._conditions = adapters
            self._others_num_bytes = max(0, self._memory.allocated() - self._held())
            if self.budget is None:
                self.budget = self._memory.free() + self._held()
            self._watch = StepWatch(model)
        if adapters != self._conditions:
            self._conditions = adapters
            self._restart(model)
        if self._stage is not Stage.SETTLED and not is_checking and self._watch.has_stepped():
            if self._stage is Stage.WARMING:
                self._measure(Stage.MEASURING)
                self._give_back()
            elif self._has_recorded and self._num_put_off < MAX_PUT_OFF:
                # Recordings were compared with visits that ran beside them: the next one is.
                self._num_put_off += 1
                self._has_recorded, self._seen = False, []
                self._give_back()
            elif self._memory.num_given_back() == self._num_given_back:
                room = self._spend(room)
            else:
                self._cannot_measure()
        room = self._provide(shape, room, is_checking)
        self._seen = with_shape(self._seen, shape)
        if self._shape is None or not shape.is_within(self._shape):
            self._shape = shape
        self._room = room
        return room

    def made_room(self) -> None:
        # What the old slots had would be counted with the next step.
        self._give_back()

    def recorded(self) -> None:
        if self._stage is not Stage.WARMING and self.decides:
            self._stage, self._seen, self._has_recorded = Stage.MEASURING, [], True
        self._num_given_back = self._memory.num_given_back()

    def refused(self, where: str, error: torch.OutOfMemoryError) -> Exception | None:
        if self._is_given:
            return super().refused(where, error)
        self.decides = False
        self._go_together()
        logger.warning("poros: continuing with %d slots: %s", MIN_SLOTS, self.explain(where, error))
        return None

    def _cannot_measure(self) -> None:
        """Keep the room as it is, because the allocator's cache was emptied within the step."""
        self._stage = Stage.SETTLED
        logger.warning(
            "poros: PyTorch returned cached memory to the device within a step "
            "(torch.cuda.empty_cache, TrainingArguments(torch_empty_cache_steps=...), or a lack of "
            "memory), so the memory of a step cannot be measured; the number of blocks on the "
            "device stays as it is. Set it yourself by slots= and keep_last="
        )

    def _restart(self, model: nn.Module) -> None:
        """Measure anew, because other adapters are trained from now on."""
        self._measured.clear()
        self._estimated.clear()
        self.is_quicker_alone = False
        self._watch = StepWatch(model)
        self._measure(Stage.WARMING)

    def _measure(self, stage: Stage) -> None:
        self._stage, self._rounds, self._seen = stage, 0, []
        self._has_recorded, self._num_put_off = False, 0
        self._watched.clear()
        if self._watch is not None:
            self._watch.has_stepped()  # steps up to here are not the one that is measured
        self._num_given_back = self._memory.num_given_back()

    def _give_back(self) -> None:
        self._memory.give_back()
        self._num_given_back = self._memory.num_given_back()

    def _provide(self, shape: Shape, room: ResidencyPlan, is_checking: bool) -> ResidencyPlan:
        """Return the room for a batch that may be larger than any before."""
        if any(shape.is_within(known) for known, _ in self._measured):
            return room
        if not self._measured:
            if any(map(shape.is_within, self._estimated)):
                return room
            return self._floor(shape, is_checking)
        needs = min(
            (needs.scaled(growth(shape, known)) for known, needs in self._measured),
            key=lambda scaled: scaled.transient,
        )
        if step_num_bytes(room, self._sizes, needs) <= (self.budget or 0):
            if self._stage is Stage.SETTLED:
                self._measure(Stage.MEASURING)
            return room
        self._reserve = RESERVE
        self._measure(Stage.MEASURING)
        smaller = self._affordable(needs, room) or self._floor(shape, is_checking)
        logger.info(
            "poros: %d x %d tokens, %d micro-batches together, are more than any before; now %s",
            *shape,
            _words(smaller),
        )
        return smaller

    def _affordable(
        self, needs: Needs, room: ResidencyPlan, spare_share: float = 0.0
    ) -> ResidencyPlan | None:
        """Return the most room that fits, with a share of the budget left over."""
        budget = self.budget or 0
        budget -= int(spare_share * budget)
        return affordable(budget, self._sizes, needs, self.wanted, room.offload_inputs)

    def _least(self, offload: bool) -> ResidencyPlan:
        return ResidencyPlan(
            self.wanted.num_slots or MIN_SLOTS, self.wanted.keep_last or 0, offload
        )

    def _floor(self, shape: Shape, is_checking: bool) -> ResidencyPlan:
        """Return the least room, with inputs on the host if the estimate needs that.

        Raises:
            VRAMBudgetError: If a given budget is below it.
        """
        least = self._least(bool(self.wanted.offload_inputs))
        wanted = Wanted(least.num_slots, least.keep_last, self.wanted.offload_inputs)
        try:
            least = room_of(self.estimated(shape, wanted, is_checking))
        except PorosError as error:
            if self._is_given and isinstance(error, VRAMBudgetError):
                raise
            logger.warning(
                "poros: the memory of a step could not be estimated for a budget of %s; continuing "
                "with the fewest blocks on the device (%s: %s)",
                size(self.budget or 0),
                type(error).__name__,
                error,
            )
        self._estimated = with_shape(self._estimated, shape)
        return least

    def _spend(self, room: ResidencyPlan) -> ResidencyPlan:
        """Return the room for steps like the measured one, which ran in ``room``."""
        if not self._seen or (self.is_quicker_alone and _are_together(self._seen)):
            # Its only pass has recorded visits, or it had begun when that was decided.
            self._give_back()
            self._measure(Stage.MEASURING)
            return room
        step = self._memory.reserved() - self._others_num_bytes + self._recordings_to_come()
        slots = self._sizes.num_bytes(room)
        persistent = max(0, self._memory.allocated() - self._others_num_bytes - slots)
        needs = self._attributed(room, persistent, max(0, step - slots - persistent))
        seen = self._seen
        older = [entry for entry in self._measured if not any(map(entry[0].is_within, seen))]
        self._measured = [*older, *((shape, needs) for shape in seen)]
        self._rounds, self._num_put_off = self._rounds + 1, 0
        if self._turns_alone(needs, room):
            self._measured.clear()
            self._measure(Stage.MEASURING)
            return room
        # Whatever batch comes next has to fit, and will not be measured again.
        chosen = self._next(room, most_of(needs for _, needs in self._measured), step)
        if self.is_quicker_alone and not self._keeps_most(chosen):
            self._go_together()
        self._stage = Stage.SETTLED if chosen == room else Stage.MEASURING
        self._seen = []
        if chosen != room or self._rounds == 1:
            logger.info(
                "poros: a step took %s of a budget of %s; from now on %s",
                size(step),
                size(self.budget or 0),
                _words(chosen),
            )
        return chosen

    def _turns_alone(self, needs: Needs, room: ResidencyPlan) -> bool:
        """Whether micro-batches, together so far, go one after the other from now on."""
        if self.is_quicker_alone or not (self._may_be_alone and _are_together(self._seen)):
            return False
        # Inputs and waiting tensors of several are more than those of one.
        of_one = needs._replace(graph=self.graph_num_bytes).scaled(self._reserve)
        most = self._affordable(of_one, room)
        self.is_quicker_alone = most is not None and self._keeps_most(most, SURELY_KEPT)
        return self.is_quicker_alone

    def _keeps_most(self, room: ResidencyPlan, share: float = LEAST_KEPT) -> bool:
        return is_quicker_alone(room, len(self._sizes.layouts), self._sizes.num_layers, share)

    def _go_together(self) -> None:
        """Group micro-batches for the rest of the run, whatever room there is."""
        self.is_quicker_alone = self._may_be_alone = False

    def _recordings_to_come(self) -> int:
        if not self._will_record():
            return 0
        plan = self.plan
        return 2 * self.graph_num_bytes if plan is None else plan.terms["recordings"]

    def _attributed(self, room: ResidencyPlan, persistent: int, rest: int) -> Needs:
        """Divide ``rest`` bytes of a step between the graphs of kept layers and everything else."""
        together = max((shape.micro_batches for shape in self._seen), default=1)
        graph = self.graph_num_bytes * together
        num_kept = min(room.keep_last, self._sizes.num_layers)
        before = [
            needs
            for shape, needs in self._measured
            if all(seen.is_within(shape) for seen in self._seen)
        ]
        if not num_kept or not before:
            return Needs(persistent, max(0, rest - num_kept * graph), graph)
        # What is between the graphs of kept layers counts as theirs.
        transient = before[-1].transient
        return Needs(persistent, transient, max(graph, -(-(rest - transient) // num_kept)))

    def _next(self, room: ResidencyPlan, needs: Needs, step: int) -> ResidencyPlan:
        """The room after one in which a step took ``step`` bytes."""
        if step > (self.budget or 0):
            return self._affordable(needs, room) or self._beyond(room, step)
        larger = self._affordable(needs.scaled(self._reserve), room, SPARE_SHARE)
        if larger is None or self._rounds > MAX_ROUNDS or larger[:2] <= room[:2]:
            return room  # it fits, and there is nothing to gain
        return larger

    def _beyond(self, room: ResidencyPlan, step: int) -> ResidencyPlan:
        """Return the least room, though it does not fit the budget."""
        least = self._least(self.wanted.offload_inputs is not False)
        if room == least:
            logger.warning(
                "poros: a step takes %s with the fewest blocks on the device, more than the budget "
                "of %s; use a smaller batch or shorter sequences",
                size(step),
                size(self.budget or 0),
            )
        return least


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU; None of a device that has no allocator to ask."""
    return DeviceMemory(device) if device.type == "cuda" else None


def _are_together(shapes: Iterable[Shape]) -> bool:
    return any(shape.micro_batches > 1 for shape in shapes)


def _words(room: ResidencyPlan) -> str:
    inputs = ", inputs of layers in host memory" if room.offload_inputs else ""
    kept = f", {room.keep_last} layers are not recomputed" if room.keep_last else ""
    return f"{room.num_slots} blocks on the device at a time{kept}{inputs}"
