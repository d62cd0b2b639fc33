"""TRL's trainers run unchanged on a prepared model, to the bits of the resident run.

Nothing is asked of TRL but its defaults: bf16 autocast, activation checkpointing (which a prepared
model ignores), adapters of a 4-bit model cast to bf16 by the trainer, its own collators and its own
loss, computed from the head's weight. The trainers are subclassed only to listen.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poros.gates.reference import Trajectory
from poros.head.host_matrix import HostMatrix
from tests.comparing import compare_trajectories
from tests.covers import with_slow
from tests.exact.recorded import record_on_tapes
from tests.exact.trl_arms import COMPLETIONS, PREFERENCES, TEXTS, Arms, Prepare, check, trl
from tests.support import prepare_plain


def dtypes(model: Any) -> set[torch.dtype]:
    return {each.dtype for each in model.parameters() if each.requires_grad}


SFT: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "packing": {"packing": True, "max_length": 24},
    "no autocast": {"bf16": False},
    "no checkpointing": {"gradient_checkpointing": False},
}


@pytest.mark.parametrize("kind", with_slow(SFT, ("accumulation", "no checkpointing")))
def test_sft(kind: str, tmp_path: Path) -> None:
    arms = Arms(tmp_path, trl.SFTTrainer, trl.SFTConfig, TEXTS)
    check(arms, **SFT[kind])
    arguments = arms.trainer.args
    assert arguments.bf16 == (kind != "no autocast")
    assert arguments.gradient_checkpointing == (kind != "no checkpointing")
    assert dtypes(arms.model) == {torch.bfloat16}, "TRL casts the adapters of 4-bit models"


@pytest.mark.cover("values")
@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_visits_that_are_replayed(
    kind: str, keep_last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of changing lengths, and DPO's reference pass, which takes no gradients."""
    made = record_on_tapes(monkeypatch)
    arms = {
        "sft": lambda: Arms(tmp_path, trl.SFTTrainer, trl.SFTConfig, TEXTS),
        "dpo": lambda: Arms(tmp_path, trl.DPOTrainer, trl.DPOConfig, PREFERENCES),
    }[kind]()
    arms.num_steps = 6
    check(arms, {"keep_last": keep_last, "slots": 2 + keep_last}, pad_to_multiple_of=16)
    assert sum(captures.num_replays for captures in made) > 0


def test_sft_on_completions_only_with_evaluation(tmp_path: Path) -> None:
    arms = Arms(tmp_path, trl.SFTTrainer, trl.SFTConfig, COMPLETIONS)
    arms.eval_rows = COMPLETIONS[:4]
    found = check(arms, eval_strategy="steps", eval_steps=1)
    assert sum("eval_loss" in entry.name for entry in found.extras) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sft_on_a_dense_base(dtype: torch.dtype, tmp_path: Path) -> None:
    arms = Arms(tmp_path, trl.SFTTrainer, trl.SFTConfig, TEXTS, dtype=dtype, quantize=False)
    check(arms)


def test_sft_with_an_adapter_made_by_the_trainer(tmp_path: Path) -> None:
    arms = Arms(tmp_path, trl.SFTTrainer, trl.SFTConfig, TEXTS)
    check(arms, attach_in_trainer=True)


HEAD_ON_HOST = {"loss": "chunked", "stream_head": True, "stream_embedding": True}


class Slices(TorchDispatchMode):
    """Bytes of the matrices in host memory that operators were given, by their numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if isinstance(args[0] if args else None, HostMatrix) and func is torch.ops.aten.t.default:
            self.num_rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.cover("values")
@pytest.mark.parametrize("attach_in_trainer", [False, True])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_head_in_host_memory_is_read_slice_by_slice(
    kind: str, attach_in_trainer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL computes losses from the head's weight; what it logs and trains is plain TRL's."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 200)
    classes = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, TEXTS),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, PREFERENCES),
    }
    arms = Arms(tmp_path, *classes[kind])
    watch = Slices()
    genuine = type(arms).run

    def run(arms: Arms, prepare: Prepare | None = None, **options: Any) -> Trajectory:
        with watch if prepare is not None else nullcontext():
            return genuine(arms, prepare, **options)

    monkeypatch.setattr(type(arms), "run", run)
    check(arms, HEAD_ON_HOST, attach_in_trainer=attach_in_trainer)
    weight = arms.model.get_base_model().lm_head.weight
    assert isinstance(weight, HostMatrix)
    assert watch.num_rows and max(watch.num_rows) <= 200 < len(weight)


@pytest.mark.parametrize(
    "options", [{"loss_type": "dft"}, {"label_smoothing_factor": 0.1}], ids=str
)
def test_other_losses_of_sft(options: dict[str, Any], tmp_path: Path) -> None:
    """They take whole logits, which are the model's own to the bit."""
    check(Arms(tmp_path, trl.SFTTrainer, trl.SFTConfig, TEXTS), HEAD_ON_HOST, **options)


DPO_LOSSES = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"]
DPO_LOSSES += ["aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]


def test_all_losses_of_dpo_at_once(tmp_path: Path) -> None:
    """Their gradients arrive as one sum."""
    arms = Arms(tmp_path, trl.DPOTrainer, trl.DPOConfig, PREFERENCES)
    check(arms, HEAD_ON_HOST, loss_type=DPO_LOSSES, label_smoothing=0.1)


def test_dpo_with_the_start_of_the_adapter_as_reference(tmp_path: Path) -> None:
    """TRL adds a second adapter, "ref", to a model that comes with one."""
    arms = Arms(tmp_path, trl.DPOTrainer, trl.DPOConfig, PREFERENCES)
    check(arms)
    assert sorted(arms.model.peft_config) == ["default", "ref"]
    assert dtypes(arms.model) == {torch.bfloat16}


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"precompute_ref_log_probs": True}]
)
def test_dpo_with_the_base_as_reference(options: dict[str, Any], tmp_path: Path) -> None:
    """The reference pass runs with the adapter disabled."""
    arms = Arms(tmp_path, trl.DPOTrainer, trl.DPOConfig, PREFERENCES)
    check(arms, attach_in_trainer=True, **options)
    assert sorted(arms.model.peft_config) == ["default"]


def test_control_a_reference_pass_that_keeps_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = Arms(tmp_path, trl.DPOTrainer, trl.DPOConfig, PREFERENCES)
    expected = arms.run(attach_in_trainer=True)
    monkeypatch.setattr("peft.PeftModel.disable_adapter", lambda model: nullcontext())
    found = arms.run(prepare_plain, attach_in_trainer=True)
    assert compare_trajectories(expected, found)
