"""Digests of what decides a run's bits besides its recipe: files, tokens, base, versions.

A run that is gone on with has to find all of it as it was. Rows of tokens are compared as well as
what they are made with, so that nothing between them goes unseen: a release of a library, a
template that asks for the date.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from poros.recipes.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from poros.finetune.tokens import Tokens

_IDLE = ("LICEN", "NOTICE", "USE_POLICY", "chat_template", "additional_chat_templates")
"""Beginnings of the names of files that decide no token; a template is compared as it is used."""


_PROCESSOR = "processor_config.json"


def input_digests(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase",
    tokens: "Mapping[str, Tokens | None]",
    *,
    has_images: bool,
) -> dict[str, str]:
    """Return digests of the tokenizer's files and of the rows of tokens.

    Args:
        recipe: With the source of model and tokenizer.
        tokenizer: As it is used, with its template.
        tokens: Rows of tokens by name; None where there are none.
        has_images: Whether the files of the model's processor decide anything too.

    Returns:
        Digests by the name that an error is to call each.

    Raises:
        CheckpointFormatError: If a file cannot be read.
    """
    from poros.loaders.auxiliary_files import read_auxiliary_files
    from poros.loaders.limits import Limits
    from poros.loaders.source import CONFIG, find_config

    folder, texts = find_config(str(Path(recipe.model.source).expanduser()))
    files = {CONFIG: texts[CONFIG], **read_auxiliary_files(folder, Limits())}
    found = {
        name: xxh3_128(text).hexdigest()
        for name, text in files.items()
        if not name.startswith(_IDLE) and (has_images or not name.endswith(_PROCESSOR))
    }
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    found["chat template"] = xxh3_128(template.encode()).hexdigest()
    return found | {name: _of_tokens(each) for name, each in tokens.items() if each is not None}


def _of_tokens(tokens: "Tokens") -> str:
    digest = xxh3_128()
    for name, rows in sorted(tokens.columns.items()):
        digest.update(f"{name} {len(rows)}\n".encode())
        for row in rows:
            digest.update(len(row).to_bytes(8, "little"))
            digest.update(row.tobytes())
    return digest.hexdigest()


def base_digest(model: "PreTrainedModel") -> str:
    """Hash every parameter and buffer of a base in host memory, as packed.

    Whatever changes a bit of it is seen: other bytes of the checkpoint, another release of
    bitsandbytes, a store that was made elsewhere.
    """
    from poros.io.digests import digest, num_threads
    from poros.kernels.nf4 import part_tensors

    parts: dict[str, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts |= part_tensors(name, tensor, with_constants=True)
    with ThreadPoolExecutor(num_threads()) as pool:
        digests = pool.map(lambda each: digest(each.detach().cpu().contiguous()), parts.values())
        found = xxh3_128()
        for name, each in zip(parts, digests, strict=True):
            found.update(f"{name}\n".encode() + each)
    return found.hexdigest()


def machine(device: "torch.device", *, has_liger: bool) -> dict[str, str]:
    """Return what a run computes on: the device, on a CPU the threads, and the release of Liger."""
    import torch

    found = {"liger-kernel": version("liger-kernel") if has_liger else "off"}
    if device.type == "cuda":
        return found | {"device": torch.cuda.get_device_name(device)}
    return found | {"device": device.type, "threads": str(torch.get_num_threads())}
