"""DoRA's composition and norm alone: time, memory and share of a copy's bandwidth.

    python -m benchmarks.dora compose --tokens 512 2048 8192
    python -m benchmarks.dora norm --ranks 16 64 384
    python -m benchmarks.dora model --tokens 512 4096 --ranks 16 384 --layers 4

Arms take turns, on the same random tensors: what PEFT computes, and what Poros does. A line of JSON
for each has the median time, the peak beyond its inputs, the bytes that have to be read and written
at least, and how fast they would be: a share of 1 is as fast as a copy of as many bytes, measured
in the same run. The weight is in bfloat16 and the adapters in float32, as in QLoRA. ``model`` times
forward and backward of a resident model over an NF4 base, with DoRA on the seven projections and a
loss of the last 64 tokens.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models import config_of, random_model, with_lora
from poros.kernels.adapters import KernelStats
from poros.kernels.compose import (
    compose,
    compose_backward,
    compose_backward_ref,
    compose_ref,
)
from poros.kernels.forwards import unpatch
from poros.kernels.row_norm import row_norm, row_norm_ref, square_of_rows, square_of_rows_ref
from poros.kernels.use import patch

Arm = Callable[[], Any]

SHAPES = ("3584x3584", "512x3584", "18944x3584", "3584x18944")
"""Of 7B's projections, as rows x columns."""
_SCALING = 0.5


def timed(run: Arm, device: torch.device) -> tuple[float, int]:
    """Milliseconds, and bytes at the peak beyond what there was."""
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start), 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The launches of what follows are queued behind this, so that the GPU does not wait for them.
    torch.cuda._sleep(1_000_000)
    first.record()
    made = run()
    last.record()
    torch.cuda.synchronize()
    del made
    return first.elapsed_time(last), torch.cuda.max_memory_allocated() - before


def measure(
    facts: dict[str, Any], arms: dict[str, tuple[Arm, int]], device: torch.device, passes: int
) -> None:
    """Print one line of JSON per arm.

    Args:
        facts: Of all arms.
        arms: By name; with the bytes that each has to read and write.
        device: Where they run.
        passes: How often each does.
    """
    most = max(num_bytes for _, num_bytes in arms.values())
    source, into = (torch.empty(most // 2, dtype=torch.uint8, device=device) for _ in range(2))
    every = dict(arms)
    if most:
        every["copy"] = (lambda: into.copy_(source)), 2 * (most // 2)
    times: dict[str, list[float]] = {name: [] for name in every}
    peaks: dict[str, int] = {}
    for number in range(passes + 3):
        for name, (run, _) in every.items():
            elapsed, peaks[name] = timed(run, device)
            if number >= 3:
                times[name].append(elapsed)
    medians = {name: statistics.median(found) for name, found in times.items()}
    of_copy = every["copy"][1] / medians["copy"] if most else 1.0
    for name, (_, num_bytes) in every.items():
        speed = num_bytes / medians[name]
        print(
            json.dumps(
                {
                    **facts,
                    "arm": name,
                    "ms": round(medians[name], 4),
                    "peak_mb": round(peaks[name] / 1e6, 2),
                    **({"bytes": num_bytes} if num_bytes else {}),
                    **({"gb_per_s": round(speed / 1e6, 1)} if num_bytes else {}),
                    **({"share_of_copy": round(speed / of_copy, 3)} if num_bytes else {}),
                }
            ),
            flush=True,
        )


def composition(rows: int, tokens: int, device: torch.device, passes: int) -> None:
    """Forward without and with what backward needs, and backward with the gradient of g."""
    torch.manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    result, gradient = normal(1, tokens, rows), normal(1, tokens, rows)
    lora = normal(1, tokens, rows, dtype=torch.float32)
    g = 1 + 1e-3 * normal(rows, dtype=torch.float32)
    leaves = [each.detach().requires_grad_() for each in (result, lora, g)]

    def peft(result: torch.Tensor, lora: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        # As PEFT 0.21 has it, with the base's result at hand and no bias.
        scale = g.view(1, -1)
        added = (scale - 1) * result + scale * lora * _SCALING
        return result + added.to(result.dtype)

    graph = peft(*leaves)
    _, inner = compose_ref(result, None, lora, g, _SCALING, wants_inner=True)

    def forward(run: Callable[..., Any], wants_inner: bool) -> Arm:
        return lambda: run(result, None, lora, g, _SCALING, wants_inner=wants_inner)

    def backward(run: Callable[..., Any]) -> Arm:
        dtypes = {"result_dtype": result.dtype, "lora_dtype": lora.dtype}
        return lambda: run(gradient, g, _SCALING, inner, has_base=False, **dtypes)

    number = result.numel()
    of_forward, of_inner, of_backward = (2 + 4 + 2) * number, 2 * number, (2 + 2 + 2 + 4) * number
    ways = {"eager": (compose_ref, compose_backward_ref)}
    if device.type != "cpu":
        ways["fused"] = compose, compose_backward
    arms: dict[str, tuple[Arm, int]] = {
        "PEFT forward": (lambda: peft(result, lora, g), of_forward),
        "PEFT backward": (
            lambda: torch.autograd.grad(graph, leaves, gradient, retain_graph=True),
            of_backward,
        ),
    }
    for name, (of_sum, of_gradient) in ways.items():
        arms[f"{name} forward"] = forward(of_sum, False), of_forward
        arms[f"{name} forward, inner"] = forward(of_sum, True), of_forward + of_inner
        arms[f"{name} backward"] = backward(of_gradient), of_backward
    measure({"rows": rows, "tokens": tokens}, arms, device, passes)


def norm(shape: tuple[int, int], rank: int, device: torch.device, passes: int) -> None:
    """The norm of each row, and the sum of squares that it needs once."""
    torch.manual_seed(0)
    rows, columns = shape
    dense = (0.02 * torch.randn(shape, device=device)).bfloat16()
    a = torch.randn(rank, columns, device=device) * columns**-0.5
    b = 0.01 * torch.randn(rows, rank, device=device)
    square = square_of_rows(dense)

    @torch.no_grad()
    def peft() -> torch.Tensor:
        # All of it in the adapters' dtype, to which its input was cast.
        eye = torch.eye(columns, device=device, dtype=a.dtype)
        product = torch.nn.functional.linear(torch.nn.functional.linear(eye, a), b).T
        return torch.linalg.norm(dense.to(a.dtype) + _SCALING * product, dim=1)

    @torch.no_grad()
    def whole_product() -> torch.Tensor:
        return torch.linalg.norm(dense.to(a.dtype) + _SCALING * (b @ a), dim=1)

    least = 2 * dense.numel() + 4 * (a.numel() + b.numel() + 2 * rows)
    arms: dict[str, tuple[Arm, int]] = {
        "PEFT": (peft, least),
        "B @ A": (whole_product, least),
        "reference": (lambda: row_norm_ref(dense, square, a, b, _SCALING), least),
        "Poros": (lambda: row_norm(dense, square, a, b, _SCALING), least),
        "reference, squares": (lambda: square_of_rows_ref(dense), 2 * dense.numel()),
        "Poros, squares": (lambda: square_of_rows(dense), 2 * dense.numel()),
    }
    measure({"shape": f"{rows}x{columns}", "rank": rank}, arms, device, passes)


def model(options: Any, rank: int, tokens: int) -> None:
    """Loss and gradients of a resident model: PEFT's modules, and ours."""
    name, layers, dropout = options.model, options.layers, options.dropout
    torch.manual_seed(0)
    config = config_of(name, layers)
    config._attn_implementation = "sdpa"
    adapted = with_lora(random_model(config).cuda(), rank, dropout, use_dora=True).train()
    given = torch.randint(0, 1000, (1, tokens), device="cuda")
    trained = [each for each in adapted.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(getattr(torch, options.adapters))

    def gradients() -> Any:
        # Of the last tokens alone, or the head would be most of what is measured.
        last = given[:, -64:]
        logits = adapted(input_ids=given, logits_to_keep=64).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), last.flatten())
        return torch.autograd.grad(loss, trained)

    def with_ours() -> Any:
        patch(adapted, torch.device("cuda"), KernelStats())
        try:
            return gradients()
        finally:
            unpatch(adapted.modules())

    arms: dict[str, tuple[Arm, int]] = {"PEFT": (gradients, 0), "ours": (with_ours, 0)}
    facts = {"model": name, "layers": layers, "rank": rank, "tokens": tokens, "dropout": dropout}
    facts["adapters"] = options.adapters
    measure(facts, arms, torch.device("cuda"), options.passes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.dora", description=__doc__)
    parser.add_argument("what", choices=["compose", "norm", "model"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="rows x columns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128, 384, 512, 768])
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--adapters", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    print(f"torch {torch.__version__}, {name}")
    shapes = [tuple(int(each) for each in shape.split("x")) for shape in options.shapes]
    if options.what == "compose":
        for rows in dict.fromkeys(rows for rows, _ in shapes):
            for tokens in options.tokens:
                composition(rows, tokens, device, options.passes)
        return
    if options.what == "model":
        for tokens in options.tokens:
            for rank in options.ranks:
                model(options, rank, tokens)
        return
    for rows, columns in shapes:
        for rank in options.ranks:
            norm((rows, columns), rank, device, options.passes)


if __name__ == "__main__":
    main()
