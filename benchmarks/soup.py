"""Soup's streamed layers, where soup-cli is installed, as an arm beside ours.

Run as its trainer runs them, with its faster settings: scales of NF4 cached, layers not recomputed
by a checkpoint of their own. It has no accumulation of its own, so micro-batches go one after the
other. Its package was used, not read.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from benchmarks.models import TARGETS, random_dense


def is_installed() -> bool:
    return find_spec("soup_cli") is not None


@contextmanager
def streamed(config: Any, rank: int, dropout: float, device: torch.device) -> Iterator[Any]:
    """A model of ``config`` whose layers Soup streams, two buffers on the device.

    It begins with a checkpoint, so one of random weights is written first; adapters are float32, as
    ours are.
    """
    from peft import LoraConfig
    from soup_cli.utils import layer_shard, layer_stream_runtime  # type: ignore[import-not-found]

    folder = Path(mkdtemp(prefix="soup-"))
    try:
        source, cache = str(folder / "base"), str(folder / "shards")
        random_dense(config).save_pretrained(source)
        common = {"dtype": "bfloat16", "quant": "nf4", "double_quant": True}
        skeleton = layer_stream_runtime.build_meta_skeleton(source, **common)
        index = layer_shard.shard_checkpoint(
            source,
            cache,
            **common,
            arch=config.model_type,
            quant_suffixes=layer_stream_runtime.quantised_layer_suffixes(skeleton),
            quant_device=device.type,
        )
        is_gpu = device.type == "cuda"
        model, runtime = layer_stream_runtime.build_streamed_model(
            model_id=source,
            shard_dir=cache,
            index=index,
            lora_config=LoraConfig(
                r=rank,
                lora_alpha=rank,
                lora_dropout=dropout,
                target_modules=list(TARGETS),
                task_type="CAUSAL_LM",
            ),
            device=device.type,
            **common,
            buffers=2,
            pin=is_gpu,
            require_pin=is_gpu,
            nf4_scale_cache=True,
        )
        layer_stream_runtime.set_stream_recompute(model, False)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        try:
            yield model.train()
        finally:
            runtime.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
