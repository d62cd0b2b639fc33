"""While prepared, a model is to everyone else what it was: names, objects, bytes, files, counts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poros
from poros.errors import PreparedModelError
from poros.stream.layer_index import LayerIndex
from tests.comparing import assert_same_run, bits_of, changes, picture
from tests.loops import batches, build, layers_of, resident_run, run, slice_resident_loss
from tests.support import AS_PLAIN, prepare_plain, same_bits

STATS = {
    *("num_loads", "num_hits", "h2d_num_bytes", "device_num_bytes", "host_num_bytes"),
    *("pinned_num_bytes", "disk_num_bytes", "disk_stall_ms", "fallbacks"),
    *("offloaded_num_bytes", "h2d_ms", "h2d_gb_per_s", "stall_ms", "num_resizes"),
    *("rows_num_bytes", "head_num_bytes"),
    *("num_fused_adapters", "num_grouped_adapters", "num_unfused_adapters"),
    *("num_left_out_adapters", "lora_paths"),
    *("num_replayed_visits", "num_joined_visits", "num_eager_visits", "attention", "num_groups"),
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
    policy = poros.StreamingPolicy(block_size=2, slots=4)
    other = poros.runtime(prepare_plain(build(), policy, slots=3))
    assert other.policy == poros.StreamingPolicy(block_size=2, slots=3) and policy.slots == 4


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
def test_files_saved_while_prepared_are_the_resident_ones(tmp_path: Path, quantize: bool) -> None:
    """With head and embedding in host memory, too."""
    models = {name: build(quantize=quantize) for name in ("resident", "prepared")}
    policy = {"stream_head": quantize, "stream_embedding": quantize}
    prepare_plain(models["prepared"], block_size=2, **policy)
    assert_same_run(*map(run, models.values()))
    for name, model in models.items():
        model.save_pretrained(tmp_path / name / "adapter")
        model.get_base_model().save_pretrained(tmp_path / name / "base")
    expected = files_in(tmp_path / "resident")
    assert {"base/model.safetensors", "adapter/adapter_model.safetensors"} < expected.keys()
    assert changes(expected, files_in(tmp_path / "prepared")) == {}
    first = b"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert first in expected["adapter/adapter_model.safetensors"]


def test_two_prepared_models_do_not_influence_each_other() -> None:
    """Both graphs are alive at once, and the visits of one come between those of the other."""
    twins, models = ([build(seed=seed).eval() for seed in (0, 7)] for _ in "ab")
    for model, block_size in zip(models, (1, 2), strict=True):
        prepare_plain(model, block_size=block_size)
    expected, losses = ([model(**batches()[0]).loss for model in some] for some in (twins, models))
    assert len(set(expected)) == 2
    for loss in (*expected, *losses):
        loss.backward()
    for index, (twin, model) in enumerate(zip(twins, models, strict=True)):
        assert same_bits(expected[index], losses[index])
        assert changes(bits_of(twin), bits_of(model)) == {}
    poros.restore(models[1]).zero_grad()
    twins[0].zero_grad(), models[0].zero_grad()
    assert_same_run(run(twins[0]), run(models[0]))


def test_stats_have_the_documented_keys_and_plausible_values() -> None:
    model = prepare_plain(build(), self_check="off")
    runtime = poros.runtime(model)
    start = runtime.stats()
    assert set(start) == STATS and start["attention"] == "sdpa"
    assert json.loads(json.dumps(start)) == start
    slab = runtime.host_slab(0).numel()
    assert start["num_loads"] == start["num_hits"] == start["h2d_num_bytes"] == 0
    assert start["host_num_bytes"] == 3 * slab
    # As constants the code books of 16 and 256 floats and the offsets, each value once.
    weights = [parameter for parameter in model.parameters() if hasattr(parameter, "quant_state")]
    offsets = {float(each.quant_state.offset) for each in weights}
    assert len(weights) == 3 * 7 and len(offsets) > 3 * 7 / 2
    # Two norms, three biases and seven nested absmax in each layer, each within 256 bytes.
    small = 3 * 12 * 256
    assert start["device_num_bytes"] == 2 * slab + small + 4 * (16 + 256 + len(offsets))
    assert start["pinned_num_bytes"] == 0 and start["fallbacks"] == []
    run(model, num_steps=3)
    end = runtime.stats()
    # The first step loads 2K - S blocks and others 2 (K - S); what is not loaded is a hit.
    assert (end["num_loads"], end["num_hits"]) == (4 + 2 * 2, 2 + 2 * 4)
    assert end["h2d_num_bytes"] == end["num_loads"] * slab
    # On a CPU whoever computes waits for the whole of a copy.
    assert 0 < end["h2d_ms"] == end["stall_ms"]
    assert end["h2d_gb_per_s"] == pytest.approx(end["h2d_num_bytes"] / end["h2d_ms"] / 1e6)
    copies = f"{end['num_loads']} copies of blocks"
    for said in (type(model).__name__, "3 blocks, 2 on the device", copies, "first step: off"):
        assert said in repr(runtime)
    assert all(end[key] == start[key] for key in ("device_num_bytes", "host_num_bytes"))


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

    def look(*_: object) -> tuple[dict[str, type], list[int]]:
        tensors = dict((*layer.named_parameters(), *layer.named_buffers()))
        addresses = [each.data_ptr() for each in tensors.values()]
        return {name: type(tensor) for name, tensor in tensors.items()}, addresses

    seen = [look()]
    layer.mlp.register_forward_hook(lambda *_: seen.append(look()))
    with torch.no_grad():
        model(**batches()[0])
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]


# ``train()`` and ``eval()`` leave each module in the mode it has otherwise. Trainers ask for it at
# each micro-batch, so layers pass over modules that are in it already.


class Freezing:
    """Keeps a part in evaluation. Placed before a module's own class."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)  # type: ignore[misc]
        self.mlp.eval()  # type: ignore[attr-defined]
        return self


def freeze(layer: Any) -> None:
    if not isinstance(layer, Freezing):
        own = type(layer)
        layer.__class__ = type(own.__name__, (Freezing, own), {})


def count_on_the_instance(layer: Any) -> None:
    module = layer.mlp.act_fn
    module.num_calls = 0

    def train(mode: bool = True) -> Any:
        module.num_calls += 1
        return nn.Module.train(module, mode)

    module.train = train


CHANGES: dict[str, Callable[[Any], object]] = {
    "a module": lambda layer: layer.self_attn.q_proj.eval(),
    "a flag": lambda layer: setattr(layer.self_attn.o_proj, "training", False),
    "all but the layer's own": lambda layer: (layer.eval(), setattr(layer, "training", True)),
    "another module": lambda layer: setattr(layer.mlp, "extra", nn.Identity().eval()),
    "a method": count_on_the_instance,
    "a class": freeze,
}
"""Of a layer, before each call."""


def after(
    is_prepared: bool, change: Callable[[Any], object] = lambda layer: None
) -> list[list[tuple[str, bool, int]]]:
    """The modules after each of some calls, with the change before and between."""
    model = build().train()
    if change is freeze:  # prepared layers have a class of their own
        change(layers_of(model)[1])
    if is_prepared:
        prepare_plain(model, slots=2)
    found = []
    for mode in (True, True, False, False, True):
        change(layers_of(model)[1])
        model.train(mode)
        named = model.named_modules()
        found.append([(name, m.training, getattr(m, "num_calls", 0)) for name, m in named])
    return found


@pytest.mark.parametrize("which", CHANGES)
def test_each_module_has_the_mode_it_has_otherwise(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = CHANGES[which]
    expected = after(False, change)
    assert after(True, change) == expected
    # A control: a layer that looks at itself alone is caught by every change within it.
    monkeypatch.setattr(
        LayerIndex, "is_in_mode", lambda self, mode: self.modules()[0].training is mode
    )
    assert change is freeze or after(True, change) != expected


def test_modules_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare_plain(build().train(), slots=2).train()
    inner = set(map(id, layers_of(model)[1].modules())) - {id(layers_of(model)[1])}
    seen = []
    plain = nn.Module.__setattr__

    def note(self: nn.Module, name: str, value: Any) -> None:
        if name == "training" and id(self) in inner:
            seen.append(self)
        plain(self, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", note)
    model.train()
    assert not seen
    model.eval()
    assert len(seen) == len(inner)
