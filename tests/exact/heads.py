"""Heads and embeddings of small models, changed as PEFT and users change them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoHaConfig, LoraConfig, get_peft_model

from tests.loops import ON_HOST, batches, streamed

Model = Any
Change = Callable[[Model], Model]


def head_of(model: Model) -> torch.Tensor:
    weight: torch.Tensor = model.get_output_embeddings().weight
    return weight


def outputs(model: Model, **inputs: Any) -> Any:
    torch.manual_seed(5)
    return model(**{**batches()[1], **inputs})


def peft_model(model: Model, config: Any) -> Model:
    """The base of ``model`` with these adapters instead."""
    torch.manual_seed(3)
    return get_peft_model(model.unload(), config).train()


def with_lora(model: Model, **options: Any) -> Model:
    """On the head, unless ``options`` say otherwise."""
    usual = {"r": 4, "target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.05}
    return peft_model(model, LoraConfig(**{**usual, "init_lora_weights": False, **options}))


def added(model: Model, **options: Any) -> Model:
    """A second adapter of the head, which trains alone."""
    torch.manual_seed(4)
    usual = {"r": 2, "target_modules": ["lm_head"], "init_lora_weights": False}
    model.add_adapter("two", LoraConfig(**{**usual, **options}))
    model.set_adapter("two")
    return model


def saved_whole(model: Model, name: str = "lm_head") -> Model:
    return peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[name]))


def trained(model: Model) -> Model:
    head_of(model).requires_grad_(True)
    return model


def both_forms(model: Model) -> Model:
    """A trained bias beside a frozen weight."""
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 512, dtype=head.weight.dtype))
    return model


def with_loha(model: Model) -> Model:
    return peft_model(model, LoHaConfig(r=4, target_modules=["lm_head"], init_weights=False))


def with_a_loss_of_its_own(model: Model) -> Model:
    def loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))

    model.get_base_model().loss_function = loss
    return model


def with_a_forward_of_its_own(model: Model) -> Model:
    head = model.get_output_embeddings()
    head.forward = partial(type(head).forward, head)
    return model


def with_another_user(model: Model) -> Model:
    base = model.get_base_model()
    base.other = torch.nn.Linear(1, 1, bias=False)
    base.other.weight = base.lm_head.weight
    return model


def tied(model: Model) -> Model:
    base = model.get_base_model()
    base.model.embed_tokens.weight = base.lm_head.weight
    return model


def trained_embedding(model: Model) -> Model:
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def with_sliced_loss(model: Model, **policy: Any) -> Model:
    """Prepared, with its head in host memory."""
    return streamed(model, **{"slots": 2, **ON_HOST, **policy})
