"""Micro-batches that go through the blocks together: the bits of one after the other, resident.

And those that share the dense weights of a layer: the bits of those that do not.
"""

import copy
import gc
import itertools
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.multiprocessing.reductions import StorageWeakRef

import poros
import poros.head.loss as sliced_loss
from poros.accumulation import group
from poros.accumulation.draws import Draws
from poros.accumulation.group import Group
from poros.accumulation.micro_batch import MicroBatch
from poros.errors import RematerializationError, UnsupportedModelError
from poros.gates import tiny
from poros.kernels import dense_memory, dequantize
from poros.kernels.dense_memory import DenseLayer
from poros.model.sizing import ResidencyPlan
from poros.slots.schedule import Phase
from poros.stream.body import LayerBody
from tests import loops
from tests.exact.recorded import KEPT, on_tapes, recorded
from tests.journal import count, walk
from tests.loops import (
    SIZES,
    Batch,
    Control,
    Loss,
    Training,
    adapted,
    dense,
    ends,
    ends_so,
    in_autocast,
    later,
    layers_of,
    made,
    num_groups,
    of,
    own_loss,
    program,
    reasons,
    resident,
    same,
    train,
    training,
)
from tests.replaced import Patch, Plant, in_place_of, raising
from tests.support import AdversarialPrepare, leaves_keys_always, prepare_plain

Model = Any
FP32 = torch.float32
NUM_LAYERS = 3
"""Of models that are asked for no other number."""
MIXED: Any = {"sizes": (3, 1, 5), "clip": 0.5, "padded": True}
"""Groups smaller than the others, other shapes, padding, clipping."""


POLICIES: dict[str, dict[str, Any]] = {
    "all kept": {"slots": 3, "keep_last": 3},
    "one kept": {"slots": 3, "keep_last": 1, "share_dense": True},
    "all slots": {"slots": 3},
    "blocks of two layers": {"block_size": 2},
    "inputs on the host": {"offload_boundaries": True, "share_dense": True},
    "adapters of PEFT": {"adapter_kernels": "peft", "share_dense": True},
    "a budget": {"slots": None, "vram_budget": "1GiB"},
    "all on the host": {
        **{"loss": "chunked", "stream_head": True, "stream_embedding": True, "share_dense": True}
    },
}
"""Weights that are dense already are not shared: these have 4 bits."""


few = partial(adapted, num_layers=3, lora_dropout=0.05, target_modules=["q_proj", "down_proj"])
few_dense = partial(few, quantize=False)
"""Where it does not matter what is adapted."""


def of_base(*architecture: str, **options: Any) -> Training:
    return program(base=lambda: training(*architecture, **options))


def evaluating(model: Model, number: int) -> None:
    with torch.no_grad():
        tokens = torch.arange(9)[None]
        model.eval()(input_ids=tokens, labels=tokens)
    model.train()


DENSE: dict[str, Any] = {"quantize": False, "dtype": FP32}
ALONE = {"gemma4_shared_kv": "layers share tensors", "mixtral": "outputs of layers are recorded"}
PROGRAMS = {
    # Of dtypes, dropout and forms of the base each comes, with others.
    "nf4": program(base=training, **MIXED),
    "dense, no dropout": program(base=partial(few_dense, lora_dropout=0.0), **MIXED),
    "dense, float32": program(base=partial(few_dense, dtype=FP32), **MIXED),
    **{
        name: program(
            base=few if policy.get("share_dense") else few_dense, policy=policy, sizes=(3, 3)
        )
        for name, policy in POLICIES.items()
    },
    **{
        name: of_base(name)
        for name in tiny.ARCHITECTURES
        # Others have the operators of qwen2, in which the rest of the table is.
        if name not in ("qwen2", "llama", "mistral", "qwen3", "qwen3_moe", "gemma4", *ALONE)
    },
    # Heads differ from layer to layer: what each draws is not known from the first one.
    "gemma4": of_base("gemma4", dropout=0.0)._replace(
        end="layers share tensors" if leaves_keys_always() else None
    ),
    **{name: of_base(name, num_layers=4)._replace(end=why) for name, why in ALONE.items()},
    **{
        name: of_base(adapter=name)
        for name in ("dora", "vera", "trainable_tokens", "prompt_tuning")
    },
    "ia3": of_base(adapter="ia3", **DENSE),
    "lokr": of_base(adapter="lokr", **DENSE),
    "a trained head and embedding": program(
        base=partial(adapted, lora_dropout=0.1, modules_to_save=["lm_head", "embed_tokens"])
    ),
    "evaluation and single ones between": program(between=evaluating, sizes=(3, 1, 2)),
}


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs(which: str) -> None:
    assert ends(PROGRAMS[which])


# One pass over a head in host memory for all micro-batches that are grouped.

ON_HOST: Any = {"slots": 2, "loss": "chunked", "stream_head": True, "stream_embedding": True}
AHEAD = 1 + len(SIZES)
"""Heads that are brought: for the first one, which runs alone, and for each group."""


def read_logits(model: Model, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return torch.logsumexp(logits.float(), dim=-1).mean()


def counted(model: Model) -> Loss:
    """Losses run once."""
    calls = model.calls = SimpleNamespace(begun=0, ended=0)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        calls.begun += 1
        found = read_logits(model, batch)
        calls.ended += 1
        return found

    return loss


def numbered(model: Model) -> Loss:
    """Counts its calls where nobody sees it, and masks other labels each time."""
    numbers = itertools.count(1)

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        labels = batch["labels"].clone()
        labels[:, next(numbers) % 5] = -100
        return own_loss(model, {**batch, "labels": labels})

    return loss


def changing(model: Model) -> Loss:
    """Of the same hidden states and labels: what was computed ahead is not what it asks for."""
    done: list[int] = []

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        ignored = (-100, int(batch["labels"][0, 3]))[len(done) % 2]
        found: torch.Tensor = model.get_base_model().loss_function(
            logits, batch["labels"], vocab_size=logits.shape[-1], ignore_index=ignored
        )
        done.append(1)
        return found

    return loss


on_host = partial(program, base=few_dense, policy=ON_HOST)
UNSUPPORTED = UnsupportedModelError
# How often all of the head is brought, if nothing else reads it.
HEADS: dict[str, tuple[Training, int | None]] = {
    "once for a group": (on_host(padded=True), AHEAD),
    "autocast": (on_host(of(in_autocast), base=partial(few_dense, dtype=torch.float32)), AHEAD),
    "evaluation between": (on_host(between=evaluating), AHEAD + len(SIZES)),
    "read logits": (on_host(counted), None),
    "by number": (on_host(numbered), AHEAD),
    "adapters of the embedding": (
        on_host(
            base=partial(
                adapted, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "embed_tokens"]
            )
        ),
        None,
    ),
    # Slices of other widths come for themselves.
    "two widths": (on_host(lengths=(12, 20)), AHEAD + len(SIZES)),
    "it stops coming to the head": (
        later(read_logits, (UNSUPPORTED, "one backward for each"), base=few_dense, policy=ON_HOST),
        None,
    ),
    # The part of it before the head would count too little, where others are at the head.
    "it counts behind its layers": (on_host(changing, "changes done"), None),
}


@pytest.mark.parametrize("which", HEADS)
def test_programs_with_a_head_on_the_host(which: str, monkeypatch: Patch) -> None:
    """Four slices of a head of 512 rows."""
    monkeypatch.setattr(sliced_loss, "_LEAST_WIDTH", 128)
    monkeypatch.setattr(sliced_loss, "_MOST_WEIGHTS", 64 * 128)
    if which == "two widths":
        # 24 tokens or fewer take slices of 256 rows, 40 tokens slices of 128.
        monkeypatch.setattr(sliced_loss, "_MOST_WEIGHTS", 64 * 256)
        monkeypatch.setattr(sliced_loss, "_MOST_LOGITS", 24 * 256)
    each, num_heads = HEADS[which]
    model, run = made(each, True)
    assert ends_so(model, run, each.end, partial(resident, each))
    runtime = poros.runtime(model)
    if num_heads is not None:
        head: Any = runtime.head
        assert runtime.stats()["head_num_bytes"] == num_heads * head.matrix.nbytes
    if which == "read logits":
        assert (model.calls.begun, model.calls.ended) == (sum(SIZES), sum(SIZES))


# How often blocks are loaded, and what is replayed.


def test_a_group_loads_each_block_once_a_pass() -> None:
    groups = (1, 2, 3)  # the first of its kind goes alone
    with AdversarialPrepare().watching() as prepare:
        model = prepare(few(), slots=2)
        found = train_threes(model)
    assert same(found, expected())
    visits = [
        (block, phase)
        for number in groups
        # Backward recomputes a layer, and then has its block until the gradients are there.
        for phase, blocks, times in (
            (Phase.FORWARD, range(NUM_LAYERS), 1),
            (Phase.BACKWARD, reversed(range(NUM_LAYERS)), 2),
        )
        for block in blocks
        for _ in range(number * times)
    ]
    assert prepare.journal == list(walk(visits, NUM_LAYERS, 2))
    # 2 (K - S) in a warm group, whatever its size.
    assert count(prepare.journal, "prefetch") == len(groups) * 2 * (NUM_LAYERS - 2) + 2


def test_replayed_visits_of_a_reference_between() -> None:
    """As DPO has it, of several lengths: kept graphs stay, whatever is replayed meanwhile."""

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        tokens = batch["input_ids"]
        policy = model(input_ids=tokens, use_cache=False).logits.float()
        with torch.no_grad(), model.disable_adapter():
            reference = model(input_ids=tokens, use_cache=False).logits.float()
        return (policy - reference).pow(2).mean() + policy.logsumexp(-1).mean()

    run: Any = {"sizes": (4,) * 4, "lengths": (12, 20, 12, 9), "loss": loss}
    make = partial(few_dense, num_layers=2)
    resident = train(make(), False, **run)
    model, captures, _ = recorded(make(), **KEPT)
    assert same(train(model, **run), resident) and captures.num_replays > 10


def test_a_model_that_is_not_prepared_no_micro_batches_and_no_gradients() -> None:
    """With the model's own loss; in a module around the prepared one: ``test_ddp``."""
    assert same(train(dense()), train(dense(), together=False))
    model = prepare_plain(dense(), slots=2)
    assert poros.accumulate(model, []) == [] and num_groups(model) == 0
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        poros.accumulate(model, [{"input_ids": tokens, "labels": tokens}] * 2)


train_threes = partial(loops.train, sizes=(3, 3))


@cache
def expected(**run: Any) -> list[torch.Tensor]:
    """What a resident model computes, one micro-batch after the other."""
    return train_threes(few(), together=False, **run)


class Counted:
    """How often weights were made dense, by whom."""

    def __init__(self, patch: Patch) -> None:
        self.num_single = self.num_shared = 0
        genuine = dequantize.dequantize_ref

        def single(*args: Any) -> torch.Tensor:
            self.num_single += 1
            return genuine(*args)

        def shared(packed: torch.Tensor, state: Any, weight: torch.Tensor) -> None:
            self.num_shared += 1
            weight.copy_(genuine(packed, state, weight.dtype))

        patch.setattr(dequantize, "dequantize_ref", single)
        patch.setattr(dense_memory, "dequantize_into", shared)


def test_each_weight_is_made_dense_once_a_group_and_pass(monkeypatch: Patch) -> None:
    counted = Counted(monkeypatch)
    model = prepare_plain(few(), slots=2, share_dense=True, self_check="off")
    assert same(train_threes(model), expected())
    assert num_groups(model) == 2 and reasons(model) == []
    # Seven matrices, forward and backward; the last layer's are still there at the turn.
    assert counted.num_shared == 2 * 7 * (2 * NUM_LAYERS - 1)
    # On a CPU the forward is bitsandbytes' own: what asks is the gradient of the input of a module
    # with adapters, which q of the first layer has not, in the micro-batch that is watched alone.
    assert counted.num_single == 2 * NUM_LAYERS - 1
    runtime = poros.runtime(model)
    weights = (each for each in layers_of(model)[0].parameters() if hasattr(each, "quant_state"))
    largest = 2 * sum(each.quant_state.shape.numel() for each in weights)
    plain = prepare_plain(few(), slots=2, self_check="off")
    train_threes(plain, sizes=(3,))
    assert runtime.device_num_bytes - poros.runtime(plain).device_num_bytes == largest


def test_a_copied_weight_is_no_part_of_what_is_shared(monkeypatch: Patch) -> None:
    """PEFT copies a linear module, its weight in a slot, as it adds an adapter of DoRA."""
    model = prepare_plain(few(), slots=2, share_dense=True, self_check="off")
    train_threes(model)
    copied: list[Any] = []
    monkeypatch.setattr(
        "peft.tuners.lora.dora.deepcopy", lambda it: copied.append(copy.deepcopy(it)) or copied[-1]
    )
    adapter = LoraConfig(target_modules=["up_proj"], use_dora=True)
    model.add_adapter("late", adapter)
    assert len(copied) == NUM_LAYERS
    assert all(each.weight.quant_state.dense_place is None for each in copied)


def test_without_sharing_each_micro_batch_makes_weights_dense(monkeypatch: Patch) -> None:
    counted = Counted(monkeypatch)
    train_threes(on_tapes(few(), slots=2))
    assert counted.num_shared == 0
    # In what is recorded at least, whose gradient is ours on a CPU too.
    assert counted.num_single >= 3 * NUM_LAYERS


@pytest.mark.parametrize("keep_last", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_recorded_visits_that_share_dense_weights(keep_last: int) -> None:
    """Some micro-batches of a form share, and a single one of the same form does not."""
    run: Any = {"sizes": (3, 1, 2, 1, 2, 1, 2, 2, 1), "lengths": (12,)}
    model, captures, _ = recorded(few(), slots=3, keep_last=keep_last, share_dense=True)
    assert same(train_threes(model, **run), expected(**run)) and num_groups(model) == 5
    kinds = {
        form.dense_address is not None
        for forms in captures._forms.values()
        for form in forms.values()
        if form.backward is not None and form.backward.is_proved
    }
    assert kinds == {True, False}


def test_what_one_micro_batch_shows_holds_for_those_together_and_in_another_room() -> None:
    """Each layer runs for the first one, and beside what is compared with it, in each room."""
    model, *_ = recorded(few(), slots=2, share_dense=True)
    eager = []

    def move(model: Model, number: int) -> None:
        eager.append(poros.runtime(model).stats()["num_eager_visits"])
        if number in (1, 3):
            poros.runtime(model).resize(ResidencyPlan(3 if number == 1 else 2, 0))

    run: Any = {"sizes": (3,) * 6, "lengths": (12,)}
    assert same(train_threes(model, **run, between=move), expected(**run))
    # One visit that shows it; in each room a forward and a backward beside those compared.
    assert [each // NUM_LAYERS for each in eager] == [0, 3, 5, 5, 7, 7]


def test_a_group_leaves_nothing_to_the_collector_of_python() -> None:
    """So a change of room frees the slots that were there."""
    model, *_ = recorded(few(), slots=2, share_dense=True)
    runtime = poros.runtime(model)
    gc.disable()
    try:
        train_threes(model)
        slots = [runtime.ring.slot(block).buffer.untyped_storage() for block in range(2)]
        before = list(map(StorageWeakRef, slots))
        del slots
        assert not any(each.expired() for each in before)
        runtime.resize(ResidencyPlan(3, 0))
        train_threes(model)
        assert all(each.expired() for each in before)
    finally:
        gc.enable()


def test_a_recording_reads_dense_weights_where_its_calls_share_them() -> None:
    """On a CPU bitsandbytes' own operators are recorded, which read none."""
    model = prepare_plain(few(), slots=2, share_dense=True, self_check="off")
    tokens = torch.arange(9)[None]
    poros.accumulate(model, [{"input_ids": tokens, "labels": tokens}] * 3)
    runtime = poros.runtime(model)
    dense, layer = runtime.context.dense, next(runtime.streamed_layers())
    assert dense is not None and dense.address is not None and layer.dense_address is None
    with layer.sharing_dense():
        assert layer.dense_address == dense.address
    for address in (None, dense.address):
        with layer.assuming_dense(address):
            assert dense.serves(layer.index) == (address is not None)
    with pytest.raises(RuntimeError, match="has moved"):
        layer.assuming_dense(1)


def test_a_smaller_budget_goes_without_dense_weights() -> None:
    model = prepare_plain(few(), slots=2, share_dense=True)
    runtime, sizes = poros.runtime(model), list[int]()

    def switch_off(model: Model, number: int) -> None:
        runtime.sizer.shares_dense = number < 1
        sizes.append(runtime.device_num_bytes)

    assert same(train_threes(model, between=switch_off), expected())
    assert sizes[0] == runtime.device_num_bytes < sizes[1]


def test_no_memory_for_dense_weights(monkeypatch: Patch) -> None:
    monkeypatch.setattr(DenseLayer, "allocate", raising(torch.OutOfMemoryError, "none"))
    model = prepare_plain(few(), slots=2, share_dense=True)
    assert same(train_threes(model), expected()) and num_groups(model) == 2


# ------------------------------------------------------------------------------------ faults


@in_place_of(DenseLayer, "fill")
def never_filled_again(genuine: Any, self: DenseLayer, layer: int, weights: Any) -> None:
    """Another layer's weights are taken for this one's."""
    if self._filled is not None:
        self._reader = layer
    else:
        genuine(self, layer, weights)


@in_place_of(LayerBody, "sharing_dense")
def before_the_block_is_there(genuine: Any, self: LayerBody) -> Any:
    """The weights are made dense ahead of the visit, from what its slot held before."""
    dense = self.context.dense
    if dense is None:
        return nullcontext()
    found = dense.use(self.index)
    dense.served = self.index
    dense.fill(self.index, self.weights.bindings.dense_weights)
    return found


@pytest.mark.parametrize("fault", [never_filled_again, before_the_block_is_there])
def test_control_a_fault_of_dense_weights_shows(fault: Plant, monkeypatch: Patch) -> None:
    """Where a recomputation makes a graph: on a CPU that of a forward is bitsandbytes' own."""
    run: Any = {"sizes": (3,) * 4}  # so that visits are replayed
    genuine = expected(**run)
    fault(monkeypatch)
    assert not same(train_threes(on_tapes(few(), share_dense=True), **run), genuine)


# Faults of groups: each one shows, or is made good.

FAULTY = program(sizes=(4, 3))


def descending(self: Group, genuine: Any = Group.backward) -> None:
    """The order of sums."""
    self._batches = [*reversed(self._batches[: self.num_done])]
    genuine(self)


def last_group_first(
    model: Any, batches: Any, genuine: Any = poros.accumulate, **options: Any
) -> Any:
    """The order of groups: of micro-batches that go together in twos."""
    later_ones = genuine(model, batches[2:], **options)
    return [*genuine(model, batches[:2], **options), *later_ones]


def test_a_wrong_random_plan_is_seen_before_gradients_change(monkeypatch: Patch) -> None:
    genuine = group.later
    monkeypatch.setattr(
        group, "later", lambda state, found: genuine(state, Draws(found.cpu + 1, found.device))
    )
    assert ends(FAULTY._replace(end=(RematerializationError, "random numbers")))
    # And shows if nobody checks it.
    monkeypatch.setattr(MicroBatch, "begin_at", lambda self, now: None)
    assert not ends(FAULTY._replace(policy=(("self_check", "off"),)))


CONTROLS = {
    "sums in descending order": Control(Group, "backward", descending, FAULTY),
    "the last group first": Control(poros, "accumulate", last_group_first, FAULTY),
    "no gradients below": Control(
        MicroBatch, "backward_below", lambda self, by_hand: None, PROGRAMS["prompt_tuning"]
    ),
}


@pytest.mark.parametrize("which", CONTROLS)
def test_controls(which: str, monkeypatch: Patch) -> None:
    assert CONTROLS[which].is_seen(monkeypatch)


BATCHES: dict[str, Any] = {
    "a dictionary": ({"input_ids": torch.ones(1, 4)}, "found a str"),
    "a tensor in the list": ([torch.ones(1, 4, dtype=torch.long)], "found a Tensor"),
    "no labels": ([{"input_ids": torch.ones(1, 4, dtype=torch.long)}] * 2, "add labels"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_are_none_are_refused(name: str) -> None:
    batches, expected = BATCHES[name]
    model = prepare_plain(adapted(), slots=2)
    with pytest.raises(TypeError, match=expected):
        poros.accumulate(model, batches)
    assert all(each.grad is None for each in loops.trained(model))
