"""Imports for a process that runs operators on shapes alone, without compiling or distributing.

PyTorch's compiler and its distributed tensors are most of what importing transformers takes, and a
plan uses neither. So they are left out of a process in which nothing has imported PyTorch yet: that
of ``poros plan``. Where a model's own code wants them after all, the command runs once more with
everything.
"""

import atexit
import gc
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_WHOLE = "import torch; from poros.cli.app import main; main()"


def leave_out() -> bool:
    """Leave them out of this process, unless PyTorch is in it already; whether that was done."""
    if "torch" in sys.modules:
        return False
    # The process is over before there is garbage; looking for it takes an eighth, and at the end
    # as long again.
    gc.disable()
    atexit.register(gc.freeze)
    import torch

    sys.modules["triton"] = None  # type: ignore[assignment]
    compiler, hook = (ModuleType(f"torch._dynamo{name}") for name in ("", f".{_HOOK}"))
    compiler.__path__ = []
    stand_ins: dict[str, Any] = dict.fromkeys(_DECORATORS, _as_it_is)
    vars(compiler).update(stand_ins)
    vars(hook)["TransformGetItemToIndex"] = object
    sys.modules |= {"torch._dynamo": compiler, hook.__name__: hook}
    vars(torch).update({"_dynamo": compiler, "compile": _as_it_is})
    torch.distributed.is_available = lambda: False
    import transformers

    utils = transformers.utils
    for module in (utils, utils.import_utils):
        vars(module)["is_torch_flex_attn_available"] = lambda: False
    # transformers reads the names out of all its files, twice: it has them from the first time.
    names = utils.import_utils.define_import_structure
    folder = Path(transformers.__file__).parent / "models"

    def known(path: str, prefix: str | None = None) -> Any:
        if Path(path) != folder / "__init__.py":
            return names(path, prefix)
        return {
            needed: {
                name.removeprefix("models."): value
                for name, value in found.items()
                if name.startswith("models.")
            }
            for needed, found in names(folder, prefix="models").items()
        }

    vars(utils.import_utils)["define_import_structure"] = known
    return True


_HOOK = "_trace_wrapped_higher_order_op"
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable", "mark_static_address")


def _as_it_is(what: Any = None, *_: Any, **__: Any) -> Any:
    return what if what is not None else _as_it_is


def run_whole() -> int:
    """Run this process's command in another one that leaves nothing out; its exit code."""
    # -P: what lies in the current folder under the name of a package is not to be imported.
    return subprocess.run([sys.executable, "-P", "-c", _WHOLE, *sys.argv[1:]]).returncode
