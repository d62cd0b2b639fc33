"""The parity gate: a resident and a streamed run from the same bytes, compared bit for bit.

``check_architecture`` and ``check_model_dir`` choose the model, the data and the settings. How the
two arms are run and when a comparison counts is in ``poros.gates.arms``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from poros.gates import tiny
from poros.gates.arms import Prepare, poros_prepare, run_parity
from poros.gates.kinds import attach, kind_of
from poros.gates.reference import TrainingSpec
from poros.gates.report import ParityReport, render
from poros.utils.devices import default_device

AS_COMPARED = {"loss": "reference", "adapter_kernels": "fused"}
"""Policy fields of the streamed arm; the resident one takes the kernels too where bits differ."""

__all__ = ["ParityReport", "check_architecture", "check_model_dir", "render", "run_parity"]


def check_architecture(
    name: str,
    *,
    num_steps: int = 20,
    accumulation: int = 1,
    dropout: float = 0.05,
    dtype: torch.dtype = torch.bfloat16,
    autocast_dtype: torch.dtype | None = None,
    device: str | None = None,
    num_layers: int = 6,
    hidden_size: int = 128,
    num_tokens: int = 24,
    seed: int = 0,
    adapter: str = "lora",
    quantize: bool | None = None,
    prepare: Prepare | None = None,
    **policy: Any,
) -> ParityReport:
    """Run the parity gate on a small random model of an architecture.

    Args:
        name: A name of ``tiny.ARCHITECTURES`` or any ``model_type`` of transformers.
        accumulation: Micro-batches per step, each of 2 rows, padded to different lengths.
        dropout: Probability in the adapters and in the model's own dropouts.
        dtype: Dtype of everything that is not NF4.
        autocast_dtype: Run the forward under autocast to this dtype; by default only for adapters
            that PEFT trains in no other way.
        device: Where both arms train; None is the GPU if there is one, else the CPU.
        num_tokens: Tokens per row.
        adapter: Kind of the adapters, a name of ``poros.gates.kinds.KINDS``.
        quantize: Whether the base is NF4; None makes it dense for adapters that need that.
        prepare: As in ``run_parity``; gets ``device`` and ``policy`` as keywords.
        **policy: Fields of ``StreamingPolicy``, such as ``block_size`` and ``slots``.

    Raises:
        UnsupportedModelError: If there is no such architecture or adapter, or it cannot be built
            small.
    """
    device = device or default_device().type
    row = kind_of(adapter)
    if autocast_dtype is None and dtype is not torch.float32 and not row.without_autocast:
        autocast_dtype = dtype
    build = {
        "adapter": adapter,
        "quantize": row.on_4bit if quantize is None else quantize,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "dropout": dropout,
        "seed": seed,
        "device": device,
        "dtype": dtype,
    }
    spec = TrainingSpec(
        num_steps=num_steps, accumulation=accumulation, autocast_dtype=autocast_dtype, seed=seed
    )
    make_model = partial(tiny.make_model, name, **build)  # type: ignore[arg-type]
    batches = tiny.make_batches(num_steps * accumulation, num_tokens=num_tokens, seed=seed)
    settings = {**build, "num_tokens": num_tokens}
    return _run(make_model, batches, spec, prepare, policy, name, settings)


def check_model_dir(
    path: str | Path,
    *,
    num_steps: int = 3,
    adapter: str = "lora",
    prepare: Prepare | None = None,
    **policy: Any,
) -> ParityReport:
    """Run the parity gate on a checkpoint of the user, with random tokens from its vocabulary.

    The model is loaded as NF4 with double quantization (dense for adapters that need that), gets
    LoRA of rank 16 or other adapters on every linear layer of its blocks, and must fit on the
    device once, for the resident arm: the GPU if there is one, else the CPU. Each step has one row
    of 64 tokens.

    Args:
        path: Folder with ``config.json`` and safetensors.
        adapter: As in ``check_architecture``.
        prepare: As in ``check_architecture``.
        **policy: Fields of ``StreamingPolicy``.

    Raises:
        CheckpointFormatError: If the checkpoint is malformed.
        UnsupportedModelError: If the folder holds no causal language model that can be loaded.
    """
    from poros.loaders.load import load
    from poros.loaders.settings import configuration
    from poros.loaders.source import find_config

    path, device, row = Path(path), default_device().type, kind_of(adapter)
    build = {"rank": 16, "dropout": 0.05, "seed": 0}

    def make_model() -> torch.nn.Module:
        loaded = load(path, quantization="nf4" if row.on_4bit else None, device=device)
        base = tiny.without_repacking(loaded).to(device)
        return attach(base, adapter, **build)  # type: ignore[arg-type]

    vocab_size = configuration(*find_config(path), {}).get_text_config().vocab_size
    batches = tiny.make_batches(num_steps, batch_size=1, num_tokens=64, vocab_size=vocab_size)
    autocast_dtype = None if row.without_autocast else torch.bfloat16
    spec = TrainingSpec(num_steps=num_steps, lr=1e-4, autocast_dtype=autocast_dtype)
    settings = {**build, "adapter": adapter, "device": device}
    return _run(make_model, batches, spec, prepare, policy, str(path), settings)


def _run(
    make_model: Callable[[], torch.nn.Module],
    batches: Sequence[Mapping[str, torch.Tensor]],
    spec: TrainingSpec,
    prepare: Prepare | None,
    policy: Mapping[str, Any],
    name: str,
    settings: Mapping[str, Any],
) -> ParityReport:
    """``run_parity`` with our kernels in the resident arm too, where their bits are not PEFT's."""
    from poros.api import use_adapter_kernels

    # Named, because the default device of a policy may not be that of the resident arm.
    options = {"device": settings["device"], **AS_COMPARED, **policy}
    kernels, adapter = options["adapter_kernels"], settings["adapter"]
    is_ours = kernels == "grouped" or (kind_of(adapter).has_own_bits and kernels == "fused")
    return run_parity(
        make_model,
        batches,
        spec,
        partial(prepare or poros_prepare(), **options),
        as_resident=partial(use_adapter_kernels, kernels=kernels) if is_ours else None,
        subject=name if adapter == "lora" else f"{name} with {adapter}",
        settings={**settings, "policy": policy},
    )
