"""Reads the registry: one recorded outcome for each family of models and kind of adapters.

``registry.json`` beside this file holds them; ``python -m tools.sweep`` writes it at a
release. Nothing here imports PyTorch, so that commands read the file in a moment.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from poros.errors import quoted

PATH = Path(__file__).with_name("registry.json")

Outcome = Literal["failed", "refused", "untested", "exact"]

OUTCOMES: dict[Outcome, str] = {
    "failed": "the streamed run stopped, or differed from the resident one; refused like the next",
    "refused": "cannot be streamed",
    "untested": "the small resident model cannot be made or trained, or it is exact in part",
    "exact": "not one bit differs",
}
"""Outcomes from the worst to the best; the worst of a family's variants counts."""

_REASON = 160  # characters of a reason that a line shows


@dataclass(frozen=True)
class Record:
    """What the gate found for one family or one kind of adapters."""

    outcome: Outcome
    reason: str | None = None
    """Why it is not exact."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Releases of the libraries that it ran with."""

    @property
    def is_refused(self) -> bool:
        """Whether ``poros.prepare`` refuses it."""
        return self.outcome in ("refused", "failed")


@dataclass(frozen=True)
class Registry:
    """All records: of families by ``config.model_type``, of adapters by their kind."""

    families: Mapping[str, Record] = field(default_factory=dict)
    adapters: Mapping[str, Record] = field(default_factory=dict)

    def family(self, model_type: str) -> Record:
        """The record of a family; whatever is not on record is untested."""
        return self.families.get(model_type, Record("untested", "nothing is on record"))

    def adapter(self, kind: str) -> Record:
        """The record of a kind of adapters."""
        return self.adapters.get(kind, Record("untested", "nothing is on record"))

    def lines(self, part: str | None = None) -> Iterator[str]:
        """Text for people: a few lines in all, or one for each name that contains ``part``."""
        if part is not None:
            found = {
                name: record
                for name, record in (*self.families.items(), *self.adapters.items())
                if part.casefold() in name.casefold()
            }
            width = max(map(len, found), default=0)
            for name, record in found.items():
                ran = ", ".join(f"{library} {each}" for library, each in record.versions.items())
                why = quoted(record.reason or ran, is_bare=True, limit=_REASON)
                yield f"{name:{width}}  {record.outcome:8}  {why}"
            return
        for what, records in (("families", self.families), ("kinds of adapters", self.adapters)):
            yield f"{what}:"
            for outcome in reversed(OUTCOMES):
                names = [name for name, each in records.items() if each.outcome == outcome]
                yield f"{len(names):4} {outcome:8} {OUTCOMES[outcome]}"
                if names:
                    yield f"     {', '.join(names)}"
        yield "`poros check --registered NAME` shows the reason"


def read_registry(path: Path | None = None) -> Registry:
    """Read the records."""
    content = json.loads((path or PATH).read_text())
    families, adapters = (
        {name: Record(**raw) for name, raw in content[part].items()}
        for part in ("families", "adapters")
    )
    return Registry(families, adapters)
