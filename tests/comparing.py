"""Differences between two runs, two sets of tensors or two pictures of a model, to assert on.

A picture holds everything that makes a model what it is: module objects and classes, their
attributes and hooks, parameter objects, and every bit, those of quantization states included. Two
pictures of one model are equal when nothing was touched in between.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from poros.gates.reference import Trajectory, compare_steps
from poros.self_check.compare import Difference, differing_or_absent

QUANTITIES = (
    "loss",
    "gradients",
    "grad norm",
    "adapter weights",
    "exp_avg",
    "exp_avg_sq",
    "RNG end state",
)
"""What a step of the reference run records."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_SLOTS = ("_parameters", "_buffers", "_modules")


def compare_mappings(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> list[Difference]:
    """Compare two mappings of tensors bit for bit, names included.

    Returns:
        The differences, in the order of ``expected``; names that only ``found`` has come last.
    """
    differences = []
    for name in (*expected, *(name for name in found if name not in expected)):
        difference = differing_or_absent(expected.get(name), found.get(name), name)
        if difference is not None:
            differences.append(difference)
    return differences


def compare_trajectories(expected: Trajectory, found: Trajectory) -> list[Difference]:
    """Return all differences between two trajectories, in step order; empty means bitwise equal.

    Each difference is named by step, quantity and parameter.
    """
    comparisons = compare_steps(expected, found)
    return [item.difference for item in comparisons if item.difference is not None]


def assert_same_run(expected: Trajectory, found: Trajectory) -> None:
    """Every recorded bit agrees, and gradients were not all zero."""
    assert any(gradient.any() for gradient in expected.steps[0].gradients.values())
    assert [str(each) for each in compare_trajectories(expected, found)] == []


def digest(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], str]:
    """Type, shape and SHA-256 of the bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def bits_of(model: nn.Module) -> dict[str, object]:
    """Digests of all parameters, buffers (unsaved ones too), gradients and quantization states."""
    found: dict[str, object] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            found[name] = "meta" if tensor.is_meta else digest(tensor)
            if tensor.grad is not None:
                found[f"{name} gradient"] = digest(tensor.grad)
            found.update(_quant_state_bits(name, getattr(tensor, "quant_state", None)))
    return found


def picture(model: nn.Module, *, identity: bool = True) -> dict[str, object]:
    """Everything about ``model``; without ``identity``, comparable between two equal models."""

    def fact(value: object) -> object:
        if isinstance(value, _PLAIN):
            # The number of a hook comes from a counter of the whole process.
            return value if identity or type(value) is not int else "int"
        return (type(value), id(value)) if identity else type(value).__qualname__

    found = bits_of(model)
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"{name} class"] = type(module) if identity else type(module).__qualname__
        for key, value in module.__dict__.items():
            found[f"{name} {key}"] = (
                [(fact(each), fact(value[each])) for each in value]
                if _is_table(key, value)
                else fact(value)
            )
        for key, parameter in module._parameters.items():
            if parameter is not None:
                attributes = {each: fact(value) for each, value in parameter.__dict__.items()}
                found[f"{name}.{key} object"] = (fact(parameter), parameter.requires_grad)
                found[f"{name}.{key} attributes"] = attributes
    if hasattr(model, "config"):
        config = model.config
        found["config"] = str(config if isinstance(config, Mapping) else config.to_dict())
    return found


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """The entries that differ, for an assertion that shows only them."""
    keys = [*before, *(key for key in after if key not in before)]
    return {
        key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    }


def _is_table(key: str, value: object) -> bool:
    return key in _SLOTS or (key.endswith("hooks") and isinstance(value, Mapping))


def _quant_state_bits(name: str, state: Any) -> dict[str, object]:
    if state is None:
        return {}
    found: dict[str, object] = {
        f"{name} {field}": digest(getattr(state, field))
        for field in ("absmax", "code", "offset")
        if isinstance(getattr(state, field), torch.Tensor)
    }
    found[f"{name} form"] = (state.shape, state.dtype, state.blocksize, state.quant_type)
    if state.nested:
        found.update(_quant_state_bits(f"{name} nested", state.state2))
    return found
