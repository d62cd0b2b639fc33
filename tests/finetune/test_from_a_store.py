"""An adapter that was trained from a store names the checkpoint that the store was made from.

The lines that a run prints are run as they stand there, and the merged weights are those of PEFT's
own merge. What has become of the checkpoint since is seen: moved, or with other bytes.
"""

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import poros
from poros.errors import CheckpointFormatError
from poros.loaders.checkpoint import Checkpoint
from poros.loaders.store import open_store
from poros.merging.base import base_to_load
from poros.merging.merge import merge
from poros.merging.saved_adapter import SavedAdapter
from poros.model.origin import RECORD, origin_of
from tests.command import poros_command, text
from tests.comparing import compare_mappings
from tests.covers import with_slow
from tests.damage import tensors
from tests.finetune.subjects import write_base
from tests.loading.checkpoints import as_hub_cache

Patch = pytest.MonkeyPatch
SHORT = ("--steps", "2", "--max-length", "64", "--rank", "4", "--method", "sft")
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def store(base: Path) -> Path:
    folder = base.parent / "store"
    poros.load(base, store=folder)
    return folder


def trained(model: Any, folder: Path, name: str = "default") -> Path:
    """Train one step of an adapter as a script does, and save it."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = poros.prepare(get_peft_model(model, config, adapter_name=name), slots=2)
    tokens = torch.arange(5, 21)[None]
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    weights = [each for each in adapted.parameters() if each.requires_grad]
    torch.optim.SGD(weights, lr=0.1).step()
    adapted.save_pretrained(folder)
    return folder


def named_by(adapter: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return config


def assert_merged(merged: Path, base: Path, adapter: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    expected = PeftModel.from_pretrained(dense, adapter).merge_and_unload().state_dict()
    found = load_file(merged / "model.safetensors")
    assert compare_mappings(expected, found) == []
    assert compare_mappings(load_file(base / "model.safetensors"), found)


def printed(output: str) -> dict[str, str]:
    """What a run has printed behind each of its last words."""
    lines = [line.partition(":") for line in output.splitlines()]
    names = ("adapter", "try it", "merge")
    return {name: rest.strip() for name, _, rest in lines if name in names}


def test_the_printed_lines_run(
    base: Path, store: Path, data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """From a folder with a blank in its name; of a store that PEFT alone could not open."""
    run, rows = tmp_path / "a run", data / "completions.jsonl"
    done = poros_command("finetune", str(store), str(rows), "--out", str(run), *SHORT)
    assert done.exit_code == 0 and "\x1b" not in done.output
    assert "{'loss': " in text(done), "plain lines, for nobody is at a terminal"
    lines = printed(text(done))
    adapter = Path(lines["adapter"])
    names = {"adapter_model.safetensors", "adapter_config.json", "recipe.yaml", "tokenizer.json"}
    assert names <= {each.name for each in adapter.iterdir()}
    assert named_by(adapter)["base_model_name_or_path"] == str(base)
    assert f"base_model: {base}\n" in (adapter / "README.md").read_text()

    monkeypatch.chdir(tmp_path)
    command, *arguments = shlex.split(lines["merge"])
    assert command == "poros" and poros_command(*arguments).exit_code == 0
    assert_merged(tmp_path / "FOLDER", base, adapter)

    model: Any = AutoPeftModelForCausalLM.from_pretrained(adapter)
    found = dict(model.merge_and_unload().state_dict())
    merged = load_file(tmp_path / "FOLDER" / "model.safetensors")
    assert found.keys() == merged.keys()

    command, *arguments = shlex.split(lines["try it"])
    asked = (*arguments, "--prompt", "the slot", "--max-new-tokens", "2")
    assert command == "poros" and poros_command(*asked).exit_code == 0
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(store)  # the control: its name would not have run


@pytest.mark.parametrize("name", with_slow(("default", "other"), ["other"]))
def test_a_script_saves_the_name_of_the_source(
    base: Path, store: Path, tmp_path: Path, monkeypatch: Patch, name: str
) -> None:
    """Opened by a relative path, by the checkpoint's name, or made on the way; adapters inside."""
    monkeypatch.chdir(store.parent)
    made = {
        "store": poros.load("store"),
        "by its source": poros.load(base, store="store"),
        "written": poros.load(base, store=tmp_path / "new"),
    }
    inside = "" if name == "default" else name
    for how, model in made.items():
        adapter = trained(model, tmp_path / how, name) / inside
        assert named_by(adapter)["base_model_name_or_path"] == str(base), how
        saved = SavedAdapter(adapter)
        with open_store(store) as opened:
            assert saved.origin is not None
            assert saved.origin.fingerprint == opened.about.origin.fingerprint, how
        assert_merged(merge(adapter, tmp_path / f"{how} merged"), base, adapter)
    # The tokenizer is looked for by the name in the configuration, and lies in the store.
    assert made["store"].config.name_or_path == "store" and origin_of(made["store"]) is not None


@pytest.fixture
def moving(base: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A checkpoint of one's own, a store of it, and an adapter that was trained from that."""
    source = Path(shutil.copytree(base, tmp_path / "source"))
    poros.load(source, store=tmp_path / "store")
    return (
        source,
        tmp_path / "store",
        trained(poros.load(tmp_path / "store"), tmp_path / "adapter"),
    )


def test_a_source_that_has_moved_is_named(moving: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, store, adapter = moving
    moved = source.rename(tmp_path / "moved")
    for by, options in ((adapter, {}), (store, {"base": store})):
        with pytest.raises(CheckpointFormatError, match=r"found nothing there.*--base") as found:
            merge(adapter, tmp_path / "out", **options)
        assert repr(str(source)) in str(found.value) and str(by) in str(found.value)
    asked = ("chat", str(adapter), "--prompt", "the slot", "--max-new-tokens", "2")
    assert poros_command(*asked).exit_code == 0  # by the store
    shutil.rmtree(store)
    refused = poros_command(*asked)
    assert refused.exit_code == 2
    said = " ".join(text(refused).split())
    assert "found nothing there" in said and "--base" in said
    assert poros_command(*asked, "--base", str(moved)).exit_code == 0
    assert_merged(merge(adapter, tmp_path / "out", base=moved), moved, adapter)


def test_a_source_with_other_bytes_is_refused(
    moving: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    """Unless it is named; files that were only touched are hashed, and are the same."""
    source, store, adapter = moving
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "fingerprint", None)  # untouched files are not read for it
        merge(adapter, tmp_path / "untouched")
    os.utime(source / "model.safetensors")
    merge(adapter, tmp_path / "touched")
    tensors(lambda found: found["model.norm.weight"].add_(1))(source / "model.safetensors")
    for options in ({}, {"base": store}):
        with pytest.raises(CheckpointFormatError, match=r"trained on .*found others.*--base"):
            merge(adapter, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
    assert_merged(merge(adapter, tmp_path / "out", base=source), source, adapter)


def test_a_repository_is_named_with_its_commit(
    base: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Of the store's own record, and where the checkpoint was loaded without a store."""
    as_hub_cache(base, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    poros.load("org/name", store=tmp_path / "store")
    for how, model in (
        ("store", poros.load(tmp_path / "store")),
        ("cache", poros.load("org/name", revision="main")),
    ):
        adapter = trained(model, tmp_path / how)
        named = named_by(adapter)
        assert (named["base_model_name_or_path"], named["revision"]) == ("org/name", COMMIT)
        assert_merged(merge(adapter, tmp_path / f"{how} merged"), base, adapter)
        # The revision is asked for: without it, the newest would be merged into.
        config = adapter / "adapter_config.json"
        config.write_text(json.dumps(named | {"revision": "1" * 40}))
        with pytest.raises(CheckpointFormatError, match="org/name"):
            merge(adapter, tmp_path / "out")


def test_a_damaged_record_is_refused(store: Path, tmp_path: Path) -> None:
    adapter = trained(poros.load(store), tmp_path / "adapter")
    for content in ("{", "[]", "{}", '{"source": 3}', '{"source": "a", "seen": 1}'):
        (adapter / RECORD).write_text(content)
        with pytest.raises(CheckpointFormatError, match=RECORD):
            merge(adapter, tmp_path / "out")


def test_without_a_store_no_bytes_are_recorded(base: Path, store: Path, tmp_path: Path) -> None:
    """And a record of another base that lay in the folder is removed."""
    trained(poros.load(store), tmp_path / "adapter")
    assert (tmp_path / "adapter" / RECORD).is_file()
    trained(poros.load(base), tmp_path / "adapter")
    assert not (tmp_path / "adapter" / RECORD).exists()


def test_a_store_of_another_checkpoint_is_not_taken_for_a_chat(
    moving: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Its place is the old one's: then the source is loaded."""
    source, store, adapter = moving
    shutil.rmtree(store)
    other = write_base(tmp_path / "other")
    tensors(lambda found: [each.mul_(2) for each in found.values()])(other / "model.safetensors")
    poros.load(other, store=store)
    assert base_to_load(SavedAdapter(adapter)) == (str(source), None)
