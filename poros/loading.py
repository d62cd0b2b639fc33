"""``load``: a checkpoint in host memory, ready to be streamed, with nothing of it on the GPU."""

import copy
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.config import parse_num_bytes
from poros.discover import find_layers
from poros.disk import DiskStore
from poros.errors import PolicyError, StoreWriteError, UnsupportedModelError
from poros.host import HostStore, leave_store
from poros.layout import PAGE_NUM_BYTES, BlockLayout, align, slab_offsets
from poros.loaders.build import (
    add_generation_config,
    configuration,
    fill,
    model_class_of,
    progress,
    quiet,
    stored_quantization,
)
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.header import defect
from poros.loaders.intake import Allocate, Format, Intake
from poros.loaders.kept import KeptIntake, contents, small_files
from poros.loaders.quantize import Quantizer
from poros.loaders.store import OpenStore, is_store, open_store
from poros.memory import require_host_memory
from poros.saving import watch_saving

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_HUB_OPTIONS = ("revision", "cache_dir", "token", "local_files_only")

# poros.load has answers of its own to them.
_OWN_OPTIONS = frozenset(
    (
        "device_map",
        "gguf_file",
        "ignore_mismatched_sizes",
        "max_memory",
        "offload_folder",
        "output_loading_info",
        "state_dict",
        "torch_dtype",
    )
)


def load(
    source: str | os.PathLike[str],
    *,
    quantization: "str | BitsAndBytesConfig | None" = "nf4",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    store: str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    allow_nonfinite: bool = False,
    **from_pretrained_kwargs: Any,
) -> "PreTrainedModel":
    """Load a causal language model into host memory, for ``get_peft_model`` and ``poros.prepare``.

    The result is an ordinary transformers model on the CPU. The tensors of its decoder layers lie
    in one slab of host memory per layer, from which ``poros.prepare`` streams them without copying
    them once more. Weights are quantized in pieces on ``device``; a checkpoint that is 4-bit
    already is loaded as it is.

    Args:
        source: A folder, one ``.safetensors`` file with its ``config.json``, the name of a
            repository of the hub; or a store on disk, which is opened as it is.
        quantization: ``"nf4"`` or ``"fp4"`` (with double quantization and ``dtype`` as the compute
            dtype), a 4-bit ``BitsAndBytesConfig``, or None for dense weights.
        dtype: Of everything that is not quantized.
        device: Where to quantize; None is the current GPU, or the CPU if there is none.
        store: A folder for the quantized base on disk. If there is none yet, the checkpoint is
            quantized into it, which takes little memory; then the model is read from there, and
            ``source`` is only compared. None keeps nothing on disk.
        host_budget: Host memory for the layers, in bytes or such as ``"24GiB"``. The first layers
            lie in memory as far as they fit into it; the others stay in the store's file, from
            which they are read ahead during training. Needs a store. None is all of them.
        allow_nonfinite: Load weights with NaN and infinities instead of refusing them.
        **from_pretrained_kwargs: Of ``AutoModelForCausalLM.from_pretrained``, such as ``revision``
            or ``attn_implementation``, as far as they do not say where tensors go.

    Returns:
        The model in evaluation mode, as ``from_pretrained`` returns it.

    Exactness:
        Every byte of every tensor equals that of ``from_pretrained`` with the same options and a
        4-bit ``BitsAndBytesConfig`` on the device that quantizes; on a CPU, with the same number of
        threads.

    Raises:
        CheckpointFormatError: If the checkpoint is malformed or does not fit its configuration.
        HostMemoryError: If the model does not fit in host memory; nothing has been read then.
        PolicyError: If an option cannot work, or the store was made with others.
        StoreWriteError: If the store cannot be written; nothing of it is left.
        UnsupportedModelError: If it is no causal language model, or quantized in another way.

        In each case nothing of the model is left.

    Source:
        Poros technical report, section 4.2.
    """
    options = dict(from_pretrained_kwargs)
    _refuse_own(options)
    budget = (
        None if host_budget is None else parse_num_bytes(host_budget, "host_budget", at_least=0)
    )
    # Tensors made under inference mode could not take part in training later.
    with torch.inference_mode(False):
        if is_store(source):
            if store is not None:
                raise PolicyError(
                    f"store: expected none with a source that is one, found {store!r}"
                )
            for key in (*_HUB_OPTIONS, "quantization_config"):
                options.pop(key, None)
            return _open(source, budget, options, allow_nonfinite)
        if store is None and budget is not None:
            raise PolicyError(
                "host_budget: expected a store on disk for the layers beyond it, found none; pass "
                "store=, a folder on a fast disk"
            )
        wanted = _bits_and_bytes(options.pop("quantization_config", quantization), dtype)
        on = _quantizing_device(device)
        reading = _Reading(source, wanted, dtype, on, allow_nonfinite, options)
        if store is None:
            return reading.into_memory()
        reading.into_store_unless_there(store)
        model = _open(store, budget, options, allow_nonfinite)
    model.name_or_path = model.config.name_or_path = os.fspath(source)
    return model


class _Reading:
    """One checkpoint on its way into memory or into a store."""

    def __init__(
        self,
        source: "str | os.PathLike[str]",
        wanted: "BitsAndBytesConfig | None",
        dtype: torch.dtype,
        device: torch.device,
        allow_nonfinite: bool,
        options: dict[str, Any],
    ) -> None:
        self._source = source
        self._wanted = wanted
        self._dtype = dtype
        self._quantizer = Quantizer(device, allow_nonfinite=allow_nonfinite)
        self._hub = {key: options.pop(key) for key in _HUB_OPTIONS if key in options}
        self._options = options

    def into_memory(self) -> "PreTrainedModel":
        """The model, in new memory."""
        with Checkpoint.open(self._source, **self._hub) as checkpoint:
            try:
                model, intake, _ = self._read(checkpoint)
            except _NotStreamableError as error:
                model = self._load_standard(checkpoint, error)
                store = HostStore([], fallbacks=[f"loaded by transformers: {error}"])
            else:
                store = intake.finished
                store.fallbacks += intake.fallbacks
        model.name_or_path = model.config.name_or_path = os.fspath(self._source)
        leave_store(model, store)
        return model

    def into_store_unless_there(self, directory: "str | os.PathLike[str]") -> None:
        """The same, unless it is in that store already; refuse a store of something else."""
        from poros.loaders.partial import remove_stale

        remove_stale(Path(directory).resolve())
        if not is_store(directory):
            try:
                self.into_store(directory)
                return
            except StoreWriteError:
                if not is_store(directory):
                    raise
                # Another process has written it meanwhile.
        self.require_made_of_it(directory)

    def into_store(self, directory: "str | os.PathLike[str]") -> Path:
        """The model, in a store on disk; in memory is only what lies outside its layers."""
        from poros.loaders.writer import StoreWriter

        with ExitStack() as stack:
            hashing = stack.enter_context(ThreadPoolExecutor(1))  # ends when the checkpoint closes
            checkpoint = stack.enter_context(Checkpoint.open(self._source, **self._hub))
            writers: list[StoreWriter] = []

            def allocate(layouts: Sequence[BlockLayout]) -> HostStore:
                writers.append(stack.enter_context(StoreWriter(directory, layouts)))
                return writers[0].host

            # What is hashed comes from the cache that loading fills, or the other way round.
            fingerprint = hashing.submit(checkpoint.fingerprint)
            model, intake, used = self._read(checkpoint, allocate)
            rest, names = contents(model, intake)
            about = {
                "source": fingerprint.result(),
                "source_seen": checkpoint.seen(),
                "quantization": used and used.to_dict(),
                "is_prequantized": used is not None and model.hf_quantizer.pre_quantized,
                "dtype": _name(self._dtype),
                "allow_nonfinite": self._quantizer.allow_nonfinite,
                **names,
                **_maker(self._quantizer.device),
            }
            return writers[0].commit(rest, about, small_files(checkpoint.path))

    def require_made_of_it(self, directory: "str | os.PathLike[str]") -> None:
        """Refuse a store of another checkpoint, or one made with other options."""
        with Checkpoint.open(self._source, **self._hub) as checkpoint, open_store(directory) as it:
            about = it.manifest.about
            if about.get("source_seen") != checkpoint.seen():
                it.require_source(checkpoint.fingerprint())
        expected = {
            "quantization": self._wanted and self._wanted.to_dict(),
            "dtype": _name(self._dtype),
        }
        for name, value in expected.items():
            is_asked = name != "quantization" or not about.get("is_prequantized")
            if is_asked and about.get(name) != value:
                raise PolicyError(
                    f"store: expected one with {name} {value}, found {directory} with "
                    f"{about.get(name)}; choose another folder, or pass what it was made with"
                )

    def _read(
        self, checkpoint: Checkpoint, allocate: "Allocate | None" = None
    ) -> "tuple[PreTrainedModel, Intake, BitsAndBytesConfig | None]":
        from poros.loaders.seam import clean, reading_into

        config, options = configuration(checkpoint.path, self._options)
        found = stored_quantization(checkpoint.path, config)
        if (
            found is not None
            and self._wanted is not None
            and _format(found) != _format(self._wanted)
        ):
            logger.warning(
                "poros: %s is quantized already (%s); it is loaded as it is, not as %s",
                self._source,
                _format(found),
                _format(self._wanted),
            )
        used = copy.deepcopy(found or self._wanted)
        model_class, config = model_class_of(config)
        intake = Intake(
            checkpoint.path,
            find_layers,
            self._quantizer,
            _format(used),
            checkpoint.owns,
            allocate,
        )
        with (
            progress(checkpoint) as (slices, after_each),
            reading_into(
                intake, used, is_quantized=found is not None, after_each=after_each
            ) as quantization,
        ):
            options = {**options, "config": config, "dtype": self._dtype}
            try:
                model = fill(model_class, intake, quantization, slices, options)
            except UnsupportedModelError as error:  # of the plan
                raise _NotStreamableError(str(error), intake.num_bytes) from error
        clean(model)
        # A file that was cut off would end the process when what is left of it is copied.
        checkpoint.check_unchanged()
        intake.finish(model)
        checkpoint.check_unchanged()
        add_generation_config(model, checkpoint.path, options)
        return model, intake, used

    def _load_standard(
        self, checkpoint: Checkpoint, why: "_NotStreamableError"
    ) -> "PreTrainedModel":
        """What transformers does without an intake, loudly."""
        from transformers import AutoModelForCausalLM

        logger.warning(
            "poros: %s cannot be streamed (%s). transformers loads it, into about %.2f GB of host "
            "memory; poros.prepare will refuse it",
            self._source,
            why,
            why.num_bytes / 1e9,
        )
        require_host_memory(why.num_bytes, f"the weights of {self._source}")
        options = dict(self._options)
        if self._wanted is not None:
            options["quantization_config"] = copy.deepcopy(self._wanted)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=self._dtype,
            device_map={"": "cpu"},
            local_files_only=True,
            **options,
        )
        return model


class _NotStreamableError(UnsupportedModelError):
    """A model that transformers can load and that has no layers to stream."""

    def __init__(self, why: str, num_bytes: int) -> None:
        super().__init__(why)
        self.num_bytes = num_bytes


def _open(
    directory: "str | os.PathLike[str]",
    budget: int | None,
    options: dict[str, Any],
    allow_nonfinite: bool,
) -> "PreTrainedModel":
    """The model of a store, its first layers in new memory and the others in the file."""
    from transformers import BitsAndBytesConfig

    from poros.loaders.seam import clean, reading_into

    with open_store(directory) as opened:
        about = opened.manifest.about
        try:
            dtype = getattr(torch, about["dtype"])
            used = about["quantization"] and BitsAndBytesConfig.from_dict(about["quantization"])
            is_finite = about["allow_nonfinite"] is False
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise defect(
                opened.path,
                f"expected how it was made, found {error!r}",
                remedy="write the store again",
            ) from error
        if not (is_finite or allow_nonfinite):
            raise PolicyError(
                f"allow_nonfinite: expected a store of finite weights, found {directory}, which "
                "was written with allow_nonfinite=True; pass it here too, or write the store again"
            )
        config, options = configuration(opened.path, options)
        stored_quantization(opened.path, config)
        model_class, config = model_class_of(config)
        host = _slabs(opened, budget)
        intake = KeptIntake(opened, host, find_layers, _format(used))
        stand_ins = {name: torch.empty(0, dtype=dtype) for name in intake.names()}
        with quiet(), reading_into(intake, used) as quantization:
            options = {**options, "config": config, "dtype": dtype}
            model = fill(model_class, intake, quantization, stand_ins, options)
        clean(model)
        if used is not None:
            model.hf_quantizer.pre_quantized = about["is_prequantized"]
        opened.check()  # what follows may write to slabs
        intake.finish(model)
        is_there = "generation_config.json" in opened.manifest.files
        add_generation_config(model, opened.path, options, is_there=is_there)
    model.name_or_path = model.config.name_or_path = os.fspath(directory)
    leave_store(model, host)
    if isinstance(host, DiskStore):
        watch_saving(model, host)
    return model


def _slabs(opened: OpenStore, budget: int | None) -> HostStore:
    """The slabs of a store: in memory those that ``budget`` has room for, the others mapped."""
    layouts = opened.layouts
    starts = slab_offsets(layouts)
    ends = [
        start + align(each.num_bytes, PAGE_NUM_BYTES)
        for start, each in zip(starts, layouts, strict=True)
    ]
    first = len(layouts) if budget is None else sum(end <= budget for end in ends)
    require_host_memory(ends[first - 1] if first else 0, f"the first layers of {opened.path}")
    resident = HostStore.allocate(layouts[:first])
    opened.read_into(resident)
    if first == len(layouts):
        return resident
    logger.warning(
        "poros: %d of %d layers stay on the disk, in %s: training reads %.2f GB from there in each "
        "forward and again in each backward pass",
        len(layouts) - first,
        len(layouts),
        opened.slabs,
        (ends[-1] - (ends[first - 1] if first else 0)) / 1e9,
    )
    return DiskStore.over_file(
        resident,
        opened.slabs,
        opened.data_offset,
        layouts,
        opened.manifest.slab_sha256,
        opened.identity,
    )


def _maker(device: torch.device) -> dict[str, Any]:
    """Who makes a store: bytes may depend on each of these."""
    import bitsandbytes
    import transformers

    from poros import __version__

    is_gpu = device.type == "cuda"
    return {
        "versions": {
            "poros": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "bitsandbytes": bitsandbytes.__version__,
        },
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "num_threads": torch.get_num_threads(),
    }


def _refuse_own(options: dict[str, Any]) -> None:
    refused = sorted(_OWN_OPTIONS & options.keys())
    if refused:
        raise PolicyError(
            f"{', '.join(refused)}: expected options of from_pretrained that poros.load has no "
            "answer of its own to; leave them out, and see dtype, device, store and host_budget"
        )
    if options.pop("trust_remote_code", False):
        raise PolicyError(
            "trust_remote_code: expected False, found True: code from a checkpoint is never run; "
            "install a release of transformers that knows the model"
        )


def _bits_and_bytes(
    quantization: "str | BitsAndBytesConfig | None", dtype: torch.dtype
) -> "BitsAndBytesConfig | None":
    if quantization is None:
        return None
    from transformers import BitsAndBytesConfig

    if quantization in ("nf4", "fp4"):
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    if isinstance(quantization, BitsAndBytesConfig) and quantization.load_in_4bit:
        return copy.deepcopy(quantization)
    raise PolicyError(
        "quantization: expected 'nf4', 'fp4', a 4-bit BitsAndBytesConfig or None, found "
        f"{quantization!r}"
    )


def _format(config: "BitsAndBytesConfig | None") -> Format | None:
    if config is None:
        return None
    return Format(
        config.bnb_4bit_quant_type,
        config.bnb_4bit_use_double_quant,
        config.bnb_4bit_quant_storage,
    )


def _quantizing_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        is_available = torch.cuda.is_available()
        return (
            torch.device("cuda", torch.cuda.current_device())
            if is_available
            else torch.device("cpu")
        )
    try:
        # An empty tensor checks that the device exists and fills in its index.
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise PolicyError(
            f"device: expected a usable device, found {device!r} ({str(error).splitlines()[0]})"
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise PolicyError(f"device: expected a CPU or CUDA device, found {device!r}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
