"""Preferences, by TRL's ``DPOTrainer``; the reference is the base itself, adapter off.

    python -m poros.examples.dpo Qwen/Qwen2.5-7B-Instruct preferences.jsonl --out runs/dpo

Rows have ``prompt``, ``chosen`` and ``rejected``.

Source:
    Rafailov et al. 2023, Direct Preference Optimization (arXiv:2305.18290).
"""

import torch
import typer
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import poros


class Trainer(poros.BlockMajorMixin, DPOTrainer):
    """Takes all micro-batches of a step through a block before the next block comes."""


def main(
    model: str, data: str, out: str = "runs/dpo", vram: str = "12GiB", steps: int = -1
) -> None:
    """Train, and save the adapter in ``out``."""
    base = poros.load(model)
    adapted = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    prepared = poros.prepare(adapted, vram_budget=vram)
    settings = DPOConfig(
        out,
        beta=0.1,
        max_length=1024,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        learning_rate=2e-5,
        max_steps=steps,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = Trainer(
        prepared,
        args=settings,
        train_dataset=load_dataset("json", data_files=data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    trainer.save_model(out)


if __name__ == "__main__":
    typer.run(main)
