"""What is known of a run before it begins: does it fit, what it takes, how many steps."""

from collections.abc import Iterator

from poros.errors import PorosError, VRAMBudgetError
from poros.recipes.recipe import Recipe


def forecast(recipe: Recipe, num_steps: int, num_rows: int) -> Iterator[str]:
    """Lines for a person.

    Raises:
        VRAMBudgetError: If not even the least room fits.
    """
    training = recipe.training
    bound = "at most " if recipe.packs and training.steps is None else ""
    yield (
        f"{num_rows:,} rows, {bound}{num_steps:,} steps of {training.accumulation} x "
        f"{training.batch_size} {'bins' if recipe.packs else 'rows'} of at most "
        f"{recipe.max_length:,} tokens"
    )
    if recipe.placement == "resident":
        yield "the base stays on the device as a whole"
        return
    from poros.finetune.trainers import adapter_config
    from poros.planning.planner import Planner
    from poros.planning.request import PlanRequest

    try:
        planner = Planner(
            recipe.model,
            lora=adapter_config(recipe),
            quantization=None if recipe.quantization == "none" else recipe.quantization,
        )
        plan = planner.plan(
            PlanRequest(
                seq_len=recipe.max_length,
                batch_size=training.batch_size * (2 if recipe.task == "dpo" else 1),
                vram_budget=recipe.vram,
                accumulation=training.accumulation,
                micro_batches=training.accumulation,
                # TRL computes the loss of preferences itself.
                loss="chunked" if recipe.task == "sft" else "reference",
            )
        )
    except VRAMBudgetError:
        raise
    except PorosError as error:
        yield f"what it takes cannot be forecast: {str(error).splitlines()[0]}"
        return
    budget = "" if plan.vram_budget is None else f" of {plan.vram_budget / 1e9:.1f}"
    yield (
        f"forecast: {plan.total_num_bytes / 1e9:.1f}{budget} GB on the GPU, {plan.num_slots} of "
        f"{plan.num_blocks} blocks there at a time, {plan.host_num_bytes / 1e9:.1f} GB of host "
        f"memory, {plan.micro_batches} micro-batches together"
    )
