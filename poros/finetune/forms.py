"""Defines the forms of data rows, and checks rows against them.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
    {"prompt": "...", "chosen": "...", "rejected": "..."}
    {"prompt": "...", "completion": "...", "label": true}

A message's content is a text, or a list of texts and images: {"type": "image", "image": "FILE"},
or {"type": "image"} for each of the row's "images".

A prompt, completion, chosen or rejected is a text, or a list of messages in all rows; a preference
of messages may do without a prompt: it is what both begin with. Rows of messages may have tools.

Other ways to write them are read as well, and become one of these:

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"conversations": [{"from": "human", "value": "<image> ..."}, ...], "image": "FILE"}
    {"instruction": "...", "input": "...", "output": "..."}
    {"question": "...", "answer": "..."}
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from poros.errors import quoted

METHODS = {
    "sft": ("messages", "completions", "text", "instructions"),
    "dpo": ("preferences",),
    "kto": ("labelled",),
    "reward": ("preferences",),
}
"""The forms that a method takes. Instructions become messages if the model has a template for them,
and completions otherwise; they may have a system prompt."""
ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""Speakers in messages of ShareGPT that have another name than their role."""
_MESSAGE_KEYS = (
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("reasoning_content", "thinking"),
)
_GOES_BEFORE = {"instructions": "text", "labelled": "completions"}
"""Forms of rows that also have the keys of another: rendered as text, or without their label."""
IMAGE = "<image>"
_WANTED = (
    'write rows such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
    '"content": "..."}]}, {"prompt": "...", "completion": "..."}, {"text": "..."} or {"prompt": '
    '"...", "chosen": "...", "rejected": "..."}'
)


class Format(NamedTuple):
    """One way to write rows."""

    title: str
    form: str
    """The form that the rows are converted to: one of ``METHODS``."""
    keys: tuple[str, ...]
    """Keys that each row has."""
    others: tuple[str, ...] = ()
    """Keys that a row may have, and that are read too."""


TEXT = Format("text", "text", ("text",))
_BESIDE = ("system", "tools", "image", "images")
FORMATS = (
    Format("messages", "messages", ("messages",), ("tools", "images")),
    Format("prompts and completions", "completions", ("prompt", "completion"), ("tools",)),
    Format("preferences", "preferences", ("chosen", "rejected"), ("prompt", "tools")),
    Format("good and bad answers", "labelled", ("prompt", "completion", "label"), ("tools",)),
    TEXT,
    Format("ShareGPT conversations", "messages", ("conversations",), _BESIDE),
    Format("ShareGPT conversations", "messages", ("conversation",), _BESIDE),
    Format("Alpaca instructions", "instructions", ("instruction", "output"), ("input", "system")),
    Format("Dolly instructions", "instructions", ("instruction", "response"), ("context",)),
    Format("questions and answers", "instructions", ("question", "answer"), ("context",)),
    Format("questions and answers", "instructions", ("query", "response"), ("context",)),
)


class Form(NamedTuple):
    """The form of all rows of a source."""

    format: Format
    """The format in which they are written."""
    is_chat: bool
    """Whether the values are lists of messages."""

    @property
    def name(self) -> str:
        """The form that the rows are converted to."""
        return self.format.form


def form_of(row: Mapping[str, Any], method: str) -> Form | str:
    """Return the form of a row, or the problem with its keys.

    Args:
        row: It may have keys of several forms: published preferences often hold the better
            conversation too, and instructions their own rendering as text.
        method: The training method, which decides among these forms.
    """
    keys = {key for key, value in row.items() if value is not None}
    found = [each for each in FORMATS if keys.issuperset(each.keys)]
    fitting = [each for each in found if each.form in METHODS[method]] or found
    lesser = {_GOES_BEFORE.get(each.form) for each in fitting}
    fitting = [each for each in fitting if each.form not in lesser]
    if len(fitting) > 1:
        titles = " and of ".join(each.title for each in fitting)
        return f"expected one kind of row, found keys of {titles}; remove those of all but one"
    if not fitting:
        names = [quoted(key, limit=40) + ": null" * (row[key] is None) for key in sorted(row)[:12]]
        is_whole = any(row.keys() >= {*each.keys} for each in FORMATS)
        remedy = "fill in what is null, or remove the row" if is_whole else _WANTED
        return f"expected the keys of a row, found {', '.join(names) or 'none'}; {remedy}"
    chosen = fitting[0]
    may_be_chat = chosen.form in ("completions", "preferences", "labelled")
    is_list = may_be_chat and isinstance(row[chosen.keys[1]], list)
    return Form(chosen, is_chat=is_list or chosen.form == "messages")


def problems(row: Mapping[str, Any], found: Form | str, form: Form | None) -> Iterator[str]:
    """List the problems of a row.

    Args:
        found: What ``form_of`` says of it.
        form: The form that it should have; None if there has been no row with one.
    """
    if isinstance(found, str):
        yield found
        return
    if form is not None and found != form:
        yield (
            f"expected rows of one form, found {said(found)} after {said(form)}; write them all "
            "alike, or train on them in two runs"
        )
        return
    for key in (*found.format.keys, *found.format.others):
        value = row.get(key)
        is_left_out = value is None or (value == "" and key not in ("prompt", "images"))
        if key in found.format.keys or not is_left_out:
            yield from _value_problems(key, row[key], found)
    yield from _problems_with_images(row, found)
    label = row.get("label")
    is_mark = isinstance(label, bool) or found.name in ("completions", "messages")
    if label is not None and is_mark and found.name != "labelled":
        marked = f"one that is labelled {quoted(label, limit=40)}, good or bad"
        yield (
            f"label: expected answers to learn from, found {marked}; train on rows of prompt, "
            "completion and label with --method kto, or remove label"
        )
    if found.name == "preferences" and row["chosen"] == row["rejected"]:
        yield "chosen, rejected: expected two answers that differ, found the same; remove the row"


def normalised(row: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """Return what is used of a row without problems, under the keys of its form."""
    names = (*form.format.keys, *form.format.others)
    used = {name: row[name] for name in names if row.get(name) is not None}
    if used.get("tools") == "":
        del used["tools"]
    system = used.pop("system", "")
    if form.name == "instructions":
        question, answer = form.format.keys
        parts = (used[question], used.get(form.format.others[0]))
        used = {"prompt": "\n\n".join(filter(None, parts)), "completion": used[answer]}
        return {**used, "system": system} if system else used
    if form.name != "messages":
        return used
    messages = used.pop(form.format.keys[0])
    one, several = used.pop("image", None), used.pop("images", [])
    paths = list(_images_in(messages)) or several or [one] * (one is not None)
    if paths:
        used["images"] = paths
    has_marks = bool(paths) and form.format.keys != ("messages",)
    plain = [_plain_message(each, has_marks=has_marks) for each in messages]
    return {**used, "messages": _opened(system, plain)}


def _images_in(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the paths of images that stand in the messages themselves."""
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            path = part.get("image") or part.get("path")
            if path is not None:
                yield path


def _problems_with_images(row: Mapping[str, Any], found: Form) -> Iterator[str]:
    """List images that would not be read, and places of images without one."""
    given = [key for key in ("image", "images") if row.get(key)]
    unread = [key for key in given if key not in found.format.others]
    if unread:
        yield (
            f'{unread[0]}: expected rows of messages with "images": ["FILE"] beside them, found '
            f"it beside {said(found)}; write it so, or remove it"
        )
    messages = row[found.format.keys[0]] if found.name == "messages" else []
    messages = messages if isinstance(messages, list) else []  # which is a problem of its own
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for each in contents if isinstance(each, list) for part in each]
    places = [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]
    if any(part.get("image") or part.get("path") for part in places):
        given.append("messages")
    if len(given) > 1 and not unread:
        yield (
            f"images: expected the path of each image in one place, found some in "
            f"{' and in '.join(given)}; remove those of one"
        )
    if places and not given and found.format.keys == ("messages",):
        yield (
            'messages: expected the path of each {"type": "image"}, found none; write it there, '
            'or "images": ["FILE"] beside the messages'
        )


def _plain_message(message: Mapping[str, Any], *, has_marks: bool) -> dict[str, Any]:
    """Write a message as role and content: a text, or a list with places of images.

    Args:
        has_marks: Whether ``<image>`` in its text is the place of one, as LLaVA writes it.
    """
    message = _spoken(message)
    content = message.get("content")
    if isinstance(content, list):
        if all(part["type"] == "text" for part in content):
            return {**message, "content": "".join(part["text"] for part in content)}
        parts = [part if part["type"] == "text" else {"type": "image"} for part in content]
        return {**message, "content": parts}
    if not has_marks or IMAGE not in (content or ""):
        return dict(message)
    parts = []
    for number, text in enumerate(message["content"].split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0)
        parts += [{"type": "text", "text": text.strip()}] * bool(text.strip())
    return {**message, "content": parts}


def as_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Write an instruction as a conversation."""
    turns = zip(("user", "assistant"), (row["prompt"], row["completion"]), strict=True)
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": _opened(row.get("system", ""), messages)}


def as_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    """Write an instruction as a prompt, with its answer as the completion after a blank line."""
    parts = filter(None, (row.get("system"), row["prompt"]))
    return {"prompt": "\n\n".join([*parts, ""]), "completion": row["completion"]}


def _opened(system: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put a system prompt in front of a conversation, if there is one."""
    return [{"role": "system", "content": system}, *messages] if system else messages


def _value_problems(key: str, value: Any, form: Form) -> Iterator[str]:
    if key == "label":
        if not isinstance(value, bool):
            yield (
                f"label: expected true for a good answer or false for a bad one, found "
                f"{quoted(value, limit=40)}; write one of them without quotes, which CSV cannot, "
                "for --method kto"
            )
    elif key in ("image", "images"):
        paths = [value] if key == "image" else value
        if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
            wanted = "the path of a file" if key == "image" else "a list of paths of files"
            yield f"{key}: expected {wanted}, found {_type(value)}; write it"
    elif key == "tools":
        with suppress(ValueError):
            value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            yield (
                "tools: expected a list of objects, or such a list as JSON in a text, found "
                "something else; mend or remove it"
            )
    elif not form.is_chat or key == "system":
        yield from _text_problems(key, value)
    elif isinstance(value, list):
        yield from _message_problems(key, value, form)
    else:
        yield f"{key}: expected a list of messages, found {_type(value)}; write all rows alike"


def _message_problems(key: str, messages: list[Any], form: Form) -> Iterator[str]:
    roles = []
    for number, message in enumerate(messages):
        where = f"{key}[{number}]"
        if not isinstance(message, dict):
            yield (
                f"{where}: expected a message such as "
                f'{{"role": "user", "content": "..."}}, found {_type(message)}; write one'
            )
            continue
        given = {name: each for name, each in _spoken(message).items() if each is not None}
        roles.append(given.get("role"))
        yield from _one_message(where, given, form)
    if key != "prompt" and "assistant" not in roles:
        yield (
            f"{key}: expected a message of the assistant to learn from, found none; add one, or "
            "remove the row"
        )


def _spoken(message: Mapping[str, Any]) -> dict[str, Any]:
    """Write a message of ShareGPT under the keys of others."""
    given = {name: value for name, value in message.items() if value is not None}
    if "from" not in given or {"role", "content"} & given.keys():
        return {**message}
    speaker = given.pop("from")
    text = {"content": given.pop("value")} if "value" in given else {}
    return {"role": SPEAKERS.get(str(speaker), speaker), **text, **given}


def _one_message(where: str, given: dict[str, Any], form: Form) -> Iterator[str]:
    for name in sorted(given.keys() - {*_MESSAGE_KEYS}):
        shown, known = quoted(name, is_bare=True, limit=40), ", ".join(_MESSAGE_KEYS)
        yield f"{where}.{shown}: expected only {known}, found it; rename or remove it"
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        found = quoted(role, limit=40)
        yield f"{where}.role: expected one of {', '.join(ROLES)}, found {found}; write one of them"
    if given.get("tool_calls") and (content is None or isinstance(content, str)):
        return
    if (role, content) == ("system", ""):
        return
    if form.format.keys == ("messages",) and isinstance(content, list) and content:
        yield from _part_problems(f"{where}.content", content)
    else:
        yield from _text_problems(f"{where}.content", content)


def _part_problems(key: str, parts: list[Any]) -> Iterator[str]:
    """List the problems of a message's content that is a list of texts and images."""
    for number, part in enumerate(parts):
        where = f"{key}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            yield from _text_problems(f"{where}.text", part.get("text"))
        elif kind == "image":
            paths = [part[name] for name in ("image", "path") if part.get(name) is not None]
            if not all(isinstance(path, str) for path in paths) or len(paths) > 1:
                yield f"{where}.image: expected the path of one file, found something else"
        else:
            yield (
                f'{where}: expected {{"type": "text", "text": "..."}} or {{"type": "image", '
                f'"image": "FILE"}}, found {quoted(kind, limit=40)}; write one of them'
            )


def _text_problems(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str):
        yield f"{key}: expected a text, found {_type(value)}; write one, in quotes"
    elif not value.strip():
        yield f"{key}: expected a text, found a blank one; fill it in, or remove the row"
    elif not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            yield f"{key}: expected a text, found half of a surrogate pair (\\ud8..); remove it"


def said(form: Form) -> str:
    """Return the keys of rows of a form, for an error."""
    shape = ", ".join(form.format.keys)
    return f"{shape} as messages" if form.is_chat and form.name != "messages" else shape


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
