"""Reads and sets the process-wide settings that choose kernels.

Written apart from ``poros.stream.settings``, through PyTorch's public names: what the recomputation
forgets is then missing on one side only.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

_BACKENDS: Any = torch.backends


def current_settings() -> list[Any]:
    """Read all settings; never raises, whatever mix of older and newer names was used."""
    return [
        [get() for get, _ in _settings()],
        [operator.fp32_precision for operator in _operators()],
    ]


def set_settings(wanted: list[Any], stack: ExitStack) -> None:
    """Set what differs from ``wanted``, until ``stack`` is closed."""
    values, precisions = wanted
    for (get, put), value in zip(_settings(), values, strict=True):
        if (before := get()) != value:
            stack.callback(put, before)
            put(value)
    if [operator.fp32_precision for operator in _operators()] != precisions:
        _set_precisions(precisions, stack)


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    cuda = _BACKENDS.cuda
    attributes = [
        (cuda.matmul, "allow_fp16_accumulation"),
        (_BACKENDS.cudnn, "deterministic"),
        (_BACKENDS.cudnn, "benchmark"),
        (_BACKENDS.mkldnn, "enabled"),
        (_BACKENDS.mkldnn, "deterministic"),
    ]
    return [
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (cuda.preferred_blas_library, cuda.preferred_blas_library),
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
        *((partial(getattr, *attribute), partial(setattr, *attribute)) for attribute in attributes),
        *(
            (partial(_reduction, name), partial(setattr, cuda.matmul, name))
            for name in (
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
            )
        ),
    ]


def _reduction(name: str) -> Any:
    """Whether sums may be of lower precision, and, where it is apart, whether in split K too."""
    allowed = getattr(_BACKENDS.cuda.matmul, name)
    in_split = getattr(_BACKENDS.cuda.matmul, f"{name}_split_k", None)
    return allowed if in_split is None else (allowed, in_split)


def _operators() -> list[Any]:
    """Return the operators with a float32 precision setting."""
    cudnn, mkldnn = _BACKENDS.cudnn, _BACKENDS.mkldnn
    return [cudnn.conv, cudnn.rnn, _BACKENDS.cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


def _set_precisions(wanted: list[str], stack: ExitStack) -> None:
    cudnn, mkldnn = _BACKENDS.cudnn, _BACKENDS.mkldnn
    # What is said for one operator goes before what is said for its backend, and that before what
    # is said for all: in silence above, each tells what was said for it alone.
    precisions = [(_BACKENDS, _BACKENDS.fp32_precision)]
    _BACKENDS.fp32_precision = "none"
    precisions += [(cudnn, cudnn.fp32_precision), (mkldnn, mkldnn.fp32_precision)]
    cudnn.fp32_precision = mkldnn.fp32_precision = "none"
    alone = [operator.fp32_precision for operator in _operators()]
    cudnn.fp32_precision = mkldnn.fp32_precision = "ieee"
    # cuDNN's allow TF32 until anything is said, and that silence cannot be had back.
    is_silent = [
        before == "tf32" and operator.fp32_precision == "ieee"
        for operator, before in zip(_operators(), alone, strict=True)
    ]
    operators = list(zip(_operators(), alone, wanted, is_silent, strict=True))
    precisions += [(operator, before) for operator, before, _, silent in operators if not silent]
    for owner, value in precisions:
        owner.fp32_precision = value
        stack.callback(setattr, owner, "fp32_precision", value)
    for operator, _, value, silent in operators:
        if operator.fp32_precision != value:
            (cudnn if silent else operator).fp32_precision = "ieee" if value == "none" else value
