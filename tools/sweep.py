"""Runs the gate for the registry, at a release: every family of models and every kind of adapters.

``python -m tools.sweep`` goes through every model type with a causal language model, then
through every kind of adapter, each in a process of its own with a limit on time and memory, and
writes the registry after each. With names it runs these alone: model types, names of
``poros.gates.tiny.ARCHITECTURES``, or kinds.
"""

import argparse
import json
import logging
import multiprocessing
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from poros.errors import PorosError
from poros.gates import registry as records
from poros.gates import tiny
from poros.gates.kinds import KINDS, kind_of
from poros.gates.parity import check_architecture
from poros.gates.registry import OUTCOMES, Outcome, Record, Registry, read_registry
from poros.gates.report import ParityReport, environment
from poros.gates.tiny import MULTIMODAL
from poros.io.writing import write_text
from tools.adversary import AdversarialStreams

_MAX_BYTES = 6 << 30
_MAX_REASON = 400
# A model of so few layers either fits these seconds or is not small.
_TIME_LIMIT_S = 60.0

_SHORT = {
    "dtype": torch.bfloat16,
    "dropout": 0.05,
    "block_size": 1,
    "slots": 2,
    "accumulation": 1,
    "self_check": "strict",
    "keep_last": 0,
    "offload_boundaries": False,
    "num_steps": 3,
    "num_layers": 3,
    "hidden_size": 64,
}
_LONG = {**_SHORT, "num_steps": 20, "num_layers": 6}
# The self-check loads layers of its own accord: one mode runs without, as a fault it hides would.
_DENSE = {**_LONG, "dtype": torch.float32, "dropout": 0.0, "block_size": 2, "self_check": "off"}

_KEEP_LAST = {**_LONG, "num_steps": 6, "keep_last": 2, "offload_boundaries": True}

PROMISED_MODES: tuple[dict[str, Any], ...] = (_LONG, {**_DENSE, "accumulation": 2}, _KEEP_LAST)
"""Modes of the architectures that the gates promise."""
OTHER_MODES: tuple[dict[str, Any], ...] = (_SHORT,)
"""Modes of every other family."""

ADAPTER_MODES: tuple[dict[str, Any], ...] = (
    _SHORT,
    {**_SHORT, "autocast_dtype": torch.bfloat16, "keep_last": 1, "offload_boundaries": True},
    {
        **_SHORT,
        **{"dtype": torch.float32, "autocast_dtype": torch.bfloat16, "quantize": False},
        **{"dropout": 0.0, "block_size": 2, "accumulation": 2, "self_check": "off"},
    },
)
"""Modes of kinds of adapters."""

ADAPTER_FAMILIES = ("qwen2", "gemma3")
"""Biases and gated linear layers; sliding windows, norms around everything and a tied head."""

_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def modes_of(name: str, adapter: str | None = None) -> tuple[dict[str, Any], ...]:
    """The modes in which the gate runs an architecture, or a kind of adapter on it."""
    if adapter is not None:
        return ADAPTER_MODES
    is_promised = name in tiny.ARCHITECTURES or name in MULTIMODAL
    return PROMISED_MODES if is_promised else OTHER_MODES


def make_record(name: str, adapter: str | None = None) -> Record:
    """Run the gate on one architecture, in each of its modes, on the CPU.

    Args:
        name: A name of ``tiny.ARCHITECTURES`` or ``MULTIMODAL``, or any other ``model_type``.
        adapter: A kind of adapter to record on it; None records the architecture, with LoRA.

    Returns:
        The record. Whatever goes wrong is in it; only names that transformers or the gate does not
        know are raised.

    Raises:
        UnsupportedModelError: If transformers has no such architecture, or the gate no such kind.
    """
    tiny.model_type_of(name)
    kind_of(adapter or "lora")
    for number, mode in enumerate(modes_of(name, adapter)):
        outcome, reason = _run_mode(name, adapter, mode)
        if outcome == "untested" and mode["dropout"]:
            # Some families cannot have dropout in their adapters.
            outcome, reason = _run_mode(name, adapter, {**mode, "dropout": 0.0})
        if outcome == "refused" and number:
            # Such as shared parameters under autocast alone: the refusal of the step itself does.
            outcome, reason = "untested", f"exact in some settings, refused in others: {reason}"
        if outcome != "exact":
            break
    return _recorded(outcome, reason)


def _recorded(outcome: Outcome, reason: str | None) -> Record:
    versions = environment(torch.device("cpu"))["versions"]
    reason = reason and " ".join(reason.split())[:_MAX_REASON]
    return Record(outcome, reason, {library: versions[library] for library in _LIBRARIES})


def _run_mode(
    name: str, adapter: str | None, mode: Mapping[str, Any]
) -> tuple[Outcome, str | None]:
    options = {**mode, "adapter": adapter or "lora"}
    try:
        return judge(
            check_architecture(name, device="cpu", prepare=_prepare_adversarially, **options)
        )
    except PorosError as error:  # it cannot be built
        return "untested", str(error)


def _prepare_adversarially(model: Any, **overrides: Any) -> Any:
    from poros.api import prepare_with
    from poros.config import StreamingPolicy

    policy = StreamingPolicy().override(**overrides)
    return prepare_with(model, policy, streams=AdversarialStreams(), goes_by_records=False)


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
    """The promised architectures and every other model type that has a causal language model.

    Where a checkpoint has a vision tower, it is with its tower.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    promised = tiny.ARCHITECTURES
    # A promised name may also be the model type of a larger model around it, such as with images.
    towers = {name: row.model_type for name, row in MULTIMODAL.items()}
    taken = {*promised, *promised.values(), *towers, *towers.values()}
    others = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in taken]
    return [*promised, *towers, *others]


def sweep(
    subjects: Sequence[tuple[str, str | None]], *, time_limit_s: float = _TIME_LIMIT_S
) -> None:
    """Record the outcomes of subjects, one process at a time; other records stay.

    Args:
        subjects: Architectures, each with a kind of adapter or None.
        time_limit_s: For one mode.
    """
    found: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    order = list(OUTCOMES)
    for name, adapter in subjects:
        started = time.monotonic()
        record = _in_process(name, adapter, time_limit_s)
        part, key = ("adapters", adapter) if adapter else ("families", tiny.model_type_of(name))
        variants = found[part, key]
        variants.append(record)
        worst = min(variants, key=lambda each: order.index(each.outcome))
        registry = read_registry()
        write_registry(replace(registry, **{part: {**getattr(registry, part), key: worst}}))
        seconds = time.monotonic() - started
        what = f"{adapter} on {name}" if adapter else name
        print(f"{record.outcome:8} {what} ({seconds:.1f} s) {record.reason or ''}", flush=True)


def write_registry(registry: Registry) -> None:
    """Write all records, one a line; a reader sees the old file or all of the new one."""
    parts = (
        f' "{part}": {{\n'
        + ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(asdict(record))}"
            for name, record in sorted(getattr(registry, part).items())
        )
        + "\n }"
        for part in ("families", "adapters")
    )
    write_text(records.PATH, "{\n" + ",\n".join(parts) + "\n}\n")


def _in_process(name: str, adapter: str | None, time_limit_s: float) -> Record:
    # Forked, because importing everything takes longer than most gates.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_record, args=(name, adapter, sender), daemon=True)
    process.start()
    sender.close()
    limit_s = time_limit_s * len(modes_of(name, adapter))
    record = _recorded("untested", f"the process took longer than {limit_s:.0f} s")
    if receiver.poll(limit_s):
        try:
            record = receiver.recv()
        except EOFError:
            process.join()
            record = _recorded("failed", f"the process ended with exit code {process.exitcode}")
    process.kill()
    process.join()
    return record


def _send_record(name: str, adapter: str | None, sender: Connection) -> None:
    import resource  # not on every platform, and only here needed

    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    sender.send(make_record(name, adapter))
    sender.close()


def subjects(names: Sequence[str] = ()) -> list[tuple[str, str | None]]:
    """What a sweep goes through: all variants of each family, all families of each kind.

    Args:
        names: Of architectures, model types or kinds; all if there are none.
    """
    families = architectures()
    known = {name: tiny.model_type_of(name) for name in families}
    wanted = {known.get(name, name) for name in names}
    found: list[tuple[str, str | None]] = [
        (name, None) for name in families if not names or known[name] in wanted
    ]
    for kind in KINDS:
        if not names or (kind in names and kind not in known):
            found += [(name, kind) for name in ADAPTER_FAMILIES]
    if unknown := set(names) - {*known, *known.values(), *KINDS}:
        raise SystemExit(f"neither architectures nor kinds of adapters: {', '.join(unknown)}")
    return found


def main() -> None:
    """Sweep, then print what is on record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures, or kinds; all if none is given")
    parser.add_argument("--time-limit", type=float, default=_TIME_LIMIT_S, help="seconds per mode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    import poros.api  # noqa: F401  before the first fork

    sweep(subjects(options.names), time_limit_s=options.time_limit)
    print(*read_registry().lines(), sep="\n")


if __name__ == "__main__":
    main()
