"""Nothing of a step is left when it is over: not after it, not after ``restore``.

Counted without the collector of cycles: what only it could free waits for it, on a GPU with memory
that the next step needs.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import poros
from poros.gates import tiny
from poros.replay.call import LayerCall
from poros.stream.general import RecomputedCall
from tests.covers import with_slow
from tests.snapshots import batches, build
from tests.support import prepare_plain

Model = Any
CALLS = (LayerCall, RecomputedCall)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def living() -> Counter[str]:
    """Tensors by shape, and calls of layers."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        # By type: asking some objects for their class runs code of theirs.
        if issubclass(type(each), torch.Tensor):
            found[f"tensor {tuple(each.shape)}"] += 1
        elif type(each) in CALLS:
            found["call"] += 1
    return found


def calls() -> list[Any]:
    return [value for value in gc.get_objects() if type(value) in CALLS]


def train(model: Model, number: int) -> None:
    model.train()
    model(**batches()[number % 2]).loss.backward()
    model.zero_grad()


def abandon(model: Model, number: int) -> None:
    """A forward with gradients and no backward."""
    model.train()
    model(**batches()[number % 2])


def evaluate(model: Model, number: int) -> None:
    model.eval()
    with torch.no_grad():
        model(**batches()[number % 2])


SLOW = ("llama", "mistral", "qwen3", "phi3", "gemma4", "qwen3_moe")


@pytest.mark.parametrize("architecture", with_slow(tiny.ARCHITECTURES, SLOW))
def test_as_much_is_held_after_six_steps_as_after_three(architecture: str) -> None:
    options = {"num_layers": 4, "hidden_size": 32} if "shared" in architecture else {}
    model = prepare_plain(build(architecture, **options))
    with without_collector():
        earlier = weakref.WeakSet(calls())
        for once in (train, abandon, evaluate):
            for number in range(3):
                once(model, number)
            after_three = living()
            for number in range(3):
                once(model, number + 1)
            assert living() - after_three == Counter(), once.__name__
        poros.restore(model)
        # What an earlier test has left behind may live or go.
        assert not [each for each in calls() if each not in earlier]


def test_a_cycle_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = RecomputedCall.forward

    def forward(self: RecomputedCall, args: Any, kwargs: Any) -> Any:
        self.result = genuine(self, args, kwargs)  # type: ignore[attr-defined]
        return self.result  # type: ignore[attr-defined]

    monkeypatch.setattr(RecomputedCall, "forward", forward)
    model = prepare_plain(build())
    with without_collector():
        before = living()
        abandon(model, 0)
        assert living()["call"] > before["call"]
