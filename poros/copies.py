"""Copies of a prepared model: prepared models themselves, with slots and host memory of their own.

A copy is taken while the model is plain for a moment, its base at rest in host memory, and then
prepared with the same policy. A copy of a single layer, or of anything else below the model that
was given to ``poros.prepare``, is refused: it would have no runtime.
"""

import copy
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.config import StreamingPolicy
from poros.errors import PreparedModelError

if TYPE_CHECKING:
    from poros.takeover import Takeover

Prepare = Callable[[nn.Module, StreamingPolicy], nn.Module]


def copiers(
    takeover: "Takeover", policy: StreamingPolicy, prepare: Prepare
) -> dict[str, Callable[..., Any]]:
    """The methods of a prepared model that ``copy.deepcopy`` and ``pickle`` look for."""
    # Weakly: the model's layers hold the takeover, which holds these.
    reference = weakref.ref(takeover)

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        with _plain(reference()) as model:
            twin = copy.deepcopy(model, memo)
        return prepare(twin, policy)

    def reduce_ex(protocol: object) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        with _plain(reference()) as model:
            torch.save(model, buffer)
        return unpickle, (buffer.getvalue(), policy)

    return {"__deepcopy__": deepcopy, "__reduce_ex__": reduce_ex}


@contextmanager
def _plain(takeover: "Takeover | None") -> Iterator[nn.Module]:
    model = takeover.model() if takeover is not None else None
    if takeover is None or model is None:
        raise PreparedModelError("expected a living prepared model to copy, found none")
    with takeover.plain():
        yield model


def unpickle(data: bytes, policy: StreamingPolicy) -> nn.Module:
    """Load and prepare what ``reduce_ex`` saved. As with any pickle, only load what you trust."""
    from poros.api import prepare_with

    model: nn.Module = torch.load(io.BytesIO(data), weights_only=False)
    return prepare_with(model, policy)
