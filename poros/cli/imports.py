"""Makes imports of libraries quicker; imports nothing slow itself."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch and what needs it quickly in the body, if this process has not done so yet.

    Libraries make no garbage as they are imported, so none is looked for. Functions that they
    have torch compile meanwhile are compiled when they are called first. bitsandbytes has some, for
    devices and shapes without a kernel; the compiler is hundreds of modules, which take seconds to
    import.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    import torch

    compile_now = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = cache(partial(compile_now, model, **options))

        @wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now
        gc.freeze()  # modules stay; a later look leaves them out
        gc.enable()
