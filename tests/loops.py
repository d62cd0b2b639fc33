"""Small models, and the plain loops that a resident and a streamed one run, to be compared.

What is trained under a Trainer is in ``trainers``; pictures of models are in ``comparing``.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import poros
from poros.errors import PorosError
from poros.gates import tiny
from poros.gates.reference import TrainingSpec, Trajectory
from poros.gates.reference import train as train_and_record
from poros.head.choice import find_head
from poros.head.takeover import slice_loss
from tests.comparing import changes, digest
from tests.support import AS_PLAIN, copied, make_base, make_model, prepare_plain, same_bits

Model = Any
Subject = Callable[[], Model]
"""Makes a model; each time of equal bytes."""
Program = Callable[[Model], object]
"""Something that is done with a model; what it returns is compared as well."""
Facts = dict[str, object]
NUM_LAYERS = 3
NUM_TIMES = 3
SMALL: dict[str, Any] = {"num_layers": NUM_LAYERS, "hidden_size": 64, "dropout": 0.05}
ON_HOST = {"loss": "chunked", "stream_head": True}


# Models.


def small_base(architecture: str = "qwen2", **options: Any) -> Model:
    """Without adapters; ``options`` as for ``make_base``."""
    return make_base(architecture, **{**SMALL, **options})


def build(architecture: str = "qwen2", **options: Any) -> Model:
    """With adapters that are not zero; ``options`` as for ``make_model``."""
    return make_model(architecture, **{**SMALL, **options})


def training(architecture: str = "qwen2", **options: Any) -> Model:
    """``build``, in training mode."""
    return build(architecture, **options).train()


dense = partial(training, quantize=False)
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ADAPTED: dict[str, Model] = {}


def adapted(architecture: str = "qwen2", **options: Any) -> Model:
    """Two layers, or more, with LoRA that is not zero; a copy of one that is made once."""
    key = f"adapted {architecture} {options}"
    names = ("dtype", "quantize", "num_layers")
    of_base = {"num_layers": 2, **{name: options.pop(name) for name in names if name in options}}
    adapters = options.pop("adapters", torch.float32)
    settings: dict[str, Any] = {"r": 8, "target_modules": SEVEN, "task_type": "CAUSAL_LM"}

    def make() -> Model:
        base = small_base(architecture, dropout=0.0, **of_base)
        model: Model = get_peft_model(base, LoraConfig(**{**settings, **options}))
        fill(model, adapters)
        return model.train()

    if torch.is_inference_mode_enabled():
        return make()
    if key not in _ADAPTED:
        with torch.random.fork_rng(devices=[]):
            _ADAPTED[key] = make()
    return copied(_ADAPTED[key])


def fill(model: Model, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = 0.1 * torch.randn(parameter.shape, generator=generator)
            # Magnitudes of DoRA are not the norms.
            parameter.data = (values + 3 if "magnitude" in name else values).to(dtype)


two_layers = partial(
    adapted, quantize=False, lora_dropout=0.05, target_modules=["q_proj", "down_proj"]
)
"""Where it does not matter what streams: both have a slot."""


def layers_of(model: Model) -> nn.ModuleList:
    """The decoder layers of a PEFT model or of its base."""
    return model.get_submodule(layers_name(model))  # type: ignore[no-any-return]


def layers_name(model: nn.Module) -> str:
    """The qualified name of the ModuleList of decoder layers."""
    return next(name for name, _ in model.named_modules() if name.split(".")[-1] == "layers")


def mlps(model: Model) -> list[Any]:
    return [layer.mlp for layer in layers_of(model)]


def trained(model: Model) -> list[Any]:
    return [each for each in model.parameters() if each.requires_grad]


# What is done to them.

PACKED = "base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"


def flip_nibble(model: Model, **_: Any) -> Model:
    """A fault that every gate has to see: one 4-bit code in the middle of one layer's weights."""
    dict(model.named_parameters())[PACKED].data[1000] ^= 0x0F
    return model


def slice_resident_loss(model: Model) -> Model:
    """A resident model whose loss is computed in slices; nothing of it streams."""
    base = model.get_base_model()
    head, _ = find_head(model, base, "chunked", False)
    if head is not None:
        slice_loss(base, head.module)
    return model


def narrow_slices(patch: pytest.MonkeyPatch) -> None:
    """Several slices of a small vocabulary, the last one narrower."""
    for name in ("_MOST_WEIGHTS", "_ALIGNMENT", "_LEAST_WIDTH"):
        patch.setattr(f"poros.head.loss.{name}", 96)


def streamed(model: Model, **policy: Any) -> Model:
    """Prepared, also if its architecture is not promised; with the loss of plain transformers."""
    usual = {"device": "cpu", **AS_PLAIN}
    return poros.prepare(model, **{**usual, **policy})


def at(act: Callable[[Any], object], *endings: str) -> Callable[[Model], None]:
    """``act`` on each module whose name ends so."""

    def change(model: Model) -> None:
        for name, module in list(model.named_modules()):
            if name.endswith(endings):
                act(module)

    return change


def behind(hook: Callable[..., Any], *endings: str) -> Callable[[Model], None]:
    """A forward hook on each module whose name ends so."""
    return at(lambda module: module.register_forward_hook(hook), *endings)


def before(hook: Callable[..., Any], *endings: str) -> Callable[[Model], None]:
    return at(lambda module: module.register_forward_pre_hook(hook), *endings)


def nothing(model: Model) -> None:
    pass


def halve(module: Any, given: Any) -> Any:
    """A hook on what a module is given."""
    return (given[0] * 0.5,)


def halve_in_place(module: Any, given: Any) -> None:
    """In a way that no version counts."""
    given[0].data.mul_(0.5)


def several(model: Model) -> None:
    """A second adapter, which acts beside the first."""
    model.add_adapter("other", LoraConfig(r=4, target_modules=SEVEN))
    fill(model)
    model.base_model.set_adapter(["default", "other"])


def clamp(model: Model) -> None:
    for each in trained(model):
        if each.grad is not None:
            each.grad.clamp_(-1e-3, 1e-3)


def add_noise(model: Model) -> None:
    for each in trained(model):
        if each.grad is not None:
            each.grad += 1e-3 * torch.randn_like(each)


def override(modules: Iterable[Any], forward: Callable[..., Any]) -> None:
    """Have modules run ``forward(module, own, *given)``, where ``own`` is the forward they had."""
    modules = list(modules)
    kind: Any = type(modules[0])

    class Overridden(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(self, super().forward, *args, **kwargs)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Overridden, name, getattr(kind, name))
    for module in modules:
        module.__class__ = Overridden


# Programs, and all that they compute.

bf16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def batches(num_batches: int = 2) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of 2 rows of 12 tokens, the second with padding."""
    return tiny.make_batches(num_batches, num_tokens=12)


def run(model: nn.Module, num_steps: int = 2, **spec: Any) -> Trajectory:
    """A short training run that records everything."""
    return train_and_record(model, batches(), TrainingSpec(num_steps=num_steps, **spec))


@cache
def resident_run(**changes: Any) -> Trajectory:
    """``run`` of a model of ``build`` that is not prepared."""
    return run(build(**changes))


@cache
def in_order(program: Program) -> Program:
    """The program, the order in which its gradients arrive, and all random states at its end."""

    def observed(model: Model) -> object:
        random.seed(3)
        np.random.seed(3)
        order: list[str] = []
        handles = [
            each.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
            for name, each in model.named_parameters()
            if each.requires_grad
        ]
        result = program(model)
        for handle in handles:
            handle.remove()
        return [result, order, random.random(), float(np.random.rand())]

    return observed


@cache
def often(program: Program, num_times: int = NUM_TIMES) -> Program:
    """The program several times, so that visits are replayed; the gradients of each as well."""

    def repeated(model: Model) -> object:
        found: list[object] = []
        for _ in range(num_times):
            model.train().zero_grad()
            result, named = program(model), model.named_parameters()
            gradients = {n: each.grad.clone() for n, each in named if each.grad is not None}
            found.append([result, gradients, torch.get_rng_state()])
        return found

    return repeated


def observe(model: Model, program: Program) -> Facts:
    """Run a program in training mode: what it returns, gradients, the random state at its end."""
    model.train()
    torch.manual_seed(5)
    facts = facts_of(program(model))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            facts[f"gradient of {name}"] = digest(parameter.grad)
    assert facts, "a program that computes nothing shows nothing"
    return {**facts, "random state": digest(torch.get_rng_state())}


def facts_of(value: object, name: str = "result") -> Facts:
    """Digests of all tensors in nested containers; other values as they are."""
    if isinstance(value, Trajectory):
        assert any(bool(each.any()) for each in value.steps[0].gradients.values())
        return {f"{name}: {each.name}": digest(each.tensor) for each in value.entries()}
    if isinstance(value, torch.Tensor):
        return {name: digest(value)}
    items: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple | np.ndarray):
        items = list(enumerate(value))
    else:
        return {} if value is None else {name: value}
    return {k: v for key, each in items for k, v in facts_of(each, f"{name}, {key}").items()}


@cache
def resident_facts(subject: Subject, program: Program) -> Facts:
    """What the program computes with a resident model: once, for all streamed ones."""
    return observe(subject(), program)


def differing_facts(
    subject: Subject,
    program: Program,
    prepare: Callable[[Model], Model] | None = None,
    **policy: Any,
) -> dict[str, object]:
    """The facts in which a streamed model differs from the resident one."""
    expected = resident_facts(subject, program)
    model = (prepare or streamed)(subject(), **policy)
    return changes(expected, observe(model, program))


def step(model: Model, around: Callable[[], Any] = nullcontext) -> dict[str, torch.Tensor]:
    """Loss, random state, and gradients in the order in which parameters get theirs."""
    order: list[str] = []
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    handles = [
        each.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, each in named.items()
    ]
    torch.manual_seed(5)
    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(2))
    with around():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    facts = {"loss": loss.detach(), "random": torch.get_rng_state()}
    gradients = {name: named[name].grad for name in order}
    # A node that is reached with nothing has none.
    facts |= {n: torch.empty(0) if each is None else each for n, each in gradients.items()}
    for each in named.values():
        each.grad = None
    for handle in handles:
        handle.remove()
    return facts


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Of two steps: what has not the same bits in both, and whether gradients came otherwise."""
    names = [
        name
        for name in {**left, **right}
        if name not in left or name not in right or not same_bits(left[name], right[name])
    ]
    return names + (["order"] if list(left) != list(right) else [])


def with_kernels(
    model: Model, around: Callable[[], Any] = nullcontext, **choice: Any
) -> dict[str, torch.Tensor]:
    """A step of the resident model with our kernels."""
    poros.use_adapter_kernels(model, **choice)
    found = step(model, around)
    poros.restore(model)
    return found


# Micro-batches, one after the other or grouped.

Batch = dict[str, torch.Tensor]
Loss = Callable[[Model, Any], torch.Tensor]
LENGTHS = (12, 9, 20, 7, 12, 16, 5, 9)
SIZES = (3, 2)
"""Of the steps of programs."""


def micro_batches(
    number: int, generator: torch.Generator, lengths: Sequence[int] = LENGTHS, padded: bool = False
) -> list[Batch]:
    found = []
    for place in range(number):
        length = lengths[place % len(lengths)]
        tokens = torch.randint(4, 100, (2, length), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens}
        if padded:
            mask = torch.ones_like(tokens)
            mask[0, : length // 3] = 0
            batch |= {"attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
        found.append(batch)
    return found


def own_loss(model: Model, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss / 4


def in_autocast(model: Model, batch: Batch) -> torch.Tensor:
    with bf16():
        return own_loss(model, batch)


def accumulated(
    model: Model, step: Sequence[Any], loss: Loss, together: bool
) -> list[torch.Tensor]:
    """The losses of micro-batches, whose gradients add up."""
    if together:
        return list(poros.accumulate(model, step, loss=loss))
    losses = []
    for batch in step:
        value = loss(model, batch)
        value.backward()
        losses.append(value.detach())
    return losses


def train(
    model: Model,
    together: bool = True,
    *,
    sizes: Sequence[int] = (3, 3, 3),
    loss: Loss = own_loss,
    clip: float | None = None,
    padded: bool = False,
    lengths: Sequence[int] = LENGTHS,
    between: Callable[[Model, int], object] = lambda model, number: None,
    around: Callable[[], Any] = nullcontext,
    form: Callable[[Batch], Any] = lambda batch: batch,
) -> list[torch.Tensor]:
    """Losses, gradients, adapters and random states of one step for each of ``sizes``.

    ``form``: what a loss is handed is made of a batch by it.
    """
    torch.manual_seed(5)
    random.seed(3)
    np.random.seed(4)
    adapters = trained(model)
    optimizer = torch.optim.AdamW(adapters, lr=0.01)
    generator = torch.Generator().manual_seed(2)
    facts: list[torch.Tensor] = []
    for number, size in enumerate(sizes):
        between(model, number)
        step: list[Any] = list(map(form, micro_batches(size, generator, lengths, padded)))
        with around():
            facts += accumulated(model, step, loss, together)
        now = trained(model)
        facts += [each.grad.clone() for each in now if each.grad is not None]
        if clip is not None:
            facts.append(torch.nn.utils.clip_grad_norm_(now, clip))
        optimizer.step()
        optimizer.zero_grad()
        facts += [each.detach().clone() for each in now]
        facts.append(torch.get_rng_state())
    for each in trained(model):
        facts += list(optimizer.state[each].values())
    return [*facts, torch.tensor([random.random(), np.random.random()])]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(same_bits, left, right))


def num_groups(model: Model) -> int:
    found: int = poros.runtime(model).stats()["num_groups"]
    return found


def reasons(model: Model) -> list[str]:
    """Why micro-batches ran one after the other."""
    start = "micro-batches ran one after the other: "
    fallbacks = poros.runtime(model).stats()["fallbacks"]
    return [line.removeprefix(start) for line in fallbacks if line.startswith(start)]


End = str | tuple[type[PorosError], str] | None
"""Why they run one after the other; an error and what it says; or None: grouped."""


def unchanged(model: Model) -> None:
    """The model as it is, and its own loss."""


class Training(NamedTuple):
    """A model, what is done to it, and how it is trained.

    Attributes:
        make: Changes the model; returns the loss, if it is not the model's own.
        end: How it ends when it is prepared.
        form: What a loss is handed is made of a batch by it.
        base: The model.
        policy: That it is prepared with.
        is_late: Whether it is prepared before it is changed.
        run: More of ``train``.
    """

    make: Callable[[Model], Loss | None] = unchanged
    end: End = None
    form: Callable[[Batch], Any] = lambda batch: batch
    base: Subject = two_layers
    policy: tuple[tuple[str, Any], ...] = ()
    is_late: bool = False
    run: tuple[tuple[str, Any], ...] = ()


def program(make: Any = unchanged, end: End = None, **options: Any) -> Training:
    """``options``: fields of ``Training``; others are of ``train``."""
    fields = {key: options.pop(key) for key in Training._fields if key in options}
    fields["policy"] = tuple(fields.get("policy", {}).items())
    return Training(make, end, **fields, run=tuple({"sizes": SIZES, **options}.items()))


class Later:
    """A loss from the second step on."""

    def __init__(self, loss: Loss) -> None:
        self.step, self._loss = 0, loss

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        return (self._loss if self.step else own_loss)(model, batch)

    def note(self, model: Model, step: int) -> None:
        self.step = step


def later(loss: Loss, end: End = None, **options: Any) -> Training:
    """The first of a kind goes alone, and the two behind it together, until the loss is another."""
    found = Later(loss)
    return program(of(found), end, **{"between": found.note, "sizes": (3, 3), **options})


def of(loss: Loss) -> Callable[[Model], Loss]:
    """A program with this loss, and the model as it is."""
    return lambda model: loss


def made(each: Training, is_grouped: bool) -> tuple[Model, Callable[[], Any]]:
    """The model, and its training."""
    model, policy = each.base().train(), {"slots": 2, **dict(each.policy)}
    if is_grouped and each.is_late:
        prepare_plain(model, **policy)
    loss = each.make(model) or own_loss
    if is_grouped and not each.is_late:
        prepare_plain(model, **policy)
    elif not is_grouped and policy.get("loss") == "chunked":
        slice_resident_loss(model)
    return model, partial(train, model, is_grouped, loss=loss, form=each.form, **dict(each.run))


@lru_cache(maxsize=2)
def _resident(each: Training) -> list[torch.Tensor]:
    found: list[torch.Tensor] = made(each, False)[1]()
    return found


def resident(each: Training) -> list[torch.Tensor]:
    """What it computes resident, one micro-batch after the other."""
    policy = tuple(pair for pair in each.policy if pair[0] == "loss")
    return _resident(each._replace(end=None, is_late=False, policy=policy))


def ends(each: Training) -> bool:
    """Whether it ends as it says, with the bits of a resident run of one after the other."""
    model, run = made(each, True)
    return ends_so(model, run, each.end, partial(resident, each))


def ends_so(model: Model, run: Callable[[], Any], end: End, resident: Callable[[], Any]) -> bool:
    """Whether the run of a prepared model ends in this way."""
    if isinstance(end, tuple):
        with pytest.raises(end[0], match=end[1]):
            run()
        return True
    found, said = run(), reasons(model)
    if end is None:
        assert num_groups(model) >= 2 and not said, said
    return same(found, resident()) and (end is None or any(end in each for each in said))


class Control(NamedTuple):
    """What is broken, and a program in which it shows."""

    owner: Any
    name: str
    instead: Any
    shows_in: Training

    def is_seen(self, patch: pytest.MonkeyPatch) -> bool:
        unchecked = self.shows_in._replace(policy=(("self_check", "off"),))
        assert ends(unchecked), "nothing is broken yet"
        patch.setattr(self.owner, self.name, self.instead)
        try:
            return not ends(unchecked)
        except (PorosError, AssertionError, pytest.fail.Exception):
            return True  # it ends otherwise than it should
