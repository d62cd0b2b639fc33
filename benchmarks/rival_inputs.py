"""What the runs of ``benchmarks.rivals`` read: a checkpoint, its tokenizer and a file of rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import config_of, random_dense

VOCABULARY = 8000
MOST_CHARACTERS = 6000
"""Of a row, which is some paragraphs of a topic."""
CHARACTERS_A_TOKEN = 8
"""More than nearly all text has with this tokenizer, so that a row with so many is long enough."""
MOST_A_TOKEN = 10
"""Characters; with more rows than a run reads no step is an epoch's last, which has fewer rows."""


def rows_of(folder: Path, length: int, are_whole: bool) -> Path:
    """Where the rows are that a run trains."""
    return folder / (f"rows-{length}.jsonl" if are_whole else "rows.jsonl")


def whole_rows(texts: Sequence[str], length: int, number: int) -> list[str]:
    """Texts from every part of ``texts`` in turn, nearly all of more than ``length`` tokens."""
    joined = "\n\n".join(texts)
    size = length * CHARACTERS_A_TOKEN
    while len(joined) < 2 * size:
        joined += "\n\n" + joined
    starts = (index * size % (len(joined) - size) for index in range(number))
    return [joined[start : start + size] for start in starts]


def write_lines(file: Path, values: Sequence[Any]) -> None:
    """Write each value as a line of JSON."""
    file.write_text("".join(json.dumps(each) + "\n" for each in values), encoding="utf-8")


def write_inputs(
    folder: Path, name: str, num_layers: int | None, num_tokens: int, whole: int | None = None
) -> None:
    """Write the checkpoint and its tokenizer, if not there, and rows of ``num_tokens`` in all.

    With ``whole``, a row has more than so many tokens, of which so many count; a file that has
    enough of them stays, so that runs of other numbers of steps begin with the same rows.
    """
    from poros.examples.demo_data import documentation_topics, train_tokenizer

    texts = [text.strip() for text in documentation_topics().values()]
    checkpoint, rows = folder / "model", rows_of(folder, whole or 0, whole is not None)
    if not (checkpoint / "tokenizer.json").exists():
        config = config_of(name, num_layers)
        random_dense(config).save_pretrained(checkpoint)
        train_tokenizer(texts, min(VOCABULARY, config.vocab_size)).save_pretrained(checkpoint)
    if whole is not None:
        number = num_tokens // whole
        there = rows.read_text(encoding="utf-8").count("\n") if rows.exists() else 0
        if there < number:
            write_lines(rows, [{"text": each} for each in whole_rows(texts, whole, number)])
        return
    pieces = [
        text[start : start + MOST_CHARACTERS]
        for text in texts
        for start in range(0, len(text), MOST_CHARACTERS)
    ]
    with rows.open("w", encoding="utf-8") as file:
        written = 0
        while written < MOST_A_TOKEN * num_tokens:
            for piece in pieces:
                file.write(json.dumps({"text": piece}) + "\n")
                written += len(piece)
