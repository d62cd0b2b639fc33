"""How long each order of a LoRA layer's products takes on a device."""

import statistics
import time
from typing import Any

import torch
from torch import nn

from poros.kernels.linear4bit import module_class
from poros.kernels.lora import Added, add_lora
from poros.kernels.ordered import InOrder, multiply_in_order
from poros.kernels.paths import PEFT, LoraShape, candidates
from poros.kernels.product import product_of

_WARM_UP = 3


def measure(shape: LoraShape, device: torch.device, passes: int) -> dict[str, Any]:
    """A row of the table that ``lora_paths="measured:..."`` reads, for random tensors of a shape.

    Candidates take turns, every other pass in reverse; the median counts, warm-up aside.

    Returns:
        ``layer``, ``tokens``, ``order`` (the quickest; of equals the first), and ``ms`` of each.
    """

    def normal(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype).requires_grad_()

    base, own = {"dtype": shape.base}, {"dtype": shape.adapters}
    kind: Any = module_class() if shape.is_4bit else nn.Linear
    options = {"compute_dtype": shape.base, "quant_type": "nf4"} if shape.is_4bit else {}
    module = kind(shape.columns, shape.rows, bias=False, **options).to(shape.base).to(device)
    module.requires_grad_(False).compute_type_is_set = True  # as after the first call
    input, arriving = (normal(shape.tokens, each, **base) for each in (shape.columns, shape.rows))
    a, b = normal(shape.rank, shape.columns, **own), normal(shape.rows, shape.rank, **own)
    product = product_of(module, input, leaves_out=True)
    if product is None:
        raise RuntimeError(f"expected a product that is known, found none for {shape}")
    how = Added(2.0, 0.05 * shape.has_dropout, shape.adapters, True, False)

    def once(order: str) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        if order == PEFT:
            sum_ = add_lora(product, input, a, b, None, how)
        else:
            sum_ = multiply_in_order(InOrder(order, product, how), input, a, b, None)
        torch.autograd.grad(sum_, (input, a, b), arriving.to(sum_.dtype))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) * 1e3

    times: dict[str, list[float]] = {order: [] for order in candidates(shape)}
    for number in range(_WARM_UP + passes):
        for order in list(times)[:: 1 if number % 2 else -1]:
            times[order].append(once(order))
    ms = {order: statistics.median(each[_WARM_UP:]) for order, each in times.items()}
    order = min(ms, key=ms.__getitem__)
    return {"layer": shape.layer, "tokens": shape.tokens, "order": order, "ms": ms}
