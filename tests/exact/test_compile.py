"""Layers compiled one by one: streamed and compiled equals resident and compiled.

The compiled forward runs with gradients enabled, like the recomputation and like a resident run: an
inference graph fuses differently, and gives other bits in bfloat16.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.errors import PreparedModelError, UnsupportedModelError
from poros.gates import tiny
from poros.gates.reference import TrainingSpec, Trajectory, train
from tests.comparing import compare_trajectories
from tests.exact.adapter_arms import adapted, differences, step
from tests.exact.arms import Bases
from tests.snapshots import layers_of
from tests.support import make_base, make_model, prepare_plain


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def build(dropout: float) -> Any:
    """With two adapters a layer: what is compiled takes its time."""
    base = make_base("qwen2", num_layers=2, hidden_size=64, dropout=dropout)
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(
        base, LoraConfig(r=8, task_type="CAUSAL_LM", lora_dropout=dropout, **options)
    )


def compile_layers(model: Any, number: int | None = None, **options: Any) -> Any:
    """All, or the first so many."""
    for layer in layers_of(model)[:number]:
        layer.compile(**options)
    return model


def run(model: Any, num_steps: int = 2) -> Trajectory:
    batches = tiny.make_batches(num_steps, num_tokens=8, padded=False)
    return train(model, batches, TrainingSpec(num_steps=num_steps))


@pytest.mark.slow
def test_compiled_layers_are_exact_and_compiled_once() -> None:
    torch._dynamo.reset()
    expected = run(compile_layers(build(0.0)))
    torch._dynamo.reset()
    counters.clear()
    model = compile_layers(prepare_plain(build(0.0)))
    found = run(model)
    assert compare_trajectories(expected, found) == []
    assert poros.runtime(model).self_check["status"] == "passed"
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    run(model)
    assert counters["stats"]["unique_graphs"] == num_graphs
    # The control: the compiler changes bits, so an eager run would have been noticed.
    assert compare_trajectories(expected, run(build(0.0))) != []


@pytest.mark.gpu
def test_compiled_layers_are_exact_on_a_gpu() -> None:
    batches = tiny.make_batches(2, num_tokens=8, padded=False)
    on_gpu = [{key: value.cuda() for key, value in batch.items()} for batch in batches]
    found = []
    for is_streamed in (False, True):
        torch._dynamo.reset()
        model = build(0.0)
        model = prepare_plain(model, device="cuda") if is_streamed else model.cuda()
        compile_layers(model, backend="aot_eager")
        # Fused attention need not repeat itself in backward.
        with sdpa_kernel(SDPBackend.MATH):
            found.append(train(model, on_gpu, TrainingSpec(num_steps=2)))
    assert compare_trajectories(*found) == []
    assert poros.runtime(model).self_check["status"] == "passed"


LENGTHS = {
    "training at any length": ([8, 9, 11, 14, 10], []),
    "training and evaluation at one length": ([8, 8], [8, 8]),
}


def steps(model: Any, lengths: list[int], evaluated: list[int]) -> list[torch.Tensor]:
    """Losses and gradients of steps, each with an evaluation behind it."""
    found = []
    for number, length in enumerate(lengths):
        batch = tiny.make_batches(1, num_tokens=length, padded=False)[0]
        model.train()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        if number < len(evaluated):
            batch = tiny.make_batches(1, num_tokens=evaluated[number], padded=False)[0]
            with torch.no_grad():
                found.append(model.eval()(**batch, use_cache=False).loss)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LENGTHS)
def test_few_forms_are_exact_and_below_the_limit(name: str) -> None:
    found = []
    for prepare in (lambda model: model, prepare_plain):
        torch._dynamo.reset()
        counters.clear()
        model = prepare(make_model("qwen2", num_layers=3, hidden_size=64, dropout=0.0))
        # Without the fallback, so that a limit that is met would be an error in the resident run.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            found.append(steps(compile_layers(model), *LENGTHS[name]))
    torch._dynamo.reset()
    expected, prepared = found
    assert len(expected) == len(prepared) > 20
    assert all(map(torch.equal, expected, prepared))


@pytest.mark.parametrize(
    ("lengths", "evaluated", "match"),
    [
        pytest.param([8], [9], "evaluation at different lengths", id="another length"),
        pytest.param(
            *([8, 9], [8], "evaluation at different lengths"),
            id="lengths, then evaluation",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_forms_that_meet_the_limit_at_other_points_are_refused(
    lengths: list[int], evaluated: list[int], match: str
) -> None:
    model = compile_layers(prepare_plain(build(0.0)), 1, backend="eager")
    with pytest.raises(UnsupportedModelError, match=match):
        steps(model, lengths, evaluated)


def test_masks_and_caches_of_one_compiled_layer_are_refused() -> None:
    model = compile_layers(prepare_plain(build(0.0)).train(), 1, backend="eager")
    batch = tiny.make_batches(1, num_tokens=8, padded=False)[0]
    model(**batch).loss.backward()
    with pytest.raises(UnsupportedModelError, match="different forms"), torch.no_grad():
        model.eval()(**batch, use_cache=True)


def test_the_limit_itself_is_an_error() -> None:
    model = compile_layers(prepare_plain(build(0.0)).train(), 1, backend="eager")
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(UnsupportedModelError, match="recompile limit"),
    ):
        steps(model, [8, 9, 10], [])


def test_compiling_what_holds_the_layers_is_refused() -> None:
    model = prepare_plain(build(0.0))
    for module in (model, model.get_base_model(), layers_of(model)):
        with pytest.raises(PreparedModelError, match="every decoder layer"):
            module.compile()


def test_a_graph_around_the_layers_is_refused() -> None:
    batch = tiny.make_batches(1, num_tokens=8, padded=False)[0]
    model = prepare_plain(build(0.0)).train()
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    outer = torch.compile(model, backend=backend)
    of_a_function = torch.compile(lambda: model(**batch).loss, backend=backend)
    first, given = layers_of(model)[0], torch.ones(1)
    of_a_layer = torch.compile(lambda: first(given), backend=backend)
    for run_once in (lambda: outer(**batch), of_a_function, of_a_layer):
        with pytest.raises(PreparedModelError, match="whole model"):
            run_once()
    # Before the compiler, which takes minutes for a large model, has worked on anything.
    assert compiled == []
    torch._dynamo.reset()
    # Under no_grad there is nothing to compare, and without a graph nothing to refuse.
    with torch.no_grad():
        expected = model(**batch).loss
        assert torch.equal(outer(**batch).loss, expected)
    assert torch.equal(model(**batch).loss.detach(), expected)


def test_compiling_layers_with_dropout_is_refused() -> None:
    model = prepare_plain(build(0.05))
    with pytest.raises(UnsupportedModelError, match="dropout"):
        compile_layers(model)
    assert compare_trajectories(run(build(0.05)), run(model)) == []


@pytest.mark.parametrize(
    "use_dora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lora", "dora"]
)
def test_compiled_layers_run_peft_s_modules_and_stats_say_so(use_dora: bool, bases: Bases) -> None:
    names = ["q_proj", "down_proj"]
    model = adapted(bases, quantize=False, use_dora=use_dora, target_modules=names)
    poros.prepare(model, loss="reference")
    compile_layers(model, backend="eager")
    for _ in range(2):
        step(model)
    stats = poros.runtime(model).stats()
    # Of two layers, two projections, in forward and recomputation; the check is not counted.
    assert (stats["num_fused_adapters"], stats["num_unfused_adapters"]) == (0, 2 * 2 * 2 * 2)
    assert stats["fallbacks"] == ["adapters ran PEFT's modules: compiled layers"]


def test_adapter_kernels_do_not_make_a_compiled_layer_compile_anew(bases: Bases) -> None:
    """A counter that a graph looks at would: up to the limit, and from then on nothing is."""
    model = adapted(bases, quantize=False, target_modules=["q_proj", "down_proj"])
    plain = step(model)
    torch._dynamo.reset()
    counters.clear()
    poros.use_adapter_kernels(model)
    compile_layers(model, backend="eager")
    found = [step(model) for _ in range(3)]
    assert counters["stats"]["unique_graphs"] == 2
    assert not any(differences(plain, each) for each in found)
