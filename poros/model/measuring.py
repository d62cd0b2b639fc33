"""Sizes a run on a GPU: the estimate of a step, corrected by the measured memory of whole steps.

The peak of a step is read without touching PyTorch's peak statistics, which belong to the user. The
allocator returns memory only when its cache is emptied. So if that is done at the beginning of a
step, the memory that it holds at the end is the peak of the step. If other code has emptied the
cache within the step, the peak is unknown, and the room stays as it is.

Note: One correction
    The first step that is measured runs in the least room. What it takes beyond its estimate
    (fragments, another optimizer's state; less, if that is smaller) is taken off the budget, and
    the rest, but for a fiftieth, is spent by the estimate. The next step is measured in that room:
    gaps between tensors are others there, and what is left is spent too. The room only shrinks from
    then on: if a measured step takes more than the budget, the correction grows. A batch with more
    tokens is measured, and begins this anew.

Note: Larger batches
    Room for a batch that is larger than any before is made before it trains, by its own estimate.
    What steps take beyond theirs grows with the tokens. If the batch needs room, that of batches
    half as long again is given up with it, so that slowly growing lengths do not resize each time.

Note: Micro-batches that go together
    If one at a time is estimated to leave room for most layers to keep their graph, they run one
    after the other. If that room is not left, they go together for good.
"""

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from functools import reduce
from typing import Any

import torch
from torch import nn

from poros.config import MIN_SLOTS, StreamingPolicy
from poros.errors import PorosError, VRAMBudgetError
from poros.head.host_matrix import HostMatrix
from poros.model.sizing import (
    LEAST_KEPT,
    SURELY_KEPT,
    Estimate,
    ResidencyPlan,
    Shape,
    Sizer,
    Wanted,
    keeps_most,
    room_of,
    share_kept,
    with_shape,
)
from poros.stream.frozen import SmallTensors
from poros.utils.devices import free_budget
from poros.utils.formatting import counted, size

logger = logging.getLogger(__name__)

_GRAD: Any = torch._C.TensorBase.grad
RESERVE = 1.5
"""Factor of the length for which room is given up, once a batch has not fitted."""
MAX_ROUNDS = 2
"""Measured steps after which the room may grow."""
MAX_PUT_OFF = 4
"""Steps in a row that are not measured because visits were recorded in them."""
SPARE_SHARE = 0.02
"""Share of the budget that is left free where room is bought: gaps between tensors differ from step
to step, and room that has to shrink again costs seconds at the beginning of a run."""


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
        """Bytes that training may still allocate."""
        return free_budget(self._device)


class Stage(Enum):
    """Progress of a run's measurement; the value says how long the stage lasts."""

    WARMING = "until the self-check has passed and the optimizer has stepped"
    MEASURING = "a whole step, from now to the end of an optimizer's step"
    SETTLED = "until a larger batch comes"


class MeasuredSizer(Sizer):
    """Decides on the room of one run, by estimates and measurement.

    Args:
        estimate: See ``Estimate``.
        held: Returns the bytes on the device that belong to the model, its slots included.
        model: Returns the model; None once it is gone.
        terms_to_come: Returns the terms of an estimate for what is not there yet.
    """

    def __init__(
        self,
        policy: StreamingPolicy,
        estimate: Estimate,
        memory: DeviceMemory,
        held: Callable[[], int],
        model: Callable[[], nn.Module | None],
        terms_to_come: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        super().__init__(policy, estimate)
        self._is_given = self.budget is not None
        """Whether the user set the budget. One that was read from the device refuses nothing."""
        is_fixed = (policy.slots, policy.keep_last) != (None, None)
        self.decides = self._is_given or not is_fixed
        """False where the room is fixed, cannot be estimated, or the device had no more of it."""
        self._memory = memory
        self._held = held
        self._model = model
        self._terms_to_come = terms_to_come
        self._others_num_bytes = 0
        """Bytes that this process held when the first step began, without the model."""
        self._beyond: int | None = None
        """Bytes that a step takes beyond its estimate; None until one was measured."""
        self._num_tokens = 0
        """Tokens of the largest batch in that step."""
        self._measured: list[Shape] = []
        """Shapes of the steps that were measured."""
        self._stage = Stage.WARMING
        self._seen: list[Shape] = []
        """Shapes since measuring began."""
        self._has_recorded, self._num_put_off = False, 0
        """Whether visits were recorded in the step that is measured, and steps that were not."""
        self._num_given_back = 0
        self._watch: StepWatch | None = None
        self._may_be_alone = False
        self._num_together = 1
        """Micro-batches that would go together if they were not quicker alone."""
        self._kept_together = 0.0
        """The share of the layers that would keep their graph then."""
        self._num_asked = 0
        """Tokens of the largest micro-batches together of which it was asked whether they are."""
        self._rounds = 0
        """Of measuring and spending."""

    def begin(
        self, shape: Shape, room: ResidencyPlan, is_checking: bool, adapters: object
    ) -> ResidencyPlan:
        model = self._model()
        if model is None:
            return room
        if self._watch is None or adapters != self._conditions:
            self._start(model, adapters)
        elif self._stage is not Stage.SETTLED and not is_checking and self._watch.has_stepped():
            room = self._end_step(room)
        self._num_together = max(self._num_together, shape.micro_batches)
        if shape.micro_batches > 1 and self._may_be_alone and shape.num_tokens > self._num_asked:
            self._num_asked = shape.num_tokens
            self.is_quicker_alone = self._could_be_alone(shape)
            if self.is_quicker_alone:  # a room for single ones is to be found
                self._may_be_alone, self._num_tokens, self._measured = False, 0, []
        if not any(map(shape.is_within, self._shapes)):
            room = self._provide(shape, room, is_checking)
        if self._stage is Stage.SETTLED and not any(map(shape.is_within, self._measured)):
            self._measure()  # the room was made for it, by an estimate
        self._seen = with_shape(self._seen, shape)
        self._note(shape, room)
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
        self.decides = self.is_quicker_alone = False
        logger.warning("poros: continuing with %d slots: %s", MIN_SLOTS, self.explain(where, error))
        return None

    def _start(self, model: nn.Module, adapters: object) -> None:
        """Begin with these adapters: nothing of a step is known yet."""
        if self._watch is None:
            self._others_num_bytes = max(0, self._memory.allocated() - self._held())
            if self.budget is None:
                self.budget = self._memory.free() + self._held()
        self._conditions, self._watch = adapters, StepWatch(model)
        self._shapes, self._measured, self._num_tokens = [], [], 0
        self._beyond, self._rounds = None, 0
        self._may_be_alone, self._num_asked = self.wanted[:2] == (None, None), 0
        self.is_quicker_alone = False
        self._stage = Stage.WARMING

    def _measure(self) -> None:
        """Measure what takes place from now on."""
        self._stage, self._seen = Stage.MEASURING, []
        self._has_recorded = False
        if self._watch is not None:
            self._watch.has_stepped()  # steps up to here are not the one that is measured
        self._give_back()
        # Some of what was held besides may have gone.
        besides = max(0, self._memory.allocated() - self._held())
        self._others_num_bytes = min(self._others_num_bytes, besides)

    def _give_back(self) -> None:
        self._memory.give_back()
        self._num_given_back = self._memory.num_given_back()

    def _end_step(self, room: ResidencyPlan) -> ResidencyPlan:
        """Return the room after an optimizer's step."""
        if self._stage is Stage.WARMING:
            self._num_put_off = 0
            self._measure()
        elif not self._seen or (self._has_recorded and self._num_put_off < MAX_PUT_OFF):
            # Recordings were compared with visits that ran beside them: the next step is measured.
            self._num_put_off += 1
            self._measure()
        elif self._memory.num_given_back() == self._num_given_back:
            self._num_put_off = 0
            return self._spend(room)
        else:
            self._stage = Stage.SETTLED
            self._measured = reduce(with_shape, self._seen, self._measured)  # as far as may be
            logger.warning(
                "poros: PyTorch returned cached memory to the device within a step "
                "(torch.cuda.empty_cache, TrainingArguments(torch_empty_cache_steps=...), or a "
                "lack of memory), so the memory of a step cannot be measured; the number of blocks "
                "on the device stays as it is. Set it yourself by slots= and keep_last="
            )
        return room

    def _spend(self, room: ResidencyPlan) -> ResidencyPlan:
        """Return the room for steps like the measured one, which ran in ``room``."""
        budget = self.budget or 0
        step = self._memory.reserved() - self._others_num_bytes
        chosen = room
        num_tokens = max(shape.num_tokens for shape in self._seen)
        if num_tokens > self._num_tokens:
            self._rounds = 0  # what it takes beyond its estimate says more
        self._measured = reduce(with_shape, self._seen, self._measured)
        self._rounds += 1
        is_latest = self._rounds <= MAX_ROUNDS and num_tokens >= self._num_tokens
        if step > budget or is_latest:
            beyond = step - self._estimated_in(room)
            self._beyond = beyond if is_latest else max(self._beyond or 0, beyond)
            self._num_tokens = max(num_tokens, self._num_tokens)
            if self.is_quicker_alone:
                self._shapes = [shape._replace(micro_batches=1) for shape in self._shapes]
            most = self._most(self._shapes)
            if step > budget:
                chosen = most or self._least_beyond(room, step)
            elif most is not None and most[:2] > room[:2]:
                chosen = most
        if chosen != room or self._rounds == 1:
            logger.info(
                "poros: a step took %s of a budget of %s; from now on %s",
                size(step),
                size(budget),
                _words(chosen),
            )
        self._measure()
        if chosen == room:
            self._stage = Stage.SETTLED
        return chosen

    def _estimated_in(self, room: ResidencyPlan) -> int:
        """Return the estimate of the step that was measured in ``room``, as it ran."""
        found = 0
        for shape in self._seen:
            plan = self._estimate(shape, None, Wanted(*room), False, self.replays)
            unused = (*self._terms_to_come(), *([] if self.shares_dense else ["dense layer"]))
            found = max(found, plan.total_num_bytes - sum(plan.terms[term] for term in unused))
        return found

    def _left(self, shape: Shape) -> int:
        """Return the part of the budget that the estimate for a batch may have."""
        beyond = self._beyond or 0
        if beyond > 0:
            beyond = int(beyond * max(1.0, shape.num_tokens / max(1, self._num_tokens)))
        return max(1, int((self.budget or 0) * (1 - SPARE_SHARE)) - beyond)

    def _most(self, shapes: Sequence[Shape]) -> ResidencyPlan | None:
        """Return the most room in which all of these fit; None if they do not fit in any."""
        try:
            plans = [self.estimated(each, self.wanted, False, self._left(each)) for each in shapes]
        except VRAMBudgetError:
            return None
        others = self._num_together, self._kept_together
        if not all(keeps_most(plan, LEAST_KEPT, *others) for plan in plans):
            self.is_quicker_alone = False
        self.replays = all(plan.replays for plan in plans)
        self.shares_dense = all(plan.shares_dense or plan.micro_batches == 1 for plan in plans)
        return reduce(ResidencyPlan.within, map(room_of, plans))

    def _provide(self, shape: Shape, room: ResidencyPlan, is_checking: bool) -> ResidencyPlan:
        """Return the room for a batch that is larger than any before."""
        if self._beyond is None:
            room = self._floor(shape, is_checking)
            self._shapes = with_shape(self._shapes, shape)
            return room
        self._measure()
        longer = shape._replace(seq_len=int(RESERVE * shape.seq_len))
        try:
            self.estimated(shape, Wanted(*room), False, self._left(shape))
            self._shapes = with_shape(self._shapes, shape)
            return room
        except VRAMBudgetError:
            shapes = with_shape(self._shapes, longer)
            smaller = self._most(shapes)
        if smaller is None:
            shapes = with_shape(self._shapes, shape)
            smaller = self._most(shapes) or self._floor(shape, is_checking)
        self._shapes = shapes
        logger.info(
            "poros: %d x %d tokens, %d micro-batches together, are more than any before; now %s",
            *shape,
            _words(smaller),
        )
        return smaller.within(room)

    def _floor(self, shape: Shape, is_checking: bool) -> ResidencyPlan:
        """Return the least room, with inputs on the host if the estimate needs that.

        Raises:
            VRAMBudgetError: If a given budget is below it.
        """
        least = self._least(bool(self.wanted.offload_inputs))
        wanted = Wanted(least.num_slots, least.keep_last, self.wanted.offload_inputs)
        try:
            return room_of(self.estimated(shape, wanted, is_checking))
        except PorosError as error:
            is_refused = isinstance(error, VRAMBudgetError)
            if self._is_given and is_refused:
                raise
            self.decides = is_refused
            logger.warning(
                "poros: the memory of a step could not be estimated for a budget of %s; continuing "
                "with the fewest blocks on the device; slots= and keep_last= set others (%s: %s)",
                size(self.budget or 0),
                type(error).__name__,
                error,
            )
        return least

    def _least(self, offload: bool) -> ResidencyPlan:
        return ResidencyPlan(
            self.wanted.num_slots or MIN_SLOTS, self.wanted.keep_last or 0, offload
        )

    def _least_beyond(self, room: ResidencyPlan, step: int) -> ResidencyPlan:
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

    def _could_be_alone(self, shape: Shape) -> bool:
        """Whether most layers would keep their graph, by an estimate, if each went by itself."""
        alone = shape._replace(micro_batches=1)
        try:
            plan, together = (
                self._estimate(each, self.budget, self.wanted, False, True)
                for each in (alone, shape)
            )
        except PorosError:
            return False
        self._kept_together = share_kept(together)
        return keeps_most(plan, SURELY_KEPT, self._num_together, self._kept_together)


def held_num_bytes(model: nn.Module, device: torch.device, small: SmallTensors) -> int:
    """Count the device bytes of a model's tensors and gradients, except those in ``small``."""
    tensors = [*model.parameters(), *model.buffers()]
    # Read past the property, which code may watch.
    gradients = map(_GRAD.__get__, model.parameters())
    tensors += [gradient for gradient in gradients if gradient is not None]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device == device
        and not isinstance(tensor, HostMatrix)
        and not small.holds(tensor)
    }
    return sum(storages.values())


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU; None of a device that has no allocator to ask."""
    return DeviceMemory(device) if device.type == "cuda" else None


def _words(room: ResidencyPlan) -> str:
    inputs = ", inputs of layers in host memory" if room.offload_inputs else ""
    kept = f", {counted(room.keep_last, 'layer')} not recomputed" if room.keep_last else ""
    return f"{room.num_slots} blocks on the device at a time{kept}{inputs}"
