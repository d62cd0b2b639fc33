"""Models that are sharded or replicated already are refused before anything changes."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn

import poros
from poros.errors import UnsupportedModelError
from tests.snapshots import batches, build, changes, layers_of, picture


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_ddp_is_refused(process_group: None) -> None:
    model = nn.parallel.DistributedDataParallel(build())
    before = picture(model)
    with pytest.raises(UnsupportedModelError, match=r"expected .*found DistributedData.*before"):
        poros.prepare(model)
    assert changes(before, picture(model)) == {}
    model(**batches()[0]).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_fsdp2_is_refused(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(quantize=False, dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    classes = [type(each) for each in model.modules()]
    names = [(name, id(each)) for name, each in model.named_parameters()]
    with pytest.raises(UnsupportedModelError, match=r"expected .*found FSDPModule at .*layers\.0"):
        poros.prepare(model)
    assert classes == [type(each) for each in model.modules()]
    assert names == [(name, id(each)) for name, each in model.named_parameters()]
    model(**batches()[0]).loss.backward()
