"""Programs that reach into what adapter kernels replace: the same bits, or an error."""

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft.helpers import disable_input_dtype_casting
from torch import nn

import poros
from poros.errors import UnsupportedModelError
from tests.exact.adapter_arms import adapted, step
from tests.exact.arms import Bases
from tests.support import same_bits

Model = Any


def mlps(model: Model) -> list[Any]:
    return [layer.mlp for layer in model.base_model.model.model.layers]


def assert_same(model: Model) -> None:
    """With our kernels and without, in a model that is as the caller has made it."""
    plain = step(model)
    poros.use_adapter_kernels(model)
    fused = step(model)
    poros.restore(model)
    assert plain.facts.keys() == fused.facts.keys()
    wrong = [n for n in plain.facts if not same_bits(plain.facts[n], fused.facts[n])]
    assert (wrong, fused.order) == ([], plain.order)


def wrapping(own: Callable[..., Any], factor: float) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs) * factor

    return forward


PATCHED: dict[str, Callable[[Model], Any]] = {
    "LoRA": lambda model: type(mlps(model)[0].up_proj),
    "feed-forward": lambda model: type(mlps(model)[0]),
    "activation": lambda model: type(mlps(model)[0].act_fn),
    "nn.Linear": lambda model: nn.Linear,
    "nn.Dropout": lambda model: nn.Dropout,
}


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("what", PATCHED)
def test_a_class_whose_forward_is_wrapped_keeps_it(
    what: str, is_before: bool, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By something that has taken its names, and its source, as functools.wraps does."""
    model = adapted(bases, lora_dropout=0.05)
    kind = PATCHED[what](model)
    other = wrapping(kind.forward, 1.01)
    expected = step(model)
    if is_before:
        monkeypatch.setattr(kind, "forward", other)
    poros.use_adapter_kernels(model)
    monkeypatch.setattr(kind, "forward", other)
    fused = step(model)
    poros.restore(model)
    plain = step(model)
    assert all(same_bits(fused.facts[name], fact) for name, fact in plain.facts.items())
    assert not same_bits(plain.facts["loss"], expected.facts["loss"])


class Lost(torch.autograd.Function):
    """Hands nothing on in backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def losing_the_output(model: Model) -> None:
    mlps(model)[1].register_forward_hook(lambda module, given, result: Lost.apply(result))


def losing_the_product(model: Model) -> None:
    mlps(model)[1].down_proj.register_forward_pre_hook(lambda module, given: Lost.apply(given[0]))


def editing_the_product(model: Model) -> None:
    """In a way that no version counts."""
    for mlp in mlps(model):
        mlp.down_proj.register_forward_pre_hook(lambda module, given: _halve(given[0]))


def _halve(tensor: torch.Tensor) -> None:
    tensor.data.mul_(0.5)


def editing_below(model: Model) -> None:
    for mlp in mlps(model):
        mlp.down_proj.base_layer.register_forward_pre_hook(lambda module, given: _halve(given[0]))


def of_another_shape(model: Model) -> None:
    """A base whose result is broadcast."""
    for mlp in mlps(model):
        mlp.up_proj.base_layer.register_forward_hook(
            lambda module, given, result: result.mean(1, keepdim=True)
        )


@pytest.mark.parametrize(
    "program",
    [losing_the_output, losing_the_product, editing_the_product, editing_below, of_another_shape],
)
def test_hooks_see_and_change_what_they_do_with_peft(
    program: Callable[[Model], None], bases: Bases
) -> None:
    model = adapted(bases)
    program(model)
    assert_same(model)


def test_gradients_of_gradients_are_refused(bases: Bases) -> None:
    """Autograd itself would let them pass where what arrives needs no gradient, and lose them."""
    model = adapted(bases, quantize=False, dtype=torch.float32)
    up = mlps(model)[0].up_proj
    poros.use_adapter_kernels(model)
    input = torch.randn(2, 5, 64, requires_grad=True)
    with pytest.raises(UnsupportedModelError, match="gradients of gradients"):
        torch.autograd.grad(up(torch.tanh(input)).sum(), input, create_graph=True)
    with pytest.raises(UnsupportedModelError, match="gradients of gradients"):
        torch.autograd.grad(mlps(model)[0](input).sum(), input, create_graph=True)


def test_an_error_of_peft_stays_one(bases: Bases) -> None:
    model = adapted(bases)
    poros.use_adapter_kernels(model)
    with disable_input_dtype_casting(model), pytest.raises(RuntimeError, match="same dtype"):
        step(model)


def test_an_activation_that_was_captured_can_be_saved(bases: Bases) -> None:
    model = adapted(bases)
    sizes = []
    for use in (lambda model: model, poros.use_adapter_kernels):
        use(model)
        taken: list[torch.Tensor] = []
        handle = mlps(model)[0].down_proj.register_forward_hook(
            lambda module, given, result, taken=taken: taken.append(given[0])
        )
        step(model)
        handle.remove()
        file = io.BytesIO()
        torch.save(taken[0].detach(), file)
        file.seek(0)
        assert same_bits(torch.load(file), taken[0])
        sizes.append(len(file.getvalue()))
    assert sizes[0] == sizes[1]
