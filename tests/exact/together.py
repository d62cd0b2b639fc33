"""The same micro-batches, one after the other and together."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import Dataset

import poros
from tests.exact.arms import Bases
from tests.support import same_bits

Model = Any
Batch = dict[str, torch.Tensor]
Loss = Callable[[Model, Batch], torch.Tensor]
LENGTHS = (12, 9, 20, 7, 12, 16, 5, 9)


def build(bases: Bases, **options: Any) -> Model:
    return bases.build("qwen2", **options).train()


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


class Rows(Dataset[Batch]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(4, 90, (64, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> Batch:
        return {"input_ids": self.tokens[place].clone(), "labels": self.tokens[place].clone()}


def own_loss(model: Model, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss / 4


def train(
    model: Model,
    together: bool = True,
    *,
    sizes: Sequence[int] = (4, 4, 4),
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
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
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
        facts.append(torch.get_rng_state())
    facts += [each.detach().clone() for each in trained(model)]
    for each in trained(model):
        facts += list(optimizer.state[each].values())
    return facts


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
