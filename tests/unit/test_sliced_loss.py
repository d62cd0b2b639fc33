"""The loss in slices: how far it is from the exact one, by a derivation; and its edges.

Bounds below are for one token, by the rounding of sums of products that ``rounding`` tells of.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import poros.head.loss
from poros.head.loss import Slices, Step, sliced_cross_entropy
from tests.loops import narrow_slices
from tests.unit.rounding import UNITS, gamma

N, V, H = 23, 1000, 48
FP32 = UNITS[torch.float32]
CAP = (Step("divide", 5.0), Step("tanh"), Step("multiply", 5.0))
STEPS = {"plain": (), "scaled": (Step("multiply", 0.25),), "capped": CAP}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_slices(monkeypatch)


class Case(NamedTuple):
    hidden: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor
    labels: torch.Tensor


def case(dtype: torch.dtype) -> Case:
    torch.manual_seed(N)
    labels = torch.randint(0, V, (N,))
    labels[2::5] = -100
    hidden, head = torch.randn(N, H).to(dtype), (0.4 * torch.randn(V, H)).to(dtype)
    return Case(hidden, head, torch.randn(V).to(dtype), labels)


def rows_of(head: torch.Tensor, num_rows: int | None = None) -> Slices:
    def read(width: int) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(0, num_rows or len(head), width):
            yield first, head[first : first + width]

    return read


def sliced(given: Case, steps: tuple[Step, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over tokens and its gradient."""
    hidden = given.hidden.clone().requires_grad_()
    loss = sliced_cross_entropy(
        hidden, given.labels, rows_of(given.head), V, bias=given.bias, steps=steps
    )
    loss.backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad


def transformed(logits: torch.Tensor, steps: tuple[Step, ...]) -> torch.Tensor:
    for kind, number in steps:
        logits = {
            "multiply": lambda z, n=number: z * n,
            "divide": lambda z, n=number: z / n,
            "tanh": lambda z: torch.tanh(z),
        }[kind](logits)
    return logits


class Exact(NamedTuple):
    """In float64, and what bounds are made of."""

    losses: torch.Tensor
    gradient: torch.Tensor
    logits: torch.Tensor
    before: torch.Tensor
    """Logits before the steps."""
    absolute: torch.Tensor
    """Of the same, sums of absolute values: tokens x vocabulary."""
    rows: torch.Tensor
    """Sum of the absolute rows that a token's gradient consists of."""
    scale: float
    """By how much the steps enlarge an error at most."""


def exact(given: Case, steps: tuple[Step, ...]) -> Exact:
    hidden = given.hidden.double().requires_grad_()
    head, bias = given.head.double(), given.bias.double()
    before = hidden @ head.T + bias
    logits = transformed(before, steps)
    losses = F.cross_entropy(logits, given.labels, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), hidden, retain_graph=True)
    (slope,) = torch.autograd.grad(logits.sum(), before)
    weight = torch.softmax(logits.detach(), 1)
    weight = weight + F.one_hot(given.labels.clamp(min=0), V)
    scale = 1.0
    for kind, number in steps:
        scale *= {"multiply": number, "divide": 1 / number, "tanh": 1.0}[kind]
    absolute = hidden.detach().abs() @ head.abs().T + bias.abs()
    rows = (weight * slope.abs()) @ head.abs()
    return Exact(losses.detach(), gradient, logits.detach(), before.detach(), absolute, rows, scale)


def logits_bound(found: Exact, steps: tuple[Step, ...]) -> torch.Tensor:
    """By how much a token's logits are off: sums in float32, results too."""
    product = gamma(H + 1) * found.absolute.amax(1) + FP32 * found.before.abs().amax(1)
    # Each step rounds what it gives; tanh is good to two roundoffs.
    largest = found.logits.abs().amax(1) + found.before.abs().amax(1) * found.scale + 5.0
    return found.scale * product + 2 * len(steps) * FP32 * largest


def losses_bound(found: Exact, off: torch.Tensor) -> torch.Tensor:
    """Of the loss: its label's logit, the log of the sum of exponentials, and rounding of those."""
    num_slices = -(-V // 96)
    distance = 2 * found.logits.abs().amax(1)
    # Of each exponential: the difference that is its argument, and the function; then the sum.
    exponentials = gamma(4) * (distance + 1) + gamma(V + 3 * num_slices)
    return 2 * off + exponentials + gamma(4) * (distance + found.losses + 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", STEPS)
def test_the_loss_is_as_near_as_derived(kind: str, dtype: torch.dtype) -> None:
    given, steps = case(dtype), STEPS[kind]
    true = exact(given, steps)
    loss, gradient = sliced(given, steps)
    off = logits_bound(true, steps)
    bound = losses_bound(true, off)
    total = bound.sum() + gamma(N) * (true.losses + bound).sum()
    assert abs(loss.double() - true.losses.sum()) <= total
    # The weights of the rows: exponentials of logits that are off, rounded to the head's dtype.
    relative = torch.expm1(2 * off) + UNITS[dtype] + 2 * bound + gamma(V)
    allowed = (1 + 2.0**-7) * relative[:, None] * true.rows
    allowed = allowed + (UNITS[dtype] + gamma(4)) * (true.gradient.abs() + allowed)
    assert bool(((gradient.double() - true.gradient).abs() <= allowed).all())


@pytest.mark.parametrize("kind", STEPS)
def test_control_the_bounds_notice_a_small_mistake(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of the head that is not read, and sums that are not scaled to a larger logit."""
    given, steps = case(torch.bfloat16), STEPS[kind]
    true = exact(given, steps)
    allowed = losses_bound(true, logits_bound(true, steps)).sum() * 1.01
    hidden = given.hidden
    whole = rows_of(given.head)
    without_last = rows_of(given.head, V - V % 96)

    def loss(read: Slices) -> torch.Tensor:
        return sliced_cross_entropy(
            hidden, given.labels.clamp(max=900), read, V, bias=given.bias, steps=steps
        ).double()

    expected = F.cross_entropy(true.logits, given.labels.clamp(max=900), reduction="sum")
    assert abs(loss(whole) - expected) <= allowed < abs(loss(without_last) - expected)
    monkeypatch.setattr(poros.head.loss.torch, "exp", torch.ones_like)
    assert abs(loss(whole) - expected) > allowed


@pytest.mark.parametrize("number", [1, N - 1, N + 1])
def test_another_number_of_labels_is_refused(number: int) -> None:
    given = case(torch.float32)
    with pytest.raises(ValueError, match=f"one for each of {N} tokens, found {number}"):
        sliced(given._replace(labels=torch.zeros(number, dtype=torch.long)))


def test_tokens_without_a_label_count_nothing() -> None:
    """Not even if what they are computed from is not a number."""
    given = case(torch.float32)
    is_counted = given.labels != -100
    hidden = given.hidden.clone()
    hidden[~is_counted] = float("nan")
    loss, gradient = sliced(given._replace(hidden=hidden))
    expected, of_all = sliced(given)
    assert torch.equal(loss, expected) and torch.equal(gradient, of_all)
    assert not gradient[~is_counted].any()


@pytest.mark.parametrize("label", [-1, V, 10**9])
def test_a_label_out_of_range_is_refused(label: int) -> None:
    given = case(torch.float32)
    given.labels[1] = label
    with pytest.raises(IndexError, match=f"from 0 to {V - 1}, the rows of the head, found {label}"):
        sliced(given)
    with pytest.raises(IndexError):  # as it is without slices
        F.cross_entropy(torch.zeros(N, V), given.labels)
