"""Records for tests of the registry."""

from dataclasses import asdict

from poros.gates.registry import AdapterRecord, Record, adapter_modes


def adapter_record(record: Record, kind: str) -> AdapterRecord:
    """As if the gate had found of a kind what it found of a family; not a measurement."""
    raw = {**asdict(record), "adapter": kind}
    raw["modes"] = [{**record.modes[0], **mode} for mode in adapter_modes(kind)]
    return AdapterRecord(**raw).sealed()  # type: ignore[return-value]
