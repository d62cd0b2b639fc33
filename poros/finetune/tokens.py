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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.data_utils import common_prefix_length

from poros.errors import DataFormatError, quoted
from poros.finetune.data import Rows
from poros.finetune.forms import Form
from poros.finetune.images import ImageCollator
from poros.finetune.templates import NAMED
from poros.loaders.tokenizer import read_tokenizer
from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

IGNORED = -100
"""The label of a token that is not learnt."""
_MOST_SHOWN = 30
_COUNTS = ("length", "num_tokens", "num_learnt", "is_cut", "problem", "images")
"""What is said of a row beside its columns."""


@dataclass
class Tokens:
    """Rows of tokens.

    Attributes:
        columns: For SFT ``input_ids`` and ``labels``, for DPO ``prompt_ids``, ``chosen_ids`` and
            ``rejected_ids`` (for a reward model the latter two, with the prompt in each), for KTO
            ``prompt_ids``, ``completion_ids`` and ``label``, of one number; each a list of rows.
        lengths: Tokens of each row; of a pair those of the longer one.
        numbers: Of the rows of data that they were made of.
        images: A digest of the images of each row; empty for a text.
        num_tokens: Of all rows, without padding.
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

    def add(self, made: Mapping[str, Any], number: int) -> None:
        """Add what has been made of the row of that number."""
        self.num_cut += made["is_cut"]
        if not made["num_learnt"]:
            self.num_dropped += 1
            return
        for name, ids in made.items():
            if name not in _COUNTS:
                self.columns.setdefault(name, []).append(array("i", ids))
        self.lengths.append(made["length"])
        self.numbers.append(number)
        self.images.append(made["images"])
        self.num_tokens += made["num_tokens"]
        self.num_learnt += made["num_learnt"]


def load_tokenizer(recipe: Recipe, form: Form, processor: Any = None) -> "PreTrainedTokenizerBase":
    """Load the model's tokenizer, with the template that the recipe names.

    Args:
        recipe: With the model.
        form: Of the rows.
        processor: Of the model, for rows with images: it uses this tokenizer from then on.

    Raises:
        CheckpointFormatError: If there is none.
        DataFormatError: If it has no template for messages, or lacks tokens that the template is
            made of.
        UnsupportedModelError: If it is defined by code of its own.
    """
    source = recipe.model.source
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(source)
    if processor is not None and not tokenizer.chat_template:
        tokenizer.chat_template = processor.chat_template
    name = recipe.data.chat_template
    if name in NAMED:
        template = NAMED[name]
        vocabulary = tokenizer.get_vocab()
        missing = [each for each in template.markers if each not in vocabulary]
        if missing:
            raise DataFormatError(
                f"data.chat_template: expected a tokenizer with the tokens {', '.join(missing)} "
                f"for {name}, found none; take another template, or a .jinja file of your own"
            )
        tokenizer.chat_template = template.text
        if form.is_chat or form.name == "instructions":
            tokenizer.eos_token = template.end_of_turn  # so that generation ends there
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
    if not tokenizer.is_fast:
        raise DataFormatError(
            f"model.source: expected a fast tokenizer, found a {type(tokenizer).__name__} for "
            f"{quoted(source)}; convert it to a tokenizer.json"
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
    """
    if recipe.data.loss_on == "all":
        return ImageCollator(processor, recipe)
    template = _marked_template(processor)
    if template is None:
        raise DataFormatError(
            "data.chat_template: expected a chat template that marks the assistant's tokens "
            "with {% generation %}, or one of those that TRL knows, found another; give such a "
            "template (--chat-template), or learn every token (--loss-on all)"
        )
    return ImageCollator(processor, recipe, template)


def tokenize(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    recipe: Recipe,
    num_proc: int | None = None,
    images: ImageCollator | None = None,
) -> Tokens:
    """Tokenize rows and make their labels.

    Args:
        rows: Of a form that is settled.
        tokenizer: With the template for messages.
        recipe: What is learnt, and the length at which rows are cut.
        num_proc: Processes that share the work; None to do it in this one.
        images: Of rows with images.

    Raises:
        DataFormatError: If rows cannot be rendered, or nothing is left to learn from: file, line,
            and what to do.
    """
    work = _Work(tokenizer, recipe, rows.form, images)
    tokens = Tokens()
    wrong: list[str] = []
    with ProcessPoolExecutor(num_proc) if num_proc else nullcontext() as pool:
        all_made: Iterator[dict[str, Any]] = map(work.made, rows.rows)
        if pool is not None:
            all_made = pool.map(work.made, rows.rows, chunksize=256)
        for number, made in enumerate(all_made):
            if made["problem"] is None:
                tokens.add(made, number)
            elif len(wrong) < _MOST_SHOWN:
                wrong.append(f"{rows.place(number)}: {made['problem']}")
    if wrong:
        raise DataFormatError("\n".join(wrong))
    if not tokens.lengths:
        most = recipe.training.max_length
        raise DataFormatError(
            f"{rows.place(0)}: expected rows with tokens to learn within {most}, found none in "
            f"{len(rows.rows)}; raise training.max_length (--max-length)"
        )
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
        self._images = images
        self._form = form
        self._most = recipe.training.max_length
        loss_on = recipe.data.loss_on
        if loss_on == "auto":
            loss_on = {"messages": "assistant", "completions": "completion"}.get(form.name, "all")
        elif loss_on == "completion" and form.name == "messages":
            loss_on = "assistant"  # of an instruction, whose completion it is
        self._loss_on = loss_on
        self._marked = _marked_template(tokenizer) if loss_on == "assistant" else None
        self.columns: tuple[str, ...] = ("input_ids", "labels")
        self._is_reward = recipe.training.method == "reward"
        if form.name == "preferences":
            self.columns = ("prompt_ids", "chosen_ids", "rejected_ids")[self._is_reward :]
        elif form.name == "labelled":
            self.columns = ("prompt_ids", "completion_ids", "label")

    def made(self, row: dict[str, Any]) -> dict[str, Any]:
        """Tokenize a row: its columns, and what is counted; or the problem with it."""
        made: dict[str, Any] = dict.fromkeys(self.columns, ())
        made |= {"length": 0, "num_tokens": 0, "num_learnt": 0, "is_cut": False, "problem": None}
        made["images"] = b""
        try:
            if self._form.name == "preferences":
                return made | self._pair(row)
            if self._form.name == "labelled":
                return made | self._labelled(row)
            return made | self._example(row)
        except DataFormatError as error:
            return made | {"problem": str(error)}
        except Exception as error:  # of a template, which may raise whatever it likes
            reason = quoted(str(error) or type(error).__name__, is_bare=True, limit=300)
            problem = (
                f"expected a row that the chat template can render, found: {reason}; mend the row, "
                "or take another template (--chat-template)"
            )
            return made | {"problem": problem}

    def _example(self, row: dict[str, Any]) -> dict[str, Any]:
        """Tokenize a row of SFT."""
        images = b""
        if self._images is not None:
            ids, mask, images = self._images.tokens(row)
        elif self._form.name == "messages":
            ids, mask = self._conversation(row["messages"], row)
        elif self._form.name == "text":
            ids = self._tokenizer(self._ended(row["text"]))["input_ids"]
            mask = [1] * len(ids)
        else:
            prompt, ids = self._prompt_and_whole(row, "completion")
            if self._loss_on == "assistant":
                _, mask = self._conversation(row["prompt"] + row["completion"], row)
            else:
                mask = [1] * len(ids)
            if self._loss_on != "all":
                start = common_prefix_length(prompt, ids)
                mask[:start] = [0] * start
        is_cut = len(ids) > self._most
        ids, mask = ids[: self._most], mask[: self._most]
        labels = [token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)]
        return {
            "input_ids": ids,
            "labels": labels,
            "length": len(ids),
            "num_tokens": len(ids),
            # The first token has nothing before it to be predicted from.
            "num_learnt": sum(mask[1:]),
            "is_cut": is_cut,
            "images": images,
        }

    def _pair(self, row: dict[str, Any]) -> dict[str, Any]:
        """Tokenize a row of DPO."""
        if "prompt" not in row:
            from trl import extract_prompt

            row = {**row, **extract_prompt(row)}
        prompt, chosen = self._prompt_and_whole(row, "chosen")
        _, rejected = self._prompt_and_whole(row, "rejected")
        if self._is_reward:
            return self._scored(chosen, rejected)
        start = min(common_prefix_length(prompt, chosen), common_prefix_length(prompt, rejected))
        length = max(len(chosen), len(rejected))
        chosen, rejected = chosen[: self._most], rejected[: self._most]
        num_tokens = len(chosen) + len(rejected)
        has_answers = start < min(len(chosen), len(rejected))
        return {
            "prompt_ids": prompt[:start],
            "chosen_ids": chosen[start:],
            "rejected_ids": rejected[start:],
            "length": min(length, self._most),
            "num_tokens": num_tokens,
            "num_learnt": num_tokens - 2 * start if has_answers else 0,
            "is_cut": length > self._most,
        }

    def _scored(self, chosen: list[int], rejected: list[int]) -> dict[str, Any]:
        """A row of a reward model; TRL leaves out those that are too long, and so does this."""
        length, num_tokens = max(len(chosen), len(rejected)), len(chosen) + len(rejected)
        return {
            "chosen_ids": chosen,
            "rejected_ids": rejected,
            "length": length,
            "num_tokens": num_tokens,
            "num_learnt": num_tokens if length <= self._most else 0,
        }

    def _labelled(self, row: dict[str, Any]) -> dict[str, Any]:
        """Tokenize a row of KTO."""
        prompt, whole = self._prompt_and_whole(row, "completion")
        start = common_prefix_length(prompt, whole)
        cut = whole[: self._most]
        return {
            "prompt_ids": cut[:start],
            "completion_ids": cut[start:],
            "label": [int(row["label"])],
            "length": len(cut),
            "num_tokens": len(cut),
            "num_learnt": max(0, len(cut) - start),
            "is_cut": len(whole) > self._most,
        }

    def _prompt_and_whole(self, row: dict[str, Any], answer: str) -> tuple[list[int], list[int]]:
        """Tokenize the prompt alone, and with the answer."""
        if self._form.is_chat:
            render = self._renderer(row)
            return (
                render(row["prompt"], add_generation_prompt=True)["input_ids"],
                render(row["prompt"] + row[answer])["input_ids"],
            )
        prompt, whole = row["prompt"], self._ended(row["prompt"] + row[answer])
        return self._tokenizer(prompt)["input_ids"], self._tokenizer(whole)["input_ids"]

    def _conversation(
        self, messages: list[dict[str, Any]], row: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        render = self._renderer(row)
        if self._loss_on == "all":
            ids = render(messages)["input_ids"]
            return ids, [1] * len(ids)
        return self._tokens_in_spans(*self._spans(messages, row))

    def _tokens_in_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        """Tokenize a text, and mark the tokens that begin in one of its spans.

        transformers' own mask goes on to the end of the row where a span ends in a character that
        belongs to no token. Blanks may have been trimmed off both ends of a token's place.

        Raises:
            DataFormatError: If a token begins before a span and ends in it.
        """
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = []
        for first, last in found["offset_mapping"]:
            if any(first < start < last for start, _ in spans):
                raise DataFormatError(
                    "expected answers that begin with a token of their own, found the token "
                    f"{quoted(text[first:last], limit=60)}, which begins in the prompt and would "
                    "not be learnt; remove blanks at the start of the answer, take another "
                    "template (--chat-template), or learn every token (--loss-on all)"
                )
            place = first if first < last else first - 1
            mask.append(int(any(start <= place < end for start, end in spans)))
        return found["input_ids"], mask

    def _spans(
        self, messages: list[dict[str, Any]], row: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and find the spans of the assistant."""
        if self._marked is not None:
            from transformers.utils.chat_template_utils import render_jinja_template

            texts, spans = render_jinja_template(
                [messages],
                tools=_tools(row),
                chat_template=self._marked,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
            return texts[0], spans[0]
        # What a turn adds to the text of the turns before it, behind the prompt for it, is it.
        render = self._renderer(row, tokenize=False)
        text = render(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = render(messages[:number], add_generation_prompt=True)
            upto = render(messages[: number + 1])
            if not (upto.startswith(before) and text.startswith(upto)):
                raise ValueError(
                    "this template renders turns differently once others follow, so the "
                    "assistant's cannot be told apart; --loss-on all learns every token"
                )
            spans.append((len(before), len(upto)))
        return text, spans

    def _renderer(self, row: dict[str, Any], tokenize: bool = True) -> Callable[..., Any]:
        def render(messages: list[dict[str, Any]], **options: Any) -> Any:
            return self._tokenizer.apply_chat_template(
                messages, tools=_tools(row), tokenize=tokenize, return_dict=tokenize, **options
            )

        return render

    def _ended(self, text: str) -> str:
        end: str = self._tokenizer.eos_token
        return text if text.endswith(end) else text + end


def _tools(row: dict[str, Any]) -> Any:
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def _marked_template(tokenizer: "PreTrainedTokenizerBase | ProcessorMixin") -> str | None:
    """Return a template that marks the assistant's tokens: the model's, TRL's, or None."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template = tokenizer.chat_template
    if has_generation_markers(template):
        return template if isinstance(template, str) else template["default"]
    try:
        found: str | None = get_training_chat_template(tokenizer)
    except (ValueError, RecursionError):  # the latter from a template without end
        return None
    return found
