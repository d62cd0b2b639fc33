"""``training.use_liger_kernel``: what it replaces and for whom, and where it is refused.

That it trains with the bits of a resident model: ``tests/exact/test_liger``.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import liger as integration
from transformers.models.qwen2 import modeling_qwen2

from poros.errors import RecipeError
from poros.finetune import run as runs
from poros.finetune.liger import choose_liger, use_liger
from poros.finetune.trainers import make_arguments
from poros.gates import tiny
from poros.planning.meta_model import meta_model
from poros.recipes.recipe import Recipe
from tests.finetune.arms import settings
from tests.finetune.subjects import announced, break_at, recipe_of
from tests.liger import names_of_liger

pytest.importorskip("liger_kernel")

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_promised_models_take_them(architecture: str) -> None:
    """SwiGLU and experts keep their own forward; the attention of Gemma 4 is not Liger's."""
    model = meta_model(tiny.small_config(architecture), None, torch.float32)
    expected = {"norms", "rotary embeddings"}
    expected |= {"feed-forwards"} if architecture.startswith("gemma") else set()
    expected -= {"rotary embeddings"} if architecture.startswith("gemma4") else set()
    assert use_liger(model) == sorted(expected)
    assert names_of_liger() == []


def no_package(patch: pytest.MonkeyPatch) -> None:
    genuine = importlib.util.find_spec
    patch.setattr(
        "poros.finetune.liger.find_spec",
        lambda name: None if name == "liger_kernel" else genuine(name),
    )


def no_interpreter(patch: pytest.MonkeyPatch) -> None:
    patch.delenv("TRITON_INTERPRET", raising=False)


def another_release(patch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ImportError("cannot import name 'Norm'")

    patch.setattr(integration, "apply_liger_kernel", broken)


UNUSABLE: dict[str, tuple[Any, str, str]] = {
    "not installed": (no_package, "qwen2", "the package liger-kernel, found none; .*pip install"),
    "a family that Liger does not know": (
        lambda patch: None,
        "phi",
        "a model that Liger .*, found phi;",
    ),
    "a release that does not fit": (
        another_release,
        "qwen2",
        "a qwen2 that Liger's kernels fit, found ImportError: cannot import name 'Norm'",
    ),
    "a CPU": (no_interpreter, "qwen2", "a GPU that .*found cpu; train on one"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_used_is_an_error_where_it_is_asked_for(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded. Where it is the default, it is off, and the summary says why."""
    break_it, architecture, why = UNUSABLE[case]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("poros.finetune.liger.runs_triton", lambda device: device.type == "cuda")
    config = tiny.small_config(architecture)
    by_default = Recipe()
    asked = replace(by_default, training=replace(by_default.training, use_liger_kernel=True))
    choose_liger(asked, tiny.small_config("qwen2"), CPU)  # control: what is asked for is there
    break_it(monkeypatch)
    with pytest.raises(RecipeError, match=rf"^training\.use_liger_kernel: expected {why}"):
        choose_liger(asked, config, CPU)
    if case == "a CPU":
        found, line = choose_liger(by_default, config, CPU)
        assert line == "Liger's are off"
    else:
        found, line = choose_liger(by_default, config, GPU)
        assert line.startswith("Liger's are off: expected ")
    assert found.training.use_liger_kernel is False


def test_on_a_gpu_it_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros.finetune.liger.runs_triton", lambda device: device.type == "cuda")
    given = Recipe()
    config = tiny.small_config("qwen2")
    assert choose_liger(given, config, GPU)[0].training.use_liger_kernel is True
    assert choose_liger(given, config, CPU)[0].training.use_liger_kernel is False
    off = replace(given, training=replace(given.training, use_liger_kernel=False))
    assert choose_liger(off, config, GPU)[0].training.use_liger_kernel is False


def test_going_on_with_other_kernels_is_noted(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other versions are: the recipe says "auto" then and now."""
    options = {"training__save_steps": 1, "training__max_steps": 3, "memory__slots": 2}
    given = recipe_of(**{**settings(model, data, "text"), **options, "output__folder": tmp_path})
    break_at(monkeypatch, given, 2)
    assert "liger-kernel" not in announced(given)  # control
    monkeypatch.setattr(
        runs,
        "choose_liger",
        lambda recipe, *_: (
            replace(recipe, training=replace(recipe.training, use_liger_kernel=True)),
            "",
        ),
    )
    assert "liger-kernel off began this run, 0." in announced(given)


def test_trl_is_not_told(model: Path, data: Path, tmp_path: Path) -> None:
    """It would replace the loss, and transformers' code."""
    given = recipe_of(**settings(model, data, "text"), training__use_liger_kernel=True)
    assert given.training.use_liger_kernel is True
    arguments = make_arguments(given, tmp_path, CPU, 2, has_validation=False)
    assert arguments.use_liger_kernel is False


def test_what_liger_replaces_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, before = integration.apply_liger_kernel, dict(vars(modeling_qwen2))
    seen: list[str] = []

    def broken(*args: Any) -> None:
        genuine(*args)
        seen.extend(names_of_liger())
        raise AttributeError("no such norm")

    monkeypatch.setattr(integration, "apply_liger_kernel", broken)
    model = meta_model(tiny.small_config("qwen2"), None, torch.float32)
    with pytest.raises(AttributeError, match="no such norm"):
        use_liger(model)
    replaced = ("Qwen2RMSNorm", "apply_rotary_pos_emb")
    assert sorted(seen) == [f"{modeling_qwen2.__name__}.{each}" for each in replaced]  # control
    assert dict(vars(modeling_qwen2)) == before and names_of_liger() == []
