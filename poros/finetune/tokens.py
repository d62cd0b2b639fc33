"""Tokenizer and chat template of a run."""

from pathlib import Path
from typing import Any

from poros.errors import RecipeError, quoted
from poros.recipes.recipe import Recipe

_ANSWER = "{% generation %}{{ message['content'] }}%s{% endgeneration %}"
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}"
        + _ANSWER.replace("%s", "<|im_end|>{{ eos_token }}")
        + "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}Assistant: "
        + _ANSWER.replace("%s", "{{ eos_token }}")
        + "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
    ),
}
"""Each marks what the assistant says, its end included, so that a loss can be taken on it alone."""


def tokenizer_of(recipe: Recipe, is_conversational: bool) -> Any:
    """The tokenizer of a recipe's model, with the chat template that the recipe names.

    Raises:
        RecipeError: If there is none, or rows are messages and there is no template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise RecipeError(
            f"model: expected a tokenizer beside the model {quoted(recipe.model)}, found none: "
            f"{quoted(reason, is_bare=True)}; put its tokenizer files into the folder"
        ) from error
    if tokenizer.eos_token is None:
        raise RecipeError(
            "model: expected a tokenizer with a token for the end of a text, found one without"
        )
    if tokenizer.pad_token is None:
        # Only positions without a label are filled with it.
        tokenizer.pad_token = tokenizer.eos_token
    if recipe.chat_template is not None:
        tokenizer.chat_template = template_of(recipe.chat_template)
    if is_conversational and not tokenizer.chat_template:
        raise RecipeError(
            "chat_template: expected one for rows of messages, found none with the model; add "
            "`chat_template: chatml` (--chat-template chatml), or train on prompt and completion"
        )
    return tokenizer


def template_of(name: str) -> str:
    """The template of that name, or in that file.

    Raises:
        RecipeError: If there is none.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"chat_template: expected {', '.join(TEMPLATES)} or a file that is there, found "
            f"{quoted(name)}"
        ) from error
