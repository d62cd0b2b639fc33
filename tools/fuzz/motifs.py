"""What people do together around a training step, each drawn into a draft.

The weights are a distribution and nothing else; what has been drawn is counted by the run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tools.fuzz.draft import PARTS, Draft
from tools.fuzz.program import (
    Adapter,
    EditAdapter,
    EditBase,
    EditGradients,
    Enable,
    Evaluate,
    Forward,
    Hook,
    Probe,
    Random,
    SetAttention,
    SetDropout,
    SetMode,
    Setting,
    Term,
    Tie,
    Train,
    Unhook,
    UseTwice,
)

_FIRST_JOINED = 6
"""The step from which on visits of micro-batches are joined, if all steps are alike."""
_OUTSIDE = ("", "model", "embed_tokens", "norm", "lm_head")

_FORWARD_DOES = {
    "read": 3,
    "scale": 3,
    "capture": 2,
    "add_tensor": 3,
    "add_noise": 2,
    "detach": 1,
    "inplace": 1,
    "raise": 1,
}
_BACKWARD_DOES = {"scale": 3, "read": 2, "add_noise": 1, "raise": 1}
_PARAMETER_DOES = {"read": 1, "scale": 2, "sum": 3, "add_noise": 3, "raise": 1}
_DOES = {
    "forward": _FORWARD_DOES,
    "forward_pre": _FORWARD_DOES,
    "backward": _BACKWARD_DOES,
    "backward_pre": _BACKWARD_DOES,
    "tensor": _BACKWARD_DOES,
    "parameter": _PARAMETER_DOES,
    "post_accumulate": _PARAMETER_DOES,
}
_KINDS = {
    "forward": 6,
    "forward_pre": 3,
    "backward": 3,
    "backward_pre": 2,
    "tensor": 2,
    "parameter": 4,
    "post_accumulate": 2,
    "global_forward": 1,
    "global_forward_pre": 1,
    "global_backward": 1,
    "global_backward_pre": 1,
}


def _hook(draft: Draft) -> None:
    dice = draft.dice
    kind = dice.weighted(_KINDS)
    is_outside = dice.chance(20)
    part = dice.choice(_OUTSIDE) if is_outside else draft.part()
    layer = -1 if is_outside else draft.layer()
    if kind in ("parameter", "post_accumulate"):
        layer, part = dice.choice((-1, draft.layer())), dice.choice(("", "lora_A", "lora_B"))
    hook = Hook(
        kind=kind,
        does=dice.weighted(_DOES[kind.removeprefix("global_")]),
        layer=layer,
        part=part,
        tag=draft.tag(),
        since=dice.weighted({0: 3, 1: 1}),
        each_step=dice.chance(15),
        first=dice.chance(10),
    )
    draft.place(hook)
    if hook.does == "capture":
        draft.term(Term("captured", tag=hook.tag), everywhere=dice.chance(70))
    if dice.chance(20):
        draft.place(Unhook(hook.tag), moments={"before": 1, "between": 1})


def _penalty_inside(draft: Draft) -> None:
    """A loss on an activation taken from inside a layer."""
    dice = draft.dice
    hook = Hook(
        kind=dice.weighted({"forward": 3, "forward_pre": 1}),
        does="capture",
        layer=draft.layer(),
        part=draft.part(),
        tag=draft.tag(),
        since=dice.weighted({0: 3, 1: 1}),
        each_step=dice.chance(15),
    )
    draft.place(hook, moments={"before": 2, "start": 2})
    draft.term(Term("captured", tag=hook.tag), everywhere=dice.chance(70))


def _penalty_on_weights(draft: Draft) -> None:
    dice = draft.dice
    kind = dice.weighted({"gram": 3, "norm": 2, "product": 2})
    which = "lora_A" if kind != "norm" else dice.choice(("lora_A", "lora_B", "vblora"))
    draft.term(Term(kind, which=which), everywhere=dice.chance(50))
    if dice.chance(50):
        _autocast(draft)


def _penalty_outside(draft: Draft) -> None:
    kind = draft.dice.weighted({"hidden": 3, "logits": 2, "embeds": 1})
    draft.term(Term(kind, tag=draft.dice.below(4)), everywhere=draft.dice.chance(50))
    if kind == "embeds":
        _inputs(draft)


def _inputs(draft: Draft) -> None:
    dice = draft.dice
    step = draft.step()
    kind = dice.weighted({"embeds_grad": 3, "embeds": 1})
    step["forwards"] = [replace(forward, inputs=kind) for forward in step["forwards"]]


def _autocast(draft: Draft) -> None:
    dice = draft.dice
    kind = dice.weighted({"each": 4, "around": 2, "shared": 2})
    for step in draft.steps if dice.chance(70) else [draft.step()]:
        step["autocast"] = kind


def _several_forwards(draft: Draft) -> None:
    dice = draft.dice
    step = draft.step()
    first = step["forwards"][0]
    step["forwards"] = [
        *step["forwards"],
        *(
            replace(first, batch=1 + index, length=dice.choice((6, 4)))
            for index in range(1 + dice.below(2))
        ),
    ]
    step["backward"] = dice.weighted({"each": 4, "sum": 4, "in_turn": 2, "reverse": 2})


def _backward(draft: Draft) -> None:
    draft.step()["backward"] = draft.dice.weighted(
        {"twice": 4, "sum": 2, "grad": 3, "none": 3, "again": 1, "create_graph": 1}
    )


def _adapters(draft: Draft) -> None:
    dice = draft.dice
    verb = dice.weighted(
        {"add": 5, "load": 3, "disable": 2, "scale": 2, "save": 1, "merge": 1, "unmerge": 1}
    )
    between = {"before": 4, "start": 1, "between": 1}
    draft.place(Adapter(verb), moments=between)
    if verb in ("add", "load"):
        then = dice.weighted({"set": 3, "both": 2, "delete": 2})
        name = "second" if then != "set" else dice.choice(("default", "second"))
        draft.place(Adapter(then, name), moments=between)
    elif verb == "disable":
        draft.place(Adapter("enable"), moments=between)


def _freeze(draft: Draft) -> None:
    dice = draft.dice
    layer = dice.choice((None, draft.layer()))
    which = dice.choice(("lora_A", "lora_B", "lora", "q_proj", "mlp"))
    draft.place(Train(False, which, layer))
    if dice.chance(50):
        draft.place(Train(True, which, layer), moments={"before": 4, "between": 1})


def _evaluate(draft: Draft) -> None:
    dice = draft.dice
    mode = dice.weighted(
        {"eval": 5, "generate": 2, "sample": 1, "disabled": 2, "train": 2, "inference": 1}
    )
    draft.place(
        Evaluate(dice.choice((6, 5, 9)), mode), moments={"before": 4, "between": 2, "start": 1}
    )


def _fails(draft: Draft) -> None:
    """An exception that the program catches, with training going on."""
    dice = draft.dice
    if dice.chance(35):
        draft.term(Term("raise"), everywhere=False)
        return
    kind = dice.weighted({"forward": 3, "backward": 2, "parameter": 2, "tensor": 1})
    part = "lora_A" if kind == "parameter" else draft.part()
    since = dice.below(draft.num_steps)
    draft.place(
        Hook(kind, "raise", draft.layer(), part, draft.tag(), since),
        moments={"before": 1, "start": 1},
    )


def _weights(draft: Draft) -> None:
    dice = draft.dice
    what = dice.choice(("lora_A", "lora_B", "lora"))
    how = dice.weighted(
        {"inplace": 4, "data": 3, "numpy": 1, "assign": 2, "cast": 1, "copy": 1, "swap": 3}
    )
    # Between a forward and its backward only what PyTorch counts.
    moments = {"before": 4, "after": 2, "start": 1}
    if how in ("inplace", "copy"):
        moments["between"] = 2
    if draft.subject.frozen and dice.chance(70):
        what = draft.subject.frozen
        how = dice.choice(("inplace", "data", "numpy", "assign", "cast", "copy", "replace"))
        moments = {"before": 2, "between": 3, "after": 1}
    draft.ema = draft.ema or how == "swap"
    draft.place(EditAdapter(what, how, dice.choice((None, draft.layer()))), moments=moments)


def _base(draft: Draft) -> None:
    dice = draft.dice
    what = dice.weighted({"norm": 5, "bias": 3, "outside": 2, "matrix": 1, "buffer": 1})
    how = dice.weighted({"inplace": 3, "data": 4, "numpy": 2, "assign": 1, "copy": 1, "replace": 1})
    if what == "matrix":
        how = "inplace"
    layer = draft.layer()
    draft.place(EditBase(what, how, layer), moments={"before": 5, "after": 1, "start": 1})


def _gradients(draft: Draft) -> None:
    kinds = {"clip": 5, "noise": 2, "clip_value": 1, "penalty": 2, "zero": 1, "none": 1}
    how = draft.dice.weighted(kinds)
    draft.place(EditGradients(how), moments={"after": 1})


def _optimizer(draft: Draft) -> None:
    draft.optimizer = "in_backward"


def _together(draft: Draft) -> None:
    """Micro-batches together, in every step."""
    for step in draft.steps[draft.first :]:
        first = step["forwards"][0]
        step["forwards"] = [replace(first, batch=index) for index in range(2 + draft.dice.below(2))]
        step["backward"] = "together"


def rows(draft: Draft) -> None:
    """Micro-batches of one form together in every step, whose layers draw nothing."""
    dice = draft.dice
    draft.subject = replace(draft.subject, dropout=0.0)
    if draft.subject.kind == "vblora":  # which is not recorded
        draft.subject = replace(draft.subject, kind="lora", targets="all")
    draft.policy = replace(
        draft.policy,
        recorded=True,
        keep_last=dice.weighted({0: 3, 1: 1}),
        offload_boundaries=False,
        vram_budget="",
        share_dense=dice.chance(30),
        streams=dice.choice(("plain", "adversarial")),
    )
    draft.first = dice.weighted({_FIRST_JOINED: 4, 0: 1})
    usual = Forward(
        length=dice.choice((6, 5)),
        inputs=dice.weighted({"ids": 8, "embeds": 1, "embeds_grad": 1}),
        mask=dice.weighted({"full": 3, "own": 3, "packed": 1}),
    )
    number, others = 4 + dice.below(2), dice.chance(30)
    for index, step in enumerate(draft.steps):
        step["forwards"] = [replace(usual, batch=index + place) for place in range(number)]
        step["backward"], step["update"] = "together", not dice.chance(10)
        if index < draft.first:
            continue
        place = dice.below(number)
        if others and dice.chance(50):
            step["forwards"][place] = replace(usual, length=4)
        elif dice.chance(10):
            step["forwards"][place] = replace(step["forwards"][place], reads=True)
    if dice.chance(25):
        # On tapes, autocast gives 4-bit weights of float32 other bits.
        dtype = "bfloat16" if draft.subject.quantize else draft.subject.dtype
        draft.subject = replace(draft.subject, dtype=dtype)
        for step in draft.steps:
            step["autocast"] = "each"


def _settings(draft: Draft) -> None:
    dice = draft.dice
    action = dice.weighted(
        {
            SetDropout(0.3): 4,
            SetDropout(0.0): 1,
            SetAttention("eager"): 3,
            SetMode(False): 1,
            SetMode(False, 1): 2,
            Setting("matmul_precision", "high"): 1,
            Setting("matmul_precision", "medium"): 1,
            Setting("allow_tf32", "on"): 1,
            Setting("cuda_fp32", "tf32"): 1,
            Setting("cpu_fp32", "bf16"): 1,
            Setting("all_fp32", "tf32"): 1,
            Setting("flash", "off"): 1,
            Random("draw"): 1,
            Random("seed"): 1,
        }
    )
    if isinstance(action, SetDropout) and draft.subject.dropout == 0.0:
        draft.subject = replace(draft.subject, dropout=0.1)
    draft.place(action, moments={"before": 3, "between": 3, "start": 1})


def _twice(draft: Draft) -> None:
    dice = draft.dice
    parts = [name for name in PARTS[draft.subject.architecture] if name]
    # Attention takes more than a hidden state, and gives more than one back.
    part = dice.choice([name for name in parts if name != "self_attn"])
    draft.start.append(UseTwice(draft.layer(), part, dice.choice(("chain", "beside"))))
    if dice.chance(60):
        _autocast(draft)


def _tie(draft: Draft) -> None:
    draft.start.append(Tie(draft.dice.choice(("within", "across"))))


def _enable(draft: Draft) -> None:
    draft.place(
        Enable(draft.dice.choice(("input_grads", "checkpointing"))),
        moments={"start": 3, "before": 1},
    )


def _context(draft: Draft) -> None:
    draft.step()["context"] = draft.dice.weighted(
        {"save_on_cpu": 1, "anomaly": 1, "deterministic": 1}
    )


def _probe(draft: Draft) -> None:
    if draft.policy.recorded:  # which keeps what is recorded
        return
    what = draft.dice.weighted({"forward": 3, "step": 3, "evaluate": 1})
    draft.place(Probe(what), moments={"before": 1})


def _outputs(draft: Draft) -> None:
    dice = draft.dice
    step = draft.step()
    chosen: dict[str, Any] = {"cache": True} if dice.chance(75) else {"attentions": True}
    step["forwards"] = [replace(forward, **chosen) for forward in step["forwards"]]


MOTIFS: dict[Callable[[Draft], None], int] = {
    _hook: 30,
    _penalty_inside: 12,
    _penalty_on_weights: 8,
    _penalty_outside: 5,
    _inputs: 2,
    _autocast: 9,
    _several_forwards: 8,
    _backward: 7,
    _adapters: 9,
    _freeze: 6,
    _evaluate: 9,
    _fails: 6,
    _weights: 12,
    _base: 14,
    _gradients: 4,
    _optimizer: 3,
    _together: 6,
    _settings: 12,
    _twice: 4,
    _tie: 2,
    _enable: 3,
    _context: 3,
    _probe: 3,
    _outputs: 3,
}
