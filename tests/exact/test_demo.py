"""The demo: its text and checkpoint, a small run of it end to end, and what makes it fail."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import poros
from poros.errors import PorosError
from poros.examples.demo import DemoSettings, run_demo
from poros.examples.demo_data import (
    LESSON,
    DemoText,
    ModelSize,
    RowDataset,
    documentation_topics,
    pack_rows,
    split_text,
    train_base,
    train_tokenizer,
    with_lesson,
    write_checkpoint,
)
from poros.examples.demo_picture import draw
from poros.examples.demo_report import MIN_LOSS_DROP, DemoReport, render
from tests.support import prepare_plain

# Enough to learn something.
SMALL = DemoSettings(
    size=ModelSize(num_layers=3, hidden_size=96, intermediate_size=192, vocab_size=512),
    num_base_steps=10,
    num_gate_steps=2,
    num_steps=30,
    num_resident_steps=6,
    learning_rate=2e-2,
    num_eval_rows=16,
    num_new_tokens=4,
    max_shard_num_bytes=400_000,
)
# Enough where nothing has to be learned.
SHORT = replace(
    SMALL, num_base_steps=2, num_steps=3, num_resident_steps=2, num_eval_rows=4, num_new_tokens=2
)


@pytest.fixture(scope="module")
def text() -> DemoText:
    return split_text(documentation_topics())


@pytest.fixture(scope="module")
def tokenizer(text: DemoText) -> PreTrainedTokenizerFast:
    return train_tokenizer((*text.base, *text.train), SMALL.size.vocab_size)


def short_demo(out_dir: Path, **changes: Any) -> DemoReport:
    return run_demo(out_dir, settings=SHORT, device="cpu", console=quiet(), **changes)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def rendered(report: DemoReport) -> str:
    console = quiet()
    render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoReport:
    out_dir = tmp_path_factory.mktemp("demo")
    return run_demo(out_dir, settings=SMALL, device="cpu", console=quiet())


# Text, tokenizer, rows


def test_the_parts_are_large_enough_and_have_no_paragraph_in_common(text: DemoText) -> None:
    parts = [*text.base, *text.train, *text.held_out]
    assert len(parts) == len(set(parts))
    topics = documentation_topics()
    assert set(parts) == {p for t in topics.values() for p in t.split("\n\n") if p.strip()}
    sizes = [sum(map(len, part)) for part in (text.base, text.train, text.held_out)]
    assert sizes[0] > 100_000 and sizes[1] > 60_000 and sizes[1] / 16 < sizes[2] < sizes[1] / 4
    # They look different.
    assert not any(paragraph.startswith(" ") for paragraph in text.base)
    assert all(paragraph.startswith(" ") for paragraph in (*text.train, *text.held_out))
    with pytest.raises(PorosError, match=r"expected text for three parts, found 1 .* in 1 topics"):
        split_text({"a title": "one paragraph"})


def test_rows_hold_the_text_in_order_and_every_second_one_a_line_of_the_lesson(
    text: DemoText, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = pack_rows(tokenizer, text.held_out, 32)
    whole = "\n\n".join(text.held_out)
    assert rows.shape[1] == 32 and rows.dtype == torch.int64
    assert whole.startswith(tokenizer.decode(rows.flatten()))
    assert len(whole) - len(tokenizer.decode(rows.flatten())) < 32 * 20
    item = RowDataset(rows)[1]
    assert torch.equal(item["input_ids"], rows[1]) and torch.equal(item["labels"], rows[1])
    found = with_lesson(tokenizer, rows[:7].clone())
    assert found.shape == (7, 32) and torch.equal(found[1::2], rows[1:7:2])
    for number, row in enumerate(found[::2]):
        question, answer = LESSON[number % len(LESSON)]
        said, _, rest = tokenizer.decode(row).partition("\n\n")
        assert said == f"{question} {answer}"
        assert tokenizer.decode(rows[2 * number]).startswith(rest) and rest


# Checkpoint


def test_the_checkpoint_is_sharded_and_reads_back(
    text: DemoText, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = pack_rows(tokenizer, text.base, SMALL.size.num_tokens)
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        model = train_base(rows, SMALL.size, num_steps=2, on_step=losses.append)
    shards = write_checkpoint(model, tokenizer, tmp_path, max_shard_num_bytes=400_000)

    assert len(losses) == 2
    assert len(shards) >= 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())

    sample = "\n\n".join(text.held_out[:50]) + " caf\u00e9 \u6f22\u5b57"
    ids = tokenizer(sample)["input_ids"]
    read_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert read_tokenizer(sample)["input_ids"] == ids
    assert read_tokenizer.decode(ids) == sample


# The whole


def test_a_small_demo_holds_every_claim(demo: DemoReport) -> None:
    assert demo.parity is not None and demo.parity.exact
    assert demo.num_differing == 0
    assert demo.num_logits == SMALL.num_eval_rows * SMALL.size.num_tokens * SMALL.size.vocab_size
    assert demo.same_outputs and demo.completions["streamed"] == demo.completions["resident"]
    for part in ("train", "held_out"):
        assert demo.loss_after[part] <= demo.loss_before[part] - MIN_LOSS_DROP
    assert demo.passed
    assert demo.stats["num_blocks"] == 3 and demo.stats["num_slots"] == 2
    assert demo.stats["num_loads"] > SMALL.num_steps
    assert 0 < demo.stats["device_num_bytes"] < demo.resident_num_bytes
    assert demo.same_losses and len(demo.runs["streamed"].losses) == SMALL.num_steps
    assert len(demo.runs["resident"].losses) == SMALL.num_resident_steps
    assert {name: len(said) for name, said in demo.completions.items()} == {
        **{"streamed": len(LESSON), "resident": len(LESSON), "base": len(LESSON)}
    }
    summary = rendered(demo)
    assert (
        "@ both: 6 of the 30 steps" in summary and "with losses the same to the last bit" in summary
    )
    assert all(question in summary for question, _ in LESSON) and "after: " in summary
    assert "PASSED" in summary and "FAILED" not in summary
    assert f"{demo.loss_after['held_out']:.4f} after" in summary


def test_the_record_is_on_disk(demo: DemoReport) -> None:
    record = json.loads(demo.files["report"].read_text())
    assert record["passed"] is True and record["parity"]["exact"] is True
    assert record["same_losses"] is True
    assert record["runs"]["resident"]["median_ms"] > 0 < record["runs"]["streamed"]["median_ms"]
    assert record["loss_after"] == demo.loss_after and record["num_differing"] == 0
    assert all(Path(path).exists() for path in record["files"].values())


# What makes it fail


def with_flipped_bit(model: Any) -> Any:
    """Prepare the model, then flip a bit of its second block in host memory."""
    # The check of the first step would stop it; here the gate has to see it.
    model = prepare_plain(model, self_check="off")
    poros.runtime(model).host_slab(1)[0] ^= 1
    return model


def test_a_flipped_bit_fails_the_gate_and_ends_the_demo(tmp_path: Path) -> None:
    report = short_demo(tmp_path, prepare=with_flipped_bit)
    assert report.num_differing > 0 and not report.passed
    assert "adapter" not in report.files and not report.loss_before
    assert "FAILED: streamed and resident training" in rendered(report)


def test_a_bit_flipped_after_the_gate_fails_the_comparison(tmp_path: Path) -> None:
    calls = []

    def prepare(model: Any) -> Any:
        calls.append(model)
        return prepare_plain(model) if len(calls) == 1 else with_flipped_bit(model)

    report = short_demo(tmp_path, prepare=prepare)
    assert report.parity is not None and report.parity.exact
    assert report.logits_difference is not None and report.num_differing > 0
    assert not report.same_outputs and not report.passed
    assert "FAILED: the reloaded resident model" in rendered(report)


def test_each_claim_that_does_not_hold_is_a_failure(demo: DemoReport) -> None:
    after = {**demo.loss_after, "held_out": demo.loss_before["held_out"] - MIN_LOSS_DROP / 2}
    report = replace(demo, loss_after=after)
    assert not report.loss_fell and not report.passed
    assert "FAILED: a loss did not fall" in rendered(report)
    resident = replace(demo.runs["resident"], losses=[*demo.runs["resident"].losses])
    resident.losses[3] += 1e-7
    report = replace(demo, runs={**demo.runs, "resident": resident})
    assert not report.same_losses and not report.passed
    assert "FAILED: a resident run has other losses" in rendered(report)
    assert "with losses NOT the same" in rendered(report)
    assert not replace(demo, runs={}).same_losses


def test_the_lesson_is_shown_as_it_was_said(demo: DemoReport) -> None:
    answers = [answer for _, answer in LESSON]
    learned = {**demo.completions, "streamed": answers}
    assert "to learn: " not in rendered(replace(demo, completions=learned))
    other = {**demo.completions, "base": ["", "x"], "streamed": ["[3]. 3.", answers[1]]}
    summary = rendered(replace(demo, completions=other))
    assert "before: (blanks alone)" in summary and "after: [3]. 3." in summary
    assert summary.count("to learn: ") == 1 and f"to learn: {answers[0]}" in summary


# The picture


def test_both_curves_are_marked_where_they_are_equal_and_apart_where_not() -> None:
    picture = draw([4.0, 3.0, 2.0, 1.0], [4.0, 3.5], num_rows=7)
    assert picture.splitlines() == [
        "4.00 |@",
        "     | r",
        "     | .",
        "     |",
        "     |  .",
        "     |",
        "1.00 |   .",
        "      1  4 steps",
    ]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(PorosError, match="expected an empty or new folder"):
        short_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PorosError, match=r"device: expected 'cpu', or 'cuda'.*found 'abacus'"):
        run_demo(tmp_path / "out", settings=SHORT, device="abacus")
    assert not (tmp_path / "out").exists()
