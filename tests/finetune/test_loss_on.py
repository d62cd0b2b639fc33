"""What is learnt: never padding, never a prompt; and the labels are those of plain TRL."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import processors
from transformers import AutoTokenizer

from poros.errors import DataFormatError
from poros.finetune.data import Rows
from poros.finetune.run import _dataset, _row_length
from poros.finetune.tokens import IGNORED, NAMED, Tokens, tokenize
from poros.finetune.trainers import Kto, _collator
from poros.gates import tiny
from poros.recipes.recipe import Recipe
from tests.finetune.subjects import rows, tokens_of, write_model, write_rows

# ChatML without marks of the assistant's turns, as most models have it.
UNMARKED = NAMED["chatml"][0].replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def made(model: Path, data: Path, form: str, **said: object) -> tuple[Recipe, Rows, Any, Tokens]:
    said["training__method"] = {"preferences": "dpo", "labelled": "kto"}.get(form, "sft")
    return tokens_of(model, data / f"{form}.jsonl", training__pad_to_multiple_of=16, **said)


def batch_of(recipe: Recipe, tokens: Tokens, tokenizer: Any, base: Any, count: int) -> Any:
    length = _row_length(recipe, tokens)
    dataset = _dataset(recipe, tokens, length)
    # The last, since best fit leaves those that are not full to the end.
    last = list(dataset.select(range(len(dataset) - count, len(dataset))))
    return _collator(recipe, base, tokenizer.pad_token_id, length)(last)


@pytest.mark.parametrize("packing", [False, True])
def test_padding_is_never_learnt(packing: bool, model: Path, data: Path) -> None:
    """The padding token is the end of text, which is learnt where a document ends with it."""
    said: dict[str, Any] = {"training__packing": packing, "training__max_length": 80}
    recipe, _, tokenizer, tokens = made(
        model, data, "completions", data__chat_template="model", **said
    )
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    count = 4 if not packing else 1
    base = tiny.load_base(model, dtype=torch.float32, quantize=False)
    batch = batch_of(recipe, tokens, tokenizer, base, count)
    labels, ids = batch["labels"], batch["input_ids"]
    assert ids.shape[1] % 16 == 0
    if packing:
        starts = batch["position_ids"] == 0
        is_padding = starts & (ids == tokenizer.pad_token_id)  # no document begins with its end
        num_documents = int((starts & ~is_padding).sum())
        assert num_documents > 1
    else:
        is_padding = batch["attention_mask"] == 0
        num_documents = count
    assert is_padding.any() and (ids[is_padding] == tokenizer.pad_token_id).all()
    assert (labels[is_padding] == IGNORED).all()
    assert (labels[~is_padding] == tokenizer.eos_token_id).sum() == num_documents


@pytest.mark.parametrize("template", ["chatml", "unmarked"])
def test_only_the_assistant_is_learnt(template: str, data: Path, tmp_path: Path) -> None:
    """With the template's marks, and without them."""
    model = write_model(tmp_path / "model", template=UNMARKED)
    chosen = "model" if template == "unmarked" else template
    _, found, tokenizer, tokens = made(model, data, "messages", data__chat_template=chosen)
    for row, labels in zip(found.rows, tokens.columns["labels"], strict=True):
        learnt = tokenizer.decode([each for each in labels if each != IGNORED])
        said = [each["content"] for each in row["messages"] if each["role"] == "assistant"]
        end = "<|im_end|>" + ("\n" if template == "unmarked" else "")
        assert learnt == "".join(each + end for each in said)


@pytest.mark.parametrize("is_marked", [True, False])
def test_an_answer_that_begins_inside_a_token_is_refused(
    is_marked: bool, data: Path, tmp_path: Path
) -> None:
    """The blank before it belongs to its first token, which would not be learnt."""
    template = NAMED["chatml"][0] if is_marked else UNMARKED
    template = template.replace("'\\n' }}\n{%- if", "': ' }}\n{%- if")
    template = template.replace("assistant\\n", "assistant: ")
    model = write_model(tmp_path / "model", template=template)
    with pytest.raises(DataFormatError) as error:
        made(model, data, "messages", data__chat_template="model")
    lines = str(error.value).splitlines()
    assert len(lines) == 31 and lines[-1] == "and 170 more"
    assert "messages.jsonl:1: " in lines[0] and "the token ' while'" in lines[0]
    assert "--chat-template" in lines[0] and "--loss-on all" in lines[0]
    _, _, _, tokens = made(
        model, data, "messages", data__chat_template="model", data__loss_on="all"
    )
    assert len(tokens.lengths) == 200
    for ids, labels in zip(tokens.columns["input_ids"], tokens.columns["labels"], strict=True):
        assert list(ids) == list(labels)


def learnt(tokenizer: Any, tokens: Tokens) -> str:
    (labels,) = tokens.columns["labels"]
    return str(tokenizer.decode([each for each in labels if each != IGNORED]))


def test_a_template_that_renders_turns_differently_later_is_refused(
    data: Path, tmp_path: Path
) -> None:
    """As some that cut what the model has thought: nobody could say which tokens are whose."""
    template = UNMARKED.replace(
        "message['content'] + '<|im_end|>' }}\n{%- else",
        "(message['content'] if loop.last else '') + '<|im_end|>' }}\n{%- else",
    )
    assert template != UNMARKED
    model = write_model(tmp_path / "model", template=template)
    with pytest.raises(DataFormatError, match=r"messages.jsonl:1: .*--loss-on all"):
        made(model, data, "messages", data__chat_template="model")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (UNMARKED, r"messages.jsonl:1: messages\[0\]: expected a message of the user before"),
        ("{% for message", r"^data.chat_template: .* in its line 1: .*--chat-template\)$"),
    ],
)
def test_an_answer_to_nothing_and_a_broken_template_are_refused(
    template: str, said: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", template=template)
    answer = {"role": "assistant", "content": "a slot"}
    write_rows(tmp_path / "messages.jsonl", [{"messages": [answer]}] * 2)
    with pytest.raises(DataFormatError, match=said):
        made(model, tmp_path, "messages", data__chat_template="model")


@pytest.mark.parametrize("form", ["messages", "completions", "text", "preferences", "labelled"])
def test_the_tokens_are_those_of_plain_trl(
    form: str, model: Path, data: Path, tmp_path: Path
) -> None:
    _, found, tokenizer, tokens = made(model, data, form)
    options: dict[str, Any] = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True}
    if form == "preferences":
        kind: Any = trl.DPOTrainer
        arguments: Any = trl.DPOConfig(max_length=None, **options)
    elif form == "labelled":
        kind = trl.KTOTrainer
        options["per_device_train_batch_size"] = 3
        arguments = trl.KTOConfig(max_length=None, **options)
    else:
        kind = trl.SFTTrainer
        assistant = form == "messages"
        arguments = trl.SFTConfig(max_length=None, assistant_only_loss=assistant, **options)
    plain = kind(
        tiny.load_base(model, dtype=torch.float32, quantize=False),
        args=arguments,
        train_dataset=Dataset.from_list(found.rows),
        processing_class=tokenizer,
    ).train_dataset
    ours_as_read: Any = tokens.columns
    if form == "labelled":  # with an answer of another row beside each, and labels as they are
        prepared = Kto._prepare_dataset(
            SimpleNamespace(calculate_KL=True), tokens.dataset(), None, arguments, "train"
        )
        ours_as_read = {name: prepared[name] for name in plain.column_names if "ids" in name}
        assert prepared["label"][:4] == plain["label"][:4] == [False, True, True, False]
        assert "KL_completion_ids" in ours_as_read
    for column, ours in ours_as_read.items():
        assert [list(each) for each in ours] == [list(each) for each in plain[column]], column


def test_rows_without_anything_to_learn_are_left_out_and_counted(
    model: Path, tmp_path: Path
) -> None:
    content = rows("completions", 4)
    content[1]["prompt"] = "the slot " * 40
    content[2]["completion"] = "the slot " * 40
    write_rows(tmp_path / "completions.jsonl", content)
    _, _, _, tokens = made(model, tmp_path, "completions", training__max_length=32)
    assert (len(tokens.lengths), tokens.num_cut, tokens.num_dropped) == (3, 2, 1)
    assert max(tokens.lengths) == 32
    with pytest.raises(DataFormatError, match="--max-length"):
        write_rows(tmp_path / "completions.jsonl", content[1:2])
        made(model, tmp_path, "completions", training__max_length=32)


def test_a_template_that_the_tokenizer_has_no_tokens_for(model: Path, data: Path) -> None:
    with pytest.raises(DataFormatError, match=r"start_header_id.* for llama3"):
        made(model, data, "messages", data__chat_template="llama3")
    with pytest.raises(DataFormatError, match="without one; give chatml or llama3"):
        made(model, data, "messages", data__chat_template="model")


def test_blanks_are_learnt_where_a_tokenizer_trims_them(model: Path, tmp_path: Path) -> None:
    said = "  the   slot  "
    turns = [{"role": "user", "content": " a "}, {"role": "assistant", "content": said}]
    write_rows(tmp_path / "messages.jsonl", [{"messages": turns}])
    recipe, found, tokenizer, tokens = made(model, tmp_path, "messages")
    assert learnt(tokenizer, tokens) == said + "<|im_end|>"
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert learnt(tokenizer, tokenize(found, tokenizer, recipe)) == said + "<|im_end|>"


def test_the_template_is_saved_with_the_end_of_its_turns(model: Path, data: Path) -> None:
    _, _, tokenizer, _ = made(model, data, "messages")
    assert tokenizer.eos_token == "<|im_end|>"
    assert AutoTokenizer.from_pretrained(model).eos_token == "<eos>"
