"""Streamed training equals resident training, bit for bit, in every cell that Poros promises.

A cell is a program of two steps in the fuzzer's language: a model (architecture, dtype, dropout),
accumulation, autocast, a policy, and streams: those that a CPU has ("plain"), the adversarial ones,
which copy as late as the waits allow and poison what they are about to overwrite, or these with
every read of an operator observed ("watched"). In the grid it is evaluated and generates as well.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import poros
from poros.errors import ParityError
from poros.gates import tiny
from poros.self_check.compare import Difference
from poros.slots.manager import BlockManager
from poros.stream.boundary import is_streamed
from tests.comparing import compare_trajectories
from tests.loops import Model, batches, build, layers_of, resident_run, run
from tests.support import AdversarialPrepare, prepare_plain
from tools.adversary import SlotHazard
from tools.fuzz.campaign import Judge
from tools.fuzz.program import Evaluate, Forward, Policy, Program, Step, Subject

NUM_LAYERS = 4
pytestmark = pytest.mark.usefixtures("narrow")


def program(
    architecture: str = "qwen2",
    policy: Policy = Policy(),  # noqa: B008
    *,
    accumulation: int = 2,
    autocast: str = "off",
    **subject: Any,
) -> Program:
    steps = tuple(
        Step(
            forwards=tuple(Forward(step + micro, length=12) for micro in range(accumulation)),
            autocast=autocast,
        )
        for step in (0, accumulation)
    )
    options = {"dtype": "bfloat16", "dropout": 0.05, "num_layers": NUM_LAYERS, **subject}
    return Program(Subject(architecture, **options), policy, steps=steps)


OFF, FP32 = {"self_check": "off"}, {"dtype": "float32"}
FEW = {"targets": "qv"}
"""Adapters, where it is another part of the model that moves."""
HOSTILE = {"streams": "adversarial"}
ONE = {"accumulation": 1}
"""Where each read of an operator is looked at, of a pass at a time."""
WATCHED = {"streams": "watched", **OFF}
HOST_INPUTS = {"offload_boundaries": True}
# From two slots to everything resident with all layers kept; inputs on the device or on the host.
WAYS = [
    Policy(),
    Policy(**WATCHED),
    Policy(**HOSTILE),
    Policy(**HOSTILE, **HOST_INPUTS),
    Policy(**HOSTILE, **OFF, slots=3),
    Policy(**HOSTILE, **OFF, **HOST_INPUTS, slots=4),
    Policy(**HOSTILE, **HOST_INPUTS, slots=4, keep_last=2),
    Policy(**HOSTILE, **OFF, slots=4, keep_last=4),
    Policy(**HOSTILE, block_size=2, keep_last=3),
]
SCALED = {"slots": 4, "keep_last": 4}


def cells() -> Iterator[Program]:
    yield program("mixtral", Policy(**WATCHED), **ONE)
    # The last two of its layers reuse the states of others.
    yield program("gemma4_shared_kv", Policy(**HOSTILE, block_size=2), num_layers=5)
    # Five layers, so that the last block is a short one; all of them in one block at the end.
    for size, slots in ((2, 3), (5, 3)):
        policy = Policy(**WATCHED, block_size=size, slots=slots)
        yield program(policy=policy, num_layers=5, **FEW, **ONE)
    yield program(policy=Policy(slots=3, keep_last=9), **FP32, **FEW)  # more than there are
    yield program(policy=Policy(**WATCHED, **HOST_INPUTS), autocast="each", **FP32)
    # Gemma 4 has an embedding for each layer in one matrix, and scales it; its other one is tied.
    embedding, head = {"stream_embedding": True}, {"stream_head": True}
    yield program("gemma4", Policy(**embedding, **WATCHED), **ONE, **FEW)
    yield program(policy=Policy(**embedding, **HOSTILE, **SCALED), **FEW)
    # The loss in slices, against a resident run with the same loss: the head resident or in host
    # memory, where Gemma's is the embedding too. Gemma 4 caps its logits, Mixtral adds to its loss.
    sliced = {"loss": "chunked"}
    yield program("mixtral", Policy(**sliced, **head, **HOSTILE), **FEW)
    yield program("gemma4", Policy(**sliced, **head, **WATCHED), **ONE, **FEW)
    yield program(policy=Policy(**sliced, **head, **HOSTILE, **SCALED), **FEW)
    yield program(policy=Policy(**sliced, **head, **embedding, **HOSTILE), **FP32, **FEW)
    yield program(policy=Policy(**sliced, **head), autocast="each", **FP32, **FEW)
    # The model's own loss, with its head in host memory, whole for as long as it is used.
    yield program(policy=Policy(**head), **FEW)


def name_of(value: Program | Policy) -> str:
    if isinstance(value, Policy):
        return str(value)
    num_forwards, autocast = len(value.steps[0].forwards), value.steps[0].autocast
    return f"{value.subject}, {num_forwards}, {autocast}, {value.policy}"


@pytest.mark.parametrize("cell", cells(), ids=name_of)
def test_a_cell_is_exact(cell: Program, judge: Judge) -> None:
    verdict = judge(cell)
    assert verdict.end == "equal", verdict


def evaluated(run: Program) -> Program:
    """With an evaluation before its first step, and a generation before its second."""
    # Some versions of transformers cannot weight losses of routers by the mask of a prompt.
    has_experts = run.subject.architecture in ("mixtral", "qwen3_moe")
    modes = ("eval", "inference" if has_experts else "generate")
    steps = zip(run.steps, modes, strict=True)
    return replace(run, steps=tuple(replace(s, before=(Evaluate(mode=m),)) for s, m in steps))


RUNS = [evaluated(program(name)) for name in tiny.ARCHITECTURES]
RUNS += [
    program(dropout=0.0, accumulation=1),
    program(**FP32, accumulation=4),
    program(**FP32, dropout=0.0),
]


@pytest.mark.cover("values")
@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_the_grid(run: Program, way: Policy, judge: Judge) -> None:
    test_a_cell_is_exact(replace(run, policy=way), judge)


# Layers that keep their graph.


@pytest.mark.parametrize(
    ("num_layers", "slots", "keep_last", "in_ring", "visits"),
    [
        # Three blocks pass through two slots; layers that are kept run once.
        (5, 4, 2, (3, 2), [0, 1, 2, 3, 4, 2, 1, 0]),
        # All on the device: nothing is loaded, and nothing recomputed.
        (4, 4, 4, (0, 0), [0, 1, 2, 3]),
    ],
)
def test_kept_blocks_leave_the_ring_and_run_once(
    num_layers: int, slots: int, keep_last: int, in_ring: tuple[int, int], visits: list[int]
) -> None:
    model = prepare_plain(build(num_layers=num_layers).train(), slots=slots, keep_last=keep_last)
    runtime = poros.runtime(model)
    assert all(map(is_streamed, layers_of(model)))
    assert (runtime.num_streamed_blocks, runtime.num_slots) == in_ring
    found: list[int] = []
    for index, layer in enumerate(layers_of(model)):
        layer.mlp.register_forward_hook(lambda *_, index=index: found.append(index))
    for _ in range(2):
        before = runtime.stats()["num_loads"]
        found.clear()
        model(**batches()[0]).loss.backward()
    assert runtime.stats()["num_loads"] - before == 2 * (in_ring[0] - in_ring[1])
    assert found == visits and runtime.self_check["status"] == "passed"


def test_more_slots_than_blocks_are_not_made_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="poros"):
        model = prepare_plain(build(), slots=9)
    assert "slots=9 is more than the 3 blocks; using 3" in caplog.text
    assert poros.runtime(model).num_slots == 3


# Negative controls of kept blocks. More: ``tests/faults/planted`` and ``test_self_check``.


def differences(prepare: Callable[[Model], object]) -> list[Difference]:
    model = build(num_layers=NUM_LAYERS)
    prepare(model)
    return compare_trajectories(resident_run(num_layers=NUM_LAYERS), run(model))


def test_control_a_damaged_kept_block_is_seen_by_the_self_check() -> None:
    def damage(model: Model) -> None:
        prepare_plain(model, keep_last=2)
        poros.runtime(model).ring.slot(3).buffer[77] ^= 1

    with pytest.raises(ParityError, match=r"layers\.3: block 3 on the device"):
        differences(damage)


def test_control_a_kept_block_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "acquire", lambda self, block, phase: self._ring.slot(block))
    # Copies are queued in order: a wait for a later block of the ring would hide it.
    prepare = AdversarialPrepare()
    with prepare.watching(), pytest.raises(SlotHazard, match="read without waiting"):
        differences(lambda model: prepare(model, keep_last=NUM_LAYERS))
