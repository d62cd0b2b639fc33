"""Small adapters of every kind that the gate can prove, on any small model.

No adapter starts at zero, so that every gradient is non-zero. The table also has PEFT's own limits:
adapters that read the weights they adapt need a dense base, and some of those that PEFT keeps in
float32 need autocast around a bfloat16 base.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import UnsupportedModelError
from poros.model.adapter_kinds import adapter_kinds
from poros.model.vision import find_towers, is_router

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# Names of separate experts, in the releases that had them.
_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


@dataclass(frozen=True)
class _Config:
    """A configuration within one, by the name of its class in ``peft``."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """How the gate attaches one kind of adapters."""

    config: str
    """The class in ``peft``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: str | None = "linears"
    """Adapted modules: ``linears`` or ``norms`` of the layers, ``tokens``, None for no module."""
    dropout: str | None = None
    """Its option for dropout, if it has one."""
    rank: str | None = None
    """Its option for a rank, if that may be any number."""
    on_4bit: bool = True
    """Whether PEFT trains it on a 4-bit base."""
    without_autocast: bool = True
    """Whether PEFT trains it on a bfloat16 base outside autocast."""
    has_own_bits: bool = False
    """Whether our kernels compute it otherwise than PEFT; then the resident arm takes them too."""


_TOKENS = {"num_virtual_tokens": 4}
_CPT = {
    "cpt_token_ids": [3, 4, 5, 6],
    "cpt_mask": [1, 1, 1, 1],
    "cpt_tokens_type_mask": [1, 2, 3, 4],
}
_BLOCKS = _Config(
    "BdLoraConfig",
    {"target_modules_bd_a": ["q_proj", "up_proj"], "nblocks": 2, "match_strict": False},
)
_LORA = ("linears", "lora_dropout", "r")

KINDS: dict[str, Kind] = {
    "lora": Kind("LoraConfig", {}, *_LORA),
    "dora": Kind("LoraConfig", {"use_dora": True}, *_LORA, has_own_bits=True),
    "bdlora": Kind("LoraConfig", {"use_bdlora": _BLOCKS}, *_LORA, on_4bit=False),
    "velora": Kind(
        "LoraConfig",
        {"velora_config": _Config("VeloraConfig", {"num_groups": 8})},
        *_LORA,
        on_4bit=False,
    ),
    "monteclora": Kind(
        "LoraConfig", {"monteclora_config": _Config("MontecloraConfig")}, *_LORA, on_4bit=False
    ),
    "mica": Kind("LoraConfig", {"init_lora_weights": "mica"}, *_LORA, on_4bit=False),
    "kasa": Kind("LoraConfig", {"kasa_config": _Config("KasaConfig")}, *_LORA, on_4bit=False),
    "alora": Kind("LoraConfig", {"alora_invocation_tokens": [7]}, *_LORA),
    "adalora": Kind(
        "AdaLoraConfig",
        {"init_r": 6, "target_r": 2, "tinit": 0, "tfinal": 1, "total_step": 3},
        dropout="lora_dropout",
    ),
    "beft": Kind("BeftConfig"),
    "boft": Kind("BOFTConfig", {"boft_block_size": 4}, dropout="boft_dropout"),
    "c3a": Kind("C3AConfig", {"block_size": 8}, on_4bit=False),
    "deft": Kind("DeftConfig", rank="r", dropout="deft_dropout", on_4bit=False),
    "delora": Kind("DeloraConfig", rank="r", dropout="module_dropout", on_4bit=False),
    "fourierft": Kind("FourierFTConfig", {"n_frequency": 64}),
    "frod": Kind("FrodConfig", {"progressbar": False}, dropout="frod_dropout", on_4bit=False),
    "glora": Kind("GloraConfig", rank="r", on_4bit=False),
    "gralora": Kind("GraloraConfig", {"r": 8}, dropout="gralora_dropout", on_4bit=False),
    "hira": Kind("HiraConfig", rank="r", dropout="hira_dropout"),
    "hra": Kind("HRAConfig", {"r": 4}, on_4bit=False),
    "ia3": Kind("IA3Config", without_autocast=False),
    "lily": Kind("LilyConfig", rank="r"),
    "ln_tuning": Kind("LNTuningConfig", targets="norms"),
    "loha": Kind("LoHaConfig", rank="r", dropout="rank_dropout", on_4bit=False),
    "lokr": Kind("LoKrConfig", rank="r", dropout="rank_dropout", on_4bit=False),
    "miss": Kind("MissConfig", {"r": 8}, dropout="miss_dropout"),
    "oft": Kind("OFTConfig", {"oft_block_size": 8}, dropout="module_dropout"),
    "osf": Kind("OSFConfig", on_4bit=False),
    "peanut": Kind("PeanutConfig", rank="r", on_4bit=False),
    "psoft": Kind("PsoftConfig", {"r": 8}, dropout="psoft_dropout", on_4bit=False),
    "pvera": Kind("PveraConfig", rank="r", dropout="pvera_dropout", without_autocast=False),
    "randlora": Kind(
        "RandLoraConfig", rank="r", dropout="randlora_dropout", without_autocast=False
    ),
    "road": Kind("RoadConfig", {"group_size": 8}, without_autocast=False),
    "shira": Kind("ShiraConfig", {"r": 4, "random_seed": 0}),
    "supertuning": Kind("SupertuningConfig", on_4bit=False),
    "tinylora": Kind("TinyLoraConfig", {"u": 8}, dropout="tinylora_dropout", on_4bit=False),
    "trainable_tokens": Kind("TrainableTokensConfig", targets="tokens"),
    "unilora": Kind("UniLoraConfig", dropout="unilora_dropout"),
    "vblora": Kind(
        "VBLoRAConfig", {"num_vectors": 16, "vector_length": 8}, dropout="vblora_dropout"
    ),
    "vera": Kind("VeraConfig", rank="r", dropout="vera_dropout"),
    "waveft": Kind("WaveFTConfig", {"n_frequency": 64}),
    "prompt_tuning": Kind("PromptTuningConfig", _TOKENS, None),
    "p_tuning": Kind("PromptEncoderConfig", {**_TOKENS, "encoder_hidden_size": 16}, None),
    "cpt": Kind("CPTConfig", _CPT, None),
    "prefix_tuning": Kind("PrefixTuningConfig", _TOKENS, None),
    "cartridge": Kind("CartridgeConfig", _TOKENS, None),
}


def attach(
    base: "PreTrainedModel",
    kind: str = "lora",
    *,
    rank: int = 8,
    dropout: float = 0.0,
    seed: int = 0,
) -> "PeftModel":
    """Attach adapters of a kind, with seeded values that are not zero.

    Linear layers are adapted as in ``linears_in_layers``: for most families the seven projections
    (q, k, v, o, gate, up, down). Values are drawn on the CPU, so they are
    the same for every device. The caller's random state is left as it was.

    Args:
        kind: A name of ``KINDS``.
        rank, dropout: Ignored by kinds that have none.

    Raises:
        UnsupportedModelError: If there is no such kind, or the model has nothing that it adapts.
    """
    import peft

    row = kind_of(kind)
    options = dict(row.options)
    if row.rank is not None:
        options[row.rank] = rank
    if row.dropout is not None:
        options[row.dropout] = dropout
    if row.targets is not None:
        options["target_modules"] = targets = _TARGETS[row.targets](base)
        if row.config == "IA3Config":
            options["feedforward_modules"] = targets[::2]  # scaled before them, the others behind
    for option, value in options.items():
        if isinstance(value, _Config):
            options[option] = getattr(peft, value.name)(**value.options)
    if row.config == "LoraConfig":
        options["lora_alpha"] = 2 * rank
    if row.targets == "tokens":
        vocab_size = base.get_input_embeddings().weight.shape[0]
        options["token_indices"] = list(range(3, vocab_size))
    config = getattr(peft, row.config)(task_type="CAUSAL_LM", **options)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PeftModel = peft.get_peft_model(base, config)
    if kind not in (attached := adapter_kinds(model)):
        # PEFT passes over options that a layer does not know, and attaches something else.
        raise UnsupportedModelError(
            f"expected adapters of kind {kind!r}, found that PEFT attached "
            f"{', '.join(attached.values())} to {type(base).__name__} in its place"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            drawn = torch.randn(parameter.shape, generator=generator)
            if "lora_A" in name or "lora_B" in name:
                scale = parameter.shape[-1] ** -0.5 if "lora_A" in name else 0.02
                parameter.copy_(scale * drawn)
            else:
                parameter.add_(0.05 * drawn.to(parameter))
    return model


def kind_of(name: str) -> Kind:
    """The row of a kind.

    Raises:
        UnsupportedModelError: If there is none.
    """
    if name not in KINDS:
        raise UnsupportedModelError(
            f"expected a kind of adapter that the gates can attach, found {name!r}; they know "
            f"{', '.join(KINDS)}"
        )
    return KINDS[name]


def linears_in_layers(base: "PreTrainedModel") -> list[str]:
    """Name the linear layers of the decoder blocks that PEFT can adapt; last names if they do."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.pytorch_utils import Conv1D

    modules = dict(base.named_modules())
    # Not routers: some are linear layers that return a tuple.
    linears = [
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear | Conv1D) and not is_router(module)
    ]
    towers = tuple(f"{name}." for name in find_towers(base))
    layers = tuple(
        f"{name}."
        for name, module in modules.items()
        if isinstance(module, GradientCheckpointingLayer) and not name.startswith(towers)
    )
    # Without such layers: blocks are numbered; the head and other single layers are not.
    inside = [
        name
        for name in linears
        if (name.startswith(layers) if layers else any(map(str.isdigit, name.split("."))))
    ]
    # PEFT takes the names of separate experts for the fused parameters that replaced them.
    if any(
        parameter.dim() == 3
        for name, parameter in base.named_parameters()
        if name.startswith(layers)
    ):
        inside = [name for name in inside if name.split(".")[-1] not in _EXPERTS]
    # PEFT refuses it: a state-space mixer reads this weight without calling the module.
    mixers = tuple(name.removesuffix("conv1d") for name in modules if name.endswith(".conv1d"))
    inside = [
        name for name in inside if not (name.endswith(".out_proj") and name.startswith(mixers))
    ]
    if not inside:
        raise UnsupportedModelError(
            f"expected linear layers in the decoder blocks, found {linears or 'no linear'} in "
            f"{type(base).__name__}"
        )
    last_names = {name.split(".")[-1] for name in inside}
    # A last name may also be that of a linear layer outside, or of fused experts' parameters.
    others = {*linears, *(name for name, _ in base.named_parameters())} - set(inside)
    others |= {name for name in modules if name.startswith(towers)}
    if any(name.split(".")[-1] in last_names for name in others):
        return sorted(inside)
    return sorted(last_names)


def _norms(base: "PreTrainedModel") -> list[str]:
    """Name the norms: modules that hold one vector of weights and nothing else but its bias."""
    norms = [
        name
        for name, module in base.named_modules()
        if set(module._parameters) <= {"weight", "bias"}
        and getattr(module._parameters.get("weight"), "ndim", 0) == 1
        and not module._modules
    ]
    if not norms:
        raise UnsupportedModelError(f"expected norms in {type(base).__name__}, found none")
    return norms


def _tokens(base: "PreTrainedModel") -> list[str]:
    embedding = base.get_input_embeddings()
    return [name for name, module in base.named_modules() if module is embedding]


_TARGETS: dict[str, Callable[["PreTrainedModel"], list[str]]] = {
    "linears": linears_in_layers,
    "norms": _norms,
    "tokens": _tokens,
}
