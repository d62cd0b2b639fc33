"""Bitwise comparison of tensors, through integer views of the same width.

Value comparison is the wrong tool for a claim about bits: ``torch.equal`` accepts +0 against -0 and
rejects two equal NaNs. Every element is therefore read as the integer that its bytes spell, and two
elements are equal exactly when those integers are.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from poros.io.digests import INTEGERS

Kind = Literal["value", "dtype", "shape", "missing", "extra"]


@dataclass(frozen=True)
class Difference:
    """One tensor that is not bit for bit what it should be.

    Attributes:
        kind: ``value`` when bits differ; ``dtype`` or ``shape`` when the two cannot be compared
            element by element; ``missing`` or ``extra`` when one side has no tensor of this name.
        num_elements: Elements of the expected tensor (of the found one when ``extra``).
        num_differing: Elements whose bits differ; None when the kind leaves nothing to count.
        first_index: Index of the first differing element in row-major order, () for a 0-d tensor.
        expected: What was expected there: value and bits, or the dtype or shape.
        found: What was found there, in the same form.
        largest: The largest difference between two values; None where there is none to take: types
            that are not plain floats, and infinities and NaN.
    """

    name: str
    kind: Kind
    num_elements: int
    num_differing: int | None = None
    first_index: tuple[int, ...] | None = None
    expected: str = ""
    found: str = ""
    largest: float | None = None

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.name}: expected a tensor of {self.expected}, found none"
        if self.kind == "extra":
            return f"{self.name}: expected no such tensor, found one of {self.found}"
        if self.kind != "value":
            return f"{self.name}: expected {self.kind} {self.expected}, found {self.found}"
        apart = "" if self.largest is None else f", by at most {self.largest:.3g}"
        index = list(self.first_index or ())
        return (
            f"{self.name}: {self.num_differing} of {self.num_elements} elements differ{apart}; "
            f"first at {index}: expected {self.expected}, found {self.found}"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return an integer view of ``tensor`` with the same width per element and the same bytes.

    Args:
        tensor: Any dense tensor, on any device, contiguous or not. A complex tensor gains a last
            axis of length 2, its real and imaginary parts.

    Raises:
        ValueError: If the tensor has no bytes to read (meta) or is not dense (sparse, nested).
    """
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(
            f"expected a dense tensor with storage, found layout {tensor.layout} on "
            f"{tensor.device}; materialize it (to_empty, to_dense) before comparing bits"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(INTEGERS[plain.element_size()])


def differing(expected: torch.Tensor, found: torch.Tensor, name: str) -> Difference | None:
    """Compare two tensors bit for bit; return the first difference, or None.

    Args:
        expected: The reference, any dtype, shape, stride and device.
        found: The tensor under test. When it lies on another device, both are compared on the CPU.

    Streams:
        Work is queued on the current stream and the host waits for the result.
    """
    if expected.dtype != found.dtype:
        left, right = str(expected.dtype), str(found.dtype)
        return Difference(name, "dtype", expected.numel(), expected=left, found=right)
    if expected.shape != found.shape:
        left, right = str(tuple(expected.shape)), str(tuple(found.shape))
        return Difference(name, "shape", expected.numel(), expected=left, found=right)
    left_bits, right_bits = bits(expected), bits(found)
    if left_bits.device != right_bits.device:
        left_bits, right_bits = left_bits.cpu(), right_bits.cpu()
    mask = left_bits != right_bits
    if not bool(mask.any()):
        return None
    if expected.is_complex():
        mask = mask.any(-1)
    index = tuple(torch.nonzero(mask)[0].tolist())
    return Difference(
        name,
        "value",
        expected.numel(),
        num_differing=int(mask.sum()),
        first_index=index,
        expected=_describe(expected[index]),
        found=_describe(found[index]),
        largest=_largest(expected, found, mask),
    )


def differing_or_absent(
    expected: torch.Tensor | None, found: torch.Tensor | None, name: str
) -> Difference | None:
    """Compare two tensors bit for bit, either of which may be absent (None)."""
    if expected is not None and found is not None:
        return differing(expected, found, name)
    if expected is not None:
        return Difference(name, "missing", expected.numel(), expected=_outline(expected))
    if found is not None:
        return Difference(name, "extra", found.numel(), found=_outline(found))
    return None


def _largest(expected: torch.Tensor, found: torch.Tensor, mask: torch.Tensor) -> float | None:
    if expected.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return None
    left, right = (each[mask.to(each.device)].double().cpu() for each in (expected, found))
    largest = float((left - right).abs().max())
    return largest if math.isfinite(largest) else None


def _outline(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _describe(element: torch.Tensor) -> str:
    """Value and bit pattern of a 0-d tensor; the pattern tells +0 from -0 and NaN from NaN."""
    pattern = bits(element)
    width = pattern.element_size() * 8
    words = [f"0x{int(word) & (2**width - 1):0{width // 4}x}" for word in pattern.reshape(-1)]
    try:
        return f"{element.item()!r} ({' '.join(words)})"
    except NotImplementedError:  # torch reads no number out of this type
        return " ".join(words)
