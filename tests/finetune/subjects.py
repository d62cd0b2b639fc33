"""A small checkpoint with a tokenizer, and rows of every form, made on the spot."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from poros.gates import tiny

WORDS = "the slot holds a block that moves while layers compute and host memory waits its turn"
SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>"]


def sentence(number: int, length: int) -> str:
    words = WORDS.split()
    return " ".join(words[(number * 7 + 3 * each) % len(words)] for each in range(length))


def rows(form: str, count: int = 200) -> list[dict[str, Any]]:
    """Rows of one form, of different lengths."""
    made: list[dict[str, Any]] = []
    for number in range(count):
        question, answer = sentence(number, 3 + number % 5), sentence(number + 1, 4 + number % 9)
        if form == "messages":
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            if number % 3 == 0:
                turns += [{"role": "user", "content": "?"}, {"role": "assistant", "content": "its"}]
            made.append({"messages": turns})
        elif form == "completions":
            made.append({"prompt": question + " ", "completion": answer})
        elif form == "text":
            made.append({"text": answer})
        else:
            other = sentence(number + 2, 3 + number % 6)
            made.append({"prompt": question + " ", "chosen": answer, "rejected": other})
    return made


def write_rows(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, by the rules that transformers has for the model's type."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    bpe = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([sentence(number, 16) for number in range(32)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<eos>",  # as with many models: padding has to be told by its place
        eos_token="<eos>",
        chat_template=template,
    )


def write_model(folder: Path, *, template: str | None = None, layers: int = 3) -> Path:
    """A random checkpoint with its tokenizer."""
    config = tiny.small_config("qwen2", num_layers=layers, hidden_size=64)
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    tokenizer(template).save_pretrained(folder)
    return folder
