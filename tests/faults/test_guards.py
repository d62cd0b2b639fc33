"""Calls that would go around the host copy of a prepared model: refused or harmless, not silent."""

import copy
import io
import logging
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from operator import methodcaller, ne
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn

import poros
from poros.errors import PreparedModelError
from tests.comparing import assert_same_run, changes, picture
from tests.loops import adapted, batches, build, layers_of, resident_run, run
from tests.support import prepare_plain

LEVELS: dict[str, Callable[[Any], nn.Module]] = {
    "PEFT model": lambda model: model,
    "tuner": lambda model: model.base_model,
    "causal LM": lambda model: model.base_model.model,
    "inner model": lambda model: model.base_model.model.model,
    "layers": layers_of,
    "one layer": lambda model: layers_of(model)[1],
}

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "to(float16)": lambda module: module.to(torch.float16),
    "to(dtype=)": lambda module: module.to(dtype=torch.float32),
    "to(device, dtype)": lambda module: module.to("cpu", torch.float16),
    "to(meta)": lambda module: module.to("meta"),
    "to(cpu)": lambda module: module.to("cpu"),
    "to(device)": lambda module: module.to(torch.device("cpu")),
    **{name: methodcaller(name) for name in ("half", "bfloat16", "float", "double", "cpu")},
}
HARMLESS = {
    torch.bfloat16: {"to(cpu)", "to(device)", "cpu"},
    torch.float32: {"to(cpu)", "to(device)", "cpu", "to(dtype=)", "float"},
}
"""Those that change nothing, by the dtype of the model. Adapters are float32."""

MERGES = ("merge_and_unload", "unload", "merge_adapter", "unmerge_adapter")
COPIES: dict[str, Callable[[Any], object]] = {
    "copy": copy.copy,
    "torch.save": lambda module: torch.save(module, io.BytesIO()),
    "an optimizer beside it": lambda module: pickle.dumps((torch.optim.Adam, module)),
    "a new process": lambda module: (
        multiprocessing.get_context("spawn").Process(target=print, args=(module,)).start()
    ),
}
REFUSED: dict[str, Callable[[Any], object]] = {
    **{name: methodcaller(name) for name in MERGES},
    "merge_adapter of the tuner": lambda model: model.base_model.merge_adapter(),
    "merge of one linear layer": lambda model: layers_of(model)[1].self_attn.q_proj.merge(),
    **COPIES,
    **{
        f"{copied.__name__} of the {name}": lambda model, find=find, copied=copied: copied(
            find(model)
        )
        for copied in (copy.deepcopy, pickle.dumps)
        for name, find in LEVELS.items()
    },
}


@pytest.fixture
def model() -> Any:
    return prepare_plain(build())


Kind = tuple[bool, torch.dtype]
KINDS = [(quantize, dtype) for dtype in HARMLESS for quantize in (True, False)]


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A prepared model that everything is asked of, and that trains exactly in the end."""
    quantize, dtype = request.param
    model = prepare_plain(build(quantize=quantize, dtype=dtype))
    yield model
    assert_same_run(resident_run(quantize=quantize, dtype=dtype), run(model))


def of(*kinds: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("asked", kinds, indirect=True, ids=str)


def require_restore_named(error: BaseException) -> None:
    assert "poros.restore" in str(error) and "expected" in str(error) and "found" in str(error)


@pytest.mark.cover("values")
@of(*KINDS[:2])
@pytest.mark.parametrize("call", REFUSED)
def test_merging_and_copying_name_restore_and_change_nothing(call: str, asked: Any) -> None:
    before = picture(asked)
    with pytest.raises(PreparedModelError) as caught:
        REFUSED[call](asked)
    require_restore_named(caught.value)
    assert changes(before, picture(asked)) == {}


def test_merging_is_refused_too_when_the_base_was_prepared_directly() -> None:
    model = build()
    prepare_plain(model.get_base_model())
    before = picture(model)
    with pytest.raises(PreparedModelError) as caught:
        model.merge_and_unload()
    require_restore_named(caught.value)
    assert changes(before, picture(model)) == {}
    assert_same_run(resident_run(), run(model))


@pytest.mark.parametrize("quantize", [True, False])
def test_merging_an_adapter_from_after_prepare_is_never_silent(quantize: bool) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = prepare_plain(get_peft_model(build(quantize=quantize).unload(), config))
    model.add_adapter("late", LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    model.set_adapter("late")
    # At the call, or else at the next step: the slots still hold the weights from before.
    with torch.no_grad(), pytest.raises(PreparedModelError) as caught:
        model(**batches()[0])
        layers_of(model)[2].self_attn.v_proj.merge()
        model(**batches()[0])
    require_restore_named(caught.value)


@pytest.mark.cover("values")
@of(*KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_casts_are_refused_at_every_level(level: str, asked: Any) -> None:
    """All but those to what the model is already."""
    before, module = picture(asked), LEVELS[level](asked)
    # transformers itself refuses some casts of 4-bit models, with a ValueError.
    is_4bit = any(hasattr(parameter, "quant_state") for parameter in asked.parameters())
    for name, cast in CASTS.items():
        is_harmless = name in HARMLESS[asked.get_base_model().dtype]
        try:
            assert cast(module) is module and is_harmless, name
        except PreparedModelError as error:
            assert "poros.restore" in str(error) and not is_harmless, name
        except ValueError:
            assert is_4bit and name not in HARMLESS[torch.bfloat16], name
        assert changes(before, picture(asked)) == {}, name


def test_a_move_within_the_device_reaches_what_stays_and_nothing_that_streams() -> None:
    model = prepare_plain(build())
    parameters = layers_of(model).parameters()
    frozen = [each for each in parameters if not each.requires_grad and each.ndim > 1]
    trained = [each for each in model.parameters() if each.requires_grad]
    before = [[each.data_ptr() for each in some] for some in (frozen, trained)]
    model._apply(torch.clone)
    after = [[each.data_ptr() for each in some] for some in (frozen, trained)]
    assert before[0] == after[0] and all(map(ne, before[1], after[1]))
    assert_same_run(resident_run(), run(model))


@pytest.mark.cover("values")
@pytest.mark.parametrize("level", ["PEFT model", "tuner", "causal LM", "inner model"])
@pytest.mark.parametrize("method", ["activation_checkpointing", "gradient_checkpointing"])
def test_enabling_checkpointing_changes_what_comes_in_and_no_layer(
    level: str, method: str, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = picture(model)
    module = LEVELS[level](model)
    twin = build()
    if not hasattr(model.get_base_model(), f"{method}_enable"):
        pytest.skip(f"this transformers has no {method}_enable")
    with caplog.at_level(logging.INFO, "poros"):
        getattr(module, f"{method}_enable")()
        getattr(module, f"{method}_enable")({"use_reentrant": True})
        getattr(module, f"{method}_enable")(**{f"{method}_kwargs": {"use_reentrant": False}})
    assert sum("checkpointing" in record.getMessage() for record in caplog.records) == 3
    assert not model.get_base_model().is_gradient_checkpointing
    # A resident model's embeddings require gradients from then on, which a loss may look at.
    getattr(LEVELS[level](twin), f"{method}_enable")({"use_reentrant": False})
    embedded = [each.get_input_embeddings()(torch.arange(4)) for each in (twin, model)]
    assert embedded[0].requires_grad and embedded[1].requires_grad
    for each in (twin, model):
        each.get_input_embeddings()._forward_hooks.clear()
    assert {
        name for name in changes(before, picture(model)) if "require_grads" not in name
    } == set()
    assert_same_run(run(twin, 1), run(model, 1))
    getattr(module, f"{method}_disable")()
    assert_same_run(run(twin, 1), run(model, 1))
    assert not poros.restore(model).get_base_model().is_gradient_checkpointing


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_from_before_prepare_is_off_until_restore(use_reentrant: bool) -> None:
    def checkpointed() -> Any:
        model = build()
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model

    twin, model = checkpointed(), checkpointed()
    before = picture(model)
    for each in (twin, model):
        each.get_base_model().enable_input_require_grads()
    prepare_plain(model)
    assert not model.get_base_model().is_gradient_checkpointing
    assert_same_run(run(twin), run(model))
    model.get_base_model().disable_input_require_grads()
    poros.restore(model)
    assert model.get_base_model().is_gradient_checkpointing
    assert {key for key in changes(before, picture(model)) if "checkpointing" in key} == set()
    model.get_base_model().enable_input_require_grads()
    assert_same_run(run(twin), run(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_kbit_preparation_after_prepare_is_never_silent(
    dtype: torch.dtype, checkpointing: bool
) -> None:
    model = prepare_plain(build(dtype=dtype))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(PreparedModelError, match="prepare_model_for_kbit_training"):
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
        # If the call itself went through, the step must not: the adapters are frozen now.
        model.train()
        model(**batches()[0]).loss.backward()
        optimizer.step()


def linear_of(model: Any) -> Any:
    return layers_of(model)[1].mlp.up_proj.base_layer


def state_of(model: Any) -> Any:
    return linear_of(model).weight.quant_state


def another_linear(model: Any) -> None:
    linear = nn.Linear(64, 128, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layers_of(model)[0].mlp.gate_proj = linear


EDITS: dict[str, Callable[[Any], object]] = {
    "write a weight": lambda model: linear_of(model).weight.detach().zero_(),
    "set data": lambda m: setattr(linear_of(m).weight, "data", linear_of(m).weight.clone()),
    "replace a parameter": lambda m: setattr(
        linear_of(m), "weight", nn.Parameter(linear_of(m).weight.clone(), requires_grad=False)
    ),
    "replace a linear": another_linear,
    "replace a state": lambda m: setattr(linear_of(m), "quant_state", copy.copy(state_of(m))),
    "replace an absmax": lambda m: setattr(state_of(m), "absmax", state_of(m).absmax.clone()),
    "write an absmax": lambda model: state_of(model).absmax.zero_(),
}


@pytest.mark.parametrize("edit", EDITS)
def test_changes_of_the_base_raise_at_the_next_step(edit: str, model: Any) -> None:
    model(**batches()[0]).loss.backward()
    EDITS[edit](model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(PreparedModelError) as caught:
            model(**batches()[0])
        require_restore_named(caught.value)
        assert "layers." in str(caught.value)


def test_compiling_layers_and_what_holds_them_is_refused() -> None:
    model = prepare_plain(build(dropout=0.0))
    for module in (model, model.get_base_model(), layers_of(model), layers_of(model)[0]):
        with pytest.raises(PreparedModelError, match="not compiled"):
            module.compile()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
def test_a_graph_around_the_layers_is_refused() -> None:
    batch = batches()[0]
    model = prepare_plain(adapted(target_modules=["q_proj"]))
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    outer = torch.compile(model, backend=backend)
    first, given = layers_of(model)[0], torch.ones(1)
    of_a_layer = torch.compile(lambda: first(given), backend=backend)
    for run_once in (lambda: outer(**batch), of_a_layer):
        with pytest.raises(PreparedModelError, match="not compiled"):
            run_once()
    # Before the compiler, which takes minutes for a large model, has worked on anything.
    assert compiled == []
    # Under no_grad there is nothing to compare, and without a graph nothing to refuse.
    with torch.no_grad():
        expected = model(**batch).loss
        assert torch.equal(outer(**batch).loss, expected)
    assert torch.equal(model(**batch).loss.detach(), expected)
