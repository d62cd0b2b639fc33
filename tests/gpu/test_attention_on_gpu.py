"""The self-check at lengths where a GPU's fused attention does not repeat itself in backward.

PyTorch chooses the kernels, as it does for users. No start may be stopped, and none accused; a
fault of streaming has to be found all the same.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

import poros
from poros.errors import ParityError
from poros.gates import tiny
from poros.kernels.packed_attention import attend_packed
from poros.slots.manager import BlockManager
from poros.slots.ring import Slot
from poros.slots.schedule import Phase
from poros.stream.attention import AttentionKernels
from tests.children import run_python
from tests.faults.planted import exchange_saved_values
from tests.support import prepare_plain

pytestmark = pytest.mark.gpu

NUM_STARTS = 20
LENGTHS = (512, 2048, 4096, 8192)
DTYPES = (torch.bfloat16, torch.float16)
SIZES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28},
}
NUM_LAYERS = {"0.5B": 4, "7B": 2}
LOSS_SCALE = 2.0**10  # as under a gradient scaler: fp16 would round small gradients to zero
VOCAB_SIZE = 512

MakeModel = Callable[[str, torch.dtype], Any]


def make_layers(size: str, dtype: torch.dtype, folder: Path) -> Any:
    config = Qwen2Config(
        **SIZES[size],
        num_hidden_layers=NUM_LAYERS[size],
        num_key_value_heads=SIZES[size]["num_attention_heads"] // 7,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=32768,
    )
    tiny.write_checkpoint(config, folder, dtype=dtype)
    base = tiny.load_base(folder, dtype=dtype, device="cuda")
    return tiny.attach(base, rank=16, dropout=0.05)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes layers; the last ones are kept."""

    @lru_cache(maxsize=1)
    def make(size: str, dtype: torch.dtype) -> Any:
        return make_layers(size, dtype, tmp_path_factory.mktemp(f"layers-of-{size}"))

    return make


def start(model: Any, num_tokens: int, seed: int, **overrides: Any) -> dict[str, Any]:
    """The first step of a run; what the self-check said."""
    prepare_plain(model, slots=2, **overrides)
    try:
        torch.manual_seed(seed)
        ids = torch.randint(VOCAB_SIZE, (1, num_tokens), device="cuda")
        model.train()
        (LOSS_SCALE * model(input_ids=ids, labels=ids).loss).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        assert gradients and all(bool(each.any()) for each in gradients)
        found: dict[str, Any] = poros.runtime(model).self_check
        return found
    finally:
        model.zero_grad()
        poros.restore(model)


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("size", "num_tokens"), [*(("0.5B", each) for each in LENGTHS), ("7B", 2048), ("7B", 8192)]
)
def test_no_start_is_stopped(
    size: str, num_tokens: int, dtype: torch.dtype, model_of: MakeModel
) -> None:
    model = model_of(size, dtype)
    ends = [start(model, num_tokens, seed) for seed in range(NUM_STARTS)]
    assert [each["status"] for each in ends] == ["passed"] * NUM_STARTS
    otherwise = [len(each["proved_with_deterministic_attention"]) for each in ends]
    print(size, num_tokens, dtype, "layers proved with deterministic attention:", otherwise)


FIRST_STEP = """
import sys
from pathlib import Path

import torch

import poros.api
from tests.gpu.test_attention_on_gpu import make_layers, start

model = make_layers("0.5B", torch.bfloat16, Path(sys.argv[1]))
if "unsettled" in sys.argv:
    poros.api.settle = lambda device: None
before = torch._C._get_sdp_priority_order()
print("status", start(model, 512, 0, self_check="warn")["status"])
print("changed", torch._C._get_sdp_priority_order() != before)
"""


@pytest.mark.parametrize("how", ["settled", "unsettled"])
def test_the_first_attention_of_a_process(how: str, tmp_path: Path) -> None:
    """It may change which kernel is chosen from then on: after some settings were captured."""
    done = run_python(FIRST_STEP, str(tmp_path), how)
    if how == "unsettled" and done.returncode:
        # The check warns, and the recomputation, which finds another kernel's tensors, refuses.
        assert "self-check failed" in done.stderr and "RematerializationError" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    is_wrong = how == "unsettled" and "changed True" in done.stdout
    assert f"status {'failed' if is_wrong else 'passed'}" in done.stdout, done.stdout


def after_acquire(patch: pytest.MonkeyPatch, act: Callable[[Slot, Phase], None]) -> None:
    genuine = BlockManager.acquire

    def acquire(self: BlockManager, block: int, phase: Phase) -> Slot:
        slot = genuine(self, block, phase)
        act(slot, phase)
        return slot

    patch.setattr(BlockManager, "acquire", acquire)


# Once in a backward it shows in gradients alone, which need not repeat themselves.
@pytest.mark.parametrize(
    ("phase", "times"), [(Phase.FORWARD, 1), (Phase.FORWARD, 1000), (Phase.BACKWARD, 1000)]
)
def test_a_fault_at_2048_tokens_is_found(
    phase: Phase, times: int, model_of: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("7B", torch.bfloat16)
    for seed in range(NUM_STARTS // 2):
        left = [times]

        def flip(slot: Slot, visited: Phase, left: list[int] = left) -> None:
            if slot.block == 1 and visited is phase and left[0]:
                left[0] -= 1
                slot.buffer[1000] ^= 0x0F

        with monkeypatch.context() as patch:
            after_acquire(patch, flip)
            with pytest.raises(ParityError, match=r"layers\.1: (output|gradient of)"):
                start(model, 2048, seed)


def test_wrong_gradients_at_2048_tokens_are_found(
    model_of: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange_saved_values(monkeypatch)
    model = model_of("7B", torch.bfloat16)
    for seed in range(NUM_STARTS // 2):
        with pytest.raises(ParityError, match="gradient of"):
            start(model, 2048, seed)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_promised_architectures_start_at_2048_tokens(architecture: str) -> None:
    model = tiny.make_model(
        architecture, num_layers=4, hidden_size=256, device="cuda", dtype=torch.bfloat16
    )
    for seed in range(3):
        found = start(model, 2048, seed)
        assert found["message"] is None and found["status"] in ("passed", "unproven")
        assert not found["not_provable"], found["not_provable"]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_tokens", [512, 4096])
def test_packed_attention(num_tokens: int, window: int | None) -> None:
    """It is that of a mask, rounded; deterministic kernels repeat themselves, and it is known that
    others need not."""
    torch.manual_seed(0)
    ends = [0, 100, 101, num_tokens - 30, num_tokens, num_tokens, num_tokens]
    module, bounds = torch.nn.Module(), torch.tensor(ends, dtype=torch.int32, device="cuda")
    given = [
        torch.randn(1, heads, num_tokens, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    ]
    upstream = torch.randn(1, num_tokens, 8, 128, device="cuda")

    def run(dtype: torch.dtype, deterministic: bool = False) -> tuple[list[Any], bool]:
        inputs = [each.to(dtype).requires_grad_() for each in given]
        with AttentionKernels(deterministic) as kernels:
            found, _ = attend_packed(
                module, *inputs, None, bounds, num_tokens, sliding_window=window
            )
        return [found, *torch.autograd.grad(found, inputs, upstream.to(dtype))], kernels.may_vary

    expected, _ = run(torch.float32)  # by a mask, as with a window
    found, varies = run(torch.bfloat16)
    assert varies
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).abs().max() < 2**-6 * other.abs().max()
    first, _ = run(torch.bfloat16, deterministic=True)
    for _ in range(10):
        again, _ = run(torch.bfloat16, deterministic=True)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()
