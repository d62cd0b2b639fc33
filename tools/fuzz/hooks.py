"""Hooks of every kind, on any module, that read, change, add, keep or raise."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as globally

from poros.self_check.compare import bits
from tools.fuzz.program import Hook

if TYPE_CHECKING:
    from tools.fuzz.arm import Arm


class Thrown(Exception):
    """What a drawn program raises and catches."""


class Hooked:
    """One hook of a program, registered.

    Args:
        hook: What to register.
        arm: Whose model.
        target: The module or parameter; for the hooks of all modules, one of the kind meant.
        name: Of the target.
    """

    def __init__(self, hook: Hook, arm: "Arm", target: Any, name: str) -> None:
        self._hook = hook
        self._name = name
        self._arm = arm
        self._target = target
        self._handle: Any = None
        self._register()

    def renew(self) -> None:
        """Take it off and register it again, if the program does so at each step."""
        if self._hook.each_step and self._handle is not None:
            self.remove()
            self._register()

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _register(self) -> None:
        kind = self._hook.kind
        target = self._target
        order = {"prepend": True} if self._hook.first else {}
        if kind == "parameter":
            self._handle = target.register_hook(self._on_gradient)
        elif kind == "post_accumulate":
            self._handle = target.register_post_accumulate_grad_hook(self._on_accumulated)
        elif kind == "tensor":
            self._handle = target.register_forward_hook(self._on_output, **order)
        elif kind.startswith("global_"):
            kind = kind.removeprefix("global_")
            hook = self._guarded(self._by_kind(kind))
            registers: dict[str, Callable[..., Any]] = {
                "forward": globally.register_module_forward_hook,
                "forward_pre": globally.register_module_forward_pre_hook,
                "backward": globally.register_module_full_backward_hook,
                "backward_pre": globally.register_module_full_backward_pre_hook,
            }
            self._handle = registers[kind](hook)
        else:
            registers = {
                "forward": target.register_forward_hook,
                "forward_pre": target.register_forward_pre_hook,
                "backward": target.register_full_backward_hook,
                "backward_pre": target.register_full_backward_pre_hook,
            }
            self._handle = registers[kind](self._by_kind(kind), **order)

    def _by_kind(self, kind: str) -> Callable[..., Any]:
        hooks: dict[str, Callable[..., Any]] = {
            "forward": self._on_forward,
            "forward_pre": self._on_forward_pre,
            "backward": self._on_backward,
            "backward_pre": self._on_backward_pre,
        }
        return hooks[kind]

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of all modules acts on those of the kind of its target only."""

        def guarded(module: nn.Module, *values: Any) -> Any:
            if not isinstance(module, type(self._target)):
                return None
            self._name = self._arm.name_of(module)
            return hook(module, *values)

        return guarded

    # What torch calls.

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._on_first(output)

    def _on_forward_pre(self, module: nn.Module, args: Any) -> Any:
        return self._on_first(args) if args else None

    def _on_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return self._on_first(grad_input)

    def _on_backward_pre(self, module: nn.Module, grad_output: Any) -> Any:
        return self._on_first(grad_output)

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = _first(output)
        if self._acts() and tensor is not None and tensor.requires_grad:
            tensor.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self._changed(gradient) if self._acts() else None

    def _on_accumulated(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if not self._acts() or gradient is None:
            return
        changed = self._changed(gradient)
        if changed is not None:
            parameter.grad = changed.detach()

    # What it does.

    def _acts(self) -> bool:
        now, since = self._arm.step_index, self._hook.since
        return now == since if self._hook.does == "raise" else now >= since

    def _on_first(self, values: Any) -> Any:
        """Act on the first tensor among ``values``; what takes their place, or None."""
        tensor = _first(values)
        if tensor is None or not self._acts():
            return None
        changed = self._changed(tensor)
        if changed is None or isinstance(values, torch.Tensor):
            return changed
        if not isinstance(values, tuple | list):
            return None
        index = next(i for i, value in enumerate(values) if value is tensor)
        return type(values)((*values[:index], changed, *values[index + 1 :]))

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        does, tag = self._hook.does, self._hook.tag
        if not tensor.is_floating_point():
            return None
        if does == "read":
            # A set: inside a layer a hook may run again, and must see the same then.
            self._arm.seen.setdefault(f"read by hook {tag} at {self._name}", set()).add(
                int(bits(tensor.detach().float().sum()))
            )
        elif does == "sum":
            # The sum depends on the order of calls, so this belongs on parameters only.
            before = self._arm.sums.get(tag, torch.zeros(()))
            self._arm.sums[tag] = before + tensor.detach().float().norm()
        elif does == "scale":
            return tensor * 0.75
        elif does == "add_noise":
            return tensor + 0.01 * torch.randn_like(tensor)
        elif does == "add_tensor":
            return tensor + self._added(tensor)
        elif does == "capture":
            self._arm.captured[tag] = tensor
        elif does == "detach":
            return tensor.detach()
        elif does == "inplace":
            tensor.mul_(0.75)
        elif does == "raise":
            raise Thrown("a hook that fails")
        return None

    def _added(self, like: torch.Tensor) -> nn.Parameter:
        """A trainable vector of this hook, made at its first call."""
        tag = self._hook.tag
        if tag not in self._arm.added:
            drawn = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(tag))
            self._arm.added[tag] = nn.Parameter((0.1 * drawn).to(like.dtype))
        return self._arm.added[tag]


def register(hook: Hook, arm: "Arm") -> bool:
    """Register ``hook``, in place of an earlier one of its tag; False if its place is not there."""
    targets = _targets(hook, arm)
    if not targets:
        return False
    unregister(hook.tag, arm)
    arm.hooks[hook.tag] = [Hooked(hook, arm, target, name) for name, target in targets]
    return True


def unregister(tag: int, arm: "Arm") -> None:
    """Remove the hook of that tag, if there is one."""
    for hooked in arm.hooks.pop(tag, ()):
        hooked.remove()


def module_at(arm: "Arm", layer: int, part: str) -> nn.Module | None:
    """The module that a program names; None if this model has none."""
    if layer >= len(arm.layers):
        return None
    top = arm.model.get_base_model() if layer < 0 else arm.layers[layer]
    for name, module in top.named_modules():
        if name == part or (layer < 0 and part and name.endswith(f".{part}")):
            return module
    return None


def _targets(hook: Hook, arm: "Arm") -> Sequence[tuple[str, Any]]:
    if hook.kind not in ("parameter", "post_accumulate"):
        module = module_at(arm, hook.layer, hook.part)
        return [] if module is None else [(arm.name_of(module), module)]
    # Of a layer, or of all.
    inside = None
    if hook.layer >= 0:
        if hook.layer >= len(arm.layers):
            return []
        inside = {id(parameter) for parameter in arm.layers[hook.layer].parameters()}
    return [
        (name, parameter)
        for name, parameter in arm.model.named_parameters()
        if parameter.requires_grad
        and hook.part in name
        and (inside is None or id(parameter) in inside)
    ]


def _first(values: Any) -> torch.Tensor | None:
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, tuple | list):
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value
    return None
