"""Documents that share a row do not see one another."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from poros.finetune.packing import _small, is_kept_apart, keeps_apart

APART = ["qwen2", "qwen3", "llama", "mistral", "phi3", "gemma3_text", "gemma4_text", "mixtral"]
ACROSS = ["bloom", "opt", "mamba", "jamba", "qwen3_next"]


@pytest.mark.parametrize("family", APART)
def test_documents_are_kept_apart(family: str) -> None:
    assert keeps_apart(CONFIG_MAPPING[family]())


@pytest.mark.parametrize("family", ACROSS)
def test_families_whose_documents_would_see_each_other_are_told(family: str) -> None:
    assert not keeps_apart(CONFIG_MAPPING[family]())


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


def test_trying_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    keeps_apart(CONFIG_MAPPING["qwen2"]())
    assert torch.equal(torch.get_rng_state(), before)
