"""Liger's kernels on a CPU, in Triton's interpreter; and by themselves in a resident model.

Each launch is an operator of PyTorch, so that tapes record it and watchers see it. The interpreter
leaves numbers as they are and has none of CUDA's functions, so both are put in their place; as with
kernels of ours, its float32 is right and its bfloat16 is not.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from poros.kernels.forwards import is_of_liger
from tests.support import interpreted


@contextmanager
def liger_interpreted() -> Iterator[None]:
    """Have Liger's kernels run on CPU tensors."""
    pytest.importorskip("liger_kernel")
    interpreter = interpreted("triton.runtime.interpreter")
    geglu = interpreted("liger_kernel.ops.geglu")
    norms = interpreted("liger_kernel.ops.rms_norm")
    language = interpreted("triton.language")
    of_argument, launch = interpreter._implicit_cvt, interpreter.GridExecutor.__call__
    # What operators are called with besides tensors: numbers stand for them in a tape.
    launches: list[Any] = []
    library = torch.library.Library("tests_liger", "FRAGMENT")
    library.define("launch(Tensor(a!)[] tensors, int number) -> ()")

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return of_argument(argument)
        handle = interpreter.TensorHandle(np.array([argument], np.float32), language.float32)
        return language.tensor(handle, language.float32)

    def seen(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        places = [place for place, each in enumerate(args) if isinstance(each, torch.Tensor)]
        rest = [None if isinstance(each, torch.Tensor) else each for each in args]
        launches.append((executor, places, rest, kwargs))
        torch.ops.tests_liger.launch(tensors, len(launches) - 1)

    def run(tensors: list[torch.Tensor], number: int) -> None:
        executor, places, rest, kwargs = launches[number]
        args = list(rest)
        for place, each in zip(places, tensors, strict=True):
            args[place] = each
        launch(executor, *args, **kwargs)

    library.impl("launch", run, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", converted)
        patch.setattr(interpreter.GridExecutor, "__call__", seen)
        patch.setattr(norms, "rsqrt", lambda x: 1.0 / language.sqrt(x))
        patch.setattr(geglu, "tanh", lambda x: 1.0 - 2.0 / (1.0 + language.exp(2.0 * x)))
        yield


@contextmanager
def put_back(modeling: ModuleType) -> Iterator[None]:
    """Undo at the end what Liger changes in the code of a family, for whole processes."""
    before = dict(vars(modeling))
    try:
        yield
    finally:
        vars(modeling).update(before)


@contextmanager
def liger_alone(modeling: ModuleType, swiglu: bool = False) -> Iterator[Callable[[Any], Any]]:
    """Liger's kernels in models without Poros, as the Trainer applies them, with their own loss.

    Args:
        modeling: The code of their family, which Liger changes and which is put back at the end.
        swiglu: Whether its SwiGLU is among them.

    Yields:
        What applies them to a model, and returns it.
    """
    from transformers.integrations.liger import apply_liger_kernel

    def applied(model: Any) -> Any:
        losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        apply_liger_kernel(model, {**losses, "swiglu": swiglu})
        assert is_of_liger(vars(modeling)["apply_rotary_pos_emb"])  # else it is another family
        return model

    with put_back(modeling):
        yield applied


def names_of_liger() -> list[str]:
    """What Liger's functions and classes stand for, in modules of transformers and PyTorch."""
    return [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if name.startswith(("transformers.", "torch.nn"))
        for key, value in list(vars(module).items())
        if is_of_liger(value)
    ]
