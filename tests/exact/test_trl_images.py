"""TRL's ``SFTTrainer`` on rows with images, through its own collator, on seven families.

(On llama4 it is the Trainer of transformers, with that collator: TRL 1.16 has no loss for it.)

The model comes from ``poros.load(vision="keep")``, the adapter is on the language model, and what
trains is compared in every bit with a resident model that transformers has loaded.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BatchFeature,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Trainer,
    TrainingArguments,
)

import poros
from poros.gates import tiny
from poros.gates.reference import Trajectory
from tests.comparing import compare_trajectories
from tests.covers import with_slow
from tests.exact.trl_arms import Arms, require_equal, sentence, tokenizer, trl
from tests.loading.images import IMAGE_TOKEN, NUM_TOKENS, with_images
from tests.loading.towers import FAMILIES, write
from tests.support import prepare_plain

DataCollatorForVisionLanguageModeling = pytest.importorskip(
    "trl.trainer.sft_trainer"
).DataCollatorForVisionLanguageModeling
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "multimodal.md"
FEW = with_slow(FAMILIES, [each for each in FAMILIES if each not in ("gemma3", "gemma4")])
"""The others train on images in tests/loading/test_multimodal.py."""


class Processor(ProcessorMixin):
    """A processor without files: words by ``tokenizer()``, and pixels that the image's name draws.

    It gives what the family's own processor gives for one image in each conversation.
    """

    attributes = ("tokenizer",)
    tokenizer_class = "PreTrainedTokenizerFast"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, family: str = "gemma3") -> None:
        super().__init__(tokenizer)
        self.family = family

    def apply_chat_template(self, conversation: Any, *_: Any, **options: Any) -> BatchFeature:
        assert options["tokenize"] and options["return_dict"]
        texts, seed = [], 0
        for messages in conversation:
            parts = [part for message in messages for part in message["content"]]
            images = [part["image"] for part in parts if part["type"] == "image"]
            seed += sum(sum(image) for image in images)
            assert len(images) == 1
            # Room for the image's tokens, near the end of the row.
            words = " ".join(part["text"] for part in parts if part["type"] == "text").split()
            texts.append(" ".join([*words[:8], *["the"] * (8 - len(words)), *["slot"] * 5]))
        tokens = self.tokenizer(texts, return_tensors="pt", padding=True)
        batch = with_images(
            self.family,
            FAMILIES[self.family].types,
            {"input_ids": tokens.input_ids, "labels": tokens.input_ids},
            seed=seed,
        )
        del batch["labels"]
        return BatchFeature({**batch, "attention_mask": tokens.attention_mask})


def rows() -> list[dict[str, Any]]:
    """One image each, of two numbers that stand for its pixels."""
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": sentence(number, 3)}],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": sentence(number + 1, 3)}],
                },
            ],
            "images": [[number, 7 * number]],
        }
        for number in range(16)
    ]


class ImageArms(Arms):
    """Of a family, with an adapter on its language model."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        path = write(family, folder / "base")
        processing = Processor(tokenizer(), family)
        super().__init__(
            *(folder, trl.SFTTrainer, trl.SFTConfig, rows()),
            checkpoint=path,
            processing=processing,
        )
        if family == "llama4":  # TRL's loss looks for its decoder where transformers has none
            self.trainer_class, self.arguments_class = Trainer, TrainingArguments
            self.collator = DataCollatorForVisionLanguageModeling(processing)

    def streamed(self, resident: Any, **policy: Any) -> Any:
        """Loaded by Poros in place of a model of transformers, and prepared."""
        base = tiny.without_repacking(poros.load(self.checkpoint, device="cpu", vision="keep"))
        return prepare_plain(tiny.attach_lora(base, dropout=0.05), slots=2, **policy)

    def both(self, **options: Any) -> tuple[Trajectory, Trajectory]:
        """The resident run and the streamed one."""
        if self.trainer_class is trl.SFTTrainer:
            options = {"max_length": None, **options}
        return self.run(**options), self.run(self.streamed, **options)


@pytest.mark.parametrize("family", FEW)
def test_rows_with_images(family: str, tmp_path: Path) -> None:
    arms = ImageArms(family, tmp_path)
    options = {"remove_unused_columns": False, "bf16": True} if arms.collator else {}
    expected, found = arms.both(gradient_accumulation_steps=2, **options)
    require_equal(arms, expected, found)
    for step in found.steps:
        assert step.gradients and all("language_model" in name for name in step.gradients)


def test_control_other_images_train_otherwise(tmp_path: Path) -> None:
    arms = ImageArms("gemma3", tmp_path)
    expected = arms.run(max_length=None)
    for row in arms.rows:
        row["images"] = [[each + 1 for each in row["images"][0]]]
    assert compare_trajectories(expected, arms.run(max_length=None))


@pytest.mark.parametrize("family", with_slow(("gemma3", "qwen3_vl"), ("gemma3",)))
def test_an_adapter_on_the_whole_model_made_by_the_trainer(family: str, tmp_path: Path) -> None:
    """PEFT's "all-linear" takes the tower too, which stays on the device and is trained there."""
    arms = ImageArms(family, tmp_path)
    results = []
    for prepare in (None, partial(prepare_plain, slots=2)):
        results.append(arms.run(prepare, attach_in_trainer=True, max_length=None))
    assert [str(each) for each in compare_trajectories(*results)] == []
    names = results[1].steps[0].gradients.keys()
    assert any("vision" in each or "visual" in each for each in names)
    assert any("language_model" in each for each in names)


def test_the_processor_of_a_family_and_images_of_pillow(tmp_path: Path) -> None:
    """Pixels of a picture, by transformers' own code for gemma3."""
    image = pytest.importorskip("PIL.Image", reason="pictures need pillow")
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    special = {"<boi>": 503, "<eoi>": 504, "<image>": IMAGE_TOKEN}
    tokens = tokenizer(special)
    for name, (text, number) in zip(("boi", "eoi", "image"), special.items(), strict=True):
        setattr(tokens, f"{name}_token", text)
        setattr(tokens, f"{name}_token_id", number)
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %} <boi> "
        "{% else %} {{ p.text }} {% endif %}{% endfor %}{% endfor %}"
    )
    picture = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    arms = ImageArms("gemma3", tmp_path)
    arms.processing = Gemma3Processor(
        picture, tokens, chat_template=template, image_seq_length=NUM_TOKENS
    )
    generator = torch.Generator().manual_seed(0)
    for row in arms.rows:
        pixels = torch.randint(0, 255, (40, 30, 3), generator=generator, dtype=torch.uint8)
        row["images"] = [image.fromarray(pixels.numpy())]
    expected, found = arms.both()
    assert [str(each) for each in compare_trajectories(expected, found)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pattern_of_the_docs_keeps_to_the_language_model(family: str, tmp_path: Path) -> None:
    """docs/how-to/multimodal.md has it."""
    base = poros.load(write(family, tmp_path / "base"), device="cpu")
    (pattern,) = set(re.findall(r'exclude_modules=r"([^"]+)"', PAGE.read_text()))
    config = LoraConfig(target_modules="all-linear", exclude_modules=pattern)
    model = get_peft_model(base, config)
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    layers = f"base_model.model.{FAMILIES[family].own_layers}."
    assert names and all("language_model" in name for name in names)
    assert any(name.startswith(layers) for name in names)
