"""Axolotl's kernels for LoRA and DoRA, where the package is installed, as an arm beside ours.

Their forwards are put on PEFT's modules one by one. One mask of dropout serves gate and up, so what
they compute is another sample: no bits are compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import MethodType
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def is_installed() -> bool:
    return find_spec("axolotl") is not None


@contextmanager
def used(model: Any) -> Iterator[None]:
    """Within it, layers of Llama's form in ``model`` run Axolotl's kernels."""
    from axolotl.kernels import lora as kernels  # type: ignore[import-not-found]

    changed = []
    for module in model.modules():
        if hasattr(module, "down_proj") and hasattr(module, "gate_proj"):
            module.forward = MethodType(kernels.apply_lora_mlp_swiglu, module)
            changed.append(module)
        for name in ATTENTION:
            projection = getattr(module, name, None)
            if projection is not None:
                projection.forward = partial(kernels.apply_lora_linear, projection)
                changed.append(projection)
    try:
        yield
    finally:
        for module in changed:
            del module.forward
