"""A prepared model survives every copy that is refused, that fails, or that is thrown away."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from learners import COPIES, Learner, assert_still_exact, assert_streams, shared
from snapshots import build, changes, layers_of, picture, run

import poros
from poros.errors import HostMemoryError, PreparedModelError
from poros.host import HostStore

every_copy = pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)


def test_handing_a_model_to_a_new_process_is_refused() -> None:
    model = poros.prepare(build())
    process = torch.multiprocessing.get_context("spawn").Process(target=run, args=(model,))
    with pytest.raises(PreparedModelError, match="stay in its process"):
        process.start()
    assert_still_exact(model)


def test_a_queue_to_another_process_leaves_the_model_exact() -> None:
    """What torch puts in shared memory is moved there, and the base must not be."""
    model = poros.prepare(build())
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(model)
    twin = pickle.loads(buffer.getvalue())
    assert_still_exact(model)
    # The adapters are shared memory now, as those of a plain model would be, and so is what is
    # small and stays an ordinary tensor; what streams is not.
    names = " ".join(shared(model, twin))
    assert "lora_A" in names
    assert not any(each in names for each in ("slab", "slot", "base_layer.weight"))
    states = [
        [each.quant_state for each in one.modules() if hasattr(each, "quant_state")]
        for one in (model, twin)
    ]
    assert states[0] and all(
        mine.absmax.data_ptr() != other.absmax.data_ptr()
        for mine, other in zip(*states, strict=True)
    )


PARTS: dict[str, Callable[[Any], Any]] = {
    "base": lambda model: model.get_base_model(),
    "decoder": lambda model: model.get_base_model().model,
    "layers": layers_of,
    "layer": lambda model: layers_of(model)[1],
}
ATTEMPTS: dict[str, Callable[[Any], Any]] = {**COPIES, "copy": copy.copy}


# A shallow copy of anything above a layer leaves the layer as it is.
@pytest.mark.parametrize(
    ("part", "how"), [("layer", "copy"), *((part, how) for part in PARTS for how in COPIES)]
)
def test_parts_that_hold_a_layer_are_refused(part: str, how: str) -> None:
    model = poros.prepare(build())
    before = picture(model)
    with pytest.raises(PreparedModelError, match=r"copied or pickled.*poros\.restore"):
        ATTEMPTS[how](PARTS[part](model))
    assert changes(before, picture(model)) == {}
    assert_still_exact(model)


def test_a_shallow_copy_is_refused() -> None:
    model = poros.prepare(build())
    before = picture(model, identity=False)
    with pytest.raises(PreparedModelError, match="shallow copy"):
        copy.copy(model)
    assert changes(before, picture(model, identity=False)) == {}
    assert_still_exact(model)


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() > 20_000:
            raise OSError("no space left")
        return super().write(data)


@pytest.fixture(params=["weights", "a module", "host memory", "disk"])
def failing_copy(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Any], Any]]:
    """A way of copying that fails somewhere in the middle."""

    def refuse(*args: Any) -> Any:
        raise HostMemoryError("no memory left")

    def fails_at(model: Any) -> Any:
        target: Any = layers_of(model)[1].mlp.down_proj.base_layer
        if request.param == "weights":
            monkeypatch.setattr(type(target.weight), "__deepcopy__", refuse)
        elif request.param == "a module":
            monkeypatch.setattr(type(target), "__deepcopy__", refuse, raising=False)
        elif request.param == "host memory":
            monkeypatch.setattr(HostStore, "allocate", refuse)
        else:
            return pickle.dump(model, FullDisk())
        return copy.deepcopy(model)

    yield fails_at


def test_a_copy_that_fails_leaves_the_original_prepared_and_exact(
    failing_copy: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = poros.prepare(build())
    runtime, before = poros.runtime(model), picture(model, identity=False)
    objects = [id(each) for each in (*model.modules(), *model.parameters())]
    with pytest.raises((HostMemoryError, OSError), match="left"):
        failing_copy(model)
    monkeypatch.undo()
    assert poros.runtime(model) is runtime
    assert changes(before, picture(model, identity=False)) == {}
    assert [id(each) for each in (*model.modules(), *model.parameters())] == objects
    assert_still_exact(model)
    assert_still_exact(copy.deepcopy(poros.prepare(build())))


def references(model: Any) -> list[weakref.ReferenceType[Any]]:
    """To everything that holds memory or refers to something that does."""
    runtime = poros.runtime(model)
    takeover = runtime._takeover
    return [
        weakref.ref(each)
        for each in (
            *model.modules(),
            *model.parameters(),
            *model.buffers(),
            runtime,
            takeover,
            *takeover.host.slabs,
            *(slab._memory for slab in takeover.host.slabs),
            *(slot.buffer for slot in takeover.ring.slots),
        )
    ]


@every_copy
def test_each_lives_without_the_other(make_copy: Callable[[Any], Any]) -> None:
    survivors = []
    for keep_copy in (True, False):
        original = poros.prepare(build())
        Learner(original).step(0)
        twin = make_copy(original)
        survivors.append(twin if keep_copy else original)
        condemned = references(original if keep_copy else twin)
        del original, twin
        gc.collect()
        assert [each() for each in condemned if each() is not None] == []
    expected = Learner(build())
    expected.step(0)
    wanted = Learner(expected.model).steps(1, 2)
    for each in survivors:
        assert Learner(each).steps(1, 2) == wanted
        assert_streams(each)
