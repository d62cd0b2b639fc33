"""Runs the gate for the registry: one family or kind of adapter, or all that there are.

``python -m poros.gates.sweep`` goes through every model type with a causal language model, then
through every kind of adapter (``--adapters`` through these alone), each in a process of its own
with a limit on time and memory, and writes each record as it is made. Records that still count are
kept, so a sweep that was stopped goes on where it was.
"""

import argparse
import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any

import torch

from poros.errors import PorosError
from poros.gates import tiny
from poros.gates.adversary import AdversarialStreams
from poros.gates.kinds import KINDS
from poros.gates.parity import check_architecture
from poros.gates.registry import (
    ADAPTER_FAMILIES,
    OUTCOMES,
    AdapterRecord,
    Outcome,
    Record,
    adapter_modes,
    code_hash,
    modes_of,
    read_registry,
)
from poros.gates.report import ParityReport, environment

_MAX_BYTES = 6 << 30
_MAX_REASON = 400
# A model of so few layers either fits these seconds or is not small.
_TIME_LIMIT_S = 60.0


def make_record(
    name: str,
    *,
    adapter: str | None = None,
    code: str | None = None,
    on_report: Callable[[ParityReport], None] | None = None,
) -> Record:
    """Run the gate on one architecture, in each of its modes, on the CPU.

    Args:
        name: A name of ``tiny.ARCHITECTURES`` or any ``model_type`` of transformers.
        adapter: A kind of adapter to record on it; None records the architecture, with LoRA.
        code: ``code_hash()``, if taken before; a long sweep takes it before it imports.
        on_report: Called with the report of each mode.

    Returns:
        The sealed record. Whatever goes wrong is in it; only names that transformers or the gate
        does not know are raised.

    Raises:
        UnsupportedModelError: If transformers has no such architecture, or the gate no such kind.
    """
    code = code or code_hash()
    tiny.model_type_of(name)
    outcome: Outcome = "exact"
    reason: str | None = None
    modes = []
    for mode in modes_of(name) if adapter is None else adapter_modes(adapter):
        outcome, reason, ran = _run_mode(name, adapter, mode, on_report)
        if outcome == "untested" and mode["dropout"]:
            outcome, reason, ran = _run_mode(name, adapter, {**mode, "dropout": 0.0}, on_report)
        modes.append(ran)
        if outcome != "exact":
            break
    return _sealed(name, adapter, outcome, reason, modes, code)


def _sealed(
    name: str,
    adapter: str | None,
    outcome: Outcome,
    reason: str | None,
    modes: Sequence[Mapping[str, Any]],
    code: str,
) -> Record:
    machine = environment(torch.device("cpu"))
    values: dict[str, Any] = {
        "name": name,
        "model_type": tiny.model_type_of(name),
        "outcome": outcome,
        "reason": reason and " ".join(reason.split())[:_MAX_REASON],
        "modes": modes,
        "versions": machine.pop("versions"),
        "environment": machine,
        "date": datetime.now(UTC).date().isoformat(),
        "code": code,
    }
    record = Record(**values) if adapter is None else AdapterRecord(**values, adapter=adapter)
    return record.sealed()


def _run_mode(
    name: str,
    adapter: str | None,
    mode: Mapping[str, Any],
    on_report: Callable[[ParityReport], None] | None,
) -> tuple[Outcome, str | None, dict[str, Any]]:
    options = {key: value for key, value in mode.items() if key != "is_adversarial"}
    for key in ("dtype", "autocast_dtype"):
        if options.get(key) is not None:
            options[key] = getattr(torch, options[key])
    if adapter is not None:
        options["adapter"] = adapter
    prepare = _prepare_adversarially if mode["is_adversarial"] else None
    try:
        report = check_architecture(name, device="cpu", prepare=prepare, **options)
    except PorosError as error:  # it cannot be built
        return "untested", str(error), dict(mode)
    if on_report is not None:
        on_report(report)
    outcome, reason = judge(report)
    ran = {
        **mode,
        "num_elements": sum(tally.num_elements for tally in report.tallies.values()),
        "num_differing_bits": sum(tally.num_differing_bits for tally in report.tallies.values()),
        "hashes": report.hashes,
    }
    return outcome, reason, ran


def _prepare_adversarially(model: Any, **overrides: Any) -> Any:
    from poros.api import prepare_with
    from poros.config import StreamingPolicy

    return prepare_with(
        model, StreamingPolicy().override(**overrides), streams=AdversarialStreams()
    )


def judge(report: ParityReport) -> tuple[Outcome, str | None]:
    """Sort a report into the outcomes of the registry, with the reason if it is not exact."""
    if report.exact:
        return "exact", None
    error = report.error or ""
    refusal = "the streamed arm raised UnsupportedModelError: "
    if error.startswith(refusal):
        return "refused", error.removeprefix(refusal)
    if report.resident_repeats is False:
        return "untested", report.verdict()
    if report.num_differences or "streamed arm" in error:
        return "failed", report.verdict()
    return "untested", error


def architectures() -> list[str]:
    """The promised architectures and every other model type that has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    promised = tiny.ARCHITECTURES
    # A promised name may also be the model type of a larger model around it, such as with images.
    taken = {*promised, *promised.values()}
    return [*promised, *(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in taken)]


def adapters() -> list[tuple[str, str]]:
    """Every kind of adapter with every family that it is recorded on."""
    return [(name, kind) for kind in KINDS for name in ADAPTER_FAMILIES]


def sweep(
    subjects: Sequence[tuple[str, str | None]], *, time_limit_s: float = _TIME_LIMIT_S
) -> None:
    """Record what has no record that counts, one process at a time.

    Args:
        subjects: Architectures, each with a kind of adapter or None.
        time_limit_s: For one mode.
    """
    code = code_hash()
    for name, adapter in subjects:
        known = read_registry().of(name, adapter)
        if known is not None and not known.problems(code):
            continue
        started = time.monotonic()
        record = _in_process(name, adapter, code, time_limit_s)
        read_registry().including(record).write()
        seconds = time.monotonic() - started
        print(
            f"{record.outcome:8} {record.key} ({seconds:.1f} s) {record.reason or ''}", flush=True
        )


def _in_process(name: str, adapter: str | None, code: str, time_limit_s: float) -> Record:
    # Forked, because importing everything takes longer than most gates.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_record, args=(name, adapter, code, sender), daemon=True)
    process.start()
    sender.close()
    limit_s = time_limit_s * len(modes_of(name) if adapter is None else adapter_modes(adapter))
    record = None
    reason = f"the process took longer than {limit_s:.0f} s"
    if receiver.poll(limit_s):
        try:
            record = receiver.recv()
        except EOFError:
            process.join()
            reason = f"the process ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    if record is not None:
        return record
    return _sealed(name, adapter, "untested" if "longer" in reason else "failed", reason, (), code)


def _send_record(name: str, adapter: str | None, code: str, sender: Connection) -> None:
    import resource  # not on every platform, and only here needed

    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    sender.send(make_record(name, adapter=adapter, code=code))
    sender.close()


def main() -> None:
    """Sweep, then say how many records there are of each outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures, or kinds; all if none is given")
    parser.add_argument("--adapters", action="store_true", help="kinds of adapters alone")
    parser.add_argument("--time-limit", type=float, default=_TIME_LIMIT_S, help="seconds per mode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    import poros.api  # noqa: F401  before the first fork

    sweep(_subjects(options.names, options.adapters), time_limit_s=options.time_limit)
    registry = read_registry()
    for subjects, records in (("families", registry.records), ("adapters", registry.adapters)):
        outcomes = [record.outcome for record in records.values()]
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in OUTCOMES)
        print(f"{subjects}: {counts}")


def _subjects(names: Sequence[str], adapters_alone: bool) -> list[tuple[str, str | None]]:
    kinds = [pair for pair in adapters() if not names or pair[1] in names]
    families: list[tuple[str, str | None]] = [(name, None) for name in names or architectures()]
    if adapters_alone:
        return [*kinds]
    return families if names else [*families, *kinds]


if __name__ == "__main__":
    main()
