"""Learners and copies: what the tests of copies share."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from snapshots import batches, build, digest, layers_of
from torch import nn

import poros
from poros.block import is_streamed


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


class Learner:
    """A model and its optimizer, one step at a time; keeps the digests of all that comes out."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.AdamW(trainable(model).values(), lr=1e-2)
        self.model.train()

    def forward(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        loss: torch.Tensor = self.model(**batches()[seed % 2]).loss
        return loss

    def backward(self, loss: torch.Tensor) -> dict[str, object]:
        loss.backward()
        found: dict[str, object] = {"loss": digest(loss), "rng": digest(torch.get_rng_state())}
        for name, parameter in trainable(self.model).items():
            assert parameter.grad is not None, name
            found[f"{name} gradient"] = digest(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, parameter in trainable(self.model).items():
            found[name] = digest(parameter)
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name} {key}"] = digest(value)
        return found

    def step(self, seed: int) -> dict[str, object]:
        return self.backward(self.forward(seed))

    def steps(self, *seeds: int) -> list[dict[str, object]]:
        return [self.step(seed) for seed in seeds]


def assert_streams(model: Any) -> None:
    assert all(is_streamed(layer) for layer in layers_of(model))
    assert poros.runtime(model).stats()["num_loads"] > 0


def assert_still_exact(model: Any, **options: Any) -> None:
    """A prepared model, not trained yet, equals a resident one."""
    assert Learner(model).steps(0, 1) == Learner(build(**options)).steps(0, 1)
    assert_streams(model)


def storages(model: Any) -> dict[tuple[int, int], str]:
    """First and last address of every piece of memory that a prepared model holds, named."""
    found: dict[tuple[int, int], str] = {}

    def add(name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            storage = tensor.untyped_storage()
            found[storage.data_ptr(), storage.data_ptr() + storage.nbytes()] = name

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        add(name, tensor)
    for name, module in model.named_modules():
        for state in (
            module.__dict__.get("quant_state"),
            getattr(getattr(module, "weight", None), "quant_state", None),
        ):
            if state is not None:
                for each in (state, state.state2):
                    add(f"{name} absmax", each.absmax)
                    add(f"{name} code", each.code)
    takeover = poros.runtime(model)._takeover
    for number, slab in enumerate(takeover.host.slabs):
        add(f"slab {number}", slab.bytes)
    for slot in takeover.ring.slots:
        add(f"slot {slot.index}", slot.buffer)
    return found


def shared(one: Any, other: Any) -> list[str]:
    """What two prepared models have in common: memory, modules, parameters, the runtime."""
    found = [
        f"{name} and {other_name}"
        for (first, last), name in storages(one).items()
        for (other_first, other_last), other_name in storages(other).items()
        if first < other_last and other_first < last
    ]
    for kind in ("named_modules", "named_parameters", "named_buffers"):
        ids = {id(each) for _, each in getattr(other, kind)()}
        found += [name for name, each in getattr(one, kind)() if id(each) in ids]
    left, right = poros.runtime(one), poros.runtime(other)
    if left is right or left._takeover is right._takeover or left.self_check is right.self_check:
        found.append("runtime")
    return found


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "torch.save": by_torch_save,
}
