"""Every error that Poros raises on purpose.

All derive from ``PorosError`` and from the builtin that fits, so that existing ``except`` clauses
keep working. A message says what was expected, what was found, where (qualified name), and what to
do. When one is raised nothing is half-changed: the model is as it was before the call.
"""

_MAX_QUOTED = 200  # characters of a message that a file may dictate


def quoted(value: object, *, is_bare: bool = False, limit: int = _MAX_QUOTED) -> str:
    """``repr`` in ASCII, cut short, for whatever a file or another library dictates.

    Names, values and messages that come from files go through this before they reach an error, a
    log, a report or a terminal: no escape sequence, line break or megabyte gets there.

    Args:
        value: Anything.
        is_bare: Leave out the quotation marks of a text, for paths and running text.
        limit: Characters; of a longer text the beginning and the end are left.
    """
    num_characters = len(value) if isinstance(value, str) else 0
    if isinstance(value, str) and num_characters > 2 * limit:
        value = value[:limit] + value[-limit:]  # before it is copied as a whole
    text = ascii(value)
    if is_bare and isinstance(value, str):
        text = text[1:-1].replace("\\\\", "\\").replace("\\'", "'")
    if len(text) <= limit:
        return text
    num_characters = max(num_characters, len(text))
    return f"{text[: limit * 3 // 4]}...{text[-limit // 4 :]} ({num_characters} characters)"


def reason_of(error: Exception) -> str:
    """The message of an error, quoted, without the number and the path that ``OSError`` adds."""
    found = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return quoted(found, is_bare=True)


def refuse_all(error: "type[PorosError]", problems: list[str], *, most: int = 30) -> None:
    """Raise one error with a line for each problem, if there are any; of many for the first."""
    if not problems:
        return
    shown = [*problems[:most]]
    if len(problems) > most:
        shown.append(f"and {len(problems) - most} more")
    raise error("\n".join(shown))


class PorosError(Exception):
    """Base of every error that Poros raises on purpose."""


class PolicyError(PorosError, ValueError):
    """A ``StreamingPolicy`` field has a value that cannot work."""


class UnsupportedModelError(PorosError, ValueError):
    """The model, or a call of it, has a form that cannot be streamed exactly."""


class DroppedTowerError(UnsupportedModelError, AttributeError):
    """A tower was used, or something of it read, that the model was loaded without."""


class UnvalidatedArchitectureError(UnsupportedModelError):
    """The family or the kind of adapters may train exactly, but no gate and no check has run it."""


class PreparedModelError(PorosError, RuntimeError):
    """An operation would bypass the host copy of a prepared model."""


class RematerializationError(PorosError, RuntimeError):
    """Backward cannot recompute a layer from the same bits as its forward."""


class ParityError(PorosError, RuntimeError):
    """The streamed step is not bit for bit the resident step, or its bytes are not the model's."""


class SlotStateError(PorosError, RuntimeError):
    """A device slot is not in the state that the operation needs."""


class VRAMBudgetError(PorosError, RuntimeError):
    """The device memory that a step needs is more than the budget, or than the device has."""


class HostMemoryError(PorosError, MemoryError):
    """Host memory for the frozen base could not be had."""


class CheckpointFormatError(PorosError, ValueError):
    """A checkpoint or a store on disk is not what it should be; nothing was loaded."""


class StoreWriteError(PorosError, OSError):
    """A store, a checkpoint or another result could not be written; no part of it was left."""


class RecipeError(PorosError, ValueError):
    """A recipe, or an option of ``poros finetune``, cannot work; nothing was loaded or written."""


class DataFormatError(PorosError, ValueError):
    """Rows to train on are not what they should be; nothing was loaded or written."""


class RunFolderError(PorosError, RuntimeError):
    """A folder holds a run that is finished, in progress, damaged, or another than the recipe's."""


class OptimizerError(PorosError, ValueError):
    """An optimizer cannot work with these settings or in this loop; no weight was changed."""


class MissingPackageError(PorosError, ImportError):
    """A package that an optional feature needs is not installed."""
