"""Programs that look at the logits of a model whose loss is computed in slices, or do not."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer

import poros
from poros.errors import PreparedModelError
from tests.comparing import compare_trajectories, digest
from tests.exact.heads import Model, outputs, with_sliced_loss
from tests.loops import batches, build, slice_resident_loss
from tests.trainers import Arms, logged

pytestmark = pytest.mark.usefixtures("narrow")


def test_large_logits_that_are_read_are_mentioned_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.head.takeover._LOUD_NUM_BYTES", 1)
    model = with_sliced_loss(build())
    with caplog.at_level(logging.WARNING, logger="poros.head.takeover"):
        outputs(model).loss.backward()
        assert caplog.text == ""
        for _ in range(2):
            outputs(model).logits.sum()
    assert caplog.text.count("reads the logits") == 1


def test_labels_for_some_positions_only() -> None:
    """Shifted by the caller, divided by a number of items, ignored by another number."""
    given = batches()[0]["labels"]
    shifted = F.pad(given, (0, 1), value=-100)[..., 1:].contiguous()
    models = [build(dtype=torch.float32).eval() for _ in range(2)]
    with_sliced_loss(models[0])
    for extra in (
        *({"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}),
        *({"shift_labels": shifted, "num_items_in_batch": 7}, {"ignore_index": int(given[0, 3])}),
    ):
        ours, plain = (
            float(outputs(model, labels=given, **extra).loss.detach()) for model in models
        )
        assert abs(ours - plain) < 1e-5 * plain, extra
    nothing = torch.full_like(given, -100)
    model = with_sliced_loss(build()).train()
    loss = outputs(model, labels=nothing).loss
    loss.backward()
    assert bool(loss.isnan())
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


WATCHES: dict[str, Any] = {
    "hook": lambda output: output.logits.register_hook(lambda gradient: gradient * 0),
    "retain_grad": lambda output: output.logits.retain_grad(),
    "hook on a follower": lambda output: output.logits.float().register_hook(print),
    "grad": lambda output: torch.autograd.grad(output.loss, output.logits, allow_unused=True),
    "grad by keyword": lambda output: torch.autograd.grad(output.loss, inputs=[output.logits]),
}


@pytest.mark.parametrize("name", WATCHES)
def test_the_gradient_of_logits_that_the_loss_goes_around_is_refused(name: str) -> None:
    model = with_sliced_loss(build()).train()
    with pytest.raises(PreparedModelError, match="expected no use of their gradient"):
        WATCHES[name](outputs(model))
    WATCHES["hook"](outputs(model, labels=None))  # no loss was taken of these


class WithMetrics(Trainer):  # type: ignore[misc]
    """Reads the logits of evaluations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, compute_metrics=self.metrics)

    def metrics(self, prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (4, 20, 512)
        return {"mean": float(prediction.predictions.mean())}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Trainer, {"torch_compile": False, "average_tokens_across_devices": False}),
        (WithMetrics, {"bf16": True}),
        (Trainer, {"label_smoothing_factor": 0.1}),
    ],
    ids=str,
)
def test_trainer(kind: type[Trainer], options: dict[str, Any], tmp_path: Path) -> None:
    """Losses, evaluations and metrics: those of a resident model with the same loss."""
    arms = Arms(tmp_path, torch.bfloat16)
    given = {"trainer_class": kind, "max_steps": 2, "eval_steps": 1, **options}
    given |= {"save_strategy": "steps", "save_steps": 2}
    prepares = (lambda model, **_: slice_resident_loss(model)), with_sliced_loss
    runs = [arms.run(name, prepare, **given) for name, prepare in zip("ab", prepares, strict=True)]
    assert compare_trajectories(*runs) == []
    assert any("eval_mean" in name for name in logged(runs[0])) == (kind is WithMetrics)
    is_whole = "label_smoothing_factor" in options
    stats = poros.runtime(arms.model).stats()
    assert (stats["head_num_bytes"] == 0) == is_whole, "the loss is the Trainer's, on whole logits"


@pytest.mark.parametrize("kind", ["the head's", "of all modules"])
def test_backward_hooks_see_the_gradient_of_the_logits(kind: str) -> None:
    """So there are logits, and everything is as in a plain model."""

    def gradients(model: Model) -> list[object]:
        seen: list[torch.Tensor] = []

        def hook(module: torch.nn.Module, _: Any, outputs: Any) -> None:
            if module is model.get_output_embeddings():
                seen.append(outputs[0])

        if kind == "the head's":
            handle = model.get_output_embeddings().register_full_backward_hook(hook)
        else:
            handle = torch.nn.modules.module.register_module_full_backward_hook(hook)
        with handle:
            outputs(model.train()).loss.backward()
        assert len(seen) == 1 and seen[0].shape[-1] == 512
        return [
            digest(seen[0]),
            *(digest(p.grad) for p in model.parameters() if p.grad is not None),
        ]

    assert gradients(build()) == gradients(with_sliced_loss(build()))
