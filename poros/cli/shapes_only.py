"""Makes imports lighter for a process that runs operators on shapes alone.

Most of the time of importing transformers goes into PyTorch's compilers, their symbolic sizes and
its distributed tensors. A plan uses none of them, so ``poros plan``, in whose process nothing has
imported PyTorch yet, skips them. If a model's own code needs symbolic sizes after all, they are
imported then; if it needs something else, the command runs once more with all imports.
"""

import atexit
import gc
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_WHOLE = "import torch; from poros.cli.app import main; main()"


def leave_out() -> bool:
    """Skip these imports unless PyTorch is already loaded; return whether they are skipped."""
    if "torch" in sys.modules:
        return False
    # The process ends before there is garbage. Looking for it takes an eighth of the time, and as
    # long again at the end.
    gc.disable()
    atexit.register(gc.freeze)
    import torch

    sys.modules["triton"] = None  # type: ignore[assignment]
    compiler, hook = (ModuleType(f"torch._dynamo{name}") for name in ("", f".{_HOOK}"))
    compiler.__path__ = []
    proxies: dict[str, Any] = dict.fromkeys(_DECORATORS, _as_it_is)
    vars(compiler).update(proxies)
    vars(hook)["TransformGetItemToIndex"] = object
    sys.modules |= {each.__name__: each for each in (compiler, hook)}
    for name, numbers in _OF_SYMBOLS.items():
        sys.modules[name] = symbols = ModuleType(name)
        vars(symbols).update(numbers, __getattr__=partial(_own, name))
    vars(torch).update({"_dynamo": compiler, "compile": _as_it_is})
    torch.distributed.is_available = lambda: False
    import transformers

    utils = transformers.utils
    for module in (utils, utils.import_utils):
        vars(module)["is_torch_flex_attn_available"] = lambda: False
    # transformers reads the names out of all its files twice; this keeps those of the first time.
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


def _own(module: str, name: str) -> Any:
    """Return any other attribute from the module itself."""
    if name.startswith("__"):
        raise AttributeError(name)
    for each in _OF_SYMBOLS:
        if getattr(sys.modules.get(each), "__spec__", True) is None:
            del sys.modules[each]
    return getattr(import_module(module), name)


def _as_it_is(what: Any = None, *_: Any, **__: Any) -> Any:
    return what if what is not None else _as_it_is


_GUARDS = (
    *("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"),
    *("guarding_hint_or_throw", "statically_known_true"),
)
# Sizes may be symbols; in a plan they are numbers.
_OF_SYMBOLS: dict[str, dict[str, Any]] = {
    "sympy": {"Basic": type("Basic", (), {})},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(_GUARDS, _as_it_is),
        "sym_and": lambda *all_of: all(all_of),
        "sym_or": lambda *any_of: any(any_of),
        "sym_eq": lambda one, other: one == other if isinstance(one, int) else [*one] == [*other],
        "is_nested_int": lambda _: False,
        "has_guarding_hint": lambda _: True,
        "free_unbacked_symbols": lambda _: (),
    },
}


def run_whole() -> int:
    """Run this process's command in a child with all imports, and return its exit code."""
    # -P: what lies in the current folder under the name of a package is not to be imported.
    return subprocess.run([sys.executable, "-P", "-c", _WHOLE, *sys.argv[1:]]).returncode
