"""Adapters on fused experts, which PEFT puts on the 3-D parameters themselves.

PEFT registers a parametrization at each forward and takes it off again; streaming has to be exact
through that, and the frozen experts have to be back in their places afterwards.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.errors import PreparedModelError
from tests.comparing import assert_same_run, bits_of
from tests.loops import batches, build, fill, run
from tests.support import AdversarialPrepare, prepare_plain

ARCHITECTURES = ("mixtral", "qwen3_moe")


def make(architecture: str, **options: Any) -> Any:
    base = build(architecture, dropout=0.0, **options).unload()
    return attach(base)


def attach(base: Any) -> Any:
    torch.manual_seed(1)
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    fill(model)
    assert any("experts" in name for name, part in model.named_parameters() if part.requires_grad)
    return model


@pytest.mark.cover("values")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("is_hostile", [False, True])
def test_exact(
    architecture: str, dtype: torch.dtype, autocast: torch.dtype | None, is_hostile: bool
) -> None:
    """With the self-check, or both under adversarial streams that watch each read."""
    settings: Any = {"num_steps": 3, "autocast_dtype": autocast}
    hostile = AdversarialPrepare()
    with hostile.watching() if is_hostile else nullcontext():
        expected = run(make(architecture, dtype=dtype), **settings)
        assert all(bool(part.any()) for part in expected.steps[0].gradients.values())
        model = make(architecture, dtype=dtype)
        before = bits_of(model)
        (hostile if is_hostile else prepare_plain)(model, slots=2)
        assert_same_run(expected, run(model, **settings))
    status = poros.runtime(model).self_check["status"]
    assert status == ("off" if is_hostile else "passed")
    frozen = {name for name, part in model.named_parameters() if not part.requires_grad}
    after = bits_of(poros.restore(model))
    assert {name: after[name] for name in frozen} == {name: before[name] for name in frozen}


def test_an_adapter_on_experts_added_while_prepared_is_never_silent() -> None:
    model = prepare_plain(build("mixtral", dropout=0.0))
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model.add_adapter("experts", config)
    model.set_adapter("experts")
    with pytest.raises(PreparedModelError, match="written"):
        model(**batches()[0])
