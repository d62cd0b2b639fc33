"""Labels ranges in a trace of ``torch.profiler``: what runs, for which layer."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function


def labelled(verb: str, what: str) -> AbstractContextManager[object]:
    """Show the body as ``poros::<verb> <what>`` in a trace, if a profiler records one.

    Not for code that is compiled: it would be traced into it.
    """
    # Checked first: a range costs microseconds even without a profiler.
    if not is_profiling():
        return nullcontext()
    return record_function(f"poros::{verb} {what}")


def is_profiling() -> bool:
    """Whether a profiler records ranges now."""
    return torch._C._autograd._profiler_enabled()
