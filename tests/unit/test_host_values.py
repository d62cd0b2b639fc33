"""Questions about positions, on a device that answers none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack as modes
from transformers import masking_utils
from transformers.masking_utils import find_packed_sequence_indices

import poros
from poros.accumulation.host_values import HostValues
from tests.loops import num_groups, own_loss, train, two_layers
from tests.support import prepare_plain

META = torch.device("meta")


def positions() -> torch.Tensor:
    """As models of transformers make them."""
    return (torch.arange(6, device=META) + 0).unsqueeze(0)


def edited() -> torch.Tensor:
    found = positions()
    found[0, 3] = 0
    return found


def begin_anew() -> torch.Tensor:
    first, second = torch.arange(2, device=META), torch.arange(4, device=META)
    return torch.cat((first, second)).unsqueeze(0)


def test_whether_rows_are_packed_is_answered() -> None:
    with HostValues():
        assert find_packed_sequence_indices(positions()) is None
        assert find_packed_sequence_indices(positions().expand(3, -1)) is None
        # From 0 to 4, then 2: where it goes down, another row begins.
        assert positions()[:, [0, 1, 2, 3, 4, 2]].tolist() == [[0, 1, 2, 3, 4, 2]]
        apart = find_packed_sequence_indices(positions()[:, [0, 1, 2, 3, 0, 1]])
        assert apart is not None and apart.tolist() == [[0, 0, 0, 0, 1, 1]]
        assert not (positions() == 2).all()
        assert (positions() != 7).all()


@pytest.mark.parametrize(
    "make",
    [
        edited,
        begin_anew,
        lambda: torch.arange(6.0, device=META),
        lambda: torch.arange(6, device=META)[torch.empty(6, dtype=torch.long, device=META)],
        lambda: torch.randint(9, (1, 6), device=META),
    ],
    ids=["edited", "an operator not followed", "floats", "indices", "random"],
)
def test_control_what_is_not_known_is_asked_of_the_device(make: Callable[[], torch.Tensor]) -> None:
    with HostValues(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        make().tolist()


def test_compiled_code_computes_as_it_does() -> None:
    compiled = torch.compile(
        lambda number: torch.arange(4) + number, backend="eager", fullgraph=True
    )
    with HostValues():
        assert compiled(2).tolist() == [2, 3, 4, 5]


def test_inference_mode() -> None:
    with HostValues(), torch.inference_mode():
        assert torch.arange(3).tolist() == [0, 1, 2]


def test_modes_that_were_entered_since_stay() -> None:
    values, above = HostValues(), HostValues()
    with values:
        above.__enter__()
        values.__exit__()
        assert modes() == [above]
    assert modes() == [above]
    above.__exit__()
    assert modes() == []


def with_a_forward(model: Any) -> None:
    embeddings = model.get_input_embeddings()
    embeddings.forward = partial(type(embeddings).forward, embeddings)


def of_a_class_of_its_own(model: Any) -> None:
    class Embeddings(nn.Embedding):
        pass

    model.get_input_embeddings().__class__ = Embeddings


WAYS: dict[str, Callable[[Any], object]] = {
    "plain": lambda model: None,
    "a hook": lambda model: model.get_input_embeddings().register_forward_hook(lambda *_: None),
    "a hook on all": lambda model: model.get_decoder().register_forward_pre_hook(lambda *_: None),
    "a forward": with_a_forward,
    "a class of its own": of_a_class_of_its_own,
    "compiled code": lambda model: model.get_input_embeddings().compile(backend="eager"),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_code_of_libraries_runs_in_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a mode would be seen: modules of PyTorch leave their fast paths where one is on."""
    asked: list[bool] = []
    genuine = masking_utils.find_packed_sequence_indices

    def ask(positions: torch.Tensor) -> torch.Tensor | None:
        asked.append(bool(modes()))
        return genuine(positions)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        assert not modes()
        found: torch.Tensor = own_loss(model, batch)
        assert not modes()
        return found

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", ask)
    model = prepare_plain(two_layers(), slots=2, self_check="off")
    WAYS[way](model)
    train(model, True, loss=loss, sizes=(3,))
    assert num_groups(model) == 1 and not modes()
    assert asked == [False, *[way == "plain"] * 2]  # the first one goes alone


def test_it_ends_where_code_of_the_model_fails() -> None:
    model = prepare_plain(two_layers(), slots=2, self_check="off")
    tokens = torch.arange(5)[None]
    right = {"input_ids": tokens, "labels": tokens}
    poros.accumulate(model, [right] * 3)
    with pytest.raises(IndexError):
        poros.accumulate(model, [right, {**right, "input_ids": tokens + 10**6}])
    assert not modes()
