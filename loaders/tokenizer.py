"""Loads a tokenizer from untrusted files, or raises a typed error."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from poros.errors import quoted
from poros.loaders.auxiliary_files import AUXILIARY_FILES
from poros.loaders.header import defect, parse_json
from poros.loaders.limits import Limits
from poros.loaders.settings import describe_error, refuse_code
from poros.loaders.source import CONFIG, fetch

_SETTINGS, _TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_WHOLE, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_SPECIAL = re.compile(r"(bos|eos|unk|sep|pad|cls|mask)_token")


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
    _require_readable(folder)
    with tokenizer_errors(folder):
        try:
            # Left open, transformers would ask on the terminal whether code may run.
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:
            refuse_code(error, quoted(str(source)))
            raise defect(
                folder,
                f"expected a tokenizer that transformers can load, found {describe_error(error)}",
                remedy=f"fetch {_WHOLE} and {_SETTINGS} again",
            ) from error


def require_known_tokens(most: int, num_known: int | None, where: str) -> None:
    """Refuse a token without an embedding in the model.

    Args:
        most: The largest token.
        num_known: Rows of the embedding.
        where: Where the tokenizer is from.

    Raises:
        CheckpointFormatError: If there is such a token.
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
    """Raise a panic of the tokenizer's library, which is no ``Exception``, as a typed error.

    Raises:
        CheckpointFormatError: In its place.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise defect(
            Path(where), f"expected a tokenizer that works, found {describe_error(error)}"
        ) from error


def _require_readable(folder: Path) -> None:
    """Check each file as far as possible without transformers."""
    limits = Limits()
    for name in (_SETTINGS, _TOKENS, "added_tokens.json", _WHOLE):
        file = folder / name
        if not os.path.lexists(file):
            continue
        fields = parse_json(limits.read(file, "extra_num_bytes"), file, strict=False)
        for field, value in fields.items() if name in (_SETTINGS, _TOKENS) else ():
            is_token = _SPECIAL.fullmatch(field) and not isinstance(value, str | dict | None)
            if is_token or (field == "chat_template" and not isinstance(value, str | list | None)):
                raise defect(
                    file,
                    f"expected {field} as text, found {quoted(value)}",
                    remedy="fix the file",
                )
    if (folder / _TEMPLATE).is_file():
        try:
            (folder / _TEMPLATE).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise defect(
                folder / _TEMPLATE, f"expected text in UTF-8, found {describe_error(error)}"
            ) from error
