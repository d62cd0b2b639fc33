"""Every kind of LoRA that PEFT offers trains exactly, and is saved as PEFT saves it.

Each case is trained resident and prepared from the same bytes and compared bit by bit. The adapter
that the prepared model saves has the files of the resident one, under PEFT's own names, and gives
the trained outputs when plain PEFT reads it back onto the base it was made for.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file

import poros
from poros.gates import tiny
from poros.gates.reference import Trajectory
from tests.lora_kinds import KINDS
from tests.snapshots import NUM_LAYERS, assert_same_run, batches, run
from tests.support import same_bits

Load = Callable[..., Any]

PROJECTIONS = ("q_proj", "v_proj", "down_proj")
DRAWN = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "bias")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads a fresh base of an architecture; equal arguments give equal bytes."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def load(architecture: str = "qwen2", *, quantize: bool = True, bits: int = 32) -> Any:
        dtype = torch.float32 if bits == 32 else torch.bfloat16
        where = folder / f"{architecture}-{bits}"
        if not where.exists():
            config = tiny.small_config(
                architecture, num_layers=NUM_LAYERS, hidden_size=64, dropout=0.05
            )
            tiny.write_checkpoint(config, where, dtype=dtype)
        base = tiny.load_base(where, dtype=dtype, quantize=quantize)
        base.name_or_path = base.config.name_or_path = ""
        return base

    return load


def attach(base: Any, **options: Any) -> Any:
    """``base`` with an adapter, whose B is not zero unless its initialization chose it."""
    config = LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "lora_dropout": 0.05,
            "target_modules": list(PROJECTIONS),
            "task_type": "CAUSAL_LM",
            **options,
        }
    )
    torch.manual_seed(1)
    model = get_peft_model(base, config)
    if isinstance(config.init_lora_weights, str):
        return model
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and any(each in name for each in DRAWN):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(**batches()[1]).logits
    return found


def check(
    load: Callable[[], Any], folder: Path, options: dict[str, Any], **spec: Any
) -> tuple[Trajectory, dict[str, torch.Tensor]]:
    """Train both arms, save both, read both back. The run, and what was saved."""
    resident, streamed = attach(load(), **options), poros.prepare(attach(load(), **options))
    expected, found = (run(each, num_steps=3, **spec) for each in (resident, streamed))
    assert_same_run(expected, found)
    assert poros.runtime(streamed).stats()["num_loads"] > 0
    assert poros.runtime(streamed).self_check["status"] == "passed"
    for name, gradient in expected.steps[0].gradients.items():
        assert gradient.any(), f"{name} is not trained, so comparing it shows nothing"

    for model, place in ((resident, "resident"), (streamed, "streamed")):
        model.save_pretrained(folder / place)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        contents = [(folder / each / file).read_bytes() for each in ("resident", "streamed")]
        assert contents[0] == contents[1], file
    saved = load_file(folder / "streamed" / "adapter_model.safetensors")
    trained = {name: each for name, each in streamed.named_parameters() if each.requires_grad}
    for name, parameter in trained.items():
        assert same_bits(saved[canonical(name)], parameter), name

    torch.manual_seed(1)
    plain = PeftModel.from_pretrained(load(), folder / "streamed")
    expected_logits = logits(resident)
    assert same_bits(logits(streamed), expected_logits)
    assert same_bits(logits(plain), expected_logits)
    fresh = attach(load(), **options)
    assert not same_bits(logits(fresh), expected_logits), "training changed nothing"
    return found, saved


def canonical(name: str) -> str:
    """The key under which PEFT saves the parameter ``name`` of a model."""
    for part in (".modules_to_save.default", ".default"):
        name = name.replace(part, "")
    return name.removesuffix(".weight") if "magnitude" in name else name


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_lora(kind: str, checkpoints: Load, tmp_path: Path) -> None:
    check(checkpoints, tmp_path, KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rslora", "dora", "norm saved", "bias of lora", "lora bias"])
@pytest.mark.parametrize("quantize", [True, False])
def test_kinds_of_lora_in_bf16(
    kind: str, quantize: bool, checkpoints: Load, tmp_path: Path
) -> None:
    check(lambda: checkpoints(bits=16, quantize=quantize), tmp_path, KINDS[kind])


@pytest.mark.parametrize("kind", ["dora", "norm saved", "bias of lora", "lora bias"])
@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("quantize", [True, False])
def test_kinds_of_lora_under_autocast(
    kind: str, bits: int, quantize: bool, checkpoints: Load, tmp_path: Path
) -> None:
    def load() -> Any:
        return checkpoints(bits=bits, quantize=quantize)

    check(load, tmp_path, KINDS[kind], autocast_dtype=torch.bfloat16)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_biases_that_bitsandbytes_casts_at_their_first_use(
    autocast: torch.dtype | None, checkpoints: Load, tmp_path: Path
) -> None:
    """k-bit preparation makes biases fp32; a 4-bit layer turns them into bf16, for good."""

    def load() -> Any:
        return prepare_model_for_kbit_training(
            checkpoints(bits=16), use_gradient_checkpointing=False
        )

    def biases(model: Any) -> set[torch.dtype]:
        named = model.named_parameters()
        return {each.dtype for name, each in named if name.endswith("q_proj.base_layer.bias")}

    options = KINDS["bias of lora"]
    resident, streamed = (attach(load(), **options) for _ in range(2))
    assert biases(resident) == {torch.float32}
    expected = run(resident, num_steps=3, autocast_dtype=autocast)
    assert biases(resident) == {torch.bfloat16}
    found = run(poros.prepare(streamed), num_steps=3, autocast_dtype=autocast)
    assert_same_run(expected, found)
    assert biases(streamed) == {torch.bfloat16}


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
def test_all_linear_on_other_dense_architectures(
    architecture: str, checkpoints: Load, tmp_path: Path
) -> None:
    options = {"target_modules": "all-linear"}
    _, saved = check(lambda: checkpoints(architecture), tmp_path, options)
    modules = {name.split(".lora_")[0] for name in saved}
    assert len(modules) == NUM_LAYERS * (4 if architecture == "phi3" else 7)


@pytest.mark.parametrize(
    ("init", "quantize"),
    [("pissa", False), ("pissa_niter_4", False), ("olora", False), ("olora", True)],
)
def test_initializations_that_change_the_base(
    init: str, quantize: bool, checkpoints: Load, tmp_path: Path
) -> None:
    def load() -> Any:
        return checkpoints(quantize=quantize)

    before = first_projection(load()).weight.detach().clone()
    after = first_projection(attach(load(), init_lora_weights=init).get_base_model())
    assert not same_bits(after.base_layer.weight, before)
    check(load, tmp_path, {"init_lora_weights": init})


def test_pissa_on_a_4_bit_base_is_refused_by_peft_itself(checkpoints: Load) -> None:
    with pytest.raises(TypeError, match="PiSSA"):
        attach(checkpoints(), init_lora_weights="pissa")


def first_projection(base: Any) -> Any:
    return base.get_submodule("model.layers.0.self_attn.q_proj")
