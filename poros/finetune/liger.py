"""Liger's kernels in the model of one run: norms, GeGLU feed-forwards and rotary embeddings.

Note: What is replaced
    Modules of the model get forwards of Liger's, as entries in their ``__dict__``. Liger replaces
    names in transformers' modules beside that, for all models of the process: classes, which only
    models built later would take, and ``apply_rotary_pos_emb``, which attention looks up as it
    runs. All of these are put back before ``use_liger`` returns. Attention modules get their own
    forward instead, with Liger's function in the place of that name. So no other model of the
    process is changed, and nothing has to be undone when the run ends.

Note: Whose feed-forward runs
    SwiGLU modules keep their own forward, whose activation ``poros.kernels.mlp`` computes with the
    bits of transformers: two tensors are kept for backward, and the product is made again, where
    Liger's leaves three. A step of 7B that keeps all graphs takes 24.9 GB instead of 29.8. Liger's
    GeGLU computes the GELU by tanh, whatever the configuration says; a module with another
    activation keeps its own forward. So do experts.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.activations import GELUTanh

from poros.errors import RecipeError
from poros.kernels.forwards import is_of_liger
from poros.kernels.gated_forms import names_in
from poros.kernels.nf4 import DTYPES
from poros.loaders.settings import describe_error
from poros.planning.meta_model import meta_model
from poros.recipes.recipe import Recipe
from poros.utils.devices import runs_triton

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NOT_TAKEN = {"cross_entropy": False, "fused_linear_cross_entropy": False, "swiglu": False}
"""Poros computes the loss in slices of the head, and SwiGLU by a kernel that keeps less."""
_NORM = "LigerRMSNorm"
_GEGLU = "LigerGEGLUMLP"
_SET_BY_LIGER = ("forward", "extra_repr", "_get_name")

Replaced = dict[int, Any]
"""Functions of Liger's, by the id of those that they have replaced."""


def choose_liger(
    recipe: Recipe, config: "PreTrainedConfig", device: torch.device
) -> tuple[Recipe, str]:
    """Decide whether a run takes Liger's kernels, by a try on the meta device.

    The recipe comes back with true or false, and a line that names the kernels or the reason.

    Raises:
        RecipeError: If it asks for kernels that cannot be used.
    """
    wanted = recipe.training.use_liger_kernel
    used: list[str] = []
    said = "Liger's are off"
    if wanted is True or (wanted == "auto" and device.type == "cuda"):
        used, why = _tried(recipe, config, device)
        if wanted is True and not used:
            raise RecipeError(f"training.use_liger_kernel: {why}; or set it to false (--no-liger)")
        said = f"Liger's {', '.join(used)}" if used else f"Liger's are off: {why}"
    training = replace(recipe.training, use_liger_kernel=bool(used))
    return replace(recipe, training=training), said


def _tried(
    recipe: Recipe, config: "PreTrainedConfig", device: torch.device
) -> tuple[list[str], str]:
    """Return what of a model would run Liger's kernels, found by its shapes alone, or why not."""
    # Triton reads it too, when it is imported.
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not is_interpreted and not runs_triton(device):
        wanted = "a GPU that computes in bfloat16, and Triton"
        return [], f"expected {wanted}, found {device}; train on one (--device cuda)"
    if find_spec("liger_kernel") is None:
        remedy = "in a clone of Poros: pip install '.[finetune]'"
        return [], f"expected the package liger-kernel, found none; {remedy}"
    kind = config.model_type
    try:
        model = meta_model(config, None, DTYPES[recipe.model.dtype], recipe.model.vision)
        used = use_liger(model)
    except Exception as error:  # Liger's code for a family expects a release of transformers
        return [], f"expected a {kind} that Liger's kernels fit, found {describe_error(error)}"
    release = version("liger-kernel")
    return used, f"expected a model that Liger {release} has kernels for, found {kind}"


def use_liger(model: Any) -> list[str]:
    """Have a model's decoder run Liger's norms, GeGLU feed-forwards and rotary embeddings.

    Called before there are adapters. All else stays as it is.

    Returns:
        What of it runs Liger's kernels, in words; empty if Liger does not know the family.

    Raises:
        Exception: Of Liger's, if it is not installed, or the model is not what it expects of the
            family. The model is half changed then, transformers' modules are not.
    """
    from transformers.integrations.liger import apply_liger_kernel

    decoder = model.get_decoder()
    with _modules_put_back() as replaced:
        apply_liger_kernel(decoder, _NOT_TAKEN)
    found = []
    for module in decoder.modules():
        if is_of_liger(module.__dict__.get("forward")):
            found.append(_kept(module))
        else:
            found.append(_with_functions(module, replaced))
    return sorted({each for each in found if each})


@contextmanager
def _modules_put_back() -> Iterator[Replaced]:
    """Undo what Liger replaces in modules of transformers and torch, and list it at the end."""
    places = [
        module.__dict__
        for name, module in list(sys.modules.items())
        if name.startswith(("transformers.", "torch.nn")) and module is not None
    ]
    before = [(place, dict(place)) for place in places]
    replaced: Replaced = {}
    try:
        yield replaced
    finally:
        for place, values in before:
            for name, value in values.items():
                new = place.get(name)
                if new is not value and is_of_liger(new):
                    place[name] = value
                    if inspect.isfunction(new):
                        replaced[id(value)] = new


def _kept(module: nn.Module) -> str | None:
    """Name what a module's forward of Liger's is for; remove it if the module keeps its own."""
    kind = module.__dict__["forward"].__func__.__qualname__.partition(".")[0]
    if kind == _NORM:
        return "norms"
    names = names_in(type(module).forward) if kind == _GEGLU else None
    if names is not None and type(module._modules.get(names.activation)) is GELUTanh:
        return "feed-forwards"
    for name in _SET_BY_LIGER:
        module.__dict__.pop(name, None)
    return None


def _with_functions(module: nn.Module, replaced: Replaced) -> str | None:
    """Give a module its own forward with functions of Liger's in it, where it calls such."""
    own: Any = type(module).forward
    if not isinstance(own, FunctionType) or "forward" in module.__dict__:
        return None
    place = own.__globals__
    called = {name: place.get(name) for name in own.__code__.co_names}
    new = {name: replaced[id(each)] for name, each in called.items() if id(each) in replaced}
    if not new:
        return None
    forward = FunctionType(
        own.__code__, {**place, **new}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    # It counts as Liger's, so that its layer is recorded and grouped (poros.stream.layer_index).
    forward.__module__ = next(iter(new.values())).__module__
    module.__dict__["forward"] = MethodType(forward, module)
    return "rotary embeddings"
