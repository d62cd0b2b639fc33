"""Visits recorded as CUDA graphs: the bits of eager ones and of a resident run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.gates import tiny

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
Model = Any


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [each.detach().contiguous().flatten().view(torch.uint8) for each in (left, right)]
    return left.dtype == right.dtype and torch.equal(*as_bytes)


def model_of(
    folder: Path,
    architecture: str = "qwen2",
    *,
    dtype: torch.dtype = BF16,
    dropout: float = 0.05,
    quantize: bool = True,
    **adapters: Any,
) -> Model:
    from peft import LoraConfig, get_peft_model

    checkpoint = folder / f"{architecture}-{dtype}"
    if not checkpoint.exists():
        config = tiny.small_config(architecture, num_layers=4, hidden_size=256)
        tiny.write_checkpoint(config, checkpoint, dtype=dtype)
    base = tiny.load_base(checkpoint, dtype=dtype, quantize=quantize, device="cuda")
    torch.manual_seed(0)
    options = {"r": 8, "lora_dropout": dropout, "target_modules": "all-linear", **adapters}
    model = get_peft_model(base, LoraConfig(**options)).train()
    generator = torch.Generator("cuda").manual_seed(1)
    for name, each in model.named_parameters():
        if "lora_B" in name:
            each.data.normal_(0, 0.02, generator=generator)
    return model


def trained(model: Model) -> list[Any]:
    return [each for each in model.parameters() if each.requires_grad]


def train(
    model: Model,
    num_steps: int = 8,
    accumulation: int = 1,
    autocast: bool = False,
    between: Callable[[Model, int], None] | None = None,
) -> list[torch.Tensor]:
    """Losses, gradients, adapters and random states; math attention, which repeats itself."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(2)
    facts = []
    for number in range(num_steps):
        for part in range(accumulation):
            length = (96, 64)[part % 2]
            tokens = torch.randint(0, 100, (2, length), generator=generator).cuda()
            with (
                sdpa_kernel(SDPBackend.MATH),
                torch.autocast("cuda", dtype=BF16, enabled=autocast),
            ):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / accumulation).backward()
            facts.append(loss.detach())
        facts += [each.grad.clone() for each in trained(model)]
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(model, number)
    facts += [each.detach().clone() for each in trained(model)]
    return [*facts, torch.cuda.get_rng_state()]


def replayed(model: Model, *args: Any, policy: Any = None, **kwargs: Any) -> list[torch.Tensor]:
    poros.prepare(
        model, loss="reference", cuda_graphs=True, **{"slots": 2, "keep_last": 0, **(policy or {})}
    )
    found = train(model, *args, **kwargs)
    runtime = poros.runtime(model)
    print(runtime.context.captures.num_replays, dict(runtime.context.captures.eager))
    assert runtime.self_check["status"] == "passed"
    assert runtime.stats()["num_replayed_visits"] > 0
    return found


def same_runs(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_replayed_equals_resident(
    dtype: torch.dtype, dropout: float, autocast: bool, accumulation: int, tmp_path: Path
) -> None:
    options: Any = {"dtype": dtype, "dropout": dropout}
    expected = train(model_of(tmp_path, **options), 8, accumulation, autocast)
    found = replayed(model_of(tmp_path, **options), 8, accumulation, autocast)
    assert same_runs(found, expected)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "phi3", "qwen3"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    expected = train(model_of(tmp_path, architecture))
    assert same_runs(replayed(model_of(tmp_path, architecture)), expected)


@pytest.mark.parametrize(
    "policy",
    [{"slots": 4}, {"block_size": 2}, {"offload_boundaries": True}, {"adapter_kernels": "peft"}],
    ids=str,
)
def test_every_policy(policy: dict[str, Any], tmp_path: Path) -> None:
    expected = train(model_of(tmp_path))
    assert same_runs(replayed(model_of(tmp_path), policy=policy), expected)


def test_dora(tmp_path: Path) -> None:
    resident = poros.use_adapter_kernels(model_of(tmp_path, use_dora=True))
    expected = train(resident)
    assert same_runs(replayed(model_of(tmp_path, use_dora=True)), expected)


def evaluate(model: Model, number: int) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8, device="cuda")[None])
    model.train()


def swap(model: Model, number: int) -> None:
    if number == 5:
        for each in trained(model):
            each.data = each.data * 1.5


@pytest.mark.parametrize("between", [evaluate, swap])
def test_what_comes_between(between: Callable[[Model, int], None], tmp_path: Path) -> None:
    expected = train(model_of(tmp_path), between=between)
    assert same_runs(replayed(model_of(tmp_path), between=between), expected)
