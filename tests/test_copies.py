"""Copies of a prepared model train exactly, on their own, and leave the original as it was.

Every comparison is with a resident twin that does the same steps from the same bytes. A step seeds
the generators itself, so that models can take turns.
"""

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import (
    COPIES,
    Learner,
    assert_still_exact,
    assert_streams,
    by_pickle,
    by_torch_save,
    shared,
    trainable,
)
from snapshots import bits_of, build, changes, layers_of, picture, run

import poros
from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.errors import PreparedModelError

ROOT = Path(__file__).resolve().parents[1]

every_copy = pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)


def form(model: Any) -> dict[str, object]:
    """All of a picture but a private mark of transformers, which no deep copy of a weight keeps."""
    found = picture(model, identity=False)
    for value in found.values():
        if isinstance(value, dict):
            value.pop("_is_hf_initialized", None)
    return found


def test_the_comparison_of_learners_can_fail() -> None:
    first, second = Learner(build()).steps(0, 1), Learner(build()).steps(0, 2)
    assert first[0] == second[0]
    differing = changes(first[1], second[1])
    assert {"loss", "rng"} < differing.keys() and len(differing) > 3 * len(trainable(build()))


@every_copy
@pytest.mark.parametrize(
    "options", [{}, {"quantize": False}, {"architecture": "gemma3"}], ids=["nf4", "dense", "gemma3"]
)
def test_a_copy_trains_beside_the_original(
    make_copy: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    original = poros.prepare(build(**options))
    learners = [Learner(original), Learner(make_copy(original))]
    # The two see different data, one step each in turn.
    found: list[list[dict[str, object]]] = [[], []]
    for turn in range(2):
        for who, learner in enumerate(learners):
            found[who].append(learner.step(2 * turn + who))
    for who, learner in enumerate(learners):
        assert found[who] == Learner(build(**options)).steps(who, who + 2)
        assert_streams(learner.model)
        assert poros.runtime(learner.model).self_check["status"] == "passed"


@every_copy
def test_a_copy_shares_nothing_with_the_original(make_copy: Callable[[Any], Any]) -> None:
    original = poros.prepare(build(), slots=3, block_size=1)
    twin = make_copy(original)
    assert type(twin) is type(original)
    assert shared(original, twin) == []
    assert poros.runtime(twin).policy == poros.runtime(original).policy
    assert changes(bits_of(original), bits_of(twin)) == {}
    # The original's counters do not move with the copy's steps, nor its gradients.
    before = poros.runtime(original).stats(), bits_of(original)
    Learner(twin).steps(0, 1)
    assert (poros.runtime(original).stats(), bits_of(original)) == before


def test_shared_sees_what_is_shared() -> None:
    """Negative control: a model against itself, and two that share one adapter's memory."""
    one = poros.prepare(build())
    assert {"runtime", "slab 0 and slab 0", "slot 1 and slot 1"} <= set(shared(one, one))
    other = copy.deepcopy(one)
    names = list(trainable(one))
    trainable(other)[names[3]].data = trainable(one)[names[3]].data[:1]
    assert shared(one, other) == [f"{names[3]} and {names[3]}"]


@every_copy
def test_a_copy_is_as_sound_as_a_loaded_model(make_copy: Callable[[Any], Any]) -> None:
    """Copying 4-bit weights the plain way loses their type or leaves them with two states."""
    twin = make_copy(poros.prepare(build()))
    packed = [each for each in twin.modules() if "quant_state" in each.__dict__]
    assert len(packed) == 7 * len(layers_of(twin))
    for module in packed:
        assert type(module.weight).__name__ == "Params4bit"
        assert module.weight.module is module
        assert module.weight.quant_state is module.quant_state
    assert changes(form(poros.prepare(build())), form(twin)) == {}


@every_copy
def test_a_copy_in_the_middle_of_training_keeps_what_was_learnt(
    make_copy: Callable[[Any], Any],
) -> None:
    plain, streamed = Learner(build()), Learner(poros.prepare(build()))
    assert plain.steps(0, 1) == streamed.steps(0, 1)
    twin = make_copy(streamed.model)
    expected = Learner(copy.deepcopy(plain.model)).steps(4, 5)
    assert Learner(twin).steps(4, 5) == expected
    # And the original goes on as if nobody had copied it.
    assert plain.steps(2, 3) == streamed.steps(2, 3)


@every_copy
def test_copying_between_forward_and_backward_disturbs_neither(
    make_copy: Callable[[Any], Any],
) -> None:
    plain, streamed = Learner(build()), Learner(poros.prepare(build()))
    loss = streamed.forward(0)
    state = torch.get_rng_state()
    twin = make_copy(streamed.model)
    # Loading draws no numbers; a resident run's generator would not have moved either.
    assert torch.equal(torch.get_rng_state(), state)
    assert streamed.backward(loss) == plain.step(0)
    assert streamed.step(1) == plain.step(1)
    assert_still_exact(twin)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("model_first", [True, False])
def test_an_optimizer_copied_along_trains_the_copy(how: str, model_first: bool) -> None:
    plain, streamed = Learner(build()), Learner(poros.prepare(build()))
    assert plain.step(0) == streamed.step(0)
    pair = (streamed.model, streamed.optimizer)
    copied = COPIES[how](pair if model_first else pair[::-1])
    twin = Learner(*(copied if model_first else copied[::-1]))
    listed = [each for group in twin.optimizer.param_groups for each in group["params"]]
    assert {id(each) for each in listed} == {id(each) for each in trainable(twin.model).values()}
    before = bits_of(streamed.model)
    assert twin.steps(1, 2) == plain.steps(1, 2)
    assert bits_of(streamed.model) == before
    assert_streams(twin.model)


def test_an_optimizer_from_before_the_copy_trains_the_original_alone() -> None:
    model = poros.prepare(build())
    early = Learner(model)
    twin = copy.deepcopy(model)
    before = bits_of(twin)
    assert early.steps(0, 1) == Learner(build()).steps(0, 1)
    assert bits_of(twin) == before
    assert_still_exact(twin)


def test_copies_of_copies() -> None:
    model = poros.prepare(build())
    second = copy.deepcopy(by_pickle(model))
    third = by_torch_save(copy.deepcopy(second))
    for one, other in ((model, second), (model, third), (second, third)):
        assert shared(one, other) == []
    for each in (third, model, second):
        assert_still_exact(each)


def test_a_model_copied_inside_a_container_stays_one_model() -> None:
    model = poros.prepare(build())
    held = {"model": model, "again": [model], "adapters": list(trainable(model).values())}
    for make_copy in COPIES.values():
        twin = make_copy(held)
        assert twin["model"] is twin["again"][0] is not model
        assert [id(each) for each in twin["adapters"]] == [
            id(each) for each in trainable(twin["model"]).values()
        ]
    assert_still_exact(model)


@every_copy
def test_a_copy_can_be_restored_and_prepared_with_other_options(
    make_copy: Callable[[Any], Any],
) -> None:
    original = poros.prepare(build(num_layers=4))
    twin = poros.restore(make_copy(original))
    with pytest.raises(PreparedModelError, match="not"):
        poros.runtime(twin)
    # A restored copy is a plain model.
    resident = build(num_layers=4)
    assert changes(form(resident), form(twin)) == {}
    assert Learner(twin).step(0) == Learner(resident).step(0)
    poros.prepare(twin, block_size=2, slots=2)
    assert poros.runtime(twin).num_blocks == 2
    expected = Learner(resident).steps(1, 2)
    assert Learner(twin).steps(1, 2) == expected
    assert poros.runtime(original).num_blocks == 4
    assert_still_exact(original, num_layers=4)


def test_settings_that_prepare_overrides_reach_the_copy() -> None:
    model = build()
    model.get_base_model().gradient_checkpointing_enable()
    model.eval()
    twin = copy.deepcopy(poros.prepare(model))

    def is_checkpointing(model: Any) -> bool:
        return any(getattr(each, "gradient_checkpointing", False) for each in model.modules())

    assert not twin.training and not is_checkpointing(twin)
    poros.restore(twin)
    assert is_checkpointing(twin)
    assert not is_checkpointing(model)


def test_a_copy_knows_where_the_original_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own base rests in host memory when it is made, also where the original's was on a GPU."""
    names = [name for name, _ in build().named_parameters() if "mlp.up_proj.base_layer" in name]
    assert names
    origins = dict.fromkeys(names, "cuda:0")
    model = prepare_with(build(), StreamingPolicy(), origins=origins)
    assert poros.runtime(model)._takeover.origins.items() & origins.items() == set(), "no such GPU"
    poros.restore(model)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    prepare_with(model, StreamingPolicy(), origins=origins)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = poros.runtime(twin)._takeover.origins
        assert {name: each for name, each in found.items() if each != "cpu"} == origins


def test_two_prepared_models_take_turns_within_a_step() -> None:
    kinds: list[dict[str, Any]] = [{}, {"architecture": "llama", "num_layers": 2, "seed": 7}]

    def steps(models: list[Any]) -> list[dict[str, object]]:
        learners = [Learner(model) for model in models]
        found = []
        for turn in range(2):
            # Both forwards, then both backwards, in the same order.
            losses = [learner.forward(2 * turn + who) for who, learner in enumerate(learners)]
            found += [one.backward(loss) for one, loss in zip(learners, losses, strict=True)]
        return found

    prepared = [poros.prepare(build(**kinds[0])), poros.prepare(build(**kinds[1]), block_size=2)]
    assert steps(prepared) == steps([build(**kind) for kind in kinds])
    assert shared(*prepared) == []
    poros.restore(prepared[0])
    assert_streams(prepared[1])


FRESH = """
import json, pickle, sys, torch
torch.set_num_threads(1)
found = []
for name in ("pickle", "torch"):
    with open(name, "rb") as file:
        if name == "pickle":
            model = pickle.load(file)
        else:
            model = torch.load(file, weights_only=False, map_location="cpu")
    assert "poros.api" in sys.modules
    import poros
    from poros.block import is_streamed
    from snapshots import layers_of, run
    runtime = poros.runtime(model)
    digest = run(model).hash()
    streamed = sum(is_streamed(layer) for layer in layers_of(model))
    found.append([digest, streamed, runtime.self_check["status"], runtime.policy.slots])
print(json.dumps(found))
"""


def test_a_pickle_loads_and_trains_in_a_fresh_process(tmp_path: Path) -> None:
    resident, streamed = build(), poros.prepare(build(), slots=3)
    for model in (resident, streamed):
        run(model)
    with (tmp_path / "pickle").open("wb") as file:
        pickle.dump(streamed, file)
    torch.save(streamed, tmp_path / "torch")
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [[run(resident).hash(), len(layers_of(streamed)), "passed", 3]] * 2
    # Had the learning been lost, the run would have been the first one.
    assert found[0][0] != run(build()).hash()


def test_a_pickle_is_as_large_as_a_plain_models() -> None:
    """Tensors go into the file as they are, so a file larger than 4 GiB is nothing special."""
    model = build()
    sizes = []
    for each in (model, poros.prepare(model)):
        buffer = io.BytesIO()
        torch.save(each, buffer)
        sizes.append(buffer.tell())
    assert abs(sizes[1] - sizes[0]) < 0.1 * sizes[0]
