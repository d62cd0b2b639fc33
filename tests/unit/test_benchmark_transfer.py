"""The benchmark of copies times the copies alone."""

import pytest
import torch

from benchmarks import transfer

CPU = torch.device("cpu")


def test_a_copy_on_a_gpu_is_framed_behind_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for streams and events: waiting for the slot is no part of the copy."""
    journal: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.enable_timing = enable_timing

        def record(self, stream: object) -> None:
            journal.append("timed record" if self.enable_timing else "record")

        def query(self) -> bool:
            return False

        def elapsed_time(self, other: "Event") -> float:
            return 4.0

    class Stream:
        stream_id = device_index = device_type = 0

        def wait_event(self, event: object) -> None:
            journal.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    for name, found in (("Device", 0), ("CurrentStream", (0, 0, 0))):
        monkeypatch.setattr(
            torch._C, f"_cuda_get{name}", lambda *_, found=found: found, raising=False
        )
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **_: None, raising=False)
    streams = transfer.TimedCudaStreams(CPU)
    source = torch.arange(8, dtype=torch.uint8)
    target = torch.zeros_like(source)
    streams.copy(target, source, after=Event())
    assert torch.equal(source, target)
    # Those in the middle are the stream context's own.
    own = ["wait", "timed record", "timed record"]
    assert journal == ["wait", "timed record", *own, "timed record"]
    found = transfer._phases(streams.copies, {source.data_ptr(): 0}, is_cuda=True)
    assert [(each["phase"], each["num_bytes"], each["ms"]) for each in found] == [
        ("forward", 8, 4.0),
        ("with the turn", 8, 4.0),
    ]
