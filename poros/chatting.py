"""Talking to a model with its adapter, its base streamed where it does not fit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from poros.api import prepare, runtime
from poros.errors import PolicyError, quoted
from poros.loaders.load import load
from poros.loaders.tokenizer import read_tokenizer


class Chat:
    """A conversation.

    Args:
        adapter: Its folder.
        base: The checkpoint or store it was trained on.
        vram: What the model may take on the GPU; None is what is free.
        system: What the conversation begins with.
        max_new_tokens: Of an answer.
        temperature: 0 takes the likeliest token each time.
        seed: Of what is drawn otherwise.
        allow_untested: Also an architecture without a record.

    Attributes:
        notes: What a person should know, a line each.
    """

    def __init__(
        self,
        adapter: Path,
        base: str,
        *,
        vram: str | None = None,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        seed: int = 0,
        allow_untested: bool = False,
    ) -> None:
        from peft import PeftModel
        if not 0 <= temperature < float("inf"):
            raise PolicyError(f"--temperature: expected 0 or above, found {temperature}")
        self._tokenizer: Any = read_tokenizer(_with_tokenizer(adapter, base))
        model: Any = PeftModel.from_pretrained(load(base), str(adapter))
        self._model = prepare(
            model.eval(), vram_budget=vram, self_check="off", allow_unvalidated=allow_untested
        )
        self._temperature = temperature
        self._most = max_new_tokens
        self._begin = [] if system is None else [{"role": "system", "content": system}]
        self._said = list(self._begin)
        torch.manual_seed(seed)
        streaming = runtime(self._model)
        self.notes: list[str] = []
        if streaming.num_slots < streaming.num_blocks:
            gb = streaming.stats()["host_num_bytes"] / 1e9
            self.notes.append(
                f"the base does not fit as a whole: each token reads {gb:.1f} GB of it over the bus"
            )
        if not self._tokenizer.chat_template:
            self.notes.append("the tokenizer has no chat template: what you write is completed")

    def reset(self) -> None:
        """Begin anew."""
        self._said = list(self._begin)

    def answer(self, question: str, show: Callable[[str], None]) -> str:
        """The answer to ``question``, shown as it comes. Ctrl-C ends it; what came is kept."""
        from transformers import TextStreamer

        class Shown(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                parts.append(text)
                show(text)

        parts: list[str] = []
        tokens = self._tokens(question).to(runtime(self._model).device)
        options: dict[str, Any] = {"do_sample": False}
        if self._temperature:
            options = {"do_sample": True, "temperature": self._temperature}
        try:
            with torch.no_grad():
                self._model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=self._most,
                    pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id,
                    streamer=Shown(self._tokenizer, skip_prompt=True, skip_special_tokens=True),
                    **options,
                )
        except KeyboardInterrupt:
            pass
        found = "".join(parts)
        if self._tokenizer.chat_template:
            self._said += [{"role": "assistant", "content": found}]
        return found

    def _tokens(self, question: str) -> torch.Tensor:
        if not self._tokenizer.chat_template:
            found: torch.Tensor = self._tokenizer(question, return_tensors="pt").input_ids
            return found
        self._said += [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(
            self._said, add_generation_prompt=True, tokenize=False
        )
        found = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        return found


def questions(read: Callable[[], str], chat: Chat, hint: Callable[[str], None]) -> Iterator[str]:
    """What a person asks, until ``/exit`` or the end of the input; ``/reset`` begins anew."""
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        if line == "/reset":
            chat.reset()
        elif line.startswith("/"):
            hint(f"expected a question, /reset or /exit, found {quoted(line)}")
        elif line:
            yield line


def _with_tokenizer(adapter: Path, base: str) -> str:
    return str(adapter) if (adapter / "tokenizer_config.json").is_file() else base
