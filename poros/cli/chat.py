"""``poros chat``: a conversation with a model and its adapter."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from poros.cli.imports import quick_imports
from poros.cli.shared import readable_errors
from poros.config import LEAST_BUDGET, parse_num_bytes

_OPTIONS = {"vram_budget": "--vram"}


def chat(
    adapter: Annotated[Path, typer.Argument(help="Folder of the adapter or of its run.")],
    base: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint or store of the base.", show_default="the one named in the adapter"
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Ask one question and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    vram: Annotated[
        str | None,
        typer.Option(help="GPU memory budget, such as 8GiB.", show_default="the free memory"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.")] = 0,
) -> None:
    """Chat with a model and its adapter; a base that does not fit on the GPU is streamed.

    /reset clears the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.
    """
    with readable_errors(_OPTIONS):
        with quick_imports():
            from poros.cli.conversation import Chat, questions
            from poros.merging.base import base_to_load
            from poros.merging.saved_adapter import SavedAdapter, adapter_folder

        if vram is not None:
            parse_num_bytes(vram, "vram_budget", at_least=LEAST_BUDGET)
        saved = SavedAdapter(adapter_folder(adapter))
        source, revision = (base, None) if base is not None else base_to_load(saved)
        talk = Chat(
            saved,
            source,
            revision=revision,
            vram=vram,
            system=system,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
        hint = partial(typer.echo, err=True)
        for note in talk.notes:
            hint(note)
        asked = [prompt] if prompt is not None else questions(lambda: input("> "), talk, hint)
        for question in asked:
            talk.answer(question, partial(typer.echo, nl=False))
            typer.echo()
            sys.stdout.flush()
