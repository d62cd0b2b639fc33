"""What each action of a program does to an arm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import singledispatch
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tools.fuzz import hooks
from tools.fuzz.alive import num_alive
from tools.fuzz.models import adapter_config, draw_adapters
from tools.fuzz.program import (
    Action,
    Adapter,
    EditAdapter,
    EditBase,
    EditGradients,
    Enable,
    Evaluate,
    Forward,
    Hook,
    Probe,
    Random,
    SetAttention,
    SetDropout,
    SetMode,
    Setting,
    Tie,
    Train,
    Unhook,
    UseTwice,
)

if TYPE_CHECKING:
    from tools.fuzz.arm import Arm

_NUM_REPEATS = 4


@singledispatch
def do(action: Action, arm: "Arm") -> bool:
    """Do ``action``; False if this model has not got what it is about."""
    raise TypeError(f"expected an action of tools.fuzz.program, found {action!r}")


@do.register(Hook)
def _(action: Hook, arm: "Arm") -> bool:
    return hooks.register(action, arm)


@do.register(Unhook)
def _(action: Unhook, arm: "Arm") -> bool:
    is_there = action.tag in arm.hooks
    hooks.unregister(action.tag, arm)
    return is_there


@do.register(Train)
def _(action: Train, arm: "Arm") -> bool:
    chosen = _adapter_parameters(arm, action.which, action.layer)
    for parameter in chosen:
        parameter.requires_grad_(action.on)
    return bool(chosen)


@do.register(Adapter)
def _(action: Adapter, arm: "Arm") -> bool:
    model, name = arm.model, action.name
    known = name in model.peft_config
    if action.verb in ("add", "load") and not known:
        if action.verb == "add":
            # The targets are those of the first, whose base layers are wrapped by now.
            config = adapter_config(model, arm.program.subject, seed=2)
            config.target_modules = set(model.peft_config["default"].target_modules)
            model.add_adapter(name, config)
        else:
            with TemporaryDirectory(prefix="poros-fuzz-") as folder:
                model.save_pretrained(folder, selected_adapters=["default"])
                model.load_adapter(folder, adapter_name=name, is_trainable=True)
        model.set_adapter(name)
        draw_adapters(model, f".{name}", seed=3)
    elif action.verb == "set" and known:
        model.set_adapter(name)
    elif action.verb == "both" and known:
        model.base_model.set_adapter(["default", name])
    elif action.verb == "delete" and known:
        model.delete_adapter(name)
        model.set_adapter("default")
    elif action.verb in ("disable", "enable"):
        getattr(model.base_model, f"{action.verb}_adapter_layers")()
    elif action.verb == "scale":
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(0.5)
    elif action.verb == "merge":
        model.merge_adapter()
    elif action.verb == "unmerge":
        model.unmerge_adapter()
    elif action.verb == "save":
        from peft import get_peft_model_state_dict

        for key, tensor in get_peft_model_state_dict(model).items():
            arm.record.add(f"saved {key}", tensor)
    else:
        return False
    return True


@do.register(Evaluate)
def _(action: Evaluate, arm: "Arm") -> bool:
    model = arm.model
    batch = arm.batch(1, action.length)
    was_training = model.training
    if action.mode != "train":
        model.eval()
    around = torch.inference_mode() if action.mode == "inference" else torch.no_grad()
    disabled = model.disable_adapter() if action.mode == "disabled" else nullcontext()
    try:
        with around, disabled:
            if action.mode in ("generate", "sample"):
                output = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=3,
                    do_sample=action.mode == "sample",
                    pad_token_id=0,
                )
            else:
                output = model(**batch).logits
    finally:
        model.train(was_training)
    arm.record.add(f"evaluation of step {arm.step_index}", output)
    return True


@do.register(SetMode)
def _(action: SetMode, arm: "Arm") -> bool:
    target = arm.model if action.layer is None else hooks.module_at(arm, action.layer, "")
    if target is None:
        return False
    target.train(action.on)
    return True


@do.register(SetDropout)
def _(action: SetDropout, arm: "Arm") -> bool:
    target = arm.model if action.layer is None else hooks.module_at(arm, action.layer, "")
    is_changed = False
    for module in target.modules() if target is not None else ():
        if isinstance(module, nn.Dropout):
            module.p, is_changed = action.p, True
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout, is_changed = action.p, True
    return is_changed


@do.register(SetAttention)
def _(action: SetAttention, arm: "Arm") -> bool:
    arm.model.get_base_model().set_attn_implementation(action.name)
    return True


@do.register(Setting)
def _(action: Setting, arm: "Arm") -> bool:
    _SETTERS[action.name](action.value)
    return True


@do.register(Random)
def _(action: Random, arm: "Arm") -> bool:
    if action.verb == "seed":
        torch.manual_seed(7)
    else:
        torch.rand(3)
    return True


@do.register(EditBase)
def _(action: EditBase, arm: "Arm") -> bool:
    place = _base_tensor(action, arm)
    if place is None:
        return False
    owner, key = place
    arm.edits_base = True
    tensor = getattr(owner, key)
    if not tensor.is_floating_point():
        tensor.bitwise_xor_(1)  # packed; counted by PyTorch
        return True
    if action.how == "replace":
        changed = tensor.detach() * 1.25
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(owner, key, nn.Parameter(changed, requires_grad=False) if is_parameter else changed)
    else:
        _edit(tensor, action.how)
    return True


@do.register(EditAdapter)
def _(action: EditAdapter, arm: "Arm") -> bool:
    chosen = _adapter_parameters(arm, action.what, action.layer)
    if action.how == "swap":
        # As an average of the weights is evaluated: in, out, and nothing must have changed.
        now = {name: p.detach().clone() for name, p in arm.named_trainable()}
        for name, parameter in arm.named_trainable():
            if name in arm.ema and arm.ema[name].shape == parameter.shape:
                parameter.data.copy_(arm.ema[name])
        do(Evaluate(), arm)
        for name, parameter in arm.named_trainable():
            parameter.data.copy_(now[name])
        return True
    if action.how == "replace":
        named = {id(parameter): name for name, parameter in arm.model.named_parameters()}
        others = {named[id(each)]: each.detach() * 1.25 for each in chosen}
        arm.model.load_state_dict(others, strict=False, assign=True)
        return bool(chosen)
    if arm.is_between and action.how in ("data", "numpy"):
        # Of a trained parameter PyTorch does not count such edits, and nobody sees them.
        chosen = [each for each in chosen if not each.requires_grad]
    for parameter in chosen:
        if action.how == "cast":
            other = torch.bfloat16 if parameter.dtype == torch.float32 else torch.float32
            parameter.data = parameter.data.to(other)
        else:
            _edit(parameter, action.how)
    return bool(chosen)


@do.register(EditGradients)
def _(action: EditGradients, arm: "Arm") -> bool:
    trained = [p for _, p in arm.named_trainable() if p.grad is not None]
    if action.how == "clip":
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5, foreach=False)
        arm.record.add(f"norm of step {arm.step_index}", norm)
    elif action.how == "clip_value":
        torch.nn.utils.clip_grad_value_(trained, 1e-3, foreach=False)
    for parameter in trained:
        if parameter.grad is None:
            continue
        if action.how == "noise":
            parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3)
        elif action.how == "penalty":
            parameter.grad += 1e-2 * parameter
            parameter.grad.detach_()
        elif action.how == "zero":
            parameter.grad.zero_()
        elif action.how == "none":
            parameter.grad = None
    return bool(trained)


@do.register(UseTwice)
def _(action: UseTwice, arm: "Arm") -> bool:
    module = hooks.module_at(arm, action.layer, action.part)
    if module is None or not action.part or "forward" in module.__dict__:
        return False
    own = module.forward

    def chained(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(own(hidden, *args, **kwargs), *args, **kwargs)

    def beside(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(hidden, *args, **kwargs) + own(0.5 * hidden, *args, **kwargs)

    module.forward = chained if action.how == "chain" else beside
    return True


@do.register(Tie)
def _(action: Tie, arm: "Arm") -> bool:
    places: dict[Any, list[tuple[dict[str, Any], str]]] = {}
    for index, layer in enumerate(arm.layers):
        for name, module in layer.named_modules():
            weight = module._parameters.get("weight")
            if "lora_A" in name and weight is not None:
                where = index if action.how == "within" else name
                places.setdefault((where, weight.shape), []).append((module._parameters, "weight"))
    for same in places.values():
        if len(same) > 1:
            (first, key), (second, other) = same[:2]
            second[other] = first[key]
            return True
    return False


@do.register(Enable)
def _(action: Enable, arm: "Arm") -> bool:
    base = arm.model.get_base_model()
    if action.what == "input_grads":
        base.enable_input_require_grads()
    elif action.what == "checkpointing":
        base.gradient_checkpointing_enable({"use_reentrant": False})
        if arm.is_resident:
            # It keeps its graph, but for that all is as it is with checkpointing. PyTorch's own
            # restores less of the forward's state than a streamed layer does.
            layers: list[Any] = list(arm.layers)
            for layer in layers:
                layer.gradient_checkpointing = False
    return True


@do.register(Probe)
def _(action: Probe, arm: "Arm") -> bool:
    def once() -> None:
        if action.what == "evaluate":
            do(Evaluate(), arm)
        elif action.what == "step":
            arm.train_on(6)
        else:
            arm.forward(Forward())
        arm.captured.clear()

    counts = []
    for _ in range(_NUM_REPEATS):
        once()
        num_recorded = sum(1 for _ in arm.record.entries)
        counts.append(num_alive() - num_recorded)
    arm.record.add(f"growth of step {arm.step_index}", max(0, counts[-1] - counts[1]))
    return True


def _adapter_parameters(arm: "Arm", which: str, layer: int | None) -> list[nn.Parameter]:
    inside = None
    if layer is not None:
        if layer >= len(arm.layers):
            return []
        inside = {id(parameter) for parameter in arm.layers[layer].parameters()}
    return [
        parameter
        for name, parameter in arm.model.named_parameters()
        if which in name
        and ("lora" in name or "vblora" in name)
        and (inside is None or id(parameter) in inside)
    ]


def _base_tensor(action: EditBase, arm: "Arm") -> tuple[nn.Module, str] | None:
    """The module that owns the tensor, and its name there."""
    if action.what in ("outside", "buffer"):
        top: nn.Module = arm.model.get_base_model()
    else:
        if action.layer >= len(arm.layers):
            return None
        top = arm.layers[action.layer]
    inner = {id(module) for layer in arm.layers for module in layer.modules()}
    for name, module in top.named_modules():
        if "lora" in name or "vblora" in name:
            continue
        if action.what == "outside" and id(module) in inner:
            continue
        tables = module._buffers if action.what == "buffer" else module._parameters
        for key, tensor in tables.items():
            if tensor is None or tensor.requires_grad:
                continue
            if {
                "norm": tensor.dim() == 1 and "norm" in name,
                "bias": key == "bias",
                "matrix": tensor.dim() == 2,
                "buffer": tensor.is_floating_point(),
                "outside": tensor.dim() == 1,
            }[action.what]:
                return module, key
    return None


def _edit(tensor: torch.Tensor, how: str) -> None:
    with torch.no_grad():
        if how == "inplace":
            tensor.mul_(1.25)
        elif how == "copy":
            tensor.copy_(tensor * 1.25)
        elif how == "data":
            tensor.data.mul_(1.25)
        elif how == "assign":
            tensor.data = tensor.data * 1.25
        elif how == "numpy":
            # A view of the bytes: NumPy has no bfloat16. One bit of every element is flipped.
            flat = tensor.detach().view(-1).view(torch.uint8).numpy()
            flat[:: tensor.element_size()] ^= 1


# Their types do not tell what they have.
_BACKENDS: Any = torch.backends

_SETTERS: dict[str, Callable[[str], None]] = {
    "matmul_precision": torch.set_float32_matmul_precision,
    "allow_tf32": lambda value: setattr(_BACKENDS.cuda.matmul, "allow_tf32", value == "on"),
    "cudnn_tf32": lambda value: setattr(_BACKENDS.cudnn, "allow_tf32", value == "on"),
    "cuda_fp32": lambda value: setattr(_BACKENDS.cuda.matmul, "fp32_precision", value),
    "all_fp32": lambda value: setattr(_BACKENDS, "fp32_precision", value),
    "cpu_fp32": lambda value: setattr(_BACKENDS.mkldnn.matmul, "fp32_precision", value),
    "flash": lambda value: _BACKENDS.cuda.enable_flash_sdp(value == "on"),
    "math": lambda value: _BACKENDS.cuda.enable_math_sdp(value == "on"),
    "mkldnn": lambda value: setattr(_BACKENDS.mkldnn, "enabled", value == "on"),
}


@contextmanager
def settings_restored() -> Iterator[None]:
    """Put back every setting of the process that an action may change."""
    sdp, mkldnn = _BACKENDS.cuda, _BACKENDS.mkldnn
    flags = (sdp.flash_sdp_enabled(), sdp.math_sdp_enabled(), mkldnn.enabled)
    cudnn = _BACKENDS.cudnn
    owners = (_BACKENDS, sdp.matmul, cudnn, cudnn.conv, cudnn.rnn, mkldnn, mkldnn.matmul)
    before = [(owner, owner.fp32_precision) for owner in owners]
    try:
        yield
    finally:
        torch._C._set_float32_matmul_precision("highest")
        for owner, wanted in before:
            owner.fp32_precision = wanted
        sdp.enable_flash_sdp(flags[0])
        sdp.enable_math_sdp(flags[1])
        mkldnn.enabled = flags[2]
