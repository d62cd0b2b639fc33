"""A tokenizer, from the files beside a checkpoint or an adapter."""

from pathlib import Path
from typing import Any

from poros.errors import CheckpointFormatError, quoted
from poros.loaders.settings import refuse_code, said


def read_tokenizer(source: str) -> Any:
    """The tokenizer of a checkpoint, an adapter or a store; no code that lies beside it is run.

    Args:
        source: A folder, or a name on the hub.

    Raises:
        CheckpointFormatError: If there is none, or transformers cannot read it.
        UnsupportedModelError: If it is defined by code of its own.
    """
    from transformers import AutoTokenizer

    try:
        # Left open, transformers would ask on the terminal whether code may run.
        return AutoTokenizer.from_pretrained(
            str(Path(source).expanduser()), trust_remote_code=False
        )
    except Exception as error:  # of transformers, tokenizers, and the hub
        refuse_code(error, quoted(source))
        raise CheckpointFormatError(
            f"{quoted(source)}: expected a tokenizer, found none to load: {said(error)}; copy "
            "tokenizer.json and tokenizer_config.json there"
        ) from error
