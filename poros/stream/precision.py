"""The precision of float32, which PyTorch keeps per backend and operator: set for a while.

Since torch 2.9 the older setters (``set_float32_matmul_precision``, ``allow_tf32``) write there
too, but the older *getters* raise as soon as somebody has used the newer names. So they are not
asked, whatever mix of both was used.

Source:
    pytorch: ``aten/src/ATen/Context.cpp`` (inheritance of precisions) and ``torch.backends``.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch

_BACKENDS = ("cuda", "mkldnn")
_OPERATORS = ("matmul", "conv", "rnn")
_ROOT = ("generic", "all")

PLACES = tuple((backend, operator) for backend in _BACKENDS for operator in _OPERATORS)
"""Where there is a precision."""

GET: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
"""Gives the precision at a place, as inherited."""
_put: Callable[[str, str, str], object] = torch._C._set_fp32_precision_setter


def set_precisions(precisions: Sequence[str], stack: ExitStack) -> None:
    """Have these precisions until ``stack`` is closed: for each of ``PLACES``, as inherited."""
    own = _own_precisions()
    stack.callback(_restore, own)
    with suppress(RuntimeError):
        # Where the older names are readable now, what they say follows.
        before = torch.get_float32_matmul_precision()
        stack.callback(torch.set_float32_matmul_precision, before)
        torch.set_float32_matmul_precision(_older_name(precisions))
    wanted = dict(zip(PLACES, map(_said, precisions), strict=True))
    for place, precision in wanted.items():
        # One that can only inherit did so before as well, so all of them had the same.
        if own[place] is None and GET(*place) != precision:
            _put(place[0], "all", precision)
    for place, precision in wanted.items():
        if own[place] is not None and _said(GET(*place)) != precision:
            _put(*place, precision)


def _older_name(precisions: Sequence[str]) -> str:
    cuda, mkldnn = (precisions[PLACES.index((name, "matmul"))] for name in _BACKENDS)
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
    own: dict[tuple[str, str], str | None] = {_ROOT: GET(*_ROOT)}
    try:
        _put(*_ROOT, "none")
        for backend in _BACKENDS:
            own[backend, "all"] = GET(backend, "all")
            for operator in _OPERATORS:
                _put(backend, "all", "none")
                alone = GET(backend, operator)
                _put(backend, "all", "ieee")
                inherits = GET(backend, operator) != alone
                own[backend, operator] = None if inherits and alone != "none" else alone
    finally:
        _restore(own)
    return own


def _restore(own: dict[tuple[str, str], str | None]) -> None:
    for place, precision in own.items():
        if precision is not None:
            _put(*place, precision)
