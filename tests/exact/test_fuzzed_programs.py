"""Programs that the fuzzer found, shrunk, and some new ones.

A row is what the fuzzer printed. Each ends in equal bits, or in an error of Poros before a wrong
update, or raises as the resident run does. Which of these is not said here: all are right, and the
tests of each feature say which.
"""

from collections import Counter
from typing import Any

import pytest

from tools.fuzz import campaign
from tools.fuzz.program import (
    Adapter,
    Compile,
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
    Setting,
    Step,
    Subject,
    Term,
    Train,
    UseTwice,
    features,
)

ALLOWED = ("equal", "refused", "raised")
NUM_DRAWN = 5

PENALIZED = (Forward(terms=(Term(),)),)


@pytest.fixture(scope="module")
def judge() -> campaign.Judge:
    return campaign.make_judge()


PROGRAMS: dict[str, Program] = {
    "a backward hook inside a layer that is checked": Program(
        before=(Hook(kind="backward_pre", part="mlp.down_proj"),)
    ),
    "a backward hook of all modules that comes before a step": Program(
        steps=(Step(before=(Hook(kind="global_backward_pre", layer=-1, part="norm"),)),)
    ),
    "a hook on a tensor inside a layer that is checked": Program(
        steps=(Step(before=(Hook(kind="tensor", part="self_attn"),)),)
    ),
    "an adapter trains no more before its layer is checked": Program(
        before=(Hook(part="self_attn"),), steps=(Step(between=(Train(),)),)
    ),
    "a hook comes as its layer is recorded": Program(
        subject=Subject(num_layers=2),
        policy=Policy(keep_last=2, recorded=True),
        steps=(
            *[Step()] * 3,
            Step(before=(Hook(does="add_tensor", layer=1, part="mlp"),)),
        ),
    ),
    "an adapter of a kept layer gets other data between forward and backward": Program(
        subject=Subject(num_layers=2),
        policy=Policy(keep_last=1),
        steps=(Step(between=(EditAdapter(how="assign", layer=1),)),),
    ),
    "a hook comes to the activation of a kept layer before its backward": Program(
        policy=Policy(keep_last=3),
        steps=(Step(between=(Hook(part="mlp.act_fn"),)),),
    ),
    "another precision of products between forward and backward, with the self-check": Program(
        steps=(Step(between=(Setting(value="medium"),)),)
    ),
    "plain": Program(),
    "hooks, edits and an evaluation": Program(
        before=(Hook(kind="parameter", does="scale", part="lora_A"), Hook(part="mlp", tag=1)),
        steps=(Step(), Step(before=(EditAdapter(), Evaluate(), EditBase("outside", "data")))),
    ),
    "a loss on an activation from inside a layer": Program(
        subject=Subject(targets="mlp"),
        before=(Hook(does="capture", layer=1, part="self_attn"),),
        steps=(Step(forwards=PENALIZED),),
    ),
    "a penalty on adapters in an autocast region": Program(
        steps=(Step(forwards=(Forward(terms=(Term(kind="gram"),)),), autocast="each"),)
    ),
    "a module used twice under autocast": Program(
        before=(UseTwice(part="mlp.down_proj", how="beside"),), steps=(Step(autocast="each"),)
    ),
    "a backward hook between forward and backward": Program(
        steps=(Step(between=(Hook(kind="backward", does="scale", part="mlp"),)),)
    ),
    "a global hook between forward and backward": Program(
        steps=(Step(between=(Hook(kind="global_forward", does="scale", part="mlp"),)),)
    ),
    "a dropout between forward and backward": Program(
        subject=Subject(dropout=0.1), steps=(Step(), Step(between=(SetDropout(),)))
    ),
    "attention between forward and backward": Program(
        steps=(Step(), Step(between=(SetAttention(),)))
    ),
    "a trainable tensor switched on in a hook": Program(
        before=(Hook(does="add_tensor", layer=1, part="mlp", since=1),), steps=(Step(), Step())
    ),
    "a trainable tensor below all adapters": Program(
        subject=Subject(lowest=1), before=(Hook(does="add_tensor", part="mlp"),)
    ),
    "a norm edited through .data": Program(steps=(Step(), Step(before=(EditBase(how="data"),)))),
    "a bank of vectors that two parts of a module share": Program(
        subject=Subject(quantize=False, kind="vblora", targets="one")
    ),
    "a loss on an activation from inside a layer, through torch.autograd.grad": Program(
        before=(Hook(does="capture", layer=1, part="mlp"),),
        steps=(Step(forwards=PENALIZED, backward="grad"),),
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
    "noise drawn in parameter hooks": Program(
        before=(Hook(kind="parameter", does="add_noise", layer=-1),)
    ),
    "projections of an input that is no leaf, in one autocast region": Program(
        subject=Subject(architecture="prophetnet", quantize=False, targets="mlp", lowest=1),
        steps=(Step(autocast="shared"),),
    ),
    "a loss on hidden states, the optimizer in backward": Program(
        steps=(Step(forwards=(Forward(), Forward(terms=(Term(kind="hidden", tag=2),)))),),
        optimizer="in_backward",
    ),
    "checkpointing, and training flags between forward and backward": Program(
        before=(Enable(what="checkpointing"),), steps=(Step(between=(Train(),)),)
    ),
    "checkpointing, and a setting between forward and backward": Program(
        steps=(
            Step(before=(Enable(what="checkpointing"),)),
            Step(between=(Setting(name="cpu_fp32", value="bf16"),)),
        )
    ),
    "two backwards, the optimizer in backward, a bank of vectors": Program(
        subject=Subject(kind="vblora"), steps=(Step(backward="twice"),), optimizer="in_backward"
    ),
    "noise drawn in a layer that a hook on a parameter leaves": Program(
        before=(
            Hook(kind="global_backward", does="add_noise", part="self_attn.o_proj"),
            Hook(kind="parameter", does="raise", tag=1),
        )
    ),
    "checkpointing, and a backward hook that fails": Program(
        before=(Enable(what="checkpointing"), Hook(kind="backward", does="raise"))
    ),
    "checkpointing, and no adapter that is trained": Program(
        before=(Enable(what="checkpointing"),),
        steps=(Step(before=(Adapter(verb="disable"),)),),
    ),
    "a hook that fails in a layer, the optimizer in backward": Program(
        before=(Hook(kind="tensor", does="raise", part="self_attn.q_proj.lora_B.default"),),
        optimizer="in_backward",
    ),
    "noise drawn in parameter hooks, DoRA in one autocast region": Program(
        subject=Subject(kind="dora"),
        before=(Hook(kind="parameter", does="add_noise"),),
        steps=(Step(autocast="shared"),),
    ),
    "noise drawn in hooks of two forwards in one autocast region": Program(
        before=(
            Hook(kind="parameter", does="add_noise", layer=-1),
            Hook("backward", "add_noise", tag=1),
        ),
        steps=(Step(forwards=(Forward(), Forward(batch=1)), autocast="shared"),),
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
    "a loss on a tensor from inside a compiled layer": Program(
        before=(Hook(does="capture", part="self_attn.o_proj"),),
        steps=(Step(before=(Compile(),), forwards=PENALIZED), Step(forwards=PENALIZED)),
    ),
    "micro-batches together, a bank of vectors in a module that layers share": Program(
        subject=Subject(kind="vblora"),
        steps=(Step(forwards=(Forward(), Forward()), backward="together"),),
    ),
    "DoRA in compiled layers, checked": Program(
        subject=Subject(kind="dora"), steps=(Step(before=(Compile(),)),)
    ),
}


SLOW = (*("DoRA in compiled layers, checked", "a loss on a tensor from inside a compiled layer"),)
"""Compiling takes up to half a minute."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PROGRAMS]
)
def test_a_program_that_was_found_once(name: str, judge: campaign.Judge) -> None:
    verdict = judge(PROGRAMS[name])
    assert verdict.end in ALLOWED, f"{verdict.kind}: {verdict.detail}"


def test_new_programs_end_equal_or_refused_in_time(judge: campaign.Judge) -> None:
    """Less than a minute; the same programs at every run. `python -m tools.fuzz` draws others."""
    tally = campaign.Tally(0)
    for program in campaign.draw(0, NUM_DRAWN, compiled=False):
        verdict = judge(program)
        tally.add(program, verdict, campaign.shrunk_failure(program, verdict, judge, tally))
    assert tally.num_programs == NUM_DRAWN
    report = [f"{each.kind}\n{each.detail}\n{each.program!r}" for each in tally.findings]
    assert tally.ends["failed"] == 0, "\n\n".join(report)
    # Mostly programs that run through: refusals alone would show nothing.
    assert tally.ends["equal"] > NUM_DRAWN / 3


def test_everything_in_the_grammar_is_drawn() -> None:
    seen: Counter[str] = Counter()
    for program in campaign.draw(0, 3000):
        seen.update(features(program))
    actions = {each.__name__ for each in _actions()}
    assert actions <= {name.split("@")[0] for name in seen if "@" in name}
    for action in (Hook, Evaluate, EditAdapter, Adapter, SetDropout):
        for moment in ("before", "between"):
            assert seen[f"{action.__name__}@{moment}"] >= 10, (action, moment)
    for name in REQUIRED:
        assert seen[name] >= 10, name


REQUIRED = (
    "Hook.does=capture",
    "Hook.does=add_tensor",
    "Hook.kind=global_backward",
    "Hook.since",
    "Term.kind=gram",
    "Step.autocast=shared",
    "Step.autocast=around",
    "Step.backward=twice",
    "Subject.kind=vblora",
    "Subject.architecture=prophetnet",
    "EditBase.how=numpy",
    "Policy.streams=watched",
    "Policy.recorded=True",
    "Policy.keep_last=3",
    "Policy.kernels=fused",
    "Subject.frozen=lora_A",
    "Subject.frozen=reference",
    "Subject.train_head=True",
    "EditAdapter.how=replace",
    "EditAdapter.what=reference",
    "Step.backward=together",
    "Program.optimizer=in_backward",
    "Program.optimizer=fused",
    "Program.optimizer=foreach",
    "Program.optimizer=sgd_fused",
    "several forwards",
)


def _actions() -> list[type[Any]]:
    from tools.fuzz.program import Action

    return Action.__subclasses__()
