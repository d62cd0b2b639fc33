"""Documents that share a row do not see one another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AttentionInterface

import poros
from poros.finetune import run as runs
from poros.finetune.packing import _small, is_kept_apart, keeps_apart
from tests.finetune.subjects import recipe_of, run

ACROSS = ("bloom", "opt", "mamba", "jamba", "qwen3_next", "qwen2_5_vl")
FAMILIES = (
    *("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma3_text", "gemma4_text", "mixtral"),
    *("gemma3", "gemma4", "qwen3_vl", "mistral3", "llama4", *ACROSS),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_kept_apart_or_families_are_told_that_see_across(family: str) -> None:
    before = torch.get_rng_state()
    assert keeps_apart(CONFIG_MAPPING[family]()) == (family not in ACROSS)
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_of_the_real_model_decide() -> None:
    convolutions = ["conv", "full_attention"] * 4
    config = CONFIG_MAPPING["lfm2"](layer_types=convolutions, num_hidden_layers=8)
    assert not keeps_apart(config)
    plain = CONFIG_MAPPING["lfm2"](layer_types=["full_attention"] * 8, num_hidden_layers=8)
    assert keeps_apart(plain)


def test_control_a_row_without_positions_of_its_documents() -> None:
    """The same model sees across if it is not told where documents begin."""
    model: Any = _small(CONFIG_MAPPING["qwen2"]())
    assert is_kept_apart(model)
    forward = model.forward
    model.forward = lambda position_ids, **inputs: forward(**inputs)
    assert not is_kept_apart(model)


def by_documents(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stands in for flash attention: no mask, each document on its own."""
    assert attention_mask is None
    lengths = cu_seq_lens_q.diff().tolist()
    assert max_length_q == max(lengths)
    parts = zip(*(each.split(lengths, dim=2) for each in (query, key, value)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    found = [
        attend(*each, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True)
        for each in parts
    ]
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


@pytest.fixture
def attention() -> Iterator[str]:
    AttentionInterface.register("by_documents", by_documents)
    yield "by_documents"
    del AttentionInterface._global_mapping["by_documents"]


def test_attention_that_takes_cu_seqlens_gets_them(
    attention: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no mask. Streamed equals resident; the losses are those of a mask, rounded apart."""
    assert keeps_apart(CONFIG_MAPPING["qwen2"](), attention)
    source = {"model__source": model, "data__source": data / "text.jsonl"}
    common = {"training__max_length": 64, "training__max_steps": 3, "training__learning_rate": 1e-3}
    common["training__gradient_accumulation_steps"] = 2
    found, made, make = {}, [], runs._model
    monkeypatch.setattr(runs, "_model", lambda *given: made.append(make(*given)) or made[-1])
    for name, more in {
        "streamed": {"model__attention": attention, "memory__slots": 2},
        "resident": {"model__attention": attention, "memory__resident": True},
        "masked": {"memory__slots": 2},
    }.items():
        recipe = recipe_of(**source, **common, **more, output__folder=tmp_path / name)
        found[name] = run(recipe)
        assert "packed into rows" in found[name].said
    streamed, _, masked = (poros.runtime(each).stats() for each in made)
    assert (streamed["attention"], masked["attention"]) == (attention, "sdpa")
    assert streamed["num_groups"] == masked["num_groups"] > 0
    assert streamed["fallbacks"] == masked["fallbacks"]
    assert found["streamed"].losses == found["resident"].losses
    assert found["streamed"].adapter == found["resident"].adapter
    assert found["streamed"].losses == pytest.approx(found["masked"].losses, rel=1e-3)


def test_control_attention_that_takes_neither_a_mask_nor_cu_seqlens() -> None:
    def across(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        length = query.shape[2]
        return by_documents(module, query, key, value, None, torch.tensor([0, length]), length)

    AttentionInterface.register("across", across)
    try:
        assert not keeps_apart(CONFIG_MAPPING["qwen2"](), "across")
    finally:
        del AttentionInterface._global_mapping["across"]
