"""Quantizes one tensor to 4 bits, piece by piece, straight into the caller's memory.

bitsandbytes quantizes the *flattened* tensor in blocks of ``blocksize`` elements that know nothing
of each other, so pieces of whole blocks give the bytes that the whole tensor gives. Only double
quantization looks at the whole tensor, and only at its float32 absmax, which is kept until the end:

    offset = mean(absmax),   absmax8, nested_absmax = blockwise8(absmax - offset, 256)

A sum per piece would give another offset, and a piece that ends within a block other bytes.

Note: Two pieces in flight
    On a GPU piece i is quantized on the compute stream while the host reads piece i + 1 into the
    other page-locked buffer and the copy stream moves it. bitsandbytes launches its quantization
    kernels on the *default* stream whatever stream is current, so that is the compute stream here.
    The packed bytes come back to a page-locked buffer, from which a thread writes them to their
    place while the next piece is under way. Page-locked buffers are used again only when the copy
    out of them, or the write, is over; the host waits for that.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from poros.cuda_streams import streams_for
from poros.errors import CheckpointFormatError
from poros.kernels.nf4 import MOVING, NESTED_BLOCKSIZE, Format, Parts
from poros.streams import Event, StreamContext

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

_CHUNK_NUM_BYTES = {"cpu": 1 << 19, "cuda": 16 << 20}


@dataclass
class _Buffer:
    """One of the two staging buffers for pieces on their way to the device."""

    host: torch.Tensor
    device: torch.Tensor
    released: Event
    """After this event the compute stream no longer reads ``device``."""
    packed: torch.Tensor
    """Page-locked memory for the packed bytes that come back."""
    arrived: Event = None
    """After this event the copy out of ``host`` is complete."""
    pending: Future[None] | None = None
    """The write of the results to their place, until somebody waits for it."""

    def wait(self) -> None:
        """Wait until the results are in their place."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()


class Quantizer:
    """Stages pieces of a tensor to a device and quantizes them there.

    Args:
        device: Where to quantize. Bytes are those of bitsandbytes on that device.
        chunk_num_bytes: Size of a piece, rounded down to whole blocks but at least one block. None
            is 512 KiB on a CPU and 16 MiB on a GPU.
        streams: Stage through these even on a CPU (for tests). None takes the device's own.

    Streams:
        Compute runs on the default stream of ``device``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        chunk_num_bytes: int | None = None,
        streams: StreamContext | None = None,
    ) -> None:
        self.device = device
        self._chunk_num_bytes = chunk_num_bytes or _CHUNK_NUM_BYTES[device.type]
        self._is_staged = streams is not None or device.type != "cpu"
        self._streams = streams or streams_for(device)
        self._buffers: list[_Buffer] = []
        self._writer = ThreadPoolExecutor(1, "poros-writer")

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

        The last packed bytes may be on their way yet: call ``flush`` before anyone reads them.

        Args:
            tensor: On the host; float32, float16 or bfloat16, cast to the dtype to load in already.
                Any shape; if it is not contiguous, a contiguous copy is made.
            targets: Host tensors for the parts that are ``MOVING``, as ``format`` has them.
            where: What an error calls the tensor; None takes ``name``.

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
            try:
                scales = self._quantize_pieces(tensor, where or name, format, targets["packed"])
            except BaseException:
                # Nothing may be written to the caller's memory once it has the error.
                for buffer in self._buffers:
                    with suppress(Exception):
                        buffer.wait()
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
        starts = range(0, num_elements, chunk)
        staged = self._stage(flat, 0, chunk)
        for index, start in enumerate(starts):
            piece, arrived = staged
            self._streams.wait(arrived)
            extremes.extend(torch.aminmax(piece))
            values, piece_scales = torch.ops.bitsandbytes.quantize_4bit.default(
                piece, blocksize, format.quant_type, torch.uint8
            )
            scales[start // blocksize :][: piece_scales.numel()].copy_(piece_scales)
            if self._is_staged:
                self._buffers[index % 2].released = self._streams.record()
            if start + chunk < num_elements:
                staged = self._stage(flat, index + 1, chunk)
            target = packed_bytes[start // 2 :][: values.numel()]
            self._bring_back(values.view(-1), target, index)
        if extremes:
            require_finite(torch.stack(extremes), where)
        return scales

    def _bring_back(self, values: torch.Tensor, target: torch.Tensor, index: int) -> None:
        """Write packed bytes to host memory: from a device in a thread, behind the next piece.

        Host memory is touched for the first time here, which takes as long as the copy.
        """
        if not self._is_staged:
            target.copy_(values)
            return
        buffer = self._buffers[index % 2]
        buffer.wait()
        packed = buffer.packed[: values.numel()]
        packed.copy_(values, non_blocking=True)
        # The copy back is behind the quantization on the same stream.
        arrived = self._streams.record()

        def write() -> None:
            self._streams.synchronize(arrived)
            target.copy_(packed)

        buffer.pending = self._writer.submit(write)

    def flush(self) -> None:
        """Wait until the bytes of every call are in their places."""
        for buffer in self._buffers:
            buffer.wait()

    def _stage(self, flat: torch.Tensor, index: int, chunk: int) -> tuple[torch.Tensor, Event]:
        """Return piece ``index`` on the device, and the event of its arrival."""
        source = flat[index * chunk : (index + 1) * chunk]
        if not self._is_staged:
            return source, None
        buffer = self._buffer(index % 2, chunk * flat.element_size())
        host, device = buffer.host[: source.nbytes], buffer.device[: source.nbytes]
        if buffer.arrived is not None:
            self._streams.synchronize(buffer.arrived)
        host.view(source.dtype).copy_(source)
        arrived = buffer.arrived = self._streams.copy(device, host, after=buffer.released)
        return device.view(source.dtype), arrived

    def _buffer(self, index: int, num_bytes: int) -> _Buffer:
        if not self._buffers or self._buffers[0].host.numel() < num_bytes:
            pinned = self.device.type == "cuda"
            self.flush()
            self._buffers = []  # before there are others
            self._buffers = [
                _Buffer(
                    torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned),
                    self._streams.allocate(num_bytes),
                    self._streams.record(),
                    # Packed bytes are at most half of those that they come from.
                    torch.empty(num_bytes // 2, dtype=torch.uint8, pin_memory=pinned),
                )
                for _ in range(2)
            ]
        return self._buffers[index]

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
