"""``poros.prepare`` takes over the memory that a loader filled, instead of copying it."""

import copy
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from snapshots import assert_same_run, bits_of, build, changes, layers_of, picture, run
from stores import lay_down, parts_by_layer
from support import AdversarialPrepare

import poros
from poros.api import prepare_with
from poros.gates import tiny
from poros.host.store import HostStore, left_store
from poros.streams import EagerStreams

NUM_LAYERS = 5


def loaded(architecture: str = "qwen2", **options: Any) -> Any:
    """A small base as a loader leaves it, without adapters; equal arguments give equal bytes."""
    settings = {"num_layers": NUM_LAYERS, "hidden_size": 64, **options}
    model = build(architecture, **settings).unload()
    lay_down(model)
    return model


def adapted(base: Any) -> Any:
    return tiny.attach_lora(base, rank=8, dropout=0.05, seed=1)


def pointers(base: Any) -> list[int]:
    return [part.get().data_ptr() for parts in parts_by_layer(base) for part in parts]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 9])
def test_nothing_is_copied_and_training_is_exact(
    architecture: str, quantize: bool, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = loaded(architecture, quantize=quantize)
    before = pointers(base)
    model = adapted(base)
    expected = adapted(loaded(architecture, quantize=quantize))
    bits = bits_of(model)
    monkeypatch.setattr(HostStore, "allocate", None)  # nobody may ask for memory
    poros.prepare(model, block_size=block_size)
    runtime = poros.runtime(model)
    assert changes(bits, bits_of(model)) == {}
    store = left_store(base)
    assert store is not None
    assert runtime.num_blocks == -(-NUM_LAYERS // block_size)
    for block in range(runtime.num_blocks):
        slab = store.slabs[block * block_size]
        assert runtime.host_slab(block).data_ptr() == slab.bytes.data_ptr()
    assert_same_run(run(expected), run(model))
    poros.restore(model)
    assert pointers(base) == before


def test_restore_leaves_everything_in_place_and_it_is_adopted_again() -> None:
    base = loaded()
    model = adapted(base)
    before = picture(model)
    for block_size in (2, 1, 3):
        poros.prepare(model, block_size=block_size)
        assert poros.runtime(model).is_adopted
        assert changes(before, picture(poros.restore(model))) == {}


def test_adoption_under_adversarial_streams() -> None:
    expected = run(adapted(loaded()))
    prepare = AdversarialPrepare()
    model = adapted(loaded())
    with prepare.watching():
        prepare(model, block_size=2, slots=2)
        assert poros.runtime(model).is_adopted
        found = run(model)
    assert_same_run(expected, found)


@pytest.mark.parametrize("block_size", [1, 2])
def test_what_is_cast_for_training_is_in_no_slab(block_size: int) -> None:
    """The usual preparation casts norms and biases to fp32; slabs are taken over all the same."""

    def cast(base: Any) -> Any:
        return adapted(prepare_model_for_kbit_training(base, use_gradient_checkpointing=False))

    base = loaded()
    before = pointers(base)
    model, expected = cast(base), cast(loaded())
    bits = bits_of(model)
    poros.prepare(model, block_size=block_size)
    runtime = poros.runtime(model)
    assert runtime.is_adopted and runtime.stats()["fallbacks"] == []
    assert pointers(base) == before
    assert changes(bits, bits_of(model)) == {}
    assert_same_run(run(expected), run(model))


@pytest.mark.parametrize("reason", ["moved weight", "replaced weight", "overlap"])
@pytest.mark.parametrize("block_size", [1, 2])
def test_a_block_that_was_changed_is_copied_loudly(
    reason: str, block_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        base = loaded(quantize=False)
        layer = base.model.layers[1]
        if reason == "moved weight":
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.clone()
        elif reason == "replaced weight":
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 2
        else:
            layer.mlp.up_proj.weight.data = layer.mlp.gate_proj.weight.data
        return base

    base = make()
    model = adapted(base)
    bits = bits_of(model)
    with caplog.at_level(logging.WARNING, "poros"):
        poros.prepare(model, block_size=block_size)
    runtime = poros.runtime(model)
    changed = 1 // block_size
    assert runtime.is_adopted and changes(bits, bits_of(model)) == {}
    assert runtime.stats()["fallbacks"] == [f"blocks [{changed}] copied to new host memory"]
    assert sum("GB of host memory more" in each.getMessage() for each in caplog.records) == 1
    store = left_store(base)
    assert store is not None
    for block in range(runtime.num_blocks):
        is_old = runtime.host_slab(block).data_ptr() == (
            store.slabs[block * block_size].bytes.data_ptr()
        )
        assert is_old == (block != changed)
    assert_same_run(run(adapted(make())), run(model))
    assert_same_run(run(adapted(make())), run_again(model))


def run_again(model: Any) -> Any:
    """With other blocks, from adapters as at the start."""
    fresh = adapted(loaded(quantize=False))
    poros.restore(model)
    model.load_state_dict(
        {name: each for name, each in fresh.state_dict().items() if "lora" in name}, strict=False
    )
    return run(poros.prepare(model, block_size=3))


@pytest.mark.parametrize("reason", ["another number of slabs", "another number of layers"])
def test_a_store_that_does_not_fit_is_copied_and_dropped(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    base, expected = loaded(), loaded()
    store = left_store(base)
    assert store is not None
    if reason == "another number of slabs":
        store.slabs.pop()
    else:
        for each in (base, expected):
            each.model.layers = each.model.layers[1:]
            each.config.num_hidden_layers -= 1
            each.config.layer_types = each.config.layer_types[1:]
            for index, layer in enumerate(each.model.layers):
                layer.self_attn.layer_idx = index
    model = adapted(base)
    with caplog.at_level(logging.WARNING, "poros"):
        poros.prepare(model)
    assert not poros.runtime(model).is_adopted and left_store(base) is None
    assert sum("held twice" in each.getMessage() for each in caplog.records) == 1
    assert_same_run(run(adapted(expected)), run(model))


def test_a_failed_prepare_leaves_the_store_on_the_model() -> None:
    class NoRoom(EagerStreams):
        def allocate(self, num_bytes: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("no room for slots")

    base = loaded()
    model = adapted(base)
    before = picture(model)
    with pytest.raises(torch.OutOfMemoryError):
        prepare_with(model, poros.StreamingPolicy(), streams=NoRoom(torch.device("cpu")))
    assert changes(before, picture(model)) == {}
    poros.prepare(model)
    assert poros.runtime(model).is_adopted


def test_copies_of_the_model_have_bytes_of_their_own() -> None:
    # A 4-bit weight does not survive a pickle of a model.
    base = loaded(quantize=False)
    model = adapted(base)
    store = left_store(base)
    assert store is not None
    start, end = store.slabs[0].bytes.data_ptr(), store.slabs[-1].bytes.data_ptr()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    expected = run(adapted(loaded(quantize=False)))
    for twin in twins:
        assert left_store(twin.get_base_model()) is None
        weights = [each.data_ptr() for each in layers_of(twin).parameters()]
        assert not [each for each in weights if start <= each <= end]
        assert_same_run(expected, run(poros.prepare(twin)))
    assert left_store(base) is store
    assert_same_run(expected, run(poros.prepare(model)))


def test_a_trained_bias_leaves_its_slab() -> None:
    """``bias="lora_only"`` trains biases that the loader laid down: they go to the device."""

    def make() -> Any:
        config = LoraConfig(target_modules=["q_proj", "v_proj"], bias="lora_only", r=4)
        torch.manual_seed(3)
        return get_peft_model(loaded(), config)

    model = poros.prepare(make())
    assert poros.runtime(model).is_adopted
    assert_same_run(run(make()), run(model))


def test_saved_weights_are_those_of_the_slabs(tmp_path: Path) -> None:
    base = loaded()
    expected = build(num_layers=NUM_LAYERS, hidden_size=64).unload()
    for index, each in enumerate((base, expected)):
        each.save_pretrained(tmp_path / str(index))
    left, right = ((tmp_path / f"{index}/model.safetensors").read_bytes() for index in (0, 1))
    assert left == right
