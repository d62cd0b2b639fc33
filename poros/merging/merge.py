"""Merges an adapter into a checkpoint, with one shard at a time in memory."""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from poros.errors import PolicyError, StoreWriteError, UnsupportedModelError, quoted
from poros.io.writing import partial_folder, put_in_place, require_folder, writing
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.loaders.renaming import OwnName, own_names
from poros.loaders.settings import configuration, generation_settings, model_class_of
from poros.loaders.source import read_auxiliary_files
from poros.merging.adapter import Adapter
from poros.merging.base import open_base
from poros.merging.saved_adapter import SavedAdapter, adapter_folder
from poros.planning.meta_model import meta_model
from poros.utils.formatting import size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_NUM_BYTES = 4 * 10**9
_PEFT = "base_model.model."
"""Prefix of the model's names in an adapter's file."""
_INDEX = "model.safetensors.index.json"
_REMEDY = "check that configuration and weights belong together"


def merge(
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    shard_num_bytes: int = SHARD_NUM_BYTES,
    progress: Callable[[int, int], None] = lambda done, whole: None,
) -> Path:
    """Write the base of an adapter as a checkpoint with the adapter in its weights.

    Args:
        adapter: Its folder, or that of a run of ``poros finetune``.
        out: A folder that is not there yet.
        base: The checkpoint it was trained on, which is taken as it is, or the store made of it;
            None is the one that the adapter names. If Poros has noted which bytes that had
            (training from a store), they are compared, as they are with a store.
        dtype: Dtype of the written weights; None keeps that of each tensor of the checkpoint.
        shard_num_bytes: Approximate maximum size of a file of the result.
        progress: Is called with the bytes done and the bytes in all.

    Returns:
        ``out``, with configuration, tokenizer and chat template beside the weights.

    Exactness:
        The bits of PEFT's ``merge_and_unload`` on the same dense base in the same dtypes.

    Raises:
        CheckpointFormatError: If adapter or base are malformed, the base is no longer there or has
            other bytes than were trained on, or what comes out is not finite.
        PolicyError: If an argument makes no sense, or ``out`` is there.
        StoreWriteError: If there is not enough room on the disk, or it cannot be written to.
        UnsupportedModelError: If the adapter does not fit the base, or is of a kind that cannot be
            merged.

    Nothing is left of ``out`` then. What a merge into it left that was killed is removed.
    """
    target = Path(out)
    if os.path.lexists(target):
        raise PolicyError(
            f"out: expected a folder that does not exist yet, found {quoted(str(out))}"
        )
    saved = SavedAdapter(adapter_folder(Path(adapter)))
    with open_base(saved, base) as checkpoint:
        config: Any = configuration(checkpoint.path, checkpoint.texts, {})
        if getattr(config, "quantization_config", None):
            raise UnsupportedModelError(
                "base: expected the checkpoint that was quantized, in 16 or 32 bit, found a "
                "quantized one"
            )
        config.dtype = dtype or config.dtype or checkpoint.float_dtype()
        model_class, config = _class_of(config, saved)
        model = meta_model(config, None, config.dtype, model_class=model_class)
        own = own_names(model, checkpoint.entries)
        if saved.is_classifier:  # which has no head for tokens
            known = model.state_dict().keys()
            own = {name: each for name, each in own.items() if each.is_part or each.name in known}
        added = _head(saved, own, model)
        _require_like(checkpoint, own, model, added)
        plan = _Plan(checkpoint, own, Adapter(saved, model), dtype, added)
        shards = split_torch_state_dict_into_shards(plan.written, max_shard_size=shard_num_bytes)
        require_folder(target.parent, "out")
        with writing(target, (OSError, SafetensorError)), partial_folder(target) as partial:
            _require_room(target, shards.metadata["total_size"])
            _write(partial, plan, shards, progress)
            _write_small(partial, checkpoint, saved.folder, config)
            put_in_place(partial, target)
    return target


class _Plan:
    """The tensors of the result.

    Attributes:
        written: Those without memory, by the names of the checkpoint.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        own: dict[str, OwnName],
        adapter: Adapter,
        dtype: torch.dtype | None,
        added: dict[str, torch.Tensor],
    ) -> None:
        self._checkpoint, self._adapter, self._added = checkpoint, adapter, added
        self._own = {name: name if each.is_part else each.name for name, each in own.items()}
        self._own |= {name: name for name in added}
        missing = adapter.groups.keys() - set(self._own.values())
        if missing:
            raise UnsupportedModelError(
                f"base: expected the tensors that the adapter changes, found none of the name "
                f"{quoted(min(missing))} (stacked, renamed or tied to another?); merge it with "
                "PEFT's merge_and_unload"
            )
        self.written: dict[str, torch.Tensor] = {}
        self._groups: dict[str, list[str]] = {}
        for name, own_name in self._own.items():
            like = added[name] if name in added else checkpoint.entries[name]
            written = dtype if dtype and like.dtype.is_floating_point else like.dtype
            self.written[name] = torch.empty(like.shape, dtype=written, device="meta")
            self._groups.setdefault(adapter.groups.get(own_name, own_name), []).append(name)

    def made(self, name: str) -> dict[str, torch.Tensor]:
        """Make the written tensor of that name, and those that are merged with it."""
        group = self._adapter.groups.get(self._own[name])
        names = [name] if group is None else self._groups[group]
        base = {}
        for each in names:
            value = self._added[each] if each in self._added else self._checkpoint.fetch(each)
            base[self._own[each]] = value.to(self.written[each].dtype)
        if group is not None:
            base = self._adapter.merged(group, base)
        found = {each: base[self._own[each]].contiguous() for each in names}
        for each, value in found.items():
            if value.is_floating_point() and not bool(torch.isfinite(value.float()).all()):
                raise defect(
                    self._checkpoint.path,
                    f"expected finite weights with the adapter in them, in {value.dtype}, found "
                    "NaN or an infinity",
                    tensor=each,
                    remedy="check base and adapter, or give a dtype with a larger range (--dtype)",
                )
        return found


def _class_of(config: Any, saved: SavedAdapter) -> tuple[Any, Any]:
    """Choose the class of the model that was trained, and its configuration."""
    model_class, config = model_class_of(config, saved.auto_class)
    if saved.is_classifier:
        config.architectures = [model_class.__name__]
        if saved.num_labels is not None and saved.num_labels != config.num_labels:
            config.num_labels = saved.num_labels
    return model_class, config


def _head(
    saved: SavedAdapter, own: dict[str, OwnName], model: "PreTrainedModel"
) -> dict[str, torch.Tensor]:
    """Return a classifier's trained head, by its names in the model, if the base has none."""
    if not saved.is_classifier:
        return {}
    inner, there = f"{model.base_model_prefix}.", {each.name for each in own.values()}
    return {
        name: saved.weights[f"{_PEFT}{name}"].to(model.config.dtype)
        for name, _ in model.named_parameters()
        if not name.startswith(inner) and name not in there and f"{_PEFT}{name}" in saved.weights
    }


def _require_like(
    checkpoint: Checkpoint,
    own: dict[str, OwnName],
    model: "PreTrainedModel",
    added: Collection[str],
) -> None:
    """Refuse tensors of other shapes than the model's, whole numbers for weights, and a gap.

    Args:
        added: Names of what the checkpoint need not have.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    tensors = {**weights, **dict(model.named_buffers())}
    for name, each in own.items():
        if each.is_part or each.name not in tensors:
            continue
        entry, like = checkpoint.entries[name], tensors[each.name]
        if entry.shape != like.shape or entry.dtype.is_floating_point != like.is_floating_point():
            raise defect(
                entry.file,
                f"expected {like.dtype} of shape {tuple(like.shape)} as in the configuration, "
                f"found {entry.dtype} of shape {quoted(entry.shape)}",
                tensor=name,
                remedy=_REMEDY,
            )
    if any(each.is_part for each in own.values()):
        return  # what the model has by each name is known once pieces are put together
    # One of two that are tied is enough.
    found = {id(weights.get(each.name)) for each in own.values()}
    optional = model._keys_to_ignore_on_load_missing or ()
    for name, like in weights.items():
        is_there = name in added or id(like) in found
        if not is_there and not any(re.search(each, name) for each in optional):
            raise defect(
                checkpoint.path,
                "expected the tensors of the configuration, found none of that name",
                tensor=name,
                remedy=_REMEDY,
            )


def _write(
    folder: Path, plan: _Plan, shards: StateDictSplit, progress: Callable[[int, int], None]
) -> None:
    waiting: dict[str, torch.Tensor] = {}  # merged with tensors of an earlier file
    done = 0
    for file, names in shards.filename_to_tensors.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in waiting:
                waiting |= plan.made(name)
            tensors[name] = waiting.pop(name)
            done += tensors[name].nbytes
            progress(done, shards.metadata["total_size"])
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_small(
    folder: Path,
    checkpoint: Checkpoint,
    adapter: Path,
    config: Any,
) -> None:
    """Write configuration, tokenizer and template: the adapter's, where it has them."""
    config.save_pretrained(folder)
    if "generation_config.json" in checkpoint.texts:
        generation_settings(checkpoint.path, checkpoint.texts).save_pretrained(folder)
    small = read_auxiliary_files(checkpoint.path) | {
        name: content
        for name, content in read_auxiliary_files(adapter).items()
        if not name.lower().startswith(("readme", "licen", "notice"))
    }
    for name, content in small.items():
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)


def _require_room(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise StoreWriteError(
            f"out: expected {size(num_bytes)} free on the disk, found {size(free)}"
        )
