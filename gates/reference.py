"""The reference run: a plain PyTorch training loop that records everything it computes.

Nothing of Poros takes part. The same loop trains the resident model and, in the parity gate, the
streamed one, so whatever differs between two trajectories comes from the model alone. The loop is
the HF Trainer's step written out: autocast around the forward, backward outside it, clipping by the
global norm, AdamW. AdamW and clipping run one parameter at a time (no foreach, no fused kernel):
the choice would otherwise depend on the device and on the release of torch.

Everything recorded is copied to the CPU. A trajectory holds, for each step, five copies of the
adapter parameters: at rank 16 on a 7B model (40 million fp32 parameters) about 0.8 GB a step.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from poros.io.digests import digest
from poros.self_check.compare import Difference, bits, differing_or_absent

Digests = dict[str, bytes]
"""Digests of tensors (``poros.io.digests``) by name."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """Settings of one training run; both arms of a comparison take the same."""

    num_steps: int = 20
    """Optimizer steps."""

    accumulation: int = 1
    """Micro-batches per optimizer step; each loss is divided by it before backward."""

    lr: float = 1e-3
    """Constant learning rate of AdamW (betas 0.9 and 0.999, eps 1e-8, weight decay 0.01)."""

    max_grad_norm: float = 1.0
    """Global norm to which the gradients of a step are clipped."""

    autocast_dtype: torch.dtype | None = None
    """Run the forward under autocast to this dtype; None runs it as the model is."""

    seed: int = 0
    """Seed of every generator, set before the first step."""


@dataclass
class StepRecord:
    """What one optimizer step computed, on the CPU; the mappings are keyed by parameter name."""

    index: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    grad_norm: torch.Tensor | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    exp_avg: dict[str, torch.Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, torch.Tensor] = field(default_factory=dict)


class Entry(NamedTuple):
    """One recorded tensor: its quantity, and a name with step and parameter."""

    quantity: str
    name: str
    tensor: torch.Tensor


@dataclass
class Trajectory:
    """Everything that a run computed, in step order; ``extras`` is for other kinds of runs."""

    steps: list[StepRecord] = field(default_factory=list)
    rng_end_state: dict[str, torch.Tensor] = field(default_factory=dict)
    extras: list[Entry] = field(default_factory=list)

    def entries(self) -> Iterator[Entry]:
        """Yield every recorded tensor in step order; steps count from 0."""
        for step in self.steps:
            where = f"step {step.index}"
            for micro, loss in enumerate(step.losses):
                yield Entry("loss", f"{where}, loss of micro-batch {micro}", loss)
            norms = {} if step.grad_norm is None else {"grad norm": step.grad_norm}
            for quantity, what, found in (
                ("gradients", "gradient of ", step.gradients),
                ("grad norm", "", norms),
                ("adapter weights", "weight ", step.weights),
                ("exp_avg", "exp_avg of ", step.exp_avg),
                ("exp_avg_sq", "exp_avg_sq of ", step.exp_avg_sq),
            ):
                for name, tensor in found.items():
                    yield Entry(quantity, f"{where}, {what}{name}", tensor)
        for name, tensor in self.rng_end_state.items():
            yield Entry("RNG end state", f"end, RNG state of {name}", tensor)
        yield from self.extras


class Comparison(NamedTuple):
    """The outcome for one recorded tensor; ``difference`` is None when all bits agree."""

    quantity: str
    num_elements: int
    difference: Difference | None


def train(
    model: torch.nn.Module, batches: Sequence[Mapping[str, torch.Tensor]], spec: TrainingSpec
) -> Trajectory:
    """Train the trainable parameters of ``model`` in place and record every step.

    Args:
        model: A causal LM with adapters whose forward returns an object with ``loss``. It is put in
            training mode and stays there.
        batches: Keyword arguments of the model, one mapping per micro-batch, used in order and
            again from the start when they run out.

    Returns:
        The trajectory: the loss of every micro-batch before division, every gradient before
        clipping, the grad norm, adapter weights and AdamW moments after each step, and the states
        of the CPU generator and of the device's generator after the last step.

    Exactness:
        Two runs from equal bytes on one machine with one thread count are bitwise equal, as far as
        the device's own kernels are deterministic. The caller's random state is left as it was.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device, dtype = next(iter(trained.values())).device, spec.autocast_dtype
    on_gpu = device.type != "cpu"
    optimizer = torch.optim.AdamW(trained.values(), lr=spec.lr, foreach=False, fused=False)
    trajectory = Trajectory()
    python_state = random.getstate()
    with torch.random.fork_rng(devices=[device] if on_gpu else [], device_type=device.type):
        random.seed(spec.seed)
        torch.manual_seed(spec.seed)
        model.train()
        for index in range(spec.num_steps):
            record = StepRecord(index)
            optimizer.zero_grad(set_to_none=True)
            for micro in range(spec.accumulation):
                batch = batches[(index * spec.accumulation + micro) % len(batches)]
                inputs = {name: tensor.to(device) for name, tensor in batch.items()}
                with nullcontext() if dtype is None else torch.autocast(device.type, dtype):
                    loss = model(**inputs).loss
                (loss / spec.accumulation).backward()
                record.losses.append(snapshot(loss))
            record.gradients = {
                name: snapshot(each.grad) for name, each in trained.items() if each.grad is not None
            }
            norm = torch.nn.utils.clip_grad_norm_(
                trained.values(), spec.max_grad_norm, foreach=False
            )
            record.grad_norm = snapshot(norm)
            optimizer.step()
            state = adapter_state(trained, optimizer.state)
            record.weights, record.exp_avg, record.exp_avg_sq = state
            _reallocate_ranks(model, index, record.weights, trained)
            trajectory.steps.append(record)
        trajectory.rng_end_state["cpu"] = torch.get_rng_state()
        if on_gpu:
            generator = torch.get_device_module(device)
            trajectory.rng_end_state[device.type] = generator.get_rng_state(device)
    random.setstate(python_state)
    return trajectory


def compare_steps(expected: Trajectory, found: Trajectory) -> Iterator[Comparison]:
    """Compare two trajectories tensor by tensor, in step order.

    Yields:
        One ``Comparison`` per recorded tensor of ``expected``, then one per tensor that only
        ``found`` has.
    """
    found_entries = {entry.name: entry for entry in found.entries()}
    for quantity, name, tensor in expected.entries():
        other = found_entries.pop(name, None)
        difference = differing_or_absent(tensor, other and other.tensor, name)
        yield Comparison(quantity, tensor.numel(), difference)
    for quantity, name, tensor in found_entries.values():
        yield Comparison(quantity, tensor.numel(), differing_or_absent(None, tensor, name))


def start_digests(model: torch.nn.Module) -> Digests:
    """Hash all that a run starts from.

    The state dict has the packed weights, their scales and the adapters; buffers that are not saved
    (rotary frequencies) are added. Tensors are hashed one at a time, so no second copy of the model
    exists.
    """
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    return {
        name: digest(bits(tensor).cpu().contiguous())
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }


def adapter_state(
    trained: Mapping[str, torch.nn.Parameter], optimizer_state: Mapping[Any, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Copy the trained weights and their first and second moments to the CPU, by name.

    A parameter that never got a gradient has no moments; a comparison then sees none.
    """
    weights = {name: snapshot(parameter) for name, parameter in trained.items()}
    states = {name: optimizer_state.get(parameter, {}) for name, parameter in trained.items()}
    first, second = (
        {name: snapshot(state[key]) for name, state in states.items() if key in state}
        for key in ("exp_avg", "exp_avg_sq")
    )
    return weights, first, second


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU, without its graph; the host waits for the copy."""
    return tensor.detach().to("cpu", copy=True)


def _reallocate_ranks(
    model: torch.nn.Module,
    index: int,
    weights: dict[str, torch.Tensor],
    trained: Mapping[str, torch.nn.Parameter],
) -> None:
    """Let AdaLoRA cut ranks, as its users do after each step, and record what it leaves."""
    reallocate = getattr(getattr(model, "base_model", None), "update_and_allocate", None)
    if callable(reallocate):
        reallocate(index)
        weights.update({name: snapshot(parameter) for name, parameter in trained.items()})
