"""The rules that say how much room a budget buys: pure functions."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from poros.config import StreamingPolicy
from poros.host.layout import BlockLayout
from poros.model.sizing import (
    BlockSizes,
    Needs,
    ResidencyPlan,
    Shape,
    Sizer,
    Wanted,
    affordable,
    growth,
    step_num_bytes,
)

KB = 1024
LAYOUTS = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(
    lambda sizes: [BlockLayout((), size * KB) for size in sizes]
)


@given(LAYOUTS, st.integers(0, 200), st.integers(0, 50), st.integers(0, 20), st.booleans())
def test_what_is_affordable_fits_and_grows_with_the_budget(
    layouts: list[BlockLayout], spare: int, passing: int, graph: int, offload: bool
) -> None:
    sizes, needs = BlockSizes(layouts, len(layouts), 1), Needs(KB, passing * KB, graph * KB)
    wanted = Wanted(None, None, None)
    least = step_num_bytes(ResidencyPlan(2, 0, offload), sizes, needs)
    cheapest = min(
        step_num_bytes(ResidencyPlan(n, 0, offload), sizes, needs)
        for n in range(2, len(layouts) + 2)
    )
    assert affordable(cheapest - 1, sizes, needs, wanted, offload) is None
    room = affordable(least + spare * KB, sizes, needs, wanted, offload)
    assert room is not None and step_num_bytes(room, sizes, needs) <= least + spare * KB
    more = affordable(least + (spare + 9) * KB, sizes, needs, wanted, offload)
    assert more is not None and more[:2] >= room[:2]


@given(*[st.integers(1, 64)] * 5)
def test_growth_is_no_less_than_attention_without_a_fused_kernel(
    rows: int, length: int, more_rows: int, more_length: int, together: int
) -> None:
    known, shape = Shape(rows, length, 2), Shape(more_rows, more_length, together)

    def cost(shape: Shape) -> int:
        one = shape.batch_size * (3 * shape.seq_len + shape.seq_len**2)
        return one * shape.micro_batches

    assert cost(shape) <= cost(known) * growth(shape, known) * (1 + 1e-9)


class Estimated:
    """An estimate: what is wanted, and of the rest what the shape leaves."""

    def __init__(self, shape: Shape, wanted: Wanted) -> None:
        left = {Shape(1, 10): (4, 0), Shape(2, 5): (3, 1)}[shape]
        self.num_slots = left[0] if wanted.num_slots is None else wanted.num_slots
        self.keep_last = left[1] if wanted.keep_last is None else wanted.keep_last
        self.offload_boundaries, self.num_blocks = False, 6
        self.replays = self.shares_dense = False
        self.total_num_bytes = shape.batch_size + shape.seq_len


def test_a_room_for_several_shapes_is_planned_as_it_is() -> None:
    def estimate(shape: Shape, budget: object, wanted: Wanted, *_: bool) -> Any:
        return Estimated(shape, wanted)

    sizer = Sizer(StreamingPolicy(vram_budget="1GiB"), estimate)
    assert sizer.plan is None
    assert sizer.begin(Shape(1, 10), ResidencyPlan(2, 0), False, None) == ResidencyPlan(4, 0)
    room = sizer.begin(Shape(2, 5), ResidencyPlan(4, 0), False, None)
    assert room == ResidencyPlan(3, 0), "what both leave"
    plan: Any = sizer.plan
    assert (plan.num_slots, plan.keep_last, plan.total_num_bytes) == (3, 0, 11)
