"""Ways to damage a checkpoint or store, one thing at a time, and what must come of it."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from poros.errors import CheckpointFormatError, PorosError
from poros.loaders.store import REST
from poros.loaders.store_writer import described, save_rest
from tests.loading.checkpoints import SECOND, entry, file_bytes, header_of

Break = Callable[[Path], Any]
WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"


@dataclass(frozen=True)
class Case:
    """One damage, and what must come of it.

    Args:
        break_it: Does it, to a copy in a folder.
        says: What the error has to say, as a pattern. None: it is no damage, and what is loaded has
            the bytes of ``from_pretrained``.
        base: What is damaged: "files" (a checkpoint of two shards that is no model's), or one of
            ``Kinds.damaged``: "dense", "moe", "4bit", "4bit single", "store".
        file: Which the error has to name; "." is the folder.
        tensor: Which the error has to name.
        source: What is opened, relative to the folder.
        planned: ``poros.plan`` refuses it too.
    """

    name: str
    break_it: Break
    says: str | None
    base: str
    file: str | None = None
    tensor: str | None = None
    source: str = "."
    error: type[PorosError] = CheckpointFormatError
    options: dict[str, Any] = field(default_factory=dict)
    planned: bool = False


# Files, whatever is in them.


def both(*changes: Break) -> Break:
    return lambda folder: [change(folder) for change in changes]


def put(name: str, content: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content)


def drop(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink() for name in names]


def instead(name: str, make: Callable[[Path], Any]) -> Break:
    return both(drop(name), lambda folder: make(folder / name))


def size(name: str, change: Callable[[int], int]) -> Break:
    """Another size, from that which it has; what is added takes no room."""
    return lambda folder: os.truncate(folder / name, change((folder / name).stat().st_size))


def sparse(name: str, num_bytes: int) -> Break:
    return both(put(name, b""), size(name, lambda _: num_bytes))


def cut(name: str) -> Break:
    return size(name, lambda found: found - 1)


class RunsCode:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.folder),)


def pickled(name: str, *gone: str) -> Break:
    """A pickle that would leave a trace if it were loaded."""
    return both(
        drop(*gone),
        lambda folder: put(name, pickle.dumps(RunsCode(folder / "trace"), protocol=4))(folder),
    )


def header(document: object, data: bytes = bytes(8)) -> Break:
    """Put a file built from a header in the place of the second shard."""
    return put(SECOND, file_bytes(document, data))


def one(**changes: Any) -> Break:
    """The same, with one tensor "t" that is right but for the changes."""
    return header({"t": entry(**changes)})


# Documents.


def document(file: str, **changes: Any) -> Break:
    """Change fields of a JSON file; ``...`` takes one away."""

    def rewrite(folder: Path) -> None:
        path = folder / file
        fields = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(_changed(fields, changes)))

    return rewrite


def _changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (fields | changes).items() if value is not ...}


def config(**changes: Any) -> Break:
    return document(CONFIG, **changes)


def quantized(**changes: Any) -> Break:
    """Change the quantization_config of a checkpoint."""

    def change(folder: Path) -> None:
        found = json.loads((folder / CONFIG).read_text())["quantization_config"]
        config(quantization_config={**found, **changes})(folder)

    return change


def said_in(store: Path) -> Any:
    """The JSON that is a store's manifest."""
    return json.loads(header_of(store / REST).metadata["store"])


def write_sealed(store: Path, text: str, **metadata: str) -> None:
    """A manifest with the right SHA-256 of whatever it says: no accident, but made up."""
    save_rest(store, load_file(store / REST), text, **metadata)


def manifest(change: Callable[[dict[str, Any]], Any], **metadata: str) -> Break:
    """Change a manifest and seal it again."""

    def rewrite(folder: Path) -> None:
        store = said_in(folder)
        change(store)
        write_sealed(folder, json.dumps(store), **metadata)

    return rewrite


def about(**changes: Any) -> Break:
    return manifest(lambda store: store["about"].update(changes))


def kept_config(**changes: Any) -> Break:
    """Change the configuration in a store, and say so in its manifest."""

    def rewrite(folder: Path) -> None:
        config(**changes)(folder)
        digest = hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()
        manifest(lambda store: store["files"].update({CONFIG: digest}))(folder)

    return rewrite


# Tensors.


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        found = {name: tensor.contiguous() for name, tensor in found.items()}
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    return tensors(lambda found: found.update({name: change(found[name])}))


def added(name: str) -> Break:
    return tensors(lambda found: found.update({name: torch.ones(3)}))


def dropped(name: str) -> Break:
    return tensors(lambda found: [found.pop(key) for key in list(found) if name in key])


def renamed(old: str, new: str) -> Break:
    def change(found: dict[str, torch.Tensor]) -> None:
        for name in [key for key in found if old in key]:
            found[name.replace(old, new)] = found.pop(name)

    return tensors(change)


def spoil(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(found: torch.Tensor) -> torch.Tensor:
        found.view(-1)[3] = value
        return found

    return change


def state(weight: str, **changes: Any) -> Break:
    """Change fields of the JSON in the state of a 4-bit weight; ``...`` takes one away."""

    def change(found: dict[str, torch.Tensor]) -> None:
        (key,) = [name for name in found if name.startswith(f"{weight}.quant_state.")]
        text = json.dumps(_changed(json.loads(bytes(found[key].tolist())), changes))
        found[key] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return tensors(change)


def rest(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """Change the tensors of a store that are in no slab, and say so in its manifest."""

    def rewrite(folder: Path) -> None:
        found, said = load_file(folder / REST), said_in(folder)
        change(found)
        save_rest(folder, found, json.dumps(said | {"rest": described(found)}))

    return rewrite
