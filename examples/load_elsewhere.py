"""An adapter without Poros: it is PEFT's own format, so transformers and PEFT are enough.

python -m poros.examples.load_elsewhere Qwen/Qwen2.5-7B-Instruct runs/sft "What is a slot?"
"""

import torch
import typer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model: str, adapter: str, prompt: str, max_new_tokens: int = 64) -> None:
    """Print what the model with its adapter goes on to say."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map="auto")
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    given = tokenizer(prompt, return_tensors="pt").to(adapted.device)
    found = adapted.generate(**given, max_new_tokens=max_new_tokens, do_sample=False)
    typer.echo(tokenizer.decode(found[0], skip_special_tokens=True))


if __name__ == "__main__":
    typer.run(main)
