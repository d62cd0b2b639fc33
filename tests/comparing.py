"""Differences between two runs or two sets of tensors, as lists that a test can assert on."""

from collections.abc import Mapping

import torch

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
