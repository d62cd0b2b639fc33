"""Bad recipes and bad rows: each refused with file, line and remedy, before anything is written."""

import gzip
import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pyarrow
import pytest
from pyarrow import parquet as parquet_files
from transformers import AutoModelForCausalLM

from poros.cli.shared import BAD_INPUT
from tests.command import poros_command, run_apart
from tests.damage import Damage, cut, field
from tests.loading.checkpoints import as_hub_cache

GOOD = json.dumps({"prompt": "a", "completion": "b"})
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
SHARED = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
START = "model: model\ndata: rows.jsonl\n"
SEVERAL = "model: model\ndata:\n  source:\n  - rows.jsonl\n  - more.jsonl\n"

# What is appended to a good recipe; line, what is said of it, and the remedy.
RECIPES: dict[str, tuple[str, int, str, str]] = {
    "unknown section": ("trainning:\n  seed: 1\n", 3, "unknown name", "did you mean training?"),
    "unknown setting": ("training:\n  seeds: 1\n", 4, "training.seeds", "did you mean seed?"),
    "name without a hint": ("training:\n  qwertyuiop: 1\n", 4, "unknown", "for this method"),
    "wrong section": ("data:\n  rank: 4\n", 3, "on line 2 too", "remove one"),
    "setting of another": ("adapter:\n  seed: 4\n", 4, "adapter.seed", "training.seed"),
    "number too small": ("adapter:\n  r: 0\n", 4, "greater than or equal to 1", "r: 16"),
    "optimizer of all weights": ("training:\n  optim: flora\n", 4, "adapters", "poros.optim"),
    "unknown method": ("training:\n  method: ppo\n", 4, "'sft', 'dpo', 'kto' or", "method: sft"),
    "yes or no": ("memory:\n  resident: maybe\n", 4, "true or false", "resident: false"),
    "size without unit": ("memory:\n  vram: lots\n", 4, "such as 22GiB", "leave it out"),
    "epochs and steps": (
        "training:\n  num_train_epochs: 1\n  max_steps: 5\n", 5, "found both", "remove one",
    ),
    "beta of sft": ("training:\n  beta: 0.1\n", 4, "unknown", "for this method"),
    "field of TRL, of another type": (
        "training:\n  adam_beta1: high\n", 4, "a valid number, found 'high'", "leave it out",
    ),
    "field of TRL, no such choice": (
        "training:\n  eval_strategy: often\n", 4, "'no', 'steps' or 'epoch'", "leave it out",
    ),
    "field that Poros sets": ("training:\n  output_dir: a\n", 4, "passes on", "output.folder"),
    "field that would break": ("training:\n  torch_compile: true\n", 4, "the bits of a", "one"),
    "field of several GPUs": ("training:\n  deepspeed: a.json\n", 4, "one GPU", "accelerate"),
    "a secret": ("training:\n  hub_token: abc\n", 4, "secret", "HF_TOKEN"),
    "field of PEFT, misspelt": ("adapter:\n  modules_to_sav: [a]\n", 4, "unknown", "to_save?"),
    "adapter that edits the base": (
        "adapter:\n  init_lora_weights: pissa\n", 4, "which change the base", "leave it out",
    ),
    "adapter that is refused": ("adapter:\n  layer_replication: [[0, 2]]\n", 4, "poros.prep", "bl"),
    "resident and budget": ("memory:\n  resident: true\n  vram: 8GiB\n", 5, "and vram", "remove"),
    "no such device": ("memory:\n  device: cuda:1\n", 4, "'cpu', 'cuda' or", "leave it out"),
    "nothing to validate on": ("training:\n  eval_steps: 5\n", 4, "validate", "--validation"),
    "grouped DoRA": (
        "adapter:\n  use_dora: true\ntraining:\n  adapter_kernels: grouped\n",
        6, "found DoRA", "choose fused",
    ),
    "optimizer without a schedule": (
        "training:\n  optim: schedule_free_adamw\n", 4, "has a schedule", "adamw_torch_fused",
    ),
    "checkpoints sent to the hub": (
        "training:\n  hub_strategy: every_save\n", 4, "passes on", "decides it",
    ),
    "saved at no step": ("training:\n  save_steps: 0\n", 4, "greater than 0", "save_steps: 50"),
    "endless list": ("adapter:\n  target_modules: &a [q, *a]\n", 4, "an alias", "write"),
    "name twice in a mapping": (
        "adapter:\n  rank_pattern: {q_proj: 4, q_proj: 8}\n", 4, "on line 4 too", "remove one",
    ),
    "rows for KTO one by one": (
        "training:\n  method: kto\n  per_device_train_batch_size: 1\n", 5, "at least 2", "set it",
    ),
    "names of modules in one": (
        "adapter:\n  target_modules: ['q_proj, v_proj']\n", 4, "names of modules", "for example",
    ),
    "pattern in a list": (
        "adapter:\n  target_modules: ['.*']\n", 4, "names of modules", "for example",
    ),
    "number in a list of modules": (
        "adapter:\n  target_modules: [q_proj, 5]\n", 4, "names of modules", "for example",
    ),
    "number for modules": ("adapter:\n  target_modules: 7\n", 4, "names of mod", "for example"),
    "seed too large": ("training:\n  seed: 4294967296\n", 4, "less than 4294967296", "seed: 0"),
    "rank of no columns": (
        "adapter:\n  rank_pattern: {q_proj: 0}\n", 4, "greater than or equal to 1", "leave it out",
    ),
    "alpha in words": (
        "adapter:\n  alpha_pattern: {q_proj: high}\n", 4, "a valid number", "leave it out",
    ),
    "beta of 1": ("training:\n  adam_beta1: 1\n", 4, "a number less than 1", "leave it out"),
    "no rows to prefetch": (
        "training:\n  dataloader_prefetch_factor: 0\n", 4, "greater than or equal to 1", "leave",
    ),
    "processes that stay, of none": (
        "training:\n  dataloader_persistent_workers: true\n", 4, "found none", "_num_workers",
    ),
    "metric that nothing computes": (
        "training:\n  metric_for_best_model: f1\n", 4, "'loss' or 'eval_loss'", "leave it out",
    ),
    "metric that DPO does not have": (
        "training:\n  method: dpo\n  metric_for_best_model: wrong\n",
        5, "'rewards/accuracies'", "leave it out",
    ),
    "metric that KTO does not have": (
        "training:\n  method: kto\n  metric_for_best_model: eval_wrong\n", 5, "'kl'", "leave it",
    ),
    "metric that reward does not have": (
        "training:\n  method: reward\n  metric_for_best_model: wrong\n",
        5, "'margin'", "leave it out",
    ),
    "merged into the run": (
        "output:\n  folder: a\n  merged: a/adapter\n", 5, "writes other files", "another folder",
    ),
    "tab": ("training:\n\tseed: 1\n", 4, "expected YAML", "indentation by spaces"),
}  # fmt: skip

# Lines of a file of rows; the line that is wrong, what is said of it, and the remedy.
ROWS: dict[str, tuple[list[str | bytes], int, str, str]] = {
    "broken JSON": ([GOOD, '{"prompt": "a", "completion": }'], 2, "2:31: expected JSON", "column"),
    "a list": (['[{"prompt": "a"}]'], 1, "found a list", "write one a line"),
    "missing key": ([GOOD, '{"prompt": "a"}'], 2, "found 'prompt'", "write rows such as"),
    "null for a text": (['{"text": null}'], 1, "found 'text': null", "fill in what is null"),
    "null, and a key too few": (['{"prompt": null}'], 1, "found 'prompt': null", "write rows such"),
    "number for a text": ([GOOD, '{"prompt": "a", "completion": 3}'], 2, "a number", "quotes"),
    "empty text": ([GOOD, '{"prompt": "a", "completion": ""}'], 2, "a blank one", "fill it in"),
    "key twice": (['{"prompt": "a", "prompt": "b", "completion": "c"}'], 1, "twice", "remove one"),
    "mixed forms": ([GOOD, '{"text": "a"}'], 2, "rows of one form", "write them all alike"),
    "two forms": (['{"text": "a", "prompt": "a", "completion": "b"}'], 1, "one kind", "remove"),
    "Latin-1": ([GOOD, b'{"prompt": "\xe9", "completion": "b"}'], 2, "0xe9 in column 13", "UTF-8"),
    "half a surrogate": (['{"text": "\\ud800"}'], 1, "surrogate", "remove it"),
    "empty file": ([""], 1, "found none", "one JSON object a line"),
    "unknown role": ([json.dumps(CHAT).replace("user", "human")], 1, "[0].role", "one of them"),
    "no role": ([json.dumps({"messages": [{"content": "a"}]})], 1, "[0].role", "write one of"),
    "unknown key of a message": (
        [json.dumps(CHAT).replace('"content": "b"', '"content": "b", "weight": 0')],
        1, "messages[1].weight", "remove it",
    ),
    "nobody answers": ([json.dumps({"messages": CHAT["messages"][:1]})], 1, "assistant", "add one"),
    "KTO": (
        [GOOD, '{"prompt": "a", "completion": "b", "label": false}'],
        2, "label: expected answers to learn from", "--method kto",
    ),
    "KTO without its method": (
        ['{"prompt": "a", "completion": "b", "label": true}'], 1, "labelled True", "--method kto",
    ),
    "messages for KTO": ([json.dumps({**CHAT, "label": True})], 1, "to learn from", "--method kto"),
    "no value": (
        [json.dumps(SHARED), json.dumps(SHARED).replace('"value": "b"', '"values": "b"')],
        2, "conversations[1].values: expected only role, content", "rename",
    ),
    "unknown speaker": (
        [json.dumps(SHARED).replace("gpt", "function_call")],
        1, "conversations[1].role: expected one of system, dev", "write one of them",
    ),
    "ShareGPT after messages": (
        [json.dumps(CHAT), json.dumps(SHARED)], 2, "conversations after messages", "all alike",
    ),
    "tools that are no JSON": (
        [json.dumps({**CHAT, "tools": "search"})], 1, "tools: expected a list of obj", "remove it",
    ),
    "tools that are no objects": (
        [json.dumps({**CHAT, "tools": [1]})], 1, "tools: expected a list of obj", "remove it",
    ),
    "place of an image without one": (
        [json.dumps(CHAT).replace('"a"', '[{"type": "image"}, {"type": "text", "text": "a"}]')],
        1, "messages: expected the path of each", "beside the messages",
    ),
    "images of a row in two places": (
        [json.dumps({**CHAT, "images": ["a.png"]}).replace(
            '"a"', '[{"type": "image", "image": "b.png"}]', 1
        )],
        1, "images: expected the path of each image in one place", "remove those of one",
    ),
    "images beside a text": (
        ['{"text": "a", "images": ["a.png"]}'], 1, "images: expected rows of messages", "remove it",
    ),
    "image beside messages": (
        [json.dumps({**CHAT, "image": "a.png"})], 1, "image: expected rows of", '"images": [',
    ),
    "text for images": ([json.dumps({**CHAT, "images": ""})], 1, "a list of paths", "write it"),
    "pairs for sft": (['{"chosen": "b", "rejected": "c", "prompt": "a"}'], 1, "sft", "method dpo"),
    "text for a label": (
        ['{"prompt": "a", "completion": "b", "label": "true"}'],
        1,
        "'true'",
        "which CSV cannot",
    ),
    "number for a label": (
        ['{"prompt": "a", "completion": "b", "label": 1}'], 1, "label: expected true", "write",
    ),
    "empty prompt of a pair": (
        ['{"prompt": "", "chosen": "a", "rejected": "b"}'], 1, "prompt: expected a text", "fill",
    ),
}  # fmt: skip
METHODS = {"number for a label": "kto", "text for a label": "kto", "empty prompt of a pair": "dpo"}
"""Of rows that are not for sft."""


# Of a checkpoint of two shards: damage to one of its files; what is appended to a good recipe; the
# place, what is said, and the remedy.
NOTHING: Damage = Path.exists
CHECKPOINTS: dict[str, tuple[str, Damage, str, str, str, str]] = {
    "classifier": (
        "config.json", field("architectures", to=["Qwen2ForSequenceClassification"]), "",
        "recipe.yaml:1:", "expected a language model", "--method reward",
    ),
    "shard that is not there": (
        "model-00002-of-00004.safetensors", Path.unlink, "",
        "model/model-00002-of-00004.safetensors:", "No such file", "fetch it again",
    ),
    "shard that is cut off": (
        "model-00002-of-00004.safetensors", cut, "",
        "model/model-00002-of-00004.safetensors:", "expected a safetensors", "fetch it again",
    ),
    "library that names a setting": (
        "config.json", NOTHING,
        "training:\n  lr_scheduler_type: linear\n  lr_scheduler_kwargs: {power: 2}\n",
        "recipe.yaml:3:", "'power'", "change one of them",
    ),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with something that looks like a model, and good rows."""
    for name, content in {
        "model/config.json": "{}",
        "trained/adapter_config.json": "{}",
        "bare/config.json": '{"model_type": "qwen2"}',
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    (tmp_path / "rows.jsonl").write_text(GOOD + "\n")
    (tmp_path / "latin.jinja").write_bytes("caf\u00e9".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    files = (each for each in sorted(folder.rglob("*")) if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


def refused(place: Path, *command: str) -> str:
    before = contents(place)
    result = poros_command("finetune", *command)
    assert result.exit_code == 2, result.output
    assert contents(place) == before
    return result.output


def assert_said(said: str, where: str, what: str, remedy: str, number: int | None = 1) -> None:
    """The first line of the place says what is wrong and what to do; there are so many."""
    wrong = [each for each in said.splitlines() if where in each]
    assert wrong and what in wrong[0] and remedy in wrong[0], said
    assert number in (None, len(wrong)), said


@pytest.mark.parametrize("case", RECIPES)
def test_a_bad_recipe(case: str, place: Path) -> None:
    text, line, what, remedy = RECIPES[case]
    (place / "recipe.yaml").write_text(START + text)
    assert_said(refused(place, "recipe.yaml"), f"recipe.yaml:{line}:", what, remedy)


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_bad_checkpoint(case: str, model: Path, place: Path) -> None:
    file, damage, text, where, what, remedy = CHECKPOINTS[case]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    shutil.copytree(model, place / "model", dirs_exist_ok=True)
    (place / "model/model.safetensors").unlink()
    whole.save_pretrained(place / "model", max_shard_size="100KB")
    damage(place / "model" / file)
    (place / "recipe.yaml").write_text(START + text)
    for options in ((), ("--dry-run",)):
        assert_said(refused(place, "recipe.yaml", *options), where, what, remedy, None)


def test_weights_that_the_cache_of_the_hub_does_not_have(
    model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network."""
    snapshot = as_hub_cache(model, place / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    command = ("org/name", "rows.jsonl", "--max-length", "64")
    found = poros_command("finetune", *command, "--dry-run")
    assert found.exit_code == 0, found.output
    (snapshot / "model.safetensors").unlink()
    assert "expected model.safetensors or" in refused(place, *command)


def joined(lines: list[str | bytes]) -> bytes:
    return b"\n".join(each.encode() if isinstance(each, str) else each for each in lines)


@pytest.mark.parametrize("case", ROWS)
def test_bad_rows(case: str, place: Path) -> None:
    lines, line, what, remedy = ROWS[case]
    (place / "rows.jsonl").write_bytes(joined(lines) + b"\n")
    said = refused(place, "model", "rows.jsonl", "--method", METHODS.get(case, "sft"))
    number = 1 if case in METHODS else None
    assert_said(said, f"rows.jsonl:{line}:", what, remedy, number)


# Whether these are right, only the libraries know.
ASK_LIBRARIES = {
    *("unknown setting", "name without a hint", "optimizer of all weights", "beta of sft"),
    *("field of TRL, of another type", "field of TRL, no such choice"),
    *("field of PEFT, misspelt", "adapter that edits the base", "optimizer without a schedule"),
    *("rank of no columns", "alpha in words", "beta of 1", "no rows to prefetch"),
    *("processes that stay, of none", "metric that nothing computes"),
    *(f"metric that {method} does not have" for method in ("DPO", "KTO", "reward")),
}


def test_bad_recipes_and_rows_are_refused_before_anything_slow_is_imported(place: Path) -> None:
    """So it takes a fifth of a second."""
    commands = []
    for number, case in enumerate(sorted(RECIPES.keys() - ASK_LIBRARIES)):
        (place / f"{number}.yaml").write_text(START + RECIPES[case][0])
        commands.append(f"finetune {number}.yaml")
    for number, (case, (lines, *_)) in enumerate(ROWS.items()):
        (place / f"{number}.jsonl").write_bytes(joined(lines))
        commands.append(f"finetune model {number}.jsonl --method {METHODS.get(case, 'sft')}")
    results = run_apart(commands, place)
    assert len(results) == len(commands) > 40
    for command, (exit_code, output, slow) in zip(commands, results, strict=True):
        assert exit_code == BAD_INPUT and slow == [], (command, output, slow)


# Several sources: what is appended to a good recipe; line, what is said of it, and the remedy.
SOURCES: dict[str, tuple[str, int, str, str]] = {
    "source that is not there": ("  - gone.jsonl\n", 3, "no file or folder '/", "/gone.jsonl'; "),
    "list in a list": ("  - [rows.jsonl]\n", 3, "found a list", "write one"),
    "split of files": ("  split: test\n", 6, "on the hub to split, found a file", "remove it"),
    "configuration of files": ("  config: main\n", 6, "on the hub to configure", "remove it"),
    "weight of nothing": ("  weights: [1, 0]\n", 6, "a number greater than 0", "leave it out"),
    "share below nothing": ("  validation: -0.1\n", 6, "from 0 up to 0.5", "validation: 0.0"),
    "share that is no number": ("  validation: 0..5\n", 6, "no file or folder", "check the path"),
    "no weights": ("  weights: []\n", 6, "found 0 for 2", "list the sources"),
    "sources that differ": ("", 1, "rows of one form in all sources, found text beside", "alike"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_bad_sources(case: str, place: Path) -> None:
    text, line, what, remedy = SOURCES[case]
    (place / "more.jsonl").write_text('{"text": "a"}\n')
    (place / "recipe.yaml").write_text(SEVERAL + text)
    where = f"recipe.yaml:{line}: data." if text else "more.jsonl:1:"
    assert_said(refused(place, "recipe.yaml"), where, what, remedy)


def parquet() -> bytes:
    table = pyarrow.table({"text": ["the slot holds a block"] * 9})
    with pyarrow.BufferOutputStream() as stream:
        parquet_files.write_table(table, stream)
    return bytes(stream.getvalue())


def saved(state: bytes) -> dict[str, bytes]:
    return {"state.json": state, "dataset_info.json": b"{}"}


LINES = (GOOD + "\n").encode()
LIST = b'[\n {"text": "a"},\n {"text": "b"}\n]\n'
# A file, or the files of a folder; the place that is wrong, what is said of it, and the remedy.
FILES: dict[str, tuple[str, bytes | dict[str, bytes], str, str, str]] = {
    "CSV without names": ("a.csv", b"one,two\n3,4\n", ":1:", "found 'one, two'", "first line"),
    "TSV of commas": ("a.tsv", b"prompt,completion\na,b\n", ":1:", "t,c", "with '\\t' betw"),
    "CSV with a cell too many": (
        "a.csv", b'prompt,completion\n"a\na",b\na,b,c\n', ":4:", "2 cells", "double quotes",
    ),
    "CSV with a quote left open": ("a.csv", b'text\na\n"b\nc\n', ":3:", "expected CSV", "quotes"),
    "CSV in Latin-1": ("a.csv", b"text\na\n\xe9\n", ":3:", "0xe9 in column 1", "UTF-8"),
    "list that goes on": ("a.json", LIST[:-2] + b",\n]", ":5:1:", "Expecting value", "this column"),
    "row of a list": ("a.json", LIST.replace(b'"b"', b'""'), ", row 2:", "text: exp", "fill it in"),
    "one object on several lines": ("a.json", b'{\n"text": "a"\n}', ":1:2:", "JSON", "jq -c"),
    "empty list": ("a.json", b"[]", ":1:", "found none", "write some"),
    "Parquet cut off": ("a.parquet", parquet()[:-20], ", row 1:", "expected rows", "anew"),
    "gzip cut off": (
        "a.jsonl.gz", gzip.compress(LINES * 9)[:-9], ":10:", "expected gzip", "compress it anew",
    ),
    "line in gzip": ("a.jsonl.gz", gzip.compress(LINES + b"{"), ":2:2:", "expected JSON", "jq -c"),
    "other suffix": ("a.txt", b"a", "DATA:", "end in .jsonl, .json, .csv", "one JSON object"),
    "folder without rows": ("a", {"a.txt": b""}, "DATA:", "end in .jsonl", "one JSON object"),
    "folder of two kinds": (
        "a", {"a.jsonl": LINES, "b.csv": b"text\na\n"}, "DATA:", ".csv and .jsonl", "[a.jsonl, b",
    ),
    "folder of rows twice": (
        "a", {"a.jsonl": LINES, "a.jsonl.gz": b""}, "DATA:", ".jsonl and .jsonl.gz", "[a.jsonl, b",
    ),
    "saved folder damaged": ("a", saved(b"{"), "[train], row 1:", "expected rows", "anew"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_bad_files(case: str, place: Path) -> None:
    name, content, where, what, remedy = FILES[case]
    files = {name: content} if isinstance(content, bytes) else {}
    if isinstance(content, dict):
        (place / name).mkdir()
        files = {f"{name}/{each}": inner for each, inner in content.items()}
    for file, inner in files.items():
        (place / file).write_bytes(inner)
    where = where if where == "DATA:" else name + where
    assert_said(refused(place, "model", name), where, what, remedy, None)


FLAGS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "weights of one source": (
        ("model", "rows.jsonl", "--set", "data.weights=[2]"), "found 1 for 1", "list the sources",
    ),
    "both": (("model", "rows.jsonl", "--vram", "8GiB", "--slots", "2"), "--slots:", "remove one"),
    "no model": (("nowhere/at/all", "rows.jsonl"), "found no file or folder '/", "/at/all'; check"),
    "no data": (("model", "gone.jsonl"), "found no file or folder '/", "/gone.jsonl'; check the p"),
    "nothing": ((), "model.source: expected", "poros finetune MODEL DATA"),
    "packed pairs": (
        ("model", "rows.jsonl", "--dpo", "--packing"), "--packing: expected method", "remove it",
    ),
    "GGUF": (("rows.jsonl", "rows.jsonl"), "MODEL: expected a folder", "original"),
    "host budget": (
        ("model", "rows.jsonl", "--host-budget", "8GiB"), "--host-budget: expected", "--store",
    ),
    "template": (
        ("model", "rows.jsonl", "--chat-template", "x"), "--chat-template:", "leave it out",
    ),
    "loss": (("model", "rows.jsonl", "--loss-on", "assistant"), "rows.jsonl:1:", "leave it out"),
    "full folder": (("model", "rows.jsonl", "--out", "model"), "'config.json' in it", "--out"),
    "file for a folder": (("model", "rows.jsonl", "--out", "rows.jsonl"), "Not a dir", "--out"),
    "not to be written": (("model", "rows.jsonl", "--out", "/proc/a"), "--out: exp", "another"),
    "home of nobody": (("model", "rows.jsonl", "--out", "~nobody-here/a"), "--out:", "leave it"),
    "store": (("model", "rows.jsonl", "--store", "rows.jsonl"), "--store: expected", "another"),
    "store elsewhere": (("model", "rows.jsonl", "--store", "model"), "something else", "another"),
    "no template": (
        ("model", "rows.jsonl", "--chat-template", "a.jinja"), "found '/", "/a.jinja': No such",
    ),
    "Latin-1 template": (
        ("model", "rows.jsonl", "--chat-template", "latin.jinja"), "0xe9", "save it as UTF-8",
    ),
    "set without a section": (
        ("model", "rows.jsonl", "--set", "seed=1"), "--set: seed", "did you mean training.seed",
    ),
    "adapter": (
        ("trained", "rows.jsonl"), "MODEL: expected a folder with a config.json",
        "of an adapter or a run give its base",
    ),
    # transformers makes a tokenizer that knows no words.
    "no tokenizer": (("bare", "rows.jsonl"), "expected a tokenizer", "copy tokenizer.json"),
    "two rows": (("model", "rows.jsonl", "--validation", "0.1"), "rows.jsonl:1:", "--validation"),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_bad_flags(case: str, place: Path) -> None:
    command, what, remedy = FLAGS[case]
    assert_said(refused(place, *command), what, what, remedy, None)


def test_all_problems_are_told_at_once(place: Path) -> None:
    (place / "recipe.yaml").write_text(
        "model: nowhere/at/all\nadapter:\n  r: 0\n  ranks: 1\ntraining:\n  num_train_epochs: x\n"
    )
    said = refused(place, "recipe.yaml", "--seed", "-1")
    for each in ("yaml:1: model", "yaml:3: adapter", "yaml:4: adapter", "yaml:6: training",
                 "--seed:", "data.source"):  # fmt: skip
        assert each in said, said
    (place / "rows.jsonl").write_text('{"text": ""}\n' * 40 + GOOD)
    said = refused(place, "model", "rows.jsonl")
    assert said.count("rows.jsonl:") == 30 and "and 11 more" in said


def test_a_recipe_written_out_is_the_same_recipe(place: Path) -> None:
    for more in (
        (),
        ("--steps", "5"),
        (
            "--dpo",
            "--set",
            "training.beta=0.2",
            "--target-modules",
            "q_proj,v_proj",
            "--alpha",
            "8",
        ),
        ("--resident", "--validation", "5%", "--evaluate-every", "3", "--no-packing"),
        ("--adapter", "dora", "--set", "adapter.rank_pattern={q_proj: 8}"),
        ("--set", "training.lr_scheduler_kwargs={num_cycles: 2}", "--set", "training.data_seed=7"),
        ("--method", "kto", "--set", "training.desirable_weight=1.5", "--accumulation", "4"),
    ):
        first = poros_command("finetune", "model", "rows.jsonl", *more, "--print-recipe")
        assert first.exit_code == 0, first.output
        (place / "recipe.yaml").write_text(first.output)
        again = poros_command("finetune", "recipe.yaml", "--print-recipe")
        assert (again.exit_code, again.output) == (0, first.output)


def test_a_flag_replaces_what_a_recipe_says_in_another_way(place: Path) -> None:
    """Steps and epochs, budget and slots: of each one is given; in one place both are refused."""
    (place / "recipe.yaml").write_text(
        START + "training:\n  num_train_epochs: 2\nmemory:\n  vram: 8GiB\n"
    )
    said = poros_command(
        "finetune", "recipe.yaml", "--steps", "5", "--slots", "2", "--print-recipe"
    )
    assert "max_steps: 5" in said.output and "slots: 2" in said.output
    assert "num_train_epochs" not in said.output and "vram" not in said.output
    both = ("--steps", "5", "--epochs", "2", "--print-recipe")
    assert poros_command("finetune", "recipe.yaml", *both).exit_code == 2
