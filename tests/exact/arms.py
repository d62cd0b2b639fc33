"""Two arms from equal bytes, one resident and one streamed, and all that they compute.

What a resident arm computes is computed once a session: many streamed arms are compared with it.
"""

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import poros
from poros.api import prepare_with
from poros.gates.reference import Trajectory
from poros.head.choice import find_head
from poros.head.takeover import slice_loss
from tests.snapshots import changes, digest
from tests.support import AS_PLAIN, copied, make_base, make_model
from tools.adversary import POISON, AdversarialStreams
from tools.tape import TapeRecorder

Model = Any
Program = Callable[[Model], object]
"""Something that is done with a model; what it returns is compared as well."""
Facts = dict[str, object]
NUM_TIMES = 3
ON_HOST = {"loss": "chunked", "stream_head": True}


SMALL: dict[str, Any] = {"num_layers": 3, "hidden_size": 64, "dropout": 0.05}


class Bases:
    """Small models; equal arguments give equal bytes."""

    def __init__(self) -> None:
        self._made: dict[str, Model] = {}

    def once(self, key: str, make: Callable[[], Model]) -> Model:
        """A copy of the model that ``make`` gives; it is made once, and draws for itself."""
        if torch.is_inference_mode_enabled():
            return make()
        if key not in self._made:
            with torch.random.fork_rng(devices=[]):
                self._made[key] = make()
        return copied(self._made[key])

    def base(self, architecture: str = "qwen2", **options: Any) -> Model:
        """Without adapters; ``options`` as for ``make_base``."""
        return make_base(architecture, **{**SMALL, **options})

    def build(self, architecture: str = "qwen2", **options: Any) -> Model:
        """With adapters that are not zero; ``options`` as for ``make_model``."""
        return make_model(architecture, **{**SMALL, **options})


Subject = Callable[[Bases], Model]


class Residents:
    """What programs compute with resident models, and the models for both arms."""

    def __init__(self) -> None:
        self.bases = Bases()
        self._facts: dict[tuple[Subject, Program], Facts] = {}

    def facts(self, subject: Subject, program: Program) -> Facts:
        """What the program computes with a resident model."""
        key = subject, program
        if key not in self._facts:
            self._facts[key] = observe(subject(self.bases), program)
        return self._facts[key]

    def compare(
        self,
        subject: Subject,
        program: Program,
        prepare: Callable[[Model], Model] | None = None,
        **policy: Any,
    ) -> dict[str, object]:
        """The facts in which a streamed arm differs from the resident one."""
        expected = self.facts(subject, program)
        model = (prepare or streamed)(subject(self.bases), **policy)
        return changes(expected, observe(model, program))


PACKED = "base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"


def flip_nibble(model: Model, **_: Any) -> Model:
    """A fault that every gate has to see: one 4-bit code in the middle of one layer's weights."""
    dict(model.named_parameters())[PACKED].data[1000] ^= 0x0F
    return model


def slice_resident_loss(model: Model) -> Model:
    """A resident model whose loss is computed in slices; nothing of it streams."""
    base = model.get_base_model()
    head, _ = find_head(model, base, "chunked", False)
    if head is not None:
        slice_loss(base, head.module)
    return model


def narrow_slices(patch: pytest.MonkeyPatch) -> None:
    """Several slices of a small vocabulary, the last one narrower."""
    for name in ("_MOST_WEIGHTS", "_ALIGNMENT", "_LEAST_WIDTH"):
        patch.setattr(f"poros.head.loss.{name}", 96)


def streamed(model: Model, **policy: Any) -> Model:
    """Prepared, also if its architecture is not promised; with the loss of plain transformers."""
    usual = {"device": "cpu", **AS_PLAIN}
    return poros.prepare(model, **{**usual, **policy})


def poisoned(model: Model, recorder: TapeRecorder | None = None, **policy: Any) -> Model:
    """Streamed by adversarial streams on two slots, each poisoned as soon as it is released.

    So whatever reads one without asking for its block shows.
    """
    usual = {"device": "cpu", "slots": 2, "self_check": "off", **AS_PLAIN}
    chosen = poros.StreamingPolicy(**{**usual, **policy})
    prepare_with(model, chosen, streams=AdversarialStreams(), recorder=recorder)
    manager = poros.runtime(model).manager
    genuine, evict = manager.release, manager.evict

    def release(block: int) -> None:
        genuine(block)
        if not manager.is_pinned(block):
            slot = manager._ring.slot(block)
            evict(block)
            slot.buffer.fill_(POISON)

    manager.release = release  # type: ignore[method-assign]
    manager.evict = lambda block: release(block) if manager.is_held(block) else None  # type: ignore[method-assign]
    return model


def on_tapes(model: Model, **policy: Any) -> Model:
    """The same, with visits that are recorded on tapes, and then replayed."""
    return poisoned(model, TapeRecorder(), **policy)


@cache
def in_order(program: Program) -> Program:
    """The program, the order in which its gradients arrive, and all random states at its end."""

    def observed(model: Model) -> object:
        random.seed(3)
        np.random.seed(3)
        order: list[str] = []
        handles = [
            each.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
            for name, each in model.named_parameters()
            if each.requires_grad
        ]
        result = program(model)
        for handle in handles:
            handle.remove()
        return [result, order, random.random(), float(np.random.rand())]

    return observed


@cache
def often(program: Program, num_times: int = NUM_TIMES) -> Program:
    """The program several times, so that visits are replayed; the gradients of each as well."""

    def repeated(model: Model) -> object:
        found: list[object] = []
        for _ in range(num_times):
            model.train().zero_grad()
            result, named = program(model), model.named_parameters()
            gradients = {n: each.grad.clone() for n, each in named if each.grad is not None}
            found.append([result, gradients, torch.get_rng_state()])
        return found

    return repeated


def of_the_first(facts: Facts) -> Facts:
    """Of a program that ran ``often``: what it gave for the first time."""
    return {name: fact for name, fact in facts.items() if name.startswith("result, 0, ")}


def with_sliced_loss(model: Model, **policy: Any) -> Model:
    """Prepared, with its head in host memory."""
    return streamed(model, **{"slots": 2, **ON_HOST, **policy})


def observe(model: Model, program: Program) -> Facts:
    """Run a program in training mode: what it returns, gradients, the random state at its end."""
    model.train()
    torch.manual_seed(5)
    facts = facts_of(program(model))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            facts[f"gradient of {name}"] = digest(parameter.grad)
    assert facts, "a program that computes nothing shows nothing"
    return {**facts, "random state": digest(torch.get_rng_state())}


def facts_of(value: object, name: str = "result") -> Facts:
    """Digests of all tensors in nested containers; other values as they are."""
    if isinstance(value, Trajectory):
        assert any(bool(each.any()) for each in value.steps[0].gradients.values())
        return {f"{name}: {each.name}": digest(each.tensor) for each in value.entries()}
    if isinstance(value, torch.Tensor):
        return {name: digest(value)}
    items: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return {} if value is None else {name: value}
    return {k: v for key, each in items for k, v in facts_of(each, f"{name}, {key}").items()}
