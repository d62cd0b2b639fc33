"""Processors of the families with a vision tower, as their checkpoints have them, for small images.

Those of all families but Gemma 3 need torchvision.
"""

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

from tests.loading.towers import IMAGE_TOKEN, NUM_TOKENS
from tests.trainers import tokenizer

_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{% for p in m.content %}{{ p.text }} {% endfor %}<eos> {% endgeneration %}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %} IMAGE "
    "{% else %} {{ p.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def _tokens(special: list[str], first: int, **names: str) -> PreTrainedTokenizerFast:
    """Words and special tokens with the numbers from ``first`` on; ``names`` are attributes."""
    numbers = {token: first + number for number, token in enumerate(special)}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(numbers).backend_tokenizer,
        **{"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"},
        **{"unk_token": "<unk>", "extra_special_tokens": names},
    )


def write_processor(family: str, folder: Path) -> Any:
    """Write the processor of a family of ``towers.FAMILIES`` beside its checkpoint."""
    found, mark = _FAMILIES[family]()
    found.chat_template = _TEMPLATE.replace("IMAGE", mark)
    found.save_pretrained(folder)
    return found


def _gemma3() -> tuple[Any, str]:
    special = ["<boi>", "<eoi>", "<image>"]
    names = dict(zip(("boi_token", "eoi_token", "image_token"), special, strict=True))
    picture = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    words = _tokens(special, IMAGE_TOKEN - 2, **names)
    return transformers.Gemma3Processor(picture, words, image_seq_length=NUM_TOKENS), "<boi>"


def _gemma4() -> tuple[Any, str]:
    names = {f"{name}_token": f"<{name}>" for name in ("boi", "eoi", "image")}
    names |= {f"{name}_token": f"<{name}>" for name in ("audio", "boa", "eoa")}
    special = ["<boi>", "<eoi>", "<image>", "<|video|>", "<audio>", "<boa>", "<eoa>"]
    picture = transformers.Gemma4ImageProcessor(
        patch_size=14, max_soft_tokens=70, pooling_kernel_size=3
    )
    words = _tokens(special, IMAGE_TOKEN - 2, **names)
    others = transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4VideoProcessor()
    return transformers.Gemma4Processor(others[0], picture, words, others[1]), "<image>"


def _qwen(processor: str, video: str) -> tuple[Any, str]:
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    picture = transformers.Qwen2VLImageProcessor(size=size, patch_size=14)
    words, videos = _tokens(special, IMAGE_TOKEN), getattr(transformers, video)()
    mark = "<|vision_start|> <|image_pad|> <|vision_end|>"
    return getattr(transformers, processor)(picture, words, videos), mark


def _mistral3() -> tuple[Any, str]:
    words = _tokens(["[IMG]", "[IMG_BREAK]", "[IMG_END]"], IMAGE_TOKEN)
    picture = transformers.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14)
    options = {"patch_size": 14, "spatial_merge_size": 2}
    return transformers.PixtralProcessor(picture, words, **options), "[IMG]"


def _llama4() -> tuple[Any, str]:
    special = ["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"]
    picture = transformers.Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=1)
    words = _tokens(special, IMAGE_TOKEN - 1)
    return transformers.Llama4Processor(picture, words, patch_size=14), "<|image|>"


_FAMILIES: dict[str, Any] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": lambda: _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "qwen3_5": lambda: _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "mistral3": _mistral3,
    "llama4": _llama4,
}
