"""Where a base comes from: on a loaded model, in its store, and beside a saved adapter.

PEFT writes the name of the base into ``adapter_config.json``, but neither a digest of its bytes nor
the place of its store. Both go into a file beside it, for ``poros merge`` and ``poros chat``;
nothing else reads it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from torch import nn

from poros.errors import CheckpointFormatError, quoted
from poros.io.writing import write_json
from poros.model.vision import base_of

RECORD = "poros_base.json"
ADAPTER_CONFIG = "adapter_config.json"
_ATTACHED = "_poros_origin"


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a base was made from."""

    source: Annotated[str, Field(min_length=1)]
    """An absolute path, or the name of a repository of the hub."""
    revision: str | None = None
    """Commit of a repository, or the requested revision if the commit is unknown."""
    fingerprint: str | None = None
    """Digest of its bytes (``Checkpoint.fingerprint``); None if they were not hashed."""
    seen: Mapping[str, Any] | None = None
    """``Checkpoint.seen``, by which unchanged files need not be hashed again."""
    store: str | None = None
    """The folder of the quantized base, if there is one."""

    @classmethod
    def of(cls, found: Any, where: str) -> "Origin":
        """Parse what ``asdict`` gave.

        Args:
            found: Plain JSON values.
            where: The file that they come from, for the message.

        Raises:
            CheckpointFormatError: If these are not the values of an origin.
        """
        try:
            return TypeAdapter(cls).validate_python(found)
        except ValidationError as error:
            raise CheckpointFormatError(
                f"{where}: expected the checkpoint that a base was made from, found "
                f"{quoted(found)}; write the store again, or remove the file beside the adapter"
            ) from error


def put_origin(model: nn.Module, origin: Origin) -> None:
    """Note on a loaded model where it comes from; copies of the model keep the note."""
    model.__dict__[_ATTACHED] = origin


def origin_of(model: nn.Module) -> Origin | None:
    """The note of ``put_origin`` on a model, or on the base of a PEFT model."""
    found = base_of(model).__dict__.get(_ATTACHED)
    return found if isinstance(found, Origin) else None


@contextmanager
def naming_source(model: Any) -> Iterator[None]:
    """Make PEFT name the source checkpoint while it saves in the body, and not a store.

    PEFT's model card takes the name from the configuration, which names the store. The revision
    and the model's class are written into the adapters' configurations, where there are none, and
    stay there; by the class another base is known.
    """
    origin = origin_of(model)
    if origin is None:
        yield
        return
    base = base_of(model)
    kind = type(base)
    for each in model.peft_config.values():
        if each.auto_mapping is None:
            found = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
            each.auto_mapping = found
        if each.revision is None and each.base_model_name_or_path == origin.source:
            each.revision = origin.revision
    name, base.config.name_or_path = base.config.name_or_path, base.name_or_path
    try:
        yield
    finally:
        base.config.name_or_path = name


def write_origin(model: nn.Module, folder: Path) -> None:
    """Write the record of the base's bytes beside each adapter in a folder, or remove an old one.

    A record is written if the bytes are known: if the base has a store.

    Args:
        folder: The folder that ``save_pretrained`` has written to.

    Raises:
        StoreWriteError: If it cannot be written.
    """
    origin = origin_of(model)
    names: Any = getattr(model, "peft_config", {})
    for place in (folder, *(folder / name for name in names)):
        if not (place / ADAPTER_CONFIG).is_file():
            continue
        if origin is None or origin.fingerprint is None:
            (place / RECORD).unlink(missing_ok=True)
        else:
            write_json(place / RECORD, asdict(origin))
