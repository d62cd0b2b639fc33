"""Models of chosen sizes that are planned and trained, and a way of counting what they take.

It shares nothing with the planner, which counts on the meta device.
"""

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import poros
from poros.gates import tiny
from poros.gates.kinds import KINDS, attach
from poros.head.host_matrix import HostMatrix
from tools.adversary import tensors_in

USUAL: dict[str, Any] = {
    "architecture": "qwen2",
    "num_layers": 6,
    "hidden_size": 128,
    "intermediate_size": None,
    "vocab_size": 512,
    "dtype": torch.bfloat16,
    "adapter": "lora",
    "rank": 8,
    "dropout": 0.0,
    "target_modules": None,
    "batch_size": 1,
    "seq_len": 128,
    "accumulation": 1,
    "optimizer": "adamw_torch_fused",
    "slots": 2,
    "keep_last": 0,
    "block_size": 1,
    "offload_boundaries": False,
    "stream_embedding": False,
    "loss": "reference",
    "stream_head": False,
    "cuda_graphs": False,
}
LAYOUT = (
    *("keep_last", "block_size", "offload_boundaries"),
    *("stream_embedding", "loss", "stream_head", "cuda_graphs"),
)
STEP = ("batch_size", "seq_len", "accumulation", "optimizer")


def lora(**options: Any) -> LoraConfig:
    """On attention alone, in any of the small architectures."""
    targets = ["q_proj", "v_proj", "qkv_proj"]
    return LoraConfig(
        **{"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM", "lora_dropout": 0.0}
        | options
    )


def config_of(cell: dict[str, Any]) -> Any:
    config = tiny.small_config(
        cell["architecture"],
        num_layers=cell["num_layers"],
        hidden_size=cell["hidden_size"],
        dropout=0.0,
    )
    config.vocab_size, config.max_position_embeddings = cell["vocab_size"], 4096
    if cell["intermediate_size"] is not None:
        config.intermediate_size = cell["intermediate_size"]
    return config


def make(folder: Path, cell: dict[str, Any], device: str = "cpu") -> Any:
    tiny.write_checkpoint(config_of(cell), folder, dtype=cell["dtype"])
    quantize = KINDS[cell["adapter"]].on_4bit
    base = tiny.load_base(folder, dtype=cell["dtype"], quantize=quantize, device=device)
    if cell["target_modules"] is None:
        dropout = cell["dropout"]
        return attach(base, cell["adapter"], rank=cell["rank"], dropout=dropout).train()
    return get_peft_model(base, lora(r=cell["rank"], target_modules=cell["target_modules"])).train()


def planned(source: Any, cell: dict[str, Any], **options: Any) -> Any:
    step = {name: cell[name] for name in (*LAYOUT, *STEP, "dtype")}
    # Where memory is measured, libraries have their workspaces already.
    return poros.plan(source, num_slots=cell["slots"], library_num_bytes=0, **step, **options)


def prepare(model: Any, cell: dict[str, Any], **options: Any) -> Any:
    layout = {name: cell[name] for name in LAYOUT}
    return poros.prepare(model, slots=cell["slots"], **layout, **options)


def optimizer_of(name: str, trained: Any) -> Any:
    """As a Trainer makes it of the same name."""
    import bitsandbytes as bnb

    if name == "adamw_bnb_8bit":
        return bnb.optim.AdamW8bit(trained)
    if name == "sgd":
        return torch.optim.SGD(trained, lr=0.1, foreach=True)
    is_fused = name == "adamw_torch_fused"
    return torch.optim.AdamW(trained, fused=is_fused, foreach=not is_fused)


def state_of(optimizer: Any) -> list[torch.Tensor]:
    states = (state.values() for state in optimizer.state.values())
    return [value for state in states for value in state if isinstance(value, torch.Tensor)]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


RNG_NUM_BYTES = torch.get_rng_state().numel()
"""Of the state of a CPU's generator, which layers keep: 5 kB here, and 16 bytes on a GPU."""


class OperatorBytes(TorchDispatchMode):
    """Bytes of what operators make, while anybody holds it: storages that no argument has.

    What kernels allocate inside does not count, but for the weight that a 4-bit product makes
    dense: two elements a byte. ``now`` is after the last operator, ``peak`` at most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs))
        if "gemm_4bit" in str(func):
            num_packed = max(each.numel() for each in given if each.dtype == torch.uint8)
            inside = 2 * num_packed * given[0].element_size()
            self.peak = max(self.peak, self.now + inside)
        known = {each.untyped_storage()._cdata for each in given}
        result = func(*args, **(kwargs or {}))
        if func.is_view:  # of a head in host memory: its storage is no argument's
            return result
        for storage in (each.untyped_storage() for each in tensors_in(result)):
            if storage._cdata not in known and storage.nbytes() != RNG_NUM_BYTES:
                self._note(storage)
        self.peak = max(self.peak, self.now)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._made:
            return

        def gone(_: object) -> None:
            del self._made[key]
            self.now -= size

        self._made[key] = weakref.ref(storage, gone)
        self.now += size


class Steps:
    """Training steps of a cell's model, prepared or not."""

    def __init__(self, model: Any, cell: dict[str, Any], device: str = "cpu") -> None:
        self._model = model
        self._accumulation = cell["accumulation"]
        shape = (cell["batch_size"], cell["seq_len"])
        ids = torch.randint(0, cell["vocab_size"], shape, device=device)
        self._batch = {"input_ids": ids, "labels": ids.clone()}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = optimizer_of(cell["optimizer"], trained)

    def train(self) -> None:
        for _ in range(self._accumulation):
            self._model(**self._batch, use_cache=False).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def held(self) -> int:
        """Bytes on the device between steps: what does not stream, the batch, and the runtime's."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        here = [
            tensor
            for name, tensor in named
            if (".layers." not in name or tensor.requires_grad)
            and not isinstance(tensor, HostMatrix)
        ]
        found = num_bytes([*self._batch.values(), *here, *state_of(self._optimizer)])
        return found + int(poros.runtime(self._model).stats()["device_num_bytes"])
