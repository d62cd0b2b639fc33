"""Digests of what decides a run's bits besides its recipe: rows of tokens, base, machine.

A resumed run has to find all of these unchanged. Rows are compared as tokens and as the pixels of
images. So a change in anything that makes them is noticed: files, tokenizer, template, processor,
releases of libraries, a template that prints the date.
"""

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from poros.finetune.tokens import Tokens


def token_digest(tokens: "Tokens") -> str:
    """Hash rows of tokens, their labels, and their images as the processor gives them."""
    digest = xxh3_128(b"".join(tokens.images))
    for name, rows in sorted(tokens.columns.items()):
        digest.update(f"{name} {len(rows)}\n".encode())
        for row in rows:
            digest.update(len(row).to_bytes(8, "little"))
            digest.update(row.tobytes())
    return digest.hexdigest()


def base_digest(model: "PreTrainedModel", source: str) -> str:
    """Hash the configuration, and every parameter and buffer of a base in host memory, as packed.

    Any change of a bit is noticed: other bytes of the checkpoint, another release of bitsandbytes,
    a store that was made elsewhere.

    Args:
        source: The checkpoint, whose configuration is hashed too.
    """
    from poros.io.digests import digest, num_threads
    from poros.kernels.nf4 import part_tensors
    from poros.loaders.source import CONFIG, find_config

    parts: dict[str, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts |= part_tensors(name, tensor, with_constants=True)
    found = xxh3_128(find_config(str(Path(source).expanduser()))[1][CONFIG])
    with ThreadPoolExecutor(num_threads()) as pool:
        digests = pool.map(lambda each: digest(each.detach().cpu().contiguous()), parts.values())
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
