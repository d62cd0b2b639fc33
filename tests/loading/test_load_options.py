"""What ``poros.load`` is asked for and reads beside the weights, and what people read then.

Options that cannot be honoured are refused by name (those that are honoured stand in
test_loading.py); what lies beside the weights is read once, within bounds, and carried into a
store; errors name what to do, and never disturb a terminal.
"""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast

import poros
import poros.loaders.load
from poros.errors import CheckpointFormatError, PolicyError, PorosError, StoreWriteError, quoted
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.load import load
from poros.loaders.store import REST, SLABS, open_store
from tests.loading.checkpoints import CONFIG
from tests.loading.damage import GENERATION
from tests.loading.loaded import Kinds, copy_of, differences, quantization, standard

EIGHT_BITS, FOUR_BITS = BitsAndBytesConfig(load_in_8bit=True), BitsAndBytesConfig(load_in_4bit=True)
NOT_OURS = "expected options"
NO_REPOSITORY, NO_DEVICE = "expected it with a hub repository", "expected a usable device"
NO_METHOD, ALREADY = "expected 'nf4'", "which is quantized already"

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "checkpoint": [
        ({"device_map": "auto"}, f"device_map: {NOT_OURS}"),
        ({"weights_only": False}, "weights_only: found neither"),
        ({"trust_remote_code": True}, "trust_remote_code: expected False"),
        ({"use_safetensors": False}, "use_safetensors: expected True"),
        ({"load_in_4bit": True}, "load_in_4bit: .*pass quantization='nf4'"),
        ({"load_in_8bit": True}, "load_in_8bit: .*pass quantization='nf4'"),
        ({"gguf_file": "x.gguf"}, "gguf_file: .*safetensors checkpoint"),
        ({"nonsense": 1}, "nonsense: found neither an option of poros.load nor a field of Qwen2"),
        ({"to_dict": 1}, "to_dict: found neither"),
        ({"dtype": torch.int8}, r"dtype: expected bfloat16, .* found torch\.int8"),
        ({"dtype": "nonsense"}, "dtype: expected bfloat16"),
        ({"revision": "v2"}, f"revision: {NO_REPOSITORY}"),
        ({"quantization": "8bit"}, "quantization: expected 'nf4'.*no other format"),
        ({"quantization": EIGHT_BITS}, f"quantization: {NO_METHOD}"),
        ({"quantization_config": None, "quantization": "nf4"}, "found both"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers: expected values"),
        ({"device": "nowhere"}, f"device: {NO_DEVICE}"),
        ({"device": "meta"}, f"device: {NO_DEVICE}, found 'meta' .only CPUs and CUDA"),
        ({"host_budget": "1GiB"}, "host_budget: expected a store"),
        ({"host_budget": "much", "store": "{new}"}, "host_budget: expected bytes"),
        # A store made with other options is not taken for what is asked for.
        (
            {"store": "{store}", "quantization": "fp4"},
            r"with quantization .*'fp4'}, found .*'nf4'}; choose",
        ),
        ({"store": "{store}", "dtype": torch.float16}, "expected one with"),
    ],
    "store": [
        ({"dtype": torch.float16}, "with dtype 'float16'"),
        ({"quantization": None}, "with quantization None"),
        ({"quantization": "nonsense"}, f"quantization: {NO_METHOD}"),
        ({"quantization_config": FOUR_BITS}, "with quantization"),
        ({"device": "nowhere"}, f"device: {NO_DEVICE}"),
        ({"revision": "v2"}, f"revision: {NO_REPOSITORY}"),
        ({"nonsense": 1}, "nonsense: found neither"),
        ({"store": "{new}"}, "store: expected none"),
    ],
    "4-bit single": [
        ({"quantization": "fp4"}, ALREADY),
        ({"quantization": "nf4"}, ALREADY),  # with double quantization, which it has not
        ({"quantization": quantization(bnb_4bit_use_double_quant=True)}, ALREADY),
    ],
}


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [(source, *row) for source, rows in REFUSED.items() for row in rows],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_read(
    kinds: Kinds,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    options: dict[str, Any],
    message: str,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("read")

    packed = kinds.packed(bnb_4bit_use_double_quant=False)
    places = {"checkpoint": kinds.dense(), "store": kinds.store(), "4-bit single": packed}
    places["new"] = tmp_path / "new"
    monkeypatch.setattr("poros.loaders.checkpoint.Checkpoint.fetch", fail)
    if "store" in options:
        options = {**options, "store": options["store"].format(**places)}
    with pytest.raises(PolicyError, match=message):
        load(places[source], **options)
    assert not places["new"].exists()


def test_a_store_of_another_dtype_and_device(kinds: Kinds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own are the default; a device that was named has to be that which quantized it."""
    store = kinds.store(kinds.dense(), dtype=torch.float16)
    assert load(store).dtype == load(store, quantization="nf4").dtype == torch.float16
    assert load(kinds.dense(), store=store).dtype == torch.float16
    with pytest.raises(PolicyError, match="with dtype 'bfloat16'"):
        load(kinds.dense(), store=store, dtype=torch.bfloat16)
    monkeypatch.setattr("poros.loaders.options.device_name", lambda device: "another")
    with pytest.raises(PolicyError, match="with device 'another'"):
        load(store, device="cpu")


# One process, several threads.


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


# What lies beside the weights.


@pytest.fixture(scope="module")
def sound(kinds: Kinds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, chat templates, settings of generation and terms of use."""
    folder = copy_of(kinds.dense(num_layers=2), tmp_path_factory.mktemp("sound"))
    words = {word: index for index, word in enumerate(("[UNK]", "a", "long", "way"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    tokenizer.chat_template = {"default": "{{ messages }}!", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder)
    (folder / GENERATION).write_text(json.dumps({"max_new_tokens": 5}))
    (folder / "LICENSE").write_text("Do no harm.")
    (folder / "tokenizer_code.py").write_text("raise SystemExit")
    (folder / "LICENSE.empty").touch()
    for name in ("README.md", "pytorch_model.bin"):
        (folder / name).symlink_to("nowhere")
    return folder


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model", symlinks=True))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_store_has_tokenizer_templates_settings_and_licence(path: Path, store: Path) -> None:
    load(path, store=store)
    expected, found = AutoTokenizer.from_pretrained(path), AutoTokenizer.from_pretrained(store)
    assert found.get_vocab() == expected.get_vocab() and {"long", "way"} < found.get_vocab().keys()
    assert found.chat_template == expected.chat_template and "tool_use" in found.chat_template
    assert (store / "LICENSE").read_text() == "Do no harm."
    with open_store(store) as opened:
        named = set(opened.manifest.files)
    there = {str(file.relative_to(store)) for file in store.rglob("*") if file.is_file()}
    assert named == there - {SLABS, REST}
    assert {"tokenizer.json", "additional_chat_templates/tool_use.jinja", "LICENSE"} < named
    assert not {"tokenizer_code.py", "LICENSE.empty"} & named
    assert load(store).generation_config.max_new_tokens == 5
    (store / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.json: .*bytes changed"):
        load(store)


def test_a_file_that_cannot_be_read_is_refused_before_weights_are(
    path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path / "NOTICE").symlink_to("nowhere")
    monkeypatch.setattr(Checkpoint, "slices", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(CheckpointFormatError, match="NOTICE: expected to read it, found: No such"):
        load(path, store=store)


@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "store"])
@pytest.mark.parametrize("file", [CONFIG, GENERATION])
def test_a_file_that_is_swapped_while_weights_are_read(
    path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, file: str, is_stored: bool
) -> None:
    """Changes nothing: model, store and fingerprint are of the one that was read."""
    before = (path / file).read_bytes()
    expected = standard(path, quantization())
    slices = Checkpoint.slices

    def swap(*arguments: Any, **options: Any) -> Any:
        fields = json.loads(before) | {"rms_norm_eps": 0.5, "max_new_tokens": 99}
        (path / file).write_text(json.dumps(fields))
        return slices(*arguments, **options)

    monkeypatch.setattr(Checkpoint, "slices", swap)
    assert differences(load(path, store=store if is_stored else None), expected) == []
    if is_stored:
        assert (store / file).read_bytes() == before
        if file == CONFIG:
            with pytest.raises(CheckpointFormatError, match="a store of the checkpoint"):
                load(path, store=store)
        (path / file).write_bytes(before)
        assert differences(load(path, store=store), expected) == []


# What people read.


@pytest.mark.parametrize("value", ["x" * 10**7, "\x1b" * 10**6, ["\n"] * 10**5, {"\0" * 999: 1}])
def test_quoted_is_bounded(value: Any) -> None:
    for is_bare in (False, True):
        found = quoted(value, is_bare=is_bare)
        assert len(found) < 250 and found.isprintable() and "characters)" in found


# Errors where there were tracebacks, or the wrong advice.


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("no/parent", "No such file or directory"),
        ("file/store", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("full", "is not empty"),
    ],
)
def test_what_to_do_when_a_store_cannot_be_written(
    sound: Path, tmp_path: Path, place: str, says: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(StoreWriteError, match=f"{says}.*choose another place"):
        load(sound, store=tmp_path / place)
    there = sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*"))
    assert there == ["file", "full", "full/precious"]


def test_control_a_name_of_a_repository_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(name: str, **_: Any) -> Any:
        asked.append(name)
        raise OSError("no way there")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    for call in (lambda: load("org/name"), lambda: poros.plan("name", seq_len=8)):
        with pytest.raises(PorosError, match="on the hub OSError, 'no way there'"):
            call()
    assert asked == ["org/name", "name"]
