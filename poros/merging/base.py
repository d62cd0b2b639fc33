"""Finds the base of a saved adapter: the checkpoint to merge into, what to load for a chat."""

import logging
import os
from contextlib import ExitStack

from poros.errors import CheckpointFormatError, PolicyError, quoted
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect, shown
from poros.loaders.names import is_repository
from poros.loaders.store import is_store, open_store
from poros.merging.saved_adapter import CONFIG, SavedAdapter
from poros.model.origin import Origin

logger = logging.getLogger(__name__)

_NAME_IT = "name the checkpoint with --base"


def open_base(saved: SavedAdapter, given: str | os.PathLike[str] | None) -> Checkpoint:
    """Open the checkpoint that an adapter is merged into.

    Args:
        given: A checkpoint, which is taken as it is; or a store, in place of which the checkpoint
            is taken that it was made from. None is what the adapter names.

    Raises:
        CheckpointFormatError: If there is none, or its bytes are not those that were trained on.
        PolicyError: If the adapter names no base.
    """
    named = _named(saved) if given is None else os.fspath(given)
    origin = saved.origin if given is None else None
    revision = saved.revision if given is None else None
    by = f"{shown(saved.folder / CONFIG)} names it" if given is None else ""
    if is_store(named):
        with open_store(named) as opened:
            origin = opened.origin
        by = f"the store {quoted(named)} says that it was made from it"
        named, revision = origin.source, origin.revision
    if by:
        _require_there(named, by)
    is_on_hub = revision is not None and not os.path.lexists(named)
    with ExitStack() as stack:
        options = {"revision": revision} if is_on_hub else {}
        checkpoint = stack.enter_context(Checkpoint.open(named, options))
        if origin is not None:
            _require_bytes(checkpoint, origin, by)
        stack.pop_all()
    return checkpoint


def base_to_load(saved: SavedAdapter) -> tuple[str, str | None]:
    """Return what ``poros.load`` is to load under an adapter, and its revision.

    That is the store which was trained from, if it is there and still of the same checkpoint: it
    opens without quantizing anything. Otherwise the checkpoint that the adapter names.

    Raises:
        CheckpointFormatError: If neither is there.
        PolicyError: If the adapter names no base.
    """
    origin = saved.origin
    if origin is not None and origin.store is not None and is_store(origin.store):
        with open_store(origin.store) as opened:
            is_same = opened.about.origin.fingerprint == origin.fingerprint
        if is_same:
            return origin.store, None
    named = _named(saved)
    _require_there(named, f"{shown(saved.folder / CONFIG)} names it")
    return named, None if os.path.lexists(named) else saved.revision


def _named(saved: SavedAdapter) -> str:
    if saved.base is None:
        raise PolicyError(f"base: expected the base, found none in the adapter; {_NAME_IT}")
    return saved.base


def _require_there(named: str, by: str) -> None:
    """Refuse a path at which there is nothing; a name on the hub may be anywhere."""
    if not os.path.lexists(named) and not is_repository(named):
        raise CheckpointFormatError(
            f"base: expected the checkpoint {quoted(named, limit=1000)} ({by}), found nothing "
            f"there; if it has moved, {_NAME_IT}"
        )


def _require_bytes(checkpoint: Checkpoint, origin: Origin, by: str) -> None:
    """Refuse a checkpoint of other bytes than training has seen; unchanged files are not read."""
    if origin.fingerprint is None or origin.seen == checkpoint.seen():
        return
    logger.info("poros: comparing the base with the one that was trained on: %s", checkpoint.path)
    found = checkpoint.fingerprint()
    if found != origin.fingerprint:
        raise defect(
            checkpoint.path,
            f"expected the bytes that the adapter was trained on ({quoted(origin.fingerprint)}; "
            f"{by}), found others ({found}): the checkpoint has changed since",
            remedy="restore it, or name a checkpoint with --base, which is taken as it is",
        )
