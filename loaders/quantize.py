"""Quantizes one tensor to 4 bits, piece by piece, straight into the caller's memory.

bitsandbytes quantizes the *flattened* tensor in blocks of ``blocksize`` elements that know nothing
of each other, so pieces of whole blocks give the bytes that the whole tensor gives. Only double
quantization looks at the whole tensor, and only at its float32 absmax, which is kept until the end:

    offset = mean(absmax),   absmax8, nested_absmax = blockwise8(absmax - offset, 256)

A sum per piece would give another offset, and a piece that ends within a block other bytes.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from poros.errors import CheckpointFormatError
from poros.kernels.nf4 import MOVING, NESTED_BLOCKSIZE, Format, Parts

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

_CHUNK_NUM_BYTES = {"cpu": 1 << 19, "cuda": 16 << 20}


class Quantizer:
    """Moves pieces of a tensor to a device and quantizes them there.

    Args:
        device: Where to quantize. Bytes are those of bitsandbytes on that device.
        chunk_num_bytes: Size of a piece, rounded down to whole blocks but at least one block. None
            is 512 KiB on a CPU and 16 MiB on a GPU.

    Streams:
        Everything runs on the default stream of ``device``, on which bitsandbytes launches its
        quantization kernels whatever stream is current. The host waits for each piece.
    """

    def __init__(self, device: torch.device, *, chunk_num_bytes: int | None = None) -> None:
        self.device = device
        self._chunk_num_bytes = chunk_num_bytes or _CHUNK_NUM_BYTES[device.type]

    def quantize_into(
        self,
        tensor: torch.Tensor,
        *,
        name: str,
        format: Format,
        targets: Parts,
        where: str | None = None,
    ) -> "QuantState":
        """Quantize ``tensor`` and write packed bytes and statistics into the given tensors.

        Args:
            tensor: On the host; float32, float16 or bfloat16, cast to the dtype to load in already.
                Any shape; if it is not contiguous, a contiguous copy is made.
            name: Of the tensor.
            format: What to quantize to.
            targets: Host tensors for the parts that are ``MOVING``, as ``format`` has them.
            where: What it is, for the message of an error; None is ``name``.

        Returns:
            The state of the quantized tensor, on the host; it refers to ``targets``, and owns code
            books and offset.

        Exactness:
            Bytes equal to ``bitsandbytes.functional.quantize_4bit`` of the whole tensor on the
            same device; on a CPU with the same number of threads, which the mean depends on.

        Raises:
            CheckpointFormatError: If the tensor holds NaN or infinity.
        """
        import bitsandbytes.functional as bnb

        with torch.no_grad(), self._on_default_stream():
            scales = self._quantize_pieces(tensor, where or name, format, targets["packed"])
            made = {"absmax": scales}
            if format.double_quant:
                offset = scales.mean()
                nested, state2 = bnb.quantize_blockwise(scales - offset, blocksize=NESTED_BLOCKSIZE)
                made = {"absmax": nested, "nested_absmax": state2.absmax}
                made |= {"offset": offset, "nested_code": state2.code}
            parts = {"code": bnb.get_4bit_type(format.quant_type, device="cpu")}
            for part, data in made.items():
                parts[part] = targets[part].copy_(data) if part in MOVING else data.cpu()
            return format.state(parts, tensor.shape, tensor.dtype)

    def _quantize_pieces(
        self, tensor: torch.Tensor, where: str, format: Format, packed: torch.Tensor
    ) -> torch.Tensor:
        """Fill ``packed``; returns the float32 absmax of every block, on the device."""
        flat, blocksize = tensor.reshape(-1), format.blocksize
        packed_bytes = packed.view(-1).view(torch.uint8)
        num_elements = flat.numel()
        chunk = max(self._chunk_num_bytes // flat.element_size() // blocksize, 1) * blocksize
        num_blocks = -(-num_elements // blocksize)
        scales = torch.empty(num_blocks, dtype=torch.float32, device=self.device)
        extremes: list[torch.Tensor] = []
        for start in range(0, num_elements, chunk):
            piece = self._on_device(flat[start : start + chunk])
            extremes.extend(torch.aminmax(piece))
            values, piece_scales = torch.ops.bitsandbytes.quantize_4bit.default(
                piece, blocksize, format.quant_type, torch.uint8
            )
            scales[start // blocksize :][: piece_scales.numel()].copy_(piece_scales)
            packed_bytes[start // 2 :][: values.numel()].copy_(values.view(-1))
        if extremes:
            require_finite(torch.stack(extremes), where)
        return scales

    def _on_device(self, piece: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return piece
        # PyTorch keeps page-locked memory, and uses it again when the copy out of it is over.
        return piece.pin_memory().to(self.device, non_blocking=True)

    def _on_default_stream(self) -> AbstractContextManager[None]:
        if self.device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.default_stream(self.device))


def require_finite(tensor: torch.Tensor, name: str) -> None:
    """Raise ``CheckpointFormatError`` if a floating-point ``tensor`` holds NaN or infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if tensor.element_size() == 1:  # 8-bit floats have no reductions
        tensor = tensor.float()
    low, high = torch.aminmax(tensor.detach())
    if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
        raise CheckpointFormatError(
            f"{name}: expected finite weights, found values from {low.item()} to {high.item()}; "
            "the checkpoint is damaged or was saved from a diverged run; fetch it again, or load "
            "another"
        )
