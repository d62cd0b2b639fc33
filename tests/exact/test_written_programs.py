"""Programs in the fuzzer's language: those that it has found, shrunk, and what users often do.

What it found is a row of ``FOUND`` as it was printed. It ends in equal bits, or in an error of
Poros before a wrong update, or raises as the resident run does; which of these is not said: all are
right. A row of ``ROWS`` says its end. It runs once with the self-check and slots that are
poisoned, and several times with visits that are recorded on tapes.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest

from poros.replay.routing import Terms
from poros.replay.uses import Uses
from tests.replaced import Patch, Plant, in_place_of
from tests.support import same_bits
from tools.fuzz import campaign
from tools.fuzz.arm import Record, run_arm
from tools.fuzz.models import Models
from tools.fuzz.optimizers import weights
from tools.fuzz.program import (
    Action,
    Adapter,
    EditAdapter,
    EditBase,
    Enable,
    Evaluate,
    Forward,
    Hook,
    Policy,
    Program,
    SetAttention,
    SetDropout,
    SetMode,
    Setting,
    Step,
    Subject,
    Term,
    Tie,
    Train,
    Unhook,
    UseTwice,
)

ALLOWED = ("equal", "refused", "raised")
PENALIZED = (Forward(terms=(Term(),)),)
REFUSED = "RematerializationError"


FOUND: dict[str, Program] = {
    "an adapter trains no more before its layer is checked": Program(
        before=(Hook(part="self_attn"),), steps=(Step(between=(Train(),)),)
    ),
    "a hook comes as its layer is recorded": Program(
        subject=Subject(num_layers=2),
        policy=Policy(keep_last=2, recorded=True),
        steps=(*[Step()] * 3, Step(before=(Hook(does="add_tensor", layer=1, part="mlp"),))),
    ),
    "an adapter of a kept layer gets other data between forward and backward": Program(
        subject=Subject(num_layers=2),
        policy=Policy(keep_last=1),
        steps=(Step(between=(EditAdapter(how="assign", layer=1),)),),
    ),
    "another precision of products between forward and backward, with the self-check": Program(
        steps=(Step(between=(Setting(value="medium"),)),)
    ),
    "adapters are disabled before a group whose losses are computed in slices": Program(
        policy=Policy(self_check="off", loss="chunked", stream_head=True),
        steps=(
            *[Step(forwards=(Forward(), Forward(batch=1)), backward="together")] * 2,
            Step(
                before=(Adapter(verb="disable"),),
                forwards=(Forward(), Forward(batch=1)),
                backward="together",
            ),
        ),
    ),
    "a module used twice under autocast": Program(
        before=(UseTwice(part="mlp.down_proj", how="beside"),), steps=(Step(autocast="each"),)
    ),
    "a trainable tensor below all adapters": Program(
        subject=Subject(lowest=1), before=(Hook(does="add_tensor", part="mlp"),)
    ),
    "a bank of vectors that two parts of a module share": Program(
        subject=Subject(quantize=False, kind="vblora", targets="one")
    ),
    "a loss on an activation from inside a layer, the optimizer in backward": Program(
        before=(Hook(does="capture", part="mlp.down_proj"),),
        steps=(Step(forwards=PENALIZED),),
        optimizer="in_backward",
    ),
    "adapters frozen at the forward, trained again at its backward": Program(
        steps=(Step(before=(Train(which="lora_B"),), between=(Train(True, "lora_B"),)),)
    ),
    "a global hook that fails, under a budget": Program(
        subject=Subject(dropout=0.1),
        policy=Policy(vram_budget="2MiB"),
        before=(Hook("global_backward_pre", "raise", part="self_attn.o_proj"),),
        steps=(Step(), Step()),
    ),
    "checkpointing, and a setting between forward and backward": Program(
        steps=(
            Step(before=(Enable(what="checkpointing"),)),
            Step(between=(Setting(name="cpu_fp32", value="bf16"),)),
        )
    ),
    "checkpointing, and no adapter that is trained": Program(
        before=(Enable(what="checkpointing"),), steps=(Step(before=(Adapter(verb="disable"),)),)
    ),
    "a hook that fails in a layer, the optimizer in backward": Program(
        before=(Hook(kind="tensor", does="raise", part="self_attn.q_proj.lora_B.default"),),
        optimizer="in_backward",
    ),
    "the optimizer in backward, two forwards in one autocast region": Program(
        steps=(Step(forwards=(Forward(), Forward(batch=1)), autocast="shared"),),
        optimizer="in_backward",
    ),
    "as many operators, and another number of results": Program(
        subject=Subject(architecture="prophetnet", targets="mlp"),
        steps=(Step(forwards=(Forward(attentions=True),)), Step()),
    ),
    "noise in hooks on adapters and on an activation": Program(
        before=(Hook(kind="parameter", does="add_noise"),),
        steps=(
            Step(before=(Hook(kind="tensor", does="add_noise", part="self_attn.q_proj", tag=1),)),
        ),
    ),
    "checkpointing asked for, which has the embeddings require gradients": Program(
        subject=Subject(targets="mlp"),
        steps=(
            Step(
                before=(Hook(does="capture", part="self_attn.o_proj"), Enable("checkpointing")),
                forwards=PENALIZED,
            ),
        ),
    ),
    "micro-batches together, a bank of vectors in a module that layers share": Program(
        subject=Subject(kind="vblora"),
        steps=(Step(forwards=(Forward(), Forward()), backward="together"),),
    ),
    "hooks see a gradient that a loss on an activation behind them is part of": Program(
        before=(Hook(does="capture", part="mlp.down_proj", tag=1),),
        steps=(
            Step(
                before=(Hook(kind="global_backward_pre", part="mlp.act_fn"),),
                forwards=(Forward(terms=(Term(tag=1),)),),
            ),
        ),
    ),
    "a hook on a tensor that such a loss is behind": Program(
        before=(
            Hook(does="capture", layer=1, part="self_attn"),
            Hook(kind="tensor", layer=1, part="self_attn.q_proj.lora_B.default", tag=1),
        ),
        steps=(Step(forwards=PENALIZED),),
    ),
    "a hook of all layers that edits what the layer before has given": Program(
        before=(Hook(kind="global_forward_pre", does="inplace"),)
    ),
}


class Row(NamedTuple):
    program: Program
    end: str = "equal"
    """Or the name of an error of Poros."""


def row(*before: Action, end: str = "equal", subject: Subject = Subject(), **step: Any) -> Row:  # noqa: B008
    """``before``: once, before it is prepared; ``step``: of each step."""
    return Row(Program(subject, before=before, steps=(Step(**step),)), end)


def forward(*terms: Term, **options: Any) -> tuple[Forward, ...]:
    return (Forward(terms=terms, **options),)


TWO = (Forward(), Forward(batch=1))
DENSE, DROPOUT = Subject(quantize=False), Subject(dropout=0.2)
FEW, FEW_DROPOUT = Subject(targets="qv"), Subject(targets="qv", dropout=0.2)
"""Where it does not matter what is adapted: half the time."""
MLP = Subject(targets="mlp")
"""Where hooks are on feed-forwards."""
KINDS = ("forward", "forward_pre", "backward", "backward_pre")
HOOKS = (*KINDS, *(f"global_{kind}" for kind in KINDS))
NOISE = (
    Hook("parameter", "add_noise", layer=-1, tag=10),
    *(Hook("backward_pre", "add_noise", layer=each, tag=11 + each) for each in range(3)),
)
"""Drawn in the order in which gradients arrive, of all that is trained and at each layer."""


def backwards() -> Iterator[tuple[str, Row]]:
    for how in ("in_turn", "reverse", "sum", "twice", "grad"):
        yield f"backwards: {how}", row(*NOISE, forwards=TWO, backward=how, subject=DROPOUT)
    yield "an evaluation in between", row(between=(Evaluate(),), subject=DROPOUT)
    for name in ("mkldnn", "flash"):
        yield f"{name} off in between", row(between=(Setting(name, "off"),))
    yield "use_cache", row(forwards=forward(cache=True))
    adapter = "mlp.up_proj.lora_B"
    for kind, part in (("forward", "mlp"), ("backward", "mlp"), ("parameter", adapter)):
        hook = Hook(kind, "raise", layer=1, part=part)
        yield f"an error in {kind}, and a step behind it", row(hook, subject=DROPOUT)


def losses() -> Iterator[tuple[str, Row]]:
    """A state that feeds the next layer and a loss has a gradient of several terms."""
    for states in ((3,), (0, 1, 2, 3)):
        terms = [Term("hidden", each) for each in states]
        yield f"losses on states {states}", row(*NOISE, forwards=forward(*terms))
    given = row(Hook("forward", "capture", layer=1), forwards=PENALIZED, subject=DROPOUT)
    yield "a loss on what a layer gives", given
    for name in ("gemma4_shared_kv", "mixtral"):
        states = forward(Term("hidden", 2))
        yield f"a state of {name}", row(forwards=states, subject=Subject(name))
    yield "given embeddings", row(forwards=forward(inputs="embeds_grad"))
    yield "a penalty on embeddings", row(forwards=forward(Term("embeds"), inputs="embeds_grad"))
    frozen = row(Train(False, "lora"), SetMode(), forwards=forward(inputs="embeds_grad"))
    program = replace(frozen.program, optimizer="in_backward")  # which needs no parameters
    yield "no trainable adapter", Row(program)
    paths = [f"self_attn.{each}_proj" for each in "qkvo"]
    paths += [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    for place, path in enumerate((*paths, "self_attn", "mlp", "input_layernorm")):
        capture = Hook("forward", "capture", layer=1, part=path)
        subject = Subject(quantize=place % 2 == 0, targets="qv")
        autocast = ("off", "each")[place // 2 % 2]
        inner = row(capture, forwards=PENALIZED, autocast=autocast, subject=subject)
        yield f"a loss on {path}", inner


def surroundings() -> Iterator[tuple[str, Row]]:
    """What surrounds a forward is replayed at its recomputation."""
    for name, between in {
        "eval": SetMode(),
        "train": SetMode(True),
        "eval of a layer": SetMode(layer=1),
        "a parameter frozen": Train(False, "lora_A", 0),
    }.items():
        # An evaluation in whatever mode each module is in by then.
        after = (Evaluate(mode="train"),)
        yield f"{name} in between", row(between=(between,), after=after, subject=FEW_DROPOUT)
    modes: Any = {"before": (SetMode(),), "between": (SetMode(True),)}
    yield "train behind a forward of eval", row(subject=FEW_DROPOUT, **modes)
    yield "inputs that require gradients", row(Enable("input_grads"), subject=FEW)
    yield "inputs that require them later", row(before=(Enable("input_grads"),), subject=FEW)
    yield "much dropout", row(subject=Subject(targets="qv", dropout=0.5))
    for name, between in {
        "rate of dropout": SetDropout(layer=1),
        "kind of attention": SetAttention(),
        "none of the adapters": Adapter("disable"),
        "scaled adapters": Adapter("scale"),
    }.items():
        yield f"{name} in between", row(between=(between,), subject=FEW_DROPOUT, end=REFUSED)
    merged = row(between=(Adapter("merge"),), subject=FEW, end="PreparedModelError")
    yield "adapters merged in between", merged
    yield "saved on the host", row(context="save_on_cpu", end="UnsupportedModelError")


def adapters() -> Iterator[tuple[str, Row]]:
    for name in ("gemma3", "gemma4_shared_kv", "mixtral"):
        yield f"when gradients arrive in {name}", row(*NOISE, subject=Subject(name))
    bank = Subject(kind="vblora", quantize=False)
    yield "when gradients arrive at a bank of vectors", row(*NOISE, subject=bank)
    frozen = Train(False, "lora_A", 1)
    yield "adapters frozen by hand", row(frozen, subject=DROPOUT)
    subjects = [Subject(targets=each, dropout=0.1) for each in ("attention", "one")]
    subjects += [Subject(kind=each) for each in ("dora", "lora_bias")]
    subjects += [Subject(lowest=1), Subject(lowest=2, quantize=False), Subject(train_head=True)]
    for subject in subjects:
        yield f"{subject}", row(*NOISE, subject=subject)
    for how, autocast in (("within", "each"), ("across", "off"), ("across", "shared")):
        tied = row(Tie(how), forwards=TWO, autocast=autocast)
        yield f"one adapter for two {how} layers, {autocast}", tied
    for autocast in ("off", "each"):
        again = row(UseTwice(1, "mlp.up_proj", "beside"), autocast=autocast, subject=DENSE)
        yield f"called twice, {autocast}", again


def regions() -> Iterator[tuple[str, Row]]:
    """Autocast, whose one cast of an adapter decides when its gradient arrives, and meets others.

    Of 4-bit weights in full precision tapes give other bits.
    """
    ways: dict[str, dict[str, Any]] = {
        "a region": {},
        "several": {"forwards": (*TWO, Forward())},
        "twice": {"backward": "twice"},
        "by grad": {"backward": "grad"},
        "in evaluation mode": {"before": (SetMode(),), "after": (SetMode(True),)},
        "a penalty": {"forwards": forward(Term("gram"))},
        "a penalty in full precision": {"forwards": forward(Term("norm"))},
        "a penalty outside": {"forwards": forward(Term("gram", outside=True))},
        "backwards in one region": {"forwards": TWO, "autocast": "shared"},
        "forwards in one region": {"forwards": TWO, "autocast": "shared", "backward": "sum"},
        "forwards in two regions": {"forwards": TWO, "backward": "sum"},
        "backward inside": {"autocast": "around"},
    }
    subjects = [replace(DENSE, kind=kind) for kind in ("lora", "lora_bias", "dora")]
    subjects.append(Subject(dtype="bfloat16", dropout=0.1))
    for way, (place, subject) in product(ways, enumerate(subjects)):
        if place == 0 or way == "a region":
            step = {"autocast": "each", **ways[way]}
            yield f"{way}, {subject}", row(*NOISE, subject=subject, **step)


def hooks() -> Iterator[tuple[str, Row]]:
    for place, kind in enumerate(HOOKS):
        hook = Hook(kind, "scale", layer=1, part="mlp")
        yield f"a hook: {kind}", row(hook, subject=MLP)
        if place % 2 == 0:
            yield f"a hook added: {kind}", row(between=(hook,), end=REFUSED, subject=MLP)
        else:
            yield (
                f"a hook removed: {kind}",
                row(hook, between=(Unhook(),), end=REFUSED, subject=MLP),
            )
    parts = ("self_attn", "self_attn.q_proj", "input_layernorm", "mlp.down_proj.lora_A.default")
    for part, kind in zip(parts, cycle(KINDS[2:]), strict=False):
        yield f"a hook: {kind} of {part}", row(Hook(kind, "scale", layer=1, part=part))
    for name, hook in {
        "noise in backward": Hook("backward", "add_noise", layer=1, part="mlp"),
        "noise in forward": Hook("forward", "add_noise", layer=1, part="input_layernorm"),
        "a tensor that is trained": Hook("forward", "add_tensor", layer=1, part="mlp"),
        "of a layer": Hook("forward", "scale", layer=1),
        "of the gradient of a layer": Hook("backward_pre", "scale", layer=1),
        "on parameters": Hook("parameter", "scale", layer=-1),
        "behind the accumulation": Hook("post_accumulate", "scale", layer=-1),
        # Which would be another if one ran twice.
        "sum on parameters": Hook("parameter", "sum", layer=-1),
        "sum behind the accumulation": Hook("post_accumulate", "sum", layer=-1),
    }.items():
        yield f"a hook: {name}", row(hook)
    for since, layer, kind in ((0, 0, "global_forward"), (1, 0, "forward"), (1, 2, "forward")):
        hook = Hook(kind, "add_tensor", layer=layer, part="self_attn", since=since)
        program = Program(Subject(lowest=1, targets="mlp"), before=(hook,), steps=(Step(), Step()))
        yield f"a tensor that is trained from step {since} on, {kind} of {layer}", Row(program)
    notes = [Hook(kind, layer=1, part="mlp", tag=tag) for tag, kind in enumerate(KINDS)]
    yield "notes of hooks and older forwards", row(*notes, forwards=TWO, backward="reverse")


def together() -> Iterator[tuple[str, Row]]:
    """Micro-batches that go through the blocks together, or would without what is done."""
    three = {"forwards": (*TWO, Forward(batch=2)), "backward": "together"}
    for name, action in {
        "a hook behind a layer": Hook("forward", "scale", layer=1),
        "a hook before a layer": Hook("forward_pre", "scale"),
        "noise in the backwards of layers": Hook("backward", "add_noise", layer=1, part="mlp"),
        "hooks on parameters": Hook("parameter", "scale", layer=-1),
        "hooks behind the accumulation": Hook("post_accumulate", "scale", layer=-1),
        "tied adapters": Tie("across"),
        "a function for a forward": UseTwice(),
    }.items():
        yield f"together: {name}", row(action, subject=FEW_DROPOUT, **three)


def exchanges() -> Iterator[tuple[str, Row]]:
    """Frozen adapters that act: exchanged between steps, or edited between forward and backward."""
    hows = ("inplace", "data", "numpy", "assign", "cast", "replace")
    for how, frozen in zip(hows, cycle(("reference", "lora_A")), strict=False):
        edit, subject = EditAdapter(frozen, how), replace(FEW, frozen=frozen)
        if how != "cast":  # which raises in both
            yield f"{frozen}: {how}", row(before=(edit,), subject=subject)
        yield f"{frozen}: {how} in between", row(between=(edit,), subject=subject, end=REFUSED)


def edits() -> Iterator[tuple[str, Row]]:
    """Of tensors of the base that stay on the device: before the first step, later, in between."""
    hows = ("inplace", "data", "numpy", "assign", "copy", "replace")
    policies = (Policy(), Policy(block_size=2), Policy(slots=3, keep_last=1))
    for place, (how, what) in enumerate(zip(hows, cycle(("norm", "bias")), strict=False)):
        before = (EditBase(what, how, layer=place % 3), Evaluate())
        steps = (Step(before=before), Step(), Step(before=before))
        yield f"{what}: {how}", Row(Program(FEW, policies[place % 3], steps=steps))
        if how not in ("data", "numpy"):  # of which nobody tells
            between = (EditBase(what, how, layer=1),)
            yield f"{what}: {how} in between", row(between=between, subject=FEW, end=REFUSED)


def later() -> Iterator[tuple[str, Row]]:
    """Something is otherwise from the fourth step on; by then visits are replayed."""
    for place, (name, change) in enumerate(
        {
            "rate of dropout": SetDropout(p=0.4),
            "scaled adapters": Adapter("scale"),
            "adapters with other data": EditAdapter("lora", "assign"),
            "edited norms": EditBase("norm", "data", layer=1),
            "a hook": Hook("forward", "scale", layer=1, part="mlp"),
            "a generation": Evaluate(mode="generate"),
            "an inference": Evaluate(mode="inference"),
        }.items()
    ):
        policy = Policy(recorded=True, keep_last=2 * (place % 2))
        steps = (*[Step()] * 3, Step(before=(change,)), Step())
        yield f"{name} later", Row(Program(FEW_DROPOUT, policy, steps=steps))


def in_turn() -> Iterator[tuple[str, Row]]:
    """Steps of two kinds in turn, whose visits are replayed: of kept layers, or recomputed ones."""
    later, reverse = (Step(forwards=TWO, backward=how) for how in ("in_turn", "reverse"))
    references = [Step(before=(Evaluate(mode=mode),)) for mode in ("train", "disabled")]
    kinds = {
        "one loss, and two whose backwards come later": (Step(), later, reverse),
        "a backward, and two of one graph": (Step(), Step(backward="twice")),
        "backwards inside and outside of a region": (
            *(Step(autocast="around"), Step(autocast="each")),
        ),
        "passes without gradients, with adapters and without": references,
    }
    subject = replace(FEW, dtype="bfloat16", num_layers=2, dropout=0.1)
    for keep_last, (name, steps) in product((0, 2), kinds.items()):
        policy = Policy(recorded=True, keep_last=keep_last)
        yield f"{name}, {keep_last} kept", Row(Program(subject, policy, steps=(*steps,) * 4))


def managed() -> Iterator[tuple[str, Row]]:
    """What is done with several adapters, step by step; evaluated and saved behind it."""
    add, load, delete = Adapter(), Adapter("load"), Adapter("delete")
    both, default, second = Adapter("both"), Adapter("set", "default"), Adapter("set")
    off, on, look, save = Adapter("disable"), Adapter("enable"), Evaluate(), Adapter("save")
    cast = EditAdapter("lora", "cast")
    scenarios: dict[str, tuple[tuple[Action, ...], ...]] = {
        "one, then another": ((), (add,), (default, look), (second, save)),
        "the active one deleted": ((add,), (delete, look), ()),
        "another deleted": ((add, default), (), (second, default, delete)),
        "the same name again": ((add,), (delete, add), (look,)),
        "two at once": ((add, both), (look,), (second,)),
        "all off and on": ((), (off, look, on, look)),
        "loaded": ((), (load,), (default,), (second, look)),
        "cast": ((cast,), (look,)),
        "cast later": ((), (cast, look), (save,)),
        "generated in between": ((), (Evaluate(mode="generate"),), (Evaluate(mode="sample"),)),
        "no gradients in between": ((), (Evaluate(mode="inference"),), (Evaluate(mode="train"),)),
        "the base in between": ((), (Evaluate(mode="disabled"),)),
    }
    # An optimizer has no states of adapters of another dtype.
    for place, (name, parts) in enumerate(scenarios.items()):
        kind = ("lora", "dora", "rslora", "lora_bias")[place % 4]
        dtype = ("bfloat16", "float32")[place % 2]
        subject = replace(FEW, kind=kind, dtype=dtype, dropout=0.1, quantize=place % 3 > 0)
        policy = Policy(block_size=1 + place % 2)
        steps = tuple(
            Step(before=part, autocast="each" if cast in part else "off") for part in parts
        )
        yield name, Row(Program(subject, policy, steps=steps, optimizer="sgd"))
    for name in ("gemma3", "gemma4_shared_kv"):
        generated = row(before=(Evaluate(mode="generate"),), subject=Subject(name))
        yield f"generated by {name}", generated


def heads() -> Iterator[tuple[str, Row]]:
    """With losses in slices, of a resident run too. Gemma has one matrix for both ends; 2 caps."""
    evaluated = (Evaluate(), Evaluate(mode="generate"))
    forwards = forward(Term("logits"), Term("hidden", 1))
    grid = product(("qwen2", "gemma3", "gemma2"), ("chunked", "reference"))
    for place, (name, loss) in enumerate(grid):
        policy = Policy(stream_head=True, stream_embedding=True, loss=loss)
        autocast = ("off", "each")[(place + place // 2) % 2]
        step = Step(before=evaluated, forwards=forwards, autocast=autocast)
        subject = replace(FEW, architecture=name, train_head=name == "qwen2", dropout=0.1)
        steps = (step, Step(forwards=TWO, backward="together"))
        yield f"{loss}, {subject}", Row(Program(subject, policy, steps=steps))


def crossed() -> Iterator[tuple[str, Row]]:
    """Kinds of adapters, grouping, residency, exchanges and autocast, and each optimizer."""
    adapters = (("lora", ""), ("dora", ""), ("lora", "lora_A"), ("lora", "reference"))
    hows = ("inplace", "data", "numpy", "assign", "replace")
    for place, (optimizer, how) in enumerate(zip(cycle(weights()), hows * 2, strict=False)):
        (kind, frozen), keep_last = adapters[place % 4], (0, 3)[place // 5]
        backward = ("each", "together")[place // 3 % 2]
        autocast = ("off", "each")[place // 2 % 2]
        step = Step(forwards=TWO, backward=backward, autocast=autocast)
        exchange = replace(step, before=(Evaluate(), EditAdapter(frozen or "lora_B", how)))
        subject = replace(FEW, kind=kind, frozen=frozen, dropout=0.1)
        policy = Policy(keep_last=keep_last)
        program = Program(subject, policy, steps=(step, exchange, step), optimizer=optimizer)
        yield f"{optimizer}: {kind}, {frozen}, {how}, {backward}, {keep_last}", Row(program)


TABLES = (backwards, losses, surroundings, adapters, regions, hooks, together, exchanges, edits)
TABLES += (later, in_turn, managed, heads, crossed)
ROWS = {name: each for table in TABLES for name, each in table()}


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_was_found_once(name: str, judge: campaign.Judge) -> None:
    verdict = judge(FOUND[name])
    assert verdict.end in ALLOWED, f"{verdict.kind}: {verdict.detail}"


POISONED: dict[str, Any] = {"streams": "adversarial"}
WAYS = {
    "checked": (POISONED, 1),
    "replayed": ({**POISONED, "self_check": "off", "recorded": True}, 3),
}
"""Fields of the policy, and how often the steps run."""


@pytest.mark.cover("values")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROWS)
def test_a_program(name: str, way: str, judge: campaign.Judge) -> None:
    (program, end), (policy, num_times) = ROWS[name], WAYS[way]
    policy = replace(program.policy, **policy)
    if len(program.steps) > 1:
        num_times = 1
    elif len(program.steps[0].forwards) > 1:
        num_times = min(num_times, 2)
    verdict = judge(replace(program, policy=policy, steps=program.steps * num_times))
    # "raised" where a resident run raises, too.
    assert verdict.end in (("equal",) if end == "equal" else ("refused", "raised")), verdict
    assert end == "equal" or verdict.detail.startswith(end), verdict


# Controls: faults of the runtime that have to show, with the self-check off.


def no_shared_casts(patch: Patch) -> None:
    """What meets at a cast meets at the parameter, in full precision."""
    patch.setattr("poros.replay.routing.cached_cast", lambda *_: None)


@in_place_of(Uses, "__init__")
def as_they_are_used(genuine: Any, self: Uses, sources: Any, order: Any, number: int) -> None:
    """Gradients arrive in the order in which the graph was walked."""
    genuine(self, sources, tuple(range(len(sources))), number)


@in_place_of(Terms, "take")
def in_one_sum(genuine: Any, self: Terms) -> Any:
    """The terms of an input's gradient are added before they are handed on."""
    first, *others = genuine(self)
    return [sum(others, first), *[None] * len(others)]


DORA = replace(DENSE, kind="dora")


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (no_shared_casts, f"backwards in one region, {DENSE}"),
        (no_shared_casts, f"a penalty, {DENSE}"),
        (as_they_are_used, f"a region, {DORA}"),
        (in_one_sum, "a loss on what a layer gives"),
    ],
)
def test_control_a_fault_differs(
    fault: Plant, name: str, judge: campaign.Judge, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    program, (policy, num_times) = ROWS[name].program, WAYS["replayed"]
    policy = replace(program.policy, **policy)
    verdict = judge(replace(program, policy=policy, steps=program.steps * num_times))
    assert verdict.end == "failed" and verdict.kind.startswith("silent difference"), verdict


def resident(program: Program, models: Models) -> Record:
    return run_arm(program, models.make(program.subject), None)


def test_control_hooks_change_what_is_computed() -> None:
    models = Models()
    plain = resident(Program(MLP), models).entries
    for kind in HOOKS:
        found = resident(ROWS[f"a hook: {kind}"].program, models).entries
        assert any(not same_bits(one[1], other[1]) for one, other in zip(plain, found, strict=True))


@pytest.mark.slow
def test_control_what_rows_do_can_be_done_in_their_models() -> None:
    models = Models()
    for name, (program, _) in ROWS.items():
        assert not resident(program, models).done, name
