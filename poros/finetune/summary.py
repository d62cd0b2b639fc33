"""Prints a summary before a run: whether it fits, where the base lies, steps and time."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from poros.errors import PolicyError, UnsupportedModelError
from poros.finetune.data import Rows
from poros.finetune.tokens import IGNORED, Tokens
from poros.planning.request import COUNTED
from poros.recipes.recipe import Recipe
from poros.utils import formatting

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from poros.planning.formula import MemoryPlan
    from poros.planning.planner import Planner


class Size(NamedTuple):
    """The size of a run, beside its rows of tokens."""

    row_length: int
    """Tokens of the longest row as it is computed, padding included."""
    num_rows: int
    """Rows of an epoch, after packing."""
    num_steps: int
    num_validation: int


def planner_of(recipe: Recipe, config: "PreTrainedConfig", adapter: "PeftConfig") -> "Planner":
    """Make a planner of a recipe's model.

    Args:
        config: Names the class of the model in its ``architectures``, if that is a reward model.
    """
    from poros.kernels.nf4 import DTYPES
    from poros.planning.planner import Planner

    chosen = recipe.model
    return Planner(
        config,
        lora=adapter,
        quantization=None if chosen.quantization == "none" else chosen.quantization,
        dtype=DTYPES[chosen.dtype],
        adapter_dtype=DTYPES[recipe.adapter.dtype],
        vision=chosen.vision,
    )


def planned(
    recipe: Recipe, size: Size, planner: "Planner", device: "torch.device"
) -> "MemoryPlan | str":
    """Plan a step of the run; return the reason if that is impossible.

    Raises:
        VRAMBudgetError: If the budget is too small.
    """
    import torch

    from poros.planning.cards import card_of
    from poros.planning.request import PlanRequest
    from poros.utils.devices import free_budget

    training, memory = recipe.training, recipe.memory
    if memory.resident:
        return "not streamed: the whole base is on the device"
    answers = 2 if training.method in ("dpo", "reward") else 1  # of a row, side by side
    rows = training.per_device_train_batch_size * answers
    together = training.gradient_accumulation_steps
    budget: str | int | None = memory.vram
    card = None
    if device.type == "cuda":
        card = card_of(torch.cuda.get_device_name(device))
        if budget is None and memory.slots is None:
            budget = free_budget(device)  # as poros.prepare does
    try:
        request = PlanRequest.of(
            seq_len=size.row_length,
            batch_size=rows,
            accumulation=together,
            micro_batches=together,
            vram_budget=budget,
            num_slots=memory.slots,
            # Most keep two moments, or as much.
            optimizer=training.optim if training.optim in COUNTED else "adamw_torch",
            self_check=True,
            speeds=card and card.speeds(rows * size.row_length),
            adapter_kernels=recipe.adapter_kernels(device.type),
        )
        return planner.plan(request)
    except (PolicyError, UnsupportedModelError) as error:
        return f"not planned: {error}"


def show(
    console: "Console",
    recipe: Recipe,
    plan: "MemoryPlan | str",
    size: Size,
    rows: Rows,
    tokens: Tokens,
    kernels: str,
    notes: list[str],
) -> None:
    """Print the summary."""
    from rich.table import Table

    training, adapter, chosen = recipe.training, recipe.adapter, recipe.model
    kind = f"{'rs' if adapter.use_rslora else ''}{'dora' if adapter.use_dora else 'lora'}"
    targets = adapter.target_modules
    named = targets if isinstance(targets, str) else ", ".join(targets)
    kept = "dense" if chosen.quantization == "none" else chosen.quantization
    attention = f", attention {chosen.attention}" if chosen.attention else ""
    read = [f"{title}, {number:,}" for title, number in rows.read]
    if recipe.data.weights:
        pairs = zip(read, recipe.data.weights, strict=True)
        read = [f"{each} x {weight:g}" for each, weight in pairs]
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in (
        ("model", f"{chosen.source}, {kept}, computing in {chosen.dtype}{attention}"),
        ("adapter", f"{kind}, rank {adapter.r}, alpha {recipe.alpha:g}, on {named}"),
        ("rows", "; ".join(read)),
        ("data", _data_line(recipe, size, tokens)),
        (
            "training",
            f"{training.method}, {formatting.counted(size.num_steps, 'step')} of "
            f"{formatting.counted(per_step, 'row')}, {training.optim}, "
            f"learning rate {training.learning_rate:g}",
        ),
        ("kernels", kernels),
        *_memory_lines(recipe, plan, size),
        *(("note", note) for note in notes),
    ):
        table.add_row(name, line)
    console.print(table, highlight=False, markup=False)


def show_rows(
    console: "Console",
    number: int,
    rows: Rows,
    tokens: Tokens,
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    """Print the first rows as tokens make them, what is learnt in double brackets."""
    for row in range(min(number, len(tokens.lengths))):
        head = f"{rows.places[tokens.numbers[row]]}: {tokens.lengths[row]} tokens"
        console.print(head, markup=False, highlight=False, soft_wrap=True)
        columns = {name: list(every[row]) for name, every in tokens.columns.items()}
        for name, ids, learnt in _parts(columns):
            text = _text(ids, learnt, tokenizer, console.encoding)
            console.print(f"{name}: ", text, sep="", soft_wrap=True, highlight=False)


def _parts(columns: dict[str, list[int]]) -> Iterator[tuple[str, list[int], list[bool]]]:
    """Yield the texts of a row: their names, their tokens, and which of these are learnt."""
    if "labels" in columns:
        # The first token has nothing before it to be predicted from.
        learnt = [False, *(label != IGNORED for label in columns["labels"][1:])]
        yield "row", columns["input_ids"], learnt
        return
    prompt = columns.get("prompt_ids", [])
    for name in ("completion", "chosen", "rejected"):
        answer = columns.get(f"{name}_ids", [])
        if answer:
            yield name, prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _text(
    ids: Sequence[int],
    learnt: Sequence[bool],
    tokenizer: "PreTrainedTokenizerBase",
    encoding: str,
) -> "Text":
    from rich.text import Text

    text, start = Text(), 0
    for is_learnt, group in groupby(range(len(ids)), key=learnt.__getitem__):
        *_, last = group
        # Some tokenizers leave out a blank that a text begins with.
        before, upto = (
            str(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
            for end in (start, last + 1)
        )
        start = last + 1
        part = upto[len(before) :]
        # No row of data can move the cursor, or turn the direction of writing.
        part = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in part
        )
        part = part.encode(encoding, "backslashreplace").decode(encoding)
        text.append(f"[[{part}]]" if is_learnt else part, "bold green" if is_learnt else "")
    return text


def _data_line(recipe: Recipe, size: Size, tokens: Tokens) -> str:
    share = 100 * tokens.num_learnt / max(1, tokens.num_tokens)
    num_rows, num_tokens = len(tokens.lengths), tokens.num_tokens
    counts = f"{formatting.counted(num_rows, 'row')}, {formatting.counted(num_tokens, 'token')}"
    parts = [f"{counts}, {share:.0f} % of them trained on"]
    training = recipe.training
    if recipe.is_packed:
        parts.append(f"packed into rows of {size.row_length}, {size.num_rows:,} in all")
    else:
        multiple = training.pad_to_multiple_of
        parts.append(f"padded to a multiple of {multiple}, at most {size.row_length}")
    if tokens.num_cut:
        parts.append(f"{tokens.num_cut:,} cut at {training.max_length} tokens (--max-length)")
    if tokens.num_dropped:
        parts.append(f"{tokens.num_dropped:,} left out: nothing to learn within that length")
    if size.num_validation:
        parts.append(f"{size.num_validation:,} held out")
    return "; ".join(parts)


def _memory_lines(recipe: Recipe, plan: "MemoryPlan | str", size: Size) -> list[tuple[str, str]]:
    """Lines about the budget, the blocks on the card, host memory and time."""
    if isinstance(plan, str):
        return [("memory", plan)]
    needs = formatting.size(plan.total_num_bytes)
    fits = f"needs {needs}"
    if plan.vram_budget is not None:
        whose = "" if recipe.memory.vram else " that are free on the GPU (--vram)"
        fits = f"fits: {needs} of {formatting.size(plan.vram_budget)}{whose}"
    blocks = f"{plan.num_slots} of {plan.num_blocks} blocks on the device at a time"
    if plan.keep_last:
        blocks += f", {formatting.counted(plan.keep_last, 'layer')} not recomputed"
    kept = recipe.model.host_budget or formatting.size(plan.host_num_bytes)
    time = "known after the first steps"
    if plan.step_ms is not None:
        together = recipe.training.gradient_accumulation_steps
        total = formatting.duration(plan.step_ms / 1e3 * together * size.num_steps)
        time = f"about {total}, forecast from the card's published rates"
    return [
        ("memory", f"{fits}; {blocks}"),
        ("host memory", f"{kept} for the base"),
        ("time", time),
    ]
