"""Models whose visits are recorded on tapes, and how they are trained."""

from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any

import pytest
import torch

import poros
from poros.api import prepare_with
from poros.replay.captures import Captures
from tests.exact import together
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.together import trained
from tools.tape import TapeRecorder

Model = Any
KEPT = {"slots": 2, "keep_last": 2}
"""A policy under which both layers keep their graph."""
few = partial(adapted, target_modules=["q_proj", "down_proj"])
"""With two adapters a layer: what is recorded is the layer."""
autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def recorded(model: Model, **policy: Any) -> tuple[Any, TapeRecorder]:
    recorder = TapeRecorder()
    chosen = poros.StreamingPolicy(loss="reference", device="cpu", **policy)
    prepare_with(model, chosen, recorder=recorder)
    return poros.runtime(model).context.captures, recorder


def train(model: Model, num_steps: int, accumulation: int, change: Any = None) -> list[Any]:
    """Losses, gradients and adapters of each step; lengths alternate; dropout draws on."""
    options = {} if change is None else {"between": change}
    sizes = (accumulation,) * num_steps
    return together.train(model, False, sizes=sizes, lengths=(12, 20), **options)


def loss_of(model: Model, length: int = 12, shift: int = 0) -> torch.Tensor:
    tokens = torch.arange(length)[None] + shift
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]


def spoil(patch: pytest.MonkeyPatch, fault: Callable[[TapeRecorder, list[Any]], None]) -> None:
    """Have the steps of each recording changed by ``fault``."""
    genuine = TapeRecorder.record

    def record(self: TapeRecorder, run: Callable[[], None], is_held: bool = False) -> Any:
        recording: Any = genuine(self, run, is_held)
        fault(self, recording._tape._steps)
        return recording

    patch.setattr(TapeRecorder, "record", record)


def other_rate(model: Model, number: int) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1 if number < 5 else 0.4


def other_scaling(model: Model, number: int) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = 0.5 if number < 5 else 2.0


def averaged_weights(model: Model, number: int) -> None:
    """Swapped in through ``.data``, which no version counts."""
    if number in (5, 7):
        for each in trained(model):
            each.data = each.data * 1.5


def edited_norms(model: Model, number: int) -> None:
    if number >= 5:
        for name, each in model.named_parameters():
            if "layernorm" in name:
                with torch.no_grad():
                    each.mul_(1.01)


def evaluation_between(model: Model, number: int) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    model.train()


def other_activation(model: Model, number: int) -> None:
    """A module in the place of another, neither of which has attributes that could differ."""
    if number in (0, 5):
        for name, module in list(model.named_modules()):
            if name.endswith("mlp"):
                module.act_fn = torch.nn.Tanh() if number == 0 else torch.nn.Sigmoid()


def kernels_of_a_library(model: Model, number: int) -> None:
    """Forwards that are set on modules, as Liger does."""
    if number in (0, 5):
        scale = 1.25 if number == 0 else 0.75

        def forward(self: Any, given: torch.Tensor) -> Any:
            return type(self).forward(self, given) * scale

        forward.__module__ = "liger_kernel.transformers.rms_norm"
        for name, module in model.named_modules():
            if name.endswith("layernorm"):
                module.forward = MethodType(forward, module)


def a_hook_comes(model: Model, number: int) -> None:
    if number == 5:
        mlp = model.base_model.model.model.layers[0].mlp
        mlp.register_forward_hook(lambda module, given, result: result * 1.5)


CHANGES: dict[str, Callable[[Model, int], None] | None] = {
    "nothing": None,
    "another rate": other_rate,
    "another scaling": other_scaling,
    "averaged weights": averaged_weights,
    "edited norms": edited_norms,
    "evaluation between": evaluation_between,
    "a hook comes": a_hook_comes,
    "another activation": other_activation,
    "kernels of a library": kernels_of_a_library,
}


@cache
def resident(bases: Bases, change: str, num_steps: int, accumulation: int) -> list[Any]:
    """What a resident run with dropout computes; run once for all that are compared with it."""
    return train(few(bases, lora_dropout=0.1), num_steps, accumulation, CHANGES[change])


def record_on_tapes(patch: pytest.MonkeyPatch, least_visits: int = 1) -> list[Captures]:
    """Have every model that is prepared from now on record on a CPU; what they record.

    Args:
        patch: Undoes it.
        least_visits: Eager visits of a form before it is recorded.
    """
    made: list[Captures] = []

    def captures_for(policy: Any, device: Any, recorder: Any, blocks: Any) -> Captures | None:
        if policy.cuda_graphs is False:
            return None
        made.append(Captures(recorder or TapeRecorder(), device))
        return made[-1]

    patch.setattr("poros.model.runtime.captures_for", captures_for)
    patch.setattr("poros.replay.captures._LEAST_VISITS", least_visits)
    return made
