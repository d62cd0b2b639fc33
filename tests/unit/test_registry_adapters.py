"""Records of kinds of adapters, and what discovery makes of them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import poros.api
from poros.errors import UnvalidatedArchitectureError
from poros.gates import registry, sweep, tiny
from poros.gates.kinds import KINDS
from poros.gates.registry import Record, Registry, RegistryError, code_hash, read_registry
from poros.model.adapter_kinds import AdapterKind
from poros.model.inspect import _check_validated, validated_adapters
from tests.records import adapter_record

# Trained in another order, with state of their own in a layer, or through a cache; or shared by
# several modules of several layers.
REFUSED_KINDS = {
    *("velora", "monteclora", "alora", "lily", "tinylora", "unilora", "vblora"),
    *("prefix_tuning", "cartridge"),
}
PROMISED_KINDS = {
    *("dora", "bdlora", "mica", "kasa", "adalora", "beft", "boft", "c3a", "deft", "delora"),
    *("fourierft", "frod", "glora", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr"),
    *("miss", "oft", "osf", "peanut", "psoft", "pvera", "randlora", "road", "shira", "vera"),
    *("supertuning", "trainable_tokens", "waveft", "prompt_tuning", "p_tuning", "cpt"),
}
REAL = registry.PATH


def test_every_kind_of_adapter_is_on_record() -> None:
    """On each of the families, and what every user of them is told is exact is so on record."""
    found = read_registry(REAL)
    assert {(record.name, record.adapter) for record in found.adapters.values()} == set(
        sweep.adapters()
    )
    assert PROMISED_KINDS <= found.exact_adapters() == validated_adapters()
    assert not REFUSED_KINDS & found.exact_adapters()
    assert PROMISED_KINDS | REFUSED_KINDS | {"lora"} == set(KINDS)


def test_discovery_accepts_exactly_the_kinds_that_are_exact() -> None:
    base: Any = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    accepted = set()
    for kind in [*KINDS, "never_heard_of"]:
        kinds = {
            kind: AdapterKind(kind, kind.upper(), "Linear"),
            "lora": AdapterKind("lora", "LORA", "Linear"),
        }
        try:
            _check_validated(base, kinds, allow_unvalidated=False)
        except UnvalidatedArchitectureError as error:
            assert f"{kind} (PEFT's {kind.upper()}, Linear)" in str(error)
            command = f"`poros check --architecture qwen2 --adapter {kind}`"
            assert (command in str(error)) is (kind in KINDS)
        else:
            accepted.add(kind)
    assert accepted == PROMISED_KINDS | {"lora"}


@pytest.mark.parametrize(
    ("outcomes", "is_exact"),
    [
        (("exact", "exact"), True),
        (("exact", "untested"), True),
        (("exact", "refused"), False),
        (("failed", "exact"), False),
        (("untested", "untested"), False),
    ],
)
def test_a_kind_is_exact_where_peft_can_train_it_or_not_at_all(
    outcomes: tuple[Any, ...], is_exact: bool, path: Path, records: dict[str, Record]
) -> None:
    found = Registry({"qwen2": records["qwen2"]})
    for name, outcome in zip(registry.ADAPTER_FAMILIES, outcomes, strict=True):
        record = adapter_record(records[name], "vera")
        reason = None if outcome == "exact" else "x"
        found = found.including(replace(record, outcome=outcome, reason=reason).sealed())
    assert found.exact_adapters() == ({"vera"} if is_exact else set())
    found.write()
    model = tiny.make_model("qwen2", num_layers=2, hidden_size=32, adapter="vera")
    if is_exact:
        poros.api.restore(poros.api.prepare(model))
    else:
        with pytest.raises(UnvalidatedArchitectureError, match=r"vera .*--adapter vera`"):
            poros.api.prepare(model)
    poros.api.prepare(model, allow_unvalidated=True)


def test_a_record_of_a_kind_changed_by_hand_is_found(
    path: Path, records: dict[str, Record]
) -> None:
    record = adapter_record(records["qwen2"], "vera")
    assert record.problems(code_hash()) == records["qwen2"].problems(code_hash())
    for changed in (replace(record, adapter="ia3"), replace(record, name="gemma3")):
        Registry({}, {changed.key: changed}).write()
        with pytest.raises(RegistryError, match=r"changed; run `poros check .*--adapter"):
            read_registry()
    fewer = replace(record, modes=record.modes[:2]).sealed()
    assert any("other modes" in problem for problem in fewer.problems(code_hash()))
    dense = replace(record, adapter="hra").sealed()  # which PEFT trains on a dense base alone
    assert any("other modes" in problem for problem in dense.problems(code_hash()))
