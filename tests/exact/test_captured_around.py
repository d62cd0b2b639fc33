"""Recorded visits under the HF Trainer, and tensors that recordings read, with a stand-in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import poros
from poros.replay.captures import ARGUMENTS
from tests.covers import with_slow
from tests.exact.adapter_arms import adapted
from tests.exact.arms import Bases
from tests.exact.recorded import KEPT, recorded, train, trained
from tests.support import same_bits
from tests.trainer_parity import trainer_arguments
from tools.tape import TapeRecorder

Model = Any


class Generating(TrainerCallback):
    """Evaluation and generation come between steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        model.eval()
        with torch.no_grad():
            model.generate(torch.arange(5)[None] + 3, max_new_tokens=3, do_sample=False)
        model.train()


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}], ids=str)
def test_hf_trainer(
    options: dict[str, Any], policy: dict[str, Any], tmp_path: Path, bases: Bases
) -> None:
    generator = torch.Generator().manual_seed(4)
    lengths = [12, 12, 20, 20] * 10
    rows = [torch.randint(3, 90, (length,), generator=generator) for length in lengths]
    data = [{"input_ids": row, "labels": row} for row in rows]

    def run(model: Model, name: str) -> tuple[list[Any], list[dict[str, Any]]]:
        wanted = {"max_steps": 10, "eval_strategy": "steps", "eval_steps": 4, **options}
        arguments = trainer_arguments(tmp_path / name, **wanted)
        arguments.per_device_train_batch_size = 2
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data[:4],
            callbacks=[Generating()],
        )
        trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(  # in order of length
            data, batch_size=2, collate_fn=trainer.data_collator
        )
        trainer.train()
        history = [
            {
                key: value
                for key, value in each.items()
                if "runtime" not in key and "per_s" not in key
            }
            for each in trainer.state.log_history
        ]
        return [each.detach().clone() for each in trained(model)], history

    expected, history = run(adapted(bases, lora_dropout=0.1), "resident")
    model = adapted(bases, lora_dropout=0.1)
    captures, _ = recorded(model, **policy)
    found, own_history = run(model, "recorded")
    assert all(map(same_bits, found, expected)) and own_history == history
    assert captures.num_replays > 0


def places(tensors: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors}


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "phi3"])
def test_a_recording_reads_nothing_but_what_its_form_holds_fast(
    architecture: str, options: dict[str, Any], policy: dict[str, Any], bases: Bases
) -> None:
    """A tensor that some module keeps and exchanges would be read where it no longer is."""
    model = adapted(bases, architecture, **options)
    captures, recorder = recorded(model, **policy)
    train(model, 6, 1)
    assert captures.num_replays > 0 and len(recorder.tapes) > 0
    assert strangers(model, captures, recorder) == []


def strangers(model: Model, captures: Any, recorder: TapeRecorder) -> list[Any]:
    """Shapes of what recordings read and nothing is known to hold where it is."""
    runtime = poros.runtime(model)
    fixed = [piece for each in captures.memory._known.values() for piece in each._pieces]
    held = (
        places([*model.parameters(), *model.buffers(), *fixed])
        | places(slot.buffer for slot in (*runtime.ring.slots, *runtime.ring.pinned))
        | places(runtime.constants._known.values())
        | places(runtime.small._buffers)
        | places(runtime.small.nested.values())
        # Of frozen weights, as long as these are what they are.
        | places(
            kept
            for forward in (vars(each).get("forward") for each in model.modules())
            if hasattr(forward, "_squares")
            for kept in forward._squares._kept.values()
        )
    )
    kept = places(
        each
        for forms in captures._forms.values()
        for form in forms.values()
        for tape in recorder.tapes
        if form.held is not None
        for each in tape._made
    )
    return [
        tuple(each.shape)
        for tape in recorder.tapes
        for each in tape.given()
        if each.untyped_storage().data_ptr() not in held | kept and each.numel() > 1
    ]


def with_a_gain(model: Model, patch: pytest.MonkeyPatch) -> list[Any]:
    """Its feed-forwards multiply by a tensor that they hold as a plain attribute."""
    kind = type(model.base_model.model.model.layers[0].mlp)
    genuine = kind.forward
    patch.setattr(kind, "forward", lambda self, given: genuine(self, given) * self.gain)
    found = [layer.mlp for layer in model.base_model.model.model.layers]
    for each in found:
        each.gain = torch.full((64,), 1.5, dtype=torch.bfloat16)
    return found


def test_control_a_stranger_is_found(bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(bases)
    with_a_gain(model, monkeypatch)
    captures, recorder = recorded(model, self_check="off")
    train(model, 6, 1)
    assert (64,) in strangers(model, captures, recorder)


@pytest.mark.parametrize("in_a_list", [False, True])
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
def test_a_tensor_that_a_module_exchanges(
    policy: dict[str, Any], in_a_list: bool, bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(model: Model, number: int) -> None:
        for layer in model.base_model.model.model.layers:
            gain = torch.full((64,), 1.5 if number < 6 else 0.5, dtype=torch.bfloat16)
            if number in (0, 6):
                layer.mlp.gain = gain
            if in_a_list and number == 0:
                layer.mlp.others = [gain]

    def run(record: bool) -> tuple[list[Any], Any]:
        with monkeypatch.context() as patch:
            model = adapted(bases)
            with_a_gain(model, patch)
            captures = recorded(model, **policy)[0] if record else None
            return train(model, 12, 1, exchange), captures

    expected, _ = run(False)
    found, captures = run(True)
    assert all(map(same_bits, found, expected))
    assert (captures.num_replays > 0) != in_a_list


REPLAYED = dict.fromkeys(["qwen2", "llama", "mistral", "qwen3", "phi3", "gemma3"])
RUN = {"gemma4": ARGUMENTS, "mixtral": "hooks", "qwen3_moe": "hooks"}
ENDS: dict[str, str | None] = {**REPLAYED, **RUN}


@pytest.mark.cover("values")
@pytest.mark.parametrize("policy", [{}, KEPT], ids=["recomputed", "kept"])
@pytest.mark.parametrize("architecture", with_slow(ENDS, ("llama", "mistral", "qwen3")))
def test_promised_architectures(architecture: str, policy: dict[str, Any], bases: Bases) -> None:
    """Layers that share keys and values, or whose routers are recorded by hooks, run as always."""
    reason = ENDS[architecture]
    options = {} if architecture == "qwen3_moe" else {"lora_dropout": 0.1}
    expected = train(adapted(bases, architecture, **options), 7, 1)
    model = adapted(bases, architecture, **options)
    captures, _ = recorded(model, **policy)
    assert all(map(same_bits, train(model, 7, 1), expected))
    assert (captures.num_replays > 0) == (reason is None)
    assert reason is None or reason in captures.eager
