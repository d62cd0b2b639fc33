"""Rows with images: the bits of TRL's ``SFTTrainer`` and its collator on a resident model.

Gemma 3 with transformers' own processor; the other families with theirs where torchvision is, which
these need. Pixels that no processor has made: tests/loading/test_multimodal.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from datasets import Image as ImageFeature
from datasets import List as ListFeature
from packaging.version import Version
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, Trainer
from trl import SFTConfig, SFTTrainer

from poros.errors import DataFormatError, RecipeError, RunFolderError
from poros.finetune.adapters import adapter_config
from poros.finetune.data import Rows, read_data
from poros.planning.meta_model import meta_model
from tests.command import poros_command, text
from tests.finetune.arms import COMMON, streamed_as_resident
from tests.finetune.processors import write_processor
from tests.finetune.subjects import (
    announced,
    break_at,
    recipe_of,
    run,
    sentence,
    write_model,
    write_rows,
)
from tests.finetune.trl_runs import SETTINGS, by_poros, by_trl
from tests.loading.towers import FAMILIES, NUM_TOKENS, write

Image = pytest.importorskip("PIL.Image", reason="pictures need pillow")
marked = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="answers are not marked in rows with images",
)
"""Tests of rows of which the assistant's tokens are trained on."""


def picture(number: int, folder: Path) -> str:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 255, (40, 30, 3), generator=generator, dtype=torch.uint8)
    (folder / "pictures").mkdir(exist_ok=True)
    Image.fromarray(pixels.numpy()).save(folder / "pictures" / f"{number}.png")
    return f"pictures/{number}.png"


def asked(number: int, path: str | None) -> dict[str, Any]:
    """A row in one of the ways to write it: the image in its place, or beside the messages."""
    parts = [{"type": "image"}, {"type": "text", "text": sentence(number, 3 + number % 4)}]
    answer = {"role": "assistant", "content": sentence(number + 1, 3)}
    if path is None:
        return {"messages": [{"role": "user", "content": sentence(number, 4)}, answer]}
    if number % 3 == 0:
        parts[0]["image"] = path
        return {"messages": [{"role": "user", "content": parts}, answer]}
    content = parts if number % 3 == 1 else sentence(number, 3 + number % 4)
    return {"messages": [{"role": "user", "content": content}, answer], "images": [path]}


def write_pictures(folder: Path, *, all_have: bool = True) -> Path:
    """Rows with pictures beside them; some without, unless ``all_have``."""
    made = []
    for number in range(16):
        has_one = all_have or number % 5
        made.append(asked(number, picture(number, folder) if has_one else None))
    return write_rows(folder / "rows.jsonl", made)


def for_trl(file: Path) -> Dataset:
    """The rows as a user gives them to TRL."""
    made = []
    for number, line in enumerate(file.read_text().splitlines()):
        row = json.loads(line)
        has_one = "images" in row or isinstance(row["messages"][0]["content"], list)
        text = row["messages"][0]["content"]
        text = text[1]["text"] if isinstance(text, list) else text
        parts = [{"type": "image", "text": None}] * has_one + [{"type": "text", "text": text}]
        answer = [{"type": "text", "text": row["messages"][1]["content"]}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        images = [str(file.parent / "pictures" / f"{number}.png")] * has_one
        made.append({"messages": messages, "images": images})
    return Dataset.from_list(made).cast_column("images", ListFeature(ImageFeature()))


class ByTheModelsLoss(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with the loss of the model, as ``poros finetune`` has it."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, *args, **kwargs)


def plain(out: Path, model: Path, rows: Dataset, processing: Any, recipe: Any, **more: Any) -> Any:
    fields = {"assistant_only_loss": recipe.data.loss_on != "all", "packing": False, **more}
    base = meta_model(AutoConfig.from_pretrained(model), None, torch.bfloat16)
    return by_trl(
        *(out, model, ByTheModelsLoss, SFTConfig, rows, processing),
        auto_class=AutoModelForImageTextToText,
        adapter=adapter_config(recipe, base),
        fields=fields,
    )


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write("gemma3", tmp_path_factory.mktemp("gemma3") / "base")
    write_processor("gemma3", folder)
    return folder


@marked
@pytest.mark.gpu
def test_on_a_gpu_streamed_equals_resident(gemma3: Path, tmp_path: Path) -> None:
    """With the kernels and the autocast that the command takes by default."""
    source = {"model__source": gemma3, "data__source": write_pictures(tmp_path)}
    more = {"data__chat_template": "model", "training__max_steps": 6}
    streamed_as_resident(tmp_path, **{**COMMON, **more, **source})


def names_in(adapter: Path) -> list[str]:
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        return list(file.keys())


PATTERN = r".*(language_model|vision_tower).*(q_proj|v_proj|fc1)"


@pytest.mark.parametrize(
    ("loss_on", "targets"), [pytest.param("auto", PATTERN, marks=marked), ("all", "all-linear")]
)
def test_streamed_equals_trl_on_a_resident_model(
    loss_on: str, targets: str, gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are on the language model alone, unless a pattern takes in the tower.

    Control: with other pictures the bits are others.
    """
    file = write_pictures(tmp_path, all_have=loss_on == "auto")
    said = {
        **{"model__source": gemma3, "data__source": file, "data__loss_on": loss_on},
        "adapter__target_modules": targets,
    }
    found = by_poros(monkeypatch, tmp_path / "streamed", **said)
    recipe = recipe_of(**said, adapter__r=4, adapter__lora_dropout=0.1)
    expected = plain(
        tmp_path / "trl", gemma3, for_trl(file), AutoProcessor.from_pretrained(gemma3), recipe
    )
    assert (found.losses, found.adapter) == (expected.losses, expected.adapter)
    assert len(set(found.losses)) == 3
    names = names_in(tmp_path / "streamed" / "adapter")
    assert any("language_model" in name for name in names)
    assert any("vision" in name for name in names) == (targets != "all-linear")
    assert (tmp_path / "streamed" / "adapter" / "processor_config.json").is_file()
    if loss_on == "all":
        for number in range(16):
            Path(tmp_path / picture(number + 100, tmp_path)).rename(
                tmp_path / "pictures" / f"{number}.png"
            )
        assert by_poros(monkeypatch, tmp_path / "control", **said).adapter != found.adapter


@marked
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gemma3"}))
def test_other_families_with_their_processors(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image becomes tokens of the family's own, by its own processor."""
    pytest.importorskip("torchvision", reason="their processors need torchvision")
    base = write(family, tmp_path / "base")
    write_processor(family, base)
    file = write_pictures(tmp_path)
    length = 128 if family == "gemma4" else SETTINGS["max_length"]  # an image is 64 tokens or so
    said = {"model__source": base, "data__source": file, "training__max_length": length}
    found = by_poros(monkeypatch, tmp_path / "streamed", **said)
    recipe = recipe_of(**said, adapter__r=4, adapter__lora_dropout=0.1)
    made = for_trl(file), AutoProcessor.from_pretrained(base), recipe
    expected = plain(tmp_path / "trl", base, *made, max_length=length)
    assert (found.losses, found.adapter) == (expected.losses, expected.adapter)
    assert len(set(found.losses)) == 3
    assert all("language_model" in name for name in names_in(tmp_path / "streamed" / "adapter"))


@marked
def test_a_run_goes_on_with_the_pictures_that_it_was_begun_with(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with those alone; some rows have none, and some are held out."""
    file = write_pictures(tmp_path, all_have=False)
    said = {
        **{f"training__{name}": value for name, value in SETTINGS.items()},
        **{"model__source": gemma3, "data__source": file, "memory__slots": 2},
        **{"data__validation": 0.2, "training__eval_steps": 1},
    }
    expected = run(recipe_of(**said, output__folder=tmp_path / "whole"))
    recipe = recipe_of(**said, output__folder=tmp_path / "run", training__save_steps=1)
    break_at(monkeypatch, recipe, 2)
    third = tmp_path / "pictures" / "3.png"
    before = third.read_bytes()
    picture(99, tmp_path)
    (tmp_path / "pictures" / "99.png").rename(third)
    with pytest.raises(RunFolderError, match=r"rows of data\.\w+ as tokens: another now"):
        run(recipe)
    third.write_bytes(before)
    found = run(recipe)
    assert "going on after step" in found.said
    assert (found.losses, found.adapter) == (expected.losses, expected.adapter)


def said_of(content: Any, **more: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "its"}
    return {"messages": [{"role": "user", "content": content}, answer], **more}


IMAGE, WORDS = {"type": "image", "image": "pictures/1.png"}, {"type": "text", "text": "the slot"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no file": (
        said_of([{"type": "image", "image": "none.png"}, WORDS]),
        r"rows\.jsonl:2: images: expected a file to read, found '.*none\.png'.*folder of the rows",
    ),
    "no picture": (
        said_of([{"type": "image", "image": "rows.jsonl"}, WORDS]),
        r"rows\.jsonl:2: .*cannot identify image",
    ),
    "sound": (said_of([{"type": "audio"}]), r"rows\.jsonl:2: messages\[0\]\.content\[0\]: .*audio"),
    "an empty text": (
        said_of([IMAGE, {"type": "text", "text": " "}]),
        r":2: .*\[1\]\.text: .*blan",
    ),
    "numbers": (said_of("?", images=[3]), r"rows\.jsonl:2: images: expected a list of paths"),
    "one too few": (
        said_of([{"type": "image"}, {"type": "image"}], images=["pictures/1.png"]),
        r"rows\.jsonl:2: .*Number of images provided \(1\)",
    ),
    "tools": (
        said_of("?", tools=[{"name": "now"}]),
        r"rows\.jsonl:2: tools: expected none in rows",
    ),
    "behind the cut": (
        said_of([{"type": "text", "text": "slot " * 70}, IMAGE]),
        r"rows\.jsonl:2: expected the images of a row within 64 tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_before_the_base_is_loaded(
    case: str, gemma3: Path, tmp_path: Path
) -> None:
    row, what = BAD[case]
    picture(1, tmp_path)
    file = write_rows(tmp_path / "rows.jsonl", [said_of([WORDS, IMAGE]), row])
    said = {"model__source": gemma3, "data__source": file, "data__loss_on": "all"}
    with pytest.raises(DataFormatError, match=what):
        announced(recipe_of(**said, training__max_length=64))


def test_an_older_transformers_that_marks_no_answers_is_refused(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processors say of no token that it is the assistant's."""
    monkeypatch.setattr("poros.finetune.tokens.transformers.__version__", "5.17.0")
    source = {"model__source": gemma3, "data__source": write_pictures(tmp_path)}
    with pytest.raises(RecipeError, match=r"transformers 5\.18 or newer.*--loss-on all"):
        announced(recipe_of(**source))
    announced(recipe_of(**source, data__loss_on="all"))


@marked
def test_conversations_of_llava(gemma3: Path, tmp_path: Path) -> None:
    """They mark the image's place; without a mark it stands before the first message."""
    picture(1, tmp_path)
    spoken = [{"from": "human", "value": "<image>\nthe slot"}, {"from": "gpt", "value": "its"}]
    unmarked = [{"from": "human", "value": "the slot"}, spoken[1]]
    made = [
        {"conversations": spoken, "image": "pictures/1.png"},
        {"conversations": unmarked, "images": ["pictures/1.png"]},
        {"conversations": unmarked},
    ]

    def read(name: str, made: list[dict[str, Any]]) -> Rows:
        source = write_rows(tmp_path / name, made)
        return read_data(recipe_of(model__source=gemma3, data__source=source))[0]

    same = [
        said_of([IMAGE, WORDS]),
        said_of("the slot", images=["pictures/1.png"]),
        said_of("the slot"),
    ]
    found = read("a.jsonl", made)
    assert found.rows == read("b.jsonl", same).rows and found.has_images
    recipe = recipe_of(model__source=gemma3, data__source=tmp_path / "a.jsonl")
    assert announced(recipe).count("<image>") == NUM_TOKENS


@marked
def test_what_takes_no_images_is_refused(gemma3: Path, model: Path, tmp_path: Path) -> None:
    file = write_pictures(tmp_path)
    source = {"data__source": file, "output__folder": tmp_path / "run"}
    with pytest.raises(DataFormatError, match="rows of text for a model without a vision tower"):
        announced(recipe_of(model__source=model, **source))
    source["model__source"] = gemma3
    with pytest.raises(RecipeError, match=r"model\.vision: expected keep"):
        announced(recipe_of(**source, model__vision="drop"))
    with pytest.raises(RecipeError, match="group_by_length"):
        announced(recipe_of(**source, training__train_sampling_strategy="group_by_length"))
    with pytest.raises(RecipeError, match=r"target_modules: .*'\.\*none\.\*'.*not found"):
        announced(recipe_of(**source, adapter__target_modules=".*none.*"))
    bare = write_model(tmp_path / "bare", architecture="gemma3_multimodal")
    with pytest.raises(DataFormatError, match="expected a processor for images"):
        announced(recipe_of(**{**source, "model__source": bare}))
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(DataFormatError, match="marks the assistant's tokens"):
        announced(recipe_of(**source, data__chat_template=template))
    assert "rows are not packed" in announced(recipe_of(**source))


@marked
def test_the_command_merges_it_from_a_store_too(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the processor's files; the lines that are printed name a class with a tower."""
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path)
    short = ("rows.jsonl", "--steps", "1", "--max-length", "64", "--slots", "2")
    first = poros_command(
        *("finetune", str(gemma3), *short, "--out", "first"),
        *("--store", "store", "--merged", "merged"),
    )
    assert first.exit_code == 0, text(first)
    second = poros_command("finetune", "store", *short, "--out", "second")
    assert second.exit_code == 0, text(second)
    weights = [
        Path(f"{name}/adapter/adapter_model.safetensors").read_bytes()
        for name in ("first", "second")
    ]
    assert weights[0] == weights[1]
    assert AutoProcessor.from_pretrained("merged").image_seq_length == NUM_TOKENS
    AutoModelForImageTextToText.from_pretrained("merged")
