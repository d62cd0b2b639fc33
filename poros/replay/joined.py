"""CUDA graphs one behind the other, as one graph: PyTorch has no way to join them.

The driver takes copies of graphs as nodes of another one. Its interface is in C, and is called
through ``ctypes``.

Source:
    NVIDIA, CUDA Driver API, "Graph Management": ``cuGraphAddChildGraphNode``.
"""

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


class JoinedGraph:
    """Graphs that were captured with ``keep_graph=True``, in order.

    Args:
        graphs: The graphs.
        device: Of all of them.

    Raises:
        RuntimeError: If the driver cannot join them.
    """

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph], device: torch.device) -> None:
        self._graphs = graphs  # they hold the memory of their tensors
        self._device = device
        whole, before, self._executable = (ctypes.c_void_p() for _ in range(3))
        with torch.cuda.device(device):
            _call("cuGraphCreate", ctypes.byref(whole), ctypes.c_uint(0))
            try:
                for number, graph in enumerate(graphs):
                    node, child = ctypes.c_void_p(), ctypes.c_void_p(graph.raw_cuda_graph())
                    behind = ctypes.byref(before), ctypes.c_size_t(min(number, 1))
                    _call("cuGraphAddChildGraphNode", ctypes.byref(node), whole, *behind, child)
                    before = node
                made = ctypes.byref(self._executable)
                _call("cuGraphInstantiateWithFlags", made, whole, ctypes.c_ulonglong(0))
            finally:
                _call("cuGraphDestroy", whole)
        # At the end of the process the driver may be gone before.
        weakref.finalize(self, _call, "cuGraphExecDestroy", self._executable).atexit = False

    def replay(self) -> None:
        """Queue them on the current stream of the device."""
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
            _call("cuGraphLaunch", self._executable, stream)


def can_join() -> bool:
    """Whether the driver is NVIDIA's."""
    return torch.version.cuda is not None


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_driver(), name)(*arguments)
    if error:
        raise RuntimeError(f"expected {name} to work, found that it fails with CUDA error {error}")
