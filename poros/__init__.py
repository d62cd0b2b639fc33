"""Poros: exact fine-tuning of adapters on models that do not fit on the GPU.

The frozen base lives in host memory and passes through a few preallocated device slots, block by
block, in forward and again, in reverse, in backward. Adapters and optimizer state stay on the
device. The trained adapter is bit for bit the one that a fully resident run gives.

Importing this package touches no device, no environment variable and no other library: the names
below load on first use.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout, loaders/ and gates/ sit beside poros/; the wheel holds them inside it.
_checkout = Path(__file__).resolve().parents[1]
if (_checkout / "pyproject.toml").is_file() and not (Path(__file__).parent / "loaders").exists():
    __path__.append(str(_checkout))

_HOME = {
    "__version__": "poros.utils.versions",
    "StreamingPolicy": "poros.config",
    "BlockMajorMixin": "poros.accumulation.trainer",
    "PorosTrainer": "poros.accumulation.trainer",
    "accumulate": "poros.accumulation.loop",
    "load": "poros.loaders.load",
    "log_streaming": "poros.reporting.telemetry",
    "plan": "poros.planning.planner",
    "prepare": "poros.api",
    "restore": "poros.api",
    "runtime": "poros.api",
    "kernel_stats": "poros.api",
    "patch_hf_model": "poros.api",
    "use_adapter_kernels": "poros.api",
    "Runtime": "poros.model.runtime",
    "MemoryPlan": "poros.planning.formula",
    "PorosError": "poros.errors",
    "UnsupportedModelError": "poros.errors",
    "UnvalidatedArchitectureError": "poros.errors",
    "ParityError": "poros.errors",
    "PolicyError": "poros.errors",
    "RematerializationError": "poros.errors",
    "CheckpointFormatError": "poros.errors",
    "HostMemoryError": "poros.errors",
    "SlotStateError": "poros.errors",
    "PreparedModelError": "poros.errors",
    "StoreWriteError": "poros.errors",
    "VRAMBudgetError": "poros.errors",
    "RecipeError": "poros.errors",
    "DataFormatError": "poros.errors",
    "RunFolderError": "poros.errors",
    "MissingPackageError": "poros.errors",
    "OptimizerError": "poros.errors",
}

__all__ = [*_HOME]

if TYPE_CHECKING:
    from poros.accumulation.loop import accumulate as accumulate
    from poros.accumulation.trainer import BlockMajorMixin as BlockMajorMixin
    from poros.accumulation.trainer import PorosTrainer as PorosTrainer
    from poros.api import kernel_stats as kernel_stats
    from poros.api import patch_hf_model as patch_hf_model
    from poros.api import prepare as prepare
    from poros.api import restore as restore
    from poros.api import runtime as runtime
    from poros.api import use_adapter_kernels as use_adapter_kernels
    from poros.config import StreamingPolicy as StreamingPolicy
    from poros.errors import CheckpointFormatError as CheckpointFormatError
    from poros.errors import DataFormatError as DataFormatError
    from poros.errors import HostMemoryError as HostMemoryError
    from poros.errors import MissingPackageError as MissingPackageError
    from poros.errors import OptimizerError as OptimizerError
    from poros.errors import ParityError as ParityError
    from poros.errors import PolicyError as PolicyError
    from poros.errors import PorosError as PorosError
    from poros.errors import PreparedModelError as PreparedModelError
    from poros.errors import RecipeError as RecipeError
    from poros.errors import RematerializationError as RematerializationError
    from poros.errors import RunFolderError as RunFolderError
    from poros.errors import SlotStateError as SlotStateError
    from poros.errors import StoreWriteError as StoreWriteError
    from poros.errors import UnsupportedModelError as UnsupportedModelError
    from poros.errors import UnvalidatedArchitectureError as UnvalidatedArchitectureError
    from poros.errors import VRAMBudgetError as VRAMBudgetError
    from poros.loaders.load import load as load
    from poros.model.runtime import Runtime as Runtime
    from poros.planning.formula import MemoryPlan as MemoryPlan
    from poros.planning.planner import plan as plan
    from poros.reporting.telemetry import log_streaming as log_streaming
    from poros.utils.versions import __version__ as __version__


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module("poros.optim")
    if name not in _HOME:
        raise AttributeError(f"module 'poros' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
