"""Liger's kernels in streamed layers, in Triton's interpreter: the bits of a resident model's."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.qwen2 import modeling_qwen2

import poros
from poros.finetune.liger import use_liger
from poros.kernels import adapters
from poros.kernels.forwards import PatchedForward, is_of_liger
from poros.planning.planner import Planner
from poros.planning.request import PlanRequest
from tests.covers import with_slow
from tests.exact.recorded import KEPT, recorded
from tests.liger import liger_alone, liger_interpreted
from tests.loops import adapted, at, mlps, nothing, same, train
from tests.replaced import noted

Model = Any
model_of = partial(adapted, dtype=torch.float32, lora_dropout=0.1)
run = partial(train, together=False, sizes=(2, 2), lengths=(2,))
EAGER, REPLAYED = {"cuda_graphs": False}, {"cuda_graphs": True}
LANES: dict[str, tuple[dict[str, Any], bool]] = {
    "replayed, together": (REPLAYED, True),
    "eager": (EAGER, False),
    "kept": (REPLAYED | KEPT, False),
}


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with liger_interpreted():
        yield


@pytest.fixture(scope="module")
def resident() -> list[torch.Tensor]:
    with liger_alone(modeling_qwen2) as applied:
        return run(applied(model_of()))


@pytest.mark.parametrize("lane", with_slow(LANES, ("eager", "kept")))
def test_streamed_equals_resident(lane: str, resident: list[torch.Tensor]) -> None:
    policy, together = LANES[lane]
    model = model_of()
    assert use_liger(model.get_base_model()) == ["norms", "rotary embeddings"]
    _, captures, _ = recorded(model, **{"slots": 2, **policy})
    assert same(run(model, together=together), resident)
    assert poros.runtime(model).self_check["status"] == "passed"
    assert captures is None or (captures.num_replays > 0) == policy["cuda_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_dora(together: bool) -> None:
    """Liger's SwiGLU writes into what projections give, which our operators must not have kept."""
    with liger_alone(modeling_qwen2, swiglu=True) as applied:
        expected = run(poros.use_adapter_kernels(applied(model_of(use_dora=True))))
        model = applied(model_of(use_dora=True))
        _, captures, _ = recorded(model, slots=2, cuda_graphs=True)
        assert same(run(model, together=together), expected)
    assert captures.num_replays > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "phi3", "gemma3", "gemma4"])
def test_other_families(architecture: str) -> None:
    """Norms of heads and behind layers, gate and up by one projection, the GELU."""
    options = {"architecture": architecture, "target_modules": "all-linear"}
    resident = model_of(**options)
    use_liger(resident.get_base_model())
    expected = run(resident)
    model = model_of(**options)
    assert len(use_liger(model.get_base_model())) == (3 if architecture == "gemma3" else 2)
    _, captures, _ = recorded(model, slots=2, cuda_graphs=True)
    assert same(run(model, together=True), expected)
    assert captures.num_replays > 0
    assert not same(run(model_of(**options)), expected)  # control


def test_control_without_them_the_bits_are_others(resident: list[torch.Tensor]) -> None:
    model, *_ = recorded(model_of(), slots=2)
    assert not same(run(model), resident)


def test_modules_keep_forwards_of_ligers() -> None:
    """Our gated activation is for the others; our adapters run in both."""
    with liger_alone(modeling_qwen2, swiglu=True) as applied:
        model = applied(model_of())
    other = model_of()
    use_liger(other.get_base_model())
    for each in (model, other):
        poros.prepare(each, slots=2, device="cpu")
    for one, plain in zip(mlps(model), mlps(other), strict=True):
        assert is_of_liger(one.__dict__["forward"])
        assert isinstance(plain.__dict__["forward"], PatchedForward)
        assert isinstance(one.down_proj.__dict__["forward"], PatchedForward)


def test_grouped_adapters_share_inputs_under_ligers_forwards(monkeypatch: Any) -> None:
    """A layer has a node for q, k and v, one for o, one for gate and up, and one for down."""
    nodes = noted(monkeypatch, adapters, "project")
    options = {"lora_dropout": 0.0, "target_modules": "all-linear"}
    with liger_alone(modeling_qwen2, swiglu=True) as applied:
        resident = poros.use_adapter_kernels(applied(model_of(**options)), "grouped")
        expected = run(resident)
        model = applied(model_of(**options))
        before = [module.__dict__.get("forward") for module in model.modules()]
        _, captures, _ = recorded(model, slots=2, cuda_graphs=True, adapter_kernels="grouped")
        assert same(run(model, together=True), expected)
    assert captures.num_replays > 0
    widths = (len(projections) for projections, *_ in nodes)
    assert set(zip(*[widths] * 4, strict=True)) == {(3, 1, 2, 1)}
    poros.restore(model)
    assert [module.__dict__.get("forward") for module in model.modules()] == before


own_forwards = at(lambda mlp: delattr(mlp, "forward"), ".mlp")


def wrapped_forwards(model: Model) -> None:
    """Somebody's functions in the place of Liger's, whose names they take."""
    for each in mlps(model):
        each.forward = wraps(each.forward)(partial(halved, each.forward))


def halved(forward: Any, input: torch.Tensor) -> Any:
    return 0.5 * forward(input)


@pytest.mark.slow
@pytest.mark.parametrize(
    "edits", [(nothing, own_forwards), (wrapped_forwards,)], ids=["taken away", "wrapped"]
)
def test_a_forward_of_ligers_that_is_replaced(edits: Any) -> None:
    """Recordings of it are not replayed any more, and code that is not Liger's is not recorded."""
    found, replays = [], [0]
    for is_streamed in (False, True):
        with liger_alone(modeling_qwen2, swiglu=True) as applied:
            model = applied(model_of(num_layers=1, lora_dropout=0.0))
            facts = []
            for number, edit in enumerate(edits):
                edit(model)
                if is_streamed and not number:
                    policy = {"adapter_kernels": "grouped", "cuda_graphs": True}
                    captures = recorded(model, slots=2, **policy)[1]
                elif not number:
                    poros.use_adapter_kernels(model, "grouped")
                facts += run(model, sizes=(1, 1, 1))  # the third is replayed
                if is_streamed:
                    replays.append(captures.num_replays)
            found.append(facts)
    assert same(*found)
    assert [after > before for before, after in pairwise(replays)] == [
        edits[0] is nothing for _ in edits
    ]


def test_another_activation_is_computed_as_it_is() -> None:
    """Liger's kernel would compute the GELU by tanh."""
    found = []
    for has_liger in (False, True):
        base = model_of(architecture="gemma3").get_base_model()
        for layer in base.model.layers:
            layer.mlp.act_fn = ACT2FN["gelu"]
        if has_liger:
            assert use_liger(base) == ["norms", "rotary embeddings"]
            assert not any("forward" in layer.mlp.__dict__ for layer in base.model.layers)
        mlp = base.model.layers[0].mlp.eval()
        found.append(mlp(torch.linspace(-1, 1, 64)[None]))
    assert torch.equal(*found)


def test_a_plan_is_that_of_the_model_without_them_but_for_what_feed_forwards_keep() -> None:
    """Its code runs on the meta device, where Liger's kernels cannot."""
    request = PlanRequest.of(seq_len=32, batch_size=2)
    with liger_alone(modeling_qwen2, swiglu=True) as applied:
        found = Planner(applied(model_of())).plan(request)
    expected = Planner(model_of()).plan(request)
    more = {term for term, size in found.terms.items() if size != expected.terms[term]}
    assert more <= {"workspace", "recordings"}
    assert replace(found, terms=expected.terms) == expected
