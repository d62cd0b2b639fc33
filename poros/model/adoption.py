"""Gets host memory for the blocks of a model: the loader's, or new memory.

See "Adoption" in ``poros.host.store``.
"""

import logging

from poros.host.attached import attached_store
from poros.host.layout import BlockLayout
from poros.host.store import HostStore
from poros.model.inspect import Inventory
from poros.utils.formatting import size

logger = logging.getLogger(__name__)


def host_store(inventory: Inventory, block_size: int) -> tuple[HostStore, bool]:
    """Return the store of the blocks, and whether it is the loader's.

    Raises:
        CheckpointFormatError: If layers stay in a file that is not what was loaded.
        HostMemoryError: If there is no memory for a new one.
    """
    layers = [
        [(part.name, part.get()) for tensor in streamed for part in tensor.parts()]
        for _, streamed in inventory.by_layer()
    ]
    blocks = [layers[first : first + block_size] for first in range(0, len(layers), block_size)]
    left = attached_store(inventory.base)
    if left is not None:
        left.require_intact()
    adopted = left.adopt(blocks) if left is not None else None
    if adopted is not None:
        return adopted, True
    if left is not None and left.slabs:
        logger.warning(
            "poros: the base is no longer where poros.load put it, because weights were replaced "
            "or cast since. It is copied, so up to %s of host memory are held twice",
            size(left.num_bytes),
        )
    layouts = [BlockLayout.join([BlockLayout.pack(layer) for layer in block]) for block in blocks]
    host = HostStore.allocate(layouts)
    if left is not None:
        host.fallbacks += left.fallbacks
    return host, False
