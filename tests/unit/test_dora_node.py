"""DoRA by one node: against exact arithmetic and against PEFT's modules, within derived bounds.

Bounds are those of ``rounding``; what is computed in the model's dtype has its unit, the rest
float32's.
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
from tests.unit.rounding import UNITS, exact, shares, sizes

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
TOKENS = (2, 5)


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


def input_of(module: Any, tokens: tuple[int, ...] = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(*tokens, module.in_features, generator=generator)
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


def formula(
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    mask: torch.Tensor,
    scaling: torch.Tensor,
    minus_one: torch.Tensor,
) -> list[torch.Tensor]:
    g, dropped = magnitude / norm, input * mask
    delta = (g + minus_one) * (dropped @ weight.T) + g * (scaling * (dropped @ a.T @ b.T))
    return [input @ weight.T + bias + delta]


def exact_and_bounds(
    module: Any, mask: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``outcome`` in float64, and how far rounding may take each part of it from that."""
    input, weight, (a, b, _) = input_of(module), dense_of(module).double(), trained(module)
    unit, scaling = UNITS[input.dtype], torch.tensor(module.scaling["default"]).double()
    signed = weight + scaling * (b @ a).double()
    norm = signed.norm(dim=1).detach()
    bias = module.base_layer.bias
    mask = torch.ones(()) if mask is None else mask
    frozen = [weight, torch.zeros(()) if bias is None else bias, norm, mask, scaling]
    frozen.append(torch.tensor(-1.0))
    arriving = torch.randn((*TOKENS, len(weight)), generator=torch.Generator().manual_seed(2))
    given = formula, (input, *trained(module)), frozen, [arriving.to(input.dtype)]
    num_terms = sum(weight.shape) + len(a) + 16
    # Squares of the norm's terms: what cancels in them is part of the norm's own error.
    terms = (weight.abs() + scaling.abs() * (b.abs() @ a.abs()).double()).norm(dim=1).detach()
    of_norm = num_terms * UNITS[FP32] * float((terms / norm).max()) ** 2
    off = 2 * (num_terms * UNITS[FP32] + 4 * unit) + of_norm
    return exact(*given), [1.5 * off * each + 1e-300 for each in sizes(*given)]


def require_within(found: list[torch.Tensor], module: Any, mask: Any = None) -> None:
    worst = shares(found, *exact_and_bounds(module, mask))
    assert max(worst) <= 1, worst


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


def test_control_a_scaling_that_is_off_is_not_within_rounding() -> None:
    module = adapted()
    found = ours(module)
    module.scaling["default"] *= 1.01
    with pytest.raises(AssertionError):
        require_within(found, module)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_is_within_rounding_of_exact_arithmetic_and_of_peft(kind: str, dropout: float) -> None:
    """PEFT's own distance from exact arithmetic is bounded alike; its norm is a 16-bit number."""
    module = adapted(**KINDS[kind], dropout=dropout)
    expected, found = outcome(module, module), ours(module)
    torch.manual_seed(3)
    mask = nn.functional.dropout(torch.ones(input_of(module).shape), dropout).double()
    assert bool((mask == 0).any()) == (dropout > 0)
    require_within(found, module, mask)
    unit = 8 * UNITS[input_of(module).dtype]
    true_and_bounds = exact_and_bounds(module, mask)
    for ours_, theirs, true, bound in zip(found, expected, *true_and_bounds, strict=True):
        assert ours_.dtype == theirs.dtype and ours_.shape == theirs.shape
        distance = (ours_.double() - theirs.double()).abs()
        assert bool((distance <= 3 * bound + unit * true.abs()).all())


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
