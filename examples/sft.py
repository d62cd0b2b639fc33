"""Trains on conversations with TRL's ``SFTTrainer``; micro-batches share each block of the base.

    python -m poros.examples.sft Qwen/Qwen2.5-7B-Instruct train.jsonl --out runs/sft

Rows have TRL's formats: ``messages``, ``prompt`` and ``completion``, or ``text``.
"""

import torch
import typer
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import poros


class Trainer(poros.BlockMajorMixin, SFTTrainer):
    """Takes all micro-batches of a step through a block before the next block is loaded."""


def main(model: str, data: str, out: str = "runs/sft", vram: str = "8GiB", steps: int = -1) -> None:
    """Train, and save the adapter in ``out``."""
    base = poros.load(model)  # into host memory
    adapted = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    prepared = poros.prepare(adapted, vram_budget=vram)
    settings = SFTConfig(
        out,
        max_length=1024,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        learning_rate=2e-4,
        max_steps=steps,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        pad_to_multiple_of=64,  # so lengths recur, and layers can be replayed as CUDA graphs
        report_to="none",
    )
    trainer = Trainer(
        prepared,
        settings,
        train_dataset=load_dataset("json", data_files=data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    poros.log_streaming(trainer)  # adds bytes copied, their rate and waits to the logs
    trainer.train()
    trainer.save_model(out)


if __name__ == "__main__":
    typer.run(main)
