"""Draws training programs with hypothesis.

A program starts plain and gets a few motifs: things that people do together, such as a hook that
keeps an activation and a loss on what it kept. Motifs meet by chance, at moments drawn for each.
"""

from collections.abc import Callable
from typing import Any

from poros.errors import PolicyError
from tools.fuzz import optimizers
from tools.fuzz.draft import Dice, Draft
from tools.fuzz.motifs import MOTIFS, rows
from tools.fuzz.program import Policy, Program, Subject


def programs() -> Any:
    """The hypothesis strategy of programs.

    Raises:
        PolicyError: If hypothesis is not installed.
    """
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise PolicyError(
            "fuzz: expected the package hypothesis, which draws the programs, found none; "
            "install it: pip install hypothesis"
        ) from error

    @strategies.composite
    def drawn(draw: Callable[[Any], Any]) -> Program:
        # One draw for a whole program: pieces that hypothesis repeats would make programs alike,
        # and shrinking works on the programs themselves.
        dice = Dice(draw(strategies.randoms(use_true_random=True)))
        subject = _subject(dice)
        policy = _policy(dice, subject)
        # Visits are recorded once they have come, and replayed once that is proved.
        lengths = {5: 2, 6: 1} if policy.recorded else {2: 5, 1: 2, 3: 3}
        # Those of several micro-batches are joined once they have come some times more.
        has_rows = dice.chance(40)
        lengths = {9: 2, 10: 1} if has_rows else lengths
        draft = Draft(dice, subject, policy, dice.weighted(lengths))
        if has_rows:
            rows(draft)
        draft.optimizer = dice.weighted(optimizers.weights())
        for _ in range(dice.weighted({2: 3, 1: 3, 3: 3, 4: 2, 0: 1})):
            dice.weighted(MOTIFS)(draft)
        return draft.finish()

    return drawn()


def _subject(dice: Dice) -> Subject:
    architecture = dice.weighted(
        {"qwen2": 80, "gemma3": 8, "gemma4_shared_kv": 6, "mixtral": 5, "prophetnet": 1}
    )
    kind = dice.weighted({"lora": 12, "rslora": 1, "dora": 2, "lora_bias": 1, "vblora": 2})
    usual = {"all": 5, "attention": 2, "mlp": 3, "qv": 2}
    shared = {"one": 3, "all": 1}
    return Subject(
        architecture=architecture,
        dtype=dice.weighted({"float32": 2, "bfloat16": 1}),
        # VBLoRA has no 4-bit layers.
        quantize=kind != "vblora" and dice.chance(70),
        num_layers=dice.weighted({3: 3, 2: 1}),
        kind=kind,
        # PEFT's bank of vectors is shared: with more than one module a layer it is refused.
        targets=dice.weighted(shared if kind == "vblora" else usual),
        lowest=dice.weighted({0: 4, 1: 1}),
        dropout=dice.weighted({0.0: 2, 0.1: 1}),
        train_head=dice.chance(10),
        frozen="" if kind == "vblora" else dice.weighted({"": 4, "lora_A": 1, "reference": 2}),
    )


def _policy(dice: Dice, subject: Subject) -> Policy:
    # Kernels whose bits are not PEFT's.
    own = {"dora": "fused", "lora": dice.weighted({"exact": 3, "grouped": 1})}
    return Policy(
        slots=dice.weighted({2: 4, 3: 1}),
        block_size=dice.weighted({1: 4, 2: 1}),
        keep_last=dice.weighted({0: 4, 1: 1, subject.num_layers: 1}),
        offload_boundaries=dice.chance(20),
        vram_budget=dice.weighted({"": 16, "1GiB": 1, "2MiB": 1}),
        stream_embedding=dice.chance(25),
        stream_head=dice.chance(30),
        loss=dice.weighted({"reference": 3, "chunked": 2}),
        self_check=dice.weighted({"strict": 4, "off": 4, "warn": 1}),
        kernels=own[subject.kind] if subject.kind in own and dice.chance(70) else "exact",
        recorded=dice.chance(40),
        streams=dice.weighted({"plain": 3, "adversarial": 3, "watched": 1}),
    )
