"""Decides how a model's loss is computed, and where its head lies."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros.head.embedding import adapted_modules, stays_on_host
from poros.head.host_matrix import HostMatrix
from poros.kernels.nf4 import is_plain


@dataclass(frozen=True)
class Head:
    """The head of a model whose loss is computed in slices."""

    name: str
    """Of its matrix, qualified."""
    module: nn.Linear
    is_on_host: bool
    """Whether its matrix stays in host memory."""
    users: Sequence[nn.Module] = ()
    """The modules whose ``weight`` the matrix is: the head, and embeddings that share it."""
    all_names: Sequence[str] = ()
    """Of the matrix, one for each of them."""

    @property
    def matrix(self) -> torch.Tensor:
        return self.module.weight


def find_head(
    model: nn.Module, base: Any, loss: str, wanted: bool | None
) -> "tuple[Head | None, list[str]]":
    """Choose what happens to a model's head.

    Args:
        model: With its adapters.
        base: The transformers model in it.
        loss: ``StreamingPolicy.loss``.
        wanted: ``StreamingPolicy.stream_head``.

    Returns:
        None if it stays as it is; and what was asked for in vain, and why.
    """
    if loss == "reference":
        return None, ["stream_head=True, but loss='reference' reads all of the head"] * bool(wanted)
    head = base.get_output_embeddings()
    if head is None:
        # Of a classifier or a decoder alone, which have no loss over tokens either.
        return None, ["stream_head=True, but the model has no head for tokens"] * bool(wanted)
    adapted = adapted_modules(model)
    why = _why_own_head(head, adapted) or _why_own_loss(base)
    if why is not None:
        return None, [f"the model keeps its own head and loss: {why}"]
    weight = head.weight
    users = {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if any(tensor is weight for tensor in module._parameters.values())
    }
    in_vain = []
    is_on_host = stays_on_host(weight.nbytes, wanted)
    if is_on_host and not all(_reads_rows(module, head, adapted) for module in users.values()):
        in_vain.append("the head stays on the device: something else uses its weight")
        is_on_host = False
    name = next(name for name, module in users.items() if module is head)
    return Head(name, head, is_on_host, tuple(users.values()), tuple(users)), in_vain


def _reads_rows(module: nn.Module, head: nn.Module, adapted: Collection[int]) -> bool:
    is_lookup = isinstance(module, nn.Embedding) and module.max_norm is None
    return module is head or (is_lookup and id(module) not in adapted)


def _why_own_head(head: Any, adapted: Collection[int]) -> str | None:
    """Why nothing can be done to a head, if that is so.

    Args:
        head: The output embedding of a transformers model.
        adapted: Ids of the modules with adapters.
    """
    if type(head) is not nn.Linear:
        kind = type(head).__name__
        return f"its head is a {kind}, not a plain linear module (adapted, trained, quantized?)"
    if not (is_plain(head.weight) or isinstance(head.weight, HostMatrix)):
        return f"its head's weight is a {type(head.weight).__name__}"
    if "forward" in head.__dict__:
        return "its head's forward has been replaced"
    if any(parameter.requires_grad for parameter in head.parameters()):
        return "its head is trained"
    return "its head is adapted" if id(head) in adapted else None


def _why_own_loss(base: Any) -> str | None:
    """Why the loss of a transformers model cannot be computed in slices, if that is so."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if base.loss_function is ForCausalLMLoss:
        return None
    return f"its loss is {getattr(base.loss_function, '__name__', base.loss_function)}"
