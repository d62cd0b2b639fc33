"""``poros.load`` for reward models, classifiers and embedding models: ``from_pretrained``'s bytes.

How they train is in tests/exact (rows of test_programs.py, test_trl.py), how their adapters are
merged in tests/merging.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
)

import poros
from poros.errors import CheckpointFormatError, PolicyError, UnsupportedModelError
from poros.gates import tiny
from poros.loaders.load import load
from tests.covers import with_slow
from tests.loading.loaded import Kinds, differences, quantization, unplaced
from tests.support import same_bits

SCORE, BARE = AutoModelForSequenceClassification, AutoModel
FAMILIES = with_slow(("qwen2", "qwen3", "llama", "gemma3", "mistral"), ("llama", "mistral"))
FIELDS: dict[Any, dict[str, Any]] = {SCORE: {"num_labels": 1}, BARE: {}}


def plain(path: Path, auto_class: Any, seed: int = 0, **options: Any) -> Any:
    """What a user loads without Poros; a new head is drawn from torch's random state."""
    torch.manual_seed(seed)
    options = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}, **options}
    return auto_class.from_pretrained(path, quantization_config=quantization(), **options)


def ours(path: Path, auto_class: Any, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return load(path, auto_class=auto_class, **options)


def of_its_class(path: Path, auto_class: Any, to: Path, **fields: Any) -> Path:
    """A checkpoint that such a model has saved, by its own names."""
    auto_class.from_pretrained(path, dtype=torch.bfloat16, **fields).save_pretrained(to)
    return to


@pytest.mark.cover("values")
@pytest.mark.parametrize("auto_class", FIELDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_and_random_states_are_those_of_from_pretrained(
    kinds: Kinds, tmp_path: Path, family: str, auto_class: Any
) -> None:
    """Of a language model's checkpoint, and of one of its own class; from memory and a store."""
    fields = FIELDS[auto_class]
    whole = kinds.dense(family, num_layers=2)
    for path in (whole, of_its_class(whole, auto_class, tmp_path / "own", **fields)):
        expected = plain(path, auto_class, **fields)
        state = torch.get_rng_state()
        model = ours(path, auto_class, **fields)
        assert same_bits(torch.get_rng_state(), state)
        assert differences(model, expected) == [] and unplaced(model) == []
        store = tmp_path / f"store of {path.name}"
        made = ours(path, auto_class, store=store, **fields)
        assert differences(made, expected) == []
        # The head that was drawn is the store's, whatever the random state is now.
        again = ours(path, auto_class, seed=1, store=store, **fields)
        assert differences(again, expected) == []
        torch.manual_seed(2)
        opened = load(store)
        assert type(opened) is type(expected)
        assert set(differences(opened, expected)) <= {"config"}
        assert opened.config.num_labels == expected.config.num_labels
    if auto_class is SCORE:
        other = plain(whole, auto_class, seed=1, **fields)
        assert "score.weight" in differences(other, ours(whole, auto_class, **fields))


@pytest.mark.parametrize("value", [AutoModelForCausalLM, "AutoModelForCausalLM", AutoConfig, 3])
def test_other_classes_are_refused(kinds: Kinds, value: Any) -> None:
    with pytest.raises(PolicyError, match=r"auto_class: expected .*leave it out for a language"):
        load(kinds.dense(), auto_class=value)


def test_a_store_of_another_class_is_refused(kinds: Kinds, tmp_path: Path) -> None:
    path, store = kinds.dense(num_layers=2), tmp_path / "store"
    load(path, store=store)
    with pytest.raises(PolicyError, match=r"auto_class 'AutoModel', found .* with None"):
        load(path, store=store, auto_class=BARE)
    with pytest.raises(PolicyError, match="auto_class 'AutoModelForSequenceClassification'"):
        load(store, auto_class=SCORE)
    bare = load(path, store=tmp_path / "bare", auto_class=BARE)
    assert type(load(path, store=tmp_path / "bare")) is type(bare)


def test_what_is_no_such_decoder_is_refused(kinds: Kinds, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"AutoModelForSequenceClassification, found"):
        load(kinds.dense("gemma4", num_layers=2), auto_class=SCORE)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(**small, intermediate_size=64)).save_pretrained(tmp_path / "bert")
    with pytest.raises(UnsupportedModelError, match=r"such a decoder.*found BertModel"):
        load(tmp_path / "bert", auto_class=BARE)
    # A reward model is no language model, whose head would be missing and whose own be lost.
    reward = of_its_class(kinds.dense(num_layers=2), SCORE, tmp_path / "reward", num_labels=1)
    with pytest.raises(UnsupportedModelError, match="pass auto_class=AutoModelForSequenceClass"):
        load(reward)
    with pytest.raises(CheckpointFormatError, match=r"score\.weight.*expected shape \(3, 64\)"):
        load(reward, auto_class=SCORE, num_labels=3)


@pytest.mark.parametrize("auto_class", FIELDS)
def test_a_plan_of_one_has_no_head_for_tokens_and_is_kept(kinds: Kinds, auto_class: Any) -> None:
    task = "SEQ_CLS" if auto_class is SCORE else "FEATURE_EXTRACTION"
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    model = tiny.without_repacking(ours(kinds.dense(), auto_class, **FIELDS[auto_class]))
    adapted = get_peft_model(model, config).train()
    plan = poros.plan(adapted, seq_len=12, batch_size=2)
    assert plan.total_num_bytes > plan.terms["head"] == 0
    poros.prepare(adapted, vram_budget=f"{plan.total_num_bytes}B")
    adapted(input_ids=torch.arange(5, 29).reshape(2, 12))[0].float().square().mean().backward()
    assert poros.runtime(adapted).self_check["status"] == "passed"


def test_only_a_head_is_drawn(kinds: Kinds, tmp_path: Path) -> None:
    """Every other tensor that is missing is an error, as for a language model."""
    path = of_its_class(kinds.dense(num_layers=2), BARE, tmp_path / "base")
    found = load_file(path / "model.safetensors")
    del found["norm.weight"]
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    for auto_class in (SCORE, BARE):
        with pytest.raises(CheckpointFormatError, match=r"none of (model\.)?norm\.weight"):
            load(path, auto_class=auto_class)
