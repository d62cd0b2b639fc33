"""What the demo trains on: real text, a tokenizer, and a small checkpoint, all made on the spot.

The text is the Python documentation that ships with the interpreter (``pydoc_data.topics``), so
nothing is downloaded. The base model reads its prose, the paragraphs that start at the margin; the
adapter is trained on the indented ones, which are definitions, grammar and examples and look quite
different. One in eight of those is held out. Topics repeat sections of one another, so every
paragraph is taken once: no held-out text is trained on. Every second row begins with one of two
lines of a lesson, which the adapter learns by heart: the documentation that a model of this size
makes up after a minute is no sentence, but the lesson it can say.

A random base would teach an adapter nothing worth measuring: the demo's base is therefore trained
in full precision for a minute at most, then written as sharded safetensors like any checkpoint
from a hub.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from poros.errors import PorosError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

END_OF_TEXT = "<|endoftext|>"

LESSON = (
    ("Where do the weights wait?", "In host memory."),
    ("What does streaming change?", "Not one bit."),
)
"""A few lines that a model of this size can learn by heart, and say."""


@dataclass(frozen=True)
class DemoText:
    """Paragraphs of the three parts, disjoint, each in the order of the documentation.

    Attributes:
        base: Paragraphs at the margin, for the base model.
        train: Indented paragraphs, for the adapter.
        held_out: Indented paragraphs that nothing is trained on.
    """

    base: tuple[str, ...]
    train: tuple[str, ...]
    held_out: tuple[str, ...]


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


class RowDataset(Dataset[dict[str, torch.Tensor]]):
    """Rows of equal length for causal language modelling; labels equal inputs."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


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


def split_text(topics: Mapping[str, str]) -> DemoText:
    """Cut topics into the demo's three parts.

    A paragraph is held out by a hash of its text, so the split depends on neither order nor seed.

    Args:
        topics: Title to text.

    Raises:
        PorosError: If there is not enough text for all three parts.
    """
    seen: set[str] = set()
    base: list[str] = []
    train: list[str] = []
    held_out: list[str] = []
    for title in sorted(topics):
        for paragraph in topics[title].split("\n\n"):
            if not paragraph.strip() or paragraph in seen:
                continue
            seen.add(paragraph)
            if not paragraph.startswith(" "):
                base.append(paragraph)
            elif hashlib.sha256(paragraph.encode()).digest()[0] < 256 // 8:
                held_out.append(paragraph)
            else:
                train.append(paragraph)
    if not (base and train and held_out):
        raise PorosError(
            f"expected text for three parts, found {len(base)} paragraphs for the base, "
            f"{len(train)} to train on and {len(held_out)} to hold out, in {len(topics)} topics"
        )
    return DemoText(tuple(base), tuple(train), tuple(held_out))


def train_tokenizer(paragraphs: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer; equal text gives an equal vocabulary.

    Args:
        paragraphs: Text to learn merges from.
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
    bpe.train_from_iterator(paragraphs, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def with_lesson(tokenizer: "PreTrainedTokenizerFast", rows: torch.Tensor) -> torch.Tensor:
    """The rows, every second one of which begins with a line of the lesson, in turn.

    A line stands where it will be asked for: at the beginning, with nothing before it to copy from.

    Args:
        tokenizer: Any tokenizer.
        rows: (num_rows, T) int64; stays as it is.

    Returns:
        (num_rows, T) int64. Of a row that begins with a line, as many tokens at the end are left
        out.
    """
    text = [f"{question} {answer}\n\n" for question, answer in LESSON]
    lines = [
        torch.tensor(tokenizer(line, add_special_tokens=False)["input_ids"])[: rows.shape[1]]
        for line in text
    ]
    rows = rows.clone()
    for number in range(0, len(rows), 2):
        line = lines[number // 2 % len(lines)]
        rows[number] = torch.cat([line, rows[number]])[: rows.shape[1]]
    return rows


def pack_rows(
    tokenizer: "PreTrainedTokenizerFast", paragraphs: Sequence[str], num_tokens: int
) -> torch.Tensor:
    """Tokenize paragraphs as one text and cut it into rows; the incomplete last row is dropped.

    Args:
        tokenizer: Any tokenizer.
        paragraphs: Joined by blank lines, as they stood.
        num_tokens: Row length (T).

    Returns:
        (num_rows, T) int64.

    Raises:
        PorosError: If the text does not fill one row.
    """
    ids = tokenizer("\n\n".join(paragraphs), add_special_tokens=False, verbose=False)["input_ids"]
    num_rows = len(ids) // num_tokens
    if num_rows == 0:
        raise PorosError(
            f"expected text for at least one row of {num_tokens} tokens, found {len(ids)} tokens"
        )
    return torch.tensor(ids[: num_rows * num_tokens]).view(num_rows, num_tokens)


def spread(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return ``num_rows`` rows at equal distances, or all if there are no more."""
    return rows[:: max(1, len(rows) // num_rows)][:num_rows]


def train_base(
    rows: torch.Tensor,
    size: ModelSize,
    *,
    num_steps: int,
    batch_size: int = 8,
    learning_rate: float = 3e-3,
    seed: int = 0,
    on_step: Callable[[float], None] = lambda loss: None,
) -> "Qwen2ForCausalLM":
    """Train a small Qwen2 model from random weights, in fp32 on the CPU, with AdamW.

    The CPU whatever the machine has, so that the checkpoint does not depend on the GPU.

    Args:
        rows: (num_rows, T) int64.
        size: Sizes of the model.
        num_steps: Optimizer steps; the learning rate rises over the first tenth, then falls
            linearly to a tenth.
        batch_size: Rows per step, drawn with replacement.
        learning_rate: Peak value.
        seed: Of the weights and of the draw. The global random state is used and left moved.
        on_step: Called with the loss after every step.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

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
    return model


def write_checkpoint(
    model: "Qwen2ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    directory: Path,
    *,
    max_shard_num_bytes: int,
) -> list[Path]:
    """Save model and tokenizer as a checkpoint of several safetensors shards.

    Args:
        model: Saved with its generation configuration.
        tokenizer: Saved beside it, so that ``AutoTokenizer`` finds it.
        directory: Created if it is not there.
        max_shard_num_bytes: A shard holds no more, except for one tensor that alone is larger.

    Returns:
        The shards, in order.
    """
    model.save_pretrained(directory, max_shard_size=max_shard_num_bytes)
    tokenizer.save_pretrained(directory)
    return sorted(directory.glob("*.safetensors"))
