"""Runs a conversation with a model and its adapter; a base that does not fit is streamed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from poros.api import prepare, runtime
from poros.errors import PolicyError, PorosError, UnsupportedModelError, quoted
from poros.loaders.header import defect
from poros.loaders.load import load
from poros.loaders.settings import describe_error
from poros.loaders.tokenizer import (
    read_tokenizer,
    require_known_tokens,
    tokenizer_errors,
)
from poros.merging.saved_adapter import SavedAdapter
from poros.utils.formatting import size


class Chat:
    """A conversation with a model and its adapter.

    Args:
        base: Checkpoint or store of the base that the adapter was trained on.
        vram: GPU memory budget of the model; None takes the free memory.
        temperature: Sampling temperature; 0 is greedy.

    Raises:
        CheckpointFormatError: If a file of adapter, base or tokenizer is malformed.
        UnsupportedModelError: If the adapter does not fit the base.
    """

    def __init__(
        self,
        adapter: SavedAdapter,
        base: str,
        *,
        revision: str | None = None,
        vram: str | None = None,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise PolicyError(f"temperature: expected 0 or above, found {temperature}")
        if adapter.auto_class is not None:
            raise UnsupportedModelError(
                "adapter: expected one of a language model, found one of a model that writes no "
                f"text ({adapter.auto_class}); use it from a script"
            )
        self._base = base
        has_tokenizer = (adapter.folder / "tokenizer_config.json").is_file()
        self._tokenizer_path = str(adapter.folder) if has_tokenizer else base
        self._tokenizer: Any = read_tokenizer(self._tokenizer_path)
        options: dict[str, Any] = {} if revision is None else {"revision": revision}
        model = adapter.attach(load(base, **options))
        ends = model.generation_config.eos_token_id
        every = ends if isinstance(ends, list) else [ends or 0]
        if not all(isinstance(each, int) for each in every):
            raise self._unusable(f"eos_token_id {quoted(ends)}")
        self._vocab_size = model.get_input_embeddings().weight.shape[0]
        self._model = prepare(model, vram_budget=vram, self_check="off")
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._initial = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._initial)
        torch.manual_seed(seed)
        streaming = runtime(self._model)
        self.notes: list[str] = []
        is_streamed = streaming.num_slots < streaming.num_blocks
        if is_streamed and streaming.device.type != "cpu":
            read = size(streaming.stats()["host_num_bytes"])
            self.notes.append(
                f"the base does not fit on the GPU: each token reads {read} of it over PCIe"
            )
        if not self._tokenizer.chat_template:
            self.notes.append("the tokenizer has no chat template: the model continues your text")

    def reset(self) -> None:
        self._messages = list(self._initial)

    def answer(self, question: str, show: Callable[[str], None]) -> str:
        """Answer ``question`` and show the answer as it comes. Ctrl-C ends and keeps it."""
        from transformers import TextStreamer

        class Shown(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                parts.append(text)
                show(text)

        parts: list[str] = []
        tokens = self._tokens(question).to(runtime(self._model).device)
        options: dict[str, Any] = {"do_sample": False, "num_beams": 1}
        if self._temperature:
            options |= {"do_sample": True, "temperature": self._temperature}
        try:
            with torch.no_grad():
                self._model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=self._max_new_tokens,
                    pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id,
                    streamer=Shown(self._tokenizer, skip_prompt=True, skip_special_tokens=True),
                    **options,
                )
        except KeyboardInterrupt:
            pass
        except PorosError:
            raise
        except (TypeError, ValueError) as error:  # transformers, about generation settings
            raise self._unusable(describe_error(error)) from error
        found = "".join(parts)
        if self._tokenizer.chat_template:
            self._messages += [{"role": "assistant", "content": found}]
        return found

    def _unusable(self, found: str) -> PorosError:
        return defect(
            f"{quoted(self._base)}: generation_config.json",
            f"expected settings that transformers generates with, found {found}",
            remedy="fix the file",
        )

    def _tokens(self, question: str) -> torch.Tensor:
        has_template = bool(self._tokenizer.chat_template)
        messages = [*self._messages, {"role": "user", "content": question}]
        try:
            with tokenizer_errors(self._tokenizer_path):
                text = question
                if has_template:
                    text = self._tokenizer.apply_chat_template(
                        messages, add_generation_prompt=True, tokenize=False
                    )
                found: torch.Tensor = self._tokenizer(
                    text, add_special_tokens=not has_template, return_tensors="pt"
                ).input_ids
        except Exception as error:  # from a template, which may raise anything
            raise defect(
                Path(self._tokenizer_path),
                f"expected a chat template and a tokenizer for this conversation, found "
                f"{describe_error(error)}",
                remedy="use another tokenizer, or /reset the conversation",
            ) from error
        if not found.numel():
            raise defect(Path(self._tokenizer_path), "expected tokens of the question, found none")
        require_known_tokens(int(found.max()), self._vocab_size, self._tokenizer_path)
        if has_template:
            self._messages = messages
        return found


def questions(read: Callable[[], str], chat: Chat, hint: Callable[[str], None]) -> Iterator[str]:
    """Yield questions until ``/exit`` or the end of the input; ``/reset`` clears the chat."""
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
