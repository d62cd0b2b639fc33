"""Packs documents into rows, and checks that a model and its attention keep them apart.

A packed row has no attention mask but positions that begin anew with each document. From these
transformers makes the mask that keeps documents apart, for models that build their masks its way;
attention implementations that need no mask get the documents' ends (cu_seqlens).
Others see across: those with states that pass from token to token (Mamba), with positions of their
own (ALiBi), with masks of their own. Which is which is not looked up but tried, on a small random
model with the settings of the real one.
"""

import inspect
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from poros.errors import RecipeError, quoted

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

_LENGTHS = (5, 11, 1, 7)
"""Of the documents of the row that is tried, longer than the windows of the small model."""
_ROUNDING = 1e-4
"""By how much logits of the small model, in float32 and of order 1, may differ without another
document's doing: experts sum up tokens in groups, whose sizes change with the routing of others."""


def require_attention(name: str) -> None:
    """Refuse an attention implementation that transformers does not have.

    A name of a kernel on the hub, whose code would be fetched and run, is refused too.

    Raises:
        RecipeError: If it is none of those that are registered.
    """
    from transformers import AttentionInterface

    # Those with a bar are for generation alone.
    known = ["eager", *(each for each in AttentionInterface().valid_keys() if "|" not in each)]
    if name not in known:
        raise RecipeError(
            f"model.attention: expected one of {', '.join(sorted(known))}, found {quoted(name)}; "
            "for the default leave it out (--attention)"
        )


def takes_cu_seqlens(name: str | None) -> bool:
    """Whether an attention implementation takes the bounds of a packed row's documents.

    Flash attention is, and so is a registered function with a parameter ``cu_seq_lens_q``. Others
    read the mask that transformers makes from the position ids.
    """
    from transformers import AttentionInterface

    function = AttentionInterface().get(name)
    return "flash" in str(name) or (
        function is not None and "cu_seq_lens_q" in inspect.signature(function).parameters
    )


def keeps_apart(config: "PreTrainedConfig", attention: str | None = None) -> bool:
    """Whether no document of a packed row has an influence on another.

    Args:
        config: Of a causal language model. What cannot be built small counts as if it did not.
        attention: The implementation it trains with; None is transformers' choice. Flash attention
            does not run on the CPU: the default is tried in its place.
    """
    from poros.loaders.build import quiet

    with torch.random.fork_rng(devices=[]), quiet():
        torch.default_generator.manual_seed(0)
        try:
            model = _small(config, None if "flash" in str(attention) else attention)
        except Exception:  # of a configuration that the library does not know how to shrink
            return False
        return is_kept_apart(model)


def is_kept_apart(model: Any) -> bool:
    """Test whether documents of a row are independent in a model, by changing one."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(3, 3 + sum(_LENGTHS))[None] * 7 % (vocab_size - 3) + 3
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    start = 0
    options: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    if takes_cu_seqlens(model.config._attn_implementation):
        ends = torch.tensor((0, *accumulate(_LENGTHS)), dtype=torch.int32)
        options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        options |= {"max_length_q": max(_LENGTHS), "max_length_k": max(_LENGTHS)}
    model.eval()
    with torch.no_grad():
        before = model(input_ids=ids, **options).logits
        for length in _LENGTHS:
            changed = ids.clone()
            changed[0, start : start + length] = (ids[0, start : start + length] + 1) % vocab_size
            after = model(input_ids=changed, **options).logits
            differs = ((after - before).abs() > _ROUNDING).any(-1)[0]
            differs_inside = differs[start : start + length].clone()
            differs[start : start + length] = False
            if differs.any() or not differs_inside.all():
                return False
            start += length
    return True


def _small(config: "PreTrainedConfig", attention: str | None = None) -> Any:
    """Build a small random model of the same kind."""
    from poros.gates import tiny
    from poros.gates.multimodal import MULTIMODAL
    from poros.loaders.settings import model_class_of

    text, name = config.get_text_config(decoder=True), config.model_type
    if text is not config:
        (name,) = [name for name, row in MULTIMODAL.items() if row.model_type == config.model_type]
    whole = tiny.small_config(name, num_layers=4, hidden_size=64)
    small = whole.get_text_config(decoder=True)
    known = small.to_dict()
    for name, value in text.to_dict().items():
        # Sizes are its own; how it computes is the real one's.
        if isinstance(value, bool | str) and type(known.get(name)) is type(value):
            setattr(small, name, value)
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if kinds and getattr(small, "layer_types", None):
        num_layers = len(small.layer_types)
        small.layer_types = [kinds[layer % len(kinds)] for layer in range(num_layers)]
    model_class, whole = model_class_of(whole)
    return model_class._from_config(whole, dtype=torch.float32, attn_implementation=attention)


def pack(dataset: "Dataset", row_length: int) -> "Dataset":
    """Pack whole documents into rows of at most ``row_length`` tokens, by best fit (TRL)."""
    from trl import pack_dataset

    return pack_dataset(dataset, row_length, "bfd")
