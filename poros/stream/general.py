"""A layer whose graph stays, without the tensors in it: backward recomputes them.

The forward of a layer runs as it would in a resident model, in the same autograd graph. Only what
the operators of the layer save for their backward is left away, as in non-reentrant activation
checkpointing (Chen et al. 2016; ``torch.utils.checkpoint``). As backward reaches the layer's
result, or asks for a saved tensor before, the layer is recomputed: its block is brought back,
random states, autocast, training flags and the settings that pick kernels are those of the forward,
and what the operators save the second time is handed to the first graph, in the same order. So the
order of gradients, their sums, shared casts, hooks and side channels are autograd's own.

A saved tensor that lies in a slot is kept as the block and the view of the slot. Whoever asks for
it has the block acquired first, so that an operator may run whenever autograd wants it to.

Nothing is stopped early: hooks on modules inside a layer run twice per step, once in the forward
and once in the recomputation, and the random states behind both are compared. Where there are such
hooks, the random states are Python's and NumPy's too, and so are sums over the saved tensors: what
a hook draws from a generator of its own is noticed.
"""

import gc
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves, tree_map_only

from poros.errors import RematerializationError, UnsupportedModelError
from poros.io.digests import sums_of_bits
from poros.kernels.adapters import note_last, recomputing
from poros.kernels.autocast import cached_cast, require_current
from poros.kernels.lazy_tensor import forget, values_of
from poros.kernels.nodes import weakly
from poros.slots.schedule import Phase
from poros.stream.adapters import ProxyLeaf
from poros.stream.args import as_result, copied
from poros.stream.body import Call, LayerBody
from poros.stream.condition import Condition
from poros.stream.marks import Marks, version_of
from poros.stream.within import SavedTensorHooks, without_collector


class _Saved:
    """Stands in the graph for the saved tensor of this number; whether that is edited since."""

    __slots__ = ("__weakref__", "number", "version", "witness")

    def __init__(self, number: int, tensor: torch.Tensor, is_watched: bool) -> None:
        self.number = number
        self.version = version_of(tensor) if is_watched else 0
        self.witness = _witness(tensor) if is_watched else None

    def is_edited(self) -> bool:
        return self.witness is not None and self.witness._version != self.version


class _InSlot(NamedTuple):
    """Stands in the graph for a saved tensor that lies in a slot, wherever that is by then."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_InSlot":
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def within(self, slab: torch.Tensor) -> torch.Tensor:
        return slab.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class RecomputedCall(Call):
    """One call of one layer, from its forward until its graph is gone.

    ``leaves`` are to be there instead of parameters.

    Raises:
        UnsupportedModelError: Within saved-tensor hooks of the caller, which would have nothing to
            keep.
    """

    def __init__(
        self, layer: LayerBody, condition: Condition, leaves: Sequence[ProxyLeaf] = ()
    ) -> None:
        if _are_hooks_of_others():
            raise UnsupportedModelError(
                f"{layer.name}: expected no saved-tensor hooks around the forward of a prepared "
                "model, found some (save_on_cpu, activation_offloading, checkpointing of what "
                "holds the layers?). Its layers are recomputed, so nothing of them is kept; leave "
                "the hooks away. offload_boundaries=True has inputs of layers wait on the host"
            )
        super().__init__(layer, condition)
        self._leaves = leaves
        self._is_watched = condition.has_hooks
        self._sums: list[torch.Tensor] = []
        self._saved: list[ref[_Saved]] = []
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._task: int | None = None
        self._marks: Marks = condition.marks
        self._values: dict[int, tuple[torch.Tensor, int]] = {}

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The layer's result, in the caller's graph. Kept are copies of mutable arguments.

        Streams:
            As ``LayerBody.visit``.

        Raises:
            RematerializationError: If the layer edits its arguments or its adapters in place.
            UnsupportedModelError: If an argument may be written to by the side.
        """
        layer, contents = self.layer, self.condition.contents
        self._args = tuple(
            copied(value, f"argument {index} of {layer.name}") for index, value in enumerate(args)
        )
        self._kwargs = {
            key: copied(value, f"argument {key!r} of {layer.name}") for key, value in kwargs.items()
        }
        self._num_tokens = _num_tokens(args) if self._is_watched else 0
        self._offloaded = layer.offload(args[0]) if args and _is_tensor(args[0]) else None
        if self._offloaded is not None:
            self._args = (None, *self._args[1:])
        self._given = [
            each for each in tree_leaves((self._args, _plain(self._kwargs))) if _is_tensor(each)
        ]
        self._versions = _versions(self._given)
        first = torch._C._autograd._get_sequence_nr()
        with (
            layer.visit(Phase.FORWARD, self._leaves) as slot,
            SavedTensorHooks(self._pack, self._unpack),
        ):
            self._memory = slot.untyped_storage().data_ptr()
            with _noting_nodes(first, self._is_watched) as beside:
                result = layer.run(args, kwargs)
        if self._versions != _versions(self._given):
            raise RematerializationError(
                f"{layer.name}: expected its arguments to be left alone, found one edited in "
                "place by the layer itself; the recomputation would edit it again"
            )
        self.condition.require_unedited()
        # What the layer has changed now it will change again.
        contents.attributes.disregard(self.condition.attributes)
        contents.note_tensors()
        self.note_end()
        # Now, not before: bitsandbytes casts a bias for good at its first use.
        self._marks = self.condition.marks_now()
        outputs = [each for each in tree_leaves(result) if _is_tensor(each) and each.requires_grad]
        note_last(outputs)
        begin = weakly(self._begin)
        for output in outputs:
            output.grad_fn.register_prehook(begin)
        readers, casts = _walk(outputs, first, is_watched=self._is_watched)
        hold = partial(_hold, layer, self._memory)
        for node in {*readers, *beside}:
            node.register_prehook(hold)
        reused = [
            (cast, parameter) for parameter in casts if (cast := cached_cast(parameter)) is not None
        ]
        require_current(layer.name, reused)
        return result

    def _begin(self, _: object) -> None:
        """The backward begins: hooks on what the layer gave have run, those inside have not."""
        task = torch._C._current_graph_task_id()
        if self._saved and task != self._task and not torch.is_grad_enabled():
            self._recompute_for(task)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if _lies_in(tensor, self._memory):
            return _InSlot.of(tensor)
        if self._is_watched:
            self._sums += self._sums_of(tensor)
        saved = _Saved(len(self._saved), tensor, self._is_watched)
        self._saved.append(ref(saved))
        self._forms.append((tensor.shape, tensor.dtype))
        return saved

    def _sums_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Of what an operator has computed in it; on the layer's device.

        PyTorch's attention kernels save seeds that without dropout nobody has written, and log-sums
        in rows of whole multiples of 32, of which they write the first.
        """
        if tensor.dtype is torch.uint64 or (not tensor.dim() and tensor.dtype is torch.int64):
            return []
        count = self._num_tokens
        if tensor.dtype is torch.float32 and tensor.shape[2:] == (-(-count // 32) * 32,):
            tensor = tensor[..., :count]
        return [sums_of_bits(tensor).to(self.layer.device)]

    def _unpack(self, kept: Any) -> torch.Tensor:
        task = torch._C._current_graph_task_id()
        if torch.is_grad_enabled() and task >= 0:
            self.refuse_second_order()
        if isinstance(kept, _InSlot):
            return kept.within(self.layer.weights.lease(Phase.BACKWARD))
        if task != self._task or kept.number not in self._values:
            self._recompute_for(task)
        tensor, version = self._values.pop(kept.number)
        if version_of(tensor) != version or kept.is_edited():
            raise RematerializationError(
                f"{self.layer.name}: expected what its backward needs to be left alone, found a "
                f"tensor of shape {tuple(tensor.shape)} that was edited in place after an operator "
                "had saved it; autograd refuses that in a resident model. Edit a copy"
            )
        return tensor

    def _recompute_for(self, task: int) -> None:
        self._values = {}  # what the values before have taken is free meanwhile
        self._values = self._recompute()
        self._task = task

    def _recompute(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Run the layer once more; what its operators save, by number, and its version then."""
        layer, contents = self.layer, self.condition.contents
        layer.condition().require_as(self.condition, self._marks)
        if self._versions != _versions(self._given):
            raise RematerializationError(
                f"{layer.name}: its input or another tensor it was given was edited in place "
                "between forward and backward, so the forward cannot be recomputed; edit it after "
                "backward"
            )
        values: dict[int, tuple[torch.Tensor, int]] = {}
        forms: list[tuple[torch.Size, torch.dtype]] = []
        sums: list[torch.Tensor] = []

        def store(tensor: torch.Tensor) -> None:
            tensor = values_of(tensor)
            if _lies_in(tensor, memory):
                return
            number = len(forms)
            forms.append((tensor.shape, tensor.dtype))
            if self._is_watched:
                sums.extend(self._sums_of(tensor))
            if number < len(self._saved) and self._saved[number]() is not None:
                values[number] = tensor.detach(), version_of(tensor)

        args, kwargs = _aliases(copied(self._args, "")), _aliases(copied(self._kwargs, ""))
        if self._offloaded is not None:
            args = (self._offloaded.fetch(), *args[1:])
        # Hooks, and a mode that sees operators, would see tensors without values.
        is_seen = self._is_watched or torch._C._len_torch_dispatch_stack()
        with (
            recomputing(layer.context.tally, not is_seen),
            layer.visit(Phase.BACKWARD, self._leaves) as slot,
            self.around(),
            self.start.replay(),
            torch.enable_grad(),
            SavedTensorHooks(store, _refuse_backward),
        ):
            memory = slot.untyped_storage().data_ptr()
            result = layer.run(args, kwargs)
            self.require_same_end()
        forget(tree_leaves(result))
        if forms != self._forms:
            raise RematerializationError(
                f"{layer.name}: expected the recomputation to save the tensors that the forward "
                "saved, found others; the layer depends on state that is not its input (another "
                "autocast, a counter?)"
            )
        if sums and not torch.equal(torch.cat(sums), torch.cat(self._sums)):
            raise RematerializationError(
                f"{layer.name}: expected the recomputation to save the values that the forward "
                "saved, found others; a hook inside the layer depends on state that is not its "
                "input (a generator of its own, a counter?)"
            )
        # What hooks write down in it meanwhile belongs to the layer, as in its forward.
        noted = partial(contents.attributes.disregard, self.condition.attributes)
        layer.weights.lease(Phase.BACKWARD, noted if self.condition.hooks else None)
        return values


def _aliases(value: Any) -> Any:
    """``value`` with others over the same memory for tensors that need gradients.

    Hooks that the layer registers on what it is given are on that already.
    """
    return tree_map_only(
        torch.Tensor,
        lambda each: as_result(each, each.is_leaf) if each.requires_grad else each,
        value,
    )


def _hold(layer: LayerBody, memory: int, _: object) -> None:
    """Before a node that keeps tensors of the slot at ``memory`` as it likes."""
    if layer.weights.lease(Phase.BACKWARD).untyped_storage().data_ptr() != memory:
        raise RematerializationError(
            f"{layer.name}: expected its block to stay where it was between forward and backward, "
            "found it moved to make room, and a function or a hook within that may have kept its "
            "old weights. Run the backward before a forward of another shape"
        )


def _walk(
    outputs: Sequence[torch.Tensor], first: int, *, is_watched: bool
) -> tuple[list[Any], list[Any]]:
    """The nodes of a layer that may keep a slot's tensor as they like; parameters cast before.

    The former are of functions of others in Python, such as bitsandbytes' 4-bit matmul, and all
    where code of the user (``is_watched``) may have saved-tensor hooks of its own inside the layer;
    of the latter it uses a cast from before it was called. Nodes below ``first`` are not of it.
    """
    readers, casts, seen = [], [], set()
    queue: list[Any] = [output.grad_fn for output in outputs]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < first:
            if node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
                casts.append(node.next_functions[0][0].variable)
            continue
        queue += [following for following, _ in node.next_functions]
        # A node that sums up a gradient saves nothing, and outlives the graph where DDP holds it.
        if _is_of_others(node) or (is_watched and not node.name().endswith("AccumulateGrad")):
            readers.append(node)
    return readers, casts


@contextmanager
def _noting_nodes(first: int, is_watched: bool) -> Iterator[list[Any]]:
    """The nodes as in ``_walk`` that code in the body makes, its outputs' and others; or none.

    What a hook computes beside a layer does not lead into the layer's outputs. What is young is
    found by the garbage collector, which must not run meanwhile.
    """
    found: list[Any] = []
    if not is_watched:
        yield found
        return
    with without_collector():
        yield found
        found += [
            each
            for each in gc.get_objects(generation=0)
            if _is_of_others(each) and each._sequence_nr() >= first
        ]


def _is_of_others(node: Any) -> bool:
    """Whether a node may keep tensors otherwise than by ``save_for_backward``."""
    kind: Any = type(node)
    return issubclass(kind, BackwardCFunction) and not str(kind._forward_cls.__module__).startswith(
        "poros."
    )


def _are_hooks_of_others() -> bool:
    """Whether saved-tensor hooks are around that are not those of a layer which runs now."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    pack, unpack = hooks
    is_ours = isinstance(getattr(pack, "__self__", None), RecomputedCall)
    return not is_ours and unpack is not _refuse_backward


def _refuse_backward(_: object) -> NoReturn:
    raise RematerializationError(
        "expected no backward inside a layer's forward, found one while it was recomputed (a hook?)"
    )


def _lies_in(tensor: torch.Tensor, memory: int) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() == memory


def _num_tokens(args: Sequence[Any]) -> int:
    """Of each row of the hidden states that a layer is given first."""
    is_given = bool(args) and _is_tensor(args[0]) and args[0].dim() > 1
    return int(args[0].shape[-2]) if is_given else 0


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _witness(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor without values that counts the edits of ``tensor``."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return None
    found = tensor.detach()
    found.data = found.new_empty(0)
    return found


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(version_of, tensors))


def _plain(value: Any) -> Any:
    """``value`` with dictionaries instead of mappings that pytrees do not know."""
    if isinstance(value, UserDict | dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
