"""FLORA: gradient accumulation and momentum in randomly projected form, as a PyTorch optimizer.

Hao, Cao and Mou, "FLORA: Low-Rank Adapters Are Secretly Gradient Compressors", ICML 2024. A
gradient G [n, m] is kept as G A' [n, rank] and comes back as G A' A. A has random entries of
variance 1 / rank and is made again from its seed whenever it is needed. It changes from cycle to
cycle, so the sum of updates has a rank above ``rank``, unlike LoRA's.
"""

import math
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from poros.errors import OptimizerError
from poros.optim.projection import Projection, Stream, normal_quantiles, round_stochastically

_IN_A_LAYER = re.compile(r"\.\d+\.")
_NAIVE = re.compile(r"embed|relative_attention_bias|lm_head|(^|\.)(wte|wpe|shared)\.")
_UNSET: Any = object()

Named = Sequence[tuple[str, torch.nn.Parameter]]


def divergence_bound(width: int, rank: int, momentum: float) -> float:
    """The ``kappa`` at and below which momentum is expected to grow without bound.

    A resampling multiplies the expected square of the decompressed norm by 1 + (width + 1) / rank,
    and the updates between two of them by momentum ** (2 * kappa).
    """
    return math.log(1 + (width + 1) / rank) / (2 * math.log(1 / momentum))


@dataclass(eq=False)
class _Matrix:
    """One parameter and its base optimizer."""

    name: str
    number: int
    parameter: torch.nn.Parameter
    width: int
    """Width of the rows that are projected to ``rank`` numbers; 0 if it is not projected."""
    base: torch.optim.Optimizer
    updated: torch.nn.Parameter
    """The tensor that ``base`` updates: the parameter, or a float32 copy during its update."""


class _Owner(weakref.ref["Flora"]):
    """An optimizer that a parameter has; a copy or a pickle of the parameter has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Flora(torch.optim.Optimizer):
    """An optimizer that holds accumulated gradients and momentum in projected form.

    A hook compresses and frees each gradient as soon as backward has computed it, so ``.grad`` is
    None outside of backward, and clipping or logging that reads it sees nothing. Call ``step`` once
    per cycle of micro-batches.

    Memory: ``rank / m`` of the gradient buffer for each projected matrix [n, m], the same again
    with momentum, in the parameter's dtype, and the state of the
    base optimizer; ``state_num_bytes`` reports it. In an update one matrix at a time has its whole
    gradient, in float32.

    Exactness: the same program gives the same bits on the same machine, also if it is interrupted
    after any micro-batch and continued from ``state_dict``. Projections have the same bits on every
    device; products with them have those of the device's matrix product.

    Args:
        named_parameters: ``model.named_parameters()``; those without gradients are left out.
        lr: Learning rate of the base optimizer.
        rank: Rows of a projection. A matrix that is not wider than this is not projected.
        base: ``"adafactor"``: ``torch.optim.Adafactor``, as in the paper. ``"adamw"``:
            ``torch.optim.AdamW`` with beta1 = 0; its second moment is as large as the weights.
        accumulation: The most micro-batches of a cycle; a cycle may be shorter.
        momentum: Decay of the compressed momentum (Algorithm 2), or None. No bias correction.
        kappa: Updates between two resamplings of the momentum's projection. Without momentum each
            update has a new projection.
        seed: Seed of all random numbers, 0 to 2**63 - 1.
        projected: Names of matrices to project. None takes the two-dimensional weights of numbered
            layers, without embeddings, heads and position biases. All others are accumulated whole.
        loss_is_averaged: Whether the loss was divided by the number of micro-batches, as the
            Trainer does. If not, the sum is divided here, by the length of the cycle.
        max_grad_norm: Clips the norm of the compressed gradient, whose square is an unbiased
            estimate of the whole one's (decompressed norms are too large by a factor of
            sqrt(1 + (m + 1) / rank)). None or 0: no clipping.
        weight_decay: Weight decay of the base optimizer.
        allow_divergence: Accept a ``kappa`` at which momentum is expected to diverge.

    Raises:
        OptimizerError: For settings that cannot work; and from hooks and ``step`` in a loop that is
            not supported: several ranks, a GradScaler, a closure, sparse gradients, more
            micro-batches than ``accumulation``. Weights stay as they were.
    """

    # A GradScaler hands its factor to optimizers with this mark instead of reading gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        lr: float = 1e-3,
        *,
        rank: int = 64,
        base: Literal["adafactor", "adamw"] = "adafactor",
        accumulation: int = 1,
        momentum: float | None = None,
        kappa: int = 1000,
        seed: int = 0,
        projected: Sequence[str] | None = None,
        loss_is_averaged: bool = True,
        max_grad_norm: float | None = _UNSET,
        weight_decay: float = 0.0,
        allow_divergence: bool = False,
    ) -> None:
        named = _check_parameters(list(named_parameters))
        expect(base in ("adafactor", "adamw"), "base", "'adafactor' or 'adamw'", base)
        for key, value in {"rank": rank, "accumulation": accumulation, "kappa": kappa}.items():
            expect(value >= 1, key, "a whole number of 1 or more", value)
        expect(0 <= seed < 2**63, "seed", "a whole number from 0 to 2**63 - 1", seed)
        has_decay = momentum is None or 0 < momentum < 1
        expect(has_decay, "momentum", "None or a decay between 0 and 1", momentum)
        widths = _projected_widths(named, rank, projected)
        if momentum is not None and widths and not allow_divergence:
            bound = divergence_bound(max(widths.values()), rank, momentum)
            at_least = f"more than {bound:.1f}, at or below which momentum is expected to diverge"
            expect(kappa > bound, "kappa", f"{at_least} (allow_divergence=True takes it)", kappa)
        super().__init__(named, {"lr": lr})
        group = self.param_groups[0]
        group.update(rank=rank, seed=seed, base=base, momentum=momentum, kappa=kappa)
        group.update(projected=sorted(widths), shapes=[list(each.shape) for _, each in named])
        group.update(weight_decay=weight_decay, loss_is_averaged=loss_is_averaged, num_updates=0)
        self.accumulation = accumulation
        self.loss_is_averaged = loss_is_averaged
        self.max_grad_norm = None if max_grad_norm is _UNSET else max_grad_norm
        self.has_settled_clipping = max_grad_norm is not _UNSET
        self.grad_norm: float | None = None
        """Estimated norm of the last update's gradient before clipping; None without clipping."""
        self._quantiles: dict[torch.device, torch.Tensor] = {}
        self._matrices = [
            _Matrix(name, number, each, widths.get(name, 0), *self._base_of(each, weight_decay))
            for number, (name, each) in enumerate(named)
        ]
        owner = _Owner(self)
        for number, (_, each) in enumerate(named):
            # Of two optimizers of one parameter the newer one takes its gradients.
            vars(each)["_flora"] = owner
            # The garbage collector does not see through hooks: they may not hold the parameter.
            each.register_post_accumulate_grad_hook(partial(_add, owner, number))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = _UNSET) -> None:  # type: ignore[override]
        """Update every parameter that got a gradient since the last step; ends the cycle."""
        self._refuse_loop(closure)
        ready = [m for m in self._matrices if "accumulation" in self.state[m.parameter]]
        if not ready:
            return
        length = max(self.state[m.parameter]["count"] for m in ready)
        factor = 1.0 if self.loss_is_averaged else 1.0 / length
        if self.max_grad_norm:
            sums = (self.state[m.parameter]["accumulation"] for m in ready)
            norms = [torch.linalg.vector_norm(each, dtype=torch.float32).item() for each in sums]
            self.grad_norm = math.hypot(*norms) * factor
            factor *= min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))
        for matrix in ready:
            state = self.state[matrix.parameter]
            state.pop("count")
            mean = state.pop("accumulation").float() * factor
            self._update(matrix, self._gradient_of(matrix, mean))
        group = self.param_groups[0]
        group["num_updates"] += 1
        if group["momentum"] is not None and group["num_updates"] % group["kappa"] == 0:
            self._resample()

    def __getstate__(self) -> dict[str, Any]:
        """Refused: hooks of a copy would take the gradients of these parameters too."""
        expected = "an optimizer that is neither copied nor pickled"
        raise OptimizerError(f"Flora: expected {expected}; save and load its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: its parameters are those it was made with."""
        expect(not self.param_groups, "param_groups", "the parameters it was made with", "more")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the cycle that has begun."""
        super().zero_grad(set_to_none)
        for state in self.state.values():
            state.pop("accumulation", None)
            state.pop("count", None)

    def state_num_bytes(self) -> dict[str, int]:
        """Bytes held now: ``accumulation``, ``momentum``, ``base`` (its state) and ``table``."""
        states, ours = self.state.values(), ("accumulation", "momentum")
        held = {kind: sum(each[kind].nbytes for each in states if kind in each) for kind in ours}
        kept = (v for m in self._matrices for s in m.base.state.values() for v in s.values())
        held["base"] = sum(each.nbytes for each in kept if isinstance(each, torch.Tensor))
        held["table"] = sum(each.nbytes for each in self._quantiles.values())
        return held

    def state_dict(self) -> dict[str, Any]:
        """All that a continued run needs, in the middle of a cycle too."""
        return {**super().state_dict(), "bases": [m.base.state_dict() for m in self._matrices]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``.

        Raises:
            OptimizerError: If it is of other settings or parameters; nothing was changed.
        """
        theirs = state_dict["param_groups"][0]
        for key, ours in self.param_groups[0].items():
            if key not in ("params", "lr", "initial_lr", "num_updates"):
                expect(theirs.get(key) == ours, key, f"a saved run with {ours!r}", theirs.get(key))
        super().load_state_dict(state_dict)
        for matrix, saved in zip(self._matrices, state_dict["bases"], strict=True):
            matrix.base.load_state_dict(saved)

    def _base_of(self, parameter: torch.nn.Parameter, weight_decay: float) -> tuple[Any, Any]:
        updated = parameter
        if parameter.dtype != torch.float32:
            updated = torch.nn.Parameter(parameter.new_empty(0, dtype=torch.float32))
        if self.param_groups[0]["base"] == "adafactor":
            return torch.optim.Adafactor([updated], weight_decay=weight_decay), updated
        betas = (0.0, 0.999)
        return torch.optim.AdamW([updated], betas=betas, weight_decay=weight_decay), updated

    def _projection(self, matrix: _Matrix, num_updates_later: int = 0) -> Projection:
        """The one that the matrix has now, or that many updates later."""
        group, parameter = self.param_groups[0], matrix.parameter
        if parameter.device not in self._quantiles:
            self._quantiles[parameter.device] = normal_quantiles().to(parameter.device)
        draw, stream = group["num_updates"] + num_updates_later, Stream.ACCUMULATION
        if group["momentum"] is not None:
            draw, stream = draw // group["kappa"], Stream.MOMENTUM
        numbers = (group["seed"], matrix.number, draw, stream)
        return Projection(self._quantiles[parameter.device], group["rank"], matrix.width, *numbers)

    def _gradient_of(self, matrix: _Matrix, mean: torch.Tensor) -> torch.Tensor:
        """The base optimizer's gradient, float32: the mean, or the momentum updated with it."""
        group, state = self.param_groups[0], self.state[matrix.parameter]
        if group["momentum"] is not None:
            held = state["momentum"].float() if "momentum" in state else torch.zeros_like(mean)
            mean = held.lerp(mean, 1 - group["momentum"])
            state["momentum"] = mean.to(matrix.parameter.dtype)
        if not matrix.width:
            return mean
        return self._projection(matrix).decompress(mean)

    def _update(self, matrix: _Matrix, gradient: torch.Tensor) -> None:
        """One step of the base optimizer of one parameter."""
        base, updated, parameter = matrix.base, matrix.updated, matrix.parameter
        group = self.param_groups[0]
        base.param_groups[0].update(lr=group["lr"], weight_decay=group["weight_decay"])
        if updated is not parameter:
            updated.data = parameter.float()
        updated.grad = gradient
        if "exp_avg" in base.state[updated]:
            base.state[updated]["exp_avg"] = gradient  # with beta1 = 0 they are the same
        base.step()
        updated.grad = None
        if "exp_avg" in base.state[updated]:
            base.state[updated]["exp_avg"] = gradient.new_empty(0)
        if updated is not parameter:
            # Rounded to the nearest, updates below 1/512 of a weight would be lost.
            numbers = (group["seed"], matrix.number, group["num_updates"])
            parameter.copy_(round_stochastically(updated.data, *numbers))
            updated.data = updated.new_empty(0)

    def _resample(self) -> None:
        """Carry each momentum over into its next projection (Algorithm 2, lines 10 to 13)."""
        for matrix in self._matrices:
            state = self.state[matrix.parameter]
            if matrix.width and "momentum" in state:
                old, new = self._projection(matrix, -1), self._projection(matrix)
                moved = old.transfer(state["momentum"].float(), new)
                state["momentum"] = moved.to(state["momentum"].dtype)

    def _refuse_loop(self, closure: object) -> None:
        has_closure = closure is not _UNSET and closure is not None
        expect(not has_closure, "closure", "a call of step() after backward()", "a closure")
        is_scaled = hasattr(self, "grad_scale") or hasattr(self, "found_inf")
        expect(not is_scaled, "loss", "bfloat16 or float32 training", "a GradScaler's loss")
        # accelerate hands None on. What clips there sees no gradient.
        is_blind = closure is None and not self.has_settled_clipping
        advice = "max_grad_norm, or poros.optim.FloraCallback in the Trainer"
        expect(not is_blind, "clipping", advice, "neither, so clipping would do nothing")
        # Gradients are compressed before ranks could exchange them.
        is_spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        size = torch.distributed.get_world_size() if is_spread else 1
        expect(size == 1, "torch.distributed", "one process", f"{size} ranks")


@torch.no_grad()
def _add(owner: "weakref.ref[Flora]", number: int, parameter: torch.Tensor) -> None:
    """Take over a gradient that backward has just made."""
    flora, gradient, is_newest = owner(), parameter.grad, vars(parameter).get("_flora") is owner
    if flora is None or gradient is None or not is_newest:
        return
    matrix, state = flora._matrices[number], flora.state[parameter]
    count = state.get("count", 0)
    expect(not gradient.is_sparse, matrix.name, "a dense gradient", "a sparse one")
    expected = f"at most {flora.accumulation} micro-batches a step (accumulation=)"
    expect(count < flora.accumulation, matrix.name, expected, f"{count + 1}")
    parameter.grad = None
    if matrix.width:
        gradient = flora._projection(matrix).compress(gradient)
    if count:
        gradient = state["accumulation"].float() + gradient
    state["accumulation"] = gradient.to(parameter.dtype)
    state["count"] = count + 1


def _check_parameters(named: Sequence[Any]) -> Named:
    is_named = all(isinstance(each, tuple) and isinstance(each[0], str) for each in named)
    expect(is_named, "named_parameters", "model.named_parameters()", "no names")
    trained = [(name, each) for name, each in named if each.requires_grad]
    expect(bool(trained), "named_parameters", "a parameter that requires gradients", "none")
    for name, each in trained:
        is_known = each.dtype in (torch.float32, torch.bfloat16)
        expect(is_known, name, "float32 or bfloat16", each.dtype)
    return trained


def _projected_widths(named: Named, rank: int, asked: Sequence[str] | None) -> dict[str, int]:
    """Return the width of the rows of each matrix that is projected."""
    widths = {name: each.shape[1] for name, each in named if each.dim() == 2}
    if asked is None:
        asked = [n for n in widths if _IN_A_LAYER.search(n) and not _NAIVE.search(n)]
    missing = sorted(set(asked) - widths.keys())
    expect(not missing, "projected", "names of two-dimensional parameters", missing)
    return {name: widths[name] for name in asked if widths[name] > rank}


def expect(is_met: bool, where: str, expected: str, found: object) -> None:
    """Refuse what is not met, with an ``OptimizerError``."""
    if not is_met:
        raise OptimizerError(f"{where}: expected {expected}, found {found!r}")
