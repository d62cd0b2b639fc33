"""Checkpoints with a vision tower, as the hub has them: rows of text, with and without the tower.

And rows with images, adapters on the language model or on all of it. What TRL's collator makes of
image rows is in tests/finetune/test_images.py.
"""

import json
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

import poros
from poros.api import prepare_with
from poros.errors import DroppedTowerError, PolicyError, UnsupportedModelError
from poros.gates import tiny
from poros.gates.kinds import attach
from poros.kernels.nf4 import double_quantization
from poros.loaders.checkpoint import Checkpoint
from poros.merging.merge import merge
from poros.model.vision import excluded_modules
from tests.comparing import compare_mappings
from tests.covers import with_slow
from tests.loading.loaded import tensors
from tests.loading.towers import FAMILIES, num_layers, with_images, write
from tests.loops import num_groups, own_loss, reasons, same, train
from tests.support import AS_PLAIN, prepare_plain, same_bits
from tools.tape import TapeRecorder

Model = Any


ONE = with_slow(FAMILIES, {*FAMILIES} - {"gemma3"})

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = write(name, tmp_path_factory.mktemp(name))
        return made[name]

    return checkpoint


def load(path: Path, **options: Any) -> Model:
    return tiny.without_repacking(poros.load(path, device="cpu", **options))


def resident(path: Path) -> Model:
    return attach(tiny.load_base(path, dtype=torch.bfloat16), "lora", rank=4).train()


def loaded(path: Path, vision: str) -> Model:
    return attach(load(path, vision=vision), "lora", rank=4).train()


def text_loss(types: dict[str, str], model: Model, batch: dict[str, torch.Tensor]) -> Any:
    """With what the family's processor says of text."""
    return own_loss(model, batch | {key: 0 * batch[value] for key, value in types.items()})


RUN: Any = {"sizes": (3, 1), "padded": True}


def names(path: Path) -> list[str]:
    with Checkpoint.open(path) as checkpoint:
        return list(checkpoint.entries)


@pytest.mark.parametrize("name", with_slow(FAMILIES, ["mistral3", "qwen3_5"]))
def test_bytes_are_those_of_transformers(name: str, checkpoints: Checkpoints) -> None:
    family, path = FAMILIES[name], checkpoints(name)
    towers = [each for each in names(path) if each.startswith(family.tower)]
    assert towers and any(each.startswith(f"{family.layers}.0.") for each in names(path))
    expected = tiny.load_base(path, dtype=torch.bfloat16).state_dict()
    for vision in ("keep", "drop"):
        model = load(path, vision=vision)
        assert type(model) is type(AutoModelForImageTextToText.from_pretrained(path))
        found = model.state_dict()
        assert all(same_bits(tensor, expected[key]) for key, tensor in found.items())
        left = {key for key in expected if key not in found}
        assert bool(left) == (vision == "drop")
        assert not any(key.startswith(family.own_layers) or "embed_tokens" in key for key in left)
        assert type(model.get_output_embeddings()) is torch.nn.Linear


def kept(name: str) -> dict[str, Any]:
    return {"slots": num_layers(name), "keep_last": num_layers(name)}


@pytest.mark.parametrize("name", ONE)
def test_streamed_equals_resident(name: str, checkpoints: Checkpoints) -> None:
    """Losses, gradients, adapters, moments and random states; the resident run has its tower."""
    family, path = FAMILIES[name], checkpoints(name)
    run = {**RUN, "loss": partial(text_loss, family.types)}
    expected = train(resident(path), together=False, **run)
    modes: list[tuple[str, bool, dict[str, Any]]] = [
        ("keep", False, {"slots": 2}),
        ("drop", False, kept(name)),
        ("drop", True, {"slots": 2}),
    ]
    for vision, together, policy in modes:
        model = prepare_plain(loaded(path, vision), **policy)
        assert same(train(model, together=together, **run), expected)
        assert poros.runtime(model).self_check["status"] == "passed"
        assert num_groups(model) == (1 if together and family.goes_together else 0)
        assert bool(reasons(model)) == (together and not family.goes_together)


@pytest.mark.cover("values")
@pytest.mark.parametrize("vision", ["keep", "drop"])
@pytest.mark.parametrize("name", with_slow(FAMILIES, {*FAMILIES} - {"gemma3", "llama4"}))
def test_the_adapter_elsewhere(
    name: str, vision: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Plain transformers and PEFT load it, with its names and its logits; it merges as by PEFT."""
    family, path = FAMILIES[name], checkpoints(name)
    model = prepare_plain(loaded(path, vision), slots=2)
    train(model, together=False, **RUN)
    model.eval().save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(5, 15)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layers = f"base_model.model.{family.own_layers}."
    assert saved and all(key.startswith(layers) for key in saved)

    base = tiny.load_base(path, dtype=torch.bfloat16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", message=".*missing adapter keys")
        elsewhere = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert same_bits(elsewhere(input_ids=tokens).logits, logits)

    out = merge(tmp_path / "adapter", tmp_path / "merged", base=path)
    dense: Model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    by_peft = PeftModel.from_pretrained(dense, tmp_path / "adapter").merge_and_unload()
    expected = by_peft.state_dict()
    again: Model = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.bfloat16)
    found = again.state_dict()
    assert compare_mappings(expected, found) == []
    before, after = (load_file(folder / "model.safetensors") for folder in (path, out))
    changed = [key for key in before if not same_bits(before[key], after[key])]
    assert before.keys() == after.keys()
    assert changed and all(key.startswith(family.layers) for key in changed)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [type(dense).__name__]


@pytest.mark.parametrize("name", ONE)
def test_plans_count_the_tower(name: str, checkpoints: Checkpoints) -> None:
    path, request = checkpoints(name), {"seq_len": 16, "library_num_bytes": 0}
    whole, text = (poros.plan(path, vision=vision, **request) for vision in ("keep", "drop"))
    bases = [load(path, vision=vision) for vision in ("keep", "drop")]
    sizes = [sum(tensor.nbytes for tensor in tensors(each).values()) for each in bases]
    assert "vision" not in text.terms
    assert whole.total_num_bytes - text.total_num_bytes == whole.terms["vision"]
    assert whole.terms["vision"] == sizes[0] - sizes[1]
    assert whole.num_adapter_parameters == text.num_adapter_parameters > 0
    for base, expected in zip(bases, (whole, text), strict=True):
        config = LoraConfig(
            r=16,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            exclude_modules=excluded_modules(base),
        )
        found = poros.plan(get_peft_model(base, config), **request)
        assert found.terms == expected.terms


def test_stores_keep_what_was_loaded(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path, store = checkpoints("gemma3"), tmp_path / "store"
    expected = load(path, vision="drop").state_dict()
    load(path, vision="drop", store=store)
    for source, options in ((path, {"store": store}), (store, {"vision": "drop"})):
        found = load(source, **options).state_dict()
        assert compare_mappings(expected, found) == []
    for source, options in ((store, {}), (path, {"store": store})):
        with pytest.raises(PolicyError, match="expected one with vision"):
            load(source, vision="keep", **options)
    with pytest.raises(PolicyError, match="vision: expected 'keep' or 'drop'"):
        load(path, vision="frozen")


def test_a_tower_that_was_left_away_is_missed(checkpoints: Checkpoints) -> None:
    model = load(checkpoints("gemma3"), vision="drop")
    with pytest.raises(DroppedTowerError, match=r"model\.vision_tower: .*vision='drop'"):
        model(input_ids=torch.full((1, 8), 505), pixel_values=torch.zeros(1, 3, 28, 28))
    assert not hasattr(model.model.vision_tower, "embeddings")


def all_linear(base: Model, **options: Any) -> Model:
    """As PEFT does it by itself, on the tower too, unless ``options`` say otherwise."""
    usual = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    config = LoraConfig(init_lora_weights=False, **{**usual, **options})
    return get_peft_model(base, config).train()


def test_adapters_on_routers_are_refused(checkpoints: Checkpoints) -> None:
    base = load(checkpoints("llama4"))
    with pytest.raises(UnsupportedModelError, match=r"router.*exclude_modules=\['router'\]"):
        prepare_plain(all_linear(base), slots=2)
    model = prepare_plain(all_linear(load(checkpoints("llama4")), exclude_modules=["router"]))
    (batch,) = tiny.make_batches(1)
    model(**batch, use_cache=False).loss.backward()


# Rows with images.


def image_run(name: str, seed: int = 0) -> dict[str, Any]:
    form = partial(with_images, name, FAMILIES[name].types, seed=seed)
    return {**RUN, "sizes": (2, 2), "padded": False, "form": form}


@pytest.fixture(scope="module")
def resident_of_images(checkpoints: Checkpoints) -> Callable[[str], list[torch.Tensor]]:
    @cache
    def trained(name: str) -> list[torch.Tensor]:
        return train(resident(checkpoints(name)), together=False, **image_run(name))

    return trained


@pytest.mark.parametrize("name", with_slow(FAMILIES, {*FAMILIES} - {"gemma4"}))
def test_images_streamed_equal_resident(
    name: str, checkpoints: Checkpoints, resident_of_images: Callable[[str], list[torch.Tensor]]
) -> None:
    """Adapters on the language model, whose layers share states; others are in the tests below.

    Control: with other images the losses are others.
    """
    family, path = FAMILIES[name], checkpoints(name)
    expected = resident_of_images(name)
    first = {**image_run(name, seed=1), "sizes": (2,)}
    other = train(resident(path), together=False, **first)
    assert not any(map(same_bits, other[:2], expected[:2]))
    modes: list[tuple[bool, dict[str, Any]]] = [
        (False, {"slots": 2}),
        (False, {"slots": num_layers(name), "keep_last": 2}),
        (True, {"slots": 2}),
    ]
    for together, policy in modes:
        model = prepare_plain(loaded(path, "keep"), **policy)
        assert same(train(model, together=together, **image_run(name)), expected)
        assert poros.runtime(model).self_check["status"] == "passed"
        # Others note something in their first forward, or add states between the layers.
        assert bool(num_groups(model)) == (together and family.images_go_together)
        assert bool(reasons(model)) == (together and not family.images_go_together)


def test_images_recorded_equal_resident(checkpoints: Checkpoints) -> None:
    """Layers after which the tower's states are added, too."""
    run: Any = {**image_run("qwen3_vl"), "sizes": (2, 2, 2), "lengths": (12,)}
    expected = train(resident(checkpoints("qwen3_vl")), together=False, **run)
    model = loaded(checkpoints("qwen3_vl"), "keep")
    policy = poros.StreamingPolicy(**AS_PLAIN, slots=2, device="cpu")
    prepare_with(model, policy, recorder=TapeRecorder())
    assert same(train(model, together=False, **run), expected)
    assert poros.runtime(model).context.captures.num_replays > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ONE)
def test_images_with_the_head_in_slices(
    name: str, checkpoints: Checkpoints, resident_of_images: Callable[[str], list[torch.Tensor]]
) -> None:
    """And the embedding on the host, into whose rows the images are put."""
    policy: Any = {"stream_head": True, "stream_embedding": True}
    results = []
    for budget in ({"slots": 2}, kept(name)):
        model = poros.prepare(loaded(checkpoints(name), "keep"), **policy, **budget)
        assert poros.runtime(model).stats()["fallbacks"] == []
        results.append(train(model, together=False, **image_run(name)))
    assert same(*results)
    plain = resident_of_images(name)
    torch.testing.assert_close(results[0][0], plain[0], rtol=1e-3, atol=0)


def everywhere(base: Model) -> Model:
    """On language model, projector and tower; no routers."""
    return all_linear(base, exclude_modules=["router"], lora_dropout=0.05)


def with_trained_projector(base: Model) -> Model:
    """Trained as a whole, beside adapters on the language model; it has no 4-bit matrices."""
    return all_linear(
        base,
        target_modules=["q_proj", "down_proj"],
        exclude_modules=excluded_modules(base),
        modules_to_save=["multi_modal_projector"],
        task_type=None,
    )


@pytest.mark.parametrize(
    ("name", "adapt"),
    [
        *(
            pytest.param(name, everywhere, marks=pytest.mark.slow)
            for name in ("gemma3", "gemma4", "qwen3_vl", "mistral3", "llama4", "qwen3_5")
        ),
        ("qwen2_5_vl", everywhere),
        ("gemma3", with_trained_projector),
    ],
)
def test_images_train_what_stays(
    name: str, adapt: Callable[[Model], Model], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Projector and tower stay on the device: their gradients come through the first layer."""
    path = checkpoints(name)
    models = [adapt(tiny.load_base(path, dtype=torch.bfloat16)), adapt(load(path))]
    prepare_plain(models[1], slots=2)
    results = [train(model, together=False, **image_run(name)) for model in models]
    assert same(*results)
    before = dict(adapt(load(path)).named_parameters())
    trained = {key: each for key, each in models[1].named_parameters() if each.requires_grad}
    beside = [key for key in trained if FAMILIES[name].own_layers not in key]
    assert beside and len(beside) < len(trained)
    # SigLIP pools by a head that language models do not read.
    unmoved = [key for key in beside if same_bits(before[key], trained[key])]
    assert [key for key in unmoved if ".head." not in key] == []
    for model, place in zip(models, ("resident", "streamed"), strict=True):
        model.save_pretrained(tmp_path / place)
    files = [tmp_path / place / "adapter_model.safetensors" for place in ("resident", "streamed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_images_without_a_head_for_tokens(checkpoints: Checkpoints) -> None:
    """Scores of rows with images; a score is no part of the tower. Others: test_auto_classes."""
    name, auto_class, fields = "gemma3", "AutoModelForSequenceClassification", {"num_labels": 1}
    path = checkpoints(name)

    def made(base: Model) -> Model:
        return all_linear(base, task_type="SEQ_CLS", exclude_modules=excluded_modules(base))

    def loss(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        given = {key: each for key, each in batch.items() if key != "labels"}
        found: torch.Tensor = model(**given)[0].float().square().mean()
        return found

    torch.manual_seed(4)
    base = AutoModelForSequenceClassification.from_pretrained(
        path,
        quantization_config=double_quantization(torch.bfloat16),
        dtype=torch.bfloat16,
        **fields,
    )
    run: Any = {**image_run(name), "loss": loss}
    expected = train(made(tiny.without_repacking(base)), together=False, **run)
    torch.manual_seed(4)
    model = prepare_plain(made(load(path, auto_class=auto_class, **fields)), slots=2)
    assert same(train(model, together=False, **run), expected)
    trained = [key for key, each in model.named_parameters() if each.requires_grad]
    assert any("score.modules_to_save" in key for key in trained)
    scores = []
    for vision in ("keep", "drop"):
        torch.manual_seed(4)
        text = load(path, auto_class=auto_class, vision=vision, **fields)
        scores.append(text.score.weight)
    assert same_bits(*scores)
    with pytest.raises(DroppedTowerError):
        text(input_ids=torch.full((1, 8), 505), pixel_values=torch.zeros(1, 3, 28, 28))
