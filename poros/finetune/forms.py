"""Defines the forms of data rows, and checks rows against them.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
    {"prompt": "...", "chosen": "...", "rejected": "..."}
    {"prompt": "...", "completion": "...", "label": true}

A prompt, completion, chosen or rejected is a text, or a list of messages in all rows; a preference
of messages may do without a prompt: it is what both begin with. Rows of messages may have tools.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from poros.errors import quoted

FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "completions": ("prompt", "completion"),
    "preferences": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "completion", "label"),
    "text": ("text",),
}
"""The keys of each form."""
METHODS = {
    "sft": ("messages", "completions", "text"),
    "dpo": ("preferences",),
    "kto": ("labelled",),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_KEYS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "thinking",
)
_WANTED = (
    'write rows such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
    '"content": "..."}]}, {"prompt": "...", "completion": "..."}, {"text": "..."} or {"prompt": '
    '"...", "chosen": "...", "rejected": "..."}'
)
# Other tools' forms, and what to make of them.
_ELSEWHERE = {
    "instruction": "rename instruction (with input behind it) to prompt, and output to completion",
    "conversations": "rename conversations to messages, from to role (human is user, gpt is "
    "assistant) and value to content",
    "question": "rename question to prompt and answer to completion",
    "response": "rename response to completion, and what it answers to prompt",
    "content": "rename content to text",
}


class Form(NamedTuple):
    """The form of all rows of a run."""

    name: str
    """One of ``FORMS``."""
    is_chat: bool
    """Whether the values are lists of messages."""


def form_of(row: Mapping[str, Any]) -> Form | str:
    """Return the form of a row, or the problem with its keys."""
    keys = {key for key, value in row.items() if value is not None}
    found = [name for name, wanted in FORMS.items() if set(wanted) <= keys]
    if "labelled" in found:
        found.remove("completions")
    if {"chosen", "rejected"} <= keys and "prompt" not in keys:
        found.append("preferences")
    if len(found) > 1:
        all_keys = sorted({key for name in found for key in FORMS[name] if key in keys})
        return (
            f"expected one kind of row, found keys of {' and of '.join(found)} "
            f"({', '.join(all_keys)}); remove those of all but one"
        )
    if not found:
        return _no_form(keys)
    name = found[0]
    first = row[FORMS[name][1 if name == "labelled" else -1]]
    return Form(name, is_chat=isinstance(first, list))


def _no_form(keys: set[str]) -> str:
    shown = ", ".join(quoted(key, limit=40) for key in sorted(keys)[:12]) or "none"
    for name, wanted in FORMS.items():
        for missing in wanted:
            others = [key for key in wanted if key != missing]
            near = get_close_matches(missing, sorted(keys - set(wanted)), n=1, cutoff=0.75)
            if near and set(others) <= keys:
                return f"expected the key {missing!r}, found {quoted(near[0])}; rename it"
            if others and set(others) <= keys and name == "completions" and missing != "prompt":
                return f"expected the key {missing!r} beside {others[0]!r}, found {shown}; add it"
            if len(others) == 2 and set(others) <= keys:
                return f"expected the key {missing!r} beside the others, found {shown}; add it"
    remedy = next((hint for key, hint in _ELSEWHERE.items() if key in keys), _WANTED)
    return f"expected the keys of a row, found {shown}; {remedy}"


def problems(row: Mapping[str, Any], form: Form) -> Iterator[str]:
    """List the problems of a row that should have a form."""
    found = form_of(row)
    if isinstance(found, str):
        yield found
        return
    if found != form:
        yield (
            f"expected rows of one form, found {_said(found)} after {_said(form)}; write them all "
            "alike, or train on them in two runs"
        )
        return
    for key in FORMS[form.name]:
        if key == "label":
            yield from _label_problems(row[key])
            continue
        if key == "prompt" and row.get(key) is None:
            continue  # a preference whose chosen and rejected begin with it
        yield from _value_problems(key, row[key], form)
    label = row.get("label")
    if form.name != "labelled" and (isinstance(label, bool) or (label and form.name == "messages")):
        yield (
            f"label: expected answers to learn from, found one that is labelled "
            f"{quoted(label, limit=40)}, good or bad; write rows of prompt, completion and label "
            "for --method kto"
        )
    if "tools" in row and row["tools"] is not None and not isinstance(row["tools"], str | list):
        yield f"tools: expected a list, found {_type(row['tools'])}; remove it"
    if form.name == "preferences" and row["chosen"] == row["rejected"]:
        yield "chosen, rejected: expected two answers that differ, found the same; remove the row"


def _label_problems(label: Any) -> Iterator[str]:
    if not isinstance(label, bool):
        yield (
            f"label: expected true for a good answer or false for a bad one, found "
            f"{quoted(label, limit=40)}; write one of them, for --method kto"
        )


def _value_problems(key: str, value: Any, form: Form) -> Iterator[str]:
    if form.is_chat:
        if not isinstance(value, list):
            yield (
                f"{key}: expected a list of messages as in the row before, found {_type(value)}; "
                "write all rows alike"
            )
            return
        yield from _message_problems(key, value, form)
        return
    if not isinstance(value, str):
        yield f"{key}: expected a text, found {_type(value)}; put it in quotes"
        return
    yield from _text_problems(key, value)


def _message_problems(key: str, messages: list[Any], form: Form) -> Iterator[str]:
    if not messages:
        yield f"{key}: expected messages, found an empty list; remove the row"
        return
    for number, message in enumerate(messages):
        where = f"{key}[{number}]"
        if not isinstance(message, dict):
            yield (
                f"{where}: expected a message such as "
                f'{{"role": "user", "content": "..."}}, found {_type(message)}; write one'
            )
            continue
        yield from _one_message(where, message)
    answers = key in ("messages", "completion", "chosen", "rejected")
    if answers and not any(
        isinstance(each, dict) and each.get("role") == "assistant" for each in messages
    ):
        yield (
            f"{key}: expected a message of the assistant to learn from, found none; add one, or "
            "remove the row"
        )


def _one_message(where: str, message: dict[str, Any]) -> Iterator[str]:
    given = {name: value for name, value in message.items() if value is not None}
    for name in sorted(given.keys() - set(_MESSAGE_KEYS)):
        shown = quoted(name, is_bare=True, limit=40)
        near = get_close_matches(name, ("role", "content"), n=1, cutoff=0.6)
        near = near or [{"from": "role", "value": "content", "text": "content"}.get(name, "")]
        remedy = f"rename it to {near[0]}" if near[0] else "remove it"
        yield f"{where}.{shown}: expected only {', '.join(_MESSAGE_KEYS)}, found it; {remedy}"
    role = given.get("role")
    if role is None:
        yield f"{where}: expected the key 'role', found none; add one of {', '.join(ROLES)}"
    elif role not in ROLES:
        known = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
        remedy = known.get(str(role).lower()) or "one of them"
        yield (
            f"{where}.role: expected one of {', '.join(ROLES)}, found {quoted(role, limit=40)}; "
            f"write {remedy}"
        )
    content = given.get("content")
    if content is None and not given.get("tool_calls"):
        yield f"{where}: expected the key 'content', found none; add a text"
    elif isinstance(content, list):
        yield f"{where}.content: expected a text, found a list; only text can be trained on"
    elif content is not None and not isinstance(content, str):
        yield f"{where}.content: expected a text, found {_type(content)}; put it in quotes"
    elif content is not None and not given.get("tool_calls"):
        yield from _text_problems(f"{where}.content", content)


def _text_problems(key: str, value: str) -> Iterator[str]:
    if not value.strip():
        found = "an empty one" if not value else "blanks alone"
        yield f"{key}: expected a text, found {found}; fill it in, or remove the row"
    elif not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            yield f"{key}: expected a text, found half of a surrogate pair (\\ud8..); remove it"


def _said(form: Form) -> str:
    shape = ", ".join(FORMS[form.name])
    return f"{shape} as messages" if form.is_chat and form.name != "messages" else shape


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
