"""Random changes to the files of a checkpoint or store, for the fuzzing of whole loads."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from poros.loaders.manifest import REST
from tests.loading.damage import said_in, write_rest, write_sealed

Mutation = Callable[[Path, random.Random], None]

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 64, 255, 2**16, 10**6, 2**31, 10**9, 2**62, 2**63, 2**64, 10**30),
    *(0.0, -0.5, 0.5, 1e-30, 1e308, float("nan"), float("inf"), -float("inf")),
    *(True, False, None, "", "x", "auto", "nf4", "fp4", "float16", "int8", "load", "qwen2", "../x"),
    *("\x1b[31m\n", "\0", "x" * 5000, "\ud800", [], {}, [0], [[]], [None] * 9, {"a": 1}),
    *("full_attention", "sliding_attention", "linear", "dynamic", "yarn", "llama3", "gelu", "silu"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place within a JSON value."""
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def change_json(value: Any, rng: random.Random) -> Any:
    """One change at a random place: another value, a key gone, twice, or of another name."""
    everywhere = list(places(value))
    if not everywhere:
        return rng.choice(VALUES)
    *parents, last = rng.choice(everywhere)
    home = value
    for key in parents:
        home = home[key]
    kind = rng.randrange(9)
    if kind == 0:
        del home[last]
    elif kind == 1 and isinstance(home, dict):
        home[str(rng.choice(VALUES))] = home.pop(last)
    elif kind == 2:
        other = rng.choice(everywhere)
        inner = value
        for key in other:
            inner = inner[key]
        home[last] = json.loads(json.dumps(inner))
    elif kind in (3, 8) and isinstance(home[last], int | float):
        home[last] = home[last] * rng.choice((-1, 0, 2, 0.5, 3)) + rng.choice((0, 1, -1))
    elif kind == 4:
        for _ in range(rng.choice((1, 3, 70, 300))):
            home[last] = [home[last]]
    else:
        home[last] = rng.choice(VALUES)
    return value


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, cut, insert or repeat a few bytes."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            found = found[:at]
        elif kind == 1:
            found[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 2:
            found[at:at] = found[at : at + rng.randint(1, 99)]
        elif found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
    return bytes(found)


def json_file(name: str) -> Mutation:
    """Change a JSON file: a value within it most of the time, or its bytes."""

    def change(folder: Path, rng: random.Random) -> None:
        file = folder / name
        text = file.read_bytes() if file.exists() else b"{}"
        if rng.random() < 0.1:
            file.write_bytes(damage_bytes(text, rng))
            return
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):  # of an earlier change
            return
        for _ in range(rng.randint(1, 2)):
            document = change_json(document, rng)
        file.write_bytes(json.dumps(document).encode())

    return change


def header(folder: Path, rng: random.Random) -> None:
    """Change the header of a file of tensors, or a few bytes anywhere in the file."""
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.3:
        file.write_bytes(damage_bytes(content, rng))
        return
    try:
        document = change_json(json.loads(content[8 : 8 + length]), rng)
    except (ValueError, RecursionError):
        return
    text = json.dumps(document).encode()
    if rng.random() < 0.5:
        text = text.ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def tensors(folder: Path, rng: random.Random) -> None:
    """Change names, shapes, dtypes or values of tensors."""
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    try:
        found = load_file(file)
    except Exception:  # of an earlier change
        return
    if found:
        _change_tensor(found, rng)
    _save(found, file)


def states(folder: Path, rng: random.Random) -> None:
    """Change the quantization state of a 4-bit weight, or one of its tensors."""
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    try:
        found = load_file(file)
    except Exception:
        return
    if rng.random() < 0.5:
        ends = ("quant_map", "absmax", "offset", "code")
        names = [name for name in found if name.endswith(ends)]
        if names:
            _change_tensor(found, rng, rng.choice(sorted(names)))
    else:
        names = [name for name in found if "quant_state" in name]
        if names:
            name = rng.choice(sorted(names))
            text = bytes(found[name].tolist())
            try:
                document = change_json(json.loads(text), rng)
            except ValueError:
                document = None
            text = json.dumps(document).encode() if rng.random() < 0.9 else damage_bytes(text, rng)
            found[name] = torch.tensor(list(text), dtype=torch.uint8)
    _save(found, file)


def manifest(folder: Path, rng: random.Random) -> None:
    """Change a manifest, sealed again most of the time."""
    file = folder / REST
    if rng.random() < 0.1:
        file.write_bytes(damage_bytes(file.read_bytes(), rng))
        return
    try:
        store = said_in(folder)
        # Most of a manifest is layouts; what it says of itself deserves as much.
        if isinstance(store.get("about"), dict) and rng.random() < 0.5:
            store["about"] = change_json(store["about"], rng)
        else:
            store = change_json(store, rng)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return
    write_sealed(folder, json.dumps(store))


def _change_tensor(
    found: dict[str, torch.Tensor], rng: random.Random, name: str | None = None
) -> None:
    name = name or rng.choice(sorted(found))
    tensor = found[name]
    kind = rng.randrange(9)
    if kind == 0:
        del found[name]
    elif kind == 1:
        digits = [part for part in name.split(".") if part.isdecimal()]
        digit = rng.choice(digits or ["weight"])
        found[name.replace(f".{digit}.", f".{rng.choice((0, 1, 2, 9, 99))}.", 1)] = found.pop(name)
    elif kind == 2:
        found[f"{name}{rng.choice(('.x', '2', '.absmax', '.quant_map'))}"] = tensor.clone()
    elif kind == 3:
        found[name] = tensor.flatten()[: rng.randrange(tensor.numel() + 1)].clone()
    elif kind == 4:
        dtypes = (torch.int8, torch.uint8, torch.int64, torch.float16, torch.float32, torch.bool)
        found[name] = tensor.float().to(rng.choice(dtypes))
    elif kind == 5 and tensor.numel():
        value = rng.choice((float("nan"), float("inf"), 0.0, 1e30, -1.0))
        changed = tensor.clone()
        if changed.is_floating_point():
            changed.view(-1)[rng.randrange(tensor.numel())] = value
        found[name] = changed
    elif kind == 6:
        found[name] = torch.cat([tensor, tensor]) if tensor.ndim else tensor.reshape(1)
    elif kind == 7:
        found[name] = tensor.unsqueeze(0)
    else:
        found[name] = tensor.flatten().flip(0).reshape(tensor.shape).clone()


def _save(found: dict[str, torch.Tensor], file: Path) -> None:
    """Write the tensors; in a store, have its manifest say what its rest is now."""
    found = {name: part.contiguous() for name, part in found.items()}
    if file.name != REST:
        save_file(found, file, {"format": "pt"})
        return
    with suppress(Exception):  # of an earlier change
        write_rest(file.parent, said_in(file.parent), found)


INDEX = "model.safetensors.index.json"
CONFIG = json_file("config.json")
GENERATION = json_file("generation_config.json")

KINDS: dict[str, tuple[Mutation, ...]] = {
    "dense": (CONFIG, CONFIG, GENERATION, header, tensors),
    "sharded": (json_file(INDEX), json_file(INDEX), header, CONFIG, tensors),
    "moe": (CONFIG, tensors, tensors, header),
    "4bit": (states, states, states, CONFIG, header, tensors),
    "4bit single": (states, states, CONFIG, tensors),
    "store": (manifest, manifest, states, tensors, CONFIG, header),
}
"""What is changed of each base; what stands there twice is twice as often."""
