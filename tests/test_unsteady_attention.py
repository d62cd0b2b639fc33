"""Attention whose backward does not repeat itself: proved all the same, and faults still found.

On a CPU it does repeat itself. So it is replaced by one that does not, unless PyTorch's
deterministic flag is on and not "warn only", as on a GPU.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import mutants
import pytest
import torch
from snapshots import batches, build, layers_of
from support import AdversarialPrepare
from torch.nn.attention import SDPBackend
from torch.overrides import handle_torch_function, has_torch_function

import poros
from poros.errors import ParityError
from poros.gates.reference import TrainingSpec, train
from poros.self_check import attention
from poros.slots.manager import BlockManager
from poros.slots.ring import Slot
from poros.slots.schedule import Phase

Patch = pytest.MonkeyPatch
Noise = Callable[[int], bool]


def always(_: int) -> bool:
    return True


def only_at_first(number: int) -> bool:
    """The three layers' streamed backwards and no other: all resident runs happen to agree."""
    return number % 3 == 0


def plant(patch: Patch, noise: Noise = always, obeys: bool = True) -> None:
    """Let the gradients of attention differ from call to call, as ``noise`` says."""
    calls: list[None] = []

    class ScaledDotProductUnsteady(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            return output.view_as(output)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            strict = torch.are_deterministic_algorithms_enabled() and not (
                torch.is_deterministic_algorithms_warn_only_enabled()
            )
            number = len(calls)
            calls.append(None)
            if noise(number) and not (strict and obeys):
                return gradients[0] * (1 + 2.0**-6 * (1 + number % 5))
            return gradients[0]

    genuine = torch.nn.functional.scaled_dot_product_attention

    def unsteady(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function((query,)):
            return handle_torch_function(unsteady, (query,), query, *args, **kwargs)
        return ScaledDotProductUnsteady.apply(genuine(query, *args, **kwargs))

    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", unsteady)
    patch.setattr(attention, "varies", lambda *_, **__: True)
    patch.setattr(attention, "_choice", lambda *_, **__: SDPBackend.FLASH_ATTENTION)


@pytest.fixture(autouse=True)
def flags_stay() -> Iterator[None]:
    yield
    assert not torch.are_deterministic_algorithms_enabled()


def prepared(**overrides: Any) -> Any:
    return AdversarialPrepare()(build("qwen2"), self_check="strict", **overrides)


def step(model: Any) -> dict[str, Any]:
    train(model, batches(), TrainingSpec(num_steps=2))
    found: dict[str, Any] = poros.runtime(model).self_check
    return found


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    messages = [each.getMessage() for each in caplog.records]
    return [each for each in messages if text in each]


@pytest.mark.parametrize("noise", [always, only_at_first])
@pytest.mark.parametrize("options", [{}, {"offload_boundaries": True}, {"block_size": 2}], ids=str)
def test_it_is_proved_with_deterministic_attention(
    noise: Noise, options: dict[str, Any], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, noise)
    with caplog.at_level(logging.WARNING, logger="poros"):
        found = step(prepared(**options))
    assert (found["status"], found["message"], found["not_provable"]) == ("passed", None, [])
    assert found["proved_with_deterministic_attention"]
    assert len(warnings_of(caplog, "With deterministic attention on both sides")) == 1


def test_attention_that_repeats_itself_is_proved_as_it_is() -> None:
    found = step(prepared())
    assert (found["status"], found["proved_with_deterministic_attention"]) == ("passed", [])


def test_a_layer_that_never_repeats_itself_trains_and_is_named(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, obeys=False)
    with caplog.at_level(logging.WARNING, logger="poros"):
        found = step(prepared())
    assert (found["status"], found["message"]) == ("unproven", None)
    assert len(found["not_provable"]) == 3 and "layers.2" in found["not_provable"][0]
    assert len(warnings_of(caplog, "cannot prove")) == 3


def test_outputs_that_repeat_themselves_under_deterministic_kernels_only(
    monkeypatch: Patch,
) -> None:
    """As sums of atomic additions do: nothing can be proved, and nothing is accused."""
    plant(monkeypatch)
    model = prepared()
    calls: list[None] = []

    def change(output: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        is_steady = torch.are_deterministic_algorithms_enabled()
        return output if is_steady else output + 2.0 ** -(5 + len(calls) % 3)

    hook_on_output(1, change)(model)
    found = step(model)
    assert (found["status"], found["message"]) == ("unproven", None)
    assert [each.rpartition(".")[2] for each in found["not_provable"]] == ["1"]


def test_outputs_that_never_repeat_themselves_are_an_error(monkeypatch: Patch) -> None:
    """They depend on something that a recomputation does not see."""
    plant(monkeypatch)
    model = prepared()
    calls: list[None] = []

    def change(output: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return output + 2.0 ** -len(calls)

    hook_on_output(1, change)(model)
    with pytest.raises(ParityError, match=r"layers\.1: resident does not equal itself"):
        step(model)


def hook_on_output(index: int, change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    return lambda model: layers_of(model)[index].mlp.register_forward_hook(
        lambda module, args, output: change(output)
    )


def after_acquire(patch: Patch, act: Callable[[BlockManager, Slot, Phase], None]) -> None:
    genuine = BlockManager.acquire

    def acquire(self: BlockManager, block: int, phase: Phase) -> Slot:
        slot = genuine(self, block, phase)
        act(self, slot, phase)
        return slot

    patch.setattr(BlockManager, "acquire", acquire)


def flip(phase: Phase, times: float = float("inf")) -> Callable[[Patch], None]:
    left = [times]

    def act(manager: BlockManager, slot: Slot, visited: Phase) -> None:
        if slot.block == 1 and visited is phase and left[0] > 0:
            left[0] -= 1
            slot.buffer[1000] ^= 0x0F

    return lambda patch: after_acquire(patch, act)


def remove_the_wait(patch: Patch) -> None:
    (found,) = (
        each
        for each in mutants.stream_context_mutations()
        if each.function == "BlockManager._waited_for" and each.change.endswith("removed")
    )
    found.apply(patch)


def spoil_gradients(patch: Patch) -> None:
    """Only what is handed back is wrong: nothing but the second streamed run can show it."""
    from poros.layer.remat import RematerializeLayer

    genuine = RematerializeLayer.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        first, *others = genuine(ctx, *gradients)
        return (first, *(each if each is None else each * 1.0078125 for each in others))

    patch.setattr(RematerializeLayer, "backward", staticmethod(backward))


FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "a nibble in the forward": (flip(Phase.FORWARD, 1), r"layers\.1: output: "),
    "a nibble in the backward, once": (flip(Phase.BACKWARD, 1), "recomputed in backward: output"),
    "a nibble in every backward": (flip(Phase.BACKWARD), "recomputed in backward: output"),
    "a wait left out": (remove_the_wait, r"output: \d+ of \d+ elements differ"),
    "wrong gradients": (spoil_gradients, r"gradient of .*deterministic attention on both sides"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_streaming_is_found_behind_it(fault: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    spoil, match = FAULTS[fault]
    model = prepared()
    spoil(monkeypatch)
    with pytest.raises(ParityError, match=match):
        step(model)
    assert poros.runtime(model).self_check["status"] == "failed"


def test_the_flag_is_put_back_if_the_backward_of_attention_fails() -> None:
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="on purpose"), attention.unchanged_flags():
        with attention.AttentionKernels(True):
            output = torch.nn.functional.scaled_dot_product_attention(query, query, query)

        def fail(_: Any) -> None:
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError("on purpose")

        output.grad_fn.register_prehook(fail)  # type: ignore[union-attr]
        output.sum().backward()
