"""Whose code modules run; forwards of ours that they run where both come to the same.

Each of these stands in the ``__dict__`` of its module, under the name ``forward``: the module keeps
its class, its parameters and its hooks, and gets its own forward back by losing the entry. They are
given, exchanged for others for a while, and taken away here.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from poros.errors import PreparedModelError

LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "liger_kernel", "peft", "poros", "torch", "transformers", "trl"}
)
"""Code of theirs in layers computes from its arguments, tensors and attributes, and from nothing
else; what they run around layers leaves adapters alone."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_ALL = [f"_global{kind}" for kind in HOOKS]
_OF_ALL = vars(nn.modules.module)


class PatchedForward:
    """What one module does instead of its own forward; called as that is called.

    Args:
        module: Whose it is; held weakly, or the module would live until Python looks for cycles.
        *others: Of the subclass; a copy of the module gets them too.

    Attributes:
        before: The forward that a library had set on the module, which runs in the place of its own
            and is put back at the end; None if there was none.
    """

    before: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module, *others: Any) -> None:
        self._module: Callable[[], Any] = weakref.ref(module)
        self._known: Callable[..., Any] = type(module).forward
        self._others = others

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise PreparedModelError(
                "expected a module that runs by itself, found a shallow copy of one that was "
                "deleted; copy models by copy.deepcopy"
            )
        if type(module).forward is not self._known or torch.compiler.is_compiling():
            # Somebody has given the class another one since; and graphs have its operators.
            return (self.before or partial(type(module).forward, module))(*args, **kwargs)
        return self.run(module, *args, **kwargs)

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Do it."""
        raise NotImplementedError

    def own(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What the module does without this one."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return self._known(module, *args, **kwargs)

    @property
    def is_exact(self) -> bool:
        """Whether it gives the bits of the module's own forward."""
        return True

    def afresh(self, module: nn.Module) -> "PatchedForward":
        """One that remembers nothing."""
        return type(self)(module, *self._others)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module gets one that is its own.
        return type(self), (self._module(), *self._others)


def replace(
    modules: Iterable[nn.Module], forward_of: Callable[[nn.Module], PatchedForward | None]
) -> None:
    """Give modules forwards of ours: those that ``forward_of`` gives one.

    One whose forward somebody has set is left alone.
    """
    for module in modules:
        forward = None if "forward" in module.__dict__ else forward_of(module)
        if forward is not None:
            module.__dict__["forward"] = forward


def use_others(modules: Iterable[nn.Module], are_own: bool) -> Callable[[], None]:
    """Have modules run what ours are to be compared with; call what is returned to undo it.

    Args:
        are_own: Whether that is the modules' own forwards, where ours give the same bits. Ours that
            do not are compared with new ones of their kind.
    """
    taken = []
    for module in modules:
        forward = module.__dict__.get("forward")
        if isinstance(forward, PatchedForward):
            taken.append((module.__dict__, forward))
            if not forward.is_exact:
                module.__dict__["forward"] = forward.afresh(module)
            elif are_own:
                del module.__dict__["forward"]

    def undo() -> None:
        for owner, forward in taken:
            owner["forward"] = forward

    return undo


def unpatch(modules: Iterable[nn.Module]) -> None:
    """Have modules run their own forwards."""
    for module in modules:
        forward = module.__dict__.get("forward")
        if isinstance(forward, PatchedForward) and forward.before is not None:
            module.__dict__["forward"] = forward.before
        elif isinstance(forward, PatchedForward):
            del module.__dict__["forward"]


def has_own_forward(kind: Any) -> bool:
    """Whether instances of a class run what was written for it, neither replaced nor wrapped."""
    return _is_own(kind, kind.forward)


@cache
def _is_own(kind: Any, forward: Any) -> bool:
    # What wraps another function may have taken its names, but not the name in its code.
    return (
        inspect.isfunction(forward)
        and not hasattr(forward, "__wrapped__")
        and forward.__module__ == kind.__module__
        and forward.__code__.co_qualname == f"{kind.__qualname__}.forward"
    )


def has_hooks(*modules: nn.Module, but_ours: bool = False) -> bool:
    """Whether any module has hooks (its own or global ones), or a forward set on the instance.

    Args:
        but_ours: Whether our own forwards do not count.
    """
    for module in modules:
        own = module.__dict__
        forward = own.get("forward")
        if forward is not None and not (but_ours and isinstance(forward, PatchedForward)):
            return True
        for kind in HOOKS:
            if own[kind]:
                return True
    return any(map(_OF_ALL.__getitem__, _HOOKS_OF_ALL))


def is_of_liger(value: object) -> bool:
    """Whether a function or class is of Liger, whose forwards do what those they replace do."""
    return str(getattr(value, "__module__", "")).startswith("liger_kernel.")


def is_forward_of_liger(value: object) -> bool:
    """Whether a forward that is set on a module is Liger's own, and nobody has wrapped it."""
    is_method = type(value) is MethodType
    return is_method and is_of_liger(value) and not hasattr(value, "__wrapped__")


def is_of_library(code: Any) -> bool:
    """Whether a library that is known has written a class or function, and all put around it."""
    code = getattr(code, "func", code)  # of functools.partial
    while code is not None:
        where = getattr(code, "__globals__", {}).get("__name__", getattr(code, "__module__", ""))
        if not is_in_library(str(where)):
            return False
        code = getattr(code, "__wrapped__", None)
    return True


def is_in_library(module: str) -> bool:
    """Whether a Python module of this name belongs to a library that is known."""
    return module.partition(".")[0] in LIBRARIES


def foreign_code(modules: Iterable[nn.Module]) -> str | None:
    """The name of code that ``modules`` run and no known library has written; None without any."""
    code: dict[Any, str] = {}
    for owner in modules:
        kind: Any = type(owner)
        name = f"{kind.__qualname__}.forward"
        own, config = (vars(owner).get(key) for key in ("forward", "config"))
        code[kind] = kind.__qualname__
        code |= {vars(each)["forward"]: name for each in kind.__mro__ if "forward" in vars(each)}
        if own is not None:
            own = getattr(own, "__func__", own)
            code[own if isinstance(own, FunctionType) else type(own)] = name
        attention = getattr(config, "_attn_implementation", None)
        if isinstance(attention, str) and attention in ALL_ATTENTION_FUNCTIONS:
            code[ALL_ATTENTION_FUNCTIONS[attention]] = f"attention {attention!r}"
    return next((name for each, name in code.items() if not is_of_library(each)), None)
