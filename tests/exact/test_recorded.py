"""Programs whose visits are recorded and replayed, by a stand-in that sees nothing of Python.

They have the bits of a resident run, where layers are recomputed and where they keep their graph.
How users compute within steps: ``test_programs`` and ``test_written_programs``, which replay them
too.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any

import pytest
import torch

import poros
from poros.replay.call import CHECK
from poros.replay.captures import ARGUMENTS, NEW
from poros.replay.forms import HeldGraphs
from poros.replay.graphs import Fixed
from tests.exact.recorded import KEPT, few, gradients, loss_of, recorded, train
from tests.loops import bf16, build, differences, mlps, same, step, trained, with_kernels

Model = Any
Facts = list[Any]
LATE = 5
"""The step from which on something is otherwise; by then visits are replayed."""


# What changes between two steps, beside what the fuzzer's language has.


def of_each(name: str, change: Callable[[Any, bool], object]) -> Callable[[Model, int], None]:
    """``change(module, is_late)`` of each module that has an attribute of this name."""

    def between(model: Model, number: int) -> None:
        if number in (0, LATE):
            for module in list(model.modules()):
                if hasattr(module, name):
                    change(module, number >= LATE)

    return between


def kernels_of_a_library(module: Any, is_late: bool) -> None:
    """Forwards that are set on modules, as Liger does."""

    def forward(self: Any, given: torch.Tensor) -> Any:
        return type(self).forward(self, given) * (0.75 if is_late else 1.25)

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    module.forward = MethodType(forward, module)


CHANGES: dict[str, Callable[[Model, int], None]] = {
    # A module in the place of another, neither of which has attributes that could differ.
    "another activation": of_each(
        "act_fn",
        lambda module, is_late: setattr(
            module, "act_fn", torch.nn.Sigmoid() if is_late else torch.nn.Tanh()
        ),
    ),
    "kernels of a library": of_each("variance_epsilon", kernels_of_a_library),
}


PROGRAMS: dict[str, Callable[[Model], Facts]] = {
    "nothing": train,
    **{name: partial(train, change=change) for name, change in CHANGES.items()},
}


@cache
def resident(which: str) -> Facts:
    model = few(lora_dropout=0.1)
    torch.manual_seed(3)
    return PROGRAMS[which](model)


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [KEPT, {}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("which", PROGRAMS)
def test_a_program(which: str, policy: dict[str, Any]) -> None:
    model = few(lora_dropout=0.1)
    captures, _ = recorded(model, **policy)
    torch.manual_seed(3)
    assert same(PROGRAMS[which](model), resident(which))
    stats = poros.runtime(model).stats()
    assert captures.num_replays == stats["num_replayed_visits"] > 0
    assert stats["num_eager_visits"] == sum(captures.eager.values())
    if which in CHANGES:  # a control
        assert not same(resident(which), resident("nothing"))


OPTIONS: list[dict[str, Any]] = [{"lora_dropout": 0.1}, {"use_dora": True, "quantize": False}]


@pytest.mark.cover("values")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("policy", [{}, {"slots": 3, "block_size": 2}], ids=str)
@pytest.mark.parametrize("around", [nullcontext, bf16], ids=["", "autocast"])
def test_how_many_visits_are_replayed(
    around: Any, policy: dict[str, Any], options: dict[str, Any]
) -> None:
    model = few(**options)
    expected = with_kernels(model, around)
    captures, recorder = recorded(model, **policy)
    for _ in range(6):
        assert differences(step(model, around), expected) == []
    # Two layers; of the steps one is checked, two are counted, one is compared.
    assert captures.num_replays >= 2 * 2
    assert recorder.num_recorded == 4
    # Of the one that is compared forward and backward count.
    assert captures.eager == {NEW: 2 * (2 + 2)}


ENDS: dict[str, str | None] = {
    **dict.fromkeys(["qwen2", "llama", "mistral", "qwen3", "phi3", "gemma3"]),
    **{"gemma4": ARGUMENTS, "mixtral": "hooks", "qwen3_moe": "hooks"},
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("architecture", ENDS)
def test_promised_architectures(architecture: str, policy: dict[str, Any]) -> None:
    """Layers that share keys and values, or whose routers are recorded by hooks, run as always."""
    reason = ENDS[architecture]
    options = {} if architecture == "qwen3_moe" else {"lora_dropout": 0.1}
    expected = train(few(architecture, **options), 7)
    model = few(architecture, **options)
    captures, _ = recorded(model, **policy)
    assert same(train(model, 7), expected)
    assert (captures.num_replays > 0) == (reason is None)
    assert reason is None or reason in captures.eager


# What is not replayed, however often it comes.


def in_a_list(model: Model, number: int, has_list: bool = True) -> None:
    """Feed-forwards multiply by a tensor that they hold as a plain attribute."""
    for mlp in mlps(model):
        gain = torch.full((64,), 1.5 if number < LATE else 0.5, dtype=torch.bfloat16)
        if number in (0, LATE):
            mlp.gain = gain
        if has_list and number == 0:
            mlp.others = [gain]


def waited_for(mlp: Any, given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    assert float(given.detach().abs().max()) >= 0
    return result


def scaled(mlp: Any, given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return result * mlp.gain


EAGER: dict[str, tuple[Any, Any, str]] = {
    "the host waits": (waited_for, None, "cannot be recorded"),
    "an exchanged tensor": (scaled, partial(in_a_list, has_list=False), ""),
    "an exchanged tensor, in a list": (scaled, in_a_list, ""),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("which", EAGER)
def test_feed_forwards_that_are_not_replayed(
    which: str, policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, between, reason = EAGER[which]
    kind = type(mlps(few())[0])
    genuine = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: change(self, x, genuine(self, x)))
    expected = train(few(), change=between)
    model = few()
    captures, _ = recorded(model, **policy)
    assert same(train(model, change=between), expected)
    assert captures.num_replays == 0
    assert any(each.startswith(reason) for each in captures.eager)


def test_what_a_backward_has_never_shown_whole_is_not_recorded_until_one_has() -> None:
    model = few()
    captures, _ = recorded(model)
    for _ in range(30):
        torch.autograd.grad(loss_of(model), trained(model))
    assert captures.num_recorded == 0 and captures.num_replays == 0
    # Seldom looked at by then, but not never.
    for _ in range(8):
        loss_of(model).backward()
    assert captures.num_replays > 0


def test_restoring_ends_it() -> None:
    model = few(lora_dropout=0.1)
    recorded(model)
    train(model)
    poros.restore(model)
    again = dict(few(lora_dropout=0.1).named_parameters())
    for name, each in model.named_parameters():
        if each.requires_grad:
            each.data = again[name].data.clone()
    assert same(train(model), resident("nothing"))


# What visits leave behind.


def test_replayed_visits_load_no_more_than_eager_ones() -> None:
    model = build("qwen2", num_layers=4).train()
    captures, _ = recorded(model, slots=2, self_check="off")
    loads = []
    for _ in range(6):
        loss_of(model).backward()
        loads.append(poros.runtime(model).stats()["num_loads"])
    # The first step has loaded ahead, 2K - S; a warm one loads 2 (K - S).
    assert captures.num_replays > 0 and loads == [6 + 4 * number for number in range(6)]


def test_gradients_of_adapters_keep_no_memory_of_others() -> None:
    """Of the gradient of a layer's input, which a replay gives as well."""
    model = few(dtype=torch.float32)
    captures, _ = recorded(model, self_check="off")
    for _ in range(6):
        model.zero_grad()
        loss_of(model, 100).backward()
    memory = [each.grad.untyped_storage() for each in trained(model)]
    num_bytes = sum({each.data_ptr(): each.nbytes() for each in memory}.values())
    assert captures.num_replays > 0 and num_bytes == sum(each.nbytes for each in trained(model))


def test_of_micro_batches_together_one_call_of_each_layer_is_watched() -> None:
    model = few()
    captures, _ = recorded(model, self_check="off")
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    for _ in range(4):
        poros.accumulate(model, [dict(batch) for _ in range(4)])
    num_before, to_come = captures.num_replays, {0, 1}

    def watches(layer: int) -> bool:
        found = layer in to_come
        to_come.discard(layer)
        return found

    poros.runtime(model).context.watches = watches
    poros.accumulate(model, [dict(batch) for _ in range(4)])
    assert captures.eager[CHECK] == 2 and captures.num_replays == num_before + 2 * 2 * 3


# Controls.


def test_control_gradients_that_are_not_copied_out_are_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd keeps what it is handed as ``.grad``, and the next visit writes there."""
    model = few(lora_dropout=0.1)
    captures, _ = recorded(model)
    monkeypatch.setattr(Fixed, "copies", lambda self: self.tensors)
    torch.manual_seed(3)
    assert not same(train(model), resident("nothing")) and captures.num_replays > 0


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_layer_whose_graph_goes_before_that_of_a_later_one(
    is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded first, it may compute where the later one, recorded then, has its graph."""
    if not is_guarded:
        monkeypatch.setattr(HeldGraphs, "would_lose", lambda self, form: False)

    def run(model: Model) -> Facts:
        cuts = False
        facts = []

        def cut(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
            return result.detach().requires_grad_() + 0 if cuts else result

        handle = model.base_model.model.model.layers[0].register_forward_hook(cut)
        for number in range(10):
            cuts = number > 5
            first = loss_of(model, shift=number)
            if number > 5:
                gc.collect()  # the first layer's call is gone, and so may its graph
                first = first + loss_of(model, shift=number + 1)
            first.backward()
            facts += [first.detach(), *gradients(model)]
            model.zero_grad(set_to_none=False)
        handle.remove()
        return facts

    expected = run(few())
    model = few()
    captures, _ = recorded(model, **KEPT)
    is_same = same(run(model), expected)
    assert captures.num_replays > 0 and is_same == is_guarded
