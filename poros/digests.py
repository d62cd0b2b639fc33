"""SHA-256 of frozen tensors, taken of where they come from, while they are moved.

What is hashed is the source and never its new place, so that bytes which the move itself damages do
not pass for what the model was. Hashing releases the interpreter lock; it runs beside the copies.
"""

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Digests:
    """Digests by name. The sources are let go as they are done.

    Attributes:
        max_pending: Tensors that wait, and so stay in memory, at most.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(thread_name_prefix="poros-digest")
        self._pending: deque[Future[bytes]] = deque()
        self._found: dict[str, Future[bytes]] = {}
        self.max_pending = 2 * self._pool._max_workers

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash ``tensor`` as it is now; it must not be written until ``results``.

        From a device it is copied for that, apart from the copy that moves it.
        """
        host = tensor.detach().cpu().contiguous()
        while len(self._pending) >= self.max_pending:
            self._pending.popleft().result()
        self._found[name] = future = self._pool.submit(digest, host)
        self._pending.append(future)

    def results(self) -> dict[str, bytes]:
        """All of them. Ends the threads."""
        try:
            return {name: future.result() for name, future in self._found.items()}
        finally:
            self.close()

    def close(self) -> None:
        """End the threads; what has not begun is not hashed any more."""
        self._pool.shutdown(cancel_futures=True)


def digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the bytes of a contiguous host tensor."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()
