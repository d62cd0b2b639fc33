"""Ranges that make a trace of ``torch.profiler`` read by itself: what runs here, of which layer."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function


def labelled(verb: str, what: str) -> AbstractContextManager[object]:
    """Show the body as ``poros::<verb> <what>`` in a trace, if a profiler records one.

    Not for code that is compiled: it would be traced into it.
    """
    # Asked first: entering and leaving a range costs microseconds even if nobody records it.
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return record_function(f"poros::{verb} {what}")


def short_name(name: str) -> str:
    """The list and the number of a layer: ``layers.12``, whatever stands around the model."""
    return ".".join(name.split(".")[-2:])
