"""``load``: a checkpoint in host memory, ready to be streamed, with nothing of it on the GPU."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from poros.config import parse_num_bytes
from poros.errors import PolicyError, StoreWriteError, quoted
from poros.host.disk import DiskStore, watch_saving
from poros.host.layout import BlockLayout
from poros.host.store import HostStore, attach_store
from poros.kernels.nf4 import QUANT_TYPES
from poros.loaders.build import ONE_AT_A_TIME, fill, quiet
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.loaders.options import (
    UNSET,
    LoadOptions,
    Unset,
    device_name,
    dtype_name,
    loadable_dtype,
    quantizing_device,
)
from poros.loaders.quantize import Quantizer
from poros.loaders.renaming import require_floats, require_whole_experts, without_towers
from poros.loaders.settings import (
    configuration,
    generation_settings,
    model_class_of,
    refuse_classifier,
    stored_quantization,
)
from poros.loaders.slab_writer import Allocate, SlabWriter
from poros.loaders.source import CONFIG, GENERATION, commit_of, read_auxiliary_files
from poros.loaders.store import About, OpenStore, is_store, open_store
from poros.loaders.store_reader import StoreReader, contents
from poros.model.inspect import require_language_model
from poros.model.origin import Origin, origin_of, put_origin
from poros.utils.logging_setup import show_info_by_default
from poros.utils.versions import library_versions

if TYPE_CHECKING:
    from transformers import (
        BitsAndBytesConfig,
        GenerationConfig,
        PreTrainedModel,
    )


def load(
    source: str | os.PathLike[str],
    *,
    quantization: "str | BitsAndBytesConfig | Unset | None" = UNSET,
    dtype: torch.dtype | str | Unset = UNSET,
    device: torch.device | str | None = None,
    store: str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    vision: str | None = None,
    auto_class: type | str | None = None,
    **from_pretrained_kwargs: Any,
) -> "PreTrainedModel":
    """Load a language model into host memory, for ``get_peft_model`` and ``poros.prepare``.

    The result is an ordinary transformers model on the CPU. The tensors of each decoder layer are
    in one slab of host memory, from which ``poros.prepare`` streams them without another copy.
    Weights are quantized in pieces on ``device``; a checkpoint that is already 4-bit is loaded as
    it is.

    Args:
        source: A folder, one ``.safetensors`` file with its ``config.json``, the name of a hub
            repository, or a store on disk, which is opened as it is.
        quantization: ``"nf4"`` or ``"fp4"`` (with double quantization and ``dtype`` as the compute
            dtype), a 4-bit ``BitsAndBytesConfig``, or None for dense weights. The default is
            ``"nf4"``, or the format of a 4-bit checkpoint or store; another one is refused there.
        dtype: Dtype of the tensors that are not quantized. The default is bfloat16, or that of the
            store; ``"auto"`` is the checkpoint's own, or that of the store too.
        device: Device that quantizes; None is the current GPU, or the CPU if there is none.
        store: Folder for the quantized base on disk. If it does not exist, the checkpoint is
            quantized into it, which takes little memory; the model is then read from there, and
            ``source`` is only compared. None keeps nothing on disk.
        host_budget: Host memory for the layers, in bytes or as text such as ``"24GiB"``. As many of
            the first layers as fit are kept in memory; the others stay in the store's file, from
            which training reads them ahead. Needs a store. None keeps all layers in memory.
        vision: For a checkpoint that also takes images or sound: ``"keep"`` its towers, quantized
            and frozen like the rest, on the device; or ``"drop"`` them, for text alone. The names
            of all other tensors stay. The default is ``"keep"``, or that of the store.
        auto_class: The class of transformers, or its name, whose ``from_pretrained`` this call
            replaces: ``AutoModelForSequenceClassification`` for reward models (``num_labels=1``)
            and classifiers, whose head is drawn from the CPU's random state if the checkpoint has
            none; ``AutoModel`` for hidden states alone, as embedding models need. The default is a
            language model, or what the store was made for.
        **from_pretrained_kwargs: Arguments of ``from_pretrained``: ``revision``, ``cache_dir``,
            ``token``, ``local_files_only``, ``force_download``, ``attn_implementation`` and other
            fields of the configuration. Arguments that cannot be honoured are refused.

    Returns:
        The model in evaluation mode, as ``from_pretrained`` returns it. Its name (``name_or_path``)
        is the absolute path of the checkpoint, of a store's too, or its name on the hub, so that
        adapters name a base that PEFT, vLLM and ``poros merge`` can open from any folder.

    Exactness:
        Every byte of every tensor equals that of ``from_pretrained`` with the same options and a
        4-bit ``BitsAndBytesConfig`` on the device that quantizes; on a CPU, with the same number of
        threads.

    Raises:
        CheckpointFormatError: If the checkpoint is malformed or does not fit its configuration.
        HostMemoryError: If the model does not fit in host memory; nothing has been read then.
        PolicyError: If an option cannot be honoured, or the store was made with others.
        StoreWriteError: If the store cannot be written; it is removed.
        UnsupportedModelError: If the source is no causal language model, transformers has no model
            of the class that was asked for, it has no decoder layers that can be streamed, has an
            adapter beside it, or is quantized in another way.

    In each case no part of the model remains in memory.

    Source:
        Poros technical report, section 4.2.
    """
    show_info_by_default()
    others = from_pretrained_kwargs
    options = LoadOptions.of(quantization, dtype, device, others, vision, auto_class)
    options.refuse_for_a_folder(source)
    budget = (
        None if host_budget is None else parse_num_bytes(host_budget, "host_budget", at_least=0)
    )
    # Tensors made under inference mode could not take part in training later.
    with torch.inference_mode(False):
        if is_store(source):
            if store is not None:
                raise PolicyError(
                    "store: expected none with a source that is one, found "
                    f"{quoted(os.fspath(store))}"
                )
            return _open(source, budget, options)
        if store is None and budget is not None:
            raise PolicyError(
                "host_budget: expected a store on disk for the layers beyond it, found none; pass "
                "store=, a folder on a fast disk"
            )
        loader = _CheckpointLoader(source, options, quantizing_device(device))
        if store is None:
            return loader.into_memory()
        place = loader.into_store(store)
        model = _open(store, budget, options)
    model.name_or_path = model.config.name_or_path = place.source
    made = origin_of(model) or place  # the bytes are those of the store, wherever it was made
    put_origin(model, replace(made, source=place.source, revision=place.revision))
    return model


class _CheckpointLoader:
    """Loads one checkpoint into memory or into a store."""

    def __init__(
        self,
        source: "str | os.PathLike[str]",
        options: LoadOptions,
        device: torch.device,
    ) -> None:
        self._source = source
        self._options = options
        self._quantizer = Quantizer(device)

    def into_memory(self) -> "PreTrainedModel":
        with self._checkpoint() as checkpoint:
            model, slab_writer, *_ = self._read(checkpoint)
            origin = self._origin(checkpoint)
        store = slab_writer.store
        store.fallbacks += slab_writer.fallbacks
        model.name_or_path = model.config.name_or_path = origin.source
        put_origin(model, origin)
        attach_store(model, store)
        return model

    def into_store(self, directory: "str | os.PathLike[str]") -> Origin:
        """Write the store unless it exists, of this checkpoint; return where that lies now."""
        if not is_store(directory):
            try:
                return self._write_store(directory)
            except StoreWriteError:
                if not is_store(directory):
                    raise
                # Another process has written it meanwhile.
        with self._checkpoint() as checkpoint, open_store(directory) as opened:
            made = opened.about.origin
            if made.seen != checkpoint.seen():
                found = checkpoint.fingerprint()
                if made.fingerprint != found:
                    raise defect(
                        opened.path,
                        f"expected a store of the checkpoint {found}, found one of "
                        f"{quoted(made.fingerprint)}",
                        remedy="open it without a source, or write a store of this checkpoint "
                        "elsewhere",
                    )
            return self._origin(checkpoint)

    def _write_store(self, directory: "str | os.PathLike[str]") -> Origin:
        """Write the layers to a store on disk; only the rest of the model is in memory."""
        from poros.loaders.store_writer import StoreWriter

        with ExitStack() as stack:
            hashing = stack.enter_context(ThreadPoolExecutor(1))  # ends when the checkpoint closes
            checkpoint = stack.enter_context(self._checkpoint())
            writers: list[StoreWriter] = []

            def allocate(layouts: Sequence[BlockLayout]) -> HostStore:
                writers.append(stack.enter_context(StoreWriter(directory, layouts)))
                return writers[0].host

            files = {**read_auxiliary_files(checkpoint.path), **checkpoint.texts}
            # What is hashed comes from the cache that loading fills, or the other way round.
            fingerprint = hashing.submit(checkpoint.fingerprint)
            model, slab_writer, used, dtype = self._read(checkpoint, allocate)
            rest, names = contents(model, slab_writer)
            origin = self._origin(checkpoint)
            about = About(
                origin=replace(origin, fingerprint=fingerprint.result(), seen=checkpoint.seen()),
                quantization=used and used.to_dict(),
                is_prequantized=used is not None and model.hf_quantizer.pre_quantized,
                dtype=dtype_name(dtype),  # type: ignore[arg-type]
                vision=self._options.vision or "keep",  # type: ignore[arg-type]
                auto_class=self._options.auto_class,  # type: ignore[arg-type]
                num_labels=getattr(model.config, "num_labels", None),
                **names,
                versions=library_versions("torch", "transformers", "bitsandbytes"),
                device=device_name(self._quantizer.device),
                num_threads=torch.get_num_threads(),
            )
            writers[0].commit(rest, about, files)
            return origin

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self._source, self._options.hub)

    def _origin(self, checkpoint: Checkpoint) -> Origin:
        """Say where the checkpoint lies; nothing is hashed."""
        source = os.fspath(self._source)
        if os.path.lexists(source):
            return Origin(os.path.abspath(source))
        return Origin(source, commit_of(checkpoint.path) or self._options.hub.get("revision"))

    def _read(
        self, checkpoint: Checkpoint, allocate: "Allocate | None" = None
    ) -> "tuple[PreTrainedModel, SlabWriter, BitsAndBytesConfig | None, torch.dtype]":
        """Read the model; return it, its slabs, the quantization of its weights, and its dtype."""
        from poros.loaders.hf_quantizer import clean, reading_into

        # Everything about the settings is decided before a weight is read.
        options, path, texts = self._options, checkpoint.path, checkpoint.texts
        config = configuration(path, texts, options.fields)
        stored = stored_quantization(path, config)
        if options.auto_class is None:
            refuse_classifier(config, path)
        model_class, config = model_class_of(config, options.auto_class)
        require_language_model(model_class.__name__, config)
        if options.dtype == "auto":
            found = getattr(config, "dtype", None) or checkpoint.float_dtype()
            options = replace(options, dtype=loadable_dtype(found))
        if stored is not None:
            options.require_format(stored, quoted(os.fspath(path)))
        dtype = options.chosen_dtype
        used = stored or options.wanted(dtype)
        generation = generation_settings(path, texts)
        require_whole_experts(checkpoint)
        names, is_dropping = None, options.vision == "drop"
        if is_dropping:
            with ONE_AT_A_TIME:
                names = without_towers(model_class, config, checkpoint.entries)
        writer = SlabWriter(path, self._quantizer, allocate, drops_towers=is_dropping)
        slices = checkpoint.slices(names)
        arguments = {"config": config, "dtype": dtype}
        is_quantized = stored is not None
        with ONE_AT_A_TIME, reading_into(writer, used, is_quantized=is_quantized) as quantization:
            model = fill(model_class, writer, quantization, slices, arguments)
        clean(model)
        require_floats(checkpoint, model, writer.floats)
        _finish(model, writer, generation)
        return model, writer, used, dtype


def _finish(model: "PreTrainedModel", writer: SlabWriter, generation: "GenerationConfig") -> None:
    writer.finish(model)
    if model.can_generate():
        model.generation_config = generation


def _open(
    directory: "str | os.PathLike[str]",
    budget: int | None,
    options: LoadOptions,
) -> "PreTrainedModel":
    """Open a store as a model: its first layers in new memory, the others in the file."""
    from poros.loaders.hf_quantizer import clean, reading_into

    with open_store(directory) as opened:
        about = opened.about
        options.require_store(about, quoted(os.fspath(directory)))
        used = _quantization_of(opened)
        kept = opened.manifest.files.keys() & {CONFIG, GENERATION}
        texts = {name: opened.text(name) for name in kept}
        fields = dict(options.fields)
        if about.auto_class == "AutoModelForSequenceClassification":
            fields.setdefault("num_labels", about.num_labels)  # of its head
        config = configuration(opened.path, texts, fields)
        stored_quantization(opened.path, config)
        model_class, config = model_class_of(config, about.auto_class)
        generation = generation_settings(opened.path, texts)
        reader = StoreReader(opened, budget)
        with ONE_AT_A_TIME, quiet(), reading_into(reader, used) as quantization:
            arguments = {"config": config, "dtype": getattr(torch, about.dtype)}
            model = fill(model_class, reader, quantization, reader.placeholders(), arguments)
        clean(model)
        if used is not None:
            model.hf_quantizer.pre_quantized = about.is_prequantized
        _finish(model, reader, generation)
    # The former is what PEFT takes for the base of an adapter. The tokenizer, which others look for
    # by the name in the configuration, lies in the store.
    model.name_or_path, model.config.name_or_path = opened.origin.source, os.fspath(directory)
    put_origin(model, opened.origin)
    attach_store(model, reader.store)
    if isinstance(reader.store, DiskStore):
        watch_saving(model, reader.store)
    return model


def _quantization_of(opened: OpenStore) -> "BitsAndBytesConfig | None":
    """Return the quantization of a store, which has a configuration too."""
    from transformers import BitsAndBytesConfig

    said = opened.about.quantization
    try:
        used = None if said is None else BitsAndBytesConfig.from_dict(said)
        is_known = used is None or used.bnb_4bit_quant_type in QUANT_TYPES
        if not is_known or CONFIG not in opened.manifest.files:
            raise ValueError("another quantization, or no configuration")
    except Exception as error:
        raise defect(
            opened.path,
            f"expected how it was made, found {quoted(error)}",
            remedy="write the store again",
        ) from error
    return used
