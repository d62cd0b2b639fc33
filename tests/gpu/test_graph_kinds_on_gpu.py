"""Recorded visits on a GPU: no gradients, long attention, and known traps."""

import gc
import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import poros
from poros.replay.graphs import CudaRecorder
from tests.gpu.models import model_of, same_runs, train, trained

pytestmark = pytest.mark.gpu

Model = Any
OTHER_BITS = "other bits"


def prepared(model: Model, **policy: Any) -> tuple[Model, Any]:
    chosen = {"slots": 2, "keep_last": 0, "loss": "reference", "cuda_graphs": True, **policy}
    poros.prepare(model, **chosen)
    return model, poros.runtime(model).context.captures


def backward(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def row(number: int = 0, length: int = 64) -> torch.Tensor:
    return torch.arange(length, device="cuda")[None] + number


@pytest.mark.parametrize("keep_last", [0, 4])
def test_visits_without_gradients_between(keep_last: int, tmp_path: Path) -> None:
    """As DPO has them: dropout draws in the reference pass as well."""

    def run(model: Model) -> list[torch.Tensor]:
        torch.manual_seed(3)
        facts = []
        for number in range(8):
            with (
                sdpa_kernel(SDPBackend.MATH),
                torch.no_grad(),
                model.disable_adapter() if number % 2 else nullcontext(),
            ):
                facts.append(model(input_ids=row(number), use_cache=False).logits.clone())
            facts += [backward(model, row(number)), *(each.grad.clone() for each in trained(model))]
        return facts

    expected = run(model_of(tmp_path))
    model, captures = prepared(model_of(tmp_path), slots=4, keep_last=keep_last)
    assert same_runs(run(model), expected)
    proved = {
        form.kind
        for forms in captures._forms.values()
        for form in forms.values()
        if form.forward is not None and form.forward.is_proved
    }
    assert "inference" in proved and len(proved) == 2


@pytest.mark.parametrize("keep_last", [0, 4])
def test_attention_that_does_not_repeat_itself_is_replayed(keep_last: int, tmp_path: Path) -> None:
    model, captures = prepared(model_of(tmp_path), slots=4, keep_last=keep_last)
    for _ in range(9):
        tokens = torch.randint(0, 100, (1, 4096), device="cuda")
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert captures.num_replays > 0 and OTHER_BITS not in str(captures.eager)


@pytest.mark.parametrize("keep_last", [0, 4])
def test_two_forwards_before_their_backwards(keep_last: int, tmp_path: Path) -> None:
    def run(model: Model) -> list[torch.Tensor]:
        torch.manual_seed(3)
        facts = []
        for number in range(9):
            with sdpa_kernel(SDPBackend.MATH):
                losses = [
                    model(input_ids=row(part), labels=row(part), use_cache=False).loss
                    for part in range(2 if number % 3 else 1)
                ]
            for loss in losses if number % 2 else losses[::-1]:
                loss.backward()
            facts += [each.grad.clone() for each in trained(model)]
        return facts

    expected = run(model_of(tmp_path))
    model, captures = prepared(model_of(tmp_path), slots=4, keep_last=keep_last)
    assert same_runs(run(model), expected)
    assert captures.num_replays > 0


def test_scaled_losses_in_float16(tmp_path: Path) -> None:
    def run(model: Model) -> list[torch.Tensor]:
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(trained(model), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        facts = []
        for number in range(8):
            with sdpa_kernel(SDPBackend.MATH), torch.autocast("cuda", dtype=torch.float16):
                loss = model(input_ids=row(number), labels=row(number), use_cache=False).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained(model), 0.1)
            scaler.step(optimizer)
            scaler.update()
            facts += [loss.detach(), *(each.detach().clone() for each in trained(model))]
            optimizer.zero_grad()
        return facts

    expected = run(model_of(tmp_path, dtype=torch.float16))
    model, captures = prepared(model_of(tmp_path, dtype=torch.float16))
    assert same_runs(run(model), expected) and captures.num_replays > 0


def pools() -> dict[tuple[int, int], int]:
    """Bytes that the allocator holds in pools of recordings."""
    gc.collect()
    torch.cuda.empty_cache()
    found: dict[tuple[int, int], int] = defaultdict(int)
    for segment in torch.cuda.memory_snapshot():
        found[tuple(segment["segment_pool_id"])] += segment["total_size"]
    found.pop((0, 0), None)
    return found


def test_memory_is_given_back_on_restore(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    torch._C._cuda_clearCublasWorkspaces()
    before = pools()
    prepared(model)
    train(model, 6)
    assert sum(pools().values()) > sum(before.values())
    poros.restore(model)
    assert sum(pools().values()) <= sum(before.values())


def test_the_plan_has_room_for_what_recordings_take(tmp_path: Path) -> None:
    model = model_of(tmp_path, hidden_size=1024)
    tokens = row(0, 2048) % 100
    plan = poros.plan(model, seq_len=2048, num_slots=2, keep_last=0, loss="reference")
    before = pools()
    prepared(model)
    for _ in range(10):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    after = pools()
    held = sum(after.values()) - sum(before.values())
    print(before, after, plan.terms["recordings"])
    # Pieces of memory come in steps of 2 and 20 MiB.
    assert 0.3 * plan.terms["recordings"] < held < 1.25 * plan.terms["recordings"] + 2**26


def around_recordings(
    patch: pytest.MonkeyPatch, around: Callable[[Callable[[], None]], None]
) -> None:
    """What is recorded is done by ``around``, which is given what would be done."""
    genuine = CudaRecorder.record

    def record(self: CudaRecorder, run: Any, is_held: bool = False) -> Any:
        return genuine(self, lambda: around(run), is_held)

    patch.setattr(CudaRecorder, "record", record)


def test_out_of_memory_while_recording_runs_as_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(model_of(tmp_path), 8)

    def too_much(run: Callable[[], None]) -> None:
        run()
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    around_recordings(monkeypatch, too_much)
    model, captures = prepared(model_of(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert same_runs(train(model, 8), expected)
    assert captures.num_replays == 0 and "cannot be recorded" in caplog.text
    # Neither random numbers nor memory are left as they are while something is recorded.
    monkeypatch.undo()
    torch.cuda.empty_cache()
    model, captures = prepared(model_of(tmp_path))
    assert same_runs(train(model, 8), expected) and captures.num_replays > 0


def test_an_interrupted_recording_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, done = train(model_of(tmp_path), 8), list[bool]()

    def interrupted(run: Callable[[], None]) -> None:
        run()
        done.append(True)
        if len(done) == 4:
            raise KeyboardInterrupt

    around_recordings(monkeypatch, interrupted)
    model, captures = prepared(model_of(tmp_path))
    genuine_forward, interruptions = model.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return genuine_forward(*args, **kwargs)
        except KeyboardInterrupt:
            interruptions.append(True)
            return genuine_forward(*args, **kwargs)

    model.forward = forward
    assert same_runs(train(model, 8), expected)
    assert interruptions == [True] and captures.num_replays > 0


def test_pages_are_locked_and_copies_run_while_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loader's thread does."""
    expected = train(model_of(tmp_path), 8)
    host = torch.zeros(2**22, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    stream = torch.cuda.Stream()

    def load() -> None:
        torch.zeros(2**20).pin_memory()
        with torch.cuda.stream(stream):
            device.copy_(host, non_blocking=True)

    def beside(run: Callable[[], None]) -> None:
        thread = Thread(target=load)
        thread.start()
        run()
        thread.join()

    around_recordings(monkeypatch, beside)
    model, captures = prepared(model_of(tmp_path))
    assert same_runs(train(model, 8), expected) and captures.num_replays > 0


def test_streams_of_ours_are_not_one() -> None:
    """PyTorch hands streams out of a bounded pool, the same again after a while."""
    from poros.cuda_streams import streams_for

    device = torch.device("cuda")
    for _ in range(40):
        recorder = CudaRecorder(device)
        streams = streams_for(device)
        streams.allocate(1)
        values = torch.zeros(4, device=device)
        recording = recorder.record(lambda values=values: values.add_(1))
        recording.replay()
        copies = {
            each.cuda_stream for each in vars(streams).values() if hasattr(each, "cuda_stream")
        }
        assert recorder._stream is not None
        assert recorder._stream.cuda_stream not in copies
        assert recorder._stream.cuda_stream != torch.cuda.current_stream().cuda_stream
        assert values.tolist() == [1.0] * 4
