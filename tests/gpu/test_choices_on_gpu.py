"""What users choose beside Poros, each against a resident run with the same choice.

Optimizers of bitsandbytes with adapters large enough for 8-bit states, adapters in bfloat16, and
Liger's kernels. Attention is computed as matrix products, which repeat themselves.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TrainerCallback
from transformers.models.qwen2 import modeling_qwen2

import poros
from poros.gates import tiny
from poros.gates.reference import Trajectory
from poros.head.takeover import slice_loss
from tests.comparing import compare_trajectories
from tests.gpu.models import write_layers
from tests.liger import put_back
from tests.trainers import train_with_trainer, trainer_arguments

pytestmark = pytest.mark.gpu

VOCABULARY = 2048
EVERYTHING = {"slots": 2, "stream_head": True, "stream_embedding": True}
STATES = {
    "adamw_8bit": torch.uint8,
    "paged_adamw_8bit": torch.uint8,
    "paged_adamw_32bit": torch.float32,
    "lion_8bit": torch.uint8,
    "adamw_torch_fused": torch.float32,
}


@pytest.fixture(autouse=True)
def plain_attention() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(tmp_path_factory.mktemp("base"), 3, 512, vocab_size=VOCABULARY)


def build(checkpoint: Path, dtype: torch.dtype) -> Any:
    base = tiny.load_base(checkpoint, dtype=torch.bfloat16, device="cuda")
    model = tiny.attach(base, rank=16, dropout=0.05)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def with_sliced_loss(model: Any) -> Any:
    base = model.get_base_model()
    slice_loss(base, base.get_output_embeddings())
    return model


class Listener(TrainerCallback):
    optimizer: Any = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer = kwargs["optimizer"]


def trained(
    model: Any, folder: Path, prepare: Callable[[Any], Any], **options: Any
) -> tuple[Trajectory, Any]:
    rows = [
        {name: tensor[0] for name, tensor in batch.items()}
        for batch in tiny.make_batches(8, batch_size=1, num_tokens=200, vocab_size=VOCABULARY)
    ]
    listener = Listener()
    arguments = trainer_arguments(folder, max_steps=3, dataloader_pin_memory=True, **options)
    trajectory = train_with_trainer(prepare(model), arguments, rows, callbacks=[listener])
    return trajectory, listener.optimizer


def every_bit(trajectory: Trajectory, optimizer: Any) -> dict[str, Any]:
    found = {entry.name: entry.tensor for entry in trajectory.entries()}
    for number, state in enumerate(optimizer.state.values()):
        found |= {
            f"state {number}: {key}": value.detach().cpu()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", STATES)
def test_optimizers(checkpoint: Path, tmp_path: Path, optimizer: str, dtype: torch.dtype) -> None:
    """All of their states too, which have the dtype that was asked for."""
    arms = []
    for prepare in (with_sliced_loss, partial(poros.prepare, **EVERYTHING)):
        run, used = trained(build(checkpoint, dtype), tmp_path, prepare, optim=optimizer)
        arms.append(every_bit(run, used))
        largest = max(
            (value for name, value in arms[-1].items() if name.startswith("state 0")),
            key=torch.Tensor.numel,
        )
        assert largest.dtype == (STATES[optimizer] if "torch" not in optimizer else dtype)
    assert arms[0].keys() == arms[1].keys() and len(arms[0]) > 100
    different = [name for name in arms[0] if not torch.equal(arms[0][name], arms[1][name])]
    assert different == []
    moved = [name for name in arms[0] if "step 2" in name and "weight" in name]
    assert any(
        not torch.equal(arms[0][name], arms[0][name.replace("step 2", "step 0")])
        for name in moved
        if name.replace("step 2", "step 0") in arms[0]
    ), "control: something was trained"


LIGER = {
    "the model's own loss, a resident head": {"loss": "reference", "stream_head": False},
    "as it is by default": {},
    "everything on the host": {"stream_head": True, "stream_embedding": True},
}


@pytest.mark.parametrize("policy", LIGER)
def test_liger(checkpoint: Path, tmp_path: Path, policy: str) -> None:
    """Its loss reads the head itself, whatever the policy says: it is plain Liger's to the bit."""
    pytest.importorskip("liger_kernel")
    arms = []
    with put_back(modeling_qwen2):
        for prepare in (lambda model: model, partial(poros.prepare, slots=2, **LIGER[policy])):
            model = build(checkpoint, torch.float32)
            run, _ = trained(model, tmp_path, prepare, use_liger_kernel=True)
            arms.append(run)
    assert compare_trajectories(*arms) == []
