"""A real model, driven as no plan expects: bit for bit what the resident model does.

Evaluation and decoding between forward and backward, several forwards before their backwards, a
step that is abandoned, exceptions out of the middle of a layer. Streams are adversarial, and reads
are watched.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poros
from poros.gates import tiny
from poros.gates.reference import TrainingSpec, Trajectory, train
from tests.comparing import compare_mappings, compare_trajectories
from tests.support import AdversarialPrepare, make_model

NUM_LAYERS = 4
BATCHES = tiny.make_batches(3, num_tokens=8)

Record = dict[str, torch.Tensor]
Script = Callable[[Any, Record], None]
POLICIES = [
    pytest.param({"block_size": 1, "slots": 2}, id="4 blocks, 2 slots"),
    pytest.param({"block_size": 1, "slots": 3}, id="4 blocks, 3 slots"),
    pytest.param({"block_size": 2, "slots": 2}, id="2 blocks, 2 slots"),
]


def build() -> Any:
    return make_model("qwen2", num_layers=NUM_LAYERS, hidden_size=64, dropout=0.05)


def loss_of(model: Any, index: int) -> torch.Tensor:
    loss: torch.Tensor = model(**BATCHES[index]).loss
    return loss


def take_gradients(model: Any, record: Record, label: str) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            record[f"{label}: gradient of {name}"] = parameter.grad.clone()
            parameter.grad = None


def evaluate(model: Any, record: Record, label: str) -> None:
    model.eval()
    with torch.inference_mode():
        record[f"{label}: logits"] = model(**BATCHES[2]).logits.clone()
        prompt = BATCHES[2]["input_ids"][:, :3]
        tokens = model.generate(input_ids=prompt, max_new_tokens=2, do_sample=False)
        record[f"{label}: tokens"] = tokens.clone()
    model.train()


# What is done between forward and backward.


def evaluate_in_the_middle(model: Any, record: Record) -> None:
    record["loss"] = loss = loss_of(model, 0)
    evaluate(model, record, "before backward")
    loss.backward()
    evaluate(model, record, "after backward")


def two_forwards_then_backwards_in_reverse(model: Any, record: Record) -> None:
    losses = [loss_of(model, index) for index in range(2)]
    for index, loss in reversed(list(enumerate(losses))):
        loss.backward()
        record[f"loss {index}"] = loss


def an_abandoned_forward(model: Any, record: Record) -> None:
    loss_of(model, 1)
    record["loss"] = loss = loss_of(model, 0)
    loss.backward()


def the_same_graph_twice(model: Any, record: Record) -> None:
    record["loss"] = loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    evaluate(model, record, "between")
    loss.backward()


SCRIPTS = (
    evaluate_in_the_middle,
    two_forwards_then_backwards_in_reverse,
    an_abandoned_forward,
    the_same_graph_twice,
)


def play(model: Any, script: Script) -> Record:
    """Run the script and an ordinary step after it; everything they computed."""
    record: Record = {}
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        script(model, record)
        take_gradients(model, record, "script")
        loss_of(model, 2).backward()
        take_gradients(model, record, "the step after it")
        record["random state"] = torch.get_rng_state()
    return {name: tensor.detach() for name, tensor in record.items()}


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.__name__)
def played(request: pytest.FixtureRequest) -> tuple[Script, Record]:
    """A script, and what the resident model computes under it."""
    with AdversarialPrepare().watching():
        resident = play(build(), request.param)
    assert sum("gradient" in name for name in resident) >= 2 * NUM_LAYERS
    return request.param, resident


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_of_passes_changes_no_bit(
    played: tuple[Script, Record], policy: dict[str, int]
) -> None:
    script, resident = played
    prepare = AdversarialPrepare()
    with prepare.watching():
        assert compare_mappings(resident, play(prepare(build(), **policy), script)) == []


# Exceptions out of a layer.


class Interrupted(RuntimeError):
    """Something in a layer that is none of the runtime's business."""


def train_two_steps(model: Any) -> Trajectory:
    return train(model, BATCHES, TrainingSpec(num_steps=2))


@pytest.fixture(scope="module")
def healthy() -> Trajectory:
    """The resident run without any interruption."""
    with AdversarialPrepare().watching():
        return train_two_steps(build())


def layers_of(model: Any) -> Any:
    return model.get_base_model().model.layers


def raise_in_call(model: Any, layer: int, number: int, error: BaseException) -> Any:
    """Raise in the middle of a layer: 1 is its forward, 2 its recomputation in backward."""
    calls = 0

    def hook(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error

    return layers_of(model)[layer].mlp.register_forward_pre_hook(hook)


def raise_in_gradient(model: Any, layer: int, _: int, error: BaseException) -> Any:
    """Raise while autograd is inside the recomputed graph of a layer."""

    def raise_now(gradient: torch.Tensor) -> None:
        raise error

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(raise_now)

    return layers_of(model)[layer].mlp.register_forward_hook(hook)


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("arrange", "number", "layer"),
    [
        pytest.param(raise_in_call, 1, 0, id="forward of the first layer"),
        pytest.param(raise_in_call, 1, 2, id="forward of a middle layer"),
        pytest.param(raise_in_call, 2, 3, id="recomputation of the last layer"),
        pytest.param(raise_in_call, 2, 1, id="recomputation of a middle layer"),
        pytest.param(raise_in_gradient, 1, 1, id="gradient of a middle layer"),
        pytest.param(raise_in_gradient, 1, 0, id="gradient of the first layer"),
    ],
)
def test_healthy_steps_after_an_exception_equal_the_resident_ones(
    arrange: Callable[..., Any],
    number: int,
    layer: int,
    policy: dict[str, int],
    healthy: Trajectory,
) -> None:
    prepare = AdversarialPrepare()
    error = KeyboardInterrupt() if layer == 1 else Interrupted("in the middle of a layer")
    with prepare.watching():
        model = prepare(build(), **policy)
        model.train()
        hook = arrange(model, layer, number, error)
        with pytest.raises(type(error)):
            loss_of(model, 1).backward()
        hook.remove()
        assert compare_trajectories(healthy, train_two_steps(model)) == []
        runtime = poros.runtime(model)
        before = runtime.stats()["num_loads"]
        loss_of(model, 0).backward()
    loads = 2 * (runtime.num_blocks - runtime.num_slots)
    assert runtime.stats()["num_loads"] - before == loads
    assert runtime.stats()["num_loads"] == prepare.streams.num_copies


def test_an_exception_in_an_evaluation_leaves_training_exact(healthy: Trajectory) -> None:
    prepare = AdversarialPrepare()
    with prepare.watching():
        model = prepare(build(), slots=2)
        hook = raise_in_call(model, 2, 1, Interrupted())
        with pytest.raises(Interrupted), torch.no_grad():
            model.eval()(**BATCHES[0])
        hook.remove()
        assert compare_trajectories(healthy, train_two_steps(model)) == []


def test_a_step_after_every_layer_was_interrupted_once(healthy: Trajectory) -> None:
    prepare = AdversarialPrepare()
    with prepare.watching():
        model = prepare(build(), slots=3)
        model.train()
        for number in (1, 2):
            for layer in range(NUM_LAYERS):
                hook = raise_in_call(model, layer, number, Interrupted())
                with pytest.raises(Interrupted):
                    loss_of(model, 0).backward()
                hook.remove()
        assert compare_trajectories(healthy, train_two_steps(model)) == []
