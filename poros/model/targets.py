"""Which modules of a model are not for adapters on its linear layers: towers and routers."""

import re
from typing import Any

from torch import nn

from poros.model.vision import base_of, find_towers


def is_router(module: nn.Module) -> bool:
    """Whether it is a linear layer that returns scores beside its product, as routers do.

    PEFT takes it for any linear layer, and fails when the adapted module is called.
    """
    return isinstance(module, nn.Linear) and "Router" in type(module).__name__


def excluded_modules(model: Any) -> str | None:
    """PEFT's ``exclude_modules`` for adapters on the language model; None if nothing is left out.

    Left out are vision towers, which text alone does not reach, and routers.
    """
    base = base_of(model)
    names = list(find_towers(base))
    names += [name for name, module in base.named_modules() if is_router(module)]
    found = "|".join(map(re.escape, names))
    return rf"({found})(\..*)?" if found else None
