"""Loads a tokenizer from untrusted files, or raises a typed error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from poros.errors import quoted
from poros.loaders.header import defect
from poros.loaders.settings import describe_error, refuse_code
from poros.loaders.source import AUXILIARY_FILES, CONFIG, fetch

_LEAST_TOKENS = 2


def read_tokenizer(source: str | os.PathLike[str]) -> Any:
    """Load the tokenizer of a checkpoint, an adapter or a store; runs no code from there.

    Args:
        source: A folder, or the name of a repository of the hub.

    Raises:
        CheckpointFormatError: If there is none, its files are malformed, or transformers cannot
            load it.
        UnsupportedModelError: If it is defined by code of its own.
    """
    from transformers import AutoTokenizer

    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = fetch(os.fspath(source), [*AUXILIARY_FILES, CONFIG])
    with tokenizer_errors(folder):
        try:
            # Left open, transformers would ask on the terminal whether code may run.
            found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:
            refuse_code(error, quoted(str(source)))
            raise defect(
                folder,
                f"expected a tokenizer that transformers can load, found {describe_error(error)}",
                remedy="fetch tokenizer.json and tokenizer_config.json again",
            ) from error
    if len(found) < _LEAST_TOKENS:  # transformers makes one of nothing where there are no files
        raise defect(
            folder,
            f"expected a tokenizer, found one of {len(found)} tokens",
            remedy="copy tokenizer.json and tokenizer_config.json there from the checkpoint",
        )
    return found


def require_known_tokens(most: int, num_known: int | None, where: str) -> None:
    """Refuse a token without an embedding in the model.

    Args:
        most: The largest token id.
        num_known: Rows of the embedding.
    """
    if isinstance(num_known, int) and most >= num_known:
        raise defect(
            quoted(where),
            f"expected a tokenizer of the model, whose embedding has {num_known} rows, found one "
            f"that gives the token {most}",
            remedy="check that tokenizer and model belong together",
        )


@contextmanager
def tokenizer_errors(where: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a panic of the tokenizer's library, which is no ``Exception``, as a typed error."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise defect(
            Path(where), f"expected a tokenizer that works, found {describe_error(error)}"
        ) from error
