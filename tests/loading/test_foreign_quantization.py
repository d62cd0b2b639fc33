"""Bases quantized by other libraries are refused, though their model type is promised."""

from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

import poros
from poros.errors import UnsupportedModelError
from tests.snapshots import build, changes, layers_of, picture, run
from tests.support import prepare_plain

CONFIGURATIONS: dict[str, tuple[Any, str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "gptq"),
    "awq": ({"quant_method": "awq", "bits": 4}, "awq"),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, "eetq"),
    "hqq": ({"quant_method": "hqq"}, "hqq"),
    "aqlm": ({"quant_method": "aqlm"}, "aqlm"),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, "quanto"),
    "torchao": ({"quant_method": "torchao"}, "torchao"),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    "fp8": ({"quant_method": "fp8"}, "fp8"),
    "mxfp4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "bitsandbytes in 8 bit": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes in 8 bit",
    ),
    "bitsandbytes in 8 bit, an object": (
        BitsAndBytesConfig(load_in_8bit=True),
        "bitsandbytes in 8 bit",
    ),
}


def refused(model: Any, match: str) -> None:
    before = picture(model)
    with pytest.raises(UnsupportedModelError, match=match):
        prepare_plain(model)
    assert changes(before, picture(model)) == {}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_method_in_the_configuration_is_refused_by_name(name: str) -> None:
    model = build(quantize=False)
    model.get_base_model().config.quantization_config, found = CONFIGURATIONS[name]
    refused(model, f"found a model quantized by {found} ")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_packed_weights_of_nobody_in_particular_are_refused(dtype: torch.dtype) -> None:
    model = build(quantize=False)
    module = layers_of(model)[2].self_attn
    module.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.uint8).view(torch.uint8))
    module.qweight = torch.zeros(4, 4).to(dtype)
    refused(model, r"packed weights of torch\..*layers\.2\.self_attn\.qweight")


def test_four_bit_and_dequantized_bases_are_taken() -> None:
    """The control: what streams is not refused by these rules."""
    assert build().get_base_model().config.quantization_config is not None
    model = build(quantize=False)
    model.get_base_model().config.quantization_config = {"quant_method": "fp8", "dequantize": True}
    layers_of(model)[0].mlp.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))
    for prepared in (prepare_plain(build()), prepare_plain(model)):
        run(prepared)
        poros.restore(prepared)
