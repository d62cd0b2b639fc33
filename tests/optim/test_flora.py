"""FLORA: its projections, its two algorithms against their formulas, resuming, memory, refusals."""

import copy
import hashlib
import io
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import poros
from poros.optim import Flora, FloraCallback
from poros.optim.flora import divergence_bound
from poros.optim.projection import (
    Projection,
    Stream,
    normal_quantiles,
    philox,
    round_stochastically,
)
from tests.support import interpreted

N, M, RANK = 24, 96, 8
QUANTILES = normal_quantiles()
FP32 = 2.0**-24


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Bits do not depend on what ran before."""
    torch.manual_seed(0)


# Random projections: their bits on every device, their moments, their products.


def projection(draw: int, rank: int = RANK, width: int = M) -> Projection:
    return Projection(QUANTILES, rank, width, 5, 3, draw, Stream.ACCUMULATION)


def whole(made: Projection) -> torch.Tensor:
    """The matrix itself, which is never stored: every product is with 0 or 1."""
    return made.decompress(torch.eye(made.rank, device=made.quantiles.device))


# From the known-answer file of Random123 (Salmon et al., SC 2011), philox4x32-10: every word of
# counter and key is this.
KNOWN = {
    0x0: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    0xFFFFFFFF: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
}


@pytest.mark.parametrize("word", KNOWN)
def test_philox_gives_the_published_answers(word: int) -> None:
    words = philox(word << 32 | word, torch.full((2,), word), word, word, word)
    assert [each.tolist() for each in words] == [[answer] * 2 for answer in KNOWN[word]]


def test_quantiles_are_those_of_every_platform() -> None:
    digest = hashlib.sha256(QUANTILES.numpy().tobytes()).hexdigest()
    assert digest.startswith("e8cfff23047b7e58")
    moments = [(QUANTILES.double() ** power).mean().item() for power in (1, 2, 4)]
    assert moments == pytest.approx([0, 1, 3], abs=1e-3)


def test_triton_makes_the_same_bits() -> None:
    gpu = interpreted("poros.optim.projection_gpu")
    for rank, width, seed in ((8, 96, 0), (5, 77, 1), (16, 40, 2**63 - 1)):
        made = Projection(QUANTILES, rank, width, seed, 7, 2**31 + 5, Stream.MOMENTUM)
        num_counters = -(-width // 8)
        tile = gpu.tile(made, num_counters, 1, num_counters)
        assert torch.equal(tile[:, : width - 8], whole(made)[:, 8:])


@pytest.mark.gpu
def test_cpu_and_gpu_make_the_same_bits() -> None:
    for rank, width in ((8, 96), (256, 4096), (64, 18944), (300, 5003)):
        here = Projection(QUANTILES, rank, width, 11, 7, 2, Stream.ACCUMULATION)
        there = Projection(QUANTILES.cuda(), rank, width, 11, 7, 2, Stream.ACCUMULATION)
        assert torch.equal(whole(here), whole(there).cpu())
    value = torch.randn(1000, 300)
    rounded = round_stochastically(value.cuda(), 1, 2, 3).cpu()
    assert torch.equal(rounded, round_stochastically(value, 1, 2, 3))


@pytest.mark.parametrize("width", [M, 40_003])
def test_tiles_make_one_matrix(width: int) -> None:
    made = projection(0, rank=64, width=width)
    matrix = whole(made)
    assert matrix.shape == (64, width)
    gradient = torch.randn(3, width)
    compressed = made.compress(gradient)
    # Sums of `width` terms, in another order: (width + 1) roundings of the sum of magnitudes.
    bound = (width + 1) * FP32 * (gradient.abs().double() @ matrix.abs().double().T)
    assert ((compressed - gradient.double() @ matrix.double().T).abs() <= bound).all()
    back = made.decompress(compressed)
    bound = 65 * FP32 * (compressed.abs().double() @ matrix.abs().double())
    assert ((back - compressed.double() @ matrix.double()).abs() <= bound).all()


def test_decompressed_gradients_are_unbiased_and_longer_by_the_formula() -> None:
    gradient = torch.randn(N, M)
    num_draws, mean, square = 2000, torch.zeros(N, M, dtype=torch.float64), 0.0
    for draw in range(num_draws):
        made = projection(draw)
        back = made.decompress(made.compress(gradient)).double()
        mean += back / num_draws
        square += (back.square().sum() / num_draws).item()
    length = gradient.double().square().sum().item()
    # E |G A'A|^2 = (1 + (m + 1) / r) |G|^2, so each draw is off by (m + 1) / r |G|^2.
    expected = 1 + (M + 1) / RANK
    off = (mean - gradient).square().sum().item() / length
    assert off == pytest.approx((expected - 1) / num_draws, rel=0.2)
    assert square / length == pytest.approx(expected, rel=0.02)


def test_rounding_is_unbiased_and_keeps_what_is_not_finite() -> None:
    value = torch.full((200_000,), 1 + 2.0**-10)  # an eighth of the way to the next bfloat16
    rounded = round_stochastically(value, 1, 2, 3)
    assert set(rounded.tolist()) == {1.0, 1 + 2.0**-7}
    share = (rounded > 1).double().mean().item()
    assert share == pytest.approx(1 / 8, abs=5 * math.sqrt(7 / 64 / value.numel()))
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.5])
    kept = round_stochastically(odd, 1, 2, 3).float()
    assert kept[2].isnan()
    kept[2] = odd[2]
    assert torch.equal(kept.view(torch.int32), odd.view(torch.int32))


# The optimizer.


class Small(nn.Module):
    """An embedding, two numbered layers and a head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, M, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(M, M, dtype=dtype) for _ in range(2))
        self.lm_head = nn.Linear(M, 20, bias=False, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.lm_head(hidden)[:-1].float(), tokens[1:])


def batches(number: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 20, (12,), generator=generator) for _ in range(number)]


def run(model: nn.Module, optimizer: Flora, data: Sequence[torch.Tensor], length: int) -> None:
    for number, batch in enumerate(data, start=1):
        (model(batch) / length).backward()
        if number % length == 0:
            optimizer.step()
            optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def equal(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


BASES = {"adafactor": torch.optim.Adafactor, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("is_averaged", [True, False], ids=["averaged", "summed"])
@pytest.mark.parametrize("base", BASES)
def test_accumulation_follows_algorithm_1(base: str, is_averaged: bool) -> None:
    """A cycle of three, then one of two, against gradients of autograd and the base optimizer."""
    model = Small()
    reference = copy.deepcopy(model)
    named = dict(reference.named_parameters())
    optimizer = Flora(
        model.named_parameters(),
        rank=RANK,
        base=base,
        accumulation=3,
        seed=9,
        loss_is_averaged=is_averaged,
    )
    options: dict[str, Any] = {"betas": (0.0, 0.999), "weight_decay": 0} if base == "adamw" else {}
    theirs = BASES[base](named.values(), lr=1e-3, **options)
    for cycle, length in enumerate((3, 2)):
        sums = {name: torch.zeros_like(each) for name, each in named.items()}
        for batch in batches(length, seed=cycle):
            (model(batch) / (length if is_averaged else 1)).backward()
            assert all(each.grad is None for each in model.parameters())
            for gradient, name in zip(
                torch.autograd.grad(reference(batch), list(named.values())), sums, strict=True
            ):
                sums[name] += gradient / length
        optimizer.step()
        for number, (name, each) in enumerate(named.items()):
            each.grad = sums[name]
            if name.startswith("layers") and each.dim() == 2:
                made = Projection(QUANTILES, RANK, M, 9, number, cycle, Stream.ACCUMULATION)
                each.grad = made.decompress(made.compress(sums[name]))
        theirs.step()
        for (name, each), other in zip(named.items(), model.parameters(), strict=True):
            torch.testing.assert_close(other, each, atol=2e-6, rtol=2e-5, msg=name)


def test_momentum_follows_algorithm_2() -> None:
    """Nine updates over three projections: what the base optimizer is given, against float64."""
    momentum, kappa = 0.9, 3
    layer = nn.Linear(M, N, bias=False)
    optimizer = Flora(
        [("layers.0.weight", layer.weight)],
        rank=RANK,
        momentum=momentum,
        kappa=kappa,
        allow_divergence=True,
    )
    given: list[torch.Tensor] = []
    hook = register_optimizer_step_pre_hook(recorder(given))
    gradients = [torch.randn(N, M) for _ in range(9)]
    for gradient in gradients:
        (layer.weight * gradient).sum().backward()
        optimizer.step()
    hook.remove()
    held, epoch = torch.zeros(N, RANK, dtype=torch.float64), 0
    before = torch.empty(0)
    for number, gradient in enumerate(gradients):
        a = Projection(QUANTILES, RANK, M, 0, 0, number // kappa, Stream.MOMENTUM)
        matrix = whole(a).double()
        if number // kappa != epoch:
            held, epoch = held @ before @ matrix.T, number // kappa
        held = momentum * held + (1 - momentum) * gradient.double() @ matrix.T
        torch.testing.assert_close(given[number].double(), held @ matrix, atol=1e-4, rtol=1e-4)
        before = matrix


def recorder(given: list[torch.Tensor]) -> Callable[..., None]:
    """Keeps what base optimizers are given for matrices."""

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        if not isinstance(optimizer, Flora) and parameter.dim() == 2:
            given.append(parameter.grad.clone())

    return record


def growth(kappa: int) -> float:
    """Of the momentum's norm, between an early update and the last."""
    layer = nn.Linear(M, N, bias=False)
    named = [("layers.0.weight", layer.weight)]
    optimizer = Flora(named, rank=RANK, momentum=0.9, kappa=kappa, allow_divergence=True)
    norms = []
    for _ in range(40):
        (layer.weight * torch.randn(N, M)).sum().backward()
        optimizer.step()
        norms.append(optimizer.state[layer.weight]["momentum"].norm().item())
    return norms[-1] / norms[9]


def test_momentum_diverges_where_it_is_said_to() -> None:
    least = divergence_bound(M, RANK, 0.9)
    assert divergence_bound(4096, 8, 0.9) == pytest.approx(29.6, abs=0.05)
    layer = nn.Linear(M, N, bias=False)
    named = [("layers.0.weight", layer.weight)]
    for kappa in (1, int(least)):
        with pytest.raises(poros.OptimizerError, match=f"{least:.1f}"):
            Flora(named, rank=RANK, momentum=0.9, kappa=kappa)
    Flora(named, rank=RANK, momentum=0.9, kappa=int(least) + 1)
    assert growth(kappa=1000) < 4
    # Each of 30 resamplings multiplies the expected square by 0.81 x (1 + 97 / 8), about 10.6.
    assert growth(kappa=1) > 1e10


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "momentum": {"momentum": 0.9, "kappa": 20},
    "momentum, adamw": {"momentum": 0.9, "kappa": 20, "base": "adamw"},
    "clipped": {"max_grad_norm": 0.1},
    "bfloat16": {"dtype": torch.bfloat16, "momentum": 0.9, "kappa": 20},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_continued_after_any_micro_batch_has_the_same_bits(case: str) -> None:
    options = dict(CASES[case])
    dtype = options.pop("dtype", torch.float32)
    data = batches(12)

    def made() -> tuple[Small, Flora]:
        torch.manual_seed(3)
        model = Small(dtype)
        named = model.named_parameters()
        return model, Flora(named, rank=RANK, accumulation=3, seed=4, **options)

    def go_on(model: Small, optimizer: Flora, first: int, last: int) -> None:
        for number in range(first, last):
            (model(data[number]) / 3).backward()
            if number % 3 == 2:
                optimizer.step()

    straight, optimizer = made()
    start = weights(straight)
    go_on(straight, optimizer, 0, 12)
    assert not equal(start, weights(straight))
    for stop in (1, 2, 3, 4, 8):
        model, optimizer = made()
        go_on(model, optimizer, 0, stop)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        saved, state = torch.load(file, weights_only=True)
        model, optimizer = made()
        model.load_state_dict(saved)
        optimizer.load_state_dict(state)
        go_on(model, optimizer, stop, 12)
        assert equal(weights(straight), weights(model)), stop


def test_small_updates_of_bfloat16_weights_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {}
    for is_random in (True, False):
        if not is_random:  # a control
            nearest = lambda value, *_: value.bfloat16()  # noqa: E731
            monkeypatch.setattr("poros.optim.flora.round_stochastically", nearest)
        weight = nn.Parameter(torch.ones(M, M, dtype=torch.bfloat16))
        optimizer = Flora([("layers.0.weight", weight)], 1e-3, rank=RANK)
        weight.sum().backward()
        optimizer.step()
        moved[is_random] = (weight != 1).any().item()
    assert moved == {True: True, False: False}


def test_clipping_uses_the_norm_of_the_compressed_gradient() -> None:
    model = Small()
    optimizer = Flora(model.named_parameters(), rank=RANK, max_grad_norm=1e-3, base="adamw")
    gradients = torch.autograd.grad(model(batches(1)[0]), list(model.parameters()))
    norm = torch.stack([each.norm() for each in gradients]).norm().item()
    model(batches(1)[0]).backward()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(norm, rel=0.2)
    given: list[torch.Tensor] = []
    hook = register_optimizer_step_pre_hook(recorder(given))
    model(batches(1)[0]).backward()
    optimizer.step()
    hook.remove()
    head = min(given, key=lambda each: each.shape[0])  # of those that are not projected
    assert 0 < head.norm().item() <= 1e-3


def behind_a_backward() -> tuple[Small, Flora, list[torch.Tensor]]:
    """A model, its optimizer, and its weights."""
    model = Small()
    optimizer = Flora(model.named_parameters(), rank=RANK)
    model(batches(1)[0]).backward()
    return model, optimizer, weights(model)


def test_zero_grad_forgets_the_cycle() -> None:
    model, optimizer, before = behind_a_backward()
    optimizer.zero_grad()
    optimizer.step()
    assert equal(before, weights(model))
    assert optimizer.state_num_bytes()["accumulation"] == 0


def test_weight_decay_is_the_groups_at_the_step() -> None:
    """As the learning rate; a schedule may change it."""
    found = []
    for given, later in ((0.5, 0.5), (0.5, 0.0), (0.0, 0.0)):
        torch.manual_seed(0)
        model = Small()
        optimizer = Flora(model.named_parameters(), rank=RANK, weight_decay=given)
        optimizer.param_groups[0]["weight_decay"] = later
        model(batches(1)[0]).backward()
        optimizer.step()
        found.append(weights(model))
    assert equal(found[1], found[2]) and not equal(found[0], found[1])


def test_a_model_with_an_optimizer_is_pickled_without_it() -> None:
    model, _optimizer, before = behind_a_backward()
    copied = pickle.loads(pickle.dumps(model))
    assert equal(before, weights(copied))
    copied(batches(1)[0]).backward()  # no optimizer takes its gradients
    assert all(each.grad is not None for each in copied.parameters())


def test_the_newer_of_two_optimizers_takes_the_gradients() -> None:
    model = Small()
    older = Flora(model.named_parameters(), rank=RANK)
    newer = Flora(model.named_parameters(), rank=RANK)
    before = weights(model)
    model(batches(1)[0]).backward()
    older.step()
    assert equal(before, weights(model))
    newer.step()
    assert not equal(before, weights(model))


# Layers, and percent of the buffer of a naive accumulation at rank 256, embeddings not projected:
# n x 256 of each matrix, and everything else.
SHARES = {"t5-small": (6, 55.81), "gpt2": (12, 45.02)}


def made(name: str, num_layers: int) -> nn.Module:
    with torch.device("meta"):
        if name == "gpt2":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=num_layers))
        config = transformers.T5Config(num_layers=num_layers, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("name", SHARES)
def test_state_is_as_large_as_the_formula_says(name: str) -> None:
    num_layers, share = SHARES[name]
    sizes = []
    for shown in (1, 2):  # all layers are alike
        model = made(name, shown)
        optimizer = Flora(model.named_parameters(), rank=256)
        sum(each.sum() for each in model.parameters()).backward()
        held = optimizer.state_num_bytes()["accumulation"]
        sizes.append((held, sum(each.nbytes for each in model.parameters())))
    held, naive = (one + (num_layers - 1) * (two - one) for one, two in zip(*sizes, strict=True))
    assert 100 * held / naive == pytest.approx(share, abs=0.01)


def sparse() -> None:
    table = nn.Embedding(4, 8, sparse=True)
    optimizer = Flora(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


def scaled() -> None:
    model = Small()
    optimizer = flora_of(model, rank=RANK)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batches(1)[0])).backward()
    scaler.step(optimizer)


def too_many() -> None:
    model = Small()
    optimizer = Flora(model.named_parameters(), rank=RANK, accumulation=2)
    for batch in batches(3):
        model(batch).backward()
    optimizer.step()


def flora_of(model: nn.Module | None = None, **options: Any) -> Flora:
    return Flora((model or Small()).named_parameters(), **options)


def loading(other: Callable[[], Any], model: nn.Module | None = None) -> Callable[[], None]:
    """The state of another optimizer into one of ``RANK``."""
    return lambda: flora_of(model, rank=RANK).load_state_dict(other().state_dict())


NEW_GROUP: dict[str, Any] = {"params": [nn.Parameter(torch.ones(2))]}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "parameters without names": (lambda: Flora(Small().parameters()), "named_parameters"),
    "nothing to train": (lambda: Flora([]), "requires gradients"),
    "fp16": (lambda: flora_of(Small(torch.float16)), "float16"),
    "rank": (lambda: flora_of(rank=0), "rank"),
    "base": (lambda: flora_of(base="sgd"), "base"),
    "momentum": (lambda: flora_of(momentum=1.0), "momentum"),
    "seed": (lambda: flora_of(seed=-1), "seed"),
    "projected": (lambda: flora_of(projected=["layers.7.weight"]), "layers.7.weight"),
    "sparse gradients": (sparse, "sparse"),
    "GradScaler": (scaled, "GradScaler"),
    "too many micro-batches": (too_many, "accumulation="),
    "closure": (lambda: flora_of().step(lambda: 0.0), "closure"),
    # As accelerate calls it, below a Trainer's clipping.
    "clipping undecided": (lambda: flora_of().step(None), "FloraCallback"),
    "another rank's state": (loading(lambda: flora_of(rank=4)), "saved run with 8"),
    "another model's state": (loading(lambda: flora_of(nn.Linear(3, 3))), "param_names"),
    "other shapes": (
        loading(lambda: flora_of(nn.Linear(4, 4), rank=RANK), nn.Linear(8, 8)),
        "shapes",
    ),
    "a copy": (lambda: copy.deepcopy(flora_of()), "state_dict"),
    "a pickle": (lambda: pickle.dumps(flora_of()), "state_dict"),
    "more parameters": (lambda: flora_of().add_param_group(NEW_GROUP), "made with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, part = REFUSED[case]
    with pytest.raises(poros.OptimizerError, match=part):
        call()


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, before = behind_a_backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(poros.OptimizerError, match="2 ranks"):
        optimizer.step()
    assert equal(before, weights(model))


def trainer(folder: Path, steps: int, **options: Any) -> transformers.Trainer:
    torch.manual_seed(5)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.Qwen2ForCausalLM(config)
    starts = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(6)).tolist()
    rows = [[(start + step) % 64 for step in range(16)] for start in starts]
    callbacks = options.pop("callbacks", [FloraCallback()])
    flora = options.pop("flora", {})
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=steps,
            save_steps=5,
            report_to=[],
            use_cpu=True,
            **options,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizers=(Flora(model.named_parameters(), 1e-2, rank=8, **flora), None),
        callbacks=callbacks,
    )


def test_a_trainer_learns_with_it(tmp_path: Path) -> None:
    made = trainer(tmp_path, 100, save_strategy="no", flora={"momentum": 0.9})
    start = made.evaluate(made.train_dataset)["eval_loss"]
    made.train()
    flora = made.optimizer.optimizer
    assert (flora.accumulation, flora.max_grad_norm, made.args.max_grad_norm) == (2, 1.0, 1.0)
    assert flora.grad_norm is not None
    assert made.evaluate(made.train_dataset)["eval_loss"] < 0.85 * start


def test_a_trainer_resumes_with_the_same_bits(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "straight", 10)
    straight.train()
    cut = trainer(tmp_path / "straight", 10)
    cut.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-5"))
    assert equal(weights(straight.model), weights(cut.model))


TRAINER_REFUSED: dict[str, dict[str, Any]] = {
    "clipping": {"flora": {"max_grad_norm": 0.5}},
    "accumulation": {"flora": {"accumulation": 4}},
    "division": {"flora": {"loss_is_averaged": False}},
    "no callback": {"callbacks": []},
}


@pytest.mark.parametrize("case", TRAINER_REFUSED)
def test_a_trainer_of_other_settings_is_refused(tmp_path: Path, case: str) -> None:
    made = trainer(tmp_path, 5, **TRAINER_REFUSED[case])
    before = weights(made.model)
    with pytest.raises(poros.OptimizerError):
        made.train()
    assert equal(before, weights(made.model))
