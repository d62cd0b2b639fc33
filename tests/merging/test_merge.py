"""Merged checkpoints: the bits of PEFT's own merge, whatever the adapter, shard by shard."""

import gc
import json
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    FourierFTConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import poros
from poros.errors import CheckpointFormatError, PolicyError, StoreWriteError, UnsupportedModelError
from poros.gates import tiny
from poros.loaders.load import load
from poros.merging.merge import merge
from poros.merging.saved_adapter import SavedAdapter
from tests.children import run_forked
from tests.command import poros_command
from tests.comparing import compare_mappings
from tests.damage import field, tensors
from tests.finetune.subjects import write_adapter as trained
from tests.finetune.subjects import write_base
from tests.support import same_bits

LINEAR = ["q_proj", "v_proj", "down_proj"]
ADAPTERS: dict[str, Any] = {
    "lora": LoraConfig(r=4, target_modules=LINEAR),
    "rslora": LoraConfig(r=4, target_modules=LINEAR, use_rslora=True),
    "dora": LoraConfig(r=4, target_modules=LINEAR, use_dora=True),
    "bias": LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True),
    "patterns": LoraConfig(
        r=4, target_modules=LINEAR, rank_pattern={"down_proj": 2}, alpha_pattern={"q_proj": 3}
    ),
    "all linear": LoraConfig(r=4, target_modules="all-linear"),
    "embedding": LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
    "head": LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
    "trained biases": LoraConfig(r=4, target_modules=LINEAR, bias="all"),
    "trained biases of its own": LoraConfig(r=4, target_modules=LINEAR, bias="lora_only"),
    "orthogonal": LoraConfig(r=4, target_modules=LINEAR, init_lora_weights="orthogonal"),
    "a trained head": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "loha": LoHaConfig(r=4, target_modules=LINEAR),
    "lokr of a rank above all sizes": LoKrConfig(r=1000, alpha=1000, target_modules=LINEAR),
    "vera": VeraConfig(r=4, target_modules=["q_proj"]),
    "ia3": IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "base")


def dense(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)


def merged_by_peft(base: Path, adapter: Path, model: Any) -> dict[str, torch.Tensor]:
    from peft import PeftModel

    found = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return dict(found.state_dict())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.filterwarnings("error:.*which is a no-op")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_into_the_original(kind: str, base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "adapter", ADAPTERS[kind])
    out = merge(adapter, tmp_path / "merged", shard_num_bytes=50_000)
    found, expected = weights(out), merged_by_peft(base, adapter, dense(base))
    assert compare_mappings(expected, found) == []
    before = weights(base)
    changed = [name for name in before if not same_bits(found[name], before[name])]
    assert changed and len(list(out.glob("model-*.safetensors"))) > 2
    AutoTokenizer.from_pretrained(out)
    tokens = torch.arange(5, 15)[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)(tokens).logits
        other = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)(tokens).logits
    assert not same_bits(logits, other)


@pytest.mark.parametrize("family", ["gpt2", "falcon", "gemma3_text"])
def test_families(family: str, tmp_path: Path) -> None:
    """Transposed matrices, a subclass of ``Linear``, a tied head that is left alone."""
    base = tmp_path / "base"
    tiny.write_checkpoint(tiny.small_config(family, num_layers=2), base, dtype=torch.bfloat16)
    adapter = trained(base, tmp_path / "adapter", LoraConfig(r=4, target_modules="all-linear"))
    out = merge(adapter, tmp_path / "merged")
    found = dict(dense(out).state_dict())
    expected = merged_by_peft(base, adapter, dense(base))
    assert compare_mappings(expected, found) == []


READERS = {
    "a reward model": (AutoModelForSequenceClassification, {"num_labels": 1}, "SEQ_CLS"),
    "a classifier": (AutoModelForSequenceClassification, {"num_labels": 3}, "SEQ_CLS"),
    "an embedding model": (AutoModel, {}, "FEATURE_EXTRACTION"),
    "an embedding model, no task": (AutoModel, {}, None),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("is_of_its_class", [False, True])
@pytest.mark.parametrize("which", READERS)
def test_models_without_a_head_for_tokens(
    which: str, is_of_its_class: bool, base: Path, tmp_path: Path
) -> None:
    """Of a language model's checkpoint, which has no head for classes, or of their own."""
    auto_class, fields, task = READERS[which]
    options = {"dtype": torch.bfloat16, **fields}
    if is_of_its_class:
        torch.manual_seed(7)
        own = auto_class.from_pretrained(base, **options)
        base = tmp_path / "base"
        own.save_pretrained(base)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], task_type=task, init_lora_weights=False
    )
    torch.manual_seed(0)
    adapted = get_peft_model(load(base, auto_class=auto_class, **fields), config)
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if "score.modules_to_save" in name:
                each += 0.1
    poros.prepare(adapted, slots=2).save_pretrained(tmp_path / "adapter")
    out = merge(tmp_path / "adapter", tmp_path / "merged", shard_num_bytes=50_000)

    found = auto_class.from_pretrained(out, dtype=torch.bfloat16)
    assert getattr(found.config, "num_labels", None) == fields.get("num_labels", 2)
    plain = auto_class.from_pretrained(base, **options)
    expected = merged_by_peft(base, tmp_path / "adapter", plain)
    merged = dict(found.state_dict())
    assert compare_mappings(expected, merged) == []
    before = auto_class.from_pretrained(base, **options).state_dict()
    assert any(not same_bits(merged[name], before[name]) for name in merged if "q_proj" in name)
    assert all(not same_bits(merged[name], before[name]) for name in merged if "score" in name)
    # The rest of a base that is a language model stays there, but for a classifier.
    keeps_head = auto_class is AutoModel and not is_of_its_class
    assert ("lm_head.weight" in weights(out)) == keeps_head


def test_a_head_that_nobody_trained_is_missed(base: Path, tmp_path: Path) -> None:
    model = load(base, auto_class=AutoModelForSequenceClassification, num_labels=1)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    match = r"score\.weight.*expected the tensors"
    refused(tmp_path, tmp_path / "adapter", CheckpointFormatError, match)


def test_the_command(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(base, run / "adapter", ADAPTERS["lora"])
    (run / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    result = poros_command("merge", str(run), "--out", str(tmp_path / "out"), "--dtype", "float32")
    assert result.exit_code == 0 and "merged" in result.output
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.norm.weight").dtype == torch.float32
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def refused(tmp_path: Path, adapter: Path, error: Any, match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        merge(adapter, tmp_path / "out", **options)
    assert [each for each in tmp_path.iterdir() if "out" in each.name] == []


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_base_of_another_family_is_refused(task: str | None, base: Path, tmp_path: Path) -> None:
    """Whose shapes are equal; PEFT notes a class by itself where there is no task."""
    other = tmp_path / "other"
    like = tiny.small_config("llama", num_layers=3, hidden_size=64)
    tiny.write_checkpoint(like, other, dtype=torch.bfloat16)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type=task)
    adapter = tmp_path / "adapter"
    # Nothing holds the model while it is saved.
    poros.prepare(get_peft_model(load(base), config), slots=2).save_pretrained(adapter)
    match = "expected a base of the family qwen2.*found llama.*--base"
    refused(tmp_path, adapter, UnsupportedModelError, match, base=other)
    chat = poros_command("chat", str(adapter), "--base", str(other), "--prompt", "a")
    assert chat.exit_code == 2
    merge(adapter, tmp_path / "merged", base=base)


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_an_adapter_of_no_class_is_taken_as_one_of_a_language_model(
    task: str, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is said; one of another does not fit. Control: nothing is said of one with a task."""
    auto_class = AutoModelForCausalLM if task == "CAUSAL_LM" else AutoModelForSequenceClassification
    model: Any = auto_class.from_pretrained(base, dtype=torch.bfloat16)
    adapter = tmp_path / "adapter"
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type=task)
    get_peft_model(model, config).save_pretrained(adapter)
    caplog.clear()
    SavedAdapter(adapter)
    assert caplog.messages == []
    field("task_type", to=None)(adapter / "adapter_config.json")
    if task == "CAUSAL_LM":
        merge(adapter, tmp_path / "merged")
    else:
        refused(tmp_path, adapter, UnsupportedModelError, "matrices of the modules", base=base)
    assert "taken as an adapter of a language model" in caplog.messages[0]


def test_refusals_leave_nothing(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "adapter", ADAPTERS["lora"])
    refused(tmp_path, tmp_path / "nothing", CheckpointFormatError, "adapter_config.json")
    vera = VeraConfig(r=4, target_modules=["q_proj"], save_projection=False)
    vera = trained(base, tmp_path / "vera", vera)
    refused(tmp_path, vera, UnsupportedModelError, "shares matrices")
    other = tiny.write_checkpoint(
        tiny.small_config("llama", num_layers=1, hidden_size=32),
        tmp_path / "other",
        dtype=torch.bfloat16,
    )
    refused(
        tmp_path,
        adapter,
        UnsupportedModelError,
        "name its own base",
        base=other or tmp_path / "other",
    )
    (tmp_path / "there").mkdir()
    with pytest.raises(PolicyError, match="does not exist yet"):
        merge(adapter, tmp_path / "there")


NOT_MERGED: dict[str, tuple[Any, str]] = {
    "it began by changing the base": (
        LoraConfig(r=4, target_modules=LINEAR, init_lora_weights="olora"),
        "init_lora_weights='olora'",
    ),
    "indices in no file": (OFTConfig(oft_block_size=4, r=0, target_modules=LINEAR), "q_proj"),
    "random entries in no file": (FourierFTConfig(n_frequency=9, target_modules=LINEAR), "PEFT"),
    "layers that are repeated": (
        LoraConfig(r=4, target_modules=LINEAR, layer_replication=[[0, 2], [1, 2]]),
        "layer_replication",
    ),
    "nothing in the weights": (
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "only works beside the base",
    ),
}


@pytest.mark.parametrize("why", NOT_MERGED)
def test_what_would_be_wrong_is_refused(why: str, base: Path, tmp_path: Path) -> None:
    config, match = NOT_MERGED[why]
    refused(tmp_path, trained(base, tmp_path / "adapter", config), UnsupportedModelError, match)


@pytest.mark.parametrize(
    "options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}]
)
def test_a_tied_tensor_is_not_changed_in_one_place(options: Any, tmp_path: Path) -> None:
    config = tiny.small_config("qwen2", num_layers=2)
    config.tie_word_embeddings = True
    tiny.write_checkpoint(config, tmp_path / "base", dtype=torch.bfloat16)
    chosen = LoraConfig(**{"r": 4, "target_modules": ["q_proj"]} | options)
    adapter = trained(tmp_path / "base", tmp_path / "adapter", chosen)
    refused(tmp_path, adapter, UnsupportedModelError, "its embedding and its head share")


def test_biases_that_a_file_lacks_are_missed(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "adapter", ADAPTERS["trained biases"])
    biases = tensors(lambda found: [found.pop(name) for name in [*found] if "bias" in name])
    biases(adapter / "adapter_model.safetensors")
    refused(tmp_path, adapter, UnsupportedModelError, "one too few.*bias")


UNLIKE: dict[str, tuple[str, Any]] = {
    "a norm of half its size": ("input_layernorm", lambda found: found[: len(found) // 2]),
    "a whole norm": ("input_layernorm", torch.Tensor.int),
    "a touched matrix, one row": ("q_proj.weight", lambda found: found[:1]),
    "a touched matrix, one column": ("q_proj.weight", lambda found: found[:, :1]),
    "whole numbers touched": ("q_proj.weight", torch.Tensor.int),
    "fewer tokens": ("embed_tokens", lambda found: found[1:]),
}
"""A tensor of the base, and what it becomes."""


@pytest.mark.parametrize("what", UNLIKE)
def test_a_base_unlike_its_configuration_is_refused(what: str, base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "adapter", ADAPTERS["lora"])
    shutil.copytree(base, tmp_path / "base")
    part, change = UNLIKE[what]

    def changed(found: dict[str, torch.Tensor]) -> None:
        name = min(each for each in found if part in each)
        found[name] = change(found[name]).clone()

    tensors(changed)(tmp_path / "base" / "model.safetensors")
    match = rf"model\.safetensors: tensor .*{part}.*expected torch.* of shape .*found torch"
    refused(tmp_path, adapter, CheckpointFormatError, match, base=tmp_path / "base")


def filled(adapter: Path, value: float, *parts: str) -> Path:
    """The first tensor with each of these in its name."""

    def change(found: dict[str, torch.Tensor]) -> None:
        for part in parts:
            next(each for name, each in found.items() if part in name).fill_(value)

    tensors(change)(adapter / "adapter_model.safetensors")
    return adapter


def test_what_is_not_finite_together_is_refused(base: Path, tmp_path: Path) -> None:
    """Or not in the dtype that is asked for. Single values: test_damaged_files."""
    adapter = trained(base, tmp_path / "adapter", ADAPTERS["lora"])
    filled(adapter, 1e6, "lora_A")
    merge(adapter, tmp_path / "fits", dtype=torch.float32)
    refused(tmp_path, adapter, CheckpointFormatError, "--dtype", dtype=torch.float16)
    filled(adapter, 1e20, "lora_A", "lora_B")
    refused(tmp_path, adapter, CheckpointFormatError, "down_proj.weight.*finite weights")


def test_each_tensor_keeps_its_dtype(base: Path, tmp_path: Path) -> None:
    """Norms, and one matrix that is adapted, in float32 beside others in bfloat16."""
    mixed = tmp_path / "base"
    shutil.copytree(base, mixed)
    wide = ("norm", "layers.1.self_attn.q_proj")
    before = weights(base)
    dtypes = {
        name: torch.float32 if any(each in name for each in wide) else torch.bfloat16
        for name in before
    }
    # Below the digits of bfloat16, so that a cast would be seen.
    kept = {name: value.to(dtypes[name]) * (1 + 2**-12) for name, value in before.items()}
    save_file(kept, mixed / "model.safetensors", metadata={"format": "pt"})
    adapter = trained(base, tmp_path / "adapter", ADAPTERS["dora"])
    found = weights(merge(adapter, tmp_path / "merged", base=mixed))
    model = dense(base)
    model.load_state_dict(kept, assign=True)
    expected = merged_by_peft(mixed, adapter, model)
    assert {name: value.dtype for name, value in found.items()} == dtypes
    assert [name for name in found if not same_bits(found[name], expected[name])] == []
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("most", [5_000, 30_000, 60_000])
def test_a_full_disk_leaves_nothing(most: int, base: Path, tmp_path: Path) -> None:
    """At a shard, at a small file behind the shards, at a file in a folder of its own."""
    adapter = trained(base, tmp_path / "adapter", ADAPTERS["lora"])
    (adapter / "additional_chat_templates").mkdir()
    (adapter / "additional_chat_templates" / "a.jinja").write_text("a" * 70_000)
    (adapter / "chat_template.jinja").write_text("a" * (40_000 if most == 30_000 else 1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        refused(tmp_path, adapter, StoreWriteError, "out: .* File too large", shard_num_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


KILLED = """
import os, signal, sys
from poros.merging.merge import merge
merge(sys.argv[1], sys.argv[2], progress=lambda *done: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_what_a_killed_merge_left_is_removed(base: Path, tmp_path: Path) -> None:
    """By the next one, and nothing else is."""
    adapter, out = trained(base, tmp_path / "adapter", ADAPTERS["lora"]), tmp_path / "out"
    (tmp_path / ".out.mine").mkdir()
    assert run_forked(KILLED, str(adapter), str(out)).returncode == -signal.SIGKILL
    (hidden,) = tmp_path.glob(".out.poros*")
    (hidden / "left").touch()
    merge(adapter, out)
    assert {each.name for each in tmp_path.iterdir()} == {"adapter", ".out.mine", "out"}
    assert not (out / "left").exists()


def peak(adapter: Path, out: Path, base: Path, shard_num_bytes: int) -> int:
    """The most bytes of tensors that a merge has at a time, besides those that were there.

    Counted, not measured: what a process takes depends on what its heap had free, and on pages that
    the system takes back.
    """
    found = []

    def storages() -> dict[int, int]:
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        every = [each.untyped_storage() for each in tensors if each.device.type == "cpu"]
        return {each.data_ptr(): each.nbytes() for each in every}

    before = storages()

    def look(done: int, whole: int) -> None:
        found.append(sum(size for at, size in storages().items() if at not in before))

    merge(adapter, out, base=base, shard_num_bytes=shard_num_bytes, progress=look)
    return max(found)


def test_one_shard_is_in_memory(tmp_path: Path) -> None:
    """Of a base of 25 MB; control: in one shard all of it is."""
    config = tiny.small_config("qwen2", num_layers=12, hidden_size=256)
    config.intermediate_size = 1024
    tiny.write_checkpoint(config, tmp_path / "base", dtype=torch.bfloat16)
    size = sum(each.stat().st_size for each in (tmp_path / "base").glob("*.safetensors"))
    adapter = trained(tmp_path / "base", tmp_path / "adapter", ADAPTERS["lora"])
    small = peak(adapter, tmp_path / "small", tmp_path / "base", size // 12)
    whole = peak(adapter, tmp_path / "whole", tmp_path / "base", 10 * size)
    assert small < size / 6 and whole > 0.9 * size


def test_a_place_that_cannot_be_written_to_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "adapter", ADAPTERS["lora"])
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", Path("/proc/nowhere/out"), tmp_path / "file"):
        with pytest.raises(PolicyError, match=r"out: .*expected"):
            merge(adapter, out)
