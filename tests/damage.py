"""Ways to damage a small checkpoint or store, one thing at a time, and what must come of it."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from poros.errors import CheckpointFormatError, PorosError

Break = Callable[[Path], Any]
WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"


@dataclass(frozen=True)
class Damage:
    """One case.

    Args:
        name: Of the case.
        base: What is damaged: "dense", "moe", "4bit", "4bit single" or "store".
        break_it: Does it, to a copy in a folder.
        says: What the error has to say, as a pattern. None: it is no damage, and what is loaded has
            the bytes of ``from_pretrained``.
        error: Of that kind.
        options: Of ``poros.load``.
        planned: ``poros.plan`` refuses it too.
    """

    name: str
    base: str
    break_it: Break
    says: str | None
    error: type[PorosError] = CheckpointFormatError
    options: dict[str, Any] = field(default_factory=dict)
    planned: bool = False


def both(*changes: Break) -> Break:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def put(name: str, content: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content)


def drop(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink() for name in names]


def sparse(name: str, num_bytes: int) -> Break:
    """A large file that takes no room."""

    def change(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, num_bytes)

    return change


def flip(name: str, at: int) -> Break:
    """One bit of a byte, counted from the end if negative."""

    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """Change the tensors of the one file."""

    def rewrite(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        found = {name: each.contiguous() for name, each in found.items()}
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    return tensors(lambda found: found.update({name: change(found[name])}))


def renamed(old: str, new: str) -> Break:
    """In the name of every tensor."""

    def change(found: dict[str, torch.Tensor]) -> None:
        for name in [each for each in found if old in each]:
            found[name.replace(old, new)] = found.pop(name)

    return tensors(change)


def document(file: str, **changes: Any) -> Break:
    """Change fields of a JSON file; ``...`` takes one away."""

    def rewrite(folder: Path) -> None:
        path = folder / file
        found = json.loads(path.read_text()) if path.exists() else {}
        found |= changes
        path.write_text(json.dumps({key: each for key, each in found.items() if each is not ...}))

    return rewrite


def config(**changes: Any) -> Break:
    return document(CONFIG, **changes)


def quantized(**changes: Any) -> Break:
    """Change the quantization_config of a checkpoint."""

    def change(folder: Path) -> None:
        found = json.loads((folder / CONFIG).read_text())["quantization_config"]
        config(quantization_config={**found, **changes})(folder)

    return change


def state(weight: str, **changes: Any) -> Break:
    """Change fields of the JSON in the state of a 4-bit weight; ``...`` takes one away."""

    def change(found: dict[str, torch.Tensor]) -> None:
        (key,) = [each for each in found if each.startswith(f"{weight}.quant_state.")]
        fields = json.loads(bytes(found[key].tolist())) | changes
        text = json.dumps({name: each for name, each in fields.items() if each is not ...})
        found[key] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return tensors(change)


def manifest(change: Callable[[dict[str, Any]], Any]) -> Break:
    """Change a manifest and seal it again: no accident, but made up."""

    def rewrite(folder: Path) -> None:
        store = json.loads((folder / "manifest.json").read_text())["store"]
        change(store)
        text = json.dumps(store, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        sealed = json.dumps({"sha256": digest, "store": store}, sort_keys=True)
        (folder / "manifest.json").write_text(sealed)

    return rewrite


def kept_config(**changes: Any) -> Break:
    """Change the configuration in a store, and say so in its manifest."""

    def rewrite(folder: Path) -> None:
        config(**changes)(folder)
        digest = hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()
        manifest(lambda store: store["files"].update({CONFIG: digest}))(folder)

    return rewrite


def rest(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """Change the tensors of a store that are in no slab, and say so in its manifest."""

    def rewrite(folder: Path) -> None:
        from poros.digests import digest_of
        from poros.loaders.manifest import describe_rest

        path = folder / "rest.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)
        forms = {name: [kind, list(shape)] for name, (kind, shape) in describe_rest(found).items()}
        digest = digest_of([memoryview(path.read_bytes())])
        manifest(lambda store: store.update(rest=forms, rest_digest=digest))(folder)

    return rewrite
