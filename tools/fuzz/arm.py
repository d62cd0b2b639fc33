"""Runs a program on one model and records all that it computes.

The same code runs every arm; the only difference is what ``prepare`` does, and a resident run has a
loss of the same kind. What is recorded comes in the order of the program, so the record of a run
that stopped is the beginning of the record of one that did not.
"""

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

import poros
from poros.gates import tiny
from poros.head.choice import find_head
from poros.head.takeover import slice_loss
from poros.kernels.nf4 import state_of
from tools.fuzz import actions, optimizers
from tools.fuzz.hooks import Hooked, Thrown
from tools.fuzz.models import layers_of
from tools.fuzz.program import Action, Forward, Program, Step, Term

NUM_ROWS = 2


@dataclass
class Record:
    """What an arm computed, and how it ended."""

    entries: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """In the order of the program; a name says where."""
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """What is trained, before the first part of the program and after each."""
    now: dict[str, torch.Tensor] = field(default_factory=dict)
    """What is trained, at the end."""
    base: dict[str, torch.Tensor] = field(default_factory=dict)
    """What is frozen, at the end of a run without an error."""
    error: BaseException | None = None
    trace: str = ""
    done: set[str] = field(default_factory=set)
    """Parts of the program that could not be done in this model, by name."""

    def add(self, name: str, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            tensor = torch.tensor(float(tensor), dtype=torch.float64)
        self.entries.append((name, tensor.detach().clone()))


class Arm:
    """One model under a program; what actions work on."""

    def __init__(self, program: Program, model: Any) -> None:
        self.program = program
        self.model = model
        self.layers = layers_of(model)
        self.record = Record()
        self.step_index = 0
        self.is_between = False
        """Whether a forward is done and its backward has not begun."""
        self.is_resident = True
        self.hooks: dict[int, list[Hooked]] = {}
        self.captured: dict[int, torch.Tensor] = {}
        self.added: dict[int, nn.Parameter] = {}
        """Trainable tensors that hooks bring in."""
        self.seen: dict[str, set[int]] = {}
        """What hooks have read, as bits."""
        self.sums: dict[int, torch.Tensor] = {}
        """What hooks have summed up."""
        self.ema: dict[str, torch.Tensor] = {}
        self.optimizer: Any = None
        self.edits_base = False
        """Whether a frozen tensor has been changed."""
        self.given: list[torch.Tensor] = []
        """Embeddings that the model was given, and that have a gradient."""
        self._stepped: dict[int, Any] = {}
        self._names: dict[int, str] = {}

    def run(self, prepare: Callable[[Any], Any] | None) -> None:
        """The whole program; an error ends it and is recorded."""
        self.is_resident = prepare is None
        try:
            self.model.train()
            self._mark()
            for action in self.program.before:
                self._do(action)
            if prepare is not None:
                prepare(self.model)
            elif self.program.policy.kernels != "exact":
                poros.use_adapter_kernels(self.model, self.program.policy.kernels)
            if prepare is None and self.program.policy.loss == "chunked":
                _slice_loss(self.model)
            self._make_optimizer()
            for index, step in enumerate(self.program.steps):
                self.step_index = index
                self._step(step, f"step {index}")
            self.record.add("end: random state", torch.get_rng_state())
            self.record.base = {
                name: tensor.detach().clone() for name, tensor in frozen_tensors(self.model)
            }
        except Exception as error:
            self.record.trace = traceback.format_exc()
            # Its frames hold tensors; what it says is all that is looked at.
            self.record.error = error.with_traceback(None)
            self.record.error.__cause__ = self.record.error.__context__ = None
        self.record.now = self.trained()

    def close(self) -> None:
        """Take everything off that would outlive the model."""
        for hooked in chain(*self.hooks.values()):
            hooked.remove()
        self.hooks.clear()
        self.captured.clear()
        self.optimizer = None

    def trained(self) -> dict[str, torch.Tensor]:
        """Copies of all that can be trained, by name."""
        return {name: p.detach().clone() for name, p in self.named_trainable()}

    def named_trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter
        for tag, parameter in self.added.items():
            yield f"tensor of hook {tag}", parameter

    def name_of(self, module: nn.Module) -> str:
        """The qualified name of a module of the model."""
        if id(module) not in self._names:
            self._names = {id(other): name for name, other in self.model.named_modules()}
        return self._names.get(id(module), "")

    def train_on(self, length: int) -> None:
        """A plain step without an update, for what repeats."""
        self._loss(Forward(length=length)).backward()
        self._zero_gradients()

    def forward(self, forward: Forward) -> torch.Tensor:
        return self._loss(forward)

    def _mark(self) -> None:
        self.record.weights.append(self.trained())

    def _do(self, action: Action) -> None:
        if not actions.do(action, self):
            self.record.done.add(f"{type(action).__name__}: not in this model")
        self._mark()

    def _step(self, step: Step, where: str) -> None:
        for hooked in chain(*self.hooks.values()):
            hooked.renew()
        for action in step.before:
            self._do(action)
        try:
            with _context(step.context):
                losses = self._losses_and_backward(step, where)
        except Thrown:
            if self.program.optimizer == "in_backward":
                # A resident run has by then updated some adapters of the layer that was left.
                raise
            # Of what hooks inside that layer do, a streamed run has done more by then.
            torch.manual_seed(self.program.seed)
            self.seen.clear()
            self.sums.clear()
            self.given.clear()
            losses = []
            self.record.add(f"{where}: caught", 1)
            self._zero_gradients()
        self._mark()
        for number, loss in enumerate(losses):
            self.record.add(f"{where}: loss {number}", loss)
        del losses
        self.captured.clear()
        for name, parameter in self.named_trainable():
            if parameter.grad is not None:
                self.record.add(f"{where}: gradient of {name}", parameter.grad)
        for number, embedded in enumerate(self.given):
            if embedded.grad is not None:
                self.record.add(f"{where}: gradient of embeddings {number}", embedded.grad)
        self.given.clear()
        for action in step.after:
            self._do(action)
        for name, values in sorted(self.seen.items()):
            self.record.add(f"{where}: {name}", torch.tensor(sorted(values)))
        for tag, total in sorted(self.sums.items()):
            self.record.add(f"{where}: sum of hook {tag}", total)
        self.seen.clear()
        self.sums.clear()
        if step.update:
            self._update(where)
        self._mark()
        self.record.add(f"{where}: random state", torch.get_rng_state())

    def _losses_and_backward(self, step: Step, where: str) -> list[torch.Tensor]:
        """Forwards, what comes between, and backward, as ``Step.backward`` and ``autocast`` say."""
        losses: list[torch.Tensor] = []
        autocast = _autocast if step.autocast != "off" else nullcontext
        if step.backward == "together":

            def loss_of(_: Any, forward: Forward) -> torch.Tensor:
                with autocast():
                    return self._loss(forward)

            self._between(step)
            return poros.accumulate(self.model, step.forwards, loss=loss_of)
        if step.backward == "each":
            with autocast() if step.autocast == "shared" else nullcontext():
                for forward in step.forwards:
                    with autocast() if step.autocast == "around" else nullcontext():
                        with autocast() if step.autocast == "each" else nullcontext():
                            output = self._output(forward)
                            loss = self._sum(forward, output, outside=False)
                        loss = loss + self._sum(forward, output, outside=True, base=False)
                        del output
                        self._between(step)
                        loss.backward()
                        self._mark()
                    losses.append(loss.detach())
            return losses
        with ExitStack() as stack:
            if step.autocast in ("shared", "around"):
                stack.enter_context(autocast())
            for forward in step.forwards:
                with autocast() if step.autocast == "each" else nullcontext():
                    output = self._output(forward)
                    loss = self._sum(forward, output, outside=False)
                losses.append(loss + self._sum(forward, output, outside=True, base=False))
                del output
            if step.autocast == "shared":
                stack.close()
            self._between(step)
            self._backward(losses, step.backward, where)
        return [loss.detach() for loss in losses]

    def _between(self, step: Step) -> None:
        self.is_between = True
        try:
            for action in step.between:
                self._do(action)
        finally:
            self.is_between = False

    def _backward(self, losses: Sequence[torch.Tensor], how: str, where: str) -> None:
        total = torch.stack([loss.float() for loss in losses]).sum()
        if how == "sum":
            total.backward()
        elif how in ("in_turn", "reverse"):
            for loss in losses if how == "in_turn" else reversed(losses):
                loss.backward()
                self._mark()
        elif how in ("twice", "again"):
            total.backward(retain_graph=how == "twice")
            self._mark()
            total.backward()
        elif how == "grad":
            named = list(self.named_trainable())
            gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
            for (_, parameter), gradient in zip(named, gradients, strict=True):
                parameter.grad = gradient
        elif how == "create_graph":
            total.backward(create_graph=True)

    def _loss(self, forward: Forward) -> torch.Tensor:
        output = self._output(forward)
        return self._sum(forward, output, outside=False)

    def _output(self, forward: Forward) -> Any:
        if forward.reads:
            there = [p.grad.norm() for _, p in self.named_trainable() if p.grad is not None]
            self.record.add(f"step {self.step_index}: gradients there", sum(there))
        inputs = dict(self.batch(forward.batch, forward.length, forward.mask))
        if forward.inputs != "ids":
            embedded = self.model.get_input_embeddings()(inputs.pop("input_ids")).detach()
            inputs["inputs_embeds"] = embedded.requires_grad_(forward.inputs == "embeds_grad")
            self.captured[-1] = inputs["inputs_embeds"]
            self.given += [embedded] if embedded.requires_grad else []
        options: dict[str, Any] = {"use_cache": forward.cache}
        if forward.attentions:
            options["output_attentions"] = True
        if any(term.kind == "hidden" for term in forward.terms):
            options["output_hidden_states"] = True
        return self.model(**inputs, **options)

    def batch(self, number: int, length: int, mask: str = "drawn") -> dict[str, torch.Tensor]:
        sizes = {"batch_size": NUM_ROWS, "num_tokens": length, "seed": self.program.seed}
        batch = tiny.make_batches(number + 1, **sizes, padded=mask == "drawn")[number]
        first = 1 + number % (length - 1)
        if mask == "own":
            batch["attention_mask"][-1, first:] = 0
            batch["labels"][-1, first:] = -100
        elif mask == "packed":
            positions = torch.cat([torch.arange(first), torch.arange(length - first)])
            batch["position_ids"] = positions.repeat(NUM_ROWS, 1)
        return batch

    def _sum(
        self, forward: Forward, output: Any, *, outside: bool, base: bool = True
    ) -> torch.Tensor:
        """The model's own loss and the terms; those outside of autocast apart."""
        total: torch.Tensor = output.loss if base else torch.zeros(())
        for term in forward.terms:
            if term.outside == outside:
                total = total + self._term(term, output)
        return total

    def _term(self, term: Term, output: Any) -> torch.Tensor:
        zero = torch.zeros(())
        if term.kind == "raise":
            raise Thrown("a loss that fails")
        if term.kind == "captured":
            captured = self.captured.get(term.tag)
            if captured is None or not captured.requires_grad:
                return zero
            return 0.1 * captured.float().pow(2).mean()
        if term.kind == "hidden":
            states = output.hidden_states
            return zero if not states else states[term.tag % len(states)].float().pow(2).mean()
        if term.kind == "logits":
            return 1e-2 * output.logits.logsumexp(-1).pow(2).mean()
        if term.kind == "embeds":
            embedded = self.captured.get(-1)
            return zero if embedded is None else embedded.pow(2).mean()
        return self._weight_term(term)

    def _weight_term(self, term: Term) -> torch.Tensor:
        total = torch.zeros(())
        named = dict(self.named_trainable())
        for name, parameter in named.items():
            if term.which not in name or parameter.dim() != 2:
                continue
            if term.kind == "norm":
                total = total + parameter.norm()
            elif term.kind == "gram":
                gram = parameter @ parameter.T
                total = total + 1e-2 * (gram - torch.eye(len(gram))).pow(2).sum()
            elif term.kind == "product":
                other = named.get(name.replace("lora_A", "lora_B"))
                if other is not None and other is not parameter:
                    total = total + (other @ parameter).pow(2).mean()
        return total

    # Updates.

    def _make_optimizer(self) -> None:
        parameters = [parameter for _, parameter in self.named_trainable()]
        kind = self.program.optimizer
        if kind == "in_backward":
            for parameter in parameters:
                self._step_in_backward(parameter)
        else:
            self.optimizer = optimizers.make(kind, parameters)
        if self.program.ema:
            self.ema = self.trained()

    def _step_in_backward(self, parameter: nn.Parameter) -> None:
        own = torch.optim.SGD([parameter], lr=1e-2, momentum=0.9, foreach=False)
        self._stepped[id(parameter)] = own

        def step(_: torch.Tensor) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)

    def _update(self, where: str) -> None:
        trained = list(self.named_trainable())
        if self.optimizer is None:
            for _, parameter in trained:
                if id(parameter) not in self._stepped:
                    self._step_in_backward(parameter)
        else:
            known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            if new := [p for _, p in trained if id(p) not in known]:
                self.optimizer.add_param_group({"params": new})
            self.optimizer.step()
            self._zero_gradients()
        states = self.optimizer.state if self.optimizer is not None else {}
        for name, parameter in trained:
            self.record.add(f"{where}: weight {name}", parameter)
            state = states.get(parameter) or {}
            if id(parameter) in self._stepped:
                state = self._stepped[id(parameter)].state.get(parameter) or {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.record.add(f"{where}: {key} of {name}", value)
        for name, average in self.ema.items():
            now = dict(trained).get(name)
            if now is not None and now.shape == average.shape:
                average.mul_(0.9).add_(now.detach(), alpha=0.1)

    def _zero_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        for parameter in self.added.values():
            parameter.grad = None


def _slice_loss(model: Any) -> None:
    """What ``loss="chunked"`` says, of a resident model."""
    base = model.get_base_model()
    head, _ = find_head(model, base, "chunked", False)
    if head is not None:
        slice_loss(base, head.module)


def frozen_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What is not trained, by name; the scales of 4-bit weights too."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.requires_grad:
            yield name, tensor
            state = state_of(tensor)
            if state is not None:
                yield f"{name}: absmax", state.absmax


def run_arm(
    program: Program,
    model: Any,
    prepare: Callable[[Any], Any] | None,
    finish: Callable[[Any], None] | None = None,
) -> Record:
    """Run ``program`` on ``model``; the process is as it was afterwards.

    Args:
        program: What to do.
        model: Changed in place.
        prepare: What to do with the model after the actions before it.
        finish: Called with the arm before its hooks are taken off.
    """
    python_state = random.getstate()
    with torch.random.fork_rng(devices=[]), actions.settings_restored():
        random.seed(program.seed)
        torch.manual_seed(program.seed)
        arm = Arm(program, model)
        try:
            arm.run(prepare)
            if finish is not None:
                finish(arm)
        finally:
            arm.close()
            random.setstate(python_state)
    return arm.record


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def _context(name: str) -> Iterator[None]:
    if name == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            yield
    elif name == "anomaly":
        with torch.autograd.set_detect_anomaly(True):
            yield
    elif name == "deterministic":
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
    else:
        yield
