"""Copies of many small tensors, with casts on the way, in few kernels.

``torch._foreach_copy_`` gives 65,536 elements of a tensor to one block of threads, and so most of
an adapter's matrix to a single multiprocessor. A kernel of our own splits them further: in steps of
7B on an H100 one took 2.6 us, where PyTorch's took 13.5. The host starts it through Triton, so it
is used where a CUDA graph is recorded, which starts it for nothing.

Source:
    pytorch: ``foreach_tensor_copy_list_kernel_cuda_`` in
    aten/src/ATen/native/cuda/ForeachBinaryOpList.cu, ``kChunkSize`` in MultiTensorApply.cuh.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from poros.utils.devices import runs_triton

_DTYPES = (torch.float32, torch.bfloat16)
"""That the kernel copies, from each into each."""
_MOST_ELEMENTS = 2**30
"""Of a tensor: the kernel counts in 32 bits."""


def copy_all(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into its place, of the same shape, on the same device; no graph.

    Streams:
        Queued on the current stream.

    Exactness:
        Equal bits to ``place.copy_(source)``, but for those that tell one NaN from another.
    """
    # ``_foreach_copy_`` goes tensor by tensor if dtypes are mixed, or one lies unlike its place.
    alike: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for place, source in zip(into, sources, strict=True):
        is_same = place.stride() == source.stride()
        alike[place.dtype, source.dtype, is_same].append((place, source))
    for pairs in alike.values():
        if fits_kernel(pairs):
            from poros.kernels import copies_gpu

            copies_gpu.copy(pairs)
        else:
            torch._foreach_copy_([place for place, _ in pairs], [source for _, source in pairs])


def fits_kernel(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether our kernel copies these, of one dtype each, while a graph is recorded."""
    place = pairs[0][0]
    return (
        place.is_cuda
        and torch.cuda.is_current_stream_capturing()
        and runs_triton(place.device)
        and {each.dtype for each in pairs[0]} <= {*_DTYPES}
        and all(_is_plain(each) for pair in pairs for each in pair)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    is_aligned = tensor.data_ptr() % 16 == 0
    return is_aligned and tensor.is_contiguous() and tensor.numel() < _MOST_ELEMENTS


def prepare_to_record(device: torch.device) -> None:
    """Have the kernel compiled, which cannot be done while a graph is recorded."""
    if runs_triton(device):
        from poros.kernels import copies_gpu

        copies_gpu.compile_for(_DTYPES, device)
