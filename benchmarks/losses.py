"""Head and loss alone, forward and backward: memory, time, and distance from the exact gradient.

    python -m benchmarks.losses qwen2.5-7b --tokens 512 8192

Arms take turns, on the same random hidden states, head and labels: the model's own (whole logits,
cast to float32), those of Poros with the head on the device and in host memory, and, where they are
installed, Liger's fused loss and PyTorch's ``linear_cross_entropy``. The peak is what an arm
allocates beyond its inputs. Distances are relative, from gradients of whole logits in float32.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.models import config_of
from poros.cuda_streams import streams_for
from poros.head.loss import Slices, sliced_cross_entropy
from poros.head.slices import SliceReader

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of hidden states, the head and labels; the mean over tokens."""


def whole(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), labels)


def rows_of(head: torch.Tensor, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(0, len(head), width):
        yield first, head[first : first + width]


def sliced(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, read: Slices | None = None
) -> torch.Tensor:
    total = sliced_cross_entropy(hidden, labels, read or partial(rows_of, head), len(head))
    return total / len(labels)


def arms_for(head: torch.Tensor) -> dict[str, Loss]:
    """By name; the others of those that are installed."""
    reader = SliceReader("head", head.cpu().pin_memory(), streams_for(head.device))
    arms: dict[str, Loss] = {
        "whole logits": whole,
        "Poros, head on the device": sliced,
        "Poros, head in host memory": partial(sliced, read=reader),
    }
    if hasattr(F, "linear_cross_entropy"):
        arms["torch.nn.functional.linear_cross_entropy"] = F.linear_cross_entropy
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return arms
    liger = LigerFusedLinearCrossEntropyLoss()
    arms["Liger"] = lambda hidden, head, labels: liger(head, hidden, labels)
    return arms


def exact_gradient(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, width: int = 256
) -> torch.Tensor:
    """That of float32 products and logits, some tokens at a time."""
    head, parts = head.float(), []
    for first in range(0, len(hidden), width):
        part = hidden[first : first + width].float().requires_grad_()
        loss = F.cross_entropy(part @ head.T, labels[first : first + width], reduction="sum")
        parts.append(torch.autograd.grad(loss / len(labels), part)[0])
    return torch.cat(parts)


def measure(name: str, num_tokens: int, passes: int) -> None:
    """Print one line of JSON per arm."""
    config = config_of(name)
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    shape = config.vocab_size, config.hidden_size
    head = (0.02 * torch.randn(shape, device=device)).bfloat16()
    hidden = torch.randn(num_tokens, shape[1], device=device).bfloat16().requires_grad_()
    labels = torch.randint(0, shape[0], (num_tokens,), device=device)
    exact = exact_gradient(hidden.detach(), head, labels)
    arms = arms_for(head)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    facts: dict[str, dict[str, float]] = {}
    for number in range(passes + 2):
        for arm, loss in arms.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            (gradient,) = torch.autograd.grad(loss(hidden, head, labels), hidden)
            end.record()
            torch.cuda.synchronize()
            if number >= 2:
                times[arm].append(start.elapsed_time(end))
            distance = (gradient.float() - exact).norm() / exact.norm()
            peak = torch.cuda.max_memory_allocated() - before
            facts[arm] = {"peak_gb": peak / 1e9, "distance": float(distance)}
    for arm, found in facts.items():
        print(
            json.dumps(
                {
                    **{"model": name, "tokens": num_tokens, "arm": arm},
                    "ms": round(statistics.median(times[arm]), 2),
                    "peak_gb": round(found["peak_gb"], 4),
                    "distance": float(f"{found['distance']:.3g}"),
                }
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.losses", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for num_tokens in options.tokens:
        measure(options.model, num_tokens, options.passes)


if __name__ == "__main__":
    main()
