"""A matrix in host memory that looks as if on the device, and the rows that are read of it."""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poros.eager_streams import EagerStreams
from poros.errors import PreparedModelError
from poros.head.choice import keep_on_host
from poros.head.host_matrix import HostMatrix
from poros.head.rows import RowReader
from tests.support import same_bits

CPU = torch.device("cpu")
REFUSED = r"embed\.weight: .*poros\.restore"
IDS = torch.tensor([[3, 1, 3], [0, 9, 7]])


def make(rows: int = 10, **options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    module = nn.Embedding(rows, 6, **options).to(torch.bfloat16)
    module.weight.requires_grad_(False)
    return module


def on_host(module: nn.Embedding, reader: RowReader | None = None) -> Callable[[], None]:
    return keep_on_host(module, "embed.weight", [module], reader or RowReader(EagerStreams(CPU)))


@pytest.mark.parametrize("ids", [IDS, IDS[0, 0], IDS[:, :0], IDS.int(), IDS.t()])
@pytest.mark.parametrize("padding", [None, 9])
def test_a_lookup_gives_the_bits_of_a_resident_one(ids: torch.Tensor, padding: int | None) -> None:
    module = make(padding_idx=padding)
    module.weight[3, :2] = torch.tensor([float("nan"), -0.0])
    expected = module(ids)
    reader = RowReader(EagerStreams(CPU))
    undo = on_host(module, reader)
    assert same_bits(module(ids), expected)
    assert reader.h2d_num_bytes == expected.nbytes
    with torch.inference_mode():
        assert same_bits(module(ids), expected)
    undo()
    assert type(module.weight) is nn.Parameter and same_bits(module(ids), expected)


WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda weight: torch.ones(2, 6, dtype=torch.bfloat16) @ weight.t(),
    "copy to the host": lambda weight: weight.to("cpu", copy=True),
    "in a list": lambda weight: torch.cat([weight, weight]),
    "by keyword": lambda weight: torch.sum(input=weight),
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_operators_get_the_whole_of_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    module = make()
    on_host(module)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = WHOLE[name](module.weight)
            assert not isinstance(found, HostMatrix)
            assert same_bits(found, WHOLE[name](make().weight))
    said = caplog.text.count("embed.weight (")
    assert said == (name != "copy to the host"), "once, if it goes to the device"


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda weight: weight[3],
    "columns": lambda weight: weight[:, 1:3],
    "transposed rows": lambda weight: weight[2:5].t(),
    "one of many": lambda weight: weight.unbind(0)[3],
    "view of a view": lambda weight: weight.t()[1:3][:, 2:],
    "expanded": lambda weight: weight[None].expand(2, -1, -1),
    "by .data": lambda weight: weight.data[3],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_read_right_and_not_written(name: str) -> None:
    """Its form too: kernels are chosen by strides."""
    module = make()
    on_host(module)
    found, expected = VIEWS[name](module.weight), VIEWS[name](make().weight)
    assert isinstance(found, HostMatrix)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert same_bits(found + 0, expected + 0)
    for write in (lambda each: each.zero_(), lambda each: each.mul_(2)):
        with pytest.raises(PreparedModelError, match=REFUSED):
            write(VIEWS[name](module.weight))
    with pytest.raises(PreparedModelError, match=REFUSED):
        module.weight[3] = 1.0
    assert same_bits(module(IDS), make()(IDS))


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda weight: weight.zero_(),
    "data": lambda weight: weight.data.copy_(torch.ones(10, 6)),
    "in a list": lambda weight: torch._foreach_add_([weight], 1.0),
    "as a result": lambda weight: torch.add(torch.ones(10, 6), 1, out=weight),
    "a copy": copy.deepcopy,
    "a pickle": pickle.dumps,
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_and_copies_are_refused_by_name(name: str) -> None:
    module = make()
    on_host(module)
    with pytest.raises(PreparedModelError, match=REFUSED):
        WRITES[name](module.weight)
    assert same_bits(module(IDS), make()(IDS))


def test_its_own_bytes_are_read_back_from_a_file() -> None:
    """As from an adapter of a model whose vocabulary has grown, which PEFT saves with them."""
    module = make()
    on_host(module)
    module.load_state_dict(make().state_dict())
    with pytest.raises(RuntimeError, match=REFUSED):
        module.load_state_dict({"weight": make().weight.detach().neg()})
    assert same_bits(module(IDS), make()(IDS))


def test_what_is_trained_or_cast_unnoticed_is_noticed_at_the_next_lookup() -> None:
    module = make()
    on_host(module)
    module.requires_grad_(True)
    with pytest.raises(PreparedModelError, match=r"embed\.weight: expected it frozen"):
        module(IDS)
    module.requires_grad_(False)
    assert same_bits(module(IDS), make()(IDS))
    module.half()
    with pytest.raises(PreparedModelError, match=r"embed\.weight: expected torch\.bfloat16"):
        module(IDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.uint8], ids=str)
def test_what_an_embedding_refuses_is_refused(dtype: torch.dtype) -> None:
    module = make()
    on_host(module)
    with pytest.raises(TypeError, match=r"embed\.weight: expected indices in torch\.int64"):
        module(IDS.to(dtype))
