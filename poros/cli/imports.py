"""Makes imports of libraries quicker; imports nothing slow itself."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch and what needs it quickly in the body, if this process has not done so yet.

    Libraries make no garbage as they are imported, so none is looked for. What they have torch
    compile meanwhile is compiled when it is called first. bitsandbytes does so, for devices and
    shapes that it has no kernels of its own for; the compiler is hundreds of modules, which take
    seconds to import.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = cache(lambda: compile_now(function, **options))
        return lambda *args, **kwargs: compiled()(*args, **kwargs)

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now
        gc.freeze()  # modules stay; a later look leaves them out
        gc.enable()
