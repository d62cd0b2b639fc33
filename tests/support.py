"""What several test files need: streamed arms under adversarial streams, and small models."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit

import poros
from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.gates import tiny
from poros.gates.kinds import attach
from tests.journal import Action, keep_journal
from tools.adversary import POISON, AdversarialStreams

AS_PLAIN = {"loss": "reference", "adapter_kernels": "exact"}
"""Policy fields with which what trains has the bits of a plain model."""


def prepare_plain(model: Any, policy: StreamingPolicy | None = None, **overrides: Any) -> Any:
    """``poros.prepare`` such that what trains can be compared with a plain model."""
    if policy is None:
        overrides = {**AS_PLAIN, **overrides}
    return poros.prepare(model, policy, **overrides)


def damaged(model: Any, **policy: Any) -> Any:
    """Prepared, with a bit of block 1 flipped in host memory, and no check that looks for it."""
    prepare_plain(model, **{**policy, "self_check": "off"})
    poros.runtime(model).host_slab(1)[1003] ^= 0x40  # of an exponent, if it is one of floats
    return model


class AdversarialPrepare:
    """``poros.prepare`` with adversarial streams; keeps the streams and the journal for asserts."""

    def __init__(self, make_streams: Callable[[], AdversarialStreams] = AdversarialStreams) -> None:
        self.streams = make_streams()
        self.journal: list[Action] = []

    def __call__(self, model: Any, **overrides: Any) -> Any:
        # Off: the faults that tests plant have to show in what is trained. It is compared with
        # plain transformers.
        policy = StreamingPolicy(self_check="off", **AS_PLAIN).override(**overrides)
        prepare_with(model, policy, streams=self.streams, goes_by_records=False)
        keep_journal(poros.runtime(model).manager, self.journal)
        return model

    @contextmanager
    def watching(self) -> Iterator["AdversarialPrepare"]:
        """Prepare and train inside the body: every operator's reads of slots are observed."""
        with self.streams.watch():
            yield self


def poison_what_is_released(model: Any) -> None:
    """No fault: whoever reads a slot without asking for its block shows."""
    manager = poros.runtime(model).manager
    genuine, evict = manager.release, manager.evict

    def release(block: int) -> None:
        genuine(block)
        if not manager.is_pinned(block):
            slot = manager._ring.slot(block)
            evict(block)
            slot.buffer.fill_(POISON)

    manager.release = release  # type: ignore[method-assign]
    manager.evict = lambda block: release(block) if manager.is_held(block) else None  # type: ignore[method-assign]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of bits: +0 differs from -0, a NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    as_bytes = [
        each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (left, right)
    ]
    return torch.equal(*as_bytes)


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Of random bit patterns, NaNs and infinities among them; for bool 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(high, (num_bytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def make_model(
    architecture: str = "qwen2",
    *,
    dropout: float = 0.0,
    seed: int = 0,
    rank: int = 8,
    adapter: str = "lora",
    **options: Any,
) -> Any:
    """``tiny.make_model``; what is equal is written, loaded and adapted once."""
    attached = adapter, rank, dropout, seed + 1
    return make_base(architecture, dropout=dropout, seed=seed, adapter=attached, **options)


def make_base(
    architecture: str = "qwen2",
    *,
    num_layers: int = 6,
    hidden_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    dropout: float = 0.0,
    seed: int = 0,
    auto_class: str | None = None,
    **loading: Any,
) -> Any:
    """The model of ``make_model``, without adapters: NF4, unless ``loading`` says otherwise.

    ``auto_class``: as in ``poros.load``; with a head for one class.
    """
    folder = _checkpoint(architecture, num_layers, hidden_size, dtype, dropout, seed, auto_class)
    return loaded(folder, dtype, auto_class=auto_class, **loading)


Adapter = tuple[str, int, float, int]
"""Kind, rank, dropout and seed."""


def loaded(folder: str, dtype: torch.dtype, adapter: Adapter | None = None, **loading: Any) -> Any:
    """``tiny.load_base`` of a checkpoint that stays as it is, and adapters; a copy of its own."""
    options = tuple(loading.items())
    # Tensors of inference mode are of another kind, and memory of a GPU is measured.
    if torch.is_inference_mode_enabled() or str(loading.get("device", "cpu")) != "cpu":
        return _load.__wrapped__(folder, dtype, adapter, options)
    return copied(_load(folder, dtype, adapter, options))


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_TABLES = ("_modules", "_parameters", "_buffers")


def copied(model: Any) -> Any:
    """A deep copy, whose 4-bit weights know their own modules; much faster than ``deepcopy``."""
    modules = list(model.modules())
    memo: dict[int, Any] = {id(each): object.__new__(type(each)) for each in modules}

    def part(key: str, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN or key == "quant_state":  # which is the weight's, below
            return value
        if kind in (dict, OrderedDict, set) and not value:
            return kind()
        if key in _TABLES:
            return kind((name, entry(each)) for name, each in value.items())
        return deepcopy(value, memo)

    def entry(value: Any) -> Any:
        if id(value) not in memo and isinstance(value, torch.Tensor):
            found = _copied_tensor(value)
            if found is not None:
                memo[id(value)] = found
        return memo[id(value)] if id(value) in memo else deepcopy(value, memo)

    for module in modules:
        parts = {key: part(key, each) for key, each in module.__dict__.items()}
        memo[id(module)].__dict__.update(parts)
    for each in modules:
        module = memo[id(each)]
        weight = module._parameters.get("weight")
        if getattr(weight, "module", None) is not None:
            weight.module = module
        if "quant_state" in module.__dict__:
            module.quant_state = weight.quant_state
    return memo[id(model)]


def _copied_tensor(value: torch.Tensor) -> torch.Tensor | None:
    """A copy of a weight; None if there may be more to it, which ``deepcopy`` knows of."""
    if value.untyped_storage().nbytes() != value.nbytes or not value.is_contiguous():
        return None
    data = value.detach().clone()
    if isinstance(value, Params4bit):
        found = copy(value)
        found.data, found.quant_state = data.data, _copied_state(value.quant_state)
        return found  # type: ignore[no-any-return]
    if type(value) is torch.nn.Parameter and value.grad is None and not value.__dict__:
        return torch.nn.Parameter(data, value.requires_grad)
    return data if type(value) is torch.Tensor and not value.requires_grad else None


def _copied_state(state: Any) -> Any:
    """A copy of a state of quantization, and of that of its scales."""
    if state is None:
        return None
    found = object.__new__(type(state))
    for key, value in state.__dict__.items():
        if isinstance(value, torch.Tensor):
            value = value.clone()
        found.__dict__[key] = _copied_state(value) if key == "state2" else value
    return found


@lru_cache(maxsize=64)
def _load(folder: str, dtype: torch.dtype, adapter: Adapter | None, loading: Any) -> Any:
    if adapter is not None:
        kind, rank, dropout, seed = adapter
        base = loaded(folder, dtype, **dict(loading))
        return attach(base, kind, rank=rank, dropout=dropout, seed=seed)
    with torch.random.fork_rng(devices=[]):
        base = tiny.load_base(folder, dtype=dtype, **dict(loading))
    base.name_or_path = base.config.name_or_path = ""
    return base


@cache
def _checkpoint(
    architecture: str,
    num_layers: int,
    hidden_size: int,
    dtype: torch.dtype,
    dropout: float,
    seed: int,
    auto_class: str | None,
) -> str:
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size}
    config = tiny.small_config(architecture, **sizes, dropout=dropout)
    if auto_class is not None:
        config.num_labels = 1
    folder = TemporaryDirectory(prefix="poros-tiny-")
    _FOLDERS.append(folder)
    tiny.write_checkpoint(config, Path(folder.name), dtype=dtype, seed=seed, auto_class=auto_class)
    return folder.name


_FOLDERS: list[TemporaryDirectory[str]] = []
"""Removed when the process ends."""


def num_arenas() -> int:
    """Mappings of new host memory that can be shared, as arenas are, in this process."""
    return Path("/proc/self/maps").read_text().count("/dev/zero")


def interpreted(name: str) -> ModuleType:
    """A module of kernels, run by the interpreter: see tests/conftest.py."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels run on it: see tests/gpu/test_kernels_on_gpu.py")
    return import_module(name)


def leaves_keys_always() -> bool:
    """Whether layers of Gemma 4 leave keys and values even where none takes them.

    So they do with transformers 5.17: its micro-batches go one after the other.
    """
    from transformers import Gemma4TextConfig

    return not hasattr(Gemma4TextConfig, "kv_sharing_modes")
