"""DoRA by one node, against PEFT's modules: within rounding, and without their dense copies.

How near the norm is to exact arithmetic is seen in ``test_row_norm``, the composition in
``test_compose``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import nn

from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import unpatch
from poros.kernels.use import patch
from tests.operators import made_by
from tests.unit.rounding import UNITS

BF16, FP32 = torch.bfloat16, torch.float32


class Model(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.linear = module

    def forward(self, input: torch.Tensor) -> Any:
        return self.linear(input)


def adapted(
    rows: int = 24,
    columns: int = 40,
    *,
    dtype: torch.dtype = FP32,
    quantize: bool = False,
    bias: bool = True,
    rank: int = 4,
    scaling: float = 0.5,
    dropout: float = 0.0,
    zero_b: bool = False,
    nudge: float = 0.2,
) -> Any:
    """A module of PEFT's with DoRA, whose magnitude is not the norm."""
    torch.manual_seed(0)
    base: nn.Module = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    if quantize:
        weight = base.state_dict()
        base = Linear4bit(columns, rows, bias=bias, compute_dtype=dtype, quant_type="nf4")
        base.load_state_dict(weight)
        base = base.to(dtype).to("cpu")
        base.compute_type_is_set = True
    config = LoraConfig(
        r=rank,
        lora_alpha=scaling * rank,
        lora_dropout=dropout,
        target_modules=["linear"],
        use_dora=True,
    )
    module = get_peft_model(Model(base), config).base_model.model.linear
    with torch.no_grad():
        if not zero_b:
            module.lora_B.default.weight.normal_(0, 0.1)
        magnitude = module.lora_magnitude_vector.default.weight
        magnitude.data = (magnitude.float() * (1 + nudge * torch.rand(rows))).to(FP32)
    return module.train()


def dense_of(module: Any) -> torch.Tensor:
    from peft.utils.integrations import dequantize_module_weight

    weight: torch.Tensor = dequantize_module_weight(module.base_layer).detach()
    return weight


def trained(module: Any) -> list[torch.Tensor]:
    return [
        module.lora_A.default.weight,
        module.lora_B.default.weight,
        module.lora_magnitude_vector.default.weight,
    ]


def input_of(module: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(2, 5, module.in_features, generator=generator)
    dtype = module.base_layer.compute_dtype if hasattr(module.base_layer, "compute_dtype") else None
    return values.to(dtype or module.base_layer.weight.dtype)


def outcome(run: Callable[[torch.Tensor], torch.Tensor], module: Any) -> list[torch.Tensor]:
    """The sum, and the gradients of input, A, B and the magnitude."""
    input = input_of(module).requires_grad_()
    torch.manual_seed(3)
    sum_ = run(input)
    arriving = torch.randn(sum_.shape, generator=torch.Generator().manual_seed(2)).to(sum_.dtype)
    wanted = [each for each in (input, *trained(module)) if each.requires_grad]
    return [sum_.detach(), *torch.autograd.grad(sum_, wanted, arriving)]


def ours(module: Any) -> list[torch.Tensor]:
    tally = KernelStats()
    patch(module, torch.device("cpu"), tally)
    try:
        found = outcome(module, module)
    finally:
        unpatch(module.modules())
    assert tally.num_fused == 1 and not tally.unfused
    return found


def distances(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Of the sum and of each gradient, by its own size."""
    pairs = [(each.double(), other.double()) for each, other in zip(found, expected, strict=True)]
    return [float((each - other).norm() / (other.norm() + 1e-30)) for each, other in pairs]


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": BF16},
    "fp16": {"dtype": torch.float16},
    "nf4": {"dtype": BF16, "quantize": True, "columns": 64},
    "no bias": {"bias": False},
    "rank 1": {"rank": 1},
    "more ranks than columns": {"rank": 48},
    "rank 768": {"rank": 768, "dtype": BF16},
    "wide": {"rows": 8, "columns": 160},
    "tall": {"rows": 160, "columns": 8},
    "zero B": {"zero_b": True},
    "zero scaling": {"scaling": 0.0},
    "near one": {"nudge": 1e-4, "dtype": BF16},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_is_within_rounding_of_peft(kind: str, dropout: float) -> None:
    """Whose norm is a number of the model's dtype. Control: a scaling that is off is not."""
    module = adapted(**KINDS[kind], dropout=dropout)
    expected, found = outcome(module, module), ours(module)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    # Of what is computed in float32 and rounded once, or in the model's dtype all along.
    dtype = input_of(module).dtype
    most = UNITS[dtype] * (8 if dtype is FP32 else 1)
    assert max(distances(found, expected)) <= most
    module.scaling["default"] *= 1.1
    assert not module.scaling["default"] or max(distances(ours(module), expected)) > most


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_nothing_is_as_large_as_the_weight_but_the_weight(dropout: float) -> None:
    """Forward and backward make one dense projection each; PEFT makes many."""
    module = adapted(512, 640, dtype=BF16, quantize=True, dropout=dropout)

    def num_large(run: Callable[[], object]) -> int:
        return sum(each.numel() >= 512 * 640 for each in made_by(run))

    patch(module, torch.device("cpu"), KernelStats())
    # The norm of the weight alone is taken once, in parts; it is there afterwards.
    module(input_of(module))
    fused = num_large(lambda: outcome(module, module))
    unpatch(module.modules())
    # bitsandbytes' unpacking on a CPU makes several of them, one after the other.
    allowed = num_large(lambda: dense_of(module))
    assert fused // 2 <= allowed + 1, (fused, allowed)
    assert num_large(lambda: outcome(module, module)) > fused
