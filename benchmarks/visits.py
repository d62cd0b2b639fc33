"""Host time of a layer visit: what streaming costs beside the layer's own forward and backward.

    python -m benchmarks.visits [--device cuda] [--layers 8] [--rounds 40] [--out visits.csv]
    python -m benchmarks.visits --profile

A qwen2 decoder of real structure (NF4, LoRA on the seven projections) and next to no arithmetic, so
that a step takes as long as the host needs to queue it. The arms hold the same bytes and take turns
step by step, so a slow spell of the machine hits all of them:

    bare           the base on the device, nothing recomputed
    checkpointed   the same under torch.utils.checkpoint, non-reentrant
    recomputed     the same under the least Function that recomputes: no state kept, nothing checked
    all slots      Poros, a slot for each block: nothing is loaded in a warm step
    two slots      Poros, two slots: nearly every visit queues a copy
    replayed       Poros, a slot for each block, visits replayed from CUDA graphs; on a GPU only

Times are per layer: those of the step's forward and backward on the host, over the number of
layers. On a GPU the host waits for the device before a step and after it, not within; on a CPU the
copies of two slots are part of the time. An excess is the median, over the rounds, of the
difference to another arm *in the same round*: the forward's to bare, the backward's to bare plus
one bare forward (the recomputation), and that of both together to checkpointed. The excess of
"recomputed" is that of any recomputation: a Function, a graph that is built and dropped. Beside
each median stands the same of the shortest times, which noise can only have lengthened.
"""

import argparse
import copy
import cProfile
import csv
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import poros
from benchmarks.models import random_nf4, with_lora

BARE, CHECKPOINTED, RECOMPUTED = "bare", "checkpointed", "recomputed"
ALL_SLOTS, TWO_SLOTS, REPLAYED = "all slots", "two slots", "replayed"
ARMS = (BARE, CHECKPOINTED, RECOMPUTED, ALL_SLOTS, TWO_SLOTS, REPLAYED)


class Times(NamedTuple):
    """Host time of one step, per layer, in ms."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def small_model(num_layers: int, rank: int) -> Any:
    """A qwen2 with nothing left out but size."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attention_dropout=0.0,
    )
    config._attn_implementation = "sdpa"
    return with_lora(random_nf4(config), rank)


class Recompute(torch.autograd.Function):
    """A layer of one input and one output, recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Any], Any], hidden: torch.Tensor, *adapters: torch.Tensor
    ) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(hidden, *adapters)
        with torch.enable_grad():
            output: torch.Tensor = run(hidden.detach().requires_grad_())
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden, *adapters = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(hidden)
        return (None, *torch.autograd.grad(output, [hidden, *adapters], gradient))


def recompute(layer: Any, adapters: list[Any], hidden: torch.Tensor, **kwargs: Any) -> Any:
    """The forward of ``layer``, recomputed in backward."""
    run = partial(type(layer).forward, layer, **kwargs)
    return Recompute.apply(run, hidden, *adapters)


def arm_of(model: Any, name: str, device: torch.device, num_layers: int) -> Any:
    """A copy of ``model``, set up as arm ``name``."""
    made = copy.deepcopy(model).train()
    if name in (BARE, CHECKPOINTED, RECOMPUTED):
        made.to(device)
        if name == RECOMPUTED:
            for layer in made.base_model.model.model.layers:
                adapters = [
                    parameter for parameter in layer.parameters() if parameter.requires_grad
                ]
                layer.forward = partial(recompute, layer, adapters)
        if name == CHECKPOINTED:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        return made
    slots = 2 if name == TWO_SLOTS else num_layers
    return poros.prepare(
        made,
        device=str(device),
        slots=slots,
        self_check="off",
        cuda_graphs=name == REPLAYED,
        loss="reference",
    )


class Steps:
    """Steps of one arm on the same tokens.

    Args:
        model: From ``arm_of``.
        num_tokens: Length of the one sequence.
        device: Where it runs.
        num_layers: What times are divided by.
    """

    def __init__(self, model: Any, num_tokens: int, device: torch.device, num_layers: int) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 512, (1, num_tokens), generator=generator).to(device)
        self._batch = {"input_ids": tokens, "labels": tokens}
        self._wait: Callable[[], None] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )
        self._scale = 1e3 / num_layers
        self.loss = float("nan")

    def run(self) -> Times:
        """One forward and backward."""
        self._model.zero_grad()
        self._wait()
        began = time.perf_counter()
        loss = self._model(**self._batch).loss
        turned = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        self._wait()
        self.loss = loss.item()
        return Times((turned - began) * self._scale, (ended - turned) * self._scale)


def excesses(bare: Times, checkpointed: Times, arm: Times) -> dict[str, float]:
    """What ``arm`` took more, in ms per layer, in one round."""
    return {
        "forward over bare": arm.forward - bare.forward,
        "backward over bare + recomputation": arm.backward - bare.backward - bare.forward,
        "both over checkpointed": arm.both - checkpointed.both,
    }


def spread(values: list[float]) -> str:
    """Median and quartiles, in microseconds."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle * 1e3:6.0f}  ({low * 1e3:.0f} to {high * 1e3:.0f})"


def report(rounds: dict[str, list[Times]]) -> Iterator[str]:
    """The table, in microseconds per layer."""
    bare = statistics.median(step.both for step in rounds[BARE])
    yield "us per layer, median (quartiles), least"
    for name, times in rounds.items():
        forward, backward = ([step[i] for step in times] for i in (0, 1))
        ratio = statistics.median(step.both for step in times) / bare
        yield (
            f"{name:>12}  forward {spread(forward):<22} {min(forward) * 1e3:6.0f}  "
            f"backward {spread(backward):<22} {min(backward) * 1e3:6.0f}  {ratio:.3f} x bare"
        )
    least = {name: Times(*map(min, zip(*times, strict=True))) for name, times in rounds.items()}
    for name in list(rounds)[1:]:
        differences = [
            excesses(*of_round)
            for of_round in zip(rounds[BARE], rounds[CHECKPOINTED], rounds[name], strict=True)
        ]
        for key, of_least in excesses(least[BARE], least[CHECKPOINTED], least[name]).items():
            middle = spread([of_round[key] for of_round in differences])
            yield f"{name:>12}  {key:<36} {middle:<22} {of_least * 1e3:6.0f}"


def profile(steps: Steps, num_steps: int) -> None:
    """Print in which functions the time of an arm goes, backward included."""
    profiler = cProfile.Profile()
    # Else the backward on a GPU runs on a thread that the profiler does not see.
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(num_steps):
            steps.run()
        profiler.disable()
    stats = pstats.Stats(profiler)
    stats.sort_stats("tottime").print_stats(45)
    stats.sort_stats("cumtime").print_stats(r"poros/")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument(
        "--profile", nargs="?", const=ALL_SLOTS, choices=ARMS, help="where an arm's time goes"
    )
    parser.add_argument("--out", type=Path, help="one line per arm and round")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    model = small_model(options.layers, options.rank)
    if options.profile:
        made = arm_of(model, options.profile, device, options.layers)
        steps = Steps(made, options.tokens, device, options.layers)
        for _ in range(options.warm):
            steps.run()
        profile(steps, options.rounds)
        return 0
    arms = {
        name: Steps(
            arm_of(model, name, device, options.layers), options.tokens, device, options.layers
        )
        for name in ARMS
        if name != REPLAYED or device.type == "cuda"
    }
    rounds: dict[str, list[Times]] = {name: [] for name in arms}
    for number in range(options.warm + options.rounds):
        for name, steps in arms.items():
            times = steps.run()
            if number >= options.warm:
                rounds[name].append(times)
    if len({steps.loss for steps in arms.values()}) != 1:
        raise RuntimeError(f"expected equal losses, found {[s.loss for s in arms.values()]}")
    print(f"torch {torch.__version__}, poros {poros.__version__}, {vars(options)}")
    for line in report(rounds):
        print(line)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", newline="") as file:
            writer = csv.writer(file)
            for name, times in rounds.items():
                writer.writerows([name, n, *map("{:.5f}".format, t)] for n, t in enumerate(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
