"""The script that ``poros.loaders.bounded`` runs in a child.

It imports nothing of Poros and little else, so that it starts at once. It does with a stranger's
patterns what is going to be done with them, and ends. What they give does not matter.
"""

import json
import os
import re
import sys
from typing import Any

# Plain text; then runs of like characters with something else behind them, on which patterns
# backtrack.
_PLAIN = "The slot holds a block, 3 of 40: it's a test.\n\n  Once more\t(\u00fcber 1_000 \u4f60)!"
_RUNS = [
    run * 200 + end
    for run in ("a", "A", " ", "1", "\n", "-", "aA", "a ", "ab1 ")
    for end in ("!", "z")
]
_CONVERSATION = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]
NO_MEMORY, PANIC = 3, 4
"""Exit codes."""


def main() -> int:
    """Read the work from stdin as JSON, do it, and return the exit code."""
    work = json.load(sys.stdin)
    try:
        if "tokenizer" in work:
            from tokenizers import Tokenizer

            limit(work)
            tokenize(Tokenizer, work["tokenizer"], work["texts"])
        if "template" in work:
            from transformers.utils.chat_template_utils import render_jinja_template

            limit(work)
            render(render_jinja_template, work["template"], work["tokens"])
        if "patterns" in work:
            limit(work)
            match(work["patterns"], work["names"])
    except MemoryError:
        return NO_MEMORY
    return 0


def limit(work: dict[str, Any]) -> None:
    """Limit processor time and memory of this process."""
    try:
        import resource
    except ImportError:  # Windows: the parent's limit of time alone
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + work["seconds"]
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, work["num_bytes"]),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, hard))


def tokenize(kind: Any, file: str, texts: list[str]) -> None:
    """Load a tokenizer and let it read texts."""
    try:
        tokenizer = kind.from_file(file)
        for text in (_PLAIN, *texts):
            tokenizer.encode(text)
    except MemoryError:
        raise
    except Exception:  # reported when it is loaded in earnest
        return
    except BaseException as error:  # a panic, which is no Exception
        print(error)
        sys.exit(PANIC)
    for text in _RUNS:
        try:
            tokenizer.encode(text)
        except BaseException:
            continue


def render(by: Any, template: str, tokens: dict[str, Any]) -> None:
    """Render a conversation of one turn, and one of several."""
    for messages in (_CONVERSATION[1:2], _CONVERSATION[1:], _CONVERSATION):
        try:
            by([messages], chat_template=template, add_generation_prompt=True, **tokens)
        except MemoryError:
            raise
        except RecursionError as error:
            print(error)
            sys.exit(PANIC)
        except Exception:  # such as a template that knows no system
            continue


def match(patterns: list[str], names: list[str]) -> None:
    """Match as PEFT does."""
    for pattern in patterns:
        try:
            kinds = re.compile(pattern), re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError):
            continue
        for name in names:
            kinds[0].fullmatch(name)
            kinds[1].match(name)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
