"""Small models with adapters on a GPU, what training makes of them, and equality of bits."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.gates import tiny

BF16 = torch.bfloat16
Model = Any


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    as_bytes = [each.detach().contiguous().flatten().view(torch.uint8) for each in (left, right)]
    return left.dtype == right.dtype and torch.equal(*as_bytes)


def same_runs(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def model_of(
    folder: Path,
    architecture: str = "qwen2",
    *,
    dtype: torch.dtype = BF16,
    dropout: float = 0.05,
    quantize: bool = True,
    num_layers: int = 4,
    hidden_size: int = 256,
    **adapters: Any,
) -> Model:
    """With adapters on all linear modules, whose B is not zero."""
    from peft import LoraConfig, get_peft_model

    checkpoint = folder / f"{architecture}-{dtype}-{num_layers}-{hidden_size}"
    if not checkpoint.exists():
        config = tiny.small_config(architecture, num_layers=num_layers, hidden_size=hidden_size)
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


def write_layers(folder: Path, num_layers: int, hidden_size: int = 1024, **fields: int) -> Path:
    """A checkpoint with layers of a real size; ``fields`` are those of its configuration."""
    config = tiny.small_config(
        "qwen2", num_layers=num_layers, hidden_size=hidden_size, dropout=0.05
    )
    for name, value in fields.items():
        setattr(config, name, value)
    tiny.write_checkpoint(config, folder, dtype=BF16)
    return folder


def trained(model: Model) -> list[Any]:
    return [each for each in model.parameters() if each.requires_grad]


def train(
    model: Model,
    num_steps: int = 8,
    size: int = 1,
    *,
    together: bool = False,
    lengths: tuple[int, ...] = (96, 64, 96, 33),
    autocast: bool = False,
    between: Callable[[Model, int], None] | None = None,
) -> list[torch.Tensor]:
    """Losses, gradients, adapters and random states; math attention, which repeats itself.

    Args:
        model: What is trained.
        num_steps: Of the optimizer.
        size: Micro-batches of a step.
        together: They go through the blocks together, else one after the other.
        lengths: Of their rows, in turn.
        autocast: To bfloat16.
        between: Called with the model and the number of the step that has ended.
    """

    def loss(model: Model, tokens: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cuda", dtype=BF16, enabled=autocast):
            found: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found / size

    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(2)
    facts: list[torch.Tensor] = []
    for number in range(num_steps):
        step = [
            torch.randint(0, 100, (2, lengths[place % len(lengths)]), generator=generator).cuda()
            for place in range(size)
        ]
        if together:
            facts += poros.accumulate(model, step, loss=loss)
        else:
            for tokens in step:
                value = loss(model, tokens)
                value.backward()
                facts.append(value.detach())
        facts += [each.grad.clone() for each in trained(model)]
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(model, number)
    facts += [each.detach().clone() for each in trained(model)]
    return [*facts, torch.cuda.get_rng_state(), torch.get_rng_state()]


def gradients(model: Model, autocast: bool = False, num_tokens: int = 300) -> dict[str, Any]:
    """Of one batch; the loss and the random state besides."""
    torch.manual_seed(5)
    tokens = torch.randint(0, 100, (2, num_tokens), device="cuda")
    with torch.autocast("cuda", dtype=BF16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach(), "random": torch.cuda.get_rng_state(), **found}


def assert_streamed(
    model: Model,
    expected: dict[str, Any],
    policies: Sequence[dict[str, Any]],
    *,
    repeats: int = 2,
    **options: Any,
) -> list[dict[str, Any]]:
    """Prepared with each policy in turn, its gradients are ``expected``, however often.

    With recorded visits, six are a checked step, two counted ones, a compared one and replays.

    Returns:
        Of each, the statistics, and how its self-check has ended.
    """
    found_stats = []
    for policy in policies:
        poros.prepare(model, **{"loss": "reference", **policy})
        for _ in range(repeats):
            assert differing(gradients(model, **options), expected) == []
        runtime = poros.runtime(model)
        found_stats.append({**runtime.stats(), "self_check": runtime.self_check["status"]})
        poros.restore(model)
    return found_stats


def requested() -> int:
    """Bytes allocated, without what the allocator adds to a block because the rest is small."""
    gc.collect()
    torch.cuda.synchronize()
    # Memory that another stream used is taken back at the next allocation, not when it is freed.
    torch.empty(1, device="cuda")
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    names = found.keys() | expected.keys()
    return sorted(name for name in names if not same(found.get(name), expected.get(name)))
