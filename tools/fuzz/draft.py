"""A program in the making, and the dice it is drawn with."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from poros.errors import PolicyError
from tools.fuzz.program import Action, Forward, Hook, Policy, Program, Step, Subject, Term

T = TypeVar("T")

_USUAL = (
    "",
    "self_attn",
    "mlp",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "self_attn.q_proj.base_layer",
    "self_attn.v_proj.lora_A.default",
    "self_attn.q_proj.lora_B.default",
    "self_attn.q_proj.lora_dropout.default",
    "mlp.act_fn",
    "mlp.down_proj",
    "input_layernorm",
)
PARTS: dict[str, tuple[str, ...]] = {
    "qwen2": _USUAL,
    "gemma3": _USUAL,
    "gemma4_shared_kv": _USUAL,
    "mixtral": (*_USUAL[:9], "mlp.gate", "mlp.experts", "input_layernorm"),
    "prophetnet": (
        "",
        "self_attn",
        "feed_forward",
        "self_attn.query_proj",
        "self_attn.query_proj.lora_B.default",
        "feed_forward.intermediate",
        "self_attn_layer_norm",
    ),
}


class Dice:
    """Weighted draws."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def below(self, bound: int) -> int:
        return self._random.randrange(bound)

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, options: dict[T, int]) -> T:
        number = self.below(sum(options.values()))
        for option, weight in options.items():
            number -= weight
            if number < 0:
                return option
        raise PolicyError("expected weights of at least 1, found others")


@dataclass
class Draft:
    """A program in the making."""

    dice: Dice
    subject: Subject
    policy: Policy
    num_steps: int
    optimizer: str = "adamw"
    ema: bool = False
    start: list[Action] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    num_tags: int = 0
    first: int = 0
    """The first step around which there is something unusual."""

    def __post_init__(self) -> None:
        self.steps = [
            {"before": [], "between": [], "after": [], "forwards": [Forward()]}
            for _ in range(self.num_steps)
        ]

    def tag(self) -> int:
        self.num_tags += 1
        return self.num_tags - 1

    def step(self) -> dict[str, Any]:
        return self.dice.choice(self.steps[self.first :])

    def layer(self) -> int:
        return self.dice.below(self.subject.num_layers)

    def part(self) -> str:
        return self.dice.choice(PARTS[self.subject.architecture])

    def place(self, action: Action, *, moments: dict[str, int] | None = None) -> str:
        """Put ``action`` at a moment: the start, before a step, between forward and backward."""
        moment = self.dice.weighted(moments or {"before": 5, "start": 2, "between": 2})
        if moment == "start" and self.first:
            moment = "before"
        if moment == "start":
            self.start.append(action)
        else:
            self.step()[moment].append(action)
        return moment

    def term(self, term: Term, *, everywhere: bool) -> None:
        """Add ``term`` to the loss of one forward, or of all."""
        if self.dice.chance(25):
            term = replace(term, outside=True)
        chosen = self.steps[self.first :] if everywhere else [self.step()]
        for step in chosen:
            forwards = step["forwards"]
            index = self.dice.below(len(forwards))
            forwards[index] = replace(forwards[index], terms=(*forwards[index].terms, term))

    def finish(self) -> Program:
        steps = []
        actions = [self.start, *(step[key] for step in self.steps for key in ("before", "between"))]
        hooks = [each for group in actions for each in group if isinstance(each, Hook)]
        forwards = [each for step in self.steps for each in step["forwards"]]
        terms = {term.kind for each in forwards for term in each.terms}
        passes_values = terms & {"captured", "embeds"} or {each.does for each in hooks} & {"sum"}
        for index, step in enumerate(self.steps):
            if passes_values and index >= self.first and step.get("backward") == "together":
                # Nothing passes values from a part of the code of a loss to another.
                step["backward"] = "each"
            values: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in step.items()
            }
            steps.append(Step(**values))
        return Program(
            subject=self.subject,
            policy=self.policy,
            before=tuple(self.start),
            steps=tuple(steps),
            optimizer=self.optimizer,
            ema=self.ema,
        )
