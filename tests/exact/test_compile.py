"""Compiling a prepared model is refused; adapter kernels run in compiled layers of others."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import poros
from poros.errors import PreparedModelError
from poros.gates import tiny
from tests.loops import adapted, differences, layers_of, step
from tests.support import make_model, prepare_plain


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def build() -> Any:
    return make_model("qwen2", num_layers=1, hidden_size=64, dropout=0.0)


def test_compiling_layers_and_what_holds_them_is_refused() -> None:
    model = prepare_plain(build())
    for module in (model, model.get_base_model(), layers_of(model), layers_of(model)[0]):
        with pytest.raises(PreparedModelError, match="not compiled"):
            module.compile()


def test_a_graph_around_the_layers_is_refused() -> None:
    batch = tiny.make_batches(1, num_tokens=8, padded=False)[0]
    model = prepare_plain(build()).train()
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
    torch._dynamo.reset()
    # Under no_grad there is nothing to compare, and without a graph nothing to refuse.
    with torch.no_grad():
        expected = model(**batch).loss
        assert torch.equal(outer(**batch).loss, expected)
    assert torch.equal(model(**batch).loss.detach(), expected)


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
