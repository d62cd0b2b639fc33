"""A bit that the move itself flips is found in the first step, wherever the tensor goes."""

from typing import Any

import pytest
import torch
from snapshots import assert_same_run, build, layers_of, run
from stores import lay_down

import poros
from poros.errors import ParityError
from poros.gates import tiny


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """One of each kind."""
    layer = layers_of(model)[1]
    weight = layer.mlp.up_proj.base_layer.weight
    return {
        "packed weight": weight.data,
        "absmax": weight.quant_state.absmax,
        "nested absmax": weight.quant_state.state2.absmax,
        "norm": layer.input_layernorm.weight.data,
        "bias": layer.self_attn.k_proj.base_layer.bias.data,
    }


def flip_when_copied(source: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on a copy of ``source`` arrives with one nibble changed."""
    copy, place, flips = torch.Tensor.copy_, source.data_ptr(), list[int]()

    def faulty(self: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = copy(self, other, *args, **kwargs)
        if other.data_ptr() == place and self.data_ptr() != place and self.dtype == other.dtype:
            self.view(-1).view(torch.uint8)[1] ^= 0x30
            flips.append(self.data_ptr())
        return result

    monkeypatch.setattr(torch.Tensor, "copy_", faulty)
    return flips


@pytest.mark.parametrize("keep_last", [0, 3])
@pytest.mark.parametrize("kind", ["packed weight", "absmax", "nested absmax", "norm", "bias"])
def test_a_nibble_flipped_by_prepare_is_found(
    kind: str, keep_last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with monkeypatch.context() as patch:
        flips = flip_when_copied(tensors_of(model)[kind], patch)
        poros.prepare(model, keep_last=keep_last)
    assert len(flips) == 1
    with pytest.raises(ParityError, match=r"layers\.1"):
        run(model)


@pytest.mark.parametrize("self_check", ["strict", "off"])
@pytest.mark.parametrize("is_adopted", [False, True])
def test_control_nothing_is_found_where_nothing_flips(self_check: str, is_adopted: bool) -> None:
    def make() -> Any:
        base = build(dropout=0.0).unload()
        if is_adopted:
            lay_down(base)
        return tiny.attach_lora(base, rank=8, seed=1)

    model = poros.prepare(make(), self_check=self_check)
    assert poros.runtime(model)._takeover.is_adopted == is_adopted
    assert_same_run(run(make()), run(model))
    assert poros.runtime(model).self_check["status"] in ("passed", "off")
