"""Copies of a prepared model: prepared models themselves, with slots and host memory of their own.

``copy.deepcopy`` copies while the model is plain for a moment, its base at rest in host memory, and
prepares the copy with the same policy. A pickle holds a plain twin: the same module tree over the
same tensors, so that the pickler writes each tensor as it writes any other, and whatever else goes
into the same pickle (an optimizer) still refers to the twin's parameters. Loading prepares it.

A shallow copy is refused, for its two halves would share parameters and not a runtime. So are a
copy of a single layer, or of anything below the model given to ``poros.prepare`` that holds a
layer, and handing the model to a new process.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.config import StreamingPolicy
from poros.errors import PreparedModelError
from poros.frozen import FrozenTensor, is_4bit, packed_like

if TYPE_CHECKING:
    from poros.takeover import Takeover

Prepare = Callable[..., nn.Module]
"""``poros.api.prepare_with``."""


def copiers(
    takeover: "Takeover", policy: StreamingPolicy, prepare: Prepare
) -> dict[str, Callable[..., Any]]:
    """The methods of a prepared model that ``copy.deepcopy`` and ``pickle`` look for."""
    # Weakly: the model's layers hold the takeover, which holds these.
    reference = weakref.ref(takeover)

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        with _plain(reference()) as (model, _):
            twin = copy.deepcopy(model, memo)
        _own_4bit_weights(twin)
        return prepare(twin, policy, origins=reference().origins)  # type: ignore[union-attr]

    def reduce_ex(protocol: object) -> tuple[Any, ...]:
        _refuse_spawning()
        with _plain(reference()) as (model, living):
            return unpickle, (_Pickled(_twin(model, living)), policy, living.origins)

    return {"__deepcopy__": deepcopy, "__reduce_ex__": reduce_ex}


def unpickle(pickled: Any, policy: StreamingPolicy, origins: Mapping[str, str]) -> nn.Module:
    """Prepare what ``reduce_ex`` gave to a pickler, as it comes out of the pickle.

    Args:
        pickled: The plain model.
        policy: How the original streams.
        origins: See ``Takeover``.

    Raises:
        PreparedModelError: If it never was in a pickle.
    """
    from poros.api import prepare_with

    if isinstance(pickled, _Pickled):
        raise PreparedModelError(
            "expected a deep copy or a pickle of a prepared model, found a shallow copy: both "
            "would train the same adapters through one set of slots. Use copy.deepcopy(model), or "
            "call poros.restore(model) first"
        )
    model: nn.Module = pickled
    _own_4bit_weights(model)
    return prepare_with(model, policy, origins=origins)


def _refuse_spawning() -> None:
    # Tensors go to a new process as open files of living tensors, and the twin's do not live on.
    if get_spawning_popen() is not None:
        raise PreparedModelError(
            "expected a prepared model to stay in its process, found it among the arguments of a "
            "new one. Load and prepare it there, or send what poros.restore(model) gives"
        )


class _Pickled:
    """Becomes the plain model in a pickle; ``copy.copy`` hands it to ``unpickle`` as it is."""

    def __init__(self, plain: nn.Module) -> None:
        self._plain = plain

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._plain,)


def _itself(plain: nn.Module) -> nn.Module:
    return plain


@contextmanager
def _plain(takeover: "Takeover | None") -> Iterator[tuple[nn.Module, "Takeover"]]:
    model = takeover.model() if takeover is not None else None
    if takeover is None or model is None:
        raise PreparedModelError("expected a living prepared model to copy, found none")
    with takeover.plain():
        yield model, takeover


def _twin(model: nn.Module, takeover: "Takeover") -> nn.Module:
    """The same module tree over the same bytes."""
    # What the memo holds is taken as copied already.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            memo.update((id(each), each) for each in tensors.values() if each is not None)
    for block, slab in zip(takeover.blocks, takeover.host.slabs, strict=True):
        views = map(slab.tensor, slab.layout.tensors)
        for each in block:
            memo.update(_resting(each, views))
    for tensor in list(memo.values()):
        if is_4bit(tensor):
            memo.setdefault(id(tensor.quant_state), tensor.quant_state)
            if tensor.module is not None:
                memo[id(tensor)] = _packed(tensor, tensor.data, tensor.quant_state)
    return copy.deepcopy(model, memo)


def _resting(each: FrozenTensor, views: Iterator[torch.Tensor]) -> Iterator[tuple[int, Any]]:
    """A streamed tensor, with storages of its own: sending it to another process moves those."""
    original: Any = each.tensor
    data = next(views)
    if not each.is_4bit:
        is_parameter = isinstance(original, nn.Parameter)
        yield id(original), nn.Parameter(data, requires_grad=False) if is_parameter else data
        return
    state = copy.copy(original.quant_state)
    state.absmax = next(views)
    if state.nested:
        state.state2 = copy.copy(state.state2)
        if len(each.parts()) == 3:
            state.state2.absmax = next(views)
    yield id(original.quant_state), state
    yield id(original), _packed(original, data, state)


def _packed(like: Any, data: torch.Tensor, state: Any) -> Any:
    """A 4-bit weight as ``like``, without its reference to a module, which is the original's."""
    kind: Any = type(like)
    same = kind.__new__(kind)
    fields = {"data": data, "quant_state": state, "module": None}
    same.__setstate__({**like.__getstate__(), **fields})
    return same


def _own_4bit_weights(model: nn.Module) -> None:
    """Mend what copying does to 4-bit weights.

    A deep copy of one refers to the original's module, and so keeps the whole original alive, and
    has a quantization state apart from its module's. A pickle turns it into a plain parameter.
    """
    mended: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        if state is None or "quant_state" not in module.__dict__:
            continue
        if not is_4bit(weight):
            if id(weight) not in mended:
                mended[id(weight)] = packed_like(weight, weight.data, state, module)
            weight = module._parameters["weight"] = mended[id(weight)]
        weight.module = module
        module.__dict__["quant_state"] = state
