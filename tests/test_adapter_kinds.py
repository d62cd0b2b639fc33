"""Every kind of PEFT adapter that is promised: prepared without asking, trained, saved, read back.

The gate compares the training of each kind bit by bit (``tests/test_registry.py`` holds its
records). Here is what surrounds it: which kinds a model has, mixtures, and what PEFT saves.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from snapshots import NUM_LAYERS, assert_same_run, batches, run
from support import same_bits
from torch import nn

import poros
from poros.errors import UnvalidatedArchitectureError
from poros.gates import tiny
from poros.gates.kinds import KINDS, attach
from poros.model.adapter_kinds import adapter_kinds

Load = Callable[[bool], Any]
LINEARS = ["q_proj", "v_proj", "down_proj"]
NEAR_LAYERS = (
    *("adalora", "boft", "fourierft", "hra", "ia3", "ln_tuning", "loha", "lokr", "miss", "oft"),
    *("pvera", "randlora", "road", "shira", "vera", "waveft"),
)
# PEFT cuts ranks as it saves, and saves the tokens that a network has made in its place.
SAVED_AS_ANOTHER = ("adalora", "p_tuning")
OUTSIDE = ("trainable_tokens", "prompt_tuning", "p_tuning")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads a fresh base, as NF4 or dense; equal arguments give equal bytes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = tiny.small_config("qwen2", num_layers=NUM_LAYERS, hidden_size=64, dropout=0.05)
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)

    def load(quantize: bool) -> Any:
        base = tiny.load_base(folder, dtype=torch.bfloat16, quantize=quantize)
        base.name_or_path = base.config.name_or_path = ""
        return base

    return load


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ids = batches()[1]["input_ids"]
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", [*NEAR_LAYERS, *OUTSIDE])
def test_kinds_train_and_are_saved_as_resident(kind: str, load: Load, tmp_path: Path) -> None:
    quantize = KINDS[kind].on_4bit

    def make() -> Any:
        return attach(load(quantize), kind, rank=4, dropout=0.05)

    resident, streamed = make(), poros.prepare(make())
    expected, found = (
        run(each, num_steps=2, autocast_dtype=torch.bfloat16, lr=0.02)
        for each in (resident, streamed)
    )
    assert_same_run(expected, found)
    assert all(gradient.any() for gradient in expected.steps[0].gradients.values())
    assert poros.runtime(streamed).self_check["status"] == "passed"
    assert poros.runtime(streamed).stats()["num_loads"] > 0
    for model, place in ((resident, "resident"), (streamed, "streamed")):
        model.save_pretrained(tmp_path / place)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        contents = [(tmp_path / each / file).read_bytes() for each in ("resident", "streamed")]
        assert contents[0] == contents[1], file
    assert same_bits(logits(streamed), logits(resident))
    if kind not in SAVED_AS_ANOTHER:
        plain = PeftModel.from_pretrained(load(quantize), tmp_path / "streamed")
        assert same_bits(logits(plain), logits(resident))
    assert not same_bits(logits(make()), logits(resident)), "training changed nothing"


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": LINEARS, "init_lora_weights": False, **options})


def add(model: Any, config: Any) -> Any:
    model.add_adapter("second", config)
    return model


def mixture(base: Any) -> Any:
    """LoRA and, trained beside it, LoHa."""
    torch.manual_seed(1)
    loha = LoHaConfig(r=2, target_modules=["up_proj"], init_weights=False)
    model = get_peft_model(peft.inject_adapter_in_model(loha, base, "loha"), lora())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "hada_" in name)
    return model


class Unknown(nn.Module, peft.tuners.tuners_utils.BaseTunerLayer):
    """Somebody else's adapter."""


MODELS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "none": (lambda base: base, set()),
    "lora": (lambda base: get_peft_model(base, lora()), {"lora"}),
    "rslora": (lambda base: get_peft_model(base, lora(use_rslora=True)), {"lora"}),
    "pissa": (lambda base: get_peft_model(base, lora(init_lora_weights="pissa")), {"lora"}),
    "dora": (lambda base: get_peft_model(base, lora(use_dora=True)), {"dora"}),
    "lora and dora": (
        lambda base: add(get_peft_model(base, lora()), lora(use_dora=True)),
        {"lora", "dora"},
    ),
    "tokens beside lora": (
        lambda base: get_peft_model(base, lora(trainable_token_indices=[3, 4])),
        {"lora", "trainable_tokens"},
    ),
    "mixed": (lambda base: mixture(base), {"lora", "loha"}),
    "by transformers": (lambda base: base.add_adapter(lora()) or base, {"lora"}),
    "adalora": (lambda base: attach(base, "adalora"), {"adalora"}),
    "prompt": (lambda base: attach(base, "prompt_tuning"), {"prompt_tuning"}),
    "somebody else's": (lambda base: base.append(Unknown()), {"Unknown"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_kinds_of_a_model(name: str, load: Load) -> None:
    make, expected = MODELS[name]
    base = load(False) if name != "somebody else's" else nn.Sequential(nn.Linear(2, 2))
    assert set(adapter_kinds(make(base))) == expected


def test_each_kind_of_a_mixture_has_to_be_on_record(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return mixture(load(False))

    model = make()
    with monkeypatch.context() as patch:
        patch.setattr("poros.model.inspect.validated_adapters", lambda: frozenset({"vera"}))
        with pytest.raises(UnvalidatedArchitectureError, match="loha") as caught:
            poros.prepare(model)
        assert "kind lora" not in str(caught.value)
    expected = run(make(), num_steps=2, autocast_dtype=torch.bfloat16)
    found = run(poros.prepare(model), num_steps=2, autocast_dtype=torch.bfloat16)
    assert_same_run(expected, found)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"]])
def test_lora_outside_the_layers_alone(targets: list[str], load: Load) -> None:
    """With nothing to recompute, and with a gradient that passes through all layers."""

    def make() -> Any:
        torch.manual_seed(1)
        return get_peft_model(load(True), lora(target_modules=targets))

    expected = run(make(), num_steps=2)
    assert_same_run(expected, run(poros.prepare(make()), num_steps=2))


def test_orthogonal_transformations_projected_in_the_forward_are_refused_in_time(
    load: Load,
) -> None:
    """COFT edits its parameters in each forward, so a second one would not be the same."""
    config = peft.OFTConfig(oft_block_size=8, coft=True, eps=1e-3, target_modules=LINEARS)
    expected, model = (get_peft_model(load(True), config) for _ in range(2))
    poros.prepare(model)
    said = r"its own forward edits .*oft_R.* a second time.*coft=False.*poros\.restore"
    with pytest.raises(poros.RematerializationError, match=said):
        model.train()(**batches()[0])
    assert all(each.grad is None for each in model.parameters())
    assert same_bits(logits(model), logits(expected))
