"""The same micro-batches, one after the other and grouped; programs that are run both ways."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import poros
from poros.errors import PorosError
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases, slice_resident_loss
from tests.support import prepare_plain, same_bits

Model = Any
Batch = dict[str, torch.Tensor]
Loss = Callable[[Model, Any], torch.Tensor]
LENGTHS = (12, 9, 20, 7, 12, 16, 5, 9)
SIZES = (3, 2)
"""Of the steps of programs."""


def build(bases: Bases, architecture: str = "qwen2", **options: Any) -> Model:
    return bases.build(architecture, **options).train()


dense = partial(build, quantize=False)
two_layers = partial(
    adapted, quantize=False, lora_dropout=0.05, target_modules=["q_proj", "down_proj"]
)
"""Where it does not matter what streams: both have a slot."""


def layers(model: Model) -> Any:
    return model.get_base_model().model.layers


def trained(model: Model) -> list[Any]:
    return [each for each in model.parameters() if each.requires_grad]


def batches(
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


def clamp(model: Model) -> None:
    for each in trained(model):
        if each.grad is not None:
            each.grad.clamp_(-1e-3, 1e-3)


def add_noise(model: Model) -> None:
    for each in trained(model):
        if each.grad is not None:
            each.grad += 1e-3 * torch.randn_like(each)


class Rows(Dataset[Batch]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(4, 90, (12, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> Batch:
        return {"input_ids": self.tokens[place].clone(), "labels": self.tokens[place].clone()}


def own_loss(model: Model, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss / 4


def in_autocast(model: Model, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return own_loss(model, batch)


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
        step: list[Any] = list(map(form, batches(size, generator, lengths, padded)))
        with around():
            if together:
                facts += poros.accumulate(model, step, loss=loss)
            else:
                for batch in step:
                    value = loss(model, batch)
                    value.backward()
                    facts.append(value.detach())
        facts += [each.grad.clone() for each in trained(model) if each.grad is not None]
        if clip is not None:
            facts.append(torch.nn.utils.clip_grad_norm_(trained(model), clip))
        optimizer.step()
        optimizer.zero_grad()
        facts += [each.detach().clone() for each in trained(model)]
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


class Program(NamedTuple):
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
    base: Callable[[Bases], Model] = two_layers
    policy: tuple[tuple[str, Any], ...] = ()
    is_late: bool = False
    run: tuple[tuple[str, Any], ...] = ()


def program(make: Any = unchanged, end: End = None, **options: Any) -> Program:
    """``options``: fields of ``Program``; others are of ``train``."""
    fields = {key: options.pop(key) for key in Program._fields if key in options}
    fields["policy"] = tuple(fields.get("policy", {}).items())
    return Program(make, end, **fields, run=tuple({"sizes": SIZES, **options}.items()))


class Later:
    """A loss from the second step on."""

    def __init__(self, loss: Loss) -> None:
        self.step, self._loss = 0, loss

    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        return (self._loss if self.step else own_loss)(model, batch)

    def note(self, model: Model, step: int) -> None:
        self.step = step


def later(loss: Loss, end: End = None, **options: Any) -> Program:
    """The first of a kind goes alone, and the two behind it together, until the loss is another."""
    found = Later(loss)
    return program(of(found), end, **{"between": found.note, "sizes": (3, 3), **options})


def of(loss: Loss) -> Callable[[Model], Loss]:
    """A program with this loss, and the model as it is."""
    return lambda model: loss


def made(each: Program, bases: Bases, is_grouped: bool) -> tuple[Model, Callable[[], Any]]:
    """The model, and its training."""
    model, policy = each.base(bases).train(), {"slots": 2, **dict(each.policy)}
    if is_grouped and each.is_late:
        prepare_plain(model, **policy)
    loss = each.make(model) or own_loss
    if is_grouped and not each.is_late:
        prepare_plain(model, **policy)
    elif not is_grouped and policy.get("loss") == "chunked":
        slice_resident_loss(model)
    return model, partial(train, model, is_grouped, loss=loss, form=each.form, **dict(each.run))


@lru_cache(maxsize=2)
def _resident(each: Program, bases: Bases) -> list[torch.Tensor]:
    found: list[torch.Tensor] = made(each, bases, False)[1]()
    return found


def resident(each: Program, bases: Bases) -> list[torch.Tensor]:
    """What it computes resident, one micro-batch after the other."""
    policy = tuple(pair for pair in each.policy if pair[0] == "loss")
    return _resident(each._replace(end=None, is_late=False, policy=policy), bases)


def ends(each: Program, bases: Bases) -> bool:
    """Whether it ends as it says, with the bits of a resident run of one after the other."""
    model, run = made(each, bases, True)
    return ends_so(model, run, each.end, partial(resident, each, bases))


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
    shows_in: Program

    def is_seen(self, bases: Bases, patch: pytest.MonkeyPatch) -> bool:
        unchecked = self.shows_in._replace(policy=(("self_check", "off"),))
        assert ends(unchecked, bases), "nothing is broken yet"
        patch.setattr(self.owner, self.name, self.instead)
        try:
            return not ends(unchecked, bases)
        except (PorosError, AssertionError, pytest.fail.Exception):
            return True  # it ends otherwise than it should


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


Call = Callable[[int, Any, torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]


class Loop:
    """The model's loop over its layers, which calls them by ``call`` while ``is_on``."""

    def __init__(self, model: Model, call: Call, is_on: bool = True) -> None:
        self.is_on = is_on
        stack = layers(model)
        genuine: Callable[[Any], Iterator[Any]] = stack.__class__.__iter__

        def called(number: int, layer: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                return call(number, layer, hidden, args, kwargs)
            return layer(hidden, *args, **kwargs)

        class Calls(torch.nn.ModuleList):
            def __getitem__(self, places: Any) -> Any:
                return [partial(called, number, each) for number, each in enumerate(genuine(stack))]

        stack.__class__ = Calls
