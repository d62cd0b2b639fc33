"""Trains a 70B model on a 24 GB card, from a store on disk that is quantized once.

    python -m poros.examples.big_model meta-llama/Llama-3.3-70B-Instruct train.jsonl

The store takes about 40 GB on disk and in host memory. Rows have a ``text``.
"""

from pathlib import Path

import torch
import typer
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

import poros


def main(
    model: str,
    data: str,
    store: Path = Path("store"),
    out: str = "runs/big",
    vram: str = "22GiB",
    host: str | None = None,
    steps: int = -1,
) -> None:
    """Train, and save the adapter in ``out``."""
    # The first call quantizes, one layer at a time; later calls open the store in seconds. With
    # host="24GiB", training reads the layers beyond 24 GiB of host memory from the disk.
    base = poros.load(model, store=store, host_budget=host)
    adapted = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    typer.echo(poros.plan(adapted, seq_len=1024, vram_budget=vram, accumulation=8, micro_batches=8))
    prepared = poros.prepare(adapted, vram_budget=vram)

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_dataset("json", data_files=data, split="train")
    rows = rows.map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=1024),
        remove_columns=rows.column_names,
    )
    settings = TrainingArguments(
        out,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,  # all eight share one pass over the base
        learning_rate=1e-4,
        optim="adamw_bnb_8bit" if torch.cuda.is_available() else "adamw_torch",
        max_steps=steps,
        logging_steps=1,
        save_steps=50,
        bf16=torch.cuda.is_available(),
        report_to="none",
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=64)
    trainer = poros.PorosTrainer(prepared, settings, train_dataset=rows, data_collator=collator)
    trainer.train()
    trainer.save_model(out)


if __name__ == "__main__":
    typer.run(main)
