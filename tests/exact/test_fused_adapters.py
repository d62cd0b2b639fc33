"""A resident model with ``poros.use_adapter_kernels`` beside the same with PEFT's own modules.

Compared are loss, every gradient, the order in which parameters get theirs, and the random state.
That streamed models with these kernels equal plain ones is what all other tests here show.
"""

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.helpers import disable_input_dtype_casting
from torch import nn

import poros
from poros.errors import PreparedModelError, UnsupportedModelError
from poros.kernels import lora
from poros.kernels.adapters import KernelStats
from poros.kernels.forwards import PatchedForward
from poros.kernels.mlp import names_in
from poros.kernels.use import are_used, patch
from tests.exact import adapter_arms
from tests.exact.adapter_arms import SEVEN, adapted, fill, mlps, step, with_kernels
from tests.exact.arms import Bases
from tests.support import same_bits

Model = Any
BF16, FP32 = torch.bfloat16, torch.float32
TARGETS = {
    "seven": SEVEN,
    "qkv": SEVEN[:3],
    "o": SEVEN[3:4],
    "mlp": SEVEN[4:],
}
PHI3 = {"seven": "all-linear", "qkv": ["qkv_proj"], "o": ["o_proj"], "mlp": ["gate_up_proj"]}


def differences(model: Model, around: Callable[[], Any] = nullcontext) -> list[str]:
    """What fused kernels change."""
    plain, fused = step(model, around), with_kernels(model, around)
    assert not are_used(model)
    return adapter_arms.differences(plain, fused)


def calls(model: Model, around: Callable[[], Any] = nullcontext) -> KernelStats:
    """How the adapted modules run with our kernels."""
    tally = KernelStats()
    patch(model, torch.device("cpu"), tally)
    step(model, around)
    poros.restore(model)
    return tally


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mistral", "gemma3", "phi3"])
def test_no_bit_changes(
    architecture: str,
    targets: str,
    dtype: torch.dtype,
    dropout: float,
    quantize: bool,
    bases: Bases,
) -> None:
    names = (PHI3 if architecture == "phi3" else TARGETS)[targets]
    model = adapted(
        bases,
        architecture,
        target_modules=names,
        lora_dropout=dropout,
        dtype=dtype,
        quantize=quantize,
    )
    assert differences(model) == []
    tally = calls(model)
    assert tally.num_fused >= 2 and not tally.unfused


autocast = partial(torch.autocast, "cpu", dtype=BF16)


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("around", [nullcontext, autocast], ids=["", "autocast"])
@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"adapters": BF16},
        {"adapters": BF16, "lora_dropout": 0.05},
        {"init_lora_weights": "olora"},
        {"r": 1},
        {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"up_proj": 7}},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_no_choice_of_lora_changes_a_bit(
    dtype: torch.dtype, options: dict[str, Any], around: Any, quantize: bool, bases: Bases
) -> None:
    if options.get("init_lora_weights") == "olora" and quantize:
        options = {**options, "init_lora_weights": True}  # it writes to the base
    model = adapted(bases, dtype=dtype, quantize=quantize, **options)
    assert differences(model, around) == []
    assert calls(model, around).num_fused == 14


def several(model: Model) -> None:
    model.add_adapter("other", LoraConfig(r=4, target_modules=SEVEN))
    fill(model)
    model.base_model.set_adapter(["default", "other"])


def dora_with_hooks(model: Model) -> None:
    model.add_adapter("dora", LoraConfig(r=4, target_modules=SEVEN, use_dora=True))
    model.set_adapter("dora")
    for name, module in model.named_modules():
        if name.endswith("lora_magnitude_vector.dora"):
            module.register_forward_hook(lambda module, given, result: result * 1.5)


def hooked(model: Model) -> None:
    for name, module in model.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda module, given, result: result * 1.5)


def of_another_class(model: Model) -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.__class__ = Own


def with_a_forward_of_its_own(model: Model) -> None:
    for name, module in model.named_modules():
        if name.endswith("lora_dropout.default"):
            module.forward = lambda input: input * 0.5


def mixed(model: Model) -> None:
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.bfloat16()


def transposed(model: Model) -> None:
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.weight.data = module.weight.data.t().contiguous().t()


def scaled_by_a_tensor(model: Model) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = torch.tensor(1.5)


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


def with_biases(model: Model) -> None:
    """As ``lora_bias=True`` has them."""
    for module in model.modules():
        for each in getattr(module, "lora_B", {}).values():
            each.bias = nn.Parameter(torch.linspace(-1, 1, each.out_features))


# What makes PEFT's modules run as they are, in which context, and why; or ours run all the same.
PROGRAMS: dict[str, tuple[Callable[[Model], None], str, Any]] = {
    "several": (several, "several active adapters", nullcontext),
    "biases": (with_biases, "a bias in the adapter", nullcontext),
    "DoRA with hooks": (dora_with_hooks, "DoraLinearVariant", nullcontext),
    "hooks": (hooked, "hooks in the adapter", nullcontext),
    "another class": (of_another_class, "modules of other classes in the adapter", nullcontext),
    "own forward": (with_a_forward_of_its_own, "hooks in the adapter", nullcontext),
    "transposed": (transposed, "tensors that are not contiguous", nullcontext),
    "a tensor": (scaled_by_a_tensor, "a scaling that is no number", nullcontext),
    "dtypes": (mixed, "matrices of several dtypes", autocast),
    "an output that is lost": (losing_the_output, "", nullcontext),
    "a product that is lost": (losing_the_product, "", nullcontext),
    "an edited product": (editing_the_product, "", nullcontext),
    "an edit below": (editing_below, "", nullcontext),
    "another shape": (of_another_shape, "", nullcontext),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_programs_do_to_modules_has_the_bits_of_peft(case: str, bases: Bases) -> None:
    """What the operator does not know runs as PEFT has it; hooks see and change the same."""
    change, reason, around = PROGRAMS[case]
    model = adapted(bases)
    change(model)
    assert differences(model, around) == []
    if reason:
        tally = calls(model, around)
        assert (tally.num_fused, dict(tally.unfused)) == (0, {reason: 14})


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_the_same_operator_runs(around: Any, bases: Bases) -> None:
    """Which one runs does not depend on who asks for gradients."""
    model = adapted(bases, lora_dropout=0.05)
    tally = KernelStats()
    patch(model, torch.device("cpu"), tally)
    tokens = torch.arange(20)[None]
    torch.manual_seed(0)
    expected = model(input_ids=tokens).logits
    torch.manual_seed(0)
    with around():
        found = model(input_ids=tokens).logits
    assert tally.num_fused == 28
    assert same_bits(found.detach().clone(), expected.detach())


def test_control_a_wrong_operator_is_seen(bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lora,
        "add_scaled",
        lambda result, added, how: result + added.to(result.dtype) * how.scaling,
    )
    assert "loss" in differences(adapted(bases, lora_alpha=5))


def test_control_another_order_is_seen(bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nodes between that hand A its gradient before B."""
    genuine = lora._AddLora.apply
    monkeypatch.setattr(
        lora._AddLora,
        "apply",
        lambda result, input, b, a, *rest: genuine(result, input, b[...], a[...], *rest),
    )
    assert differences(adapted(bases)) == ["order"]


# ------------------------------------------------------------------- using and leaving it


def test_it_is_undone(bases: Bases) -> None:
    model = adapted(bases)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    poros.use_adapter_kernels(model)
    poros.use_adapter_kernels(model)
    assert are_used(model)
    poros.restore(model)
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    with pytest.raises(PreparedModelError, match="expected a prepared model"):
        poros.restore(model)


def test_a_prepared_model_uses_them_already(bases: Bases) -> None:
    model = adapted(bases)
    poros.use_adapter_kernels(model)
    with pytest.raises(PreparedModelError, match="runs adapter kernels already"):
        poros.prepare(model)
    poros.restore(model)
    poros.prepare(model)
    with pytest.raises(PreparedModelError, match="expected a resident model"):
        poros.use_adapter_kernels(model)
    poros.restore(model)
    assert not are_used(model)


@pytest.mark.parametrize("kernels", ["fused", "peft", "several adapters"])
def test_stats_count_calls_and_say_why_not(kernels: str, bases: Bases) -> None:
    model = adapted(bases)
    if kernels == "several adapters":
        several(model)
    poros.prepare(model, adapter_kernels="peft" if kernels == "peft" else "fused")
    step(model)
    stats = poros.runtime(model).stats()
    # Forward and recomputation; the check runs PEFT's own.
    counts = stats["num_fused_adapters"], stats["num_unfused_adapters"]
    assert counts == {"fused": (28, 0), "peft": (0, 0), "several adapters": (0, 28)}[kernels]
    said = ["adapters ran PEFT's modules: several active adapters"]
    assert stats["fallbacks"] == said * (kernels == "several adapters")


def test_a_copy_has_forwards_of_its_own(bases: Bases) -> None:
    model = adapted(bases, dtype=FP32, quantize=False)
    poros.use_adapter_kernels(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for module in other.modules():
            forward = module.__dict__.get("forward")
            assert forward is None or (
                isinstance(forward, PatchedForward) and forward._module() is module
            )
        fill(model)
        expected = step(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        found = step(other)
        fill(other)
        model.load_state_dict(other.state_dict())
        assert all(same_bits(found.facts[name], expected.facts[name]) for name in expected.facts)


# -------------------------------------------------------- which modules take the SwiGLU kernel


class Gated(nn.Module):
    """Comments and a docstring do not matter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What it does."""
        # It does this.
        result = self.w2(self.act(self.w1(x)) * self.w3(x))
        return result


class UpFirst(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w3(x) * self.act(self.w1(x)))  # type: ignore[no-any-return]


class Clamped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(-1, 1)
        return self.w2(self.act(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class OfTwo(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(y))  # type: ignore[no-any-return]


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.w13(x)
        gate, y = y.chunk(2, dim=-1)
        y = y * self.act(gate)
        return self.w2(y)  # type: ignore[no-any-return]


class GateLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.w13(x)
        y, gate = y.chunk(2, dim=-1)
        y = gate * self.act(gate)
        return self.w2(y)  # type: ignore[no-any-return]


def test_which_modules_are_gated() -> None:
    assert names_in(Gated.forward) == ("w2", "act", "w1", "w3")
    assert names_in(Halves.forward) == ("w2", "act", "w13", None)
    others = [kind.forward for kind in (UpFirst, Clamped, OfTwo, GateLast, nn.Linear)]
    assert list(map(names_in, others)) == [None] * 5
    assert names_in(torch.relu) is None


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
