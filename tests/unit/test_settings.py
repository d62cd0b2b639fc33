"""Settings that pick kernels: every mix of old and new names is read, and is left as it was.

The precision of float32 is compared alone. Steps between whose forward and backward one is changed:
``exact/test_written_programs``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from poros.errors import RematerializationError
from poros.stream.settings import Settings

backends: Any = torch.backends
Change = Callable[[], object]


def put(owner: Any, value: object, name: str = "fp32_precision") -> Change:
    return lambda: setattr(owner, name, value)


def old_then_new() -> None:
    torch.set_float32_matmul_precision("high")
    backends.mkldnn.matmul.fp32_precision = "bf16"
    backends.cuda.matmul.fp32_precision = "ieee"


REDUCTION = "allow_bf16_reduced_precision_reduction"
CHANGES: dict[str, Change] = {
    "nothing": lambda: None,
    "new matmul": put(backends.cuda.matmul, "tf32"),
    "new everywhere": put(backends, "tf32"),  # TrainingArguments(tf32=True)
    "nothing everywhere": put(backends, "ieee"),  # TrainingArguments(tf32=False)
    "new convolutions": put(backends.cudnn.conv, "ieee"),
    "new cudnn": put(backends.cudnn, "tf32"),
    "new on the cpu": put(backends.mkldnn.matmul, "bf16"),
    "everything bf16": put(backends, "bf16"),
    "old high": lambda: torch.set_float32_matmul_precision("high"),
    "old medium": lambda: torch.set_float32_matmul_precision("medium"),
    "old cublas": put(backends.cuda.matmul, True, "allow_tf32"),
    "old cudnn": put(backends.cudnn, False, "allow_tf32"),
    "old then new": old_then_new,
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "reductions": put(backends.cuda.matmul, False, REDUCTION),
    "benchmark": put(backends.cudnn, True, "benchmark"),
    "without onednn": lambda: torch._C._set_mkldnn_enabled(False),
    "order of attention": lambda: torch._C._set_sdp_priority_order([2, 0, 1, 3, 4]),
}


@pytest.fixture(autouse=True)
def all_put_back() -> Iterator[None]:
    """No test changes a setting of the tests after it, nor depends on those before it."""
    put_back()
    before = everything()
    yield
    put_back()
    assert Settings.capture() == before[0]


def put_back() -> None:
    torch.set_float32_matmul_precision("highest")
    torch._C._set_cudnn_allow_tf32(True)
    backends.fp32_precision = backends.cudnn.fp32_precision = "none"
    backends.mkldnn.matmul.fp32_precision = backends.cuda.matmul.fp32_precision = "none"
    torch.use_deterministic_algorithms(False)
    backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    backends.cudnn.benchmark = False
    torch._C._set_mkldnn_enabled(True)
    torch._C._set_sdp_priority_order([1, 2, 0, 3, 4])


def everything() -> list[Any]:
    """What PyTorch says of every setting, and whether the older names are readable."""
    found: list[Any] = [Settings.capture(), backends.fp32_precision]
    for get in (
        torch.get_float32_matmul_precision,
        torch._C._get_cublas_allow_tf32,
        torch._C._get_cudnn_allow_tf32,
    ):
        try:
            found.append(get())
        except RuntimeError:
            found.append("unreadable")
    # What is inherited shows when what it is inherited from changes.
    was = backends.fp32_precision
    for said in ("ieee", "tf32"):
        backends.fp32_precision = said
        found.append(Settings.capture())
    backends.fp32_precision = was
    return found


@pytest.mark.parametrize("between", CHANGES)
@pytest.mark.parametrize("first", ["nothing", "new matmul", "old medium", "new everywhere"])
def test_a_setting_is_replayed_and_put_back(first: str, between: str) -> None:
    CHANGES[first]()
    wanted = Settings.capture()
    CHANGES[between]()
    before = everything()
    if not wanted.has_precisions_of(before[0]):
        with pytest.raises(RematerializationError, match="between steps"), wanted.replay():
            pass
        assert everything() == before
        return
    with wanted.replay():
        assert Settings.capture().switches == wanted.switches
    assert everything() == before
