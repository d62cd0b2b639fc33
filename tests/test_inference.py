"""Evaluation and generation equal those of the resident model, and leave training exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from snapshots import (
    assert_same_run,
    batches,
    bf16,
    bits_of,
    build,
    changes,
    digest,
    layers_of,
    picture,
    run,
)
from support import AdversarialPrepare, same_bits

import poros
from poros.gates import tiny
from poros.slots.schedule import Phase, count, walk

NUM_NEW_TOKENS = 5


def generated(model: Any, **options: Any) -> dict[str, object]:
    """Greedy tokens and the logits of every step, as digests."""
    batch = batches()[0]
    out = model.generate(
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
    logits = {f"logits {index}": digest(each) for index, each in enumerate(out.logits)}
    return {"tokens": out.sequences.tolist(), **logits}


def losses(model: Any) -> dict[str, object]:
    return {
        f"{name} {index}": digest(each)
        for index, batch in enumerate(batches())
        for name, each in model(**batch).items()
        if isinstance(each, torch.Tensor)
    }


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_evaluation_and_generation_equal_the_resident_ones(architecture: str, mode: str) -> None:
    # Four layers: the fewest of which two can share the keys and values of the others.
    twin = build(architecture, num_layers=4).eval()
    model = poros.prepare(build(architecture, num_layers=4)).eval()
    before = bits_of(model)
    with MODES[mode]():
        assert changes(losses(twin), losses(model)) == {}
        expected, found = generated(twin), generated(model)
    assert changes(expected, found) == {}
    assert changes(before, bits_of(model)) == {}
    # The first bytes that came into the slots came under this mode; training goes on from them.
    assert_same_run(run(twin), run(model))
    with MODES[mode]():
        assert changes(generated(twin.eval()), generated(model.eval())) == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_evaluation_under_autocast_equals_the_resident_one(mode: str, dtype: torch.dtype) -> None:
    twin, model = build(dtype=dtype), poros.prepare(build(dtype=dtype))
    without = losses(twin.eval())
    for _ in range(2):
        for each in (twin, model):
            each.eval()
        with MODES[mode](), bf16():
            expected = losses(twin)
            assert changes(expected, losses(model)) == {}
        assert changes(without, expected)
        assert_same_run(
            run(twin, autocast_dtype=torch.bfloat16), run(model, autocast_dtype=torch.bfloat16)
        )


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"num_beams": 2},
        {"do_sample": True, "top_k": 0},
        {"cache_implementation": "static"},
        {"num_return_sequences": 2, "do_sample": True},
    ],
)
def test_other_ways_to_generate_equal_the_resident_ones(options: dict[str, Any]) -> None:
    found = []
    for model in (build(), poros.prepare(build(), block_size=2)):
        torch.manual_seed(0)
        found.append(generated(model.eval(), **options))
    assert changes(*found) == {}


def test_generation_uses_the_adapters() -> None:
    """The control of the tests above: another adapter gives other logits."""
    model = poros.prepare(build()).eval()
    expected = generated(model)
    with torch.no_grad():
        layers_of(model)[1].mlp.up_proj.lora_B["default"].weight.mul_(2)
    assert changes(expected, generated(model))


def test_dropout_without_gradients_draws_as_in_a_resident_run() -> None:
    found = []
    for model in (build(), poros.prepare(build())):
        torch.manual_seed(0)
        model.train()
        with torch.no_grad():
            found.append({**losses(model), "random state": digest(torch.get_rng_state())})
    assert changes(*found) == {}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_prepared_under_a_gradless_mode_is_exact_or_refused(mode: str) -> None:
    model, twin = build(), build()
    before = picture(model)
    with MODES[mode]():
        try:
            poros.prepare(model)
        except poros.PorosError:
            assert changes(before, picture(model)) == {}
            return
    assert_same_run(run(twin), run(model))
    poros.restore(model)
    assert_same_run(run(twin), run(model))


def test_evaluation_between_forward_and_backward_changes_nothing() -> None:
    twin, model = build(), poros.prepare(build())
    found = []
    for each in (twin, model):
        torch.manual_seed(0)
        each.train()
        loss = each(**batches()[0]).loss
        each.eval()
        with torch.no_grad():
            generated(each)
            losses(each)
        each.train()
        loss.backward()
        gradients = {n: digest(p.grad) for n, p in each.named_parameters() if p.grad is not None}
        found.append({"random state": digest(torch.get_rng_state()), **gradients})
        each.zero_grad()
    assert changes(*found) == {}
    assert_same_run(run(twin), run(model))


def test_evaluation_with_adversarial_streams_is_exact() -> None:
    prepare = AdversarialPrepare()
    with prepare.watching():
        twin, model = build().eval(), prepare(build()).eval()
        with torch.no_grad():
            assert changes(losses(twin), losses(model)) == {}
            assert changes(generated(twin), generated(model)) == {}
        assert_same_run(run(twin), run(model))


@pytest.mark.parametrize(("block_size", "slots"), [(1, 2), (1, 3), (2, 2), (3, 2)])
def test_loads_of_an_evaluation_follow_the_walk(block_size: int, slots: int) -> None:
    model = poros.prepare(build(num_layers=5), block_size=block_size, slots=slots).eval()
    runtime = poros.runtime(model)
    num_forwards = 3
    with torch.no_grad():
        for _ in range(num_forwards):
            model(**batches()[0])
    num_blocks = runtime.num_blocks
    visits = [(block, Phase.INFERENCE) for block in range(num_blocks)] * num_forwards
    expected = count(walk(visits, num_blocks, runtime.num_slots), "prefetch")
    assert runtime.stats()["num_loads"] == expected
    if runtime.num_slots < num_blocks:
        # A forward-only pass loads K blocks at most, and what is loaded ahead for the next one.
        assert expected <= num_forwards * num_blocks + slots
    else:
        assert expected == num_blocks


def test_eager_attention_equals_the_resident_one_in_evaluation() -> None:
    def make() -> Any:
        return build(attn_implementation="eager").eval()

    with torch.no_grad():
        out = make()(**batches()[1])
        assert same_bits(out.logits, poros.prepare(make())(**batches()[1]).logits)
        assert out.loss.isfinite()
