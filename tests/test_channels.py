"""What layers hand on by the side: shared key-value states, per-layer inputs, router losses.

Exact against the resident run, under adversarial streams; and each channel, once dropped, makes the
gate fail, since a channel that no loss depends on would prove nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshots import (
    assert_same_run,
    batches,
    bits_of,
    build,
    changes,
    digest,
    layers_of,
    run,
)
from support import AdversarialPrepare, same_bits

import poros
from poros.errors import UnsupportedModelError
from poros.gates import tiny
from poros.gates.parity import check_architecture
from poros.gates.report import ParityReport
from poros.layer.call import LayerCall
from poros.layer.side_outputs import SideOutputs

FAMILIES = ("gemma4", "gemma4_shared_kv", "mixtral", "qwen3_moe")
MIXTURES = ("mixtral", "qwen3_moe")
NUM_LAYERS = 5
"""Of these, Gemma 4 with shared states computes three, and the last two reuse two of them."""
Patch = pytest.MonkeyPatch


def gate(architecture: str, *, num_steps: int = 6, **policy: Any) -> ParityReport:
    return check_architecture(
        architecture,
        num_steps=num_steps,
        num_layers=NUM_LAYERS,
        hidden_size=64,
        num_tokens=12,
        prepare=AdversarialPrepare(),
        **policy,
    )


def prepared(model: Any, **overrides: Any) -> Any:
    return AdversarialPrepare()(model, self_check="strict", allow_unvalidated=True, **overrides)


def step(model: Any, **extra: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Outputs of one training step, and its gradients by name."""
    model.train()
    torch.manual_seed(0)
    outputs = model(**batches()[1], **extra)
    outputs.loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return outputs, {name: p.grad for name, p in trained.items() if p.grad is not None}


def assert_same_bits(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> None:
    assert expected and expected.keys() == found.keys()
    assert [name for name in expected if not same_bits(expected[name], found[name])] == []


# Exact.


@pytest.mark.parametrize("architecture", FAMILIES)
def test_six_steps_are_exact(architecture: str) -> None:
    report = gate(architecture, self_check="strict")
    assert report.exact, report.verdict()
    assert report.tallies["gradients"].num_elements > 0


@pytest.mark.parametrize("architecture", FAMILIES)
def test_blocks_of_two_layers_and_accumulation_are_exact(architecture: str) -> None:
    model = prepared(build(architecture, num_layers=NUM_LAYERS), block_size=2)
    expected = run(build(architecture, num_layers=NUM_LAYERS), accumulation=2)
    assert_same_run(expected, run(model, accumulation=2))


@pytest.mark.parametrize("architecture", ["gemma4_shared_kv", "mixtral"])
def test_every_read_of_a_slot_is_ordered(architecture: str) -> None:
    prepare = AdversarialPrepare()
    expected = run(build(architecture, num_layers=4))
    with prepare.watching():
        found = run(prepare(build(architecture, num_layers=4), allow_unvalidated=True))
    assert_same_run(expected, found)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_hidden_states_are_exact(architecture: str) -> None:
    outputs, gradients = step(build(architecture, num_layers=4), output_hidden_states=True)
    model = prepared(build(architecture, num_layers=4))
    other_outputs, other_gradients = step(model, output_hidden_states=True)
    assert len(outputs.hidden_states) == len(other_outputs.hidden_states) == 5
    for one, other in zip(outputs.hidden_states, other_outputs.hidden_states, strict=True):
        assert one.abs().sum() > 0 and same_bits(one, other)
        assert one.requires_grad == other.requires_grad
    assert_same_bits(gradients, other_gradients)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_router_logits_are_exact_and_carry_gradients(architecture: str) -> None:
    """A loss on nothing but the routers: without the channel there would be no gradient at all."""

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.train()
        torch.manual_seed(0)
        outputs = model(**batches()[1])
        assert len(outputs.router_logits) == 3
        (outputs.aux_loss + outputs.router_logits[1].square().mean()).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {**found, "aux": outputs.aux_loss.detach(), "1": outputs.router_logits[1].detach()}

    expected = gradients(build(architecture))
    assert any(".layers.0." in name for name in expected)
    assert_same_bits(expected, gradients(prepared(build(architecture))))


# Per-layer inputs that require gradients.


def gemma_with_adapted_projection(folder: Path) -> Any:
    """Gemma 4 with an adapter on the projection that makes the per-layer inputs."""
    from peft import LoraConfig, get_peft_model

    if not folder.exists():
        config = tiny.small_config("gemma4", num_layers=3, hidden_size=64)
        tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    base = tiny.load_base(folder, dtype=torch.bfloat16)
    targets = ["per_layer_model_projection", "per_layer_projection", "q_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def test_an_adapter_below_the_layers_gets_its_gradient_through_all_of_them(
    tmp_path: Path,
) -> None:
    twin = gemma_with_adapted_projection(tmp_path / "base")
    model = prepared(gemma_with_adapted_projection(tmp_path / "base"))
    expected, found = run(twin, num_steps=6), run(model, num_steps=6)
    below = [name for name in expected.steps[0].gradients if "layers." not in name]
    assert len(below) == 2
    assert all(expected.steps[0].gradients[name].any() for name in below)
    assert_same_run(expected, found)
    assert poros.runtime(model).self_check["status"] == "passed"


# Negative controls.


def drop(patch: Patch, part: int) -> None:
    """Publish mappings (1) or records (2) without their gradient."""
    genuine = SideOutputs.publish

    def detached(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach()
        return tuple(map(detached, value)) if isinstance(value, tuple) else value

    def publish(self: SideOutputs, result: tuple[Any, ...]) -> Any:
        parts = list(result)
        parts[part] = detached(parts[part])
        return genuine(self, tuple(parts))

    patch.setattr(SideOutputs, "publish", publish)


def drop_shared_states(patch: Patch) -> None:
    drop(patch, 1)


def drop_router_losses(patch: Patch) -> None:
    drop(patch, 2)


def read_shared_states_as_constants(patch: Patch) -> None:
    """A layer that reads the mapping returns no gradient for it."""
    genuine = SideOutputs.run

    def run(self: SideOutputs, call: Any, tensors: Any) -> Any:
        held = [each for values in self._held.values() for each in values.values()]
        places = {number for pair in held for (number,) in pair}
        return genuine(
            self, call, [t.detach() if n in places else t for n, t in enumerate(tensors)]
        )

    patch.setattr(SideOutputs, "run", run)


CONTROLS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "shared states published as constants": ("gemma4_shared_kv", drop_shared_states),
    "shared states read as constants": ("gemma4_shared_kv", read_shared_states_as_constants),
    "router losses of mixtral": ("mixtral", drop_router_losses),
    "router losses of qwen3_moe": ("qwen3_moe", drop_router_losses),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_dropped_channel_makes_the_gate_fail(name: str, monkeypatch: Patch) -> None:
    architecture, fault = CONTROLS[name]
    fault(monkeypatch)
    report = gate(architecture, num_steps=2)
    assert report.error is None and not report.exact
    # The forward is right, so the first loss is: only gradients tell.
    assert report.differences[0].name.startswith("step 0, gradient of")


def test_per_layer_inputs_without_gradient_are_seen(tmp_path: Path, monkeypatch: Patch) -> None:
    twin = gemma_with_adapted_projection(tmp_path / "base")
    model = AdversarialPrepare()(
        gemma_with_adapted_projection(tmp_path / "base"), allow_unvalidated=True
    )
    genuine = LayerCall.run

    def run_without(self: LayerCall, tensors: Any) -> Any:
        return genuine(self, [tensors[0], tensors[1].detach(), *tensors[2:]])

    monkeypatch.setattr(LayerCall, "run", run_without)
    expected, found = step(twin)[1], step(model)[1]
    below = [name for name in expected if "layers." not in name]
    assert len(below) == 2 and not found.keys() & set(below)


# Refused by name.


@pytest.mark.parametrize("architecture", ["gemma4", "mixtral"])
def test_attentions_are_refused_by_name_under_grad_only(architecture: str) -> None:
    options = {"attn_implementation": "eager"}
    twin, model = build(architecture, **options), prepared(build(architecture, **options))
    assert len(twin(**batches()[1], output_attentions=True).attentions) == 3
    with pytest.raises(UnsupportedModelError, match=r"attentions cannot be recorded"):
        model(**batches()[1], output_attentions=True)
    twin.eval(), model.eval()
    with torch.no_grad():
        expected, found = (each(**batches()[1], output_attentions=True) for each in (twin, model))
    assert all(map(same_bits, expected.attentions, found.attentions))
    assert step(build(architecture, **options))[1].keys() == step(model)[1].keys()


@pytest.mark.parametrize("kind", [list, dict, set])
def test_an_unknown_mutable_container_is_refused_by_name(kind: type) -> None:
    def collect(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "findings": kind()}

    twin, model = build(), prepared(build())
    for each in (twin, model):
        layers_of(each)[1].register_forward_pre_hook(collect, with_kwargs=True)
    step(twin)
    with pytest.raises(
        UnsupportedModelError, match=rf"'findings' of .*layers\.1.* {kind.__name__}"
    ):
        step(model)


def test_a_mutable_container_in_the_shared_states_is_refused_by_name() -> None:
    def spoil(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kwargs["shared_kv_states"]["notes"] = []

    model = prepared(build("gemma4_shared_kv", num_layers=4))
    layers_of(model)[1].register_forward_pre_hook(spoil, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"shared_kv_states\['notes'\].* list"):
        step(model)


# Without gradients.


def generated(model: Any) -> dict[str, object]:
    model.eval()
    data = batches()[0]
    out = model.generate(
        input_ids=data["input_ids"],
        attention_mask=data["attention_mask"],
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        # Some versions of transformers cannot weight it by the mask of a prompt.
        **({"output_router_logits": False} if hasattr(model.config, "num_local_experts") else {}),
    )
    logits = {f"logits {number}": digest(each) for number, each in enumerate(out.logits)}
    return {"tokens": out.sequences.tolist(), **logits}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_generation_before_and_after_training_equals_the_resident_one(architecture: str) -> None:
    twin = build(architecture, num_layers=4)
    model = prepared(build(architecture, num_layers=4))
    with torch.no_grad():
        assert changes(generated(twin), generated(model)) == {}
    assert poros.runtime(model).self_check["status"] == "pending"
    assert_same_run(run(twin), run(model))
    with torch.no_grad():
        assert changes(generated(twin), generated(model)) == {}
    # Of all that there is, only the adapters have changed.
    bits = bits_of(poros.restore(model))
    assert changes(bits_of(build(architecture, num_layers=4)), bits).keys() <= {
        name for name in bits if "lora" in name
    }
