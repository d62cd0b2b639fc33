"""Training programs as plain data: what the fuzzer draws, runs, shrinks and prints.

A program is a model, a policy, and steps; around the forwards and backwards of a step stand
actions, things that people do there. Every value has a default, the plainest there is, and a repr
names only what differs from it: so a shrunk program is short, and its repr can be pasted into a
table of tests.

What stays outside: edits that PyTorch does not count, on matrices that stream, or on what is
trained between a forward and its backward; and copies of prepared models.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


class Plain:
    """A value whose repr leaves out what has its default."""

    def __repr__(self) -> str:
        named: Any = self
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(named)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, repr=False)
class Subject(Plain):
    """The model: a small random one of an architecture, with adapters."""

    architecture: str = "qwen2"
    dtype: str = "float32"
    quantize: bool = True
    num_layers: int = 3
    kind: str = "lora"
    """lora, rslora, dora, lora_bias or vblora."""
    targets: str = "all"
    """Linear layers with adapters: all, attention, mlp, qv, or one (the query alone)."""
    lowest: int = 0
    """The first layer with adapters."""
    dropout: float = 0.0
    train_head: bool = False
    frozen: str = ""
    """Adapters that act and are not trained: lora_A, or reference (a second adapter)."""


@dataclass(frozen=True, repr=False)
class Policy(Plain):
    """How the second arm streams; the fields are those of ``StreamingPolicy``."""

    slots: int = 2
    block_size: int = 1
    keep_last: int = 0
    offload_boundaries: bool = False
    vram_budget: str = ""
    """Plan slots and kept layers into it, instead of those given."""
    stream_embedding: bool = False
    stream_head: bool = False
    loss: str = "reference"
    """chunked in the first arm too, where nothing streams."""
    self_check: str = "strict"
    kernels: str = "exact"
    """exact, fused or grouped; in the first arm too, where it has the bits of the second."""
    recorded: bool = False
    """Visits are recorded on tapes and replayed."""
    share_dense: bool = False
    streams: str = "plain"
    """plain, adversarial, or watched: every operator's reads of slots observed, in all arms."""


class Action(Plain):
    """Something that people do around a step; ``tools.fuzz.actions`` does it."""


@dataclass(frozen=True, repr=False)
class Hook(Action):
    """Register a hook."""

    kind: str = "forward"
    """forward, forward_pre, backward, backward_pre, tensor (on what a module returns), parameter,
    post_accumulate; global_ before the first four for the hooks of all modules."""
    does: str = "read"
    """read, scale, add_noise, add_tensor, capture, detach, inplace, sum, raise."""
    layer: int = 0
    """-1 is outside of the layers."""
    part: str = ""
    """Name of the module below that layer, or below the model; the layer itself if empty."""
    tag: int = 0
    """Tells hooks, what they capture and what they add apart."""
    since: int = 0
    """The step from which it acts; a hook that raises does so in that step alone."""
    each_step: bool = False
    """Take it off and register it anew at each step."""
    first: bool = False
    """prepend=True, where hooks have it."""


@dataclass(frozen=True, repr=False)
class Unhook(Action):
    """Remove the hook of that tag, if there is one."""

    tag: int = 0


@dataclass(frozen=True, repr=False)
class Train(Action):
    """Freeze adapter parameters, or let them be trained again."""

    on: bool = False
    which: str = "lora_A"
    layer: int | None = None


@dataclass(frozen=True, repr=False)
class Adapter(Action):
    """Manage adapters with PEFT: add, load, set, delete, disable, enable, scale, merge, save."""

    verb: str = "add"
    name: str = "second"


@dataclass(frozen=True, repr=False)
class Evaluate(Action):
    """Run without gradients."""

    length: int = 6
    mode: str = "eval"
    """eval, train (in training mode), disabled (the base alone), generate, sample, inference."""


@dataclass(frozen=True, repr=False)
class SetMode(Action):
    """model.train(on), or that of a part."""

    on: bool = False
    layer: int | None = None


@dataclass(frozen=True, repr=False)
class SetDropout(Action):
    """Change p of all dropouts."""

    p: float = 0.3
    layer: int | None = None


@dataclass(frozen=True, repr=False)
class SetAttention(Action):
    """Choose the implementation of attention."""

    name: str = "eager"


@dataclass(frozen=True, repr=False)
class Setting(Action):
    """Change a setting of the process; put back at the end."""

    name: str = "matmul_precision"
    value: str = "high"


@dataclass(frozen=True, repr=False)
class Random(Action):
    """Draw from torch's generator, or seed it."""

    verb: str = "draw"


@dataclass(frozen=True, repr=False)
class EditBase(Action):
    """Change a frozen tensor: norm, bias, buffer, matrix (in a layer), or one outside of them."""

    what: str = "norm"
    how: str = "inplace"
    """inplace, data, numpy, assign (.data =), copy, replace (another Parameter)."""
    layer: int = 0


@dataclass(frozen=True, repr=False)
class EditAdapter(Action):
    """Change adapter weights outside of the optimizer."""

    what: str = "lora_B"
    how: str = "inplace"
    """inplace, data, numpy, assign, cast, replace (load_state_dict(assign=True)), swap (to the
    average and back, as in EMA)."""
    layer: int | None = None


@dataclass(frozen=True, repr=False)
class EditGradients(Action):
    """Change gradients between backward and the step."""

    how: str = "clip"
    """clip, clip_value, noise, penalty (in place, with a graph), zero, none."""


@dataclass(frozen=True, repr=False)
class UseTwice(Action):
    """Have a module inside a layer called a second time in each forward of its parent."""

    layer: int = 0
    part: str = "mlp"
    how: str = "chain"
    """chain (on its own output), or beside (on half its input)."""


@dataclass(frozen=True, repr=False)
class Tie(Action):
    """Let two adapters share one parameter."""

    how: str = "within"
    """within a layer, or across layers."""


@dataclass(frozen=True, repr=False)
class Enable(Action):
    """Calls that are made once: input_grads, checkpointing, no_cache."""

    what: str = "input_grads"


@dataclass(frozen=True, repr=False)
class Probe(Action):
    """Repeat something and record how many tensors more are alive than after its second time."""

    what: str = "forward"
    """forward (without backward), step, or evaluate."""


@dataclass(frozen=True, repr=False)
class Term(Plain):
    """One more term of the loss."""

    kind: str = "captured"
    """captured (by the hook of that tag), norm, gram, product (of adapter weights), hidden,
    logits, embeds, raise (an exception instead of a loss)."""
    tag: int = 0
    """Of the hook, or the number of the hidden state."""
    which: str = "lora_A"
    """Of the adapter weights."""
    outside: bool = False
    """Computed after the autocast region."""


@dataclass(frozen=True, repr=False)
class Forward(Plain):
    """One forward with gradients, and its loss."""

    batch: int = 0
    length: int = 6
    terms: tuple[Term, ...] = ()
    inputs: str = "ids"
    """ids, embeds, embeds_grad."""
    mask: str = "drawn"
    """drawn (some batches are padded), full (none is), own (each in another place), packed (two
    documents in a row, of other lengths in each batch)."""
    reads: bool = False
    """Gradients that are there before it are recorded."""
    cache: bool = False
    attentions: bool = False


@dataclass(frozen=True, repr=False)
class Step(Plain):
    """One optimizer step."""

    before: tuple[Action, ...] = ()
    forwards: tuple[Forward, ...] = (Forward(),)
    between: tuple[Action, ...] = ()
    """Between the forwards and their backward."""
    after: tuple[Action, ...] = ()
    """Between backward and the update."""
    backward: str = "each"
    """each (after its forward), sum (of all losses), in_turn, reverse (each on its own, after all
    forwards), twice (retain_graph, then again), grad (torch.autograd.grad), none, create_graph,
    together (poros.accumulate of all forwards)."""
    autocast: str = "off"
    """off, each (forward alone), around (backward inside), shared (one region, all forwards)."""
    context: str = "plain"
    """plain, save_on_cpu, anomaly, deterministic."""
    update: bool = True


@dataclass(frozen=True, repr=False)
class Program(Plain):
    """All of it."""

    subject: Subject = Subject()
    policy: Policy = Policy()
    before: tuple[Action, ...] = ()
    """Before prepare."""
    steps: tuple[Step, ...] = (Step(),)
    optimizer: str = "adamw"
    """adamw, foreach, fused, sgd, sgd_fused, 8bit, lion, schedule_free, in_backward."""
    ema: bool = False
    seed: int = 0


# Kinds of things, by which they are counted even where they are the default.
_KINDS = ("kind", "does", "what", "how", "verb")
# Numbers and names that say where; that they are not the default is enough.
_PLACES = ("tag", "layer", "which", "since", "length", "part")


def features(program: Program) -> frozenset[str]:
    """Names of what a program has beyond the defaults, for counting what was covered."""
    return frozenset(_features(program, ""))


def _features(node: Any, moment: str) -> Iterator[str]:
    kind = type(node).__name__
    if isinstance(node, Action):
        yield f"{kind}@{moment}"
    elif isinstance(node, Term):
        yield kind
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            yield from _features(value, moment)
        elif isinstance(value, tuple):
            where = field.name if kind == "Step" else "start" if field.name == "before" else moment
            for child in value:
                yield from _features(child, where)
            if field.name == "forwards" and len(value) > 1:
                yield "several forwards"
        elif field.name in _PLACES:
            if field.name == "layer" and value == -1:
                yield f"{kind} outside"
            elif value != field.default and field.name in ("since", "length"):
                yield f"{kind}.{field.name}"
        elif value != field.default or field.name in _KINDS:
            yield f"{kind}.{field.name}={value}"
