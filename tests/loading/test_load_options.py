"""Options of ``poros.load`` and ``poros load`` that are refused, by name, and loads in threads.

Those that are honoured stand in test_loading.py.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BitsAndBytesConfig

import poros.loaders.load
from poros.cli.shared import BAD_INPUT
from poros.errors import PolicyError
from poros.loaders.load import load
from tests.command import poros_command, text
from tests.loading.loaded import Kinds, differences, quantization

EIGHT_BITS, FOUR_BITS = BitsAndBytesConfig(load_in_8bit=True), BitsAndBytesConfig(load_in_4bit=True)
NOT_OURS, NO_DTYPE, NO_CONFIG = "expected options", "expected bfloat16", "expected a configuration"
NO_REPOSITORY, NO_DEVICE = "expected it with a hub repository", "expected a usable device"
NO_METHOD, ALREADY = "expected 'nf4'", "which is quantized already"

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "checkpoint": [
        ({"device_map": "auto"}, f"device_map: {NOT_OURS}"),
        ({"state_dict": {}}, f"state_dict: {NOT_OURS}"),
        ({"torch_dtype": torch.float32}, f"torch_dtype: {NOT_OURS}"),
        ({"weights_only": False}, f"weights_only: {NOT_OURS}"),
        ({"adapter_kwargs": {}}, f"adapter_kwargs: {NOT_OURS}"),
        ({"trust_remote_code": True}, "trust_remote_code: expected False"),
        ({"use_safetensors": False}, "use_safetensors: expected True"),
        ({"load_in_4bit": True}, "load_in_4bit: .*pass quantization='nf4'"),
        ({"load_in_8bit": True}, "load_in_8bit: .*8 bits cannot be streamed"),
        ({"gguf_file": "x.gguf"}, "gguf_file: .*safetensors checkpoint"),
        ({"nonsense": 1}, "nonsense: found neither an option of poros.load nor a field of Qwen2"),
        ({"to_dict": 1}, "to_dict: found neither"),
        ({"dtype": torch.int8}, r"dtype: expected bfloat16, .* found torch\.int8"),
        ({"dtype": "int8"}, f"dtype: {NO_DTYPE}"),
        ({"dtype": "nonsense"}, f"dtype: {NO_DTYPE}"),
        ({"dtype": None}, f"dtype: {NO_DTYPE}"),
        ({"config": "config.json"}, f"config: {NO_CONFIG}"),
        ({"config": {}}, f"config: {NO_CONFIG}"),
        ({"subfolder": 3}, "subfolder: expected a text"),
        ({"variant": 3}, "variant: expected a text"),
        ({"revision": "v2"}, f"revision: {NO_REPOSITORY}"),
        ({"force_download": True}, f"force_download: {NO_REPOSITORY}"),
        ({"generation_config": {"max_length": 3}}, "generation_config: expected a Gen"),
        ({"quantization": "int8"}, f"quantization: {NO_METHOD}"),
        ({"quantization": "8bit"}, "quantization: expected 'nf4'.*no other format"),
        ({"quantization": ["nf4"]}, f"quantization: {NO_METHOD}"),
        ({"quantization": EIGHT_BITS}, f"quantization: {NO_METHOD}"),
        ({"quantization_config": None, "quantization": "nf4"}, "found both"),
        ({"limits": 3}, r"limits: expected poros\.Limits"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers: expected values"),
        ({"device": 1.5}, f"device: {NO_DEVICE}"),
        ({"device": "nowhere"}, f"device: {NO_DEVICE}"),
        ({"device": "meta"}, f"device: {NO_DEVICE}, found 'meta' .only CPUs and CUDA"),
        ({"host_budget": "1GiB"}, "host_budget: expected a store"),
        ({"host_budget": "much", "store": "{new}"}, "host_budget: expected bytes"),
        ({"host_budget": -1, "store": "{new}"}, "host_budget: expected bytes"),
        ({"host_budget": "8 gibs", "store": "{new}"}, "host_budget: expected bytes"),
        # A store made with other options is not taken for what is asked for.
        ({"store": "{store}", "quantization": "fp4"}, "expected one with quantization"),
        ({"store": "{store}", "quantization": None}, "expected one with quantization"),
        ({"store": "{store}", "dtype": torch.float16}, "expected one with"),
    ],
    "store": [
        ({"dtype": torch.float16}, "with dtype 'float16'"),
        ({"quantization": None}, "with quantization None"),
        ({"quantization": "fp4"}, "with quantization"),
        ({"quantization": "nonsense"}, f"quantization: {NO_METHOD}"),
        ({"quantization_config": FOUR_BITS}, "with quantization"),
        ({"device": "nowhere"}, f"device: {NO_DEVICE}"),
        ({"revision": "v2"}, f"revision: {NO_REPOSITORY}"),
        ({"subfolder": "x"}, "subfolder: expected none with a store"),
        ({"variant": "x"}, "variant: expected none with a store"),
        ({"nonsense": 1}, "nonsense: found neither"),
        ({"store": "{new}"}, "store: expected none"),
    ],
    "4-bit single": [
        ({"quantization": "fp4"}, ALREADY),
        ({"quantization": None}, ALREADY),
        ({"quantization": "nf4"}, ALREADY),  # with double quantization, which it has not
        ({"quantization": quantization(bnb_4bit_use_double_quant=True)}, ALREADY),
    ],
}


@pytest.fixture
def places(kinds: Kinds, tmp_path: Path) -> dict[str, Path]:
    packed = kinds.packed(bnb_4bit_use_double_quant=False)
    found = {"checkpoint": kinds.dense(), "store": kinds.store(), "4-bit single": packed}
    return {**found, "new": tmp_path / "new"}


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [(source, *row) for source, rows in REFUSED.items() for row in rows],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_read(
    places: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    options: dict[str, Any],
    message: str,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("read")

    monkeypatch.setattr("poros.loaders.checkpoint.Checkpoint.fetch", fail)
    if "store" in options:
        options = {**options, "store": options["store"].format(**places)}
    with pytest.raises(PolicyError, match=message):
        load(places[source], **options)
    assert not places["new"].exists()


def test_fields_beside_a_given_configuration(kinds: Kinds) -> None:
    config = AutoConfig.from_pretrained(kinds.dense())
    with pytest.raises(PolicyError, match="use_cache: beside config="):
        load(kinds.dense(), config=config, use_cache=False)
    model = load(kinds.dense(), config=config, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"dtype": "auto"}, {"quantization": "nf4"}, {"device": "cpu"}],
    ids=str,
)
def test_what_a_store_agrees_with(kinds: Kinds, options: dict[str, Any]) -> None:
    assert differences(load(kinds.store(), **options), load(kinds.store())) == []


def test_a_store_of_another_dtype_and_device(kinds: Kinds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own are the default; a device that was named has to be that which quantized it."""
    store = kinds.store(kinds.dense(), dtype=torch.float16)
    assert load(store).dtype == load(store, quantization="nf4").dtype == torch.float16
    with pytest.raises(PolicyError, match="with dtype 'bfloat16'"):
        load(kinds.dense(), store=store)
    monkeypatch.setattr("poros.loaders.options.device_name", lambda device: "another")
    with pytest.raises(PolicyError, match="with device 'another'"):
        load(store, device="cpu")


# The command line.


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("{checkpoint} --out {new} --dtype int8", "--dtype: expected one of bf16"),
        ("{checkpoint} --out {new} --quantization int8", "--quantization: expect"),
        ("{checkpoint} --out {new} --device nowhere", "error: device: expected a usab"),
        ("{checkpoint} --out {store} --quantization fp4", "error: store (--out): expected one"),
        ("{checkpoint} --out {store} --dtype float32", "error: store (--out): expected one"),
        ("{store} --out {new}", "error: store (--out): expected none"),
        ("{store} --verify --dtype float16", "--verify takes no --dtype"),
        ("{store} --verify --device cpu", "--verify takes no --device"),
        ("{checkpoint} --verify", "found a checkpoint; make one of"),
        ("{new} --verify", "found neither in"),
        ("{checkpoint} --out {new}/x/y", "No such file or directory. Nothing was left"),
    ],
)
def test_the_command_refuses(places: dict[str, Path], command: str, message: str) -> None:
    result = poros_command("load", *(word.format(**places) for word in command.split()))
    found = " ".join(text(result).replace("│", " ").split())
    assert result.exit_code == BAD_INPUT and message in found, found
    assert "Traceback" not in found and not places["new"].exists()


def test_the_command_takes_dtype_auto_and_an_existing_store(kinds: Kinds, tmp_path: Path) -> None:
    source, out = kinds.dense(dtype=torch.float16), tmp_path / "store"
    for _ in range(2):
        result = poros_command("load", str(source), "--out", str(out), "--dtype", "auto")
        assert result.exit_code == 0, result.output
    assert load(out).dtype == torch.float16


# One process, several threads.


def test_loads_in_parallel_threads(kinds: Kinds) -> None:
    """Give what they give one after the other, and leave the default dtype as it was."""
    wanted = [
        (kinds.dense(), {"dtype": torch.bfloat16}),
        (kinds.dense("mixtral"), {"dtype": torch.float16}),
        (kinds.dense("phi3"), {"dtype": torch.float32, "quantization": None}),
    ] * 2
    expected = [load(path, **options) for path, options in wanted[:3]] * 2
    found: dict[int, Any] = {}
    begin = threading.Barrier(len(wanted))

    def run(index: int) -> None:
        path, options = wanted[index]
        begin.wait()
        found[index] = load(path, **options)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_default_dtype() == torch.float32
    assert sorted(found) == list(range(len(wanted)))
    for index, model in found.items():
        assert differences(model, expected[index]) == []


def test_control_two_threads_never_fill_at_once(
    kinds: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their timing: the second waits while the first is held within its load."""
    path = kinds.dense()
    inside, release, order = threading.Event(), threading.Event(), list[str]()
    fill = poros.loaders.load.fill

    def held(*arguments: Any) -> Any:
        order.append("in")
        inside.set()
        release.wait(60)
        made = fill(*arguments)
        order.append("out")
        return made

    monkeypatch.setattr(poros.loaders.load, "fill", held)
    threads = [threading.Thread(target=load, args=(path,)) for _ in range(2)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    threads[1].join(1)
    assert threads[1].is_alive() and order == ["in"]
    release.set()
    for thread in threads:
        thread.join()
    assert order == ["in", "out"] * 2
