"""Tokenizes rows of text, with labels only on what is trained on.

A label is the token itself where the model is to learn it, and -100 everywhere else: on prompts, on
the other side of a conversation. Padding comes later, in the collator, with labels of -100 of its
own, so that it is never learnt, whichever token it is made of.

Ids and labels are those that TRL's own preparation makes of the same rows. It is done here because
what does not fit has to be named by file and line, and because the number of steps has to be known
before the base is loaded.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers
from jinja2 import TemplateSyntaxError
from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    llama3_training_chat_template,
)
from trl.data_utils import common_prefix_length
from xxhash import xxh3_128

from poros.errors import DataFormatError, RecipeError, quoted, refuse_all
from poros.finetune.data import Rows
from poros.finetune.forms import Form
from poros.finetune.images import ImageCollator
from poros.loaders.settings import describe_error
from poros.loaders.tokenizer import read_tokenizer
from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

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
    "chatml": (_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": (
        llama3_training_chat_template,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
}
"""Chat templates by name, and the tokens that each needs; the last is the end of a turn. What the
assistant says, its end of turn included, stands between ``generation`` markers."""
IGNORED = -100
"""The label of a token that is not learnt."""


class _Made(NamedTuple):
    """The tokens of one row."""

    columns: Mapping[str, Sequence[int]]
    length: int
    num_tokens: int
    num_learnt: int
    is_cut: bool = False
    images: bytes = b""


@dataclass
class Tokens:
    """Rows of tokens.

    Attributes:
        columns: Rows by TRL's names; of KTO's ``label`` each is one number.
        lengths: Tokens of each row; of a pair those of the longer one.
        numbers: Index of the row of data that each was made of.
        images: A digest of the images of each row; empty for a text.
        num_tokens: Tokens of all rows, without padding.
        num_learnt: Tokens with a label.
        num_cut: Rows that were longer than allowed.
        num_dropped: Rows without a token to learn, most often because they were cut before it.
    """

    columns: "dict[str, list[array[int]]]" = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    num_learnt: int = 0
    num_cut: int = 0
    num_dropped: int = 0

    @property
    def largest(self) -> int:
        """The largest token."""
        columns = self.columns.values()
        return max(max(row, default=0) for rows in columns for row in rows)

    def digest(self) -> str:
        """Hash the tokens, their labels, and their images as the processor gives them."""
        found = xxh3_128(b"".join(self.images))
        for name, rows in sorted(self.columns.items()):
            found.update(f"{name} {len(rows)}\n".encode())
            for row in rows:
                found.update(len(row).to_bytes(8, "little"))
                found.update(row.tobytes())
        return found.hexdigest()

    def dataset(self, *, has_lengths: bool = False) -> "Dataset":
        """Convert to a dataset for TRL's trainers, with a column ``length`` if asked for."""
        import numpy
        from datasets import Dataset

        found: dict[str, Any] = {
            name: [numpy.asarray(row) for row in rows] for name, rows in self.columns.items()
        }
        if has_lengths:
            found["length"] = self.lengths
        return Dataset.from_dict(found)

    def add(self, made: _Made, number: int) -> None:
        """Add what has been made of the row of that number."""
        self.num_cut += made.is_cut
        if not made.num_learnt:
            self.num_dropped += 1
            return
        for name, ids in made.columns.items():
            self.columns.setdefault(name, []).append(array("i", ids))
        self.lengths.append(made.length)
        self.numbers.append(number)
        self.images.append(made.images)
        self.num_tokens += made.num_tokens
        self.num_learnt += made.num_learnt


def load_tokenizer(recipe: Recipe, form: Form, processor: Any = None) -> "PreTrainedTokenizerBase":
    """Load the model's tokenizer, with the template that the recipe names.

    Args:
        processor: The model's processor, for rows with images; it uses this tokenizer afterwards.

    Raises:
        CheckpointFormatError: If there is none.
        DataFormatError: If it has no template for messages, or not the tokens that one needs.
        UnsupportedModelError: If it is defined by code of its own.
    """
    source = recipe.model.source
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(source)
    if processor is not None and not tokenizer.chat_template:
        tokenizer.chat_template = processor.chat_template
    name = recipe.data.chat_template
    if name in NAMED:
        template, markers = NAMED[name]
        vocabulary = tokenizer.get_vocab()
        missing = [each for each in markers if each not in vocabulary]
        if missing:
            raise DataFormatError(
                f"data.chat_template: expected a tokenizer with the tokens {', '.join(missing)} "
                f"for {name}, found none; take another template, or a .jinja file of your own"
            )
        tokenizer.chat_template = template
        if form.is_chat or form.name == "instructions":
            tokenizer.eos_token = markers[-1]  # so that generation ends there
    elif name != "model":
        tokenizer.chat_template = Path(name).expanduser().read_text(encoding="utf-8")
    if form.is_chat and not tokenizer.chat_template:
        raise DataFormatError(
            "data.chat_template: expected a chat template for rows of messages, found a model "
            f"without one; give {' or '.join(NAMED)} or a .jinja file (--chat-template)"
        )
    if tokenizer.eos_token is None:
        raise DataFormatError(
            f"model.source: expected a tokenizer with an end-of-text token, found {quoted(source)} "
            "without one; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if processor is not None:
        tokenizer.truncation_side = "right"
        processor.tokenizer = tokenizer
        processor.chat_template = tokenizer.chat_template
    return tokenizer


def image_collator(processor: "ProcessorMixin", recipe: Recipe) -> ImageCollator:
    """The collator of rows with images.

    Raises:
        DataFormatError: If the template does not mark what is learnt.
        RecipeError: If transformers is too old to mark it in rows with images.
    """
    if recipe.data.loss_on == "all":
        return ImageCollator(processor, recipe)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18):  # TRL refuses it too
        raise RecipeError(
            "data.loss_on (--loss-on): expected transformers 5.18 or newer to train on the "
            f"assistant's tokens of rows with images, found {transformers.__version__}; install "
            "it, or train on every token (--loss-on all)"
        )
    template = _marked_template(processor)
    if template is None:
        raise DataFormatError(
            "data.chat_template: expected a chat template that marks the assistant's tokens "
            "with {% generation %}, or one of those that TRL knows, found another; give such a "
            "template (--chat-template), or train on every token (--loss-on all)"
        )
    return ImageCollator(processor, recipe, template)


def tokenize(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    recipe: Recipe,
    images: ImageCollator | None = None,
) -> Tokens:
    """Tokenize rows, whose form is settled, and make their labels.

    Raises:
        DataFormatError: If rows cannot be rendered, or nothing is left to learn from.
    """
    work = _Work(tokenizer, recipe, rows.form, images)
    tokens = Tokens()
    wrong: list[str] = []
    num_proc = recipe.training.more.get("dataset_num_proc")
    with ProcessPoolExecutor(num_proc) if num_proc else nullcontext() as pool:
        parts = rows.rows
        made = pool.map(work.made, parts, chunksize=256) if pool else map(work.made, parts)
        for number, each in enumerate(made):
            if isinstance(each, _Made):
                tokens.add(each, number)
            else:
                wrong.append(f"{rows.places[number]}: {each}")
    if not wrong and not tokens.lengths:
        most = recipe.training.max_length
        wrong.append(
            f"{rows.places[0]}: expected rows with tokens to learn within {most}, found none in "
            f"{len(rows.rows)}; raise training.max_length (--max-length)"
        )
    refuse_all(DataFormatError, wrong)
    return tokens


class _Work:
    """The state that all rows share."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        recipe: Recipe,
        form: Form,
        images: ImageCollator | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_tokens_map  # made anew whenever it is asked for
        self._images = images
        self._form = form
        self._most = recipe.training.max_length
        loss_on: str = recipe.data.loss_on
        if loss_on == "auto":
            loss_on = {"messages": "assistant", "completions": "completion"}.get(form.name, "all")
        elif loss_on == "completion" and form.name == "messages":
            loss_on = "assistant"  # of an instruction, whose completion it is
        self._loss_on = loss_on
        self._marked = _marked_template(tokenizer) if loss_on == "assistant" else None
        self._is_reward = recipe.training.method == "reward"
        answers = {"preferences": ("chosen", "rejected"), "text": ("text",)}
        self._answers = answers.get(form.name, ("completion",))

    def made(self, row: dict[str, Any]) -> "_Made | str":
        """Tokenize a row: what becomes of it, or the problem with it."""
        try:
            return self._made(row)
        except DataFormatError as error:
            return str(error)
        except TemplateSyntaxError as error:  # not of this row
            raise DataFormatError(
                "data.chat_template: expected a template of Jinja, found in its line "
                f"{error.lineno}: {quoted(str(error.message), is_bare=True)}; mend it, or take "
                "another (--chat-template)"
            ) from error
        except Exception as error:  # of a template, which may raise whatever it likes
            return (
                f"expected a row that the chat template can render, found: {describe_error(error)};"
                " mend the row, or take another template (--chat-template)"
            )

    def _made(self, row: dict[str, Any]) -> _Made:
        form = self._form
        if self._images is not None:
            ids, mask, pixels = self._images.tokens(row)
            return self._example(ids, mask)._replace(images=pixels)
        if form.name == "text":
            return self._example(*self._learnt(self._ended(row["text"])))
        if form.name == "messages":
            return self._example(*self._learnt(*self._spans(row["messages"], row)))
        if form.name == "preferences" and "prompt" not in row:
            from trl import extract_prompt

            row = {**row, **extract_prompt(row)}
        prompt = row["prompt"]
        texts = [prompt + row[name] for name in self._answers]
        if form.is_chat:
            before, _ = self._learnt(self._render(row, prompt, add_generation_prompt=True))
            made = [self._learnt(*self._spans(each, row)) for each in texts]
        else:
            before, _ = self._learnt(prompt)
            made = [self._learnt(self._ended(each)) for each in texts]
        start = min(common_prefix_length(before, ids) for ids, _ in made)
        if form.name != "completions":
            return self._judged(row, start, [ids for ids, _ in made])
        ((ids, mask),) = made
        if self._loss_on != "all":
            mask[:start] = [0] * start
        return self._example(ids, mask)

    def _learnt(
        self, text: str, spans: Sequence[tuple[int, int]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Tokenize a text; return tokens, and which are in a span of what is learnt (None: all)."""
        found = self._tokenizer(
            text,
            add_special_tokens=not self._form.is_chat,
            return_offsets_mapping=spans is not None,
        )
        ids: list[int] = found["input_ids"]
        if spans is None:
            return ids, [1] * len(ids)
        return ids, _in_spans(text, found["offset_mapping"], spans)

    def _example(self, ids: list[int], mask: list[int]) -> _Made:
        """A row of SFT."""
        is_cut = len(ids) > self._most
        ids, mask = ids[: self._most], mask[: self._most]
        labels = [token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)]
        # The first token has nothing before it to be predicted from.
        num_learnt = sum(mask[1:])
        columns = {"input_ids": ids, "labels": labels}
        return _Made(columns, len(ids), len(ids), num_learnt, is_cut)

    def _judged(self, row: dict[str, Any], start: int, answers: list[list[int]]) -> _Made:
        """A row of DPO, of KTO, or of a reward model, for which TRL leaves out long ones.

        Each of the answers begins with the prompt, of length ``start``.
        """
        length = max(map(len, answers))
        is_cut = length > self._most
        if self._is_reward:
            columns = {f"{name}_ids": ids for name, ids in zip(self._answers, answers, strict=True)}
            num_tokens = sum(map(len, answers))
            return _Made(columns, length, num_tokens, 0 if is_cut else num_tokens)
        answers = [ids[: self._most] for ids in answers]
        columns = {"prompt_ids": answers[0][:start]}
        for name, ids in zip(self._answers, answers, strict=True):
            columns[f"{name}_ids"] = ids[start:]
        if self._form.name == "labelled":
            columns["label"] = [int(row["label"])]
        num_tokens = sum(map(len, answers))
        has_answers = start < min(map(len, answers))
        num_learnt = num_tokens - start * len(answers) if has_answers else 0
        return _Made(columns, min(length, self._most), num_tokens, num_learnt, is_cut)

    def _spans(
        self, messages: list[dict[str, Any]], row: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Render a conversation, and find the spans of the assistant; None if all is learnt."""
        if self._loss_on == "all":
            return self._render(row, messages), None
        if self._marked is not None:
            from transformers.utils.chat_template_utils import render_jinja_template

            texts, spans = render_jinja_template(
                [messages],
                tools=_tools(row),
                chat_template=self._marked,
                return_assistant_tokens_mask=True,
                **self._special,
            )
            return texts[0], spans[0]
        # What a turn adds to the text of the turns before it, behind the prompt for it, is it.
        text = self._render(row, messages)
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise DataFormatError(
                    "messages[0]: expected a message of the user before the assistant's, found "
                    "none; add one, or train on every token (--loss-on all)"
                )
            before = self._render(row, messages[:number], add_generation_prompt=True)
            upto = self._render(row, messages[: number + 1])
            if not (upto.startswith(before) and text.startswith(upto)):
                raise ValueError(
                    "this template renders turns differently once others follow, so the "
                    "assistant's cannot be told apart; --loss-on all learns every token"
                )
            found.append((len(before), len(upto)))
        return text, found

    def _render(self, row: dict[str, Any], messages: Any, **options: Any) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=_tools(row), tokenize=False, **options
            )
        )

    def _ended(self, text: str) -> str:
        end: str = self._tokenizer.eos_token
        return text if text.endswith(end) else text + end


def _in_spans(
    text: str, places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[int]:
    """Mark the tokens that begin in one of the spans; refuse one that begins before a span.

    transformers' own mask goes on to the end of the row where a span ends in a character that
    belongs to no token. Blanks may have been trimmed off both ends of a token's place.
    """
    starts = [start for start, _ in spans]
    mask = []
    for first, last in places:
        behind = bisect_right(starts, first)
        if behind < len(starts) and starts[behind] < last:
            raise DataFormatError(
                "expected answers that begin with a token of their own, found the token "
                f"{quoted(text[first:last], limit=60)}, which begins in the prompt and would "
                "not be trained on; remove blanks at the start of the answer, take another "
                "template (--chat-template), or train on every token (--loss-on all)"
            )
        place = first if first < last else first - 1
        span = bisect_right(starts, place) - 1
        mask.append(int(span >= 0 and place < spans[span][1]))
    return mask


def _tools(row: dict[str, Any]) -> Any:
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def _marked_template(tokenizer: "PreTrainedTokenizerBase | ProcessorMixin") -> str | None:
    """Return a template that marks the assistant's tokens: the model's, TRL's, or None."""
    template = tokenizer.chat_template
    if has_generation_markers(template):
        return template if isinstance(template, str) else template["default"]
    try:
        found: str | None = get_training_chat_template(tokenizer)
    except (ValueError, RecursionError):  # the latter from a template without end
        return None
    return found
