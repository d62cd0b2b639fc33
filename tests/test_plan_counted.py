"""The planned peak of a step against storages counted while a real model trains, on a CPU.

Counted are slots, blocks that stay, everything outside the layers, the optimizer's state, and every
storage that an operator makes, while it lives: nothing of it comes from the plan.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.errors import UnsupportedModelError
from poros.gates import tiny
from poros.gates.kinds import KINDS, attach
from poros.planning.meta_model import _COUNTED
from poros.planning.step_cost import LiveBytes

TOLERANCE = 0.03
USUAL: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 128,
    "vocab_size": 512,
    "seq_len": 128,
    "batch_size": 1,
    "rank": 8,
    "slots": 2,
    "keep_last": 0,
    "block_size": 1,
    "architecture": "qwen2",
    "adapter": "lora",
    "dtype": torch.bfloat16,
    "target_modules": None,
    "offload_boundaries": False,
    "accumulation": 1,
}
LAYOUT = ("slots", "keep_last", "block_size", "offload_boundaries")
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "many layers": {"num_layers": 16},
    "wide": {"hidden_size": 256},
    "large vocabulary": {"vocab_size": 8192},
    "short": {"seq_len": 16},
    "long": {"seq_len": 512, "vocab_size": 128},
    "batch of three": {"batch_size": 3, "seq_len": 64},
    "high rank": {"rank": 64},
    "four slots": {"slots": 4},
    "two layers kept": {"slots": 6, "keep_last": 2, "seq_len": 256},
    "all kept": {"slots": 6, "keep_last": 6},
    "blocks of two": {"block_size": 2},
    "blocks of two, two layers kept": {"block_size": 2, "slots": 3, "keep_last": 2},
    "accumulation": {"accumulation": 3, "rank": 64},
    "many boundaries": {"num_layers": 12, "seq_len": 256, "rank": 2},
    "offloaded": {"num_layers": 12, "seq_len": 256, "offload_boundaries": True, "rank": 2},
    "offloaded, two layers kept": {
        "num_layers": 12,
        "seq_len": 256,
        "slots": 12,
        "keep_last": 2,
        "offload_boundaries": True,
        "rank": 2,
    },
    "llama": {"architecture": "llama"},
    "gemma3": {"architecture": "gemma3"},
    "gemma4 with shared keys": {"architecture": "gemma4_shared_kv"},
    "mixtral": {"architecture": "mixtral"},
    "adapters on fused experts": {"architecture": "mixtral", "target_modules": "all-linear"},
    "on many fused experts": {"architecture": "qwen3_moe", "target_modules": "all-linear"},
}
# Where the optimizer's state is the smaller, the check is the peak.
CHECKED: dict[str, dict[str, Any]] = {
    "usual": {},
    "low rank": {"rank": 1, "hidden_size": 256, "seq_len": 16},
    "low rank, long": {"rank": 1, "seq_len": 512, "vocab_size": 128},
    "low rank, many layers": {"rank": 1, "num_layers": 16, "seq_len": 64},
    "blocks of three": {"rank": 2, "block_size": 3, "seq_len": 64},
    "blocks of two, two layers kept": {
        "rank": 1,
        "block_size": 2,
        "slots": 3,
        "keep_last": 2,
        "seq_len": 8,
    },
}


class DeviceBytes(LiveBytes):
    """Without the states of a CPU's generator, which are 5 kB here and 16 bytes on a GPU."""

    def _note(self, tensor: torch.Tensor, num_bytes: int) -> None:
        if num_bytes != torch.get_rng_state().numel() or tensor.dtype != torch.uint8:
            super()._note(tensor, num_bytes)


def on_meta(wanted: dict[str, Any]) -> Any:
    config = tiny.small_config(
        wanted["architecture"],
        num_layers=wanted["num_layers"],
        hidden_size=wanted["hidden_size"],
        dropout=0.0,
    )
    config.vocab_size = wanted["vocab_size"]
    config.max_position_embeddings = 1024
    return config


def make(folder: Path, wanted: dict[str, Any]) -> Any:
    config = on_meta(wanted)
    tiny.write_checkpoint(config, folder, dtype=wanted["dtype"])
    quantize = KINDS[wanted["adapter"]].on_4bit
    base = tiny.load_base(folder, dtype=wanted["dtype"], quantize=quantize)
    if wanted["target_modules"] is None:
        return attach(base, wanted["adapter"], rank=wanted["rank"]).train()
    lora = LoraConfig(
        r=wanted["rank"], target_modules=wanted["target_modules"], task_type="CAUSAL_LM"
    )
    return get_peft_model(base, lora).train()


def num_bytes(tensors: Any) -> int:
    distinct = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(distinct.values())


class Counted:
    """Steps of a prepared model, counted."""

    def __init__(self, model: Any, wanted: dict[str, Any]) -> None:
        self.model = model
        self.accumulation = wanted["accumulation"]
        ids = torch.randint(0, wanted["vocab_size"], (wanted["batch_size"], wanted["seq_len"]))
        self.batch = {"input_ids": ids, "labels": ids.clone()}
        self.trained = [each for each in model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, foreach=False, fused=True)

    def step(self) -> int:
        """Train one step; its peak in bytes."""
        runtime = poros.runtime(self.model)
        takeover = runtime
        held = [slot.buffer for slot in takeover.ring.slots]
        held += [slot.buffer for slot in takeover.ring.pinned]
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        outside = [each for name, each in named if ".layers." not in name]
        state = [
            each
            for state in self.optimizer.state.values()
            for each in state.values()
            if isinstance(each, torch.Tensor)
        ]
        there = [*self.batch.values(), *outside, *self.trained, *state]
        with DeviceBytes() as live:
            on_the_host = (*takeover.host.slabs, *takeover.boundaries._buffers)
            live.know(*there, *held, *(slab.bytes for slab in on_the_host))
            live.know(*self.model.parameters(), *self.model.buffers())
            for _ in range(self.accumulation):
                self.model(**self.batch, use_cache=False).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return num_bytes(there) + int(runtime.stats()["device_num_bytes"]) + live.peak


def planned(model: Any, wanted: dict[str, Any], **options: Any) -> Any:
    return poros.plan(
        model,
        seq_len=wanted["seq_len"],
        batch_size=wanted["batch_size"],
        num_slots=wanted["slots"],
        keep_last=wanted["keep_last"],
        block_size=wanted["block_size"],
        offload_boundaries=wanted["offload_boundaries"],
        accumulation=wanted["accumulation"],
        dtype=wanted["dtype"],
        **options,
    )


def prepare(model: Any, wanted: dict[str, Any], **options: Any) -> Any:
    layout = {key: wanted[key] for key in LAYOUT}
    return poros.prepare(model, device="cpu", allow_unvalidated=True, **layout, **options)


@pytest.mark.parametrize("case", CASES)
def test_planned_is_counted(case: str, tmp_path: Path) -> None:
    wanted = {**USUAL, **CASES[case]}
    model = make(tmp_path, wanted)
    expected = planned(model, wanted)
    assert expected.offload_boundaries == wanted["offload_boundaries"]
    counted = Counted(prepare(model, wanted, self_check="off"), wanted)
    counted.step()
    found = counted.step()
    assert found == pytest.approx(expected.total_num_bytes, rel=TOLERANCE)
    stats = poros.runtime(model).stats()
    assert stats["host_num_bytes"] + stats["offloaded_num_bytes"] == expected.host_num_bytes


SMALL = {"num_layers": 4, "hidden_size": 64, "seq_len": 256, "vocab_size": 256}


@pytest.mark.parametrize("kind", sorted(_COUNTED - {"lora"}))
def test_kinds_of_adapters_are_counted(kind: str, tmp_path: Path) -> None:
    # Some train in bfloat16 under autocast alone.
    dtype = torch.bfloat16 if KINDS[kind].without_autocast else torch.float32
    wanted = {**USUAL, **SMALL, "adapter": kind, "dtype": dtype}
    model = make(tmp_path, wanted)
    expected = planned(model, wanted).total_num_bytes
    counted = Counted(prepare(model, wanted, self_check="off"), wanted)
    counted.step()
    assert counted.step() == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - _COUNTED - {"prefix_tuning", "cartridge"}))
def test_kinds_that_are_not_counted_are_named(kind: str) -> None:
    row = KINDS[kind]
    options: dict[str, Any] = {"adapter": kind, "quantize": row.on_4bit}
    model = tiny.make_model("qwen2", num_layers=2, hidden_size=32, **options)
    where = rf"found {kind} \(PEFT's \w+, \w+\); .*slots="
    with pytest.raises(UnsupportedModelError, match=where):
        poros.plan(model, seq_len=16)
    config = next(iter(model.peft_config.values()))
    with pytest.raises(UnsupportedModelError, match=where):
        poros.plan(model.get_base_model().config, seq_len=16, lora=config, quantization=None)


@pytest.mark.parametrize("case", CHECKED)
def test_the_checked_step_is_counted(case: str, tmp_path: Path) -> None:
    wanted = {**USUAL, **CHECKED[case]}
    model = make(tmp_path, wanted)
    expected = planned(model, wanted, self_check=True)
    counted = Counted(prepare(model, wanted), wanted)
    first, later = counted.step(), counted.step()
    assert poros.runtime(model).self_check["status"] == "passed"
    assert max(first, later) == pytest.approx(expected.total_num_bytes, rel=TOLERANCE)
    assert (first > later) == (expected.terms["self-check"] > 0)


def test_a_term_that_is_wrong_would_be_seen() -> None:
    """Control: each is, somewhere, several times what the tests above let pass."""
    largest: dict[str, float] = {}
    for cases, self_check in ((CASES, False), (CHECKED, True)):
        for case in cases.values():
            wanted = {**USUAL, **case}
            found = planned(on_meta(wanted), wanted, self_check=self_check, rank=wanted["rank"])
            for name, size in found.terms.items():
                share = size / found.total_num_bytes
                largest[name] = max(largest.get(name, 0.0), share)
    negligible = {"other", "inputs"}
    assert {name for name, share in largest.items() if share < 2 * TOLERANCE} == negligible
