"""A small checkpoint with a tokenizer, and rows of every form, made on the spot."""

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

from poros.finetune.data import Rows, read_data
from poros.finetune.resuming import inspect_run_dir
from poros.finetune.run import finetune
from poros.finetune.tokens import Tokens, load_tokenizer, tokenize
from poros.finetune.trainers import Stopping
from poros.gates import tiny
from poros.recipes.checks import checked
from poros.recipes.reading import read_recipe
from poros.recipes.recipe import Recipe
from tests.trainers import sentence

SHORT: dict[str, Any] = {
    "training__max_length": 64,
    "training__pad_to_multiple_of": 16,
    "adapter__r": 4,
    "adapter__lora_dropout": 0.1,
}
"""Of recipes whose rows have a few tokens."""

NUM_STEPS = 4


def in_four_steps(model: Path, rows: Path) -> dict[str, Any]:
    """A recipe that saves at each step, for runs that are interrupted."""
    return {
        "model__source": model,
        "data__source": rows,
        **SHORT,
        "adapter__target_modules": "q_proj,down_proj",  # however many, it is interrupted alike
        "training__max_steps": NUM_STEPS,
        "training__gradient_accumulation_steps": 1,
        "memory__slots": 2,
        "training__save_steps": 1,
    }


SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
"""For chats; it does not mark the assistant's tokens."""


def rows(form: str, count: int = 200) -> list[dict[str, Any]]:
    """Rows of one form, of different lengths."""
    made: list[dict[str, Any]] = []
    for number in range(count):
        question, answer = sentence(number, 3 + number % 5), sentence(number + 1, 4 + number % 9)
        if form == "messages":
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            if number % 3 == 0:
                turns += [{"role": "user", "content": "?"}, {"role": "assistant", "content": "its"}]
            made.append({"messages": turns})
        elif form in ("completions", "labelled"):
            label = {"label": number % 3 > 0} if form == "labelled" else {}
            made.append({"prompt": question + " ", "completion": answer, **label})
        elif form == "text":
            made.append({"text": answer})
        else:
            other = sentence(number + 2, 3 + number % 6)
            made.append({"prompt": question + " ", "chosen": answer, "rejected": other})
    return made


def write_rows(path: Path, content: str | list[dict[str, Any]], count: int = 200) -> Path:
    if isinstance(content, str):
        content = rows(content, count)
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, by the rules that transformers has for the model's type."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    bpe = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([sentence(number, 16) for number in range(32)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<eos>",  # as with many models: padding has to be told by its place
        eos_token="<eos>",
        chat_template=template,
    )


def write_model(
    folder: Path,
    *,
    template: str | None = None,
    layers: int = 3,
    architecture: str = "qwen2",
    positions: int | None = None,
) -> Path:
    """A random checkpoint in bfloat16 with its tokenizer."""
    config = tiny.small_config(architecture, num_layers=layers, hidden_size=64)
    if positions is not None:
        config.max_position_embeddings = positions
    tiny.write_checkpoint(config, folder, dtype=torch.bfloat16)
    tokenizer(template).save_pretrained(folder)
    return folder


def write_base(folder: Path) -> Path:
    """A checkpoint without a chat template, for rows of any length."""
    return write_model(folder, positions=32768)


def write_adapter(base: Path, folder: Path, config: Any, named: str | None = None) -> Path:
    """A random adapter of any configuration, which names its base by its path or as ``named``."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)
    generator = torch.Generator().manual_seed(0)
    for each in model.parameters():
        if each.requires_grad:
            each.data += 0.05 * torch.randn(each.shape, generator=generator)
    model.peft_config["default"].base_model_name_or_path = named or str(base)
    model.save_pretrained(folder)
    return folder


def plain_base(source: Any, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """A base in 4 bit, by transformers alone; ``kind`` may load an adapter's with it."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    options = {"dtype": torch.bfloat16, **options}
    base = kind.from_pretrained(source, quantization_config=settings, **options)
    for module in base.modules():
        # Else bitsandbytes rounds weights in evaluations on some CPUs.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base


class Trained(NamedTuple):
    adapter: bytes
    losses: list[float]
    said: str


def recipe_of(**said: object) -> Recipe:
    """A recipe from settings: ``training__max_steps=3``."""
    flags = {key.replace("__", "."): str(value) for key, value in said.items()}
    return checked(read_recipe(None, flags))


def tokens_of(model: Path, source: object, **said: object) -> tuple[Recipe, Rows, Any, Tokens]:
    """Of rows under ChatML, unless another template is named; and what they are made with."""
    said = {"data__chat_template": "chatml", **said}
    recipe = recipe_of(model__source=model, data__source=source, **said)
    found, _ = read_data(recipe)
    tokenizer = load_tokenizer(recipe, found.form)
    settled = found.settled(has_template=bool(tokenizer.chat_template))
    return recipe, found, tokenizer, tokenize(settled, tokenizer, recipe)


def run(recipe: Recipe) -> Trained:
    """Train in this process, as ``poros finetune`` does."""
    adapter, said = _finetune(recipe)
    assert adapter is not None
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    return Trained(weights, losses(adapter.parent), said)


def announced(recipe: Recipe) -> str:
    """What a dry run prints, with its first row."""
    return _finetune(recipe, is_dry=True)[1]


def _finetune(recipe: Recipe, *, is_dry: bool = False) -> tuple[Path | None, str]:
    inspect_run_dir(recipe)
    said = io.StringIO()
    console = Console(file=said, width=200)
    found = finetune(recipe, *read_data(recipe), console, is_dry=is_dry, num_shown=int(is_dry))
    return found, said.getvalue()


def losses(run: Path) -> list[float]:
    """Of every step, as the Trainer has logged them."""
    newest = max(run.glob("checkpoint-*"), key=lambda each: int(each.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [line["loss"] for line in history if "loss" in line]


# Runs that end at a step of their own accord, as if their process had gone.


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Do something once a step has been logged."""
    genuine = Stopping.on_log

    def on_log(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        genuine(self, args, state, control, **kwargs)
        if state.global_step == step:
            act()

    monkeypatch.setattr(Stopping, "on_log", on_log)


class Broken(RuntimeError):
    pass


def break_at(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, step: int) -> None:
    """Leave a run that ended at a step, as if its process had gone."""

    def act() -> None:
        raise Broken

    with monkeypatch.context() as patch, pytest.raises(Broken):
        at_step(patch, step, act)
        run(recipe)
