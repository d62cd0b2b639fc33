"""Programs that write in place to what adapted modules give, on a GPU: the bits of PEFT's modules.

Resident, streamed, and replayed as CUDA graphs where that is possible.
"""

from pathlib import Path

import pytest
import torch

import poros
from tests.exact.writing import DTYPES, PROGRAMS
from tests.gpu.models import gradients, model_of, same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quantize", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_as_writable_as_those_of_peft(
    program: str, dtypes: tuple[torch.dtype, torch.dtype], quantize: bool, tmp_path: Path
) -> None:
    (architecture, options, change, is_recorded), (dtype, adapters) = PROGRAMS[program], dtypes
    model = model_of(
        tmp_path, architecture, dtype=dtype, quantize=quantize, num_layers=2, **options
    )
    for name, each in model.named_parameters():
        if "lora_" in name:
            each.data = each.data.to(adapters)
    change(model)
    plain, wrong = gradients(model), {}
    of_lora = () if "use_dora" in options else ("grouped",)
    for kernels in ("fused", "exact", *of_lora):
        poros.use_adapter_kernels(model, kernels)
        resident = gradients(model)
        poros.restore(model)
        poros.prepare(model, loss="reference", adapter_kernels=kernels, cuda_graphs=True)
        streamed = [gradients(model) for _ in range(6)]
        stats = poros.runtime(model).stats()
        assert poros.runtime(model).self_check["status"] == "passed"
        # Falcon's layers are not recorded on a GPU.
        assert (stats["num_replayed_visits"] > 0) == (is_recorded and architecture != "falcon")
        poros.restore(model)
        pairs = [(resident, found) for found in streamed]
        if kernels == "exact" or (kernels == "fused" and "use_dora" not in options):
            pairs.append((plain, resident))
        wrong[kernels] = [
            name
            for left, right in pairs
            for name in {**left, **right}
            if not same(left.get(name), right.get(name))
        ]
    assert not any(wrong.values()), wrong
