"""Replayed visits of one layer by several micro-batches, one right behind the other.

Those behind the first are not looked up anew, and their gradients are added by one kernel; after
some steps they are joined. Streams are adversarial, slots and what recordings leave are poisoned.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import poros
from poros.kernels.copies import copy_all
from poros.kernels.dense_memory import DenseLayer
from poros.model.sizing import ResidencyPlan, Sizer
from poros.replay import routing
from poros.replay.call import LayerCall
from poros.replay.casts import AdapterCasts
from poros.replay.forms import Replayed
from poros.replay.recording import Recordings
from poros.replay.routing import GradientSums
from poros.replay.rows import Row, Rows, Steps
from tests.exact.recorded import on_tapes
from tests.exact.subjects import Lost
from tests.loops import (
    ON_HOST,
    Batch,
    Subject,
    accumulated,
    adapted,
    before,
    dense,
    in_autocast,
    layers_of,
    micro_batches,
    nothing,
    override,
    own_loss,
    same,
    slice_resident_loss,
    train,
    trained,
)
from tests.replaced import Patch, noted, raising
from tools.tape import TapeRecorder

Model = Any
Facts = list[torch.Tensor]

OTHER_BITS = "a recording gave other bits"

OFTEN: Any = {"sizes": (5,) * 5, "lengths": (12, 12, 9, 12, 9)}
"""Two of five are of another form."""


def penalize(model: Model) -> None:
    """Edit gradients in place, with a graph, and detach them in place."""
    for each in trained(model):
        each.grad += 0.1 * each
        each.grad.detach_()


def in_two_groups(
    model: Model, together: bool = True, behind: Callable[[Model], None] = nothing
) -> Facts:
    """The second group of a step finds gradients there."""
    facts: Facts = []
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        for _ in range(2):
            facts += accumulated(model, micro_batches(3, generator, (12,)), own_loss, together)
            behind(model)
        facts += [each.grad.clone() for each in trained(model)]
        model.zero_grad()
    return facts


def with_a_hook_on_a_node(
    model: Model,
    together: bool = True,
    note: Callable[[Model, torch.Tensor], torch.Tensor] = lambda model, gradient: gradient.clone(),
    **options: Any,
) -> Facts:
    """It sees each gradient of an adapter as autograd adds it; what it notes."""
    node, seen = get_gradient_edge(trained(model)[2]).node, list[torch.Tensor]()

    def see(given: Any) -> None:
        if given[0] is not None:
            seen.append(note(model, given[0]))

    node.register_prehook(see)
    return [*train(model, together, **(options or OFTEN)), *seen]


RUNS: dict[str, Callable[..., Facts]] = {
    "two forms": partial(train, **OFTEN),
    "two groups a step": in_two_groups,
    "a hook on the node of an adapter": with_a_hook_on_a_node,
}
few: Any = partial(adapted, num_layers=3, target_modules=["q_proj", "down_proj"])
"""What is joined is visits, whatever is adapted in them."""
UNDRAWN: Subject = partial(few, quantize=False)
DROPOUT: Subject = partial(UNDRAWN, lora_dropout=0.05)
DORA: Subject = partial(few, lora_dropout=0.05, use_dora=True)
TO_GROUP: Subject = partial(few, target_modules=["q_proj", "k_proj", "v_proj"])
POLICIES: dict[str, dict[str, Any]] = {
    "two slots": {"slots": 2},
    "inputs on the host": {"slots": 2, "offload_boundaries": True},
    "one kept": {"slots": 3, "keep_last": 1},
}


ALIKE: Any = {"sizes": (3,) * 8, "lengths": (12,)}
ALIKE_RUN: Callable[..., Facts] = partial(train, **ALIKE)


@cache
def _resident(run: Callable[..., Facts], base: Subject, kernels: str, loss: str) -> Facts:
    model = base()
    if kernels == "grouped":
        poros.use_adapter_kernels(model, "grouped")
    if loss == "chunked":
        slice_resident_loss(model)
    return run(model, together=False)


def resident(run: Callable[..., Facts], base: Subject, kernels: str = "", loss: str = "") -> Facts:
    """What the run computes with a resident model, which is trained once."""
    return [each.clone() for each in _resident(run, base, kernels, loss)]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: str, monkeypatch: Patch) -> None:
    found, genuine = [], Rows.one

    def call_again(*args: Any) -> Any:
        found.append(genuine(*args))
        return found[-1]

    monkeypatch.setattr(Rows, "one", call_again)
    model = on_tapes(DROPOUT(), **POLICIES[policy])
    run = RUNS["two forms"]
    assert same(run(model), resident(run, DROPOUT))
    assert any(each is None for each in found) and any(each is not None for each in found)


def joined(
    run: Callable[..., Facts] = ALIKE_RUN, base: Subject = UNDRAWN, **policy: Any
) -> tuple[bool, int]:
    """Whether it ends as resident, and how many visits were replayed in one go."""
    model = on_tapes(base(), **{"slots": 2, **policy})
    expected = resident(run, base, policy.get("adapter_kernels", ""), policy.get("loss", ""))
    return same(run(model), expected), poros.runtime(model).stats()["num_joined_visits"]


def ends_alike(run: Callable[..., Facts], base: Subject, **policy: Any) -> bool:
    return joined(run, base, **policy)[0]


@pytest.mark.parametrize(
    ("run", "base"), [("two groups a step", few), ("a hook on the node of an adapter", DORA)]
)
def test_runs(run: str, base: Subject) -> None:
    assert ends_alike(RUNS[run], base)


def with_a_mask(batch: Batch) -> Batch:
    """Each has one of its own, of one form."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, : 1 + int(batch["input_ids"][0, 0]) % 7] = 0
    return {**batch, "attention_mask": mask}


def with_positions(batch: Batch) -> Batch:
    """Two documents in a row, at a place of its own."""
    length, first = batch["input_ids"].shape[1], 1 + int(batch["input_ids"][0, 0]) % 7
    positions = torch.cat([torch.arange(first), torch.arange(length - first)])
    return {**batch, "position_ids": positions.expand_as(batch["input_ids"]).contiguous()}


@torch.inference_mode()
def of_inference(batch: Batch) -> Batch:
    """Edits of its positions are not counted."""
    return {**batch, "position_ids": with_positions(batch)["position_ids"].clone()}


def trained_below() -> Model:
    """Embeddings are trained, and the first layer is not adapted."""
    model = dense(dropout=0.0, num_layers=3)
    layers_of(model)[0].requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def edited_behind() -> Model:
    """What the layers give is edited in place, and used by an operator that keeps it."""

    def edit(module: Any, given: Any) -> Any:
        hidden = given[0].mul_(0.5)
        return (hidden * hidden,)

    model = UNDRAWN()
    before(edit, "model.norm")(model)
    return model


def first_embedded(number: Iterator[int], batch: Batch) -> Batch:
    """The first of a step comes as embeddings that are not trained."""
    if next(number) % 3:
        return batch
    table = torch.randn(1000, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    return {"inputs_embeds": 0.02 * table[batch["input_ids"]], "labels": batch["labels"]}


def embedded_first(model: Model, together: bool = True) -> Facts:
    return train(model, together, form=partial(first_embedded, count()), **ALIKE)


def with_a_square_mask(batch: Batch) -> Batch:
    """One that the layers are given as it is."""
    rows, length = batch["input_ids"].shape
    mask = torch.full((length, length), -1e9).triu(1).expand(rows, 1, length, length)
    return {**batch, "attention_mask": mask.contiguous()}


def with_one_mask_then(model: Model, together: bool = True) -> Facts:
    """Behind its groups, single ones share a mask that is edited where PyTorch does not see it."""
    facts = train(model, together, form=with_a_square_mask, **ALIKE)
    batch = with_a_square_mask(micro_batches(1, torch.Generator().manual_seed(2), (12,))[0])
    for number in range(6):
        own_loss(model, batch).backward()
        facts += [each.grad.clone() for each in trained(model)]
        batch["attention_mask"].numpy()[:, :, 6:, number] = -1e9
    return facts


def masked_in_turn(model: Model, together: bool = True) -> Facts:
    """The first and the last of a group have one mask; the last layer's are not joined."""
    masks = [torch.full((12, 12), -1e9).triu(diagonal).expand(2, 1, 12, 12) for diagonal in (1, 6)]
    numbers = count()

    def form(batch: Batch) -> Batch:
        return {**batch, "attention_mask": masks[next(numbers) % 3 % 2]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "make_free", lambda self: not self.homes)
        return train(model, together, form=form, **ALIKE)


def evaluated_with_hooks(model: Model, together: bool = True) -> Facts:
    """Between the first groups; what hooks cut off then is there only later."""
    facts, generator = list[torch.Tensor](), torch.Generator().manual_seed(2)
    inner = [layer.mlp.down_proj for layer in layers_of(model)]
    for number in range(11):
        facts += accumulated(model, micro_batches(4, generator, (12,)), own_loss, together)
        facts += [each.grad.clone() for each in trained(model)]
        model.zero_grad()
        if number in (2, 3, 4):
            hooks = [each.register_forward_hook(lambda *given: given[2] - 9) for each in inner]
            with torch.no_grad():
                facts.append(own_loss(model, micro_batches(1, generator, (12,))[0]).detach())
            for hook in hooks:
                hook.remove()
    return facts


JOINED: dict[str, Callable[[], tuple[bool, int]]] = {
    "LoRA": partial(joined, base=few),
    "dense": joined,
    "DoRA": partial(joined, base=partial(few, use_dora=True)),
    "one kept": partial(joined, slots=3, keep_last=1),
    "layers of two kinds": partial(joined, base=partial(few, "gemma3", num_layers=4)),
    "grouped products": partial(
        joined, partial(train, loss=in_autocast, **ALIKE), TO_GROUP, adapter_kernels="grouped"
    ),
    "masks of their own": partial(joined, partial(train, form=with_a_mask, **ALIKE)),
    "positions of their own": partial(joined, partial(train, form=with_positions, **ALIKE)),
    "embeddings trained below": partial(joined, embedded_first, trained_below),
    "a mask that is edited behind groups": partial(joined, with_one_mask_then),
    "masks in turn": partial(joined, masked_in_turn, slots=3, keep_last=1),
    "evaluated with hooks in between": partial(joined, evaluated_with_hooks),
    "edited behind the layers": partial(joined, base=edited_behind, **ON_HOST),
    "clipped": partial(joined, partial(train, clip=0.1, **ALIKE)),
    "gradients edited": partial(joined, partial(in_two_groups, behind=penalize)),
}
NOT_JOINED: dict[str, Callable[[], tuple[bool, int]]] = {
    "dropout": partial(joined, base=DROPOUT),
    "inputs on the host": partial(joined, offload_boundaries=True),
    "with hooks": partial(joined, with_a_hook_on_a_node),
    "made in inference mode": partial(joined, partial(train, form=of_inference, **ALIKE)),
}


@pytest.mark.parametrize("which", [*JOINED, *NOT_JOINED])
def test_joined(which: str) -> None:
    is_same, number = (JOINED | NOT_JOINED)[which]()
    assert is_same and (number > 0) == (which in JOINED)


def with_those_of_one(
    self: Any, arrived: Any, recorded: Any, piece: Any, _: Any, genuine: Any = GradientSums.begin
) -> None:
    genuine(self, arrived, recorded, piece, piece)


def in_any_order(
    self: Any, branch: Any, recordings: Any, behind: Any = None, genuine: Any = Steps.add
) -> Any:
    return genuine(self, branch, recordings)


def with_tables_of_before(self: Row, ones: Any, sources: Any) -> None:
    """Behind a row a visit by itself takes what it is given besides to be there still."""
    copy_all(self.hidden.tensors, [each[0].detach() for each in sources])
    self._others.fill([tensor for each in sources for tensor in each[1:]])


JOINED_CONTROLS: dict[str, tuple[Any, str, Any]] = {
    "tensors of the first": (
        *(Row, "given"),
        lambda self, number, genuine=Row.given: genuine(self, 0),
    ),
    "sums of one alone": (GradientSums, "begin", with_those_of_one),
    "masks of the last": (Row, "fill", with_tables_of_before),
    "sums in any order": (Steps, "add", in_any_order),
}


@pytest.mark.parametrize("which", JOINED_CONTROLS)
def test_controls_of_joined(which: str, monkeypatch: Patch) -> None:
    owner, name, instead = JOINED_CONTROLS[which]
    monkeypatch.setattr(owner, name, instead)
    of = "masks in turn" if name == "fill" else "masks of their own"
    is_same, number = JOINED[of]()
    assert number > 0 and not is_same


@pytest.mark.parametrize("join", [raising(RuntimeError, "none left"), nothing])
def test_what_cannot_be_joined(join: Callable[..., Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr(TapeRecorder, "join", lambda self, *recordings: join(self))
    assert joined() == (True, 0)


def without_room(model: Model, together: bool = True) -> Facts:
    """While a longer batch leaves no room for joined visits: none are, and then some are again."""
    facts, joined_visits = list[torch.Tensor](), list[int]()
    for joins in (True, False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sizer, "joins", joins)
            facts += train(model, together, **ALIKE)
        if together:
            joined_visits.append(poros.runtime(model).stats()["num_joined_visits"])
    if together:
        first, without, again = joined_visits
        assert 0 < first == without < again
    return facts


@pytest.mark.parametrize("policy", ["two slots", "one kept"])
def test_where_there_is_no_room_for_joined_visits(policy: str) -> None:
    assert ends_alike(without_room, UNDRAWN, **POLICIES[policy])


def test_every_other_visit_is_replayed_by_a_second_recording(monkeypatch: Patch) -> None:
    made, genuine = list[TapeRecorder](), TapeRecorder.beside

    def beside(self: TapeRecorder) -> TapeRecorder:
        made.append(genuine(self))
        return made[-1]

    monkeypatch.setattr(TapeRecorder, "beside", beside)
    is_same, number = joined()
    assert is_same and made[0].num_replays > number / 2


def test_recordings_that_share_memory_are_not_replayed_at_the_same_time(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TapeRecorder, "beside", lambda self: self)
    assert joined() == (True, 0) and "not joined: recordings that share memory" in caplog.text


def test_a_device_without_memory_for_a_second_recording(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(TapeRecorder):
        record = raising(torch.OutOfMemoryError, "none left")

    monkeypatch.setattr(TapeRecorder, "beside", lambda self: Full())
    is_same, number = joined()
    assert is_same and number > 0 and "go one at a time: none left" in caplog.text


@pytest.mark.parametrize("is_mixed", [True, False])
def test_recordings_of_two_recorders_are_in_no_segment(is_mixed: bool, monkeypatch: Patch) -> None:
    """Kept layers of which the first and the last have no second, by single micro-batches then."""
    genuine, recorded = Recordings.record, Counter[int]()

    def record(self: Recordings, layer: Any, form: Any) -> None:
        recorded[layer.index] += 1
        if is_mixed and layer.index == 2 and recorded[2] > 1:
            raise RuntimeError("no room")
        genuine(self, layer, form)

    monkeypatch.setattr(Recordings, "record", record)
    model, resident = on_tapes(UNDRAWN(), slots=3, keep_last=3), UNDRAWN()
    facts = []
    for each in (model, resident):
        facts.append(train(each, each is model, **ALIKE))
        if each is model:
            of_groups = poros.runtime(model).stats()["num_joined_visits"]
        facts[-1] += train(each, sizes=(1,) * 6, lengths=(12,))
    assert same(*facts)
    assert (poros.runtime(model).stats()["num_joined_visits"] > of_groups) is not is_mixed


def test_a_use_without_a_gradient() -> None:
    """Layers use their hidden states twice, and one of the uses gives no gradient."""

    def forward(layer: Any, own: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(hidden * 1.0 + Lost.apply(hidden), *args, **kwargs)

    def base() -> Model:
        model = UNDRAWN()
        override(layers_of(model), forward)
        return model

    assert ends_alike(RUNS["two forms"], base)


def test_an_error_behind_the_first_reaches_the_loss(monkeypatch: Patch) -> None:
    model = on_tapes(DROPOUT())
    train(model, **OFTEN)
    caught, genuine, numbers = list[Exception](), Rows.one, count()

    def call_again(*args: Any) -> Any:
        if next(numbers) == 1:
            raise torch.OutOfMemoryError("none left")
        return genuine(*args)

    def loss(model: Model, batch: Any) -> torch.Tensor:
        try:
            return own_loss(model, batch)
        except torch.OutOfMemoryError as error:
            caught.append(error)
            raise

    monkeypatch.setattr(Rows, "one", call_again)
    step = micro_batches(4, torch.Generator().manual_seed(2), (12,))
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        poros.accumulate(model, step, loss=loss)
    assert len(caught) == 1
    for value in poros.accumulate(model, step, loss=loss):
        assert bool(value.isfinite())


def as_known(self: LayerCall, tensors: Any, rng: Any, genuine: Any = LayerCall.again) -> LayerCall:
    """Random states are those of the micro-batch before."""
    return genuine(self, tensors, self.start)


CONTROLS: dict[str, tuple[Any, str, Any, str]] = {
    "calls of other forms": (LayerCall, "is_like", lambda self, other: True, "two forms"),
    "random states of others": (LayerCall, "again", as_known, "two forms"),
    "gradients that nobody adds": (
        # Of those behind the first.
        *(GradientSums, "add_all"),
        lambda self, recorded: recorded is not None and recorded is self._recorded,
        "two groups a step",
    ),
    "hooks that nobody looks for": (
        *(routing, "_has_plain_sum", lambda *_: True),
        "a hook on the node of an adapter",
    ),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_controls(which: str, monkeypatch: Patch) -> None:
    owner, name, instead, run = CONTROLS[which]
    monkeypatch.setattr(owner, name, instead)
    try:
        assert not ends_alike(RUNS[run], DROPOUT)
    except (RuntimeError, poros.PorosError):
        return  # it does not come to its end


def edit(model: Model, number: int) -> None:
    for each in trained(model)[number::3]:
        # PyTorch counts neither; the first moves them.
        each.data = each.data * 1.5 if number == 1 else each.data.mul_(0.5)


EDITED: Callable[..., Facts] = partial(
    train, loss=in_autocast, between=edit, **{**OFTEN, "sizes": (5,) * 7}
)


def grouped_ends_alike(policy: dict[str, Any]) -> bool:
    """Grouped products under autocast, of adapters that change between steps and within one."""
    return ends_alike(EDITED, TO_GROUP, adapter_kernels="grouped", **policy)


@pytest.mark.parametrize("policy", ["two slots", "one kept"])
def test_casts_of_adapters(
    policy: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """A row of visits makes them once, where no layer keeps its graph."""
    made = noted(monkeypatch, AdapterCasts, "replay")
    replayed = noted(monkeypatch, Replayed, "run")
    assert grouped_ends_alike(POLICIES[policy]) and OTHER_BITS not in caplog.text
    num_cast = sum(recording.casts is not None for recording, *_ in replayed)
    assert 0 < len(made) < num_cast or policy == "one kept"


def of_others(
    self: Replayed,
    sources: Any,
    in_place: bool = False,
    is_again: bool = False,
    genuine: Any = Replayed.run,
) -> Any:
    """Casts are those of the layer before, or of the step before, once the recording is proved."""
    return genuine(self, sources, in_place, is_again or self.is_proved)


def test_control_casts_of_others(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Replayed, "run", of_others)
    assert not grouped_ends_alike(POLICIES["two slots"])


# Nodes cast for themselves; or casts have memory of the recording, where others of its tensors may
# lie before.
PLACES: dict[str, Callable[..., Any]] = {
    "without room": lambda self, shapes, dtype: None,
    "among temporary tensors": lambda self, shapes, dtype: [
        torch.zeros(*each, dtype=dtype) for each in shapes
    ],
}


@pytest.mark.parametrize("places", PLACES)
def test_casts_that_are_elsewhere(
    places: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AdapterCasts, "places", PLACES[places])
    assert grouped_ends_alike(POLICIES["two slots"])  # nothing is trained with other bits
    assert (OTHER_BITS in caplog.text) == places.startswith("among")


def look(model: Model, gradient: torch.Tensor) -> torch.Tensor:
    """The model runs between the backwards of one layer by two micro-batches."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=torch.arange(4, 16)[None], use_cache=False).logits


with_a_forward_in_a_hook = partial(
    with_a_hook_on_a_node, note=look, loss=in_autocast, sizes=(3,) * 6, lengths=(12,)
)


def as_left(self: GradientSums, *given: Any, genuine: Any = GradientSums.add) -> None:
    """Hooks that may have run are forgotten."""
    behind = self.behind
    genuine(self, *given)
    self.behind = behind


@pytest.mark.parametrize("is_control", [False, True])
def test_casts_behind_a_hook_that_runs_the_model(is_control: bool, monkeypatch: Patch) -> None:
    if is_control:
        monkeypatch.setattr(GradientSums, "add", as_left)
    is_same = ends_alike(with_a_forward_in_a_hook, TO_GROUP, adapter_kernels="grouped")
    assert is_same != is_control


FOUR: Subject = partial(few, num_layers=4)


@pytest.mark.parametrize("is_control", [False, True])
def test_dense_weights_of_blocks_that_have_moved(is_control: bool, monkeypatch: Patch) -> None:
    """What makes them dense is recorded anew: it would read the slots of before."""
    if is_control:
        monkeypatch.setattr(DenseLayer, "forget_recorded", DenseLayer.forget)

    def move(model: Model, number: int) -> None:
        if number == 3:
            poros.runtime(model).resize(ResidencyPlan(3, 0))

    found = train(on_tapes(FOUR(), slots=2, share_dense=True), between=move, **ALIKE)
    assert same(found, resident(ALIKE_RUN, FOUR)) != is_control
