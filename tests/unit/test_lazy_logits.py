"""Logits that are computed when read: whoever reads them gets what the head gives, bit for bit."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from poros.errors import PreparedModelError
from poros.head.logits import LazyLogits, Origin
from poros.io.digests import sums_of_bits

V, H = 40, 8
Program = Callable[[torch.Tensor], Any]


def head() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(H, V).to(torch.bfloat16).requires_grad_(False)


def hidden() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(2, 5, H).to(torch.bfloat16).requires_grad_()


def lazily(given: torch.Tensor, module: nn.Module | None = None) -> LazyLogits:
    return LazyLogits(Origin.of(given, module or head(), lambda _: None))


def test_its_form_is_known_before_it_is_computed() -> None:
    told = list[int]()
    module = head()
    logits = LazyLogits(Origin.of(hidden(), module, told.append))
    plain = module(hidden())
    for look in (
        *(lambda t: t.shape, lambda t: t.dtype, lambda t: t.device, lambda t: t.size(-1)),
        *(lambda t: t.dim(), lambda t: t.ndim, lambda t: t.numel(), len, lambda t: t.layout),
        *(lambda t: t.requires_grad, lambda t: t.is_floating_point(), lambda t: t.is_cuda),
    ):
        assert look(logits) == look(plain)
    assert isinstance(logits, torch.Tensor) and logits in {logits}
    assert logits.is_leaf and logits.grad_fn is None, "until there is something to go back to"
    assert "is_computed=False" in repr(logits)
    assert not logits.is_computed and told == []
    assert torch.equal(logits, plain)
    assert logits.is_computed and told == [plain.nbytes]
    logits.sum()
    assert told == [plain.nbytes], "once"


def in_no_grad_first(logits: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        best = logits.argmax(-1)
    return logits.gather(-1, best[..., None]).sum()


def scaled_in_a_region(logits: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        scaled = logits * 0.3
    return (scaled + 1).sum()


def written_to(logits: torch.Tensor) -> torch.Tensor:
    scaled = logits / 2
    logits[..., 3] = 7.0
    return scaled.sum() + logits.sum()


def written_to_behind_an_alias(logits: torch.Tensor) -> torch.Tensor:
    cast = logits.view_as(logits).float()
    logits.zero_()
    return cast.exp().sum()


def written_to_by_an_alias(logits: torch.Tensor) -> torch.Tensor:
    cast = logits.float()
    logits.view_as(logits).zero_()
    return cast.exp().sum()


def in_place(logits: torch.Tensor) -> torch.Tensor:
    scaled = logits * 3
    logits *= 2
    return scaled.sum() + logits.sum()


READERS: dict[str, Program] = {
    "cross entropy": lambda t: F.cross_entropy(t.view(-1, V), torch.arange(10)),
    "a slice of a cast": lambda t: t.float()[:, :-1].contiguous().logsumexp(-1).sum(),
    "a tensor of the other side": lambda t: (torch.ones(V) / t).sum(),
    "stacked by keyword": lambda t: torch.stack(tensors=[t, t * 2]).sum(),
    "a list of its rows": lambda t: sum(row.sum() for row in t),
    "to, with a copy": lambda t: t.to(torch.float32, copy=True).sum(),
    "rounded division": lambda t: torch.div(t, 0.01, rounding_mode="trunc").sum() + t.sum(),
    "in no_grad first": in_no_grad_first,
    "scaled in a region": scaled_in_a_region,
    "written to": written_to,
    "in place": in_place,
    "written to behind an alias": written_to_behind_an_alias,
    "written to by an alias": written_to_by_an_alias,
    "compiled": torch.compile(lambda t: t.float().exp().sum(), backend="eager"),
    "within a checkpoint": lambda t: checkpoint(
        lambda each: (each * 2).tanh().exp().sum(), t, use_reentrant=False
    ),
}


@pytest.mark.parametrize("region", ["none", "autocast", "no_grad"])
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_it_gets_the_heads_own_bits(reader: str, region: str) -> None:
    """Value and gradient; read outside of the region in which the head was called."""
    results = []
    for make in (lambda given: head()(given), lazily):
        leaf = hidden()
        given = leaf.float() if region == "autocast" else leaf * 1
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=region == "autocast"),
            torch.set_grad_enabled(region != "no_grad"),
        ):
            logits = make(given)
        value = READERS[reader](logits)
        if region != "no_grad":
            value.backward()
        results.append((value.detach(), leaf.grad, value.requires_grad))
    (expected, gradient, requires), (found, of_lazy, of_found) = results
    assert torch.equal(found, expected) and requires == of_found == (region != "no_grad")
    if gradient is not None:
        assert gradient.any() and of_lazy is not None and torch.equal(of_lazy, gradient)


@pytest.mark.parametrize("is_at_call", [True, False])
def test_saved_tensors_pass_the_hooks_of_the_heads_call(is_at_call: bool) -> None:
    """Hooks that halve what is kept: at the head's call, or where it is read."""
    results = []
    for make in (lambda given: head()(given), lazily):
        given = hidden()
        at_call, at_read = (halving, nullcontext)[:: 1 if is_at_call else -1]
        with at_call():
            logits = make(given)
        with at_read():
            logits.float().exp().sum().backward()
        results.append(given.grad)
    assert results[0] is not None and torch.equal(*results)


def halving() -> Any:
    return saved_tensors_hooks(lambda tensor: tensor * 0.5, lambda tensor: tensor)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: pickle.loads(pickle.dumps(t.detach())),
        lambda t: t.detach().numpy(),
        lambda t: torch.tensor(t.tolist()),
    ],
)
def test_it_leaves_as_an_ordinary_tensor(use: Program) -> None:
    module = head().float()
    given = hidden().float()
    logits = lazily(given, module)
    found = torch.as_tensor(use(logits))
    assert type(found) is torch.Tensor and torch.equal(found, module(given).detach())


def test_hidden_states_of_inference_mode_may_be_written_to() -> None:
    """Which PyTorch does not count; others are refused: exact/test_sliced_head."""
    with torch.inference_mode():
        given = hidden() * 1
        logits, expected = lazily(given), head()(given)
        given.zero_()
        assert torch.equal(logits, expected) and expected.any()


@pytest.mark.parametrize("edit", ["head", "hidden states"])
def test_what_was_written_to_since_is_not_computed_from(edit: str) -> None:
    module, given = head(), hidden().detach()
    logits = lazily(given, module)
    (module.weight if edit == "head" else given).mul_(2)
    with pytest.raises(PreparedModelError, match="found them written to before"):
        logits.sum()


class Factor(torch.autograd.Function):
    """A function of logits, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, function: Program, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return function(logits)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None, None


def test_a_function_that_takes_it_unread_is_refused_before_a_gradient_is_lost() -> None:
    leaf, doubled = hidden(), (lambda t: t.clone() * 2, 2.0)
    value = Factor.apply(lazily(leaf), *doubled).sum()
    with pytest.raises(PreparedModelError, match=r"Hand it logits\.clone\(\)"):
        value.backward()
    assert leaf.grad is None
    Factor.apply(lazily(leaf).clone(), *doubled).sum().backward()
    assert leaf.grad is not None and leaf.grad.any()
    with torch.no_grad():
        assert torch.equal(Factor.apply(lazily(leaf), *doubled), head()(leaf) * 2)


@pytest.mark.parametrize(
    "function", [(lambda t: t.view_as(t), -1.0), (lambda t: t * 3, 3.0)], ids=["alias", "product"]
)
@pytest.mark.parametrize("use", [torch.sum, lambda t: t / 2, lambda t: t.float(), torch.clone])
def test_a_result_of_a_function_that_has_not_read_it_is_refused(
    function: Any, use: Program
) -> None:
    """Its values would go around the function's backward."""
    leaf = hidden()
    with pytest.raises(PreparedModelError, match=r"the result of .*FactorBackward"):
        use(Factor.apply(lazily(leaf), *function))
    Factor.apply(lazily(leaf).clone(), *function).sum().backward()
    given = hidden()
    Factor.apply(head()(given), *function).sum().backward()
    assert leaf.grad is not None and given.grad is not None and torch.equal(leaf.grad, given.grad)


class HandedOn(torch.autograd.Function):
    """As DistributedDataParallel does with what a model returns, to find unused parameters."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def test_a_function_may_hand_on_what_nobody_reads() -> None:
    """No gradient comes back through it, and it is not computed."""
    leaf = hidden()
    logits = lazily(leaf)
    loss, handed = HandedOn.apply(leaf.float().sum(), logits)
    loss.backward()
    assert leaf.grad is not None and leaf.grad.any()
    assert not logits.is_computed and not handed.is_computed
    with pytest.raises(PreparedModelError, match=r"the result of .*HandedOnBackward"):
        handed.sum()


def test_code_below_python_is_refused() -> None:
    with pytest.raises(PreparedModelError, match="found an autograd function or a compiled one"):
        torch._C._disabled_torch_function_impl(torch.Tensor.add, (), (lazily(hidden()), 1), {})


# ------------------------------------------------------------------- sums of bits


@pytest.mark.parametrize("shape", [(40, 8), (1, 4), (0, 8), (7, 3), (1000, 12), (2, 5, 8)], ids=str)
def test_sums_are_those_of_all_bits(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    values = torch.randn(shape).to(torch.bfloat16)
    kind = torch.int64 if shape[-1] % 4 == 0 else torch.uint8
    words = values.view(-1, shape[-1]).view(kind).to(torch.int64)
    places = [2 * torch.arange(size) + 1 for size in words.shape]
    weighted = words.sum(0) * places[1], words.sum(1) * places[0]
    assert sums_of_bits(values).tolist() == [each.sum().item() for each in weighted]
