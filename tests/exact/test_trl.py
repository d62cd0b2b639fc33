"""TRL's trainers run unchanged on a prepared model, to the bits of the resident run.

Nothing is asked of TRL but its defaults: bf16 autocast, activation checkpointing (which a prepared
model ignores), adapters of a 4-bit model cast to bf16 by the trainer, its own collators and its own
loss, computed from the head's weight. The trainers are subclassed only to listen.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

import poros
from poros.gates import tiny
from poros.gates.reference import Entry, Trajectory, compare_trajectories
from poros.gates.trainer_parity import ADAPTER_FILES, train_with_trainer
from poros.head.host_matrix import HostMatrix
from tests.exact.recorded import record_on_tapes
from tests.support import prepare_plain

trl = pytest.importorskip("trl", reason="trl is an optional dependency of the tests")
datasets = pytest.importorskip("datasets", reason="trl needs datasets")

NUM_LAYERS = 3
NUM_STEPS = 2
WORDS = "the slot holds a block that moves while layers compute and host memory waits its turn"
Prepare = Callable[..., Any]


def sentence(number: int, length: int) -> str:
    words = WORDS.split()
    return " ".join(words[(number * 7 + 3 * each) % len(words)] for each in range(length))


TEXTS = [{"text": sentence(number, 6 + number % 9)} for number in range(24)]
COMPLETIONS = [
    {"prompt": sentence(number, 5), "completion": sentence(number + 1, 4 + number % 5)}
    for number in range(24)
]
PREFERENCES = [
    {
        "prompt": sentence(number, 5 + number % 3),
        "chosen": sentence(number + 1, 4 + number % 4),
        "rejected": sentence(number + 2, 3 + number % 6),
    }
    for number in range(24)
]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer, made on the spot."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<pad>", "<bos>", "<eos>", "<unk>", *dict.fromkeys(WORDS.split())]
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


class Arms:
    """Runs a trainer on a resident and on a prepared model, made from equal bytes.

    Args:
        folder: Where the checkpoint and the outputs go.
        trainer_class: Of TRL.
        arguments_class: Its arguments.
        rows: The training rows.
        dtype: Of the base, and of its 4-bit computation.
        quantize: Whether the base is NF4.
    """

    def __init__(
        self,
        folder: Path,
        trainer_class: type,
        arguments_class: type,
        rows: list[dict[str, str]],
        *,
        dtype: torch.dtype = torch.bfloat16,
        quantize: bool = True,
    ) -> None:
        self.folder = folder
        self.trainer_class = trainer_class
        self.arguments_class = arguments_class
        self.rows = rows
        self.dtype = dtype
        self.quantize = quantize
        self.trainer: Any = None
        """The trainer of the latest run."""
        self.eval_rows: list[dict[str, str]] | None = None
        config = tiny.small_config("qwen2", num_layers=NUM_LAYERS, hidden_size=64, dropout=0.05)
        tiny.write_checkpoint(config, folder / "base", dtype=dtype)

    def base(self) -> Any:
        return tiny.load_base(self.folder / "base", dtype=self.dtype, quantize=self.quantize)

    def run(
        self, prepare: Prepare | None = None, *, attach_in_trainer: bool = False, **options: Any
    ) -> Trajectory:
        """One training run; the adapter is made by the caller, or by the trainer."""
        extra: dict[str, Any] = {}
        if attach_in_trainer:
            model = self.base()
            extra["peft_config"] = LoraConfig(
                r=4, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"
            )
        else:
            model = tiny.attach_lora(self.base(), dropout=0.05)
            model = model if prepare is None else prepare(model)
        arguments = self.arguments_class(
            output_dir=str(self.folder / "run"),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **options,
        )
        owner = self

        class Prepared(self.trainer_class):  # type: ignore[misc, name-defined]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                owner.trainer = self
                if attach_in_trainer and prepare is not None:
                    prepare(self.model)

        torch.manual_seed(3)
        trajectory = train_with_trainer(
            model,
            arguments,
            datasets.Dataset.from_list(self.rows),
            eval_dataset=self.eval_rows and datasets.Dataset.from_list(self.eval_rows),
            trainer_class=Prepared,
            processing_class=tokenizer(),
            **extra,
        )
        for number, line in enumerate(self.trainer.state.log_history):
            for key, value in line.items():
                if isinstance(value, int | float) and not key.endswith(("runtime", "per_second")):
                    logged = torch.tensor(value, dtype=torch.float64)
                    trajectory.extras.append(Entry("log", f"line {number}, {key}", logged))
        return trajectory

    @property
    def model(self) -> Any:
        """The model of the latest run."""
        return self.trainer.model


def check(arms: Arms, policy: dict[str, Any] | None = None, **options: Any) -> Trajectory:
    """Both arms, compared in every bit; the streamed run."""
    expected = arms.run(**options)
    found = arms.run(partial(prepare_plain, **(policy or {})), **options)
    assert [str(each) for each in compare_trajectories(expected, found)] == []
    assert poros.runtime(arms.model).self_check["status"] == "passed"
    assert poros.runtime(arms.model).stats()["num_loads"] > 0
    # Equal runs show something only if there is something in them.
    assert len(found.steps) == NUM_STEPS
    for step in found.steps:
        assert step.losses and all(bool(each.isfinite()) for each in step.losses)
        assert len(step.gradients) == len(step.exp_avg) == 2 * 7 * NUM_LAYERS
    assert all(bool(each.any()) for each in found.steps[-1].gradients.values())
    losses = [float(each) for step in found.steps for each in step.losses]
    assert len(set(losses)) == len(losses)
    assert sum(entry.quantity == ADAPTER_FILES for entry in found.extras) >= 2
    return found


def dtypes(model: Any) -> set[torch.dtype]:
    return {each.dtype for each in model.parameters() if each.requires_grad}


SFT: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "packing": {"packing": True, "max_length": 24},
    "no autocast": {"bf16": False},
    "no checkpointing": {"gradient_checkpointing": False},
}


@pytest.mark.parametrize("kind", SFT)
def test_sft(kind: str, tmp_path: Path) -> None:
    arms = Arms(tmp_path, trl.SFTTrainer, trl.SFTConfig, TEXTS)
    check(arms, **SFT[kind])
    arguments = arms.trainer.args
    assert arguments.bf16 == (kind != "no autocast")
    assert arguments.gradient_checkpointing == (kind != "no checkpointing")
    assert dtypes(arms.model) == {torch.bfloat16}, "TRL casts the adapters of 4-bit models"


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
    monkeypatch.setattr(f"{__name__}.NUM_STEPS", 8)
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
