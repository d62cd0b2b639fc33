"""Comparing a recording of a visit with the visit itself: see ``poros.replay.captures``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from poros.slots.schedule import Phase
from poros.stream.attention import AttentionKernels, unchanged_flags

if TYPE_CHECKING:
    from poros.replay.call import LayerCall
    from poros.replay.facts import CallFacts
    from poros.replay.forms import Around

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


def varies(call: "LayerCall", facts: "CallFacts", tensors: Tensors) -> bool:
    """Whether the gradients of such a call need not repeat themselves; not within a visit."""
    with (
        call.layer.visit(Phase.BACKWARD, facts.leaves),
        facts.recording(),
        AttentionKernels() as attention,
    ):
        facts.run(facts.inputs(tensors))
    return attention.may_vary


def with_steady_attention(
    facts: "CallFacts", tensors: Tensors, gradients: Gradients, around: "Around"
) -> list[torch.Tensor | None]:
    """The gradients of a call from the random state of now, by attention that repeats itself."""
    with facts.recording(draws_anew=True), unchanged_flags(), AttentionKernels(deterministic=True):
        inputs = facts.inputs(tensors)
        results = facts.recompute(inputs, leaves_out=False)
        return facts.differentiate(results, inputs, gradients, around)


def different_ones(found: Gradients, wanted: Gradients, what: str) -> str | None:
    """Which of ``found`` have not the bits of ``wanted``."""
    if len(found) != len(wanted):
        return f"{len(found)} {what}s instead of {len(wanted)}"
    numbers = [
        str(number)
        for number, (left, right) in enumerate(zip(found, wanted, strict=True))
        if not _is_same(left, right)
    ]
    return f"{what} {', '.join(numbers)} of {len(wanted)}" if numbers else None


def _is_same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (each.detach().contiguous().flatten().view(torch.uint8) for each in (left, right))
    return torch.equal(left, right)
