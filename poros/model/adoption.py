"""Host memory for the blocks of a model: what a loader left on it, or new memory.

See "Adoption" in ``poros.host.store``.
"""

import logging

from poros.host.store import HostStore, left_store
from poros.layout import BlockLayout
from poros.model.inspect import Inventory

logger = logging.getLogger(__name__)


def host_store(inventory: Inventory, block_size: int) -> tuple[HostStore, bool]:
    """The store of the blocks, and whether it is what a loader left.

    Raises:
        CheckpointFormatError: If layers stay in a file that is not what was loaded.
        HostMemoryError: If there is no memory for a new one.
    """
    layers = [
        [
            [
                (part.name, part.get())
                for tensor in block
                if tensor.places[0][0] == index
                for part in tensor.parts()
            ]
            for index in range(first, min(first + block_size, len(inventory.layers)))
        ]
        for first, block in zip(
            range(0, len(inventory.layers), block_size), inventory.blocks, strict=True
        )
    ]
    left = left_store(inventory.base)
    if left is not None:
        left.require_intact()
    adopted = left.adopt(layers) if left is not None else None
    if adopted is not None:
        return adopted, True
    if left is not None and left.slabs:
        logger.warning(
            "poros: the base does not lie where poros.load put it (weights were replaced or cast "
            "since): it is copied, and up to %.2f GB of host memory are held twice",
            left.num_bytes / 1e9,
        )
    layouts = [BlockLayout.join([BlockLayout.pack(layer) for layer in block]) for block in layers]
    host = HostStore.allocate(layouts)
    if left is not None:
        host.fallbacks += left.fallbacks
    return host, False
