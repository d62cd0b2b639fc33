"""FLORA in a Trainer: accumulation and clipping are the optimizer's, not the Trainer's."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from poros.optim.flora import Flora, expect


class FloraCallback(TrainerCallback):
    """Copies ``TrainingArguments`` into the Trainer's ``Flora`` when training begins.

    The optimizer gets ``gradient_accumulation_steps`` and ``max_grad_norm``. The Trainer's own
    clipping sees no gradient and does nothing: its log shows a norm of 0, and ``Flora.grad_norm``
    has the estimate. The Trainer divides its loss, so the optimizer does not.

        Trainer(model, args, optimizers=(Flora(...), None), callbacks=[FloraCallback()])

    Raises:
        OptimizerError: From ``trainer.train()``, before the first step: if the optimizer is not a
            ``Flora``, if its values differ from the arguments', or if these ask for fp16.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        flora: Any = getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))
        expect(isinstance(flora, Flora), "optimizers", "a poros.optim.Flora", flora)
        steps, clip = args.gradient_accumulation_steps, args.max_grad_norm or 0.0
        ours = {"accumulation": (flora.accumulation, 1, steps), "fp16": (args.fp16, False)}
        ours["loss_is_averaged"] = (flora.loss_is_averaged, True)
        if clip and flora.has_settled_clipping:
            ours["max_grad_norm"] = (flora.max_grad_norm, clip)
        for name, (found, *allowed) in ours.items():
            wanted = f"nothing, or {allowed[-1]!r} as the Trainer has it or needs it"
            expect(found in allowed, name, wanted, found)
        flora.accumulation, flora.has_settled_clipping = steps, True
        flora.max_grad_norm = clip or flora.max_grad_norm
