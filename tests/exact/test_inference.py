"""Evaluation and generation equal those of the resident model, and leave training exact.

Of all architectures, without autocast: ``test_cells``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.stream.boundary import is_streamed
from tests.comparing import changes
from tests.exact import programs as P
from tests.exact import subjects as S
from tests.loops import (
    ON_HOST,
    Model,
    Program,
    Subject,
    batches,
    bf16,
    differing_facts,
    facts_of,
    layers_of,
    streamed,
)

NUM_NEW_TOKENS = 4
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def generated(model: Model, **options: Any) -> object:
    """Greedy tokens and the logits of every step."""
    batch = batches()[0]
    out = model.eval().generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        # Some versions of transformers cannot weight it by the mask of a prompt.
        **({"output_router_logits": False} if hasattr(model.config, "num_local_experts") else {}),
        **{"do_sample": False, **options},
    )
    assert out.sequences.shape[1] == 12 + NUM_NEW_TOKENS and len(out.logits) == NUM_NEW_TOKENS
    return out.sequences, list(out.logits)


def outputs(model: Model) -> object:
    """Losses and logits of all batches; in which mode is left to the caller."""
    return [
        {name: each for name, each in model(**batch).items() if isinstance(each, torch.Tensor)}
        for batch in batches()
    ]


def with_training_under_autocast(mode: Callable[[], Any]) -> Program:
    def program(model: Model) -> object:
        without, found = facts_of(outputs(model.eval())), []
        for _ in range(2):
            with mode(), bf16():
                found.append(outputs(model.eval()))
            assert changes(without, facts_of(found[-1])), "autocast changes bits"
            found.append(P.train_under_autocast(model))
        return found

    return program


GENERATION: dict[str, tuple[Program, Subject, dict[str, Any]]] = {
    "without a cache": (partial(generated, use_cache=False), S.PLAIN, {}),
    "of experts": (generated, S.small("qwen3_moe"), {}),
    "samples": (partial(generated, do_sample=True, top_k=0), S.PLAIN, {}),
    "beams, head on the host": (partial(generated, num_beams=2), S.PLAIN, ON_HOST),
    "a static cache": (partial(generated, cache_implementation="static"), S.PLAIN, {}),
}
"""With their logits whole, as they are read; with the head in host memory or not."""


@pytest.mark.cover("values")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("subject", [S.PLAIN, S.FP32], ids=["bf16", "fp32"])
def test_evaluation_under_autocast_is_exact(subject: Any, mode: str) -> None:
    program = with_training_under_autocast(MODES[mode])
    assert differing_facts(subject, program) == {}


@pytest.mark.parametrize("name", GENERATION)
def test_other_ways_to_generate_are_exact(name: str) -> None:
    program, subject, policy = GENERATION[name]
    assert differing_facts(subject, program, block_size=2, **policy) == {}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_prepared_under_a_gradless_mode_is_exact(mode: str) -> None:
    def train_and_restore(model: Model) -> object:
        first = P.train(model)
        if is_streamed(layers_of(model)[0]):
            poros.restore(model)
        return first, P.train(model)

    def prepare(model: Model) -> Model:
        with MODES[mode]():
            return streamed(model)

    assert differing_facts(S.PLAIN, train_and_restore, prepare) == {}


def test_control_generation_uses_the_adapters() -> None:
    model = streamed(S.PLAIN())
    expected = facts_of(generated(model))
    with torch.no_grad():
        layers_of(model)[1].mlp.up_proj.lora_B["default"].weight.mul_(2)
    assert changes(expected, facts_of(generated(model)))
