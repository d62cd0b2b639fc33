"""Your own training loop, without a Trainer: ``poros.accumulate`` replaces ``loss.backward()``.

    python -m poros.examples.own_loop Qwen/Qwen2.5-7B-Instruct train.jsonl --out runs/loop

Rows have a ``text``.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import poros

TOGETHER = 8  # micro-batches per optimizer step


def main(
    model: str, data: Path, out: str = "runs/loop", vram: str = "8GiB", steps: int = 100
) -> None:
    """Train, and save the adapter in ``out``."""
    base = poros.load(model)
    adapted = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    prepared = poros.prepare(adapted, vram_budget=vram).train()
    device = poros.runtime(prepared).device
    trained = [each for each in prepared.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)  # after prepare, which moves the adapters
    rows = tokens(model, data, device)
    for step in range(steps):
        ids = [next(rows) for _ in range(TOGETHER)]
        batches = [{"input_ids": each, "labels": each} for each in ids]
        losses = poros.accumulate(
            prepared, batches, loss=lambda model, batch: model(**batch).loss / TOGETHER
        )
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        typer.echo(f"step {step + 1}: loss {float(sum(losses)):.4f}")
    prepared.save_pretrained(out)


def tokens(model: str, data: Path, device: torch.device) -> Iterator[torch.Tensor]:
    """Rows of one text each, again and again."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines()]
    while True:
        for text in texts:
            found = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
            yield found.input_ids.to(device)


if __name__ == "__main__":
    typer.run(main)
