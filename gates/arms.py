"""Two arms from the same bytes: one resident, one streamed, and everything they recorded compared.

The model is built, run resident, freed, built again, checked to start from the same bytes,
prepared, and run by the same function. One model is alive at a time: the peak is one model and the
two trajectories, which lie in host memory (see ``poros.gates.reference``).

A gate is only worth its power to fail. An exception in an arm is a failure; so is a comparison that
could not have failed: a loss or gradient that is not finite, an adapter parameter without a
gradient, a layer that was not streamed. After a difference the resident arm is run once more,
because a machine that does not repeat its own results can show nothing about streaming.
"""

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import poros
from poros.errors import PorosError
from poros.gates.reference import (
    TrainingSpec,
    Trajectory,
    compare_steps,
    start_digests,
    train,
)
from poros.gates.report import ParityReport, environment

Prepare = Callable[..., Any]


def run_parity(
    make_model: Callable[[], torch.nn.Module],
    batches: Sequence[Mapping[str, torch.Tensor]],
    spec: TrainingSpec,
    prepare: Prepare | None = None,
    *,
    subject: str = "model",
    settings: Mapping[str, Any] | None = None,
    repeat_resident: bool = True,
    is_control: bool = False,
    as_resident: Prepare | None = None,
) -> ParityReport:
    """Train a model resident and streamed from the same bytes and compare the runs bit for bit.

    Args:
        make_model: Builds the model with its adapters; called once per arm, and has to give equal
            bytes each time. It must not keep the model, or two are alive at once.
        batches: Micro-batches, as ``poros.gates.reference.train`` takes them.
        prepare: Turns the second model into a streamed one; None is ``poros.prepare``. Tests pass
            their own to inject faults or another stream context.
        settings: More settings to keep in the report.
        repeat_resident: After a difference, train a third model resident and report whether it
            equals the first.
        is_control: The second arm is not streamed, on purpose; else that is a failure.
        as_resident: What is done to the resident model before it is trained; None is nothing.

    Returns:
        The report. A failure is in it, as differences or as ``error``; it is not raised.

    Raises:
        PorosError: If the resident model cannot be built because the request is wrong.
    """
    report = ParityReport(subject)
    report.settings = {**(settings or {}), "training": asdict(spec)}
    run_arm = partial(train, batches=batches, spec=spec)
    prepare = prepare or poros_prepare()
    try:
        model = make_model()
        report.environment = environment(
            next(each.device for each in model.parameters() if each.requires_grad)
        )
        start = start_digests(model)
        resident = run_arm(model if as_resident is None else as_resident(model))
    except PorosError:
        raise  # the request is wrong
    except Exception as error:
        return _failed(report, "resident", error)
    del model  # before the next one is built
    _release_memory()
    try:
        model = make_model()
        again = start_digests(model)
        others = [name for name in {**start, **again} if start.get(name) != again.get(name)]
        if others:
            report.error = (
                f"the two models start from different bytes in {len(others)} tensors, such as "
                f"{others[0]}"
            )
            return report
        model = prepare(model)
        streamed = run_arm(model)
        unstreamed = None
        if not is_control:
            runtime = poros.runtime(model)
            shape = {"num_blocks": runtime.num_blocks, "num_slots": runtime.num_slots}
            report.stats = {**shape, **runtime.stats()}
            unstreamed = _unstreamed(model, spec.num_steps * spec.accumulation)
    except Exception as error:
        return _failed(report, "streamed", error)
    del model
    _release_memory()
    for comparison in compare_steps(resident, streamed):
        report.add(*comparison)
    report.error = _vacuity(resident) or unstreamed
    if report.num_differences and repeat_resident:
        model = make_model()
        third = run_arm(model if as_resident is None else as_resident(model))
        report.resident_repeats = all(c.difference is None for c in compare_steps(resident, third))
    return report


def poros_prepare() -> Prepare:
    """Return ``poros.prepare`` with two slots and the bits of plain transformers, on record or not.

    The other arm is plain transformers. With the free memory of a GPU planned for it a small model
    would not stream at all. The gates are loaded without the runtime until an arm needs it.
    """
    from poros.api import prepare_with
    from poros.config import MIN_SLOTS, StreamingPolicy

    policy = StreamingPolicy(slots=MIN_SLOTS, loss="reference", adapter_kernels="exact")

    def prepare(model: Any, **overrides: Any) -> Any:
        return prepare_with(model, policy.override(**overrides), goes_by_records=False)

    return prepare


def _failed(report: ParityReport, arm: str, error: Exception) -> ParityReport:
    report.error = f"the {arm} arm raised {type(error).__name__}: {error}"
    report.traceback = traceback.format_exc()
    return report


def _vacuity(resident: Trajectory) -> str | None:
    """Say why an equality of this run would prove nothing; None if it would prove something."""
    losses = [loss for step in resident.steps for loss in step.losses]
    if not losses:
        return "the resident run recorded no loss, so there is nothing to compare"
    if not all(bool(torch.isfinite(loss)) for loss in losses):
        return "the resident run's loss is not finite, so equal bits would prove nothing"
    moved: dict[str, bool] = {}
    for step in resident.steps:
        for name, gradient in step.gradients.items():
            if not bool(torch.isfinite(gradient).all()):
                return f"the resident run's gradient of {name} is not finite in step {step.index}"
            moved[name] = moved.get(name, False) or bool(gradient.any())
    still = [name for name, has_moved in moved.items() if not has_moved]
    if still or not moved:
        return (
            f"{len(still)} of {len(moved)} adapter parameters ({', '.join(still[:3])}) only have "
            "zero gradients in the resident run, so equal bits would prove nothing about them"
        )
    return None


def _unstreamed(model: torch.nn.Module, num_passes: int) -> str | None:
    """Say what of the second arm was not streamed in so many passes; None if all of it was."""
    from poros.model.inspect import find_layers
    from poros.stream.boundary import is_streamed

    _, layers = find_layers(model)
    resident = sum(not is_streamed(layer) for layer in layers)
    if resident:
        return f"{resident} of {len(layers)} decoder layers of the streamed arm were not streamed"
    runtime = poros.runtime(model)
    num_loads, num_blocks = runtime.stats()["num_loads"], runtime.num_streamed_blocks
    if runtime.policy.self_check != "off":
        return None  # which loads blocks for itself
    # The first forward loads every block. Each later pass finds those in the slots at its turn.
    expected = num_blocks + (2 * num_passes - 1) * (num_blocks - runtime.num_slots)
    if num_loads != expected:
        return f"the streamed arm loaded {num_loads} blocks, a zigzag loads {expected}"
    return None


def _release_memory() -> None:
    """Give the memory of dropped models back, cycles included, so that the next one fits."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
