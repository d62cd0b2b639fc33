"""Learns from a reward of your own, with TRL's ``GRPOTrainer``; the streamed model also generates.

    python -m poros.examples.grpo Qwen/Qwen2.5-7B-Instruct prompts.jsonl --out runs/grpo

Rows have a ``prompt``: a text, or a list of messages. Most of the time goes into the answers, since
each of their tokens reads all blocks that are not on the GPU.

Source:
    Shao et al. 2024, DeepSeekMath (arXiv:2402.03300).
"""

from typing import Any

import torch
import typer
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import poros


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Score answers; this one prefers about 100 characters. ``columns`` are those of the rows."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [-abs(len(text) - 100) / 100 for text in texts]


def main(
    model: str,
    data: str,
    out: str = "runs/grpo",
    vram: str = "12GiB",
    steps: int = -1,
    answers: int = 8,
    tokens: int = 256,
) -> None:
    """Train, and save the adapter in ``out``."""
    base = poros.load(model)
    adapted = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    prepared = poros.prepare(adapted, vram_budget=vram)
    settings = GRPOConfig(
        out,
        # All answers to a prompt are one micro-batch, so they share each block. The trainer counts
        # its micro-batches as they begin: poros.BlockMajorMixin would run them one by one.
        num_generations=answers,
        per_device_train_batch_size=answers,
        max_completion_length=tokens,
        learning_rate=1e-5,
        max_steps=steps,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,  # the budget decides what is recomputed
        report_to="none",
    )
    trainer = GRPOTrainer(
        prepared,
        reward,
        args=settings,
        train_dataset=load_dataset("json", data_files=data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    trainer.save_model(out)


if __name__ == "__main__":
    typer.run(main)
