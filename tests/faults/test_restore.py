"""``restore`` gives the original back, and a ``prepare`` that fails has never happened.

Nothing of a step is left when it is over: not after it, not after ``restore``, not of a model that
was deleted.
"""

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch

import poros
from poros.errors import HostMemoryError, PreparedModelError
from poros.gates import tiny
from poros.replay.call import LayerCall
from poros.stream.general import RecomputedCall
from tests.comparing import assert_same_run, bits_of, changes, picture
from tests.covers import with_slow
from tests.loops import batches, build, layers_of, resident_run, run
from tests.replaced import Patch, in_place_of, raising
from tests.support import num_arenas, prepare_plain, same_bits

ON_HOST = {"stream_head": True, "stream_embedding": True}
EVERYTHING: dict[str, Any] = {"loss": "chunked", **ON_HOST}
"""So that head and embedding are moved too, and the loss is another one."""
POLICIES: list[dict[str, Any]] = [{"block_size": 2}, {"loss": "chunked"}, ON_HOST, EVERYTHING]


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("quantize", [True, False])
def test_restore_leaves_nothing_behind(
    architecture: str, quantize: bool, policy: dict[str, Any]
) -> None:
    """Hooks of the user survive. The head of some is their embedding's matrix."""
    model = build(architecture, quantize=quantize, num_layers=4)
    layer = layers_of(model)[1]
    layer.register_forward_hook(lambda *_: None)
    layer.register_full_backward_hook(lambda *_: None)
    layer.register_state_dict_post_hook(lambda *_: None)
    before = picture(model)
    assert poros.restore(prepare_plain(model, **policy)) is model
    assert changes(before, picture(model)) == {}
    with pytest.raises(PreparedModelError):
        poros.runtime(model)


@pytest.mark.parametrize(
    ("architecture", "is_failed"), [("qwen2", False), ("gemma3", False), ("qwen2", True)]
)
def test_restored_after_steps_it_equals_a_model_that_was_never_prepared(
    architecture: str, is_failed: bool
) -> None:
    """After a run, and also after a step that has failed."""
    twin, model = build(architecture), prepare_plain(build(architecture))
    assert_same_run(run(twin), run(model))
    if is_failed:
        handle = layers_of(model)[1].mlp.register_forward_hook(raising(KeyError))
        with handle, pytest.raises(KeyError):
            model(**batches()[0])
    poros.restore(model)
    assert changes(picture(twin, identity=False), picture(model, identity=False)) == {}
    for each in (twin, model):
        each.eval()
    with torch.no_grad():
        for batch in batches():
            assert same_bits(twin(**batch).logits, model(**batch).logits)
    assert_same_run(run(twin), run(model))
    assert changes(picture(twin, identity=False), picture(model, identity=False)) == {}


def test_everything_works_on_the_restored_model() -> None:
    def use(model: Any) -> Any:
        base = model.get_base_model()
        base.gradient_checkpointing_enable()
        model.merge_adapter()
        model.unmerge_adapter()
        base.gradient_checkpointing_disable()
        return model.merge_and_unload()

    twin, model = build(), prepare_plain(build())
    model(**batches()[0])
    copies = [copy.deepcopy(poros.restore(model)), pickle.loads(pickle.dumps(model))]
    assert all(changes(bits_of(twin), bits_of(each)) == {} for each in copies)
    assert_same_run(resident_run(), run(copies[0]))
    merged = [use(each) for each in (twin, model)]
    assert changes(*(picture(each, identity=False) for each in merged)) == {}
    assert not any("lora" in name for name, _ in merged[1].named_modules())


def test_restore_with_a_graph_alive_never_gives_another_gradient() -> None:
    def gradients(model: Any) -> dict[str, torch.Tensor]:
        named = model.named_parameters()
        return {name: each.grad for name, each in named if each.grad is not None}

    twin, model = build(dropout=0.0), prepare_plain(build(dropout=0.0))
    twin(**batches()[0]).loss.backward()
    loss = model(**batches()[0]).loss
    poros.restore(model)
    # Either the exact gradient or a typed error; in both cases the model goes on.
    try:
        loss.backward()
    except poros.PorosError:
        pass
    else:
        found = gradients(model)
        assert [n for n, each in gradients(twin).items() if not same_bits(each, found[n])] == []
    assert_same_run(run(twin), run(model))


@pytest.mark.parametrize("quantize", [True, False])
def test_restore_takes_what_stands_in_the_place_of_a_frozen_tensor_out(quantize: bool) -> None:
    """As an interrupted visit could leave a layer, or a user who has replaced a parameter."""
    model = build(quantize=quantize)
    before = picture(model)
    prepare_plain(model)
    for layer in layers_of(model):
        weight = layer.mlp.up_proj.base_layer.weight
        layer.mlp.up_proj.base_layer._parameters["weight"] = torch.nn.Parameter(
            torch.zeros_like(weight), requires_grad=False
        )
    poros.restore(model)
    assert changes(before, picture(model)) == {}


@pytest.mark.parametrize("how", ["restored", "deleted"])
def test_what_streamed_is_freed(how: str) -> None:
    """The slots at once: on a GPU the next step needs their memory."""
    model = prepare_plain(build())
    model(**batches()[0]).loss.backward()
    runtime = poros.runtime(model)
    parts = [runtime.ring, runtime.manager, *runtime.small._buffers]
    if how == "deleted":
        parts += [model, runtime, runtime.host, runtime.constants]
        parts += [*layers_of(model), *runtime.host.slabs]
    references = [weakref.ref(each) for each in parts]
    slots = [weakref.ref(slot.buffer) for slot in runtime.ring.slots]
    del runtime, parts
    with without_collector():
        if how == "restored":
            poros.restore(model)
        else:
            del model
        assert [reference() for reference in slots if reference() is not None] == []
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


def _replace(
    patch: Patch, where: str, error: BaseException | None = None, call: int = 0
) -> list[None]:
    """Count the calls of what ``where`` names; number ``call`` (from 1) raises ``error``."""
    module, owner, name = where.rsplit(".", 2)
    calls: list[None] = []

    def counting(genuine: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if error is not None and len(calls) == call:
            raise error
        return genuine(*args, **kwargs)

    in_place_of(getattr(import_module(module), owner), name)(counting)(patch)
    return calls


FAILURES = {
    "host store": ("poros.host.store.HostStore.allocate", 1, HostMemoryError("none left")),
    "second slab": ("poros.host.slab.HostSlab.__init__", 2, HostMemoryError("none left")),
    "move in the middle": ("poros.host.slab.HostSlab.tensor", 30, RuntimeError("no tensor")),
    "ring": ("poros.slots.ring.DeviceRing.__init__", 1, MemoryError("no slots")),
    "second slot": ("poros.eager_streams.EagerStreams.allocate", 2, RuntimeError("out of memory")),
    "manager": ("poros.slots.manager.BlockManager.__init__", 1, RuntimeError("no manager")),
    "twin in the middle": ("poros.stream.frozen.DeviceConstants.get", 7, RuntimeError("none")),
    "bindings of block 3": ("poros.stream.visit.LayerBindings.__init__", 3, RuntimeError("no")),
    "layer 3": ("poros.stream.boundary.StreamedLayer.__init__", 3, RuntimeError("layer 3")),
    "guards half-way": ("poros.model.guards._always", 4, RuntimeError("no guards")),
    "loss in slices": ("poros.head.takeover._Loss.__init__", 1, RuntimeError("no loss")),
    "slices of the head": ("poros.head.slices.SliceReader.__init__", 1, RuntimeError("no slices")),
    "move": ("poros.model.attach.Attachment.move_to_device", 1, RuntimeError("no device")),
    "interrupted check": ("poros.self_check.check.SelfCheck.__init__", 1, KeyboardInterrupt()),
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_failure_in_the_middle_of_prepare_leaves_the_model_untouched(
    where: str, monkeypatch: Patch
) -> None:
    """Where nothing fails the model is prepared, and is another than before."""
    target, call, error = FAILURES[where]
    gc.collect()  # of what tests before have left
    arenas, model = num_arenas(), build()
    # So that there is something to put back: a checkpointing flag, and the AVX512 switch.
    model.get_base_model().gradient_checkpointing_enable()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = True
    model(**batches()[0]).loss.backward()
    before = picture(model)
    with monkeypatch.context() as patch:
        unpinned = _replace(patch, "poros.host.store.HostStore.unpin")
        _replace(patch, target, error, call)
        try:
            prepare_plain(model, **EVERYTHING)
        except BaseException as caught:
            assert caught is error
            caught.__traceback__ = None  # whose frames would keep everything alive
    assert changes(before, picture(model)) == {}
    # What a loader has locked stays so, unless it is told.
    assert len(unpinned) == (where not in ("host store", "second slab"))
    with pytest.raises(PreparedModelError):
        poros.runtime(model)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.zero_grad()
    model.get_base_model().gradient_checkpointing_disable()
    prepare_plain(model, **EVERYTHING)(**batches()[0]).loss.backward()
    del model, module
    gc.collect()
    assert num_arenas() <= arenas, "memory of the host, where the model's weights were"


# Nothing of a step is left. Counted without the collector of cycles: what only it could free waits
# for it, on a GPU with memory that the next step needs.

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


def train(model: Any, number: int) -> None:
    model.train()
    model(**batches()[number % 2]).loss.backward()
    model.zero_grad()


def abandon(model: Any, number: int) -> None:
    """A forward with gradients and no backward."""
    model.train()
    model(**batches()[number % 2])


def evaluate(model: Any, number: int) -> None:
    model.eval()
    with torch.no_grad():
        model(**batches()[number % 2])


SLOW = [each for each in tiny.ARCHITECTURES if each != "gemma4_shared_kv"]
HOOKED = "qwen2 with a hook inside"


@pytest.mark.parametrize("architecture", with_slow([*tiny.ARCHITECTURES, HOOKED], SLOW))
def test_as_much_is_held_after_six_steps_as_after_three(architecture: str) -> None:
    options = {"num_layers": 4, "hidden_size": 32} if "shared" in architecture else {}
    model = prepare_plain(build(architecture.split()[0], **options))
    if architecture == HOOKED:
        # What is packed for its tensors must not keep the nodes that they come from.
        layers_of(model)[1].mlp.register_forward_hook(lambda *_: None)
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


@in_place_of(RecomputedCall, "forward")
def keep_the_result(genuine: Any, self: Any, args: Any, kwargs: Any) -> Any:
    self.result = genuine(self, args, kwargs)
    return self.result


def test_a_cycle_would_be_seen(monkeypatch: Patch) -> None:
    keep_the_result(monkeypatch)
    model = prepare_plain(build())
    with without_collector():
        before = living()
        abandon(model, 0)
        assert living()["call"] > before["call"]
