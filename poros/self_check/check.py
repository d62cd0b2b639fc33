"""Checks the first training step on the user's own machine, layer by layer.

Each layer is checked once, behind its first forward with gradients, with the real batch; one in
which hooks of the user may run, as its backward begins. The check takes the same input h_k and
random state s_k, and an incoming gradient g_(k+1) that is drawn (with hooks, the one that arrives).
It runs the layer once more as it is streamed; then it loads its frozen tensors afresh and
synchronously into memory of its own, runs the layer's own forward in an ordinary graph, and
requires equal bits of

    the output h_(k+1), the random state s_(k+1), the input gradient g_k, every adapter gradient.

Since h_(k+1) and s_(k+1) are where layer k + 1 starts, and g_k where layer k - 1 ends, the chain
from the embedding to the head is what a resident run computes. Nothing is kept of the check: random
states are put back, no gradient is accumulated, and the extra memory is one block at a time, which
the optimizer state takes later.

Neither slots, streams and copies nor the recomputation take part, nor Poros' own 4-bit product: so
a fault in them cannot hide itself. The bytes themselves are compared with digests of what they were
before ``poros.prepare`` moved them.

Note: Layers that do not repeat themselves
    On a GPU the backward of fused attention does not repeat itself over long sequences: two
    resident runs of a layer differ now and then, so neither a difference nor an equality of two
    runs says anything about streaming. Its outputs do repeat themselves, so the forward and the
    recomputation of the step itself are compared as ever. For the gradients the layer is streamed
    once more, over a block that is loaded anew, with deterministic attention, and compared with an
    ordinary graph over the same kernels (``poros.self_check.proof``). Only a difference there is an
    error. A layer that does not repeat itself even so is named as not provable, and trains.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils.output_capturing import _active_collector

from poros.errors import ParityError
from poros.io.digests import digest
from poros.model.runtime import Runtime
from poros.self_check.compare import bits
from poros.self_check.evidence import (
    CallSnapshot,
    first_difference,
    named,
    tensors_in,
)
from poros.self_check.proof import Incoming, Kernels, LayerRerunner, Outcome
from poros.stream.boundary import is_streamed, streamed_layer
from poros.stream.namespaces import put_back
from poros.utils.logging_setup import ProgressLog

logger = logging.getLogger(__name__)

_UNSTEADY = (
    "resident does not equal itself: running the layer twice from the same state gives different "
    "bits ({}), so nothing can be said about streaming. It depends on something that is neither "
    'its input nor a random state of PyTorch; self_check="warn" trains without a proof'
)
_DISTURBED = "its backward has to leave no trace of random draws: {}"
_CACHE_HINT = (
    ". The layer was called with an empty KV cache, which a streamed layer does without; it may "
    "compute otherwise with one: pass use_cache=False, in the resident run as well"
)


class SelfCheck:
    """The check of one prepared model.

    Args:
        mode: ``"strict"`` raises on a mismatch, ``"warn"`` logs it.

    Attributes:
        unchecked: Layers whose next call is to be checked, by their places.
        status: ``"pending"``, ``"passed"``, ``"failed"``, or ``"unproven"``: complete, nothing
            differs, but there is a layer in ``not_provable``.
        message: The mismatch, if any.
        proved_otherwise: Layers that were proved with deterministic attention; whether two resident
            runs with the kernels in use were seen to differ.
        not_provable: Layers that do not repeat themselves.
    """

    def __init__(self, runtime: Runtime, layers: Sequence[nn.Module], mode: str) -> None:
        self.mode = mode
        self.message: str | None = None
        self.num_layers = len(layers)
        self._runtime: Runtime = weakref.proxy(runtime)
        self._digests = runtime.digests.results() if runtime.digests is not None else {}
        """Of what streams, by name, from before ``poros.prepare`` moved it."""
        self.unchecked = {index: weakref.ref(layer) for index, layer in enumerate(layers)}
        self._is_reported = False
        self._read: set[str] = set()
        """Matrices in host memory whose rows were checked, and slices of them."""
        self._hashed: set[str] = set()
        """Matrices of which all bytes were."""
        self.proved_otherwise: dict[str, bool] = {}
        self.not_provable: list[str] = []
        self._runs = LayerRerunner(runtime)
        self._progress: ProgressLog | None = None
        self._compared: set[int] = set()
        """Kept layers whose bytes were compared."""
        self._without_gradient: set[int] = set()
        """Layers of which only the forward was checked: nothing below them is trained."""

    @property
    def status(self) -> str:
        if self.message is not None:
            return "failed"
        if not self._is_complete:
            return "pending"
        return "unproven" if self.not_provable else "passed"

    def findings(self) -> dict[str, Any]:
        """The value of ``Runtime.self_check``."""
        return {
            "mode": self.mode,
            "status": self.status,
            "message": self.message,
            "proved_with_deterministic_attention": list(self.proved_otherwise),
            "not_provable": list(self.not_provable),
            "kernels": self._runtime.sizer.check_kernels,
        }

    @property
    def _is_complete(self) -> bool:
        return (
            len(self.unchecked) < self.num_layers
            and self.unchecked.keys() <= self._without_gradient
        )

    def watch(self, index: int, run: Callable[[], Any], arguments: tuple[Any, Any]) -> Any:
        """Run one layer's forward as it is streamed, and check it behind, apart from its graph.

        Where code of the user may run inside the layer, which may keep what it sees, it is checked
        as its backward begins: by then the loss has been made of what the layer itself has given.
        """
        reference = self.unchecked.get(index)
        layer = reference() if reference is not None else None
        if layer is None:
            return run()
        inputs = tensors_in(arguments)
        needs_gradient = any(each.requires_grad for each in (*inputs, *layer.parameters()))
        if not needs_gradient and (index in self._without_gradient or not layer.training):
            return run()
        self._without_gradient.discard(index)
        streamed = streamed_layer(layer)
        is_open = streamed.condition().has_hooks
        if is_open and streamed.weights.is_pinned:
            # Hooks of the user run as often as in a resident run: its bytes alone are compared.
            result = run()
            self._note_checked(index, needs_gradient)
            self._settle(streamed.name, None)
            return result
        evidence, result = CallSnapshot.collect(layer, inputs, run, arguments, self._runtime.device)
        ends = [each for _, each in named("", result) if each.requires_grad]
        if is_open and ends:
            # Emptied by the check: the graph may live on, with the loss.
            late = partial(self._check_late, index, [evidence], ends[0].output_nr)
            ends[0].grad_fn.register_prehook(late)
        else:
            self._check_apart(index, evidence, needs_gradient)
        return result

    def _check_late(
        self,
        index: int,
        held: list[CallSnapshot],
        number: int,
        gradients: tuple[torch.Tensor | None, ...],
    ) -> None:
        """The hook on the node of a layer's result ``number``."""
        evidence = held.pop() if held else None
        if evidence is None or index not in self.unchecked or not evidence.is_intact():
            return
        gradient = gradients[number]
        if gradient is not None and is_streamed(evidence.layer):  # not restored since
            self._check_apart(index, evidence, needs_gradient=True, gradient=gradient)

    def _check_apart(
        self,
        index: int,
        evidence: CallSnapshot,
        needs_gradient: bool,
        gradient: torch.Tensor | None = None,
    ) -> None:
        evidence.is_late = gradient is not None
        self._note_checked(index, needs_gradient)
        streamed = streamed_layer(evidence.layer)
        condition = streamed.condition()
        token = _active_collector.set(None)
        try:
            # A loss may read what the layer has left in its modules.
            with _without_saved_tensors_hooks(), put_back(condition.contents.modules()):
                mismatch = self._damaged_bytes(streamed.weights.block)
                mismatch = mismatch or self._mismatch(evidence, gradient)
        finally:
            _active_collector.reset(token)
            # What hooks have written down in the layer meanwhile.
            condition.contents.attributes.disregard(condition.attributes)
        self._settle(evidence.name, mismatch)

    def _note_checked(self, index: int, with_gradient: bool) -> None:
        if self._progress is None:
            self._progress = ProgressLog(logger, "poros: checking the first step: %d of %d layers")
        if with_gradient:
            del self.unchecked[index]
        else:
            self._without_gradient.add(index)

    def watch_bytes(self, index: int, buffer: torch.Tensor) -> None:
        """Compare, once, the bytes over which a kept layer runs in an ordinary graph.

        Streams:
            Copies the block back behind what the compute stream waits for, and blocks the host.
        """
        reference = self.unchecked.get(index)
        layer = reference() if reference is not None else None
        if layer is None or index in self._compared:
            return
        self._compared.add(index)
        block = streamed_layer(layer).weights.block
        mismatch = self._damaged_bytes(block)
        if mismatch is None and self._differs(block, buffer.cpu()):
            mismatch = f"block {block} on the device is not what poros.prepare took over"
        if mismatch is not None:
            self._settle(streamed_layer(layer).name, mismatch)

    def watch_rows(
        self, name: str, matrix: torch.Tensor, places: torch.Tensor | slice, rows: torch.Tensor
    ) -> None:
        """Check the first rows of each matrix in host memory, and once all of its bytes.

        Args:
            matrix: The matrix, on the host.
            places: Indices of the rows; each slice is checked once.

        Streams:
            Copies the rows back behind what the compute stream waits for, and blocks the host.
        """
        what = f"{name}[{places.start}:{places.stop}]" if isinstance(places, slice) else name
        if what in self._read:
            return
        if isinstance(places, torch.Tensor):
            places = places.cpu()
        mismatch = None
        if name not in self._hashed and digest(matrix) != self._digests[name]:
            mismatch = "its bytes in host memory are not those that poros.prepare took over"
        elif not torch.equal(bits(rows.cpu()), bits(matrix[places])):
            mismatch = "the rows on the device are not those in host memory"
        self._hashed.add(name)
        self._read.add(what)
        self._settle(name, mismatch)

    def _settle(self, name: str, mismatch: str | None) -> None:
        if mismatch is not None:
            self.message = f"{name}: {mismatch}"
            if self.mode == "strict":
                raise ParityError(
                    f"self-check failed in {self.message}. The streamed step is not the resident "
                    "step on this machine; nothing has been trained on it. Please report it with "
                    "this message; poros.restore(model) undoes poros.prepare"
                )
            logger.warning("poros: self-check failed in %s; training continues", self.message)
        elif not self._is_complete:
            if self._progress is not None:
                self._progress.step(self.num_layers - len(self.unchecked), self.num_layers)
        elif not self._is_reported:
            # Once: slices of a head go on to be checked.
            self._is_reported = True
            self._report()

    def _report(self) -> None:
        if self.status == "passed":
            logger.info(
                "poros: the first step passed its check: %d layers give the bits of an ordinary "
                "autograd graph",
                self.num_layers,
            )
            if self._runtime.sizer.check_kernels != "peft":
                logger.warning(
                    "poros: the self-check compared with resident layers that run our adapter "
                    "kernels: the budget has no room for PEFT's own modules at this length"
                )
        if self.proved_otherwise:
            self._report_proofs()

    def _damaged_bytes(self, block: int) -> str | None:
        where = self._differs(block, self._runtime.host.read(block))
        if where is not None:
            return (
                f"the host bytes of block {block} are not those that poros.prepare took over "
                f"({where})"
            )
        size = self._runtime.policy.block_size
        for names in self._runtime.small.damaged[block * size : (block + 1) * size]:
            if names:
                return f"{names[0]} has not reached the device as poros.prepare found it"
        return None

    def _differs(self, block: int, flat: torch.Tensor) -> str | None:
        """Return the name of a tensor of ``block`` whose bytes in ``flat`` have changed."""
        for spec in self._runtime.host.slabs[block].layout.tensors:
            part = flat[spec.offset : spec.offset + spec.num_bytes]
            if digest(part) != self._digests[spec.name]:
                return spec.name
        return None

    def _mismatch(self, evidence: CallSnapshot, gradient: torch.Tensor | None) -> str | None:
        """Compare a layer with a second streamed run; one that is kept runs as it is kept.

        Its forward is compared as it was. Its gradients are drawn, but for a layer in which code of
        the user may run: its autograd Functions see the ``gradient`` that arrives, as they will
        behind the check (``CallSnapshot.incoming``). Backward hooks run in none of these runs.
        """
        incoming = evidence.incoming(gradient)
        again = self._runs.streamed(evidence, incoming, is_steady=False)
        resident = self._runs.resident(evidence, incoming)
        disturbed = first_difference(resident.rng_backward, again.rng_backward)
        if disturbed is not None:
            return _DISTURBED.format(disturbed)
        return self._explained(evidence, incoming, resident, again)

    def _explained(
        self,
        evidence: CallSnapshot,
        incoming: Incoming,
        resident: Outcome,
        streamed: Outcome,
    ) -> str | None:
        """Explain a difference between these, or the forward itself; None if it is no mismatch."""
        difference = first_difference(resident.values, streamed.values | evidence.given())
        difference = difference or first_difference(resident.values, streamed.values)
        if difference is None:
            return None
        inputs_before = {
            f"input {n}": tensor.detach().clone() for n, tensor in enumerate(evidence.inputs)
        }
        again = self._runs.resident(evidence, incoming)
        unsteady = first_difference(resident.values, again.values)
        if unsteady is None and not resident.may_vary:
            return difference + (_CACHE_HINT if evidence.has_cache else "")
        inputs_now = {f"input {n}": tensor for n, tensor in enumerate(evidence.inputs)}
        edited = first_difference(inputs_before, inputs_now)
        if edited is not None:
            return f"the layer, or a hook inside it, edits what it is given in place ({edited})"
        if evidence.device.type == "cpu" and not resident.may_vary:
            return _UNSTEADY.format(unsteady)
        try:
            return self._prove(evidence, incoming, resident, again, streamed)
        except torch.OutOfMemoryError:
            self._give_up(evidence, "the device has no memory for the proof")
            return None

    def _prove(
        self,
        evidence: CallSnapshot,
        incoming: Incoming,
        resident: Outcome,
        again: Outcome,
        streamed: Outcome,
    ) -> str | None:
        """Prove a layer whose kernels may not repeat themselves; return the mismatch, if any.

        Two resident runs and the streamed one have run with the kernels of the user. The outputs
        of such a layer mostly do repeat themselves, in the forward as well as in the
        recomputation, so they are compared as they were. For the gradients both sides run once
        more, with attention that repeats itself.
        """
        difference = first_difference(resident.forward, streamed.forward | evidence.given())
        difference = difference or first_difference(resident.forward, streamed.forward)
        unsteady = first_difference(resident.forward, again.forward)
        if difference is not None and unsteady is None:
            return difference + (_CACHE_HINT if evidence.has_cache else "")
        if difference is not None:
            steady = [self._runs.resident(evidence, {}, Kernels.DETERMINISTIC) for _ in range(2)]
            hidden = first_difference(steady[0].forward, steady[1].forward)
            if hidden is not None:
                return _UNSTEADY.format(hidden)
            self._give_up(evidence, f"its outputs do not repeat themselves ({unsteady})")
            return None
        kernels = Kernels.DETERMINISTIC_ATTENTION
        expected = self._runs.resident(evidence, incoming, kernels)
        proof = self._runs.streamed(evidence, incoming, is_steady=True)
        difference = first_difference(expected.values, proof.values)
        if difference is None:
            differs = first_difference(resident.values, again.values) is not None
            self.proved_otherwise[evidence.name] = differs
            return None
        repeated = self._runs.resident(evidence, incoming, kernels)
        unsteady = first_difference(expected.values, repeated.values)
        if unsteady is None:
            return f"{difference} (with deterministic attention on both sides)"
        self._give_up(evidence, f"not even with deterministic attention ({unsteady})")
        return None

    def _give_up(self, evidence: CallSnapshot, why: str) -> None:
        name = evidence.name
        self.not_provable.append(name)
        logger.warning(
            "poros: the self-check cannot prove %s, because two resident runs from the same state "
            "give different bits: %s. It cannot tell whether streaming changes them; training "
            "continues",
            name,
            why,
        )

    def _report_proofs(self) -> None:
        names = list(self.proved_otherwise)
        logger.warning(
            "poros: the attention kernels in use do not repeat themselves in backward: in %d of %d "
            "layers (%s) the streamed gradients differed from those of a resident run, and in %d "
            "of these a second resident run was seen to differ as well. With deterministic "
            "attention on both sides all of them are equal, bit for bit; training continues with "
            "your kernels",
            len(names),
            self.num_layers,
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
            sum(self.proved_otherwise.values()),
        )


def _without_saved_tensors_hooks() -> AbstractContextManager[object]:
    """Switch off the user's saved-tensor hooks, which belong to the graph that goes on."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()  # any at all would switch off autograd's own check of versions
    return torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each)
