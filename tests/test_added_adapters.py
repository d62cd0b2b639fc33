"""Adapters that come to a prepared model train as those that come to a resident one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from snapshots import assert_same_run, batches, bits_of, build, changes, layers_of, run

import poros
from poros.gates.reference import TrainingSpec, train


def added(model: Any, folder: Path) -> None:
    torch.manual_seed(11)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.05)
    model.add_adapter("late", config)
    model.set_adapter("late")


def loaded(model: Any, folder: Path) -> None:
    if not (folder / "late").exists():
        source = build(seed=5)
        source.save_pretrained(folder)
        (folder / "late").mkdir(exist_ok=True)
        for file in folder.glob("adapter_*"):
            file.rename(folder / "late" / file.name)
    model.load_adapter(str(folder / "late"), "late", is_trainable=True)
    model.set_adapter("late")


WAYS = [added, loaded]


def late(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if ".late." in name}


class OtherDevice:
    """A device of which no tensor is yet: what is sent there gets memory of its own."""

    type = "other"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_adapter_that_comes_later_is_brought_to_the_device(
    way: Callable[[Any, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, model = build(), poros.prepare(build())
    run(expected)
    run(model)
    for each in (expected, model):
        way(each, tmp_path)
    before, bits = late(model), bits_of(model)
    places = {name: each.data_ptr() for name, each in before.items()}
    other, to = OtherDevice(), torch.Tensor.to

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.clone() if args and args[0] is other else to(self, *args, **kwargs)

    takeover = poros.runtime(model)._takeover
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", moved)
        patch.setattr(takeover, "device", other)
        with torch.no_grad():
            model(**batches()[0])
    after = late(model)
    assert all(after[name] is each for name, each in before.items())
    assert all(each.data_ptr() != places[name] for name, each in after.items())
    assert changes(bits, bits_of(model)) == {}
    for each in (expected, model):
        each.train()
    assert_same_run(run(expected), run(model))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_on_a_gpu(way: Callable[[Any, Path], None], start: str, tmp_path: Path) -> None:
    on_gpu = [{key: value.cuda() for key, value in batch.items()} for batch in batches()]

    def steps(model: Any) -> Any:
        with torch.no_grad():
            model.eval()(**on_gpu[0])  # brings new adapters to where the loop looks for them
        return train(model, on_gpu, TrainingSpec(num_steps=2))

    expected, model = build().cuda(), build()
    if start == "cuda":
        model.cuda()
    poros.prepare(model, device="cuda")
    for index, each in enumerate((expected, model)):
        steps(each)
        way(each, tmp_path)
        if index:
            objects = late(model)
    assert_same_run(steps(expected), steps(model))
    assert objects and all(late(model)[name] is each for name, each in objects.items())
    assert {each.device.type for each in objects.values()} == {"cuda"}
    poros.restore(model)
    devices = {each.device.type for each in layers_of(model).parameters()}
    assert devices == {start}
