"""Using adapter kernels and leaving them: what runs them, what is refused, planned and counted."""

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch import nn
from torch._dynamo.utils import counters

import poros
from poros.config import StreamingPolicy
from poros.errors import ParityError, PolicyError, PreparedModelError, UnsupportedModelError
from poros.kernels.adapters import tally_of
from poros.kernels.dora import SquaresOfRows
from poros.kernels.forwards import PatchedForward
from poros.kernels.gated_forms import names_in
from poros.kernels.use import are_used
from poros.planning.cost_model import CostModel
from poros.planning.meta_model import Recipe
from poros.planning.request import PlanRequest
from tests.loops import (
    SEVEN,
    Model,
    adapted,
    at,
    differences,
    fill,
    layers_of,
    mlps,
    several,
    slice_resident_loss,
    small_base,
    step,
    with_kernels,
)
from tests.replaced import Patch, raising
from tests.support import same_bits

BF16, FP32 = torch.bfloat16, torch.float32
dora: Callable[..., Model] = partial(adapted, use_dora=True, lora_alpha=2)
DENSE: dict[str, Any] = {"quantize": False, "dtype": FP32}


def streamed(model: Model, **policy: Any) -> Model:
    return poros.prepare(model, **{"loss": "reference", "device": "cpu", "slots": 2, **policy})


def test_it_is_undone() -> None:
    model = adapted()
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    assert poros.use_adapter_kernels(model) is poros.use_adapter_kernels(model)
    assert are_used(model)
    with pytest.raises(PreparedModelError, match="runs adapter kernels already"):
        poros.prepare(model)
    poros.restore(model)
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    with pytest.raises(PreparedModelError, match="expected a prepared model"):
        poros.restore(model)
    with pytest.raises(PreparedModelError, match="use_adapter_kernels"):
        poros.kernel_stats(model)
    poros.prepare(model)
    with pytest.raises(PreparedModelError, match="expected a resident model"):
        poros.use_adapter_kernels(model)
    assert not are_used(poros.restore(model))


def test_an_error_leaves_nothing_behind() -> None:
    model = poros.use_adapter_kernels(adapted(adapters=BF16), "grouped")
    expected = step(model)
    projection = layers_of(model)[0].self_attn.v_proj
    handle = projection.register_forward_pre_hook(raising(ZeroDivisionError))
    with handle, pytest.raises(ZeroDivisionError):
        step(model)
    tally = tally_of(model)
    assert tally is not None and tally.shared is None
    assert differences(step(model), expected) == []


def test_an_error_of_peft_stays_one() -> None:
    model = poros.use_adapter_kernels(adapted())
    with disable_input_dtype_casting(model), pytest.raises(RuntimeError, match="same dtype"):
        step(model)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_the_same_operator_runs(around: Any) -> None:
    """Which one runs does not depend on who asks for gradients."""
    model = poros.use_adapter_kernels(adapted(lora_dropout=0.05))
    found = []
    for region in (nullcontext, around):
        torch.manual_seed(0)
        with region():
            found.append(model(input_ids=torch.arange(20)[None]).logits)
    assert poros.kernel_stats(model)["num_fused_adapters"] == 28
    assert same_bits(*(each.detach().clone() for each in found))


@pytest.mark.parametrize("kernels", ["fused", "peft", "several adapters"])
def test_stats_count_calls_and_say_why_not(kernels: str) -> None:
    model = adapted()
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


def test_a_copy_has_forwards_of_its_own() -> None:
    model = poros.use_adapter_kernels(adapted(**DENSE))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for module in other.modules():
            forward = module.__dict__.get("forward")
            is_own = isinstance(forward, PatchedForward) and forward._module() is module
            assert forward is None or is_own
        fill(model)
        expected = step(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        found = step(other)
        fill(other)
        model.load_state_dict(other.state_dict())
        assert all(same_bits(found[name], expected[name]) for name in expected)


# ------------------------------------------------------------------ whose code it replaces


def gated(self: Any, x: torch.Tensor) -> Any:
    """Comments and a docstring do not matter."""
    # It does this.
    result = self.w2(self.act(self.w1(x)) * self.w3(x))
    return result


def halves(self: Any, x: torch.Tensor) -> Any:
    y = self.w13(x)
    gate, y = y.chunk(2, dim=-1)
    y = y * self.act(gate)
    return self.w2(y)


def gate_last(self: Any, x: torch.Tensor) -> Any:
    y = self.w13(x)
    y, gate = y.chunk(2, dim=-1)
    y = gate * self.act(gate)
    return self.w2(y)


def clamped(self: Any, x: torch.Tensor) -> Any:
    x = x.clamp(-1, 1)
    return self.w2(self.act(self.w1(x)) * self.w3(x))


def test_which_modules_are_gated() -> None:
    assert names_in(gated) == ("w2", "act", "w1", "w3")
    assert names_in(halves) == ("w2", "act", "w13", None)
    up_first = lambda self, x: self.w2(self.w3(x) * self.act(self.w1(x)))  # noqa: E731
    of_two = lambda self, x, y: self.w2(self.act(self.w1(x)) * self.w3(y))  # noqa: E731
    others = (up_first, clamped, of_two, gate_last, nn.Linear.forward, torch.relu)
    assert list(map(names_in, others)) == [None] * 6


PATCHED: dict[str, Callable[[Model], Any]] = {
    "LoRA": lambda model: type(mlps(model)[0].up_proj),
    "feed-forward": lambda model: type(mlps(model)[0]),
    "activation": lambda model: type(mlps(model)[0].act_fn),
    "nn.Linear": lambda model: nn.Linear,
    "nn.Dropout": lambda model: nn.Dropout,
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("what", PATCHED)
def test_a_class_whose_forward_is_wrapped_keeps_it(
    what: str, is_before: bool, monkeypatch: Patch
) -> None:
    """By something that has taken its names, and its source, as functools.wraps does."""
    model = adapted(lora_dropout=0.05)
    kind = PATCHED[what](model)
    own = kind.forward

    @functools.wraps(own)
    def louder(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs) * 1.01

    expected = step(model)
    if is_before:
        monkeypatch.setattr(kind, "forward", louder)
    poros.use_adapter_kernels(model)
    monkeypatch.setattr(kind, "forward", louder)
    fused = step(model)
    plain = step(poros.restore(model))
    assert all(same_bits(fused[name], fact) for name, fact in plain.items())
    assert not same_bits(plain["loss"], expected["loss"])


def with_another_scaling(own: Any, module: Any, given: torch.Tensor) -> Any:
    with mock.patch.dict(module.scaling, default=0.5 * module.scaling["default"]):
        return own(module, given)


OTHERS: dict[str, Callable[..., Any]] = {
    "another tensor": lambda own, module, given: own(module, given * 0.5),
    "a counted edit": lambda own, module, given: own(module, given.mul_(0.5)),
    "another adapter": with_another_scaling,
}


@pytest.mark.parametrize("how", OTHERS)
def test_only_this_very_input_is_shared(how: str, monkeypatch: Patch) -> None:
    """The attention's own code gives k something else, of which no hook tells."""
    model = adapted(**DENSE)
    kind = type(model.base_model.model.model.layers[0].self_attn)
    genuine = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = type(self.k_proj).__call__

        def call(module: Any, given: torch.Tensor) -> Any:
            is_other = module is self.k_proj
            return OTHERS[how](own, module, given) if is_other else own(module, given)

        with monkeypatch.context() as patch:
            patch.setattr(type(self.k_proj), "__call__", call)
            return genuine(self, *args, **kwargs)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.arange(24)[None]).logits

    monkeypatch.setattr(kind, "forward", forward)
    plain = logits()
    poros.use_adapter_kernels(model, "grouped")
    found = logits()
    assert torch.allclose(found, plain, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(kind, "forward", genuine)
    assert not torch.allclose(logits(), found, rtol=1e-4, atol=1e-5)  # a control


# ------------------------------------------------------------------ DoRA


@pytest.mark.parametrize("loss", ["reference", "chunked"])
def test_dora_outside_of_layers_is_pefts_in_both(loss: str) -> None:
    """On the head: bits of the prepared model are those of ``use_adapter_kernels``."""
    model = dora(target_modules=["q_proj", "down_proj", "lm_head"])
    plain = step(model)
    if loss == "chunked":
        slice_resident_loss(model)
    expected = with_kernels(model)
    model = streamed(dora(target_modules=["q_proj", "down_proj", "lm_head"]), loss=loss)
    assert differences(step(model), expected) == []
    assert differences(plain, expected), "control: the layers run ours"


def test_the_self_check_sees_a_norm_that_is_not_the_weights(monkeypatch: Patch) -> None:
    """One that only the streamed layers remember: those it compares with start anew."""
    model = streamed(dora(), self_check="strict")
    forward = mlps(model)[0].up_proj.__dict__["forward"]
    own = SquaresOfRows.of

    def wrong(self: SquaresOfRows, *args: Any, **kwargs: Any) -> torch.Tensor:
        squares = own(self, *args, **kwargs)
        return squares * 2 if self is forward._squares else squares

    monkeypatch.setattr(SquaresOfRows, "of", wrong)
    with pytest.raises(ParityError):
        step(model)


def merge_and_unmerge(model: Model) -> None:
    """PEFT writes to the weight through ``.data``, and taking it out again leaves other bits."""
    model.add_adapter("plain", LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    weight = mlps(model)[0].up_proj.base_layer.weight
    generator = torch.Generator().manual_seed(7)
    for name, each in model.named_parameters():
        if "plain" in name:
            each.data.normal_(0, 0.3, generator=generator)
    bits = weight.detach().clone()
    model.set_adapter("plain")
    model.merge_adapter()
    model(input_ids=torch.arange(8)[None])
    model.unmerge_adapter()
    model.set_adapter("default")
    assert not torch.equal(bits, weight)


def of_weights(edit: Callable[[Any], object]) -> Callable[[Model], None]:
    return at(torch.no_grad()(lambda module: edit(module.weight)), "up_proj.base_layer")


EDITS: dict[str, Callable[[Model], None]] = {
    "a weight through .data": of_weights(lambda weight: weight.data.mul_(1.5)),
    "a weight in place": of_weights(lambda weight: weight.mul_(1.5)),
    "scales through .data": of_weights(lambda w: w.quant_state.absmax.data.bitwise_xor_(1)),
    "scales in place": of_weights(lambda weight: weight.quant_state.absmax.bitwise_xor_(1)),
    "a weight that was merged into": merge_and_unmerge,
}


@pytest.mark.parametrize("edit", EDITS)
def test_norms_are_those_of_the_base_as_it_is_now(edit: str) -> None:
    """A resident one, which anybody may edit: as if the edit had come first."""
    found = []
    for is_late in (False, True):
        model = dora(quantize="scales" in edit)
        if is_late:
            step(poros.use_adapter_kernels(model))
        EDITS[edit](model)
        if not is_late:
            poros.use_adapter_kernels(model)
        found.append(step(model))
    assert differences(*found) == []
    assert differences(with_kernels(dora(quantize="scales" in edit)), found[0])


# ------------------------------------------------------------------ what is refused, and planned


def test_gradients_of_gradients_are_refused() -> None:
    """Autograd itself would let them pass where what arrives needs no gradient, and lose them."""
    model = poros.use_adapter_kernels(adapted(**DENSE))
    mlp, input = mlps(model)[0], torch.randn(2, 5, 64, requires_grad=True)
    for module in (lambda given: mlp.up_proj(torch.tanh(given)), mlp):
        with pytest.raises(UnsupportedModelError, match="gradients of gradients"):
            torch.autograd.grad(module(input).sum(), input, create_graph=True)


@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_other_adapters_are_not_grouped_and_nothing_is_changed(kind: str) -> None:
    if kind == "dora":
        model = dora()
    else:
        config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
        model = get_peft_model(small_base(num_layers=2), config)
    forwards = [sorted(module.__dict__) for module in model.modules()]
    for refused in (
        lambda model: poros.use_adapter_kernels(model, "grouped"),
        lambda model: streamed(model, adapter_kernels="grouped"),
    ):
        with pytest.raises(PolicyError, match=r"layers\.0\..* expected LoRA .*found.*fused"):
            refused(model)
    assert [sorted(module.__dict__) for module in model.modules()] == forwards
    streamed(model)


def test_an_adapter_that_comes_later_and_is_no_lora_runs_as_fused() -> None:
    model = poros.use_adapter_kernels(adapted(), "grouped")
    model.add_adapter("dora", LoraConfig(r=4, target_modules=SEVEN, use_dora=True))
    model.set_adapter("dora")
    step(model)
    stats = poros.kernel_stats(model)
    assert (stats["num_grouped_adapters"], stats["num_fused_adapters"]) == (0, 14)


PATHS: list[tuple[Any, str]] = [(each, "fused") for each in ("f3:b1", "b5", None)]
PATHS += [("flops", "exact"), ("flops", "grouped"), ("f1:b1", "peft")]


@pytest.mark.parametrize(("paths", "kernels"), PATHS)
def test_orders_that_cannot_work_are_refused(paths: Any, kernels: str) -> None:
    with pytest.raises(PolicyError, match="lora_paths: expected"):
        StreamingPolicy(lora_paths=paths, adapter_kernels=kernels)
    said = "fused, exact" if kernels == "peft" else "lora_paths: expected"
    with pytest.raises(PolicyError, match=said):
        poros.use_adapter_kernels(adapted(), kernels, lora_paths=paths)


def test_other_kernels_than_those_that_run_are_refused() -> None:
    """Of a prepared model: ``tests/faults/test_prepare``."""
    kernels = ({"kernels": each} for each in ("grouped", "exact"))
    choices: list[dict[str, str]] = [{}, *kernels, {"lora_paths": "f1:b1"}]
    for place, first in enumerate(choices):
        resident = poros.use_adapter_kernels(adapted(), **first)
        assert poros.use_adapter_kernels(resident, **first) is resident
        with pytest.raises(PreparedModelError, match="restore"):
            poros.use_adapter_kernels(resident, **choices[place - 1])
        with pytest.raises(PreparedModelError, match="restore"):
            poros.use_adapter_kernels(resident, **choices[place - 2])


def test_a_plan_counts_the_workspaces() -> None:
    """ "grouped" takes about as much as one operator for each projection, and less than PEFT."""

    def peaks(tokens: int, *choices: str, **options: Any) -> list[int]:
        planner = CostModel(Recipe.like(adapted(**options)))
        found = []
        for each in choices:
            paths = {"lora_paths": each} if ":" in each else {}
            policy = {"loss": "reference", "adapter_kernels": "fused" if paths else each, **paths}
            batch_size, seq_len = (1, 2) if tokens == 2 else (2, 64)
            step = planner.cost(PlanRequest.of(seq_len=seq_len, batch_size=batch_size, **policy))
            found.append(max(layer.peak for layer in step.layers))
        return found

    grouped, fused, peft = peaks(128, "grouped", "fused", "peft", adapters=BF16)
    stacked = 5 * 8 * 64 * BF16.itemsize
    assert 0 < grouped <= fused + 2 * stacked < peft
    # Of few tokens, matrices of the size of the largest weight are what shows.
    config = small_base("qwen2", num_layers=2, dropout=0.0).config
    largest = 4 * config.hidden_size * config.intermediate_size
    plain, without, with_one, with_all = peaks(2, "fused", "f1:b1", "f1:b3", "f2:b5", **DENSE)
    assert with_all >= plain + largest // 2 and with_one >= without + largest // 2


# ------------------------------------------------------------------ orders of products


def test_dora_and_several_adapters_keep_their_order_by_name() -> None:
    for model, reason in ((dora(), "DoRA"), (adapted(), "several active adapters")):
        if reason != "DoRA":
            several(model)
        step(poros.use_adapter_kernels(model, lora_paths="f1:b1"))
        assert poros.kernel_stats(model)["lora_paths"]["as_peft"][reason] > 0


def test_with_tf32_nothing_is_merged_unless_asked() -> None:
    precision, shapes = torch.get_float32_matmul_precision(), []
    try:
        for each in ("highest", "high"):
            torch.set_float32_matmul_precision(each)
            model = poros.use_adapter_kernels(adapted(**DENSE), lora_paths="flops")
            step(model)
            shapes.append(list(poros.kernel_stats(model)["lora_paths"]["shapes"]))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert all("float32 with float32" in each for each in shapes[0])
    assert all("TF32" in each for each in shapes[1]) and not any("TF32" in s for s in shapes[0])


@pytest.mark.usefixtures("compiled_anew")
def test_adapter_kernels_do_not_make_a_compiled_layer_compile_anew() -> None:
    """A counter that a graph looks at would: up to the limit, and from then on nothing is."""
    model = adapted(quantize=False, target_modules=["q_proj", "down_proj"])
    plain = step(model)
    torch._dynamo.reset()
    counters.clear()
    poros.use_adapter_kernels(model)
    for layer in layers_of(model):
        layer.compile(backend="eager")
    found = [step(model) for _ in range(3)]
    assert counters["stats"]["unique_graphs"] == 2
    assert not any(differences(plain, each) for each in found)
