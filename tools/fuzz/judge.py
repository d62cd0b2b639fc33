"""Runs a program resident and prepared, and says how it ended.

Two ends are allowed: every recorded bit is equal, or a ``PorosError`` was raised before anything
wrong was trained. So after an error what the prepared run had recorded has to be the beginning of
what the resident one recorded, and its weights those of the resident run at that point. Where the
resident run raises, the prepared one has to raise too. On any failure the resident run is repeated:
where it does not repeat itself, nothing can be said and the program is skipped.
"""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from poros.api import prepare_with, restore, runtime
from poros.config import StreamingPolicy
from poros.cuda_streams import streams_for
from poros.errors import ParityError, PorosError, SlotStateError
from poros.replay.call import LayerCall
from poros.self_check.compare import bits, differing
from poros.stream.boundary import is_streamed
from poros.stream.general import RecomputedCall
from poros.streams import StreamContext
from tools.adversary import AdversarialStreams, SlotHazard
from tools.fuzz.alive import collect
from tools.fuzz.arm import Arm, Record, frozen_tensors, run_arm
from tools.fuzz.models import Models
from tools.fuzz.program import Program
from tools.tape import TapeRecorder

End = Literal["equal", "refused", "raised", "skipped", "failed"]

_MAX_MESSAGE = 200
_VIEW = "A view was created in no_grad mode"
"""PyTorch on an edit of what ``torch.autograd.grad`` gives for a linear layer, with a graph."""


@dataclass(frozen=True)
class Verdict:
    """How a program ended.

    Attributes:
        end: ``equal``, ``refused`` (a ``PorosError`` in time), ``raised`` (so did the resident
            run), ``skipped`` (the resident run does not repeat itself, or edits a view), or
            ``failed``.
        kind: What sort of failure or refusal, without numbers and names: equal for equal causes.
        detail: One line that says what was expected and found.
        num_joined: Visits that were replayed in one go with others, of micro-batches or layers.
    """

    end: End
    kind: str = ""
    detail: str = ""
    num_joined: int = 0


def judge(program: Program, models: Models) -> Verdict:
    """Run all arms of ``program``; the models are made by ``models``."""
    resident = _resident(program, models)
    streamed, finish = _streamed(program, models)
    verdict = _judged(program, models, resident, streamed, finish)
    return replace(verdict, num_joined=finish.num_joined)


def _judged(
    program: Program, models: Models, resident: Record, streamed: Record, finish: "_Finish"
) -> Verdict:
    verdict = _compare(program, resident, streamed, finish)
    if verdict.end == "refused" and verdict.kind.startswith(ParityError.__name__):
        verdict = _accused(program, models, resident, verdict)
    if verdict.end != "failed":
        return verdict  # equal bits need no second resident run to be believed
    again = _resident(program, models)
    unsteady = _first_difference(resident, again) or (
        type(resident.error) is not type(again.error) and "the error"
    )
    if unsteady:
        return Verdict("skipped", "resident does not repeat itself", str(unsteady))
    return verdict


def _resident(program: Program, models: Models) -> Record:
    with _watched(program.policy.streams == "watched"):
        return run_arm(program, models.make(program.subject), None)


def _accused(program: Program, models: Models, resident: Record, verdict: Verdict) -> Verdict:
    """A mismatch that the self-check reports: without the check, is there one?

    If not, it accuses a step that is right; if there is, only the check stands before it. A program
    that is refused for another reason then is refused a little later.
    """
    unchecked = replace(program, policy=replace(program.policy, self_check="off"))
    without_check = _compare(unchecked, resident, *_streamed(unchecked, models))
    if without_check.end == "equal":
        return Verdict("failed", f"false accusation: {verdict.kind}", verdict.detail)
    return without_check


def _compare(program: Program, resident: Record, streamed: Record, finish: "_Finish") -> Verdict:
    difference = _first_difference(resident, streamed)
    if difference is not None:
        return _different(program, difference, streamed, finish)
    problem = finish.problem
    if resident.error is not None:
        if streamed.error is None and _VIEW in _message(resident.error):
            return Verdict("skipped", "a gradient that is a view in a resident run alone")
        if streamed.error is None:
            return Verdict("failed", "no error where resident raises", _message(resident.error))
        if problem:
            return Verdict("failed", f"restore: {_pattern(problem)}", problem)
        return Verdict("raised", _kind(resident.error), _message(streamed.error))
    error = streamed.error
    if error is None:
        if problem:
            return Verdict("failed", f"restore: {_pattern(problem)}", problem)
        if finish.was_warned:
            return Verdict("failed", "false accusation by a warning", finish.warning)
        return Verdict("equal")
    if not isinstance(error, PorosError) or isinstance(error, SlotHazard | SlotStateError):
        return Verdict("failed", f"foreign {_kind(error)}", _message(error) + "\n" + streamed.trace)
    wrong = _wrong_weight(resident, streamed)
    if wrong is not None:
        return Verdict("failed", f"wrong weights at {_kind(error)}", f"{wrong}; {_message(error)}")
    if problem:
        return Verdict("failed", f"restore: {_pattern(problem)}", f"{problem}; {_message(error)}")
    return Verdict("refused", _kind(error), _message(error))


class _Finish:
    """What has to hold at the end of the prepared arm; ``problem`` says what does not."""

    def __init__(self) -> None:
        self.problem = ""
        self.was_warned = False
        self.warning = ""
        self.num_joined = 0
        self._num_calls = _num_calls()

    def __call__(self, arm: Arm) -> None:
        model = arm.model
        if not any(is_streamed(module) for module in model.modules()):
            return
        check = runtime(model).self_check
        self.num_joined = runtime(model).stats()["num_joined_visits"]
        self.was_warned = check["mode"] == "warn" and check["status"] == "failed"
        self.warning = str(check["message"])
        base = {name: tensor.detach().clone() for name, tensor in frozen_tensors(model)}
        try:
            restore(model)
        except Exception as error:
            self.problem = f"restore raises {type(error).__name__}: {error}"
            return
        arm.captured.clear()
        after = dict(frozen_tensors(model))
        # What the program has replaced under the runtime is refused, and put back by restore.
        if arm.record.error is None or not arm.edits_base:
            for name, tensor in base.items():
                if name not in after or not _same(tensor, after[name]):
                    self.problem = f"restore changes {name}"
        collect()
        alive = _num_calls() - self._num_calls
        # PyTorch's own save_on_cpu keeps every graph that has no backward, resident too.
        keeps = any(step.context == "save_on_cpu" for step in arm.program.steps)
        if arm.record.error is None and alive > 0 and not keeps:
            self.problem = f"{alive} calls of layers are alive after restore"


def _num_calls() -> int:
    """Calls of streamed layers that are alive."""
    return sum(type(instance) in (LayerCall, RecomputedCall) for instance in gc.get_objects())


def _streamed(program: Program, models: Models) -> tuple[Record, _Finish]:
    policy = program.policy
    streams: StreamContext = streams_for(torch.device("cpu"))
    if policy.streams != "plain":
        streams = AdversarialStreams()

    def prepare(model: Any) -> None:
        prepare_with(
            model,
            StreamingPolicy(
                slots=None if policy.vram_budget else policy.slots,
                keep_last=None if policy.vram_budget else policy.keep_last,
                vram_budget=policy.vram_budget or None,
                block_size=policy.block_size,
                offload_boundaries=policy.offload_boundaries,
                stream_embedding=policy.stream_embedding,
                stream_head=policy.stream_head,
                loss=policy.loss,
                adapter_kernels=policy.kernels,
                self_check=policy.self_check,
                share_dense=policy.share_dense,
                device="cpu",
            ),
            streams=streams,
            recorder=TapeRecorder() if policy.recorded else None,
            goes_by_records=False,
        )

    finish = _Finish()
    model = models.make(program.subject)
    with _watched(policy.streams == "watched", streams):
        return run_arm(program, model, prepare, finish), finish


@contextmanager
def _watched(wanted: bool, streams: StreamContext | None = None) -> Iterator[None]:
    """Autocast and a dispatch mode do not mix as without one, so all arms are watched or none."""
    chosen = streams if isinstance(streams, AdversarialStreams) else AdversarialStreams()
    with chosen.watch() if wanted else nullcontext():
        yield


def _different(program: Program, difference: str, streamed: Record, finish: _Finish) -> Verdict:
    if finish.was_warned:
        return Verdict("refused", "warned by the self-check", difference)
    after = "" if streamed.error is None else f" before {_kind(streamed.error)}"
    quantity = re.sub(r"^(step \d+|end): ", "", difference.split(":: ")[0])
    word = re.sub(r"\d+", "N", quantity).split(" of ")[0].split(" model.")[0]
    word = re.sub(r" base_model\S+", "", word)
    return Verdict("failed", f"silent difference: {word}{after}", difference)


def _first_difference(expected: Record, found: Record) -> str | None:
    """Where two records part; one that an error ended is compared as far as it goes."""
    for (name, left), (other, right) in zip(expected.entries, found.entries, strict=False):
        if name != other:
            return f"{name}:: expected next, found {other}"
        if not _same(left, right):
            return f"{name}:: {differing(left, right, name)}"
    num_expected, num_found = len(expected.entries), len(found.entries)
    if found.error is None and expected.error is None and num_expected != num_found:
        return f"number of records:: expected {num_expected}, found {num_found}"
    if found.error is None and expected.error is None:
        for name in expected.base:
            if name not in found.base or not _same(expected.base[name], found.base[name]):
                return f"frozen tensor {name}:: differs at the end"
    return None


def _wrong_weight(expected: Record, found: Record) -> str | None:
    """A weight that is neither what it was before the part that raised, nor what it is after it."""
    number = len(found.weights)
    states = expected.weights[max(0, number - 1) : number + 1]
    for name, tensor in found.now.items():
        candidates = [state[name] for state in states if name in state]
        if candidates and not any(_same(candidate, tensor) for candidate in candidates):
            return name
    return None


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(bits(left), bits(right))


def _kind(error: BaseException) -> str:
    return f"{type(error).__name__}: {_pattern(str(error))}"


def _pattern(message: str) -> str:
    """A message without what differs from run to run: numbers, names, and all after the first."""
    first = re.split(r"[;\n]|\. ", message)[0]
    first = re.sub(r"[\w.]*model\.\S+", "NAME", first)
    first = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", first)
    return first[:_MAX_MESSAGE]


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[: 4 * _MAX_MESSAGE]
