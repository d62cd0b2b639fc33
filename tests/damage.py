"""Damage to one file: to any, to JSON, to tensors. A damage is called with the file's path."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], object]


def written(content: bytes | str) -> Damage:
    return lambda file: file.write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 1] = b"\x15"
    file.write_bytes(content)


def a_folder(file: Path) -> None:
    file.unlink()
    (file / "more").mkdir(parents=True)


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


NO_TEXT: dict[str, Damage] = {"empty": written(b""), "cut": cut, "zeros": written(bytes(500))}
ANY: dict[str, Damage] = {
    **NO_TEXT,
    "flipped": flipped,
    "missing": Path.unlink,
    "a folder": a_folder,
    "a pipe": a_pipe,
    "a loop": a_loop,
}
NO_JSON: dict[str, Damage] = {
    "no object": written("[1, 2]"),
    "null": written("null"),
    "an empty object": written("{}"),
    "deep": written('{"a":' * 100_000),
    "a huge number": written('{"a": ' + "9" * 5000 + "}"),
    "not UTF-8": written(b'{"a": "\xff\xfe"}'),
    "half a character": written('{"a": "\\ud800"}'),
}


def field(*path: str | int, to: object) -> Damage:
    def change(file: Path) -> None:
        content = inner = json.loads(file.read_text())
        for each in path[:-1]:
            inner = inner[each]
        inner[path[-1]] = to
        file.write_text(json.dumps(content))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def rewrite(file: Path) -> None:
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return rewrite
