"""Models whose visits are recorded on tapes, and whose slots are poisoned."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import poros
from poros.api import prepare_with
from poros.replay.captures import Captures
from tests import loops
from tests.loops import Batch, Subject, adapted, bf16, own_loss, same, trained
from tests.support import AS_PLAIN, poison_what_is_released
from tools.adversary import AdversarialStreams
from tools.tape import TapeRecorder

Model = Any
KEPT = {"slots": 2, "keep_last": 2}
"""A policy under which both layers keep their graph."""
few = partial(adapted, target_modules=["q_proj", "down_proj"])
"""With two adapters a layer: what is recorded is the layer."""
few_dense = partial(few, quantize=False)


def recorded(model: Model, **policy: Any) -> tuple[Model, Any, TapeRecorder]:
    """The model, prepared; its captures; and what records them."""
    recorder = TapeRecorder()
    chosen = poros.StreamingPolicy(loss="reference", device="cpu", **policy)
    prepare_with(model, chosen, recorder=recorder)
    return model, poros.runtime(model).context.captures, recorder


def as_resident(make: Subject, run: Callable[[Model], list[Any]], **policy: Any) -> Any:
    """A run of a recorded model has the bits of a resident one; its captures."""
    model, captures, _ = recorded(make(), **policy)
    assert same(run(model), run(make()))
    return captures


def loss_of(model: Model, length: int = 12, shift: int = 0) -> torch.Tensor:
    tokens = torch.arange(length)[None] + shift
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]


def spoil(patch: pytest.MonkeyPatch, fault: Callable[[TapeRecorder, list[Any]], None]) -> None:
    """Have the steps of each recording changed by ``fault``."""
    genuine = TapeRecorder.record

    def record(self: TapeRecorder, run: Callable[[], None], is_held: bool = False) -> Any:
        recording: Any = genuine(self, run, is_held)
        fault(self, recording.tape._steps)
        return recording

    patch.setattr(TapeRecorder, "record", record)


def train(model: Model, num_steps: int = 9, accumulation: int = 1, **options: Any) -> list[Any]:
    """Losses, gradients and adapters of each step; lengths alternate; dropout draws on."""
    return loops.train(model, False, sizes=(accumulation,) * num_steps, lengths=(12, 20), **options)


def gradients(model: Model) -> list[Any]:
    return [each.grad.clone() for each in trained(model)]


def record_on_tapes(patch: pytest.MonkeyPatch) -> list[Captures]:
    """Have every model that is prepared from now on record on a CPU; what they record."""
    made: list[Captures] = []

    def captures_for(policy: Any, device: Any, recorder: Any, blocks: Any) -> Captures | None:
        if policy.cuda_graphs is False:
            return None
        made.append(Captures(recorder or TapeRecorder(), device))
        return made[-1]

    patch.setattr("poros.model.runtime.captures_for", captures_for)
    return made


def poisoned(model: Model, recorder: TapeRecorder | None = None, **policy: Any) -> Model:
    """Streamed by adversarial streams on two slots, each poisoned as soon as it is released.

    So whatever reads one without asking for its block shows.
    """
    usual = {"device": "cpu", "slots": 2, "self_check": "off", **AS_PLAIN}
    chosen = poros.StreamingPolicy(**{**usual, **policy})
    prepare_with(model, chosen, streams=AdversarialStreams(), recorder=recorder)
    poison_what_is_released(model)
    return model


def on_tapes(model: Model, **policy: Any) -> Model:
    """The same, with visits that are recorded on tapes, and then replayed."""
    return poisoned(model, TapeRecorder(), **policy)


# Layers that keep their graphs, and are replayed in a row.

NUM_LAYERS = 4
ONE_LENGTH: Any = {"sizes": (2,) * 4, "lengths": (12,), "together": False}
undrawn = partial(few_dense, num_layers=NUM_LAYERS)
"""Layers that draw no random numbers."""


def kept_in_a_row(model: Model, num_layers: int = NUM_LAYERS, **policy: Any) -> Model:
    """Prepared; all layers keep their graphs, and slots and recordings are poisoned."""
    room = {"slots": num_layers, "keep_last": num_layers, "self_check": "off"}
    return recorded(model, **{**room, **policy})[0]


def num_joined(model: Model) -> int:
    found: int = poros.runtime(model).stats()["num_joined_visits"]
    return found


def in_the_models_region(model: Model, batch: Batch) -> torch.Tensor:
    """As Accelerate has it: the region ends with the model."""
    forward = model.forward
    model.forward = bf16()(forward)
    try:
        return own_loss(model, batch)
    finally:
        model.forward = forward


def prepared_and_joined(**options: Any) -> tuple[Model, Batch]:
    """A model whose passes are joined by now, and a batch."""
    model = kept_in_a_row(undrawn(**options))
    loops.train(model, **ONE_LENGTH)
    assert num_joined(model) > 0
    tokens = torch.arange(24).view(2, 12) + 5
    return model, {"input_ids": tokens, "labels": tokens}
