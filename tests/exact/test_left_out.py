"""Products that a recomputation leaves out, because nobody reads what they give."""

from collections.abc import Callable
from typing import Any

import pytest

import poros
from tests.exact.adapter_arms import adapted, step
from tests.exact.arms import Bases
from tests.support import same_bits

Model = Any


def prepared_steps(model: Model, change: Callable[[Model], None] | None = None) -> tuple[int, bool]:
    """Three steps, streamed: how many results were left out, and whether all bits are plain."""
    if change is not None:
        change(model)
    expected = step(model)
    poros.prepare(model, loss="reference")
    found = [step(model) for _ in range(3)]
    runtime = poros.runtime(model)
    assert runtime.self_check["status"] == "passed"
    same = all(
        each.order == expected.order
        and all(same_bits(each.facts[name], fact) for name, fact in expected.facts.items())
        for each in found
    )
    return runtime.stats()["num_left_out_adapters"], same


def with_hooks_inside(model: Model) -> None:
    model.base_model.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def reading_the_result(model: Model) -> None:
    """Something in the layer that reads what it returns, without a graph."""
    for layer in model.base_model.model.model.layers:
        kind = type(layer)

        class Reading(kind):  # type: ignore[misc, valid-type]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                result = super().forward(*args, **kwargs)
                self.largest = float(result.detach().abs().max())
                return result

        Reading.__name__ = kind.__name__
        layer.__class__ = Reading


# Layers whose last projection is left out in each of three steps, and why not.
LEFT_OUT: dict[str, tuple[str, Callable[[Model], None] | None, int]] = {
    "qwen2": ("qwen2", None, 6),
    "llama": ("llama", None, 6),
    "a norm behind": ("gemma3", None, 0),
    "hooks in one layer": ("qwen2", with_hooks_inside, 3),
    "a reader": ("qwen2", reading_the_result, 0),
}


@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_last_product_that_nobody_needs_is_left_out(
    case: str, quantize: bool, bases: Bases
) -> None:
    architecture, change, num_expected = LEFT_OUT[case]
    model = adapted(bases, architecture, quantize=quantize, lora_dropout=0.05)
    assert prepared_steps(model, change) == (num_expected, True)
