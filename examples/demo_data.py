"""What the demo trains on: real text, a tokenizer, and a small checkpoint, all made on the spot.

The text is the Python documentation that ships with the interpreter (``pydoc_data.topics``), so
nothing is downloaded. Its paragraphs at the margin make the base, its indented ones are the rows.
Every second row begins with one of two lines of a lesson, which the adapter learns by heart: the
documentation that a model of this size makes up is no sentence, but the lesson it can say.

A random base would teach an adapter nothing worth measuring: the demo's base is therefore trained
in full precision for a minute at most, then written like any checkpoint from a hub.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from poros.errors import PorosError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

LESSON = (
    ("Where do the weights wait?", "In host memory."),
    ("What does streaming change?", "Not one bit."),
)
"""A few lines that a model of this size can learn by heart, and say."""


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


def paragraphs() -> tuple[list[str], list[str]]:
    """Return paragraphs for the base and paragraphs to fine-tune on, each once, in order."""
    topics = documentation_topics()
    every = [each for title in sorted(topics) for each in topics[title].split("\n\n")]
    once = [each for each in dict.fromkeys(every) if each.strip()]
    margin = [each for each in once if not each.startswith(" ")]
    return margin, [each for each in once if each.startswith(" ")]


def write_rows(file: Path, texts: Iterable[str]) -> None:
    """Write rows of text, every second of which begins with a line of the lesson, in turn."""
    with file.open("w", encoding="utf-8") as lines:
        for number, text in enumerate(texts):
            question, answer = LESSON[number // 2 % len(LESSON)]
            begin = "" if number % 2 else f"{question} {answer}\n\n"
            lines.write(json.dumps({"text": begin + text}) + "\n")


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


def write_base(
    folder: Path,
    texts: Iterable[str],
    size: ModelSize,
    *,
    num_steps: int,
    batch_size: int = 8,
    learning_rate: float = 3e-3,
    seed: int = 0,
    on_step: Callable[[float], object] = lambda loss: None,
) -> None:
    """Train a small Qwen2 model and its tokenizer, in fp32 on the CPU, and write a checkpoint.

    The CPU whatever the machine has, so that the checkpoint does not depend on the GPU.

    Args:
        folder: Of the checkpoint.
        texts: To train on.
        size: Sizes of the model.
        num_steps: Optimizer steps; the learning rate rises over the first tenth, then falls
            linearly to a tenth.
        batch_size: Rows per step, drawn with replacement.
        learning_rate: Peak value.
        seed: Of the weights and of the draw. The global random state is used and left moved.
        on_step: Called with the loss after every step.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    texts = list(texts)
    tokenizer = train_tokenizer(texts, size.vocab_size)
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    num_rows = len(ids) // size.num_tokens
    rows = torch.tensor(ids[: num_rows * size.num_tokens]).view(num_rows, size.num_tokens)
    torch.manual_seed(seed)
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
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    num_warmup = max(1, num_steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / num_warmup, 1 - 0.9 * step / num_steps)
    )
    for _ in range(num_steps):
        batch = rows[torch.randint(len(rows), (batch_size,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(float(loss.detach()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
