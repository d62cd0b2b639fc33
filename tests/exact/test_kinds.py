"""Eight kinds of PEFT adapters beside LoRA's: prepared, trained, saved and read back exactly.

Each case is trained resident and prepared from the same bytes. The adapter that the prepared model
saves has the files of the resident one, under PEFT's own names, and gives the trained outputs when
plain PEFT reads it back onto the base it was made for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

import poros
from poros.errors import UnsupportedModelError
from poros.gates import kinds
from poros.gates.registry import Record, Registry
from poros.model.adapter_kinds import adapter_kinds
from tests.comparing import assert_same_run
from tests.loops import NUM_LAYERS, Model, batches, run, small_base
from tests.lora_kinds import KINDS, REPEATED
from tests.support import prepare_plain, same_bits

BF16, FP32 = torch.bfloat16, torch.float32
DRAWN = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "bias")
EIGHT = ("adalora", "fourierft", "ia3", "ln_tuning", "oft", "vera")
EIGHT += ("trainable_tokens", "prompt_tuning")  # outside the layers
SAVED_AS_ANOTHER = ("adalora",)  # PEFT cuts ranks as it saves
ALL_LINEAR = {"target_modules": "all-linear"}
Attach = Callable[[Any], Model]


def lora(**options: Any) -> LoraConfig:
    usual = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**usual, "target_modules": ["q_proj", "v_proj", "down_proj"], **options})


def with_lora(**options: Any) -> Attach:
    """Adapters whose B is not zero unless their initialization chose it."""

    def attach(base: Any) -> Model:
        torch.manual_seed(1)
        model = get_peft_model(base, lora(**options))
        if isinstance(options.get("init_lora_weights"), str):
            return model
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and any(each in name for each in DRAWN):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        return model

    return attach


@dataclass(frozen=True)
class Case:
    name: str
    attach: Attach
    of_base: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    is_slow: bool = False
    num_modules: int | None = None
    """That are adapted."""

    def base(self) -> Any:
        return small_base(**{"dtype": FP32, **self.of_base})

    def logits(self, model: Model) -> torch.Tensor:
        dtype = self.spec.get("autocast_dtype")
        region = torch.autocast("cpu", dtype or BF16, enabled=dtype is not None)
        with torch.no_grad(), region:
            ids = batches()[1]["input_ids"]
            return model.eval()(input_ids=ids, use_cache=False).logits


def cases() -> Iterator[Case]:
    autocast = {"autocast_dtype": BF16}
    for kind in EIGHT:
        of_base = {"dtype": BF16, "quantize": kinds.KINDS[kind].on_4bit}
        attach = partial(kinds.attach, kind=kind, rank=4, dropout=0.05)
        yield Case(kind, attach, of_base, {**autocast, "lr": 0.02})
    for name, options in KINDS.items():
        yield Case(f"lora: {name}", with_lora(**options), is_slow=name in REPEATED)
    for place, name in enumerate(("dora", "norm saved", "bias of lora", "lora bias")):
        # Of dtypes, 4 bits or dense each comes twice.
        of_base = {"dtype": (FP32, BF16)[place // 2], "quantize": place % 2 == 0}
        attach = with_lora(**KINDS[name])
        yield Case(f"lora: {name} under autocast", attach, of_base, autocast)
    for architecture, num_modules in {"phi3": 4, "gemma3": 7}.items():
        name, of_base = f"all linear of {architecture}", {"architecture": architecture}
        count = NUM_LAYERS * num_modules
        yield Case(name, with_lora(**ALL_LINEAR), of_base, num_modules=count)
    for init in ("pissa", "olora"):
        for quantize in (False, True) if init == "olora" else (False,):
            attach = with_lora(init_lora_weights=init)
            name, of_base = f"{init}, {'4 bits' if quantize else 'dense'}", {"quantize": quantize}
            yield Case(name, attach, of_base)


def canonical(name: str) -> str:
    """The key under which PEFT saves the parameter ``name`` of a model."""
    for part in (".modules_to_save.default", ".default"):
        name = name.replace(part, "")
    return name.removesuffix(".weight") if "magnitude" in name else name


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.is_slow) for case in cases()],
)
def test_a_kind_is_trained_saved_and_read_back(case: Case, tmp_path: Path) -> None:
    resident, streamed = (case.attach(case.base()) for _ in range(2))
    prepare_plain(streamed, device="cpu")
    expected, found = (run(model, 1, **case.spec) for model in (resident, streamed))
    assert_same_run(expected, found)
    assert poros.runtime(streamed).self_check["status"] == "passed"
    assert poros.runtime(streamed).stats()["num_loads"] > 0
    for name, gradient in expected.steps[0].gradients.items():
        assert gradient.any(), f"{name} is not trained, so comparing it shows nothing"
    for model, place in ((resident, "resident"), (streamed, "streamed")):
        model.save_pretrained(tmp_path / place)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        contents = [(tmp_path / each / file).read_bytes() for each in ("resident", "streamed")]
        assert contents[0] == contents[1], file
    expected_logits = case.logits(resident)
    assert same_bits(case.logits(streamed), expected_logits)
    fresh = case.attach(case.base())
    assert not same_bits(case.logits(fresh), expected_logits), "training changed nothing"
    if case.name in SAVED_AS_ANOTHER:
        return
    torch.manual_seed(1)
    plain = PeftModel.from_pretrained(case.base(), tmp_path / "streamed")
    assert same_bits(case.logits(plain), expected_logits)
    saved = load_file(tmp_path / "streamed" / "adapter_model.safetensors")
    if case.name not in kinds.KINDS:
        for name, parameter in streamed.named_parameters():
            if parameter.requires_grad:
                assert same_bits(saved[canonical(name)], parameter), name
    if case.num_modules is not None:
        assert len({name.split(".lora_")[0] for name in saved}) == case.num_modules


def projection(base: Any) -> Any:
    return base.get_submodule("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    "case", [case for case in cases() if "olora" in case.name or "pissa" in case.name]
)
def test_control_an_initialization_changes_the_base(case: Case) -> None:
    before = projection(case.base()).weight.detach().clone()
    after = projection(case.attach(case.base()).get_base_model())
    assert not same_bits(after.base_layer.weight, before)


# Which kinds a model has.


def add(model: Model, config: Any) -> Model:
    model.add_adapter("second", config)
    return model


def mixture(base: Any) -> Model:
    """LoRA and, trained beside it, LoHa."""
    torch.manual_seed(1)
    loha = LoHaConfig(r=2, target_modules=["up_proj"], init_weights=False)
    config = lora(init_lora_weights=False, lora_dropout=0.0)
    model = get_peft_model(peft.inject_adapter_in_model(loha, base, "loha"), config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "hada_" in name)
    return model


class Unknown(nn.Module, peft.tuners.tuners_utils.BaseTunerLayer):
    """Somebody else's adapter."""


def plain_lora(**options: Any) -> Attach:
    return lambda base: get_peft_model(base, lora(**options))


MODELS: dict[str, tuple[Attach, set[str]]] = {
    "none": (lambda base: base, set()),
    "lora": (plain_lora(), {"lora"}),
    "rslora": (plain_lora(use_rslora=True), {"lora"}),
    "pissa": (plain_lora(init_lora_weights="pissa"), {"lora"}),
    "dora": (plain_lora(use_dora=True), {"dora"}),
    "lora and dora": (lambda base: add(plain_lora()(base), lora(use_dora=True)), {"lora", "dora"}),
    "tokens beside lora": (
        plain_lora(trainable_token_indices=[3, 4]),
        {"lora", "trainable_tokens"},
    ),
    "mixed": (mixture, {"lora", "loha"}),
    "by transformers": (lambda base: base.add_adapter(lora()) or base, {"lora"}),
    "adalora": (lambda base: kinds.attach(base, "adalora"), {"adalora"}),
    "prompt": (lambda base: kinds.attach(base, "prompt_tuning"), {"prompt_tuning"}),
    "somebody else's": (lambda base: nn.Sequential(nn.Linear(2, 2), Unknown()), {"Unknown"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_kinds_of_a_model(name: str) -> None:
    make, expected = MODELS[name]
    base = small_base(quantize=False, dtype=FP32 if name == "pissa" else BF16)
    assert set(adapter_kinds(make(base))) == expected


def test_each_kind_of_a_mixture_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, model = (mixture(small_base(quantize=False)) for _ in range(2))
    with monkeypatch.context() as patch:
        on_record = Registry({"qwen2": Record("exact")}, {"loha": Record("refused", "because")})
        patch.setattr("poros.gates.registry.read_registry", lambda: on_record)
        with pytest.raises(UnsupportedModelError, match=r"loha .*because"):
            prepare_plain(model)
    expected = run(resident, autocast_dtype=BF16)
    assert_same_run(expected, run(prepare_plain(model), autocast_dtype=BF16))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_lora_outside_the_layers_alone(target: str) -> None:
    """With nothing to recompute, and with a gradient that passes through all layers."""
    expected, model = (with_lora(target_modules=[target])(small_base()) for _ in range(2))
    assert_same_run(run(expected), run(prepare_plain(model)))


def test_orthogonal_transformations_projected_in_the_forward_are_refused_in_time() -> None:
    """COFT edits its parameters in each forward, so a second one would not be the same."""
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.OFTConfig(oft_block_size=8, coft=True, eps=1e-3, target_modules=targets)
    expected, model = (get_peft_model(small_base(), config) for _ in range(2))
    prepare_plain(model)
    said = r"its own forward edits .*oft_R.* a second time.*coft=False.*poros\.restore"
    with pytest.raises(poros.RematerializationError, match=said):
        model.train()(**batches()[0])
    assert all(each.grad is None for each in model.parameters())
    logits = Case("", with_lora(), spec={"autocast_dtype": BF16}).logits
    assert same_bits(logits(model), logits(expected))
