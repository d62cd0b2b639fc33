"""Every option of ``poros.load`` and ``poros load`` is honoured, or refused by its name."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from poros.cli import BAD_INPUT
from poros.errors import CheckpointFormatError, PolicyError
from poros.loaders.load import load
from tests.command import poros_command, text
from tests.loaded import (
    EMBED,
    checkpoints,
    copy_of,
    differences,
    quantization,
    standard,
    tensors,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes small checkpoints, each once."""
    return checkpoints(tmp_path_factory)


@pytest.fixture(scope="module")
def store(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of NF4, made in bfloat16 on a CPU."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    load(checkpoint(), store=folder)
    return folder


def other(path: Path, to: Path, name: str = "model.safetensors") -> Path:
    """A checkpoint with another embedding, under another name or in another folder."""
    to.mkdir(parents=True, exist_ok=True)
    found = load_file(path / "model.safetensors")
    found[EMBED] = found[EMBED] + 1
    save_file(found, to / name, metadata={"format": "pt"})
    shutil.copy(path / "config.json", to)
    return to


# Honoured: the model is that of from_pretrained with the same option.


@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "store"])
@pytest.mark.parametrize("where", ["subfolder", "variant", "sharded variant"])
def test_the_weights_that_are_asked_for(
    checkpoint: Any, tmp_path: Path, where: str, is_stored: bool
) -> None:
    folder, options = copy_of(checkpoint(), _made(tmp_path / "model")), {"variant": "fp16"}
    if where == "subfolder":
        other(checkpoint(), folder / "inside")
        options = {"subfolder": "inside"}
    elif where == "variant":
        other(checkpoint(), folder, "model.fp16.safetensors")
    else:
        model = standard(other(checkpoint(), tmp_path / "other"), None)
        model.save_pretrained(folder, variant="fp16", max_shard_size="100KB")
        assert (folder / "model.safetensors.index.fp16.json").exists()
    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantization(), **options
    )
    model = load(folder, store=tmp_path / "store" if is_stored else None, **options)
    assert [each for each in differences(model, expected) if "name_or_path" not in each] == []
    assert differences(model, load(folder)) != []


@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "store"])
def test_the_configuration_that_is_given(checkpoint: Any, tmp_path: Path, is_stored: bool) -> None:
    config = AutoConfig.from_pretrained(checkpoint(), attn_implementation="eager")
    config.rms_norm_eps = 0.25
    before = config.to_dict()
    model = load(checkpoint(), config=config, store=tmp_path / "store" if is_stored else None)
    assert model.config.rms_norm_eps == 0.25 and model.model.norm.variance_epsilon == 0.25
    assert model.config._attn_implementation == "eager"
    assert config.to_dict() == before
    expected = AutoModelForCausalLM.from_pretrained(
        checkpoint(), config=config, dtype=torch.bfloat16, quantization_config=quantization()
    )
    assert differences(model, expected) == []


@pytest.mark.parametrize("is_quantized", [True, False], ids=["nf4", "dense"])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_said", [True, False], ids=["config", "weights"])
def test_dtype_auto(
    checkpoint: Any, tmp_path: Path, source: torch.dtype, is_quantized: bool, is_said: bool
) -> None:
    """What the configuration says, or else the weights."""
    path = copy_of(checkpoint(dtype=source), tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == str(source).removeprefix("torch.")
    if not is_said:
        del config["dtype"]
        (path / "config.json").write_text(json.dumps(config))
    wanted = quantization(bnb_4bit_compute_dtype=source) if is_quantized else None
    model = load(path, dtype="auto", quantization="nf4" if is_quantized else None)
    expected = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", quantization_config=wanted, device_map={"": "cpu"}
    )
    assert model.dtype == source and differences(model, expected) == []


def test_other_options_of_from_pretrained(checkpoint: Any) -> None:
    given = GenerationConfig(max_new_tokens=7)
    model = load(
        checkpoint(),
        generation_config=given,
        dtype="float16",
        output_attentions=True,
        use_safetensors=True,
        low_cpu_mem_usage=True,
        revision="main",
        local_files_only=True,
    )
    assert model.generation_config.max_new_tokens == 7 and model.dtype == torch.float16
    assert model.config.output_attentions is True


def test_names_may_be_mapped(checkpoint: Any, tmp_path: Path) -> None:
    def rename(found: dict[str, Any]) -> None:
        found["model.final.weight"] = found.pop("model.norm.weight")

    path = copy_of(checkpoint(), tmp_path, rename)
    mapping = {r"^model\.final\.": "model.norm."}
    expected = standard(checkpoint(), quantization())
    found, wanted = tensors(load(path, key_mapping=mapping)), tensors(expected)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(CheckpointFormatError, match=r"none of model\.norm\.weight"):
        load(path)


# Refused, and nothing read.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_safetensors": False}, "use_safetensors: expected True"),
        ({"load_in_4bit": True}, "load_in_4bit: .*pass quantization='nf4'"),
        ({"load_in_8bit": True}, "load_in_8bit: .*8 bits cannot be streamed"),
        ({"gguf_file": "x.gguf"}, "gguf_file: .*safetensors checkpoint"),
        ({"weights_only": False}, "weights_only: expected options"),
        ({"adapter_kwargs": {}}, "adapter_kwargs: expected options"),
        ({"nonsense": 1}, "nonsense: found neither an option of poros.load nor a field of Qwen2"),
        ({"to_dict": 1}, "to_dict: found neither"),
        ({"dtype": torch.int8}, r"dtype: expected bfloat16, .* found torch\.int8"),
        ({"dtype": "int8"}, "dtype: expected bfloat16"),
        ({"dtype": "nonsense"}, "dtype: expected bfloat16"),
        ({"dtype": None}, "dtype: expected bfloat16"),
        ({"config": "config.json"}, "config: expected a configuration"),
        ({"config": {}}, "config: expected a configuration"),
        ({"subfolder": 3}, "subfolder: expected a text"),
        ({"variant": 3}, "variant: expected a text"),
        ({"revision": "v2"}, "revision: expected it with a hub repository"),
        ({"force_download": True}, "force_download: expected it with a hub repository"),
        ({"generation_config": {"max_length": 3}}, "generation_config: expected a Gen"),
        ({"quantization": "8bit"}, "quantization: expected 'nf4'.*no other format"),
        ({"quantization": ["nf4"]}, "quantization: expected 'nf4'"),
        ({"quantization_config": None, "quantization": "nf4"}, "found both"),
        ({"limits": 3}, r"limits: expected poros\.Limits"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers: expected values"),
        ({"device": 1.5}, "device: expected a usable device"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("read")

    monkeypatch.setattr("poros.loaders.checkpoint.Checkpoint.fetch", fail)
    with pytest.raises(PolicyError, match=message):
        load(checkpoint(), **options)


def test_fields_beside_a_given_configuration(checkpoint: Any) -> None:
    config = AutoConfig.from_pretrained(checkpoint())
    with pytest.raises(PolicyError, match="use_cache: beside config="):
        load(checkpoint(), config=config, use_cache=False)
    model = load(checkpoint(), config=config, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "with dtype 'float16'"),
        ({"quantization": None}, "with quantization None"),
        ({"quantization": "fp4"}, "with quantization"),
        ({"quantization": "nonsense"}, "quantization: expected 'nf4'"),
        ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}, "with quantization"),
        ({"device": "nowhere"}, "device: expected a usable device"),
        ({"revision": "v2"}, "revision: expected it with a hub repository"),
        ({"subfolder": "x"}, "subfolder: expected none with a store"),
        ({"variant": "x"}, "variant: expected none with a store"),
        ({"nonsense": 1}, "nonsense: found neither"),
    ],
    ids=str,
)
def test_what_contradicts_a_store(store: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load(store, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"dtype": "auto"}, {"quantization": "nf4"}, {"device": "cpu"}],
    ids=str,
)
def test_what_a_store_agrees_with(store: Path, options: dict[str, Any]) -> None:
    assert differences(load(store, **options), load(store)) == []


def test_a_store_of_another_dtype_and_device(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own are the default; a device that was named has to be that which quantized it."""
    load(checkpoint(), store=tmp_path / "store", dtype=torch.float16)
    assert load(tmp_path / "store").dtype == torch.float16
    assert load(tmp_path / "store", quantization="nf4").dtype == torch.float16
    with pytest.raises(PolicyError, match="with dtype 'bfloat16'"):
        load(checkpoint(), store=tmp_path / "store")
    monkeypatch.setattr("poros.loaders.options.device_name", lambda device: "another")
    with pytest.raises(PolicyError, match="with device 'another'"):
        load(tmp_path / "store", device="cpu")


@pytest.mark.parametrize(
    ("asked", "is_right"),
    [
        ({}, True),
        ({"quantization": "fp4"}, False),
        ({"quantization": None}, False),
        ({"quantization": "nf4"}, False),  # with double quantization, which it has not
        ({"quantization": quantization(bnb_4bit_use_double_quant=False)}, True),
        ({"quantization": quantization(bnb_4bit_use_double_quant=True)}, False),
    ],
    ids=str,
)
def test_another_quantization_than_a_checkpoint_has(
    checkpoint: Any, tmp_path: Path, asked: dict[str, Any], is_right: bool
) -> None:
    standard(checkpoint(), quantization(bnb_4bit_use_double_quant=False)).save_pretrained(tmp_path)
    if is_right:
        assert differences(load(tmp_path, **asked), standard(tmp_path, None)) == []
        return
    with pytest.raises(PolicyError, match="which is quantized already"):
        load(tmp_path, **asked)


def test_a_named_file_that_transformers_has_to_load(tmp_path: Path) -> None:
    """Without layers to stream transformers loads it: that file, not the one beside it."""
    from poros.gates import tiny

    config = tiny.small_config("openai-gpt", num_layers=2, hidden_size=64)
    tiny.write_checkpoint(config, tmp_path, dtype=torch.bfloat16)
    found = load_file(tmp_path / "model.safetensors")
    name = next(each for each in found if each.endswith("tokens_embed.weight"))
    save_file({**found, name: found[name] + 1}, tmp_path / "named.safetensors", {"format": "pt"})
    model = load(tmp_path / "named.safetensors", quantization=None)
    assert torch.equal(model.get_input_embeddings().weight, found[name] + 1)
    assert not hasattr(model.config, "transformers_weights")


# The command line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{source}", "--out", "{new}", "--dtype", "int8"], "error: dtype: expected bfloat16"),
        (["{source}", "--out", "{new}", "--quantization", "int8"], "error: quantization: expect"),
        (["{source}", "--out", "{new}", "--device", "nowhere"], "error: device: expected a usab"),
        (["{source}", "--out", "{store}", "--quantization", "fp4"], "error: store: expected one"),
        (["{source}", "--out", "{store}", "--dtype", "float32"], "error: store: expected one"),
        (["{store}", "--out", "{new}"], "error: store: expected none"),
        (["{store}", "--verify", "--dtype", "float16"], "--verify takes no --dtype"),
        (["{store}", "--verify", "--device", "cpu"], "--verify takes no --device"),
        (["{source}", "--verify"], "found a checkpoint; make one of"),
        (["{new}", "--verify"], "found nothing there"),
        (["{source}", "--out", "{new}/x/y"], "No such file or directory. Nothing was left"),
    ],
    ids=str,
)
def test_the_command_refuses(
    checkpoint: Any, store: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    names = {"source": checkpoint(), "store": store, "new": tmp_path / "new"}
    result = poros_command("load", *(each.format(**names) for each in arguments))
    found = " ".join(text(result).replace("│", " ").split())
    assert result.exit_code == BAD_INPUT and message in found, found
    assert "Traceback" not in found and list(tmp_path.iterdir()) == []


def test_the_command_takes_dtype_auto_and_an_existing_store(
    checkpoint: Any, tmp_path: Path
) -> None:
    source, out = checkpoint(dtype=torch.float16), tmp_path / "store"
    for _ in range(2):
        result = poros_command("load", str(source), "--out", str(out), "--dtype", "auto")
        assert result.exit_code == 0, result.output
    assert load(out).dtype == torch.float16


# One process, several threads.


def test_loads_in_parallel_threads(checkpoint: Any) -> None:
    """Give what they give one after the other, and leave the default dtype as it was."""
    wanted = [
        (checkpoint(), {"dtype": torch.bfloat16}),
        (checkpoint("mixtral"), {"dtype": torch.float16}),
        (checkpoint("phi3"), {"dtype": torch.float32, "quantization": None}),
    ]
    expected = [load(path, **options) for path, options in wanted]
    found: dict[int, Any] = {}
    begin = threading.Barrier(2 * len(wanted))

    def run(index: int) -> None:
        path, options = wanted[index % len(wanted)]
        begin.wait()
        found[index] = load(path, **options)

    threads = [threading.Thread(target=run, args=(each,)) for each in range(2 * len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_default_dtype() == torch.float32
    for index, model in found.items():
        assert differences(model, expected[index % len(wanted)]) == []
    assert len(found) == 2 * len(wanted)


def test_control_two_threads_never_fill_at_once(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their timing: the second waits while the first is held within its load."""
    import poros.loaders.load

    inside, release, order = threading.Event(), threading.Event(), []
    fill = poros.loaders.load.fill

    def held(*arguments: Any) -> Any:
        order.append("in")
        inside.set()
        release.wait(60)
        made = fill(*arguments)
        order.append("out")
        return made

    monkeypatch.setattr(poros.loaders.load, "fill", held)
    threads = [threading.Thread(target=load, args=(checkpoint(),)) for _ in range(2)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    threads[1].join(1)
    assert threads[1].is_alive() and order == ["in"]
    release.set()
    for thread in threads:
        thread.join()
    assert order == ["in", "out", "in", "out"]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
