"""While prepared, a model is to everyone else what it was: names, objects, bytes, files, counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import poros
from poros.errors import PreparedModelError
from poros.slots.schedule import Phase, count, training_visits, walk
from poros.stream.boundary import streamed_layer
from tests.exact.arms import slice_resident_loss
from tests.snapshots import (
    assert_same_run,
    batches,
    bits_of,
    build,
    changes,
    layers_of,
    picture,
    resident_run,
    run,
)
from tests.support import AS_PLAIN, prepare_plain, same_bits

STATS = {
    *("num_loads", "num_hits", "h2d_num_bytes", "device_num_bytes", "host_num_bytes"),
    *("pinned_num_bytes", "disk_num_bytes", "disk_stall_ms", "fallbacks"),
    *("offloaded_num_bytes", "h2d_ms", "h2d_gb_per_s", "stall_ms", "num_resizes"),
    *("num_index_transfers", "rows_num_bytes", "head_num_bytes"),
    *("num_fused_adapters", "num_grouped_adapters", "num_unfused_adapters"),
    *("num_left_out_adapters", "lora_paths"),
    *("num_replayed_visits", "num_eager_visits", "attention", "num_groups"),
}


CLASS_NAMES = ("__name__", "__qualname__", "__module__")


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_prepare_again_does_nothing_with_an_equal_policy_and_is_refused_with_another() -> None:
    model = prepare_plain(build(), block_size=2)
    runtime, before = poros.runtime(model), picture(model)
    assert prepare_plain(model, poros.StreamingPolicy(block_size=2, **AS_PLAIN)) is model
    assert poros.runtime(model) is runtime
    with pytest.raises(PreparedModelError, match=r"found .*block_size=2.*poros\.restore"):
        prepare_plain(model, block_size=1)
    assert changes(before, picture(model)) == {}
    assert_same_run(resident_run(), run(model))


def test_overrides_replace_fields_of_the_policy() -> None:
    policy = poros.StreamingPolicy(block_size=2, slots=4)
    model = prepare_plain(build(), policy, slots=3)
    assert poros.runtime(model).policy == poros.StreamingPolicy(block_size=2, slots=3)
    assert policy.slots == 4


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "phi3"])
def test_names_objects_class_names_and_counts_stay(architecture: str) -> None:
    def facts(model: Any) -> dict[str, object]:
        parameters = model.named_parameters(remove_duplicate=False)
        base = model.get_base_model()
        return {
            "num_parameters": base.num_parameters(),
            "trainable": base.num_parameters(only_trainable=True),
            "without embeddings": base.num_parameters(exclude_embeddings=True),
            "peft": model.get_nb_trainable_parameters(),
            "footprint": base.get_memory_footprint(),
            "without buffers": base.get_memory_footprint(return_buffers=False),
            "kind": (base.device, base.dtype, base.is_loaded_in_4bit, base.is_quantized),
            "parameters": [(name, id(each), each.requires_grad) for name, each in parameters],
            "parameter types": [type(parameter) for parameter in model.parameters()],
            "buffers": [(name, id(each)) for name, each in model.named_buffers()],
            "modules": [
                (name, id(each), *(getattr(type(each), key) for key in CLASS_NAMES))
                for name, each in model.named_modules(remove_duplicate=False)
            ],
            "causal LM": type(base),
        }

    model = build(architecture)
    classes = [type(layer) for layer in layers_of(model)]
    before = facts(model)
    prepare_plain(model)
    assert changes(before, facts(model)) == {}
    model(**batches()[0])
    assert changes(before, facts(model)) == {}
    for layer, original in zip(layers_of(model), classes, strict=True):
        assert isinstance(layer, original) and type(layer) is not original


@pytest.mark.parametrize("quantize", [True, False])
def test_state_dict_is_equal_key_for_key_and_bit_for_bit(quantize: bool) -> None:
    model = build(quantize=quantize)
    expected = {key: each.clone() for key, each in model.state_dict().items()}
    before = bits_of(model)
    prepare_plain(model)
    for _ in range(2):
        found = model.state_dict()
        assert list(found) == list(expected)
        assert [key for key in found if not same_bits(found[key], expected[key])] == []
        assert changes(before, bits_of(model)) == {}
        # Once more after forwards and backwards have gone through the slots.
        model(**batches()[1]).loss.backward()
        model.zero_grad()


def test_files_saved_while_prepared_are_the_resident_ones(tmp_path: Path) -> None:
    models = {"resident": build(), "prepared": prepare_plain(build(), block_size=2)}
    assert_same_run(*map(run, models.values()))
    for name, model in models.items():
        model.save_pretrained(tmp_path / name / "adapter")
        model.get_base_model().save_pretrained(tmp_path / name / "base")
    expected = files_in(tmp_path / "resident")
    assert {"base/model.safetensors", "adapter/adapter_model.safetensors"} < expected.keys()
    assert changes(expected, files_in(tmp_path / "prepared")) == {}
    first = b"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert first in expected["adapter/adapter_model.safetensors"]


@pytest.mark.parametrize("quantize", [True, False])
def test_base_saved_while_prepared_loads_to_equal_bytes(tmp_path: Path, quantize: bool) -> None:
    model = build(quantize=quantize)
    base = model.get_base_model()

    def without_adapters(tensors: Any) -> dict[str, Any]:
        names = {name: name.replace(".base_layer.", ".") for name in tensors if "lora_" not in name}
        return {names[name]: tensors[name] for name in names}

    expected = without_adapters(bits_of(base))
    prepare_plain(model)
    model(**batches()[0]).loss.backward()
    base.save_pretrained(tmp_path)
    # PEFT's names of a wrapped linear layer are the only thing that keeps the files from loading.
    weights = tmp_path / "model.safetensors"
    save_file(without_adapters(load_file(weights)), weights, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    assert changes(expected, bits_of(loaded)) == {}


def test_two_prepared_models_do_not_influence_each_other() -> None:
    seeds = (0, 7)
    expected = [resident_run(seed=seed) for seed in seeds]
    first, second = (prepare_plain(build(seed=seed), block_size=1 + seed % 2) for seed in seeds)
    batch = batches()[0]
    alone = [build(seed=seed)(**batch).loss for seed in seeds]
    # Both graphs are alive at once, and the visits of one come between those of the other.
    losses = [first.eval()(**batch).loss, second.eval()(**batch).loss]
    losses[0].backward()
    losses[1].backward()
    assert len(set(alone)) == 2
    for loss, model, seed in zip(losses, (first, second), seeds, strict=True):
        twin = build(seed=seed).eval()
        twin_loss = twin(**batch).loss
        twin_loss.backward()
        assert same_bits(loss, twin_loss)
        assert changes(bits_of(twin), bits_of(model)) == {}
        model.zero_grad()
    assert_same_run(expected[1], run(second))
    poros.restore(second)
    assert_same_run(expected[0], run(first))


def test_stats_have_the_documented_keys_and_plausible_values() -> None:
    model = prepare_plain(build(), self_check="off")
    runtime = poros.runtime(model)
    start = runtime.stats()
    assert set(start) == STATS and start["attention"] == "sdpa"
    assert json.loads(json.dumps(start)) == start
    assert runtime.num_blocks == 3 and runtime.num_slots == 2
    slabs = [runtime.host_slab(block).numel() for block in range(3)]
    assert start["num_loads"] == start["num_hits"] == start["h2d_num_bytes"] == 0
    assert start["host_num_bytes"] == sum(slabs)
    # Two slots; as constants the code books of 16 and 256 floats and the offsets, each value once.
    slots = max(slabs[0], slabs[2]) + slabs[1]
    weights = [parameter for parameter in model.parameters() if hasattr(parameter, "quant_state")]
    offsets = {float(each.quant_state.offset) for each in weights}
    assert len(weights) == 3 * 7 and len(offsets) > 3 * 7 / 2
    # Two norms, three biases and seven nested absmax in each layer, each within 256 bytes.
    small = 3 * 12 * 256
    assert start["device_num_bytes"] == slots + small + 4 * (16 + 256 + len(offsets))
    assert start["pinned_num_bytes"] == 0 and start["fallbacks"] == []
    num_steps = 3
    run(model, num_steps=num_steps)
    actions = list(walk(training_visits(3, num_steps), 3, 2))
    end = runtime.stats()
    # The last backward has loaded ahead for a next step: 2K - S, then 2 (K - S) a step.
    assert end["num_loads"] == count(actions, "prefetch") == 2 * 3 - 2 + (num_steps - 1) * 2
    assert len(set(slabs)) == 1
    assert end["h2d_num_bytes"] == end["num_loads"] * slabs[0]
    # On a CPU whoever computes waits for the whole of a copy.
    assert 0 < end["h2d_ms"] == end["stall_ms"]
    assert end["h2d_gb_per_s"] == pytest.approx(end["h2d_num_bytes"] / end["h2d_ms"] / 1e6)
    # Both visits of a block that no load precedes are hits: S at each turn.
    assert end["num_hits"] == (2 * num_steps - 1) * 2
    copies = f"{end['num_loads']} copies of blocks"
    for said in (type(model).__name__, "3 blocks, 2 on the device", copies, "first step: off"):
        assert said in repr(runtime)
    assert {key: end[key] for key in STATS if "device" in key or "host" in key} == {
        key: start[key] for key in STATS if "device" in key or "host" in key
    }


def test_runtime_of_a_model_that_is_not_prepared_says_what_to_do() -> None:
    for call in (poros.runtime, poros.restore):
        with pytest.raises(PreparedModelError, match=r"found a PeftModel.*poros\.prepare"):
            call(build(num_layers=1))


def test_patch_hf_model_groups_four_layers() -> None:
    model = build(num_layers=5)
    assert poros.patch_hf_model(model) is model
    assert poros.runtime(model).policy == poros.StreamingPolicy(block_size=4, slots=2)
    assert poros.runtime(model).num_blocks == 2
    assert poros.runtime(poros.patch_hf_model(build(), block_size=3)).num_blocks == 1
    assert_same_run(run(slice_resident_loss(build(num_layers=5))), run(model))


def test_an_optimizer_and_gradients_from_before_prepare_stay_valid() -> None:
    resident, model = build(), build()
    results = []
    for each in (resident, model):
        torch.manual_seed(0)
        each.train()
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        each(**batches()[0]).loss.backward()
        if each is model:
            prepare_plain(each)
        each(**batches()[1]).loss.backward()
        optimizer.step()
        results.append(bits_of(each))
    assert changes(*results) == {}


def test_prepare_works_on_a_base_with_transformers_own_adapters() -> None:
    from peft import LoraConfig

    def with_adapters() -> Any:
        base = build().unload()
        torch.manual_seed(5)
        base.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        return base

    assert_same_run(run(with_adapters()), run(prepare_plain(with_adapters())))


def test_what_is_in_place_during_a_visit_is_what_was_there_at_rest() -> None:
    """Parameters stay parameters and buffers tensors: code asks for it."""
    model = prepare_plain(build(quantize=False), self_check="off", slots=2)
    layer = layers_of(model)[1]

    def kinds() -> dict[str, type]:
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        return {name: type(tensor) for name, tensor in tensors}

    at_rest = kinds()
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    with streamed_layer(layer).visit(Phase.INFERENCE, ()):
        assert kinds() == at_rest
        assert [parameter.data_ptr() for parameter in layer.parameters()] != addresses
