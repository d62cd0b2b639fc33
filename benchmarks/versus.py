"""The code of two checkouts on one GPU: whole steps, alternated.

    git archive v1 poros loaders gates benchmarks pyproject.toml README.md | tar -x -C /tmp/before
    python -m benchmarks.versus /tmp/before . --models qwen2.5-7b qwen2.5-32b --ways slots kept

One process for each checkout, with a model of its own; both are prepared and warm before either is
measured, and take turns of ``--steps`` steps. One row of 512 random tokens, random NF4 weights at
the true shapes, LoRA of rank 16 in float32, fused AdamW, self-check off. Times are from one device
synchronisation to the next. What is said of each way: the median and the least of each checkout,
the ratio of the second to the first, how many visits were replayed, and the peak of the allocator.

Ways: ``slots``: two slots; ``kept``: every layer keeps its graph; ``autocast``: two slots, the
model in bf16 autocast; ``recomputed``: two slots, nothing replayed; ``grouped``: two slots, eight
micro-batches that share their passes, the model's forward a bf16 region; ``alone``: the same one
after the other over blocks that are all on the GPU. With ``--liger`` the model has
Liger's kernels that ``poros finetune`` takes in that checkout.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAYS = ("slots", "kept", "autocast", "recomputed", "grouped", "alone")
NUM_GROUPED = 8


def policy_of(way: str, num_layers: int) -> dict[str, Any]:
    if way == "kept":
        return {"slots": num_layers, "keep_last": num_layers}
    if way == "alone":
        return {"slots": num_layers, "keep_last": 0}
    return {"slots": 2, "keep_last": 0} | ({"cuda_graphs": False} if way == "recomputed" else {})


def work(name: str, num_layers: int | None, has_liger: bool) -> None:
    """Of one checkout: answers each line of JSON on stdin with one on stdout."""
    import torch

    import poros
    from benchmarks.loops import make_optimizer
    from benchmarks.models import config_of, random_model, with_lora
    from benchmarks.work import Work, batch_of

    has_gpu = torch.cuda.is_available()  # without one the figures mean nothing, but it runs
    device = torch.device("cuda" if has_gpu else "cpu")
    synchronize = torch.cuda.synchronize if has_gpu else int
    config = config_of(name, num_layers)
    model = with_lora(random_model(config)).train()
    if has_liger:
        from poros.finetune.liger import use_liger

        use_liger(model)
    batch = batch_of(config.vocab_size, Work(1, 512), device)
    optimizer: Any = None
    answer(poros.__file__)
    for line in sys.stdin:
        order, value = json.loads(line)
        if order == "prepare":
            if optimizer is not None:
                poros.restore(model)
            way, optimizer = value, None
            torch.cuda.empty_cache()
            if has_gpu:
                torch.cuda.reset_peak_memory_stats()
            policy = policy_of(way, config.num_hidden_layers)
            poros.prepare(model, self_check="off", **policy)
            optimizer = make_optimizer(model)
            answer(None)
        elif order == "steps":
            times = []
            for _ in range(value):
                synchronize()
                began = time.perf_counter()
                if way in ("grouped", "alone"):
                    micro_batches(model, batch, way, device)
                else:
                    with torch.autocast(device.type, torch.bfloat16, enabled=way == "autocast"):
                        loss = model(**batch).loss
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                synchronize()
                times.append((time.perf_counter() - began) * 1e3)
            answer(times)
        else:
            stats = poros.runtime(model).stats()
            answer([stats["num_replayed_visits"], torch.cuda.max_memory_allocated() * has_gpu])


def micro_batches(model: Any, batch: dict[str, Any], way: str, device: Any) -> None:
    """Gradients of eight micro-batches; the model's forward is a bf16 region, as a Trainer's is."""
    import torch

    import poros

    batches = [{**batch, "use_cache": False} for _ in range(NUM_GROUPED)]
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    try:
        if way == "grouped":
            poros.accumulate(model, batches)
        else:
            for each in batches:
                (model(**each).loss / NUM_GROUPED).backward()
    finally:
        del model.forward


def answer(value: Any) -> None:
    print(json.dumps({"answer": value}), flush=True)


class Worker:
    """The process of one checkout."""

    def __init__(self, checkout: Path, name: str, num_layers: int | None, has_liger: bool) -> None:
        # This file may be younger than the checkout, whose modules it imports.
        path = [str(checkout), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._process: Any = subprocess.Popen(
            [sys.executable, __file__, "--work", name, str(num_layers or 0), str(int(has_liger))],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: str, value: Any = None) -> None:
        print(json.dumps([order, value]), file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        """The answer to the last order; other lines are what libraries print."""
        for line in self._process.stdout:
            if line.startswith('{"answer": '):
                return json.loads(line)["answer"]
        raise RuntimeError(f"the worker ended with exit code {self._process.wait()}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(workers: list[Worker], way: str, options: argparse.Namespace) -> dict[str, Any]:
    for order, value in (("prepare", way), ("steps", options.warm)):
        for worker in workers:
            worker.ask(order, value)
        for worker in workers:
            worker.hear()
    times: list[list[float]] = [[], []]
    for turn in range(options.turns):
        for place in (0, 1) if turn % 2 else (1, 0):
            workers[place].ask("steps", options.steps)
            times[place] += workers[place].hear()
    found = []
    for worker in workers:
        worker.ask("stats")
        found.append(worker.hear())
    medians, least = [statistics.median(each) for each in times], [min(each) for each in times]
    return {
        "median ms": medians,
        "least ms": least,
        "ratio of medians": medians[1] / medians[0],
        "ratio of least": least[1] / least[0],
        "replayed visits": [each[0] for each in found],
        "peak bytes": [each[1] for each in found],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.versus", description=__doc__)
    parser.add_argument("checkouts", nargs=2, type=Path, help="folders: the one before, the other")
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b"])
    parser.add_argument("--layers", type=int, help="fewer, for a first look")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["slots", "kept"])
    parser.add_argument("--warm", type=int, default=10, help="steps before the first turn")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    options = parser.parse_args(argv)
    for name in options.models:
        workers = [
            Worker(each.resolve(), name, options.layers, options.liger)
            for each in options.checkouts
        ]
        try:
            for worker in workers:
                print(f"# {worker.hear()}", flush=True)
            for way in options.ways:
                row = {"model": name, "way": way, **compare(workers, way, options)}
                print(json.dumps(row), flush=True)
        finally:
            for worker in workers:
                worker.end()
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]) or None, bool(int(sys.argv[4])))
    else:
        sys.exit(main())
