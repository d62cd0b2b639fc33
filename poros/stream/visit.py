"""Visits of a block: its bytes in a slot, its tensors in place, and all of it undone at the end.

``BlockVisit`` is for whatever reads frozen tensors: a layer, and anything else whose tensors stand
in the host store. ``Visits`` knows which one goes on. ``LayerBindings`` exchanges the tensors: only
entries of ``module._parameters``, ``module._buffers`` and bitsandbytes' ``module.quant_state``.
Swapping ``.data`` instead would reach into graphs that saved the parameter, and exchanging tensors
inside one QuantState would pull them out from under a matmul that still refers to it.

Note: Interruptions
    Ctrl-C may strike between any two steps of Python, those of a ``finally`` too. So a visit is
    noted before it changes anything and crossed off after all of it is undone; what is still noted
    when the next visit begins is undone then. Undoing twice is undoing once.

    What is noted may also be a visit that goes on, further up the stack (a hook inside a layer that
    runs another one). It is undone all the same, since its slot may be needed now; it finds out at
    its end and raises, so that nothing it computed is used.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable

from poros.errors import PreparedModelError, SlotStateError
from poros.kernels.nf4 import state_of
from poros.slots.manager import BlockManager
from poros.slots.ring import Slot
from poros.slots.schedule import Phase
from poros.stream.adapters import ProxyLeaf
from poros.stream.marks import Marks
from poros.stream.within import on_plain_tensors
from poros.utils.profiling import is_profiling, labelled


class Binding(NamedTuple):
    """One dictionary entry that is exchanged at each visit of a layer."""

    name: str
    owner: dict[str, Any]
    key: str
    at_rest: Any
    on_device: Any


class LayerBindings:
    """Exchanges the frozen tensors of one layer, and notices if someone else did."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self._bindings = bindings
        self._resting = [
            (binding, binding.at_rest.data_ptr(), binding.at_rest._version)
            for binding in bindings
            if isinstance(binding.at_rest, torch.Tensor)
        ]
        self._states = [
            (binding, _marks_of(binding.at_rest))
            for binding in bindings
            if binding.key == "quant_state"
        ]
        self.dense_weights = _dense_weights(bindings)
        """Its 4-bit weights on the device that have a place to be dense in."""
        self._biases = [
            (each.on_device, each.on_device.detach())
            for each in bindings
            if each.key == "bias" and isinstance(each.on_device, nn.Parameter)
        ]

    def without_device_tensors(self) -> "LayerBindings":
        """The same tensors at rest, with nothing of them on the device."""
        return LayerBindings(
            [binding._replace(on_device=binding.at_rest) for binding in self._bindings]
        )

    def require_owners(self, layer: nn.Module) -> None:
        """Raise ``PreparedModelError`` unless all of them hang in modules of ``layer``."""
        tables = [(module._parameters, module._buffers) for module in layer.modules()]
        owners = set(map(id, chain.from_iterable(tables)))
        for binding, _, _ in self._resting:
            if id(binding.owner) not in owners:
                raise PreparedModelError(
                    f"{binding.name}: expected its module in the model, found it replaced. Call "
                    "poros.restore(model) before replacing modules, then prepare again"
                )

    @property
    def tensor_ids(self) -> set[int]:
        """Ids of the tensors at rest."""
        return {id(binding.at_rest) for binding, *_ in self._resting}

    def require_at_rest(self) -> None:
        """Raise ``PreparedModelError`` if a frozen tensor was changed since it was put to rest."""
        # A 4-bit weight is a tensor subclass, whose attributes take a detour through Python.
        on_plain_tensors(self._require_at_rest)

    def _require_at_rest(self) -> None:
        for binding, pointer, version in self._resting:
            now = binding.owner.get(binding.key)
            if (
                now is not binding.at_rest
                or now.data_ptr() != pointer
                or now._version != version
                or now.requires_grad
            ):
                raise PreparedModelError(
                    f"{binding.name}: expected the frozen tensor that poros.prepare took over, "
                    "found it replaced, cast, written or made trainable. Call "
                    "poros.restore(model) before changing the base (merging, "
                    "prepare_model_for_kbit_training, loading weights), then prepare again"
                )
        for binding, scales in self._states:
            state = binding.owner.get(binding.key)
            if state is not binding.at_rest or scales != _marks_of(state):
                raise PreparedModelError(
                    f"{binding.name}: expected the quantization state that poros.prepare took "
                    "over, found it replaced or written. Call poros.restore(model) before "
                    "changing the base, then prepare again"
                )

    def swap_in(self) -> None:
        """Put the tensors on the device in place."""
        for binding in self._bindings:
            binding.owner[binding.key] = binding.on_device

    def require_device_tensors(self) -> None:
        """Raise ``PreparedModelError`` if the layer's own forward exchanged a frozen tensor."""
        for binding in self._bindings:
            now = binding.owner.get(binding.key)
            # PEFT's DoRA puts an alias of a 4-bit weight in its place on a CPU.
            if now is not binding.on_device and not _is_alias(now, binding.on_device):
                raise PreparedModelError(
                    f"{binding.name}: expected the layer's forward to leave it in place, found it "
                    "replaced (a counter, a running statistic?); the new value would be lost"
                )

    def device_marks(self) -> Marks:
        """What changes if somebody writes to a device tensor, or gives it other memory."""
        tensors = [each.on_device for each in self._bindings]
        found: Marks = on_plain_tensors(
            Marks, [each for each in tensors if isinstance(each, torch.Tensor)]
        )
        return found

    def swap_out(self) -> None:
        """Put the originals back, whatever is in their place."""
        for binding in self._bindings:
            binding.owner[binding.key] = binding.at_rest
        for bias, slot_view in self._biases:
            # bitsandbytes casts a bias to the compute dtype for good, which would leave the tensor
            # with memory of its own: of a recording's, if it is recorded.
            if bias.dtype != slot_view.dtype:
                bias.data = slot_view

    def hide(self) -> None:
        """Take parameters and buffers out of their modules, until ``swap_out``."""
        for binding, *_ in self._resting:
            binding.owner[binding.key] = None


def _dense_weights(bindings: Sequence[Binding]) -> list[torch.Tensor]:
    found = {
        id(state): binding.on_device
        for binding in bindings
        if (state := state_of(binding.on_device)) is not None and hasattr(state, "dense_place")
    }
    return list(found.values())


def _marks_of(state: Any) -> list[int]:
    """What changes if a scale is written or replaced. The nested one is in no slab: it may move."""
    marks = [state.absmax.data_ptr(), state.absmax._version]
    if state.nested:
        marks += [id(state.state2.absmax), state.state2.absmax._version]
    return marks


def _is_alias(now: Any, expected: Any) -> bool:
    return (
        isinstance(now, torch.Tensor)
        and isinstance(expected, torch.Tensor)
        and now.data_ptr() == expected.data_ptr()
        and now.dtype == expected.dtype
        and now.shape == expected.shape
    )


Undo = Callable[[], None]
"""Undoes a visit that has come anywhere, undone or not. Stands for the visit."""


class Visits:
    """The visits of one prepared model: at most one at a time."""

    def __init__(self) -> None:
        self._open: list[Undo] = []

    def end_all(self, but: Undo | None = None) -> None:
        """Undo what an interruption has left behind, unless ``but`` goes on alone."""
        while self._open and self._open != [but]:
            self.end(self._open[-1])

    def end(self, visit: Undo) -> None:
        """Undo one visit, unless that was done; to its end even if it is interrupted."""
        if visit in self._open:
            try:
                visit()
            except KeyboardInterrupt:
                visit()
                self._open.remove(visit)
                raise
            self._open.remove(visit)

    def open(self, undo: Undo) -> None:
        """Begin a visit that whoever asks for it ends; or the next visit that begins does."""
        self._open.append(undo)

    def require_open(self, name: str, visit: Undo) -> None:
        """Raise ``SlotStateError`` if another visit began before this one, of ``name``, ended."""
        if visit not in self._open:
            raise SlotStateError(
                f"{name}: expected one layer to run at a time, found another one that ran "
                "before it had ended (a forward or a backward inside a hook of it?)"
            )

    @contextmanager
    def begin(self, name: str, undo: Undo) -> Iterator[None]:
        """Run the body as a visit of layer ``name``, then undo it. ``end_all`` comes before.

        Raises:
            SlotStateError: If another visit began before this one ended.
        """
        self.open(undo)
        try:
            try:
                yield
                self.require_open(name, undo)
            finally:
                self.end(undo)
        finally:
            # An interruption may strike as the first clean-up begins.
            self.end(undo)


class BlockVisit:
    """Visits of one block by one of its readers, of that qualified ``name``.

    ``when_ready`` is called with the bindings of the reader's tensors once the block is there.
    """

    def __init__(
        self,
        manager: BlockManager,
        visits: Visits,
        block: int,
        name: str,
        bindings: LayerBindings,
        when_ready: Callable[[LayerBindings], None] | None = None,
    ) -> None:
        self.block = block
        self.bindings = bindings
        self._manager = manager
        self._visits = visits
        self._name = name
        self._label = ".".join(name.split(".")[-2:])  # layers.12
        self._is_bound = True
        self._when_ready = when_ready
        self._is_in_row = False
        self._lease: tuple[Undo, torch.Tensor] | None = None
        """The visit that goes on until another one begins, and the block's bytes."""

    @property
    def is_pinned(self) -> bool:
        """Whether the block has a slot of its own, which is never written again."""
        return self._manager.is_pinned(self.block)

    def bind(self, bindings: LayerBindings) -> None:
        """Take other views: the block has moved to another slot."""
        self._is_bound = True
        self.bindings = bindings

    def unbind(self) -> None:
        """Release the slot. Until ``bind`` a visit raises ``PreparedModelError``."""
        self._is_bound = False
        self.bindings = self.bindings.without_device_tensors()

    @contextmanager
    def hold(self, phase: Phase | None, leaves: Sequence[ProxyLeaf] = ()) -> Iterator[torch.Tensor]:
        """Hold the block in its slot, with device tensors and leaves in place; its bytes.

        To be recorded only, no phase: the slot may hold anything.

        Streams:
            The compute stream waits for the block's copy; at the end an event is recorded behind
            which the slot may be overwritten. The host does not wait.

        Raises:
            PreparedModelError: If a frozen tensor was changed at rest, or by the body.
            SlotStateError: If another visit began before this one ended.
        """
        self.require_ready()
        # The bindings of now: a visit that is undone later is undone as it began.
        undo = partial(self._end, self.bindings, leaves)
        with self._visits.begin(self._name, undo):
            slot = self._manager.slot(self.block) if phase is None else self._acquire(phase)
            version = slot.buffer._version
            self.bindings.swap_in()
            for place in leaves:
                place.owner[place.key] = place.leaf
            with labelled("record" if phase is None else phase.value, self._label):
                yield slot.buffer
            self._visits.require_open(self._name, undo)
            self.bindings.require_device_tensors()
            if slot.buffer._version != version:
                raise PreparedModelError(
                    f"{self._name}: expected its frozen tensors to be read only, found one written "
                    "by its own forward (a running statistic?); the write would be lost with the "
                    "slot"
                )

    def lease(self, phase: Phase, at_end: Callable[[], None] | None = None) -> torch.Tensor:
        """Hold the block in its slot until another visit begins, then call ``at_end``; its bytes.

        Within a backward, or a row (``in_a_row``), it ends with that at the latest.

        Streams and errors are those of ``hold``. If the block is leased already, nothing is done.
        """
        if self._lease is not None:
            return self._lease[1]
        self._visits.end_all()
        self._require_bound()
        end, slab = self._begin_lease(phase, at_end)
        if torch._C._current_graph_task_id() >= 0:
            Variable._execution_engine.queue_callback(partial(self._visits.end, end))
        return slab

    def _begin_lease(
        self, phase: Phase, at_end: Callable[[], None] | None = None
    ) -> tuple[Undo, torch.Tensor]:
        end = partial(self._end_lease, at_end)
        self._visits.open(end)
        self._lease = lease = end, self._acquire(phase).buffer
        return lease

    def _end_lease(self, at_end: Callable[[], None] | None) -> None:
        self._lease = None
        if at_end is not None:
            at_end()
        self._release()

    def occupy(self, phase: Phase) -> AbstractContextManager[None]:
        """Hold the block in its slot for work that does not go by the reader's tensors.

        As ``hold`` otherwise. In a row (``in_a_row``) it goes on until the row ends, or until
        another visit begins: the next one of the row finds the block held, and as it was.
        """
        is_held = self._is_in_row and self._lease is not None
        return nullcontext() if is_held and not is_profiling() else self._occupy(phase)

    @contextmanager
    def _occupy(self, phase: Phase) -> Iterator[None]:
        with nullcontext() if self._is_in_row else self.in_a_row():
            lease = self._lease
            if lease is None:
                self.require_ready()
                lease = self._begin_lease(phase)
            with labelled(phase.value, self._label):
                yield
            self._visits.require_open(self._name, lease[0])

    @contextmanager
    def in_a_row(self) -> Iterator[None]:
        """Visits in the body come one behind the other, with nobody's code between them."""
        if self._lease is not None:
            self._visits.end_all()
        self._is_in_row = True
        try:
            yield
        finally:
            self._is_in_row = False
            if self._lease is not None:
                self._visits.end(self._lease[0])

    def end_others(self) -> None:
        """Undo what an interruption has left behind; the visit that a row shares goes on."""
        lease = self._lease if self._is_in_row else None
        self._visits.end_all(None if lease is None else lease[0])

    def _acquire(self, phase: Phase) -> Slot:
        slot = self._manager.acquire(self.block, phase)
        if self._when_ready is not None:
            self._when_ready(self.bindings)
        return slot

    def require_ready(self) -> None:
        """Raise ``PreparedModelError`` if a frozen tensor was changed, or has no place."""
        self._visits.end_all()
        self.bindings.require_at_rest()
        self._require_bound()

    def _require_bound(self) -> None:
        if not self._is_bound:
            raise PreparedModelError(
                f"{self._name}: expected a place on the device for its block, found none: making "
                "room for it failed. Call poros.restore(model)"
            )

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """The reader without its frozen tensors, for what reaches all the others."""
        self._visits.end_all()
        self.bindings.require_at_rest()
        with self._visits.begin(self._name, self.bindings.swap_out):
            self.bindings.hide()
            yield

    def _end(self, bindings: LayerBindings, leaves: Sequence[ProxyLeaf]) -> None:
        for place in leaves:
            if place.owner.get(place.key) is place.leaf:
                place.owner[place.key] = place.parameter
        bindings.swap_out()
        self._release()

    def _release(self) -> None:
        if self._manager.is_held(self.block):
            self._manager.release(self.block)
