"""Every way to write rows gives the tokens of the same rows as messages in JSONL."""

import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from poros.errors import DataFormatError
from poros.finetune.data import read_data
from poros.finetune.tokens import Tokens
from poros.recipes.checks import checked
from poros.recipes.reading import read_recipe
from poros.recipes.recipe import Recipe
from tests.finetune.subjects import recipe_of, sentence, tokens_of, write_rows

Write = Callable[[Path, list[dict[str, Any]]], Path]

COUNT = 24
PAIRS = [(sentence(each, 3 + each % 5), sentence(each + 1, 4 + each % 9)) for each in range(COUNT)]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def shared(question: str, answer: str, key: str = "conversations") -> dict[str, Any]:
    return {key: [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


CHATS = [chat(*pair) for pair in PAIRS]
SHARED = [shared(*pair) for pair in PAIRS]
ALPACA = [{"instruction": q, "input": "", "output": a, "text": f"{q}: {a}"} for q, a in PAIRS]
QUESTIONS = [{"question": q, "answer": a} for q, a in PAIRS]


def lines(path: Path, content: list[dict[str, Any]]) -> Path:
    return write_rows(path.with_suffix(".jsonl"), content)


def indented(path: Path, content: Any) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(content, indent=2))
    return path


def wrapped(path: Path, content: list[dict[str, Any]]) -> Path:
    return indented(path, {"data": content})


def cells(path: Path, content: list[dict[str, Any]], delimiter: str = ",") -> Path:
    path = path.with_suffix(".csv" if delimiter == "," else ".tsv")
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets save it
        writer = csv.DictWriter(file, content[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(content)
    return path


def parquet(path: Path, content: list[dict[str, Any]]) -> Path:
    path = path.with_name(f"{path.name} [*].parquet")
    Dataset.from_list(content).to_parquet(str(path))
    return path


def packed(write: Write) -> Write:
    def compressed(path: Path, content: list[dict[str, Any]]) -> Path:
        file = write(path, content)
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
        return file.with_name(f"{file.name}.gz")

    return compressed


def saved(path: Path, content: list[dict[str, Any]]) -> Path:
    Dataset.from_list(content).save_to_disk(path)
    return path


def saved_splits(path: Path, content: list[dict[str, Any]]) -> Path:
    others = Dataset.from_list(content[:1])
    DatasetDict(test=others, train=Dataset.from_list(content)).save_to_disk(path)
    return path


def folder_of(write: Write) -> Write:
    def two_files(path: Path, content: list[dict[str, Any]]) -> Path:
        path.mkdir()
        (path / "README.md").write_text("two files")
        write(path / "a", content[:7])
        write(path / "b", content[7:])
        return path

    return two_files


def repository(path: Path, content: list[dict[str, Any]]) -> Path:
    """Write what the hub has: configurations and splits that a page names."""
    (path / "data").mkdir(parents=True)
    lines(path / "data" / "main-train", content[:1])
    lines(path / "data" / "other-held", content)
    (path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: main\n  data_files: [{split: train, path: data/main-train.jsonl}]\n"
        "- config_name: other\n  data_files: [{split: held, path: data/other-held.jsonl}]\n---\n"
    )
    return path


def nowhere(path: Path, content: list[dict[str, Any]]) -> Path:
    return Path("no/data-set")


WAYS: dict[str, tuple[Write, list[dict[str, Any]], str, dict[str, str]]] = {
    "messages in JSONL": (lines, CHATS, "messages", {}),
    "ShareGPT": (lines, SHARED, "ShareGPT conversations", {}),
    "ShareGPT by another name": (
        lines, [shared(*pair, "conversation") for pair in PAIRS], "ShareGPT conversations", {},
    ),
    "messages as conversations": (
        lines, [{"conversations": row["messages"]} for row in CHATS], "ShareGPT conversations", {},
    ),
    "Alpaca": (lines, ALPACA, "Alpaca instructions", {}),
    "Dolly": (
        lines, [{"instruction": q, "context": "", "response": a} for q, a in PAIRS],
        "Dolly instructions", {},
    ),
    "questions": (lines, QUESTIONS, "questions and answers", {}),
    "a list in JSON": (indented, SHARED, "ShareGPT conversations", {}),
    "a list of data": (wrapped, CHATS, "messages", {}),
    "CSV": (cells, ALPACA, "Alpaca instructions", {}),
    "TSV": (partial(cells, delimiter="\t"), QUESTIONS, "questions and answers", {}),
    "Parquet": (parquet, SHARED, "ShareGPT conversations", {}),
    "JSONL in gzip": (packed(lines), CHATS, "messages", {}),
    "JSON in gzip": (packed(indented), SHARED, "ShareGPT conversations", {}),
    "CSV in gzip": (packed(cells), ALPACA, "Alpaca instructions", {}),
    "a saved data set": (saved, CHATS, "messages", {}),
    "saved splits": (saved_splits, ALPACA, "Alpaca instructions", {}),
    "a folder": (folder_of(lines), CHATS, "messages", {}),
    "a folder of Parquet": (folder_of(parquet), SHARED, "ShareGPT conversations", {}),
    "a data set by name": (
        repository, SHARED, "ShareGPT conversations", {"config": "other", "split": "held"},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and no cache but one of the test."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return tokens_of(model, lines(tmp_path_factory.mktemp("expected") / "rows", CHATS))[-1]


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_those_of_messages(
    way: str, model: Path, tmp_path: Path, expected: Tokens
) -> None:
    write, content, title, chosen = WAYS[way]
    source = write(tmp_path / "rows", content)
    said = {f"data__{name}": value for name, value in chosen.items()}
    _, found, _, tokens = tokens_of(model, source, **said)
    assert tokens.columns == expected.columns
    assert found.read == ((title, COUNT),)
    assert found.unused == (("text",) if content is ALPACA else ())


def mixed(folder: Path, model: Path, **data: Any) -> Recipe:
    """A recipe of several sources."""
    file = folder / "recipe.yaml"
    content = {"model": {"source": str(model)}, "data": {"chat_template": "chatml", **data}}
    file.write_text(json.dumps(content, default=str))
    return checked(read_recipe(file, {}))


def test_instructions_follow_the_model_and_the_rows_beside_them(
    model: Path, tmp_path: Path
) -> None:
    row = {"instruction": "a slot", "input": "a block", "output": "its turn", "system": "wait"}
    source = lines(tmp_path / "rows", [row])
    prompt = "a slot\n\na block"
    turns = [{"role": "system", "content": "wait"}, *chat(prompt, "its turn")["messages"]]
    _, _, tokenizer, tokens = tokens_of(model, source)
    chats = lines(tmp_path / "chat", [{"messages": turns}])
    assert tokens.columns == tokens_of(model, chats)[-1].columns
    for loss_on, is_same in (("assistant", True), ("completion", True), ("all", False)):
        found = tokens_of(model, source, data__loss_on=loss_on)[-1]
        assert (found.columns == tokens.columns) == is_same
    *_, plain = tokens_of(model, source, data__chat_template="model")
    ends = [{"prompt": f"wait\n\n{prompt}\n\n", "completion": "its turn"}]
    written = lines(tmp_path / "plain", ends)
    assert plain.columns == tokens_of(model, written, data__chat_template="model")[-1].columns
    assert tokenizer.decode(list(plain.columns["input_ids"][0])).startswith("wait\n\na slot\n\na b")
    with pytest.raises(DataFormatError, match="a chat template for rows of messages"):
        tokens_of(model, source, data__chat_template="model", data__loss_on="assistant")
    for beside, form in ((chats, "messages"), (written, "completions")):
        for sources in ([source, beside], [beside, source]):
            train, _ = read_data(mixed(tmp_path, model, source=sources))
            assert train.form.name == form and train.rows[0] == train.rows[1]
    train, validation = read_data(mixed(tmp_path, model, source=source, validation=chats))
    assert validation is not None and train.rows == validation.rows


def test_all_who_speak_in_a_conversation(model: Path, tmp_path: Path) -> None:
    spoken = [("human", "a"), ("gpt", "b"), ("observation", "c"), ("model", "d"), ("user", "e")]
    spoken.append(("system", ""))
    empty = {"role": None, "content": None, "weight": None}
    turns = [{"from": name, "value": text, **empty} for name, text in spoken]
    source = lines(
        tmp_path / "rows", [{"conversations": turns, "system": "s", "tools": "", "id": 1}]
    )
    found, _ = read_data(recipe_of(model__source=model, data__source=source))
    assert "tools" not in found.rows[0]
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "system"]
    assert [each["role"] for each in found.rows[0]["messages"]] == roles
    assert "".join(each["content"] for each in found.rows[0]["messages"]) == "sabcde"
    assert found.unused == ("id",)


def test_what_arrow_fills_up_with_nulls_is_left_out(model: Path, tmp_path: Path) -> None:
    """Else templates would find calls in every message."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"z": "y"}}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call, other]},
        {"role": "tool", "content": "b", "name": "f"},
        {"role": "assistant", "content": "c"},
    ]
    content = [{"messages": turns}]
    for write in (parquet, saved):
        source = write(tmp_path / write.__name__, content)
        found, _ = read_data(recipe_of(model__source=model, data__source=source))
        assert found.rows == content


def test_several_sources_one_after_the_other(model: Path, tmp_path: Path, expected: Tokens) -> None:
    sources = [
        lines(tmp_path / "a", SHARED[:9]),
        parquet(tmp_path / "b", CHATS[9:14]),
        cells(tmp_path / "c", ALPACA[14:]),
    ]
    recipe = mixed(tmp_path, model, source=sources)
    (tmp_path / "written.yaml").write_text(recipe.as_yaml())
    assert checked(read_recipe(tmp_path / "written.yaml", {})) == recipe
    assert str(recipe.output.folder).endswith("-a+2-sft")
    found, _ = read_data(recipe)
    assert found.rows == CHATS
    assert [number for _, number in found.read] == [9, 5, 10]
    assert found.places[2].endswith("a.jsonl:3")
    assert found.places[9].endswith("b [*].parquet, row 1")
    assert found.places[14].endswith("c.csv:2")
    train, validation = read_data(mixed(tmp_path, model, source=sources, validation=0.25))
    assert validation is not None and len(validation.rows) == 6
    assert sorted(map(str, [*train.rows, *validation.rows])) == sorted(map(str, CHATS))


def test_weights_say_how_often_rows_are_taken(model: Path, tmp_path: Path) -> None:
    sources = [lines(tmp_path / "a", CHATS[:9]), lines(tmp_path / "b", CHATS[9:])]
    recipe = mixed(tmp_path, model, source=sources, weights=[2.5, 0.2])
    (tmp_path / "written.yaml").write_text(recipe.as_yaml())
    assert checked(read_recipe(tmp_path / "written.yaml", {})) == recipe
    found, _ = read_data(recipe)
    times = [found.rows.count(each) for each in CHATS]
    assert sorted(times[:9]) == [2] * 5 + [3] * 4 and sorted(times[9:]) == [0] * 12 + [1] * 3
    assert read_data(recipe)[0] == found
    other = replace(recipe, training=replace(recipe.training, seed=7))
    assert read_data(other)[0].rows != found.rows
    # No row that is held out is trained on, however often rows are taken.
    train, validation = read_data(
        mixed(tmp_path, model, source=sources, weights=[3, 1], validation=0.25)
    )
    assert validation is not None and len(validation.rows) == 6
    full = [(each, 3 if number < 9 else 1) for number, each in enumerate(CHATS)]
    for each, times in full:
        assert train.rows.count(each) == (0 if each in validation.rows else times)


@pytest.mark.parametrize("write", [saved, saved_splits, repository, nowhere])
def test_splits_and_configurations_that_are_not_there(
    write: Write, model: Path, tmp_path: Path
) -> None:
    said: dict[str, Any] = {"data__source": write(tmp_path / "rows", CHATS)}
    with pytest.raises(DataFormatError) as error:
        read_data(recipe_of(model__source=model, **said, data__split="validation"))
    told = str(error.value)
    assert "[validation], row 1: expected" in told and "data.split (--split)" in told
    if write is repository:
        with pytest.raises(DataFormatError, match=r"main.*other.*data\.config"):
            read_data(recipe_of(model__source=model, **said, data__config="third"))


def test_several_processes_tell_what_is_wrong_with_rows(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% if messages[0].content == 'x' %}{{ raise_exception('x is out') }}{% endif %}"
        "{% for each in messages %}{{ each.content }}\n{% endfor %}"
    )
    content = [*CHATS, chat("x", "y"), *CHATS, chat("x", "y")]
    source = lines(tmp_path / "rows", content)
    for more in ({}, {"training__dataset_num_proc": 2}):
        with pytest.raises(DataFormatError) as error:
            tokens_of(model, source, data__chat_template=template, **more)
        told = str(error.value).splitlines()
        assert len(told) == 2 and all("x is out" in each for each in told)
        assert f"rows.jsonl:{COUNT + 1}: " in told[0]
        assert f"rows.jsonl:{2 * COUNT + 2}: " in told[1]


def test_the_method_decides_where_rows_have_keys_of_two_forms(model: Path, tmp_path: Path) -> None:
    row = {**CHATS[0], "prompt": "a", "chosen": "b", "rejected": "c"}
    source = lines(tmp_path / "rows", [row])
    for method, form in (("sft", "messages"), ("dpo", "preferences")):
        said = {"data__source": source, "training__method": method}
        found, _ = read_data(recipe_of(model__source=model, **said))
        assert found.form.name == form and set(found.unused) < row.keys()
