"""Process-wide settings that pick the kernels of an operator: read, compared, set for a while.

Read in the form that PyTorch itself reads when it picks a kernel. Precision of float32 is such a
case: since torch 2.9 it is kept per backend and operator, and the older setters
(``set_float32_matmul_precision``, ``allow_tf32``) write there too, but the older *getters* raise as
soon as somebody has used the newer names. So they are not asked, whatever mix of both was used.

Not covered: the number of threads, and what has no getter (flushing of denormal numbers).

Source:
    pytorch: ``aten/src/ATen/Context.cpp`` (inheritance of precisions) and ``torch.backends``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from operator import call
from typing import Any, NamedTuple

import torch

from poros.stream.within import Within

_SWITCHES = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    (
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory",
    ),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
)
"""Getters and setters of one value, in ``torch._C``."""

_REDUCTIONS = (
    "_cublas_allow_fp16_reduced_precision_reduction",
    "_cublas_allow_bf16_reduced_precision_reduction",
)
"""Of two values in some versions, of one in others."""

_BACKENDS = ("cuda", "mkldnn")
_OPERATORS = ("matmul", "conv", "rnn")
_PLACES = tuple((backend, operator) for backend in _BACKENDS for operator in _OPERATORS)
_ROOT = ("generic", "all")

_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_set_precision: Callable[[str, str, str], object] = torch._C._set_fp32_precision_setter


def settle(device: torch.device) -> None:
    """Have PyTorch decide now what it otherwise decides at its first attention on a GPU.

    On some cards that call puts cuDNN first among the kernels of attention, for the rest of the
    process. Settings captured before it would pick another kernel than the call itself took.

    Source:
        pytorch: ``priority_order`` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if device.type == "cuda":
        tensor = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
        torch._fused_sdp_choice(tensor, tensor, tensor)


class Settings(NamedTuple):
    """All of them at one time, hashable; equal values pick equal kernels."""

    switches: tuple[Any, ...]
    precisions: tuple[str, ...]
    """Of float32, for each backend and operator, as inherited."""

    def __hash__(self) -> int:
        return hash(self.precisions)  # the order of attention's kernels is a list

    @classmethod
    def capture(cls) -> "Settings":
        """The settings now. Has no side effect and does not raise."""
        return cls(tuple(map(call, _GETTERS)), tuple(map(_precision, *zip(*_PLACES, strict=True))))

    def replay(self) -> AbstractContextManager[object]:
        """Run the body under these settings; afterwards they are as they were before it."""
        return Within(self._set)

    def restore(self) -> None:
        """Have these settings from now on."""
        stack = ExitStack()
        self._set(stack)
        stack.pop_all()

    def _set(self, stack: ExitStack) -> None:
        now = Settings.capture()
        if now == self:
            return
        pairs = zip(_ACCESS, self.switches, now.switches, strict=True)
        for (_, put), wanted, before in pairs:
            if wanted != before:
                stack.callback(put, before)
                put(wanted)
        if self.precisions != now.precisions:
            self._set_precisions(stack)

    def _set_precisions(self, stack: ExitStack) -> None:
        own = _own_precisions()
        stack.callback(_restore_precisions, own)
        with suppress(RuntimeError):
            # Where the older names are readable now, what they say follows.
            before = torch.get_float32_matmul_precision()
            stack.callback(torch.set_float32_matmul_precision, before)
            torch.set_float32_matmul_precision(self._older_name())
        wanted = dict(zip(_PLACES, map(_said, self.precisions), strict=True))
        for place, precision in wanted.items():
            # One that can only inherit did so before as well, so all of them had the same.
            if own[place] is None and _precision(*place) != precision:
                _set_precision(place[0], "all", precision)
        for place, precision in wanted.items():
            if own[place] is not None and _said(_precision(*place)) != precision:
                _set_precision(*place, precision)

    def _older_name(self) -> str:
        cuda, mkldnn = (self.precisions[_PLACES.index((name, "matmul"))] for name in _BACKENDS)
        names = {("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}
        return names.get((cuda, mkldnn), "highest")


def _said(precision: str) -> str:
    """The same in words that are not inherited over: nothing said means IEEE."""
    return "ieee" if precision == "none" else precision


def _own_precisions() -> dict[tuple[str, str], str | None]:
    """What was set at each place itself: with nothing above it, a place inherits nothing.

    None for a place that was never set (cuDNN's are born so). It can never be made so again, so it
    is left alone.
    """
    own: dict[tuple[str, str], str | None] = {_ROOT: _precision(*_ROOT)}
    try:
        _set_precision(*_ROOT, "none")
        for backend in _BACKENDS:
            own[backend, "all"] = _precision(backend, "all")
            for operator in _OPERATORS:
                _set_precision(backend, "all", "none")
                alone = _precision(backend, operator)
                _set_precision(backend, "all", "ieee")
                inherits = _precision(backend, operator) != alone
                own[backend, operator] = None if inherits and alone != "none" else alone
    finally:
        _restore_precisions(own)
    return own


def _restore_precisions(own: dict[tuple[str, str], str | None]) -> None:
    for place, precision in own.items():
        if precision is not None:
            _set_precision(*place, precision)


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _deterministic() -> tuple[bool, bool]:
    return (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
    )


def _setter_of_both(name: str) -> Callable[[Any], None]:
    put = getattr(torch._C, f"_set{name}")
    return lambda value: put(*value) if isinstance(value, tuple) else put(value)


_ACCESS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    *(
        (getattr(torch._C, get), getattr(torch._C, put))
        for get, put in _SWITCHES
        # Not every version and build has all of them.
        if hasattr(torch._C, get) and hasattr(torch._C, put)
    ),
    *((getattr(torch._C, f"_get{name}"), _setter_of_both(name)) for name in _REDUCTIONS),
    (_deterministic, _set_deterministic),
)
_GETTERS = tuple(get for get, _ in _ACCESS)
