"""0 differing bits between budgets, and against the resident run, in every cell that is promised.

Each cell's resident run is compared with one run per budget, from two slots to everything resident
with all layers kept, with inputs of layers on the device and on the host; under adversarial streams
and the self-check.
"""

from typing import Any

import pytest
import torch

from poros.api import prepare_with
from poros.config import StreamingPolicy
from poros.gates import tiny
from poros.gates.adversary import AdversarialStreams
from poros.gates.reference import TrainingSpec, compare_trajectories, train

NUM_LAYERS = 4
POLICIES: dict[str, dict[str, Any]] = {
    "two slots": {"slots": 2},
    "two slots, inputs on the host": {"slots": 2, "offload_boundaries": True},
    "half": {"slots": 3},
    "all": {"slots": NUM_LAYERS, "offload_boundaries": True},
    "half kept": {"slots": NUM_LAYERS, "keep_last": 2, "offload_boundaries": True},
    "all kept": {"slots": NUM_LAYERS, "keep_last": NUM_LAYERS},
}


def differences(name: str, spec: TrainingSpec, **options: Any) -> dict[str, list[Any]]:
    """Of each policy's run from the resident one."""
    batches = tiny.make_batches(spec.num_steps * spec.accumulation, num_tokens=12)

    def build() -> Any:
        return tiny.make_model(name, num_layers=NUM_LAYERS, hidden_size=64, **options)

    resident = train(build(), batches, spec)
    found = {}
    for policy, fields in POLICIES.items():
        streams = AdversarialStreams()
        model = prepare_with(build(), StreamingPolicy(**fields), streams=streams)
        found[policy] = compare_trajectories(resident, train(model, batches, spec))
    return found


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_qwen2(dtype: torch.dtype, dropout: float, accumulation: int) -> None:
    spec = TrainingSpec(num_steps=2, accumulation=accumulation)
    found = differences("qwen2", spec, dtype=dtype, dropout=dropout)
    assert not any(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in tiny.ARCHITECTURES if each != "qwen2"])
def test_every_promised_architecture(name: str) -> None:
    found = differences(name, TrainingSpec(num_steps=2, accumulation=2), dropout=0.05)
    assert not any(found.values()), found
