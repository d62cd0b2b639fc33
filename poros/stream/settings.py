"""Autocast, and process-wide settings that pick kernels: read, compared, set for a while.

Read in the form that PyTorch itself reads when it picks a kernel.

Note: Rematerialization equality
    The recomputed forward must see the same bits as the forward did. Besides arguments and the
    layer itself (compared: ``poros.stream.condition``) that is: random states, autocast, the
    training flags of the layer's modules, and these settings. Each is captured at the layer's
    forward and *replayed* at its recomputation, then put back.

Note: The precision of float32
    PyTorch keeps it for each backend and operator. A place inherits from others until somebody
    sets it, and can never be made to inherit again, so it cannot be put back for certain. So it is
    only compared: a recomputation under another precision than its forward is refused. Since
    torch 2.9 the older getters raise once somebody has used the newer names; they are not asked.

Not covered: the number of threads, and what has no getter (flushing of denormal numbers).

Source:
    pytorch: ``torch.backends``, and ``aten/src/ATen/Context.cpp`` (inheritance of precisions).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import product
from operator import call
from typing import Any, NamedTuple

import torch

from poros.errors import RematerializationError
from poros.stream.within import Within

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
"""Kernels of attention, each on or off."""

_SWITCHES = (
    *("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction", "cublas_allow_fp16_accumulation"),
    *("blas_preferred_backend", "linalg_preferred_backend"),
    "deterministic_fill_uninitialized_memory",
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    *("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled"),
)
"""Of one value, with a getter and a setter in ``torch._C``."""

_REDUCTIONS = [f"_cublas_allow_{each}_reduced_precision_reduction" for each in ("fp16", "bf16")]
"""Of two values in some versions, of one in others."""

_PLACES = tuple(product(("cuda", "mkldnn"), ("matmul", "conv", "rnn")))
"""Where float32 has a precision: backends and operators."""
_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


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
        """Run the body under these settings; afterwards they are as they were before it.

        Raises:
            RematerializationError: If float32 has another precision now, on entering.
        """
        return Within(self._set)

    def has_precisions_of(self, other: "Settings") -> bool:
        """Whether float32 has the same precision in both; none is that of IEEE."""
        return all(
            mine == theirs or {mine, theirs} == {"none", "ieee"}
            for mine, theirs in zip(self.precisions, other.precisions, strict=True)
        )

    def restore(self) -> None:
        """Have these settings from now on. Raises as ``replay``."""
        stack = ExitStack()
        self._set(stack)
        stack.pop_all()

    def _set(self, stack: ExitStack) -> None:
        now = Settings.capture()
        if now == self:
            return
        if not self.has_precisions_of(now):
            raise RematerializationError(
                f"expected the precision of float32 products of the forward ({self.precisions}), "
                f"found another one at its backward, or within its loss ({now.precisions}); set it "
                "(torch.backends, set_float32_matmul_precision) between steps, not within one"
            )
        pairs = zip(_ACCESS, self.switches, now.switches, strict=True)
        for (_, put), wanted, before in pairs:
            if wanted != before:
                stack.callback(put, before)
                put(wanted)


class AutocastState(NamedTuple):
    """Autocast of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls, device_type: str) -> "AutocastState":
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )

    def now(self) -> "AutocastState":
        """Of the same device type, at this moment."""
        return self.capture(self.device_type)

    def enter(self) -> torch.autocast:
        """The same autocast, without its cache of cast weights.

        The cache is keyed by tensor: a cast of an adapter that is there would be reused, and the
        graph of a recomputation would not be its own.
        """
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


class Surroundings(NamedTuple):
    """Autocast and the settings that pick kernels, at one time."""

    autocast: tuple[AutocastState, ...]
    """Of each device type that takes part."""
    settings: Settings

    @classmethod
    def capture(cls, device: torch.device) -> "Surroundings":
        """Those of now, for work on ``device``."""
        device_types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        return cls(tuple(map(AutocastState.capture, device_types)), Settings.capture())

    @property
    def is_autocast(self) -> bool:
        return any(each.enabled for each in self.autocast)

    def enter(self, stack: ExitStack) -> None:
        """Have them until ``stack`` is closed."""
        for each in self.autocast:
            if each.enabled or torch.is_autocast_enabled(each.device_type):
                stack.enter_context(each.enter())
        stack.enter_context(self.settings.replay())


def set_deterministic_flags(flags: tuple[bool, bool]) -> None:
    """Have PyTorch's deterministic flags like this; as ``deterministic_flags`` says them."""
    # torch.use_deterministic_algorithms would also switch the compiler's settings.
    torch._C._set_deterministic_algorithms(flags[0], warn_only=flags[1])


def deterministic_flags() -> tuple[bool, bool]:
    """Whether only deterministic kernels are to run, and whether others only warn."""
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
        for get, put in (
            *((f"_get_{each}_sdp_enabled", f"_set_sdp_use_{each}") for each in _ATTENTION),
            *((f"_get_{each}", f"_set_{each}") for each in _SWITCHES),
        )
        # Not every version and build has all of them.
        if hasattr(torch._C, get) and hasattr(torch._C, put)
    ),
    *((getattr(torch._C, f"_get{name}"), _setter_of_both(name)) for name in _REDUCTIONS),
    (deterministic_flags, set_deterministic_flags),
)
_GETTERS = tuple(get for get, _ in _ACCESS)
