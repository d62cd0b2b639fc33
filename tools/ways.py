"""Small models of many families in the ways that people train them, each beside a resident run.

    python -m tools.ways olmo2 gemma4
    python -m tools.ways --device cuda --jobs 12

LoRA with dropout over NF4, bf16 autocast around the model and its loss, six steps of four padded
micro-batches: with two slots, with all layers kept, and with micro-batches that go together, their
inputs on the device or on the host. Losses and adapters are compared bit for bit. On a CPU visits
are recorded on tapes, so that they are replayed there too. A line of each family says what differs
or raises, and what did not go the quick way.
"""

import argparse
import gc
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

import poros
from poros.api import prepare_with
from poros.gates import tiny
from tools.sweep import architectures
from tools.tape import TapeRecorder

NUM_STEPS, NUM_TOGETHER = 6, 4
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "two slots": (False, {}),
    "all kept": (False, {"slots": 6, "keep_last": 6}),
    "together": (True, {}),
    "together, inputs on the host": (True, {"offload_boundaries": True}),
}
"""Whether micro-batches go together, and a policy."""
Facts = list[torch.Tensor]


def train(model: Any, device: str, is_together: bool) -> Facts:
    """Losses of each micro-batch, then the adapters."""
    model.train()
    torch.manual_seed(5)
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    batches = tiny.make_batches(NUM_STEPS * NUM_TOGETHER)

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        on_device = {name: each.to(device) for name, each in batch.items()}
        with torch.autocast(device, torch.bfloat16):
            found: torch.Tensor = model(**on_device, use_cache=False).loss / NUM_TOGETHER
        return found

    facts: Facts = []
    for start in range(0, len(batches), NUM_TOGETHER):
        step = batches[start : start + NUM_TOGETHER]
        if is_together:
            facts += poros.accumulate(model, step, loss=loss)
        else:
            for batch in step:
                facts.append(loss(model, batch))
                facts[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().cpu().clone() for each in (*facts, *adapters)]


def made(name: str, device: str, dropout: float) -> Any:
    """The model; families that share keys and values need several layers."""
    number = 6 if "gemma4" in name else 3
    return tiny.make_model(name, num_layers=number, hidden_size=64, dropout=dropout, device=device)


def look(name: str, device: str, change: Callable[[Any], object] = lambda model: None) -> str:
    """What comes of one family, in a line.

    Args:
        name: An architecture, or a ``model_type`` of transformers.
        device: ``cpu`` or ``cuda``.
        change: Is done to each prepared model; for a control.
    """
    dropout = 0.05
    try:
        try:
            expected = train(made(name, device, dropout), device, False)
        except Exception:  # some families cannot have dropout in their adapters
            dropout = 0.0
            expected = train(made(name, device, dropout), device, False)
    except Exception as error:
        return f"not trained: {type(error).__name__}: {str(error)[:80]}"
    ends, fallbacks, num_replays = [], dict[str, None](), []
    for way, (is_together, policy) in WAYS.items():
        recorder = TapeRecorder() if device == "cpu" else None
        usual = {"slots": 2, "device": device, "loss": "reference", "adapter_kernels": "fused"}
        chosen = poros.StreamingPolicy(**{**usual, **policy})
        try:
            model = made(name, device, dropout)
            prepare_with(model, chosen, recorder=recorder, goes_by_records=False)
            change(model)
            found = train(model, device, is_together)
        except Exception as error:
            ends.append(f"{way}: {type(error).__name__}: {str(error)[:100]}")
            continue
        number = sum(not torch.equal(*pair) for pair in zip(found, expected, strict=True))
        ends += [f"{way}: {number} of {len(found)} tensors differ"] if number else []
        stats = poros.runtime(model).stats()
        fallbacks |= dict.fromkeys(each[:100] for each in stats["fallbacks"])
        num_replays.append(stats["num_replayed_visits"])
        del model, found
        gc.collect()
    verdict = "; ".join(ends) or "equal"
    return f"{verdict} (visits replayed: {num_replays}{''.join(f'; {each}' for each in fallbacks)})"


def begin_process() -> None:
    """Have a process of its own take one core and print nothing but errors."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def main(arguments: Sequence[str] | None = None) -> None:
    """Look at families, and print how many are equal in all ways."""
    parser = argparse.ArgumentParser(prog="tools.ways", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures or model types; all if none")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    names = options.names or architectures()
    context = multiprocessing.get_context("spawn")
    settings: Any = {"initializer": begin_process, "max_tasks_per_child": 1}
    with ProcessPoolExecutor(options.jobs, context, **settings) as pool:
        found = list(pool.map(partial(look, device=options.device), names))
    for name, line in zip(names, found, strict=True):
        print(f"{name}: {line}")
    print(f"{sum(line.startswith('equal') for line in found)} of {len(names)} equal in all ways")


if __name__ == "__main__":
    main()
