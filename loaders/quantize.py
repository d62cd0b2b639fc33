"""Quantizes one tensor to 4 bits, piece by piece, straight into the caller's memory.

bitsandbytes quantizes the *flattened* tensor in blocks of ``blocksize`` elements that know nothing
of each other, so pieces of whole blocks give the bytes that the whole tensor gives. Only double
quantization looks at the whole tensor, and only at its float32 absmax, which is kept until the end:

    offset = mean(absmax),   absmax8, nested_absmax = blockwise8(absmax - offset, 256)

A sum per piece would give another offset, and a piece that ends within a block other bytes.

Note: Pieces in flight
    On a GPU a piece goes through page-locked memory of PyTorch's, which is used again only when the
    copy out of it is over, so that the host reads the next piece meanwhile. The packed bytes come
    back to such memory, from which a thread writes them to their place. All of it is queued on the
    *default* stream: bitsandbytes launches its quantization kernels there whatever is current.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from poros.cuda_streams import streams_for
from poros.errors import CheckpointFormatError
from poros.kernels.nf4 import MOVING, NESTED_BLOCKSIZE, Format, Parts

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

_CHUNK_NUM_BYTES = {"cpu": 1 << 19, "cuda": 16 << 20}

MOST_WRITES = 2
"""Pieces that may be on their way back while the next one is quantized."""


class Quantizer:
    """Copies pieces of a tensor to a device and quantizes them there.

    Args:
        device: Where to quantize. Bytes are those of bitsandbytes on that device.
        chunk_num_bytes: Size of a piece, rounded down to whole blocks but at least one block. None
            is 512 KiB on a CPU and 16 MiB on a GPU.

    Streams:
        Compute runs on the default stream of ``device``.
    """

    def __init__(self, device: torch.device, *, chunk_num_bytes: int | None = None) -> None:
        self.device = device
        self._chunk_num_bytes = chunk_num_bytes or _CHUNK_NUM_BYTES[device.type]
        self._streams = streams_for(device)
        self._writer = ThreadPoolExecutor(1, "poros-writer")
        self._writes: deque[Future[object]] = deque()

    def quantize_into(
        self,
        tensor: torch.Tensor,
        *,
        where: str,
        format: Format,
        targets: Parts,
    ) -> "QuantState":
        """Quantize ``tensor`` and write packed bytes and statistics into the given tensors.

        The last packed bytes may be on their way yet: call ``flush`` before anyone reads them.

        Args:
            tensor: On the host; float32, float16 or bfloat16, cast to the dtype to load in already.
                Any shape; if it is not contiguous, a contiguous copy is made.
            where: What an error calls the tensor.
            targets: Host tensors for the parts that are ``MOVING``, as ``format`` has them.

        Returns:
            The state of the quantized tensor, on the host; it refers to ``targets``, and owns code
            books and offset.

        Exactness:
            Bytes equal to ``bitsandbytes.functional.quantize_4bit`` of the whole tensor on the
            same device; on a CPU with the same number of threads, which the mean depends on.
        """
        import bitsandbytes.functional as bnb

        with torch.no_grad(), self._on_default_stream():
            try:
                scales = self._quantize_pieces(tensor, where, format, targets["packed"])
            except BaseException:
                # Nothing may be written to the caller's memory once it has the error.
                wait(self._writes)
                self._writes.clear()
                raise
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
            self._bring_back(values.view(-1), packed_bytes[start // 2 :][: values.numel()])
        if extremes:
            require_finite(torch.stack(extremes), where)
        return scales

    def _on_device(self, piece: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return piece
        return piece.pin_memory().to(self.device, non_blocking=True)

    def _bring_back(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Write packed bytes to host memory: from a device in a thread, behind the next piece.

        Host memory is touched for the first time here, which takes as long as the copy.
        """
        if self.device.type == "cpu":
            target.copy_(values)
            return
        packed = torch.empty_like(values, device="cpu", pin_memory=True)
        packed.copy_(values, non_blocking=True)
        arrived = self._streams.record()

        def write() -> None:
            self._streams.synchronize(arrived)
            target.copy_(packed)

        if len(self._writes) == MOST_WRITES:
            self._writes.popleft().result()
        self._writes.append(self._writer.submit(write))

    def flush(self) -> None:
        """Wait until the bytes of every call are in their places."""
        while self._writes:
            self._writes.popleft().result()

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
