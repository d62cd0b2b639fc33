"""A small checkpoint with a tokenizer of bytes, and rows of each format."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from poros.gates import tiny

Row = dict[str, Any]
WORDS = "the slot holds a block that moves while layers compute and host memory waits its turn"
SPECIAL = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>")


def sentence(number: int, length: int) -> str:
    words = WORDS.split()
    return " ".join(words[(number * 7 + 3 * each) % len(words)] for each in range(length))


def messages(number: int) -> Row:
    question = {"role": "user", "content": sentence(number, 2 + number % 3)}
    answer = {"role": "assistant", "content": sentence(number + 3, 1 + number % 4)}
    return {"messages": [question, answer]}


def completion(number: int) -> Row:
    return {"prompt": sentence(number, 3), "completion": " " + sentence(number + 1, 2)}


def text(number: int) -> Row:
    return {"text": sentence(number, 3 + number % 4)}


def preference(number: int) -> Row:
    return {
        "prompt": sentence(number, 2),
        "chosen": " " + sentence(number + 1, 2),
        "rejected": " " + sentence(number + 2, 3),
    }


FORMATS = {
    "messages": messages,
    "completions": completion,
    "text": text,
    "preferences": preference,
}


def write_rows(path: Path, kind: str, number: int = 200) -> Path:
    rows = (json.dumps(FORMATS[kind](each)) for each in range(number))
    path.write_text("\n".join(rows) + "\n")
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate((*SPECIAL, *alphabet))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>")
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return found


def write_base(folder: Path, architecture: str = "qwen2") -> Path:
    """A checkpoint in bfloat16, with its tokenizer and no chat template."""
    config = tiny.small_config(architecture, num_layers=3, hidden_size=64)
    config.max_position_embeddings = 32768
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    tokenizer().save_pretrained(folder)
    return folder
