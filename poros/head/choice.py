"""Decides which vocabulary matrices stay in host memory, and how the loss is computed.

Embeddings and heads that can stay there are found here, and kept there.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from poros.head.host_matrix import HostMatrix
from poros.head.rows import RowReader
from poros.kernels.nf4 import is_plain

logger = logging.getLogger(__name__)

LEAST_NUM_BYTES = 2**24
"""Below this a matrix stays on the device unless it is asked for: little is won, and a lookup there
costs no transfer of indices."""


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


@dataclass(frozen=True)
class Embedding:
    """An embedding that can stay in host memory."""

    name: str
    """Of its matrix, qualified."""
    module: nn.Embedding

    @property
    def matrix(self) -> torch.Tensor:
        return self.module.weight


def stays_on_host(num_bytes: int, wanted: bool | None) -> bool:
    """Whether a vocabulary matrix that can stay in host memory does stay there.

    Args:
        num_bytes: Its size.
        wanted: ``StreamingPolicy.stream_embedding``, or ``stream_head``.
    """
    return num_bytes >= LEAST_NUM_BYTES if wanted is None else wanted


def choose_embeddings(
    model: nn.Module,
    apart: Sequence[nn.Module],
    wanted: bool | None,
    kept: Sequence[nn.Module] = (),
) -> list[Embedding]:
    """Return those of ``find_embeddings`` that stay in host memory; log it if none can.

    Args:
        wanted: ``StreamingPolicy.stream_embedding``.
        kept: Modules whose matrix stays in host memory as the head's.
    """
    found = find_embeddings(model, apart)
    if wanted and not found and not any(isinstance(module, nn.Embedding) for module in kept):
        logger.warning(
            "poros: stream_embedding=True, but the embedding stays on the device: it is trained, "
            "adapted, quantized, or shared with the head"
        )
    return [each for each in found if stays_on_host(each.matrix.nbytes, wanted)]


def find_embeddings(model: nn.Module, apart: Sequence[nn.Module]) -> list[Embedding]:
    """Find the embeddings whose matrices can stay in host memory.

    Args:
        model: With its adapters.
        apart: The decoder layers, and towers for images and sound, which are left out.

    Returns:
        Those that are frozen and plain, outside of these, used by nothing else (a tied head reads
        the whole matrix) and not adapted. What is in host memory already is among them.
    """
    left_out = {id(module) for part in apart for module in part.modules()}
    uses = Counter(id(tensor) for module in model.modules() for tensor in _tensors(module))
    adapted = adapted_modules(model)
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or id(module) in left_out:
            continue
        matrix = module.weight
        if (
            uses[id(matrix)] == 1
            and id(module) not in adapted
            and not matrix.requires_grad
            and (is_plain(matrix) or isinstance(matrix, HostMatrix))
            and matrix.is_floating_point()
            and module.max_norm is None
        ):
            found.append(Embedding(f"{name}.weight" if name else "weight", module))
    return found


def adapted_modules(model: nn.Module) -> set[int]:
    """Return ids of the modules that PEFT has adapted or made trainable, nested ones too."""
    return {
        id(inner)
        for module in model.modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        for inner in module.modules()
    }


def keep_on_host(
    root: nn.Module, name: str, users: Sequence[nn.Module], reader: RowReader
) -> Callable[[], None]:
    """Serve the matrix of ``users``, which is in host memory, through ``reader``.

    Args:
        root: The model; held weakly.
        name: Of the matrix, qualified.
        users: The modules whose ``weight`` it is.
        reader: Brings what is read of it.

    Returns:
        What undoes it.
    """
    own: Any = users[0]._parameters["weight"]
    matrix = nn.Parameter(HostMatrix(own.detach(), reader, name), requires_grad=False)
    handles = []
    for module in users:
        module._parameters["weight"] = matrix
        handles.append(module.register_state_dict_post_hook(_give_bytes))

    reference = weakref.ref(root)

    def undo() -> None:
        for handle in handles:
            handle.remove()
        model = reference()
        # Wherever it is now: somebody may have tied it meanwhile.
        for module in () if model is None else model.modules():
            for key, tensor in module._parameters.items():
                if tensor is matrix:
                    module._parameters[key] = own

    return undo


def _give_bytes(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """Save the bytes on the host."""
    matrix = state.get(f"{prefix}weight")
    if isinstance(matrix, HostMatrix):
        state[f"{prefix}weight"] = matrix.host


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in module._parameters.values() if tensor is not None]
