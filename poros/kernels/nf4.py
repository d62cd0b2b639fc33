"""What a 4-bit weight of bitsandbytes consists of: its parts, their form, and where they hang.

A weight is flattened and cut into blocks of ``blocksize`` elements, the last of which may be
shorter (Dettmers et al. 2023, QLoRA, section 3). An element of block b is ``code[i] * absmax[b]``;
two indices i share a byte, the first in its upper half. With double quantization absmax itself is
bytes: ``nested_code[absmax[b]] * nested_absmax[b // 256] + offset``, rounded to float32 at each
operation. The parts, by name:

    packed          (ceil(num_elements / 2) bytes, 1) in the storage dtype
    absmax          (num_blocks,)               float32, or uint8 if the quantization is double
    nested_absmax   (ceil(num_blocks / 256),)   float32, like the last two only if it is double
    code            (16,)                       float32; kernels know it from the quant_type
    offset          ()                          float32
    nested_code     (256,)                      float32

bitsandbytes keeps the packed bytes in a ``Params4bit`` and everything else in its ``QuantState``,
to which a ``Linear4bit`` refers a second time. Nothing here reads or changes what a part holds.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from poros.host.layout import is_small

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

QUANT_TYPES = ("nf4", "fp4")
"""The code books that there are."""

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Elements that share one absmax: those that bitsandbytes has kernels for."""

NESTED_BLOCKSIZE = 256
"""Elements of absmax that share one nested absmax; fixed in bitsandbytes."""

NUM_CODES, NUM_NESTED_CODES = 16, 256
"""Entries of the code books, which kernels do not count."""

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")}
"""What a weight is quantized from, by the names that states have for them."""

Parts = Mapping[str, torch.Tensor]
"""Tensors of one weight by the names above."""

PARTS = {
    False: ("packed", "absmax", "code"),
    True: ("packed", "absmax", "nested_absmax", "code", "offset", "nested_code"),
}
"""The parts of single and of double quantization, in the order in which stores keep them."""

MOVING = ("packed", "absmax", "nested_absmax")
"""Those that grow with the weight; the others are constants."""


def is_params4bit(tensor: object) -> bool:
    """Whether ``tensor`` is a 4-bit parameter of bitsandbytes, quantized yet or not."""
    return type(tensor).__name__ == "Params4bit"


def is_4bit(tensor: object) -> bool:
    """Whether ``tensor`` is a quantized bitsandbytes 4-bit parameter."""
    return is_params4bit(tensor) and state_of(tensor) is not None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of no other library, and not what a pickle leaves of a 4-bit weight."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and not hasattr(tensor, "quant_state")


def state_of(tensor: object) -> Any:
    """The ``QuantState`` of a tensor, or None. A plain pickle leaves it, and takes the type."""
    return getattr(tensor, "quant_state", None)


def num_weights(tensor: Any) -> int:
    """Elements of a matrix, quantized or not; 0 of a vector."""
    if is_4bit(tensor):
        return prod(tensor.quant_state.shape)
    return int(tensor.numel()) if tensor.dim() > 1 else 0


class Part(NamedTuple):
    """One tensor that moves: attribute ``attribute`` of ``holder``, under a qualified name."""

    name: str
    holder: Any
    attribute: str

    def get(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.holder, self.attribute)
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        setattr(self.holder, self.attribute, tensor)

    @property
    def owner(self) -> torch.Tensor:
        """The tensor of the model whose object stays and counts writes; ``.data`` is a new one."""
        owner: torch.Tensor = self.holder if self.attribute == "data" else self.get()
        return owner


@dataclass(frozen=True)
class Format:
    """How bitsandbytes holds a 4-bit weight. Nothing is checked here."""

    quant_type: str
    double_quant: bool
    quant_storage: torch.dtype
    blocksize: int = 64
    """What transformers leaves at bitsandbytes' default."""

    @classmethod
    def of(cls, weight: Any) -> "Format":
        """That of a ``Params4bit``, quantized or not, or of what is left of one after a pickle."""
        return cls(
            weight.quant_type, weight.compress_statistics, weight.quant_storage, weight.blocksize
        )

    def form(self, shape: Sequence[int]) -> Parts:
        """The parts that bitsandbytes makes of a weight of ``shape``, as meta tensors.

        An odd element has a byte of its own; the bytes have to fill whole storage elements.
        """
        num_blocks = -(-prod(shape) // self.blocksize)
        num_packed = (prod(shape) + 1) // (2 * self.quant_storage.itemsize)
        scales = torch.uint8 if self.double_quant else torch.float32
        forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "packed": ((num_packed, 1), self.quant_storage),
            "absmax": ((num_blocks,), scales),
            "nested_absmax": ((-(-num_blocks // NESTED_BLOCKSIZE),), torch.float32),
            "code": ((NUM_CODES,), torch.float32),
            "offset": ((), torch.float32),
            "nested_code": ((NUM_NESTED_CODES,), torch.float32),
        }
        chosen = ((part, *forms[part]) for part in PARTS[self.double_quant])
        return {part: torch.empty(size, dtype=dtype, device="meta") for part, size, dtype in chosen}

    def state(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """A ``QuantState`` of these very tensors, double if nested ones are among them.

        Args:
            parts: As ``form`` of ``shape`` says, on one device; it has no use for packed bytes.
            dtype: Of the weight, one of ``DTYPES``: it comes out in this one again.
        """
        from bitsandbytes.functional import QuantState

        settings = {"shape": shape, "blocksize": self.blocksize, "quant_type": self.quant_type}
        state = QuantState(parts["absmax"], code=parts["code"], dtype=dtype, **settings)
        if "nested_absmax" in parts:
            state.nested, state.offset = True, parts["offset"]
            state.state2 = QuantState(
                parts["nested_absmax"],
                code=parts["nested_code"],
                blocksize=NESTED_BLOCKSIZE,
                dtype=torch.float32,
            )
        return state

    def weight(self, data: torch.Tensor, state: Any, module: nn.Module | None) -> Any:
        """A frozen ``Params4bit`` over ``data``, which is not copied.

        Args:
            data: Packed; if there is no state, a weight to quantize when it is moved to a device.
            state: Its ``QuantState``, or None.
            module: The ``Linear4bit`` that it refers to; see ``own``.
        """
        from bitsandbytes.nn import Params4bit

        return Params4bit(
            data,
            requires_grad=False,
            quant_state=state,
            blocksize=self.blocksize,
            compress_statistics=self.double_quant,
            quant_type=self.quant_type,
            quant_storage=self.quant_storage,
            module=module,
            bnb_quantized=state is not None,
        )


def double_quantization(
    compute_dtype: torch.dtype, quant_type: str = "nf4"
) -> "BitsAndBytesConfig":
    """What transformers is told, so that it quantizes as Poros does where nobody says otherwise."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def part_name(name: str, part: str) -> str:
    """What a part of the weight ``name`` is called in layouts, stores and digests."""
    return name if part == "packed" else f"{name}.{part}"


def places(name: str, weight: Any) -> dict[str, Part]:
    """Where each part of the quantized weight ``name`` hangs."""
    state = weight.quant_state
    holders = {
        "packed": (weight, "data"),
        "absmax": (state, "absmax"),
        "nested_absmax": (state.state2, "absmax"),
        "code": (state, "code"),
        "offset": (state, "offset"),
        "nested_code": (state.state2, "code"),
    }
    return {part: Part(part_name(name, part), *holders[part]) for part in PARTS[state.nested]}


def parts_of(weight: Any) -> Parts:
    """The parts of a quantized weight, themselves."""
    return {part: place.get() for part, place in places("", weight).items()}


def part_tensors(
    name: str, tensor: torch.Tensor, *, with_constants: bool = False
) -> dict[str, torch.Tensor]:
    """The parts of any loaded tensor by name: what moves, and on request what stays on a device."""
    if state_of(tensor) is None:
        return {name: tensor.data}
    parts = places(name, tensor).items()
    return {place.name: place.get() for part, place in parts if with_constants or part in MOVING}


def streams(part: str, tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, a part or its form, lies in a slab: see "What is small stays"."""
    return part in MOVING and not (part == "nested_absmax" and is_small(tensor))


def rebound(weight: Any, parts: Parts) -> Any:
    """Another ``Params4bit`` like a quantized one, with a state of its own; ``weight`` stays.

    Exchanging tensors inside one state would pull them out from under a matmul that still refers to
    it. The module of ``weight`` is referred to, and refers to ``weight``; see ``own``.

    Args:
        weight: What to be like.
        parts: New tensors of the same form; those that are left out are shared.

    Raises:
        KeyError: If ``weight`` has no such part.
    """
    state = copy.copy(weight.quant_state)
    state.state2 = copy.copy(state.state2)
    made = Format.of(weight).weight(parts.get("packed", weight.data), state, weight.module)
    targets = places("", made)
    for part in parts.keys() - {"packed"}:
        targets[part].put(parts[part])
    return made


def own(module: Any, weight: Any) -> None:
    """Make ``weight`` and the module that holds it refer to each other, and to one state."""
    weight.module, module.quant_state = module, weight.quant_state
