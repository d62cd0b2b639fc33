"""The loops that train: a plain one, and the HF Trainer's. Both call the meter around each step.

The optimizer is pinned here. ``optimizer_settings`` reads it back from what a loop really used.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from transformers import Trainer

Batch = Mapping[str, torch.Tensor]

OPTIMIZER: dict[str, Any] = {
    "lr": 1e-4,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "fused": True,
}


class NotPossibleError(RuntimeError):
    """An arm that cannot run here. The message says why, and stands in its row."""


class Meter(Protocol):
    """What a loop reports to."""

    def begin(self) -> None:
        """Before a step, the batch being on the device."""

    def end(self, loss: torch.Tensor) -> None:
        """After it, gradients being reset."""


Loop = Callable[[Any, Batch, Meter, int], Any]
"""Model, batch on the device, meter, number of steps; returns the optimizer."""


def make_optimizer(model: Any) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, **OPTIMIZER)


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Kind and settings of ``optimizer``.

    Raises:
        ValueError: If groups that hold parameters differ.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    settings = [{key: group[key] for key in OPTIMIZER} for group in groups]
    if any(other != settings[0] for other in settings):
        raise ValueError(f"expected the same settings in all groups, found {settings}")
    return {"optimizer": type(optimizer).__name__, **settings[0]}


def plain_loop(model: Any, batch: Batch, meter: Meter, num_steps: int) -> Any:
    """Forward, backward, step, reset: nothing else."""
    optimizer = make_optimizer(model)
    for _ in range(num_steps):
        meter.begin()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.end(loss.detach())
        del loss
    return optimizer


def trainer_loop(model: Any, batch: Batch, meter: Meter, num_steps: int) -> Any:
    """``transformers.Trainer``: same optimizer, batch and dtypes; it neither saves nor logs.

    The time of a step is that between its callbacks ``on_step_begin`` and ``on_step_end``: fetching
    the batch is not in it.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = _make_trainer(model, batch, meter, num_steps, folder)
        trainer.train()
    optimizer: Any = trainer.optimizer
    trainer.accelerator.free_memory()
    return getattr(optimizer, "optimizer", optimizer)


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of one batch over and over."""

    def __init__(self, batch: Batch, num_batches: int) -> None:
        self._batch = {key: tensor.cpu() for key, tensor in batch.items()}
        self._num_rows = len(next(iter(batch.values())))
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_rows * self._num_batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        return {key: tensor[index % self._num_rows] for key, tensor in self._batch.items()}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self[index] for index in range(len(self)))


def _make_trainer(model: Any, batch: Batch, meter: Meter, num_steps: int, folder: str) -> "Trainer":
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    device = next(iter(batch.values())).device
    losses: list[torch.Tensor] = []

    class Timing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            meter.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            meter.end(losses.pop())

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            # Rows of a batch in another order would give sums in another order.
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            losses.append(loss)
            return loss

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=num_steps,
        per_device_train_batch_size=len(next(iter(batch.values()))),
        optim="adamw_torch_fused",
        learning_rate=OPTIMIZER["lr"],
        adam_beta1=OPTIMIZER["betas"][0],
        adam_beta2=OPTIMIZER["betas"][1],
        adam_epsilon=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"],
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type != "cpu",
        seed=0,
    )
    if arguments.n_gpu > 1:
        raise NotPossibleError("the Trainer would spread over all GPUs: set CUDA_VISIBLE_DEVICES")
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=_Rows(batch, num_steps),
        callbacks=[Timing()],
    )
    trainer.remove_callback(PrinterCallback)
    # The model divides by its own count of tokens, as in the plain loop; the Trainer's count, which
    # is for batches in several parts, would make it sum and divide.
    trainer.model_accepts_loss_kwargs = False
    return trainer
