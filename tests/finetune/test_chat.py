"""Talking to a model: the tokens of a resident one, a conversation that is remembered."""

from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoTokenizer

from poros.cli.conversation import Chat, questions
from poros.merging.saved_adapter import SavedAdapter
from tests.command import poros_command
from tests.finetune.subjects import TEMPLATE, plain_base, write_adapter, write_base


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    base = write_base(folder / "base")
    write_adapter(base, folder / "adapter", LoraConfig(r=4, target_modules="all-linear"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "adapter")
    return folder / "adapter"


def base_of(adapter: Path) -> str:
    return str(adapter.parent / "base")


def test_the_tokens_are_those_of_a_resident_model(adapter: Path) -> None:
    shown: list[str] = []
    chat = Chat(SavedAdapter(adapter), base_of(adapter), max_new_tokens=12)
    found = chat.answer("the slot holds", shown.append)
    assert "".join(shown) == found and chat.notes == []
    model = plain_base(adapter, AutoPeftModelForCausalLM).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    tokens = tokenizer("user: the slot holds\n", add_special_tokens=False, return_tensors="pt")
    made = model.generate(**tokens, max_new_tokens=12, do_sample=False)
    new = made[0, tokens.input_ids.shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True).strip() == found.strip()


def test_a_conversation_is_remembered_until_reset(adapter: Path) -> None:
    chat = Chat(SavedAdapter(adapter), base_of(adapter), max_new_tokens=4, system="short")
    first = chat.answer("a block", lambda text: None)
    chat.answer("again", lambda text: None)
    assert [each["role"] for each in chat._messages] == ["system", *["user", "assistant"] * 2]
    lines = iter(["/reset", "", "a block", "/exit", "never"])
    (question,) = questions(lambda: next(lines), chat, print)
    assert chat.answer(question, lambda text: None) == first


def test_unknown_words_and_the_end_of_the_input(adapter: Path) -> None:
    chat = Chat(SavedAdapter(adapter), base_of(adapter), max_new_tokens=1)
    lines, hints = iter(["/help", "a block", "/exit"]), []
    assert list(questions(lambda: next(lines), chat, hints.append)) == ["a block"]
    assert len(hints) == 1 and "/help" in hints[0]

    def end() -> str:
        raise EOFError

    assert list(questions(end, chat, print)) == []


def test_the_command(adapter: Path, tmp_path: Path) -> None:
    result = poros_command("chat", str(adapter), "--prompt", "hello", "--max-new-tokens", "3")
    assert result.exit_code == 0
    missing = poros_command("chat", str(tmp_path), "--prompt", "hello")
    assert missing.exit_code == 2 and "adapter_config.json" in missing.output
    for option, value in (("--temperature", "-1"), ("--vram", "8")):
        bad = poros_command("chat", str(adapter), "--prompt", "x", option, value)
        assert bad.exit_code == 2 and option[2:] in bad.output and "Loading" not in bad.output
