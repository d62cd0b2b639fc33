"""What streams exactly: a record per family and per kind of adapter, which only the gate writes.

``registry.json`` beside this file holds the records. Those of families were made with LoRA; other
kinds of adapters have theirs on a few families (``ADAPTER_FAMILIES``). ``poros check --architecture
NAME [--adapter KIND] --record`` runs the gate in every mode below and replaces one of them;
``python -m poros.gates.sweep`` does so for all that have none or a stale one.

Note: When a record counts. A record is a claim about code that has run. It counts only while

1. its seal, a digest of everything else in it, is the one that was written with it,
2. the code of the gate and of the runtime is the code that ran, comments and docstrings aside,
3. its modes are those that the gate runs today, and
4. what it says it measured supports its outcome.

``Record.problems`` lists what is wrong; a test demands that no record has any.
"""

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from poros.errors import PorosError
from poros.output import write_json

PATH = Path(__file__).with_name("registry.json")

Outcome = Literal["exact", "refused", "failed", "untested"]

OUTCOMES: dict[Outcome, str] = {
    "exact": "not one bit differs in any mode",
    "refused": "Poros says that it cannot stream it, and why",
    "failed": "streamed and resident differ, or the streamed run broke",
    "untested": "the small resident model cannot be made or trained, which says nothing of Poros",
}

_SHORT = {
    "dtype": "bfloat16",
    "dropout": 0.05,
    "block_size": 1,
    "slots": 2,
    "accumulation": 1,
    "self_check": "strict",
    "is_adversarial": True,
    "keep_last": 0,
    "offload_boundaries": False,
    "num_steps": 3,
    "num_layers": 3,
    "hidden_size": 64,
}
_LONG = {**_SHORT, "num_steps": 20, "num_layers": 6}
# The self-check loads layers of its own accord: one mode runs without, as a fault it hides would.
_DENSE = {**_LONG, "dtype": "float32", "dropout": 0.0, "block_size": 2, "self_check": "off"}

_KEEP_LAST = {**_LONG, "num_steps": 6, "keep_last": 2, "offload_boundaries": True}

PROMISED_MODES: tuple[dict[str, Any], ...] = (_LONG, {**_DENSE, "accumulation": 2}, _KEEP_LAST)
"""Modes of the architectures that the gates promise."""
OTHER_MODES: tuple[dict[str, Any], ...] = (_SHORT,)
"""Modes of every other family."""

_ADAPTER = {**_SHORT, "autocast_dtype": None, "quantize": True}

ADAPTER_MODES: tuple[dict[str, Any], ...] = (
    _ADAPTER,
    {**_ADAPTER, "autocast_dtype": "bfloat16", "keep_last": 1, "offload_boundaries": True},
    {
        **_ADAPTER,
        **{"dtype": "float32", "autocast_dtype": "bfloat16", "quantize": False, "dropout": 0.0},
        **{"block_size": 2, "accumulation": 2, "self_check": "off"},
    },
)
"""Modes of kinds of adapters; ``adapter_modes`` says what of them PEFT can do for which kind."""

ADAPTER_FAMILIES = ("qwen2", "gemma3")
"""Biases and gated linear layers; sliding windows, norms around everything and a tied head."""

# What decides the bits of either arm and whether a difference is seen. Commands, reports and demos
# may change without touching a record; so may the self-check, which can stop a run, not alter it.
_CODE = tuple(
    f"{package}.{module}"
    for package, modules in {
        "poros": "layout nf4 streams",
        "poros.host": "store",
        "poros.slots": "manager ring schedule",
        "poros.layer": "adapters args arrival attributes audit body call casts compiled condition "
        "early frozen handover layer_index offload remat retained rng settings side_outputs state "
        "staying streamed visit within",
        "poros.kernels": "adapters autocast compose dequantize dora forwards gated hooks "
        "linear4bit lora mlp online_softmax product row_norm unformed use",
        "poros.head": "choice embedding host_matrix kept logits loss online rows slices takeover",
        "poros.model": "adoption attach inspect runtime",
        "poros.self_check": "compare",
        "poros.gates": "adversary arms kinds parity reference sweep tiny",
    }.items()
    for module in modules.split()
)


_Kind = TypeVar("_Kind", bound="Record")


class RegistryError(PorosError, ValueError):
    """The registry's file is not what the gate wrote."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the gate found for one family."""

    name: str
    """As in ``poros check --architecture``."""
    model_type: str
    """``config.model_type``; several variants may share it."""
    outcome: Outcome
    reason: str | None
    """Why it is not exact."""
    modes: Sequence[Mapping[str, Any]]
    """Settings of each run, with ``num_elements`` compared, ``num_differing_bits`` and hashes."""
    versions: Mapping[str, str]
    environment: Mapping[str, Any]
    date: str
    code: str
    """``code_hash()`` of the code that ran."""
    seal: str = ""

    @property
    def key(self) -> str:
        """Under which a registry has it."""
        return self.name

    @property
    def command(self) -> str:
        """What proves it on any machine."""
        return f"poros check --architecture {self.name}"

    def expected_modes(self) -> Sequence[Mapping[str, Any]]:
        """The modes in which the gate runs it now."""
        return modes_of(self.name)

    def sealed(self) -> "Record":
        """This record with the digest of everything else in it."""
        return replace(self, seal=self._digest())

    def problems(self, code: str, ranges: Mapping[str, Any] | None = None) -> list[str]:
        """Say why this record does not count.

        Args:
            code: ``code_hash()`` of the code that is there now.
            ranges: Version specifiers by distribution; what it lacks is not checked.
        """
        problems = []
        if self.seal != self._digest():
            problems.append("it was changed after the gate wrote it")
        if self.code != code:
            problems.append("the code of the gate or of the runtime has changed since")
        for library, allowed in (ranges or {}).items():
            ran = self.versions.get(library)
            if ran is None or ran.split("+")[0] not in allowed:
                problems.append(f"it ran with {library} {ran}, expected {allowed}")
        if self.outcome not in OUTCOMES:
            problems.append(f"expected an outcome of {', '.join(OUTCOMES)}, found {self.outcome!r}")
        if (self.outcome == "exact") is (self.reason is not None):
            problems.append("expected a reason exactly when it is not exact")
        if self.outcome == "exact":
            problems.extend(self._unsupported())
        return problems

    def _unsupported(self) -> list[str]:
        """Say what of the measurements does not support the outcome ``exact``."""
        problems = []
        expected = self.expected_modes()
        settings = [{key: mode.get(key) for key in expected[0]} for mode in self.modes]
        # Some families cannot have dropout in their adapters; the record says which it was.
        if [{**mode, "dropout": None} for mode in settings] != [
            {**mode, "dropout": None} for mode in expected
        ]:
            problems.append("it ran in other modes than the gate runs now")
        for index, mode in enumerate(self.modes):
            hashes = mode.get("hashes", {})
            equal = hashes.get("resident") == hashes.get("streamed") is not None
            if not equal or mode.get("num_differing_bits") != 0 or not mode.get("num_elements"):
                problems.append(f"mode {index} did not find the two runs equal")
        return problems

    def _digest(self) -> str:
        # Not asdict, which copies: every poros.prepare reads hundreds of records.
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        del content["seal"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class AdapterRecord(Record):
    """What the gate found for one kind of adapter on one family."""

    adapter: str
    """As in ``poros check --adapter``."""

    @property
    def key(self) -> str:
        return f"{self.adapter} on {self.name}"

    @property
    def command(self) -> str:
        return f"poros check --architecture {self.name} --adapter {self.adapter}"

    def expected_modes(self) -> Sequence[Mapping[str, Any]]:
        return adapter_modes(self.adapter)


@dataclass(frozen=True)
class Registry:
    """All records: of families, and of kinds of adapters, by their keys."""

    records: Mapping[str, Record]
    adapters: Mapping[str, AdapterRecord] = field(default_factory=dict)

    def exact_model_types(self) -> frozenset[str]:
        """Model types all of whose variants on record are exact."""
        exact = {record.model_type for record in self.records.values() if record.outcome == "exact"}
        others = {
            record.model_type for record in self.records.values() if record.outcome != "exact"
        }
        return frozenset(exact - others)

    def exact_adapters(self) -> frozenset[str]:
        """Kinds of adapters that are exact on record, on every family where PEFT can train them."""
        outcomes: dict[str, set[Outcome]] = {}
        for record in self.adapters.values():
            outcomes.setdefault(record.adapter, set()).add(record.outcome)
        return frozenset(
            kind for kind, seen in outcomes.items() if "exact" in seen <= {"exact", "untested"}
        )

    def including(self, record: Record) -> "Registry":
        """This registry with ``record`` in the place of its predecessor."""
        if isinstance(record, AdapterRecord):
            adapters = {**self.adapters, record.key: record}
            return replace(self, adapters=dict(sorted(adapters.items())))
        records = {**self.records, record.key: record}
        return replace(self, records=dict(sorted(records.items())))

    def of(self, name: str, adapter: str | None) -> Record | None:
        """The record of a family, or of a kind of adapter on it."""
        if adapter is None:
            return self.records.get(name)
        return self.adapters.get(f"{adapter} on {name}")

    def write(self, path: Path | None = None) -> None:
        """Write all records; a reader sees the old file or all of the new one."""
        content = {
            "records": [asdict(record) for record in self.records.values()],
            "adapters": [asdict(record) for record in self.adapters.values()],
        }
        write_json(path or PATH, content)


def read_registry(path: Path | None = None) -> Registry:
    """Read the records; without the file there are none, and no family counts as exact.

    Raises:
        RegistryError: If the file cannot be read as records, or one was changed by hand.
    """
    path = path or PATH
    if not path.exists():
        return Registry({})
    try:
        content = json.loads(path.read_text())
        records = [_read(Record, raw) for raw in content["records"]]
        adapters = [_read(AdapterRecord, raw) for raw in content.get("adapters", ())]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RegistryError(
            f"expected records of the gate in {path}, found {type(error).__name__}: {error}; "
            "restore the file, or remove it and run `python -m poros.gates.sweep`"
        ) from error
    for record in (*records, *adapters):
        if record.seal != record._digest():
            raise RegistryError(
                f"expected the record of {record.key!r} in {path} as the gate wrote it, found it "
                f"changed; run `{record.command} --record`"
            )
    return Registry(
        {record.key: record for record in records}, {record.key: record for record in adapters}
    )


def _read(kind: type[_Kind], raw: Mapping[str, Any]) -> _Kind:
    names = {field.name for field in fields(kind)}
    return kind(**{key: value for key, value in raw.items() if key in names})


def modes_of(name: str) -> tuple[dict[str, Any], ...]:
    """The modes in which the gate runs an architecture."""
    from poros.gates.tiny import ARCHITECTURES

    return PROMISED_MODES if name in ARCHITECTURES else OTHER_MODES


def adapter_modes(kind: str) -> tuple[dict[str, Any], ...]:
    """The modes in which the gate runs a kind of adapter."""
    from poros.gates.kinds import kind_of

    row = kind_of(kind)
    return tuple(
        {
            **mode,
            "quantize": mode["quantize"] and row.on_4bit,
            "autocast_dtype": mode["autocast_dtype"] if row.without_autocast else "bfloat16",
        }
        for mode in ADAPTER_MODES
    )


def code_hash(modules: Sequence[str] = _CODE) -> str:
    """Digest what modules do: their syntax trees without comments, docstrings and positions."""
    digest = hashlib.sha256()
    for module in modules:
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise RegistryError(f"expected the source of {module}, found none")
        digest.update(f"{module}:{source_hash(Path(spec.origin).read_text())}\n".encode())
    return digest.hexdigest()


def source_hash(source: str) -> str:
    """Digest one source text, without comments, docstrings and positions."""
    return hashlib.sha256(_canonical(ast.parse(source)).encode()).hexdigest()


def _canonical(node: Any) -> str:
    """Spell a syntax tree the same in every Python release; ``ast.dump`` changes between them."""
    if isinstance(node, ast.AST):
        parts = [
            f"{name}={_canonical(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != []
        ]
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        # A text that stands alone does nothing: it is a docstring.
        return f"[{','.join(_canonical(item) for item in node if not _is_docstring(item))}]"
    return repr(node)


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
