"""What ``poros plan`` reports: its figures are those of plans, and its words say what they are."""

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from poros.errors import VRAMBudgetError
from poros.gates import registry, tiny
from poros.gates.registry import OUTCOMES, Record, Registry
from poros.planning.formula import MemoryPlan
from poros.planning.planner import Planner, format_remedies
from poros.planning.report import LENGTH_STEP, Device, fit_report, format_report
from poros.planning.request import PlanRequest, Speeds
from poros.utils.formatting import size
from tests.planning.cells import lora

pytestmark = pytest.mark.usefixtures("planned_once")

# Blocks of 0.1 MB; at these rates the link is the bottleneck, and there compute is.
SLOW_LINK, FAST_LINK = Speeds(0.001, 1.0), Speeds(1000.0, 0.001)


@pytest.fixture(scope="module")
def planner() -> Planner:
    config = tiny.small_config("qwen2", num_layers=6, hidden_size=128, dropout=0.0)
    config.max_position_embeddings = 4096
    return Planner(config, lora=lora())


def asked(budget: Any, *, speeds: Speeds | None = None, **options: Any) -> PlanRequest:
    return PlanRequest.of(
        vram_budget=budget, speeds=speeds, **{"seq_len": 256, "cuda_graphs": False, **options}
    )


def ask(
    planner: Planner, budget: Any, *, speeds: Speeds | None = None, **options: Any
) -> dict[str, Any]:
    ram = options.pop("ram", None)
    device = Device("your card", None if speeds is None else lambda _: speeds, "rates given")
    return fit_report(planner, asked(budget, **options), device, ram)


def needed(planner: Planner, seq_len: int, **options: Any) -> MemoryPlan:
    return planner.plan(PlanRequest.of(seq_len=seq_len, cuda_graphs=False, **options))


def said(found: dict[str, Any]) -> str:
    """All that is printed, on one line."""
    out = StringIO()
    Console(file=out, width=200).print(format_report(found))
    return " ".join(out.getvalue().split())


def test_a_resident_run_is_the_same_model_with_everything_on_the_device(planner: Planner) -> None:
    found = ask(planner, "1GiB", speeds=FAST_LINK)
    resident = needed(planner, 256, num_slots=6, keep_last=6, stream_head=False, speeds=FAST_LINK)
    assert found["keep_last"] == 6
    assert found["resident_num_bytes"] == resident.total_num_bytes
    assert found["times_resident"] == pytest.approx(1.0)
    two = ask(planner, needed(planner, 256).total_num_bytes + 1000, speeds=FAST_LINK)
    # Compute alone: recomputing everything is all that a streamed step does more.
    assert two["times_checkpointed"] == pytest.approx(1.0)
    assert two["times_resident"] > 1.2
    slow = ask(planner, needed(planner, 256).total_num_bytes + 1000, speeds=SLOW_LINK)
    assert slow["times_checkpointed"] > 2


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_the_longest_rows_fit_and_longer_ones_do_not(planner: Planner, share: float) -> None:
    least, most = (needed(planner, n, offload_boundaries=True) for n in (256, 4096))
    budget = int(least.total_num_bytes + share * (most.total_num_bytes - least.total_num_bytes))
    found = ask(planner, budget)
    longest = found["longest_seq_len"]
    assert longest % LENGTH_STEP == 0 and 256 <= longest < 4096
    assert planner.find(asked(budget, seq_len=longest)) is not None
    assert planner.find(asked(budget, seq_len=longest + LENGTH_STEP)) is None
    assert f"in tokens {longest:,}" in said(found)
    assert ask(planner, needed(planner, 1).total_num_bytes // 2)["longest_seq_len"] == 0


def test_what_does_not_fit_is_told_with_what_would_change_that(planner: Planner) -> None:
    budget = int(0.9 * needed(planner, 256, batch_size=4).total_num_bytes)
    options: dict[str, Any] = {"batch_size": 4, "offload_boundaries": False}
    found, request = ask(planner, budget, **options), asked(budget, **options)
    assert not found["fits"] and not found["fits_device"]
    assert found["verdict"].startswith("Does not fit your card: the step needs ")
    remedies = planner.remedies(request)
    with pytest.raises(VRAMBudgetError) as caught:
        planner.plan(request)
    advice = found["advice"]
    assert advice == format_remedies(remedies) and advice in str(caught.value)
    assert {each.knob for each in remedies} > {"batch_size"}
    assert advice.splitlines()[0] in said(found)
    # Plain values all the same: those of the least that there may be.
    assert found["total_num_bytes"] == needed(planner, 256, batch_size=4).total_num_bytes


def test_what_a_step_needs_at_least_is_the_floor_of_a_run(planner: Planner) -> None:
    """Where the check of the first step decides: its layers run our kernels then, not PEFT's."""
    options: dict[str, Any] = {"seq_len": 1024, "self_check": True}
    found = ask(planner, "200kB", **options)
    least = found["total_num_bytes"]
    assert found["check_kernels"] == "fused" and found["terms"]["self-check"] > 0
    with pytest.raises(VRAMBudgetError, match=f"at least {size(least)}, "):
        planner.plan(asked("200kB", **options))
    for budget, fits in ((least, True), (least - 1, False)):
        plan = planner.find(asked(f"{budget}B", **options))
        assert (plan is not None and plan.total_num_bytes == least) == fits


def test_going_together_is_advised_where_the_link_is_the_bottleneck(planner: Planner) -> None:
    budget = 2 * needed(planner, 256).total_num_bytes
    slow = ask(planner, budget, num_slots=2, keep_last=0, speeds=SLOW_LINK)
    assert "micro-batches share PCIe copies" in said(slow)
    nothing_shared = replace(FAST_LINK, dense_tokens=0.0)
    fast = ask(planner, budget, num_slots=2, keep_last=0, speeds=nothing_shared)
    assert "--accumulate" not in said(fast)


def test_an_answer_is_plain_values_beside_those_of_the_plan(planner: Planner) -> None:
    found = ask(planner, "1GiB", speeds=FAST_LINK, ram=10**10)
    assert json.loads(json.dumps(found)) == found
    assert planner.plan(asked("1GiB", speeds=FAST_LINK)).as_dict().items() <= found.items()
    assert found["fits"] is True and found["verdict"] in said(found)
    assert found["tokens_per_s"] == pytest.approx(256 / found["step_ms"] * 1e3)
    assert found["longest_seq_len"] == 4096 and found["registry"]["outcome"] == "exact"
    assert found["ram_num_bytes"] == 10**10 and found["forecast"] == "rates given"


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ({"qwen2": Record("exact")}, ("exact", OUTCOMES["exact"])),
        ({"qwen2": Record("refused", "because")}, ("refused", "because")),
        ({}, ("untested", "nothing is on record")),
    ],
)
def test_a_family_is_as_on_record(
    records: Any, expected: tuple[str, str], planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "read_registry", lambda: Registry(records))
    found = ask(planner, "1GiB")
    assert tuple(found["registry"].values()) == expected and expected[1] in said(found)
