"""The optimizers of programs, by name; some of them do not count their writes to a parameter."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

_RATE = 1e-2


def _imported(module: str, name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda parameters: getattr(import_module(module), name)(parameters, lr=_RATE, **options)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "adamw": partial(torch.optim.AdamW, lr=_RATE, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=_RATE, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=_RATE, fused=True),
    "sgd": partial(torch.optim.SGD, lr=_RATE, momentum=0.9, foreach=False),
    # PyTorch's own, with momentum, leaves a bfloat16 buffer on a CPU partly unwritten.
    "sgd_fused": partial(torch.optim.SGD, lr=_RATE, fused=True),
    "8bit": _imported("bitsandbytes.optim", "AdamW8bit", min_8bit_size=64),
    "lion": _imported("bitsandbytes.optim", "Lion"),
    "schedule_free": _imported("schedulefree", "AdamWScheduleFree"),
}


def weights() -> dict[str, int]:
    """How often each is drawn of those whose package is installed."""
    packages = {"8bit": "bitsandbytes", "lion": "bitsandbytes", "schedule_free": "schedulefree"}
    often = {"adamw": 4, "fused": 4}
    return {
        name: often.get(name, 1)
        for name in _KINDS
        if find_spec(packages.get(name, "torch")) is not None
    }


def make(name: str, parameters: Sequence[nn.Parameter]) -> Any:
    """One over ``parameters``, ready to train."""
    optimizer = _KINDS[name](parameters)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer
