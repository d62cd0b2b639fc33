"""Exit codes, error messages and options that the commands share."""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import typer

from poros.errors import PorosError, quoted

NOT_HELD = 1
BAD_INPUT = 2
"""Exit codes: a claim of the command did not hold, or its input cannot be used."""

DtypeName = Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"]
"""Names of dtypes that users write."""


@contextmanager
def readable_errors(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Print an error that Poros raises on purpose as one message, without a traceback.

    Args:
        options: Option of each field: "vram_budget: expected" becomes "vram_budget (--vram):
            expected", and "seq_len=256" becomes "--max-length 256".
    """
    try:
        yield
    except (PorosError, OSError) as error:
        field, colon, rest = str(error).partition(":")
        option = (options or {}).get(field)
        text = f"{field} ({option}):{rest}" if option else f"{field}{colon}{rest}"
        text = with_options(text, options or {})
        # Paths from users and messages of systems and libraries may contain any characters.
        lines = (quoted(line, is_bare=True, limit=4000) for line in text.split("\n"))
        typer.echo("error: " + "\n".join(lines), err=True)
        raise typer.Exit(BAD_INPUT) from error


def with_options(text: str, options: Mapping[str, str]) -> str:
    """Write the values of fields in a text as options: "seq_len=256" as "--max-length 256"."""
    for name, flag in options.items():
        text = re.sub(rf"\b{name}=(?=\d)", f"{flag} ", text)
    return text


def quieten_libraries() -> None:
    """Silence messages that a user of these commands cannot act on. Called before the imports.

    Without an optional package, bitsandbytes logs that it uses its own CPU kernel. PEFT asks
    transformers for a property by its former name. What it says of adapters on embeddings,
    ``poros finetune`` says before a run.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_notice_of_kernels)
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
    for said in ("Setting `save_embedding_layers`", "Model has `tie_word_embeddings=True`"):
        warnings.filterwarnings("ignore", message=said, category=UserWarning)


def _is_no_notice_of_kernels(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")


def dtype_name(name: str) -> str:
    """Return PyTorch's name of a dtype: ``bf16`` is ``bfloat16``."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)


def dtype_named(name: str | None) -> Any:
    """Return the dtype of that name; imports torch."""
    import torch

    return None if name is None else getattr(torch, dtype_name(name))


def field_and_value(text: str, *refused: str) -> tuple[str, str]:
    """Parse what ``--set`` was given, ``FIELD=VALUE``; ``refused`` fields have another option."""
    name, equals, value = text.partition("=")
    if not equals or name in refused:
        raise typer.BadParameter(
            "--set: expected FIELD=VALUE, of a field without an option of its own, found "
            f"{quoted(text)}"
        )
    return name, value
