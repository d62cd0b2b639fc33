"""Chat templates by name, for models without one of their own.

What the assistant says, its end of turn included, stands between ``generation`` markers, so that
transformers can tell those tokens from the others.
"""

from typing import NamedTuple

from trl.chat_template_utils import llama3_training_chat_template


class Template(NamedTuple):
    """A chat template, and the tokens that it needs."""

    text: str
    markers: tuple[str, ...]
    """Each has to be one token of the tokenizer."""
    end_of_turn: str
    """The marker with which the assistant ends its turn."""


_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

NAMED = {
    "chatml": Template(_CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": Template(
        llama3_training_chat_template,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
}
