"""What a step trains on, and the bits by which runs are compared."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Work:
    """The size of one batch."""

    batch_size: int = 1
    seq_len: int = 512


def batch_of(vocab_size: int, work: Work, device: torch.device) -> dict[str, torch.Tensor]:
    """The same random tokens for the same work; they are their own labels."""
    generator = torch.Generator().manual_seed(1)
    shape = (work.batch_size, work.seq_len)
    tokens = torch.randint(0, vocab_size, shape, generator=generator)
    return {"input_ids": tokens.to(device), "labels": tokens.to(device)}


def bits_of(value: torch.Tensor) -> str:
    """The bytes of a tensor in hexadecimal."""
    return value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def digest(model: Any) -> str:
    """Of names, dtypes, shapes and bytes of all trained parameters."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        if parameter.requires_grad:
            hasher.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} ".encode())
            data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            hasher.update(data.numpy().tobytes())
    return hasher.hexdigest()[:16]
