"""Rows of messages with images, through the model's processor and TRL's collator.

A row keeps the paths of its images. They are opened when a batch is made, as TRL does; before
anything is loaded, each row goes through the processor once, so that an image or a row that it
cannot read is named by file and line, and the length of each row is known.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from poros.errors import DataFormatError, RecipeError, quoted, reason_of
from poros.io.digests import digest
from poros.io.reading import open_regular
from poros.loaders.settings import describe_error, refuse_code
from poros.loaders.source import find_config
from poros.loaders.tokenizer import read_tokenizer
from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, ProcessorMixin

GROUPED = "group_by_length"


def require_images(recipe: Recipe, config: "PreTrainedConfig") -> None:
    """Refuse a model or settings that take no images, by DataFormatError or RecipeError."""
    if getattr(config, "vision_config", None) is None:
        raise DataFormatError(
            "data.source: expected rows of text for a model without a vision tower, found rows "
            f"with images for {quoted(config.model_type)}; take a multimodal checkpoint"
        )
    if recipe.model.vision == "drop":
        raise RecipeError(
            "model.vision: expected keep with rows that have images, found drop; remove it"
        )
    if recipe.training.more.get("train_sampling_strategy") == GROUPED:
        raise RecipeError(
            f"training.train_sampling_strategy: expected random or sequential with images, found "
            f"{GROUPED}; remove it"
        )


def load_processor(recipe: Recipe) -> "ProcessorMixin":
    """Load the model's processor, from the files beside its tokenizer.

    Raises:
        CheckpointFormatError: If its tokenizer cannot be used.
        DataFormatError: If there is none for images, or transformers cannot load it.
        UnsupportedModelError: If it is defined by code of its own.
    """
    from transformers import AutoProcessor, ProcessorMixin

    source = recipe.model.source
    read_tokenizer(source)  # first, for its typed errors; the processor opens it too
    folder, _ = find_config(str(Path(source).expanduser()))
    try:
        found = AutoProcessor.from_pretrained(str(folder), trust_remote_code=False)
        if not isinstance(found, ProcessorMixin) or not hasattr(found, "image_processor"):
            raise ValueError(f"a {type(found).__name__}, which reads no images")
    except Exception as error:  # of transformers, and of the packages that a processor needs
        refuse_code(error, quoted(source))
        raise DataFormatError(
            f"model.source: expected a processor for images, found {describe_error(error)}; fetch "
            "processor_config.json and preprocessor_config.json of the model, and install what it "
            "names"
        ) from error
    return found


class ImageCollator:
    """TRL's collator of rows with images, by a recipe.

    Args:
        processor: The model's processor, with the tokenizer of the run.
        recipe: Has the length at which rows are cut, and the multiple to which they are padded.
        template: A template that marks the assistant's tokens; None learns all tokens.
    """

    def __init__(
        self, processor: "ProcessorMixin", recipe: Recipe, template: str | None = None
    ) -> None:
        self._processor = processor
        self._most = recipe.training.max_length
        multiple = recipe.training.pad_to_multiple_of
        options = {"assistant_only_loss": template is not None, "chat_template": template}
        sizes = {"max_length": self._most, "pad_to_multiple_of": multiple}
        self._alone = DataCollatorForVisionLanguageModeling(processor, **options)
        self.padded = DataCollatorForVisionLanguageModeling(processor, **sizes, **options)

    def tokens(self, row: dict[str, Any]) -> tuple[list[int], list[int], bytes]:
        """Return the tokens of a row, uncut, whether each is learnt, and a digest of its images.

        Raises:
            DataFormatError: If cutting it would cut an image, one is no file, or it has tools.
        """
        if row.get("tools"):
            raise DataFormatError(
                "tools: expected none in rows with images, which TRL does not render, found some; "
                "remove them"
            )
        images = []
        for path in row.get("images", []):
            try:
                with open_regular(Path(path)):  # no pipe, no device
                    images += _open_images([path])
            except (OSError, ValueError) as error:
                raise DataFormatError(
                    f"images: expected a file to read, found {quoted(path)}: {reason_of(error)}; "
                    "paths begin at the folder of the rows"
                ) from error
        batch = self._alone([{"messages": row["messages"], "images": images}])
        ids, labels = (batch[name][0].tolist() for name in ("input_ids", "labels"))
        if getattr(self._processor, "image_token_id", None) in ids[self._most :]:
            raise DataFormatError(
                f"expected the images of a row within {self._most} tokens, found {len(ids)} "
                "tokens, with an image behind; raise training.max_length (--max-length), or "
                "remove the row"
            )
        pixels = b"".join(digest(batch[name].contiguous()) for name in sorted(batch))
        return ids, [int(label != -100) for label in labels], pixels


def image_dataset(rows: Sequence[dict[str, Any]]) -> "Dataset":
    """Make a dataset for TRL's trainer, whose images are opened as its rows are read."""
    from datasets import Dataset

    columns = {
        "messages": [json.dumps(row["messages"]) for row in rows],  # Arrow would fill up their keys
        "images": [row.get("images", []) for row in rows],
    }
    return Dataset.from_dict(columns).with_transform(_opened)


def _opened(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        "messages": [json.loads(each) for each in columns["messages"]],
        "images": [_open_images(paths) for paths in columns["images"]],
    }


def _open_images(paths: Sequence[str]) -> list[Any]:
    from transformers.image_utils import load_image

    return [load_image(path) for path in paths]
