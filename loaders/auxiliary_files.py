"""The auxiliary files that a store keeps beside the weights: tokenizer, processor, licence.

Without them ``AutoTokenizer.from_pretrained(store)`` would give a tokenizer with an empty
vocabulary, and no error. They are copied unread; code is not copied.
"""

from fnmatch import fnmatchcase
from pathlib import Path

from poros.loaders.header import defect
from poros.loaders.limits import MAX_AUXILIARY_NUM_BYTES, read_small

TEMPLATES = "additional_chat_templates"
"""The folder in which transformers keeps further chat templates."""

AUXILIARY_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    f"{TEMPLATES}/*.jinja",
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Names of these files, as patterns."""


def read_auxiliary_files(path: Path) -> dict[str, bytes]:
    """Read a folder's auxiliary files, by name."""
    try:
        entries = [*path.iterdir(), *path.glob(f"{TEMPLATES}/*")]
        names = sorted(str(each.relative_to(path)) for each in entries)
        ours = [name for name in names if is_auxiliary_file(name) and not (path / name).is_dir()]
        # An empty file holds nothing, and the limit would refuse it.
        filled = [name for name in ours if (path / name).stat().st_size]
    except OSError as error:
        where = Path(error.filename or path)
        raise defect(where, f"expected to read it, found: {error.strerror}") from error
    return {name: read_small(path / name, MAX_AUXILIARY_NUM_BYTES) for name in filled}


def is_auxiliary_file(name: str) -> bool:
    """Whether a file of that name goes into a store; code never does."""
    in_place = "/" not in name.removeprefix(f"{TEMPLATES}/")
    has_code = name.endswith((".py", ".safetensors", ".bin", ".pt", ".pth", ".pkl"))
    matches = any(fnmatchcase(name, pattern) for pattern in AUXILIARY_FILES)
    return in_place and matches and not has_code and name.isprintable()
