"""The arms: where the frozen base sits, and which loop trains.

An arm places the model (a context manager that puts it back on the CPU as it was) and runs a loop.
All loops take the same steps with the same optimizer; what an arm has to be is checked after every
step, outside the timed part.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import poros
from benchmarks.loops import Loop, NotPossibleError, plain_loop, trainer_loop
from poros.head.takeover import slice_loss
from poros.model.inspect import find_layers

Place = Callable[[Any, torch.device], AbstractContextManager["Placed"]]


class NotOffloadedError(RuntimeError):
    """Weights that should be in host memory are on the device."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Placed:
    """A model where an arm wants it."""

    runtime: Any = None
    """Poros' runtime, if it streams."""
    check: Callable[[], None] = _nothing
    """Raises if the model is not what the arm says. Called between steps."""


@dataclass(frozen=True)
class Arm:
    name: str
    place: Place
    loop: Loop = plain_loop
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Of Poros."""


def resident_arm() -> Arm:
    return Arm("resident", resident)


def fused_resident_arm() -> Arm:
    """Everything on the device, with our adapter kernels."""
    return Arm("resident, our adapter kernels", fused_resident)


def sliced_resident_arm() -> Arm:
    """Everything on the device, with the loss of ``loss="chunked"``."""
    return Arm("resident, loss in slices", sliced_resident, policy={"loss": "chunked"})


def checkpointing_arm() -> Arm:
    return Arm("resident, checkpointing", checkpointing)


def trainer_arm() -> Arm:
    return Arm("PEFT + HF Trainer", resident, trainer_loop)


def accelerate_arm() -> Arm:
    return Arm("Accelerate offload, checkpointing", offloaded)


AS_OTHERS = {"loss": "reference", "stream_head": False, "stream_embedding": False}


def poros_arm(name: str, **changes: Any) -> Arm:
    """Poros with these policy fields; ``name`` says what of them matters in the table.

    Head, loss and embedding are those of the other arms, if nobody says otherwise.
    """
    policy = {**AS_OTHERS, **changes}

    def place(model: Any, device: torch.device) -> AbstractContextManager[Placed]:
        return streamed(model, device, **policy)

    return Arm(f"poros, {name}", place, policy=policy)


@contextmanager
def resident(model: Any, device: torch.device) -> Iterator[Placed]:
    """Everything on the device."""

    def check() -> None:
        away = [
            name
            for name, parameter in model.named_parameters()
            if parameter.device.type != device.type
        ]
        if away:
            raise RuntimeError(f"expected every parameter on {device}, found {away[0]} elsewhere")

    model.to(device)
    try:
        yield Placed(check=check)
    finally:
        model.to("cpu")


@contextmanager
def fused_resident(model: Any, device: torch.device) -> Iterator[Placed]:
    """Everything on the device; adapters, and what is around them, by kernels of ours."""
    with resident(model, device) as placed:
        poros.use_adapter_kernels(model)
        try:
            yield placed
        finally:
            poros.restore(model)


@contextmanager
def sliced_resident(model: Any, device: torch.device) -> Iterator[Placed]:
    """Everything on the device; the loss computed in slices of the vocabulary."""
    base = model.get_base_model()
    with resident(model, device) as placed:
        undo = slice_loss(base, base.get_output_embeddings())
        try:
            yield placed
        finally:
            undo()


@contextmanager
def checkpointing(model: Any, device: torch.device) -> Iterator[Placed]:
    """Everything on the device, each layer recomputed in backward."""
    with resident(model, device) as placed, _recomputed(model):
        yield placed


@contextmanager
def streamed(model: Any, device: torch.device, **policy: Any) -> Iterator[Placed]:
    """The base in host memory, streamed by Poros."""
    known = [policy_field.name for policy_field in dataclasses.fields(poros.StreamingPolicy)]
    unknown = [name for name in policy if name not in known]
    if unknown:
        raise NotPossibleError(f"StreamingPolicy of this version has no {', '.join(unknown)}")
    poros.prepare(model, device=str(device), self_check="off", **policy)
    try:
        yield Placed(poros.runtime(model))
    finally:
        poros.restore(model)


@contextmanager
def offloaded(model: Any, device: torch.device) -> Iterator[Placed]:
    """The frozen base of the layers on the CPU by ``accelerate.cpu_offload``, layers recomputed.

    The hooks go to the modules that hold frozen weights and nothing else: on one that holds an
    adapter they would replace the parameter that the optimizer updates. Without recomputation the
    graph would keep each weight on the device from forward to backward, and nothing be saved.

    Raises:
        NotPossibleError: If such a module does not survive a forward and backward under the hook.
    """
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    _, layers = find_layers(model)
    holders = [
        module for layer in layers for module in layer.modules() if _is_frozen_holder(module)
    ]
    kinds = {type(holder): holder for holder in holders if isinstance(holder, nn.Linear)}
    for linear in kinds.values():
        _require_possible(linear, device)
    adapters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    hooked: list[nn.Module] = []
    try:
        for holder in holders:
            cpu_offload(holder, execution_device=device)
            hooked.append(holder)
        offloaded_ones = set(hooked)
        for module in model.modules():
            if module not in offloaded_ones:
                _move_own(module, device)
        with _recomputed(model), set_checkpoint_early_stop(False):
            # Stopping early can skip the hook that takes a layer's last weight off again.
            yield Placed(check=lambda: check_offloaded(model, device, adapters))
    finally:
        for holder in hooked:
            remove_hook_from_module(holder)
        model.to("cpu")


def check_offloaded(model: Any, device: torch.device, adapters: Mapping[str, nn.Parameter]) -> None:
    """Every frozen weight of the layers is absent here, and its bytes are in host memory.

    Raises:
        NotOffloadedError: Otherwise, or if an adapter is no longer the parameter that is trained.
    """
    _, layers = find_layers(model)
    num_bytes = 0
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if not _is_frozen_holder(module):
                continue
            hook = getattr(module, "_hf_hook", None)
            held = getattr(hook, "hooks", (hook,))[-1]
            for key, parameter in module.named_parameters(recurse=False):
                weights = getattr(held, "weights_map", None)
                weight = None if weights is None else weights[key]
                if parameter.device.type != "meta" or weight is None or weight.device.type != "cpu":
                    raise NotOffloadedError(
                        f"layer {index} {name}.{key}: expected no bytes in the model and a copy on "
                        f"the CPU between steps, found it on {parameter.device}"
                    )
                num_bytes += weight.numel() * weight.element_size()
    if not num_bytes:
        raise NotOffloadedError("expected frozen weights in the layers, found none")
    for name, parameter in model.named_parameters():
        if name in adapters and (
            parameter is not adapters[name] or parameter.device.type != device.type
        ):
            raise NotOffloadedError(f"{name}: the adapter is not the parameter that is trained")


@contextmanager
def _recomputed(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


def _is_frozen_holder(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def _move_own(module: nn.Module, device: torch.device) -> None:
    """Move what hangs on this very module, as ``Module.to`` would."""
    for parameter in module.parameters(recurse=False):
        if parameter.device.type != "meta":
            parameter.data = parameter.data.to(device)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)


def _require_possible(holder: Any, device: torch.device) -> None:
    """Try the hook on a copy: where it cannot work it may leave the module in pieces."""
    from accelerate import cpu_offload

    probe = copy.deepcopy(holder)
    floats = [parameter.dtype for parameter in probe.parameters() if parameter.is_floating_point()]
    dtype = floats[0] if floats else torch.bfloat16
    row = torch.ones(1, holder.in_features, dtype=dtype, device=device, requires_grad=True)
    try:
        cpu_offload(probe, execution_device=device)
        probe(row).sum().backward()
    except Exception as error:
        raise NotPossibleError(
            f"accelerate.cpu_offload of a bitsandbytes or torch {type(holder).__name__} fails: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}{_lost_constants(probe)}"
        ) from error
    if row.grad is None:
        raise NotPossibleError("accelerate.cpu_offload gives no gradient of the input")


def _lost_constants(probe: Any) -> str:
    """What became of a 4-bit weight's scales, whose only copy moves along with the weight."""
    state = getattr(getattr(probe, "weight", None), "quant_state", None)
    if state is None or state.absmax.device.type != "meta":
        return ""
    return " (taking the weight off the device moved its only quant_state.absmax to meta as well)"
