"""TRL's trainers on a resident and on a prepared model, on the CPU or a GPU."""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast

import poros
from poros.accumulation.trainer import on_one_gpu
from poros.gates import tiny
from poros.gates.reference import Entry, Trajectory
from tests.comparing import compare_trajectories
from tests.support import make_base, prepare_plain
from tests.trainer_parity import ADAPTER_FILES, train_with_trainer

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


def tokenizer(more: Mapping[str, int] | None = None) -> PreTrainedTokenizerFast:
    """A word-level tokenizer, made on the spot; ``more`` are special tokens and their numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<pad>", "<bos>", "<eos>", "<unk>", *dict.fromkeys(WORDS.split())]
    numbers = {word: number for number, word in enumerate(known)} | dict(more or {})
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.add_special_tokens(list(more or ()))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


@dataclass
class Arms:
    """Runs a trainer on a resident and on a prepared model, made from equal bytes.

    Attributes:
        folder: Where the outputs go.
        trainer_class: Of TRL.
        arguments_class: Its arguments.
        rows: The training rows.
        dtype: Of the base, and of its 4-bit computation.
        quantize: Whether the base is NF4.
        device: Where both arms run.
        num_steps: Of a run.
        auto_class: As in ``poros.load``; with a head for one class.
        eval_rows: Rows to evaluate on.
        trainer: That of the latest run.
    """

    folder: Path
    trainer_class: type
    arguments_class: type
    rows: list[dict[str, Any]]
    _: KW_ONLY
    dtype: torch.dtype = torch.bfloat16
    quantize: bool = True
    device: str = "cpu"
    num_steps: int = NUM_STEPS
    auto_class: str | None = None
    eval_rows: list[dict[str, str]] | None = None
    trainer: Any = None

    def base(self) -> Any:
        return make_base(
            num_layers=NUM_LAYERS,
            hidden_size=64,
            dropout=0.05,
            dtype=self.dtype,
            quantize=self.quantize,
            device=self.device,
            auto_class=self.auto_class,
        )

    def adapter(self) -> LoraConfig:
        """As users attach it to a base; the head of a reward model is trained as a whole."""
        task = "CAUSAL_LM" if self.auto_class is None else "SEQ_CLS"
        return LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear", task_type=task)

    def run(
        self, prepare: Prepare | None = None, *, attach_in_trainer: bool = False, **options: Any
    ) -> Trajectory:
        """One training run; the adapter is made by the caller, or by the trainer."""
        extra: dict[str, Any] = {}
        if attach_in_trainer:
            model = self.base()
            extra["peft_config"] = self.adapter()
        else:
            if self.auto_class is None:
                model = tiny.attach(self.base(), dropout=0.05)
            else:
                torch.manual_seed(1)
                model = get_peft_model(self.base(), self.adapter())
            model = model if prepare is None else prepare(model)
        arguments = self.arguments_class(
            output_dir=str(self.folder / "run"),
            max_steps=self.num_steps,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=self.device == "cpu",
            dataloader_pin_memory=self.device != "cpu",
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
            on_one_gpu(arguments),
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


def check(
    arms: Arms, policy: dict[str, Any] | None = None, grouped: type | None = None, **options: Any
) -> Trajectory:
    """Both arms, compared in every bit; the streamed run, by the class ``grouped`` if given."""
    expected = arms.run(**options)
    arms.trainer_class = grouped or arms.trainer_class
    found = arms.run(partial(prepare_plain, **(policy or {})), **options)
    assert [str(each) for each in compare_trajectories(expected, found)] == []
    assert poros.runtime(arms.model).self_check["status"] == "passed"
    assert poros.runtime(arms.model).stats()["num_loads"] > 0
    assert len(found.steps) == arms.num_steps
    assert all(bool(each.any()) for each in found.steps[-1].gradients.values())
    num_trained = 2 * 7 * NUM_LAYERS + (arms.auto_class is not None)
    for step in found.steps:
        assert len(step.gradients) == len(step.exp_avg) == num_trained
    losses = [float(each) for step in found.steps for each in step.losses]
    assert len(set(losses)) == len(losses) > 0 and all(map(math.isfinite, losses))
    assert sum(entry.quantity == ADAPTER_FILES for entry in found.extras) >= 2
    return found
