"""TRL's trainers run unchanged on a prepared model, to the bits of the resident run.

Nothing is asked of TRL but its defaults: bf16 autocast, activation checkpointing (which a prepared
model ignores), adapters of a 4-bit model cast to bf16 by the trainer, its own collators and its own
loss, computed from the head's weight. The trainers are subclassed only to listen.
"""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.gates.reference import Trajectory
from poros.head.host_matrix import HostMatrix
from tests.comparing import compare_trajectories
from tests.exact.recorded import record_on_tapes
from tests.loading.towers import FAMILIES, write
from tests.loops import num_groups, reasons
from tests.operators import Operators
from tests.support import prepare_plain
from tests.trainers import COMPLETIONS, PREFERENCES, TEXTS, Prepare, TrlArms, check

trl = pytest.importorskip("trl", reason="trl is an optional dependency of the tests")
pytest.importorskip("datasets", reason="trl needs datasets")

SFT = (trl.SFTTrainer, trl.SFTConfig, TEXTS)
DPO = (trl.DPOTrainer, trl.DPOConfig, PREFERENCES)
REWARD = (trl.RewardTrainer, trl.RewardConfig, PREFERENCES)
OF_REWARDS = {"auto_class": "AutoModelForSequenceClassification"}
KINDS = {"sft": SFT, "dpo": DPO}
HEAD_ON_HOST = {"loss": "chunked", "stream_head": True, "stream_embedding": True}
DPO_LOSSES = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"]
DPO_LOSSES += ["aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]


class Row(NamedTuple):
    kind: tuple[Any, Any, Any]
    options: dict[str, Any] = {}  # noqa: RUF012
    policy: dict[str, Any] = {}  # noqa: RUF012
    of_arms: dict[str, Any] = {}  # noqa: RUF012
    is_grouped: bool = False
    """Whether micro-batches go through the blocks together."""


THREE = {"gradient_accumulation_steps": 3}
PACKED = {"packing": True, "max_length": 24, **THREE}
SLICED = {"loss": "chunked", "stream_head": True}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
BY_TRAINER = {"attach_in_trainer": True}
ROWS = {
    "sft, packing, an adapter made by the trainer": Row(
        SFT, {"packing": True, "max_length": 24, **BY_TRAINER}
    ),
    "sft, no autocast, dense": Row(SFT, {"bf16": False}, of_arms={"quantize": False}),
    "sft, completions, evaluation": Row((*SFT[:2], COMPLETIONS), EVALUATED),
    # It takes whole logits, which are the model's own to the bit.
    "sft, labels smoothed": Row(SFT, {"label_smoothing_factor": 0.1}, HEAD_ON_HOST),
    # Their gradients arrive as one sum.
    "dpo, all losses at once": Row(
        DPO, {"loss_type": DPO_LOSSES, "label_smoothing": 0.1}, HEAD_ON_HOST
    ),
    # TRL adds a second adapter, "ref", to a model that comes with one.
    "dpo, the start of the adapter as reference": Row(DPO, {"gradient_checkpointing": False}),
    # The reference pass runs with the adapter disabled.
    "dpo, the base, accumulation": Row(DPO, {**BY_TRAINER, "gradient_accumulation_steps": 2}),
    "dpo, the base, before": Row(DPO, {**BY_TRAINER, "precompute_ref_log_probs": True}),
    "sft, packed, grouped": Row(SFT, PACKED, is_grouped=True),
    "sft, dft, grouped": Row(SFT, {**THREE, "loss_type": "dft"}, SLICED, is_grouped=True),
    "dpo, on the host, grouped": Row(DPO, THREE, SLICED, is_grouped=True),
    "reward, an adapter made by the trainer": Row(REWARD, BY_TRAINER, of_arms=OF_REWARDS),
    "reward, grouped": Row(REWARD, THREE, of_arms=OF_REWARDS, is_grouped=True),
}


@pytest.mark.parametrize("which", ROWS)
def test_trainers(which: str, tmp_path: Path) -> None:
    kind, options, policy, of_arms, is_grouped = ROWS[which]
    grouped = type("Grouped", (poros.BlockMajorMixin, kind[0]), {}) if is_grouped else None
    arms = TrlArms(tmp_path, *kind, **of_arms)
    is_evaluated = options is EVALUATED
    arms.eval_rows = COMPLETIONS[:4] if is_evaluated else None
    policy = {"slots": 2, **policy} if is_grouped else policy
    found = check(arms, policy, grouped, **options)
    assert sum("eval_loss" in entry.name for entry in found.extras) == 2 * is_evaluated
    arguments, model = arms.trainer.args, arms.model
    assert arguments.bf16 == options.get("bf16", True)
    assert arguments.gradient_checkpointing == options.get("gradient_checkpointing", True)
    if arms.quantize:
        trained = {each.dtype for each in model.parameters() if each.requires_grad}
        assert trained == {torch.bfloat16}, "TRL casts the adapters of 4-bit models"
    if is_grouped:
        # In the first forward of DPO's reference the model takes a note, so two go alone.
        assert num_groups(model) == (1 if kind is DPO else 2) and reasons(model) == []
        assert any("line 0" in each.name for each in found.extras), "what they log is compared"
    has_reference = kind is DPO and "attach_in_trainer" not in options
    assert sorted(model.peft_config) == ["default", "ref"][: 1 + has_reference]


@pytest.mark.cover("values")
@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_visits_that_are_replayed(
    kind: str, keep_last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of changing lengths, and DPO's reference pass, which takes no gradients."""
    made = record_on_tapes(monkeypatch)
    arms = TrlArms(tmp_path, *KINDS[kind], num_steps=4)
    check(arms, {"keep_last": keep_last, "slots": 2 + keep_last}, pad_to_multiple_of=16)
    assert sum(captures.num_replays for captures in made) > 0


@pytest.mark.cover("values")
@pytest.mark.parametrize("attach_in_trainer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_host_memory_is_read_slice_by_slice(
    kind: str, attach_in_trainer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL computes losses from the head's weight; what it logs and trains is plain TRL's."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 200)
    arms = TrlArms(tmp_path, *KINDS[kind])
    genuine, num_rows = type(arms).run, list[int]()

    def note(operator: Any, given: Any, made: Any) -> None:
        """Of matrices in host memory, the rows that operators are given."""
        if isinstance(given[0] if given else None, HostMatrix):
            num_rows.extend([len(given[0])] * (operator is torch.ops.aten.t.default))

    def run(arms: TrlArms, prepare: Prepare | None = None, **options: Any) -> Trajectory:
        with Operators(note) if prepare is not None else nullcontext():
            return genuine(arms, prepare, **options)

    monkeypatch.setattr(type(arms), "run", run)
    check(arms, HEAD_ON_HOST, attach_in_trainer=attach_in_trainer)
    weight = arms.model.get_base_model().lm_head.weight
    assert isinstance(weight, HostMatrix)
    assert num_rows and max(num_rows) <= 200 < len(weight)


def test_control_a_reference_pass_that_keeps_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = TrlArms(tmp_path, *DPO)
    expected = arms.run(attach_in_trainer=True)
    monkeypatch.setattr("peft.PeftModel.disable_adapter", lambda model: nullcontext())
    found = arms.run(prepare_plain, attach_in_trainer=True)
    assert compare_trajectories(expected, found)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "multimodal.md"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pattern_of_the_docs_keeps_to_the_language_model(family: str, tmp_path: Path) -> None:
    """docs/how-to/multimodal.md has it."""
    base = poros.load(write(family, tmp_path / "base"), device="cpu")
    (pattern,) = set(re.findall(r'exclude_modules=r"([^"]+)"', PAGE.read_text()))
    config = LoraConfig(target_modules="all-linear", exclude_modules=pattern)
    model = get_peft_model(base, config)
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    layers = f"base_model.model.{FAMILIES[family].own_layers}."
    assert names and all("language_model" in name for name in names)
    assert any(name.startswith(layers) for name in names)
