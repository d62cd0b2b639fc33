"""Documents that share a row do not see one another."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AttentionInterface

import poros
from poros.errors import RecipeError
from poros.finetune import run as runs
from poros.finetune.packing import _FAMILIES, _OF_PACKED, choose_attention, keeps_apart
from poros.gates import tiny
from poros.kernels import forwards, packed_attention
from poros.kernels.forwards import LIBRARIES
from poros.loaders.settings import model_class_of
from tests.finetune.subjects import Trained, recipe_of, run

ACROSS = ("bloom", "opt", "mamba", "jamba", "qwen3_next", "lfm2")
LENGTHS = (5, 11, 1, 7)
"""Of the documents of a row, longer than the windows of the small model."""
ROUNDING = 1e-4
"""By how much logits in float32, of order 1, may differ without another document's doing: experts
sum up tokens in groups, whose sizes change with the routing of others."""


def small(family: str) -> Any:
    config = tiny.small_config(family, num_layers=4, hidden_size=64)
    model_class, config = model_class_of(config)
    return model_class._from_config(config, dtype=torch.float32)


def is_kept_apart(model: Any) -> bool:
    """Whether documents of a row are independent in a model: one after the other is changed."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(3, 3 + sum(LENGTHS))[None] * 7 % (vocab_size - 3) + 3
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    options: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    model.eval()
    with torch.no_grad():
        before = model(input_ids=ids, **options).logits
        for start, length in zip((0, *accumulate(LENGTHS)), LENGTHS, strict=False):
            inside = slice(start, start + length)
            changed = ids.clone()
            changed[0, inside] = (ids[0, inside] + 1) % vocab_size
            after = model(input_ids=changed, **options).logits
            differs = ((after - before).abs() > ROUNDING).any(-1)[0]
            assert differs[inside].all()
            differs[inside] = False
            if differs.any():
                return False
    return True


@pytest.mark.parametrize("family", _FAMILIES)
def test_documents_are_kept_apart(family: str) -> None:
    assert is_kept_apart(small(family))


@pytest.mark.parametrize("family", ACROSS)
def test_families_that_may_see_across_are_not_packed(family: str) -> None:
    assert not keeps_apart(CONFIG_MAPPING[family]())


def test_control_a_row_without_positions_of_its_documents() -> None:
    """The same model sees across if it is not told where documents begin, and others always do."""
    model = small("qwen2")
    forward = model.forward
    model.forward = lambda position_ids, **inputs: forward(**inputs)
    assert not is_kept_apart(model)
    assert not is_kept_apart(small("mamba"))


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


@pytest.fixture(params=["by_documents", packed_attention.NAME])
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name == packed_attention.NAME:
        packed_attention.register()
    else:
        AttentionInterface.register(name, by_documents)
    yield name
    del AttentionInterface._global_mapping[name]


@pytest.mark.parametrize("family", _OF_PACKED)
def test_packed_attention_is_that_of_a_mask(family: str) -> None:
    """The boundaries say what positions say, windows included; empty documents change nothing."""
    packed_attention.register()
    model = small(family).eval()
    ids = torch.arange(3, 3 + sum(LENGTHS))[None] * 7 % 50 + 3
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    ends = torch.tensor([0, *accumulate(LENGTHS), sum(LENGTHS), sum(LENGTHS)], dtype=torch.int32)
    given: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        masked = model(**given).logits
        model.set_attn_implementation(packed_attention.NAME)
        found = model(**given, cu_seq_lens_q=ends, max_length_q=sum(LENGTHS)).logits
        torch.testing.assert_close(found, masked, atol=ROUNDING, rtol=0)
        across = model(**given, cu_seq_lens_q=ends[[0, -1]], max_length_q=sum(LENGTHS)).logits
        assert (across - masked).abs().max() > ROUNDING  # a control: one document for all
        with pytest.raises(ValueError, match="packed documents"):
            model(**given)
        with pytest.raises(ValueError, match="packed documents"):
            twice = {name: each.expand(2, -1) for name, each in list(given.items())[:2]}
            model(**twice, cu_seq_lens_q=ends, max_length_q=sum(LENGTHS))


CHOICES: list[tuple[str, str, tuple[int, int], str | None, int, str | None]] = [
    ("qwen2", "cuda", (8, 6), None, 16, "packed"),
    ("qwen2", "cuda", (8, 6), None, 17, None),  # more for documents than for tokens
    ("qwen2", "cuda", (8, 6), "sdpa", 16, "sdpa"),
    ("qwen2", "cuda", (7, 5), None, 16, None),
    ("qwen2", "cpu", (9, 0), None, 16, None),
    ("gemma3_text", "cuda", (9, 0), None, 16, None),  # windows
    ("gemma3", "cuda", (9, 0), None, 16, None),
    ("gemma4_text", "cuda", (9, 0), None, 16, None),
]


@pytest.mark.parametrize(
    ("family", "device", "capability", "attention", "documents", "chosen"), CHOICES
)
def test_packed_attention_is_chosen_for_fast_rows(
    family: str,
    device: str,
    capability: tuple[int, int],
    attention: str | None,
    documents: int,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    said = {"model__attention": attention} if attention else {}
    recipe = recipe_of(model__source="m", data__source="d", **said)
    config = CONFIG_MAPPING[family]()
    found = choose_attention(recipe, config, torch.device(device), documents, 512)
    assert found.model.attention == chosen


@pytest.mark.parametrize(
    ("capability", "channels", "dtype", "is_there"),
    [
        ((8, 6), 192, torch.bfloat16, True),
        ((8, 6), 200, torch.bfloat16, False),  # too wide in backward
        ((9, 0), 256, torch.float16, True),
        ((9, 0), 264, torch.bfloat16, False),
        ((9, 0), 60, torch.bfloat16, False),
        ((9, 0), 64, torch.float32, False),
        ((7, 5), 64, torch.float16, False),
    ],
)
def test_heads_that_kernels_take(
    capability: tuple[int, int],
    channels: int,
    dtype: torch.dtype,
    is_there: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    query = torch.empty(channels, dtype=dtype)
    assert packed_attention.has_flash_kernel(query, torch.device("cuda")) == is_there
    assert not packed_attention.has_flash_kernel(query, torch.device("cpu"))


def test_packed_attention_is_refused_for_rows_that_are_not(
    model: Path, data: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(
        model__source=model,
        data__source=data / "text.jsonl",
        model__attention=packed_attention.NAME,
        training__packing=False,
        output__folder=tmp_path / "run",
    )
    with pytest.raises(RecipeError, match="--attention"):
        run(recipe)
    assert not (tmp_path / "run").exists()


Ran = tuple[Trained, dict[str, Any]]
"""A run, and what its model's runtime has counted."""


def packed(model: Path, data: Path, out: Path, **more: Any) -> Ran:
    made, make = list[Any](), runs._model
    common = {"training__max_length": 64, "training__max_steps": 2, "training__learning_rate": 1e-3}
    common["training__gradient_accumulation_steps"] = 2
    source = {"model__source": model, "data__source": data / "text.jsonl"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_model", lambda *given: made.append(make(*given)) or made[-1])
        found = run(recipe_of(**source, **common, **more, output__folder=out))
    assert "packed into rows" in found.said
    return found, poros.runtime(made[0]).stats()


@pytest.fixture(scope="module")
def masked(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return packed(model, data, tmp_path_factory.mktemp("masked"), memory__slots=2)


def test_attention_that_takes_cu_seqlens_gets_them(
    attention: str,
    masked: Ran,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no mask. Streamed equals resident; the losses are those of a mask, rounded apart."""
    names = LIBRARIES | {"tests", __name__.partition(".")[0]}
    monkeypatch.setattr(forwards, "LIBRARIES", names)  # as if a library had registered it
    assert keeps_apart(CONFIG_MAPPING["qwen2"](), attention)
    chosen = {"model__attention": attention}
    resident, _ = packed(model, data, tmp_path / "resident", **chosen, memory__resident=True)
    assert masked[1]["attention"] == "sdpa" and masked[1]["num_groups"] > 0
    for name, value in {"slots": 2, "vram": "1GiB"}.items():
        room = {f"memory__{name}": value}
        streamed, stats = packed(model, data, tmp_path / name, **chosen, **room)
        assert stats["attention"] == attention
        assert stats["num_groups"] == masked[1]["num_groups"]
        assert stats["fallbacks"] == masked[1]["fallbacks"]
        assert (streamed.losses, streamed.adapter) == (resident.losses, resident.adapter)
        assert streamed.losses == pytest.approx(masked[0].losses, rel=1e-3)


def test_control_attention_that_takes_neither_a_mask_nor_cu_seqlens() -> None:
    def across(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        length = query.shape[2]
        return by_documents(module, query, key, value, None, torch.tensor([0, length]), length)

    AttentionInterface.register("across", across)
    try:
        assert not keeps_apart(CONFIG_MAPPING["qwen2"](), "across")
    finally:
        del AttentionInterface._global_mapping["across"]
