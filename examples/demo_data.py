"""What the demo trains on: real text, a tokenizer, and a small checkpoint, all made on the spot.

The text is the Python documentation that ships with the interpreter (``pydoc_data.topics``), so
nothing is downloaded. The checkpoint is random, and written like any checkpoint from a hub.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from poros.errors import PorosError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of the demo's model; the defaults put most of the bytes in the layers.

    Args:
        num_layers: Decoder layers.
        hidden_size: Width; a multiple of 8.
        intermediate_size: Width of the MLP.
        vocab_size: Entries of the tokenizer, at least 257.
        num_tokens: Row length (T).
    """

    num_layers: int = 12
    hidden_size: int = 128
    intermediate_size: int = 384
    vocab_size: int = 1024
    num_tokens: int = 64


def documentation_topics() -> Mapping[str, str]:
    """Return the documentation topics of this Python, title to text.

    Raises:
        PorosError: If the interpreter was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise PorosError(
            "expected the documentation topics that ship with Python (pydoc_data.topics), found "
            "none; install the complete standard library of this interpreter"
        ) from error
    return topics


def write_rows(file: Path) -> list[str]:
    """Write the paragraphs of the documentation as rows, each once, in order, and return them."""
    topics = documentation_topics()
    every = [each for title in sorted(topics) for each in topics[title].split("\n\n")]
    texts = [each for each in dict.fromkeys(every) if each.strip()]
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts), "utf-8")
    return texts


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer; equal text gives an equal vocabulary.

    Args:
        texts: Text to learn merges from.
        vocab_size: Entries in all: one special token, 256 bytes, and merges.
    """
    from tokenizers import pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    # Qwen2's own normalizer and splitting rules: AutoTokenizer reads the model type beside the
    # tokenizer and rebuilds exactly these, whatever rules the merges were learned with.
    bpe = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def write_base(folder: Path, texts: Iterable[str], size: ModelSize) -> None:
    """Write a checkpoint of a small random Qwen2 model, with a tokenizer for some texts."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    # The model's default of 0.02 drowns the tokens for hundreds of steps at this width; unit
    # variance (torch's own default for an embedding) learns from the first step on.
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    train_tokenizer(texts, size.vocab_size).save_pretrained(folder)
