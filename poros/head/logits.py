"""Logits that are computed when they are read.

Note: Lazily
    A model computes the logits of all its tokens and hands them to its loss and to its caller. The
    loss here needs hidden states instead (``poros.head.loss``), and callers seldom look. So what
    the head returns knows its shape, dtype and device, and how it would be computed. What families
    do to it on the way to the loss (a scale, a soft cap, a cast to float32) is noted. At anything
    else it is computed as the head would have: the same bits, graph and all, in the grad mode and
    autocast region in which the head was called, with the weights that it had.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from poros.errors import PreparedModelError
from poros.head.host_matrix import HostMatrix
from poros.head.loss import Step
from poros.stream.marks import version_of
from poros.stream.settings import AutocastState
from poros.stream.within import on_plain_tensors

_T: Any = torch.Tensor
_FORM = frozenset(
    [
        *(_T.__hash__, _T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.get_device),
        *(_T.is_floating_point, torch.is_floating_point, torch.numel, _T.is_complex, _T.__len__),
        *(_T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.layout.__get__),
        *(_T.ndim.__get__, _T.requires_grad.__get__, _T.is_meta.__get__, _T.is_sparse.__get__),
        *(_T.is_cuda.__get__, _T.is_cpu.__get__, _T.is_leaf.__get__, _T.grad_fn.__get__),
    ]
)
"""What the values are not needed for."""
_SCALES: dict[Any, Literal["multiply", "divide"]] = {
    **dict.fromkeys([_T.mul, _T.__mul__, _T.__rmul__, torch.mul], "multiply"),
    **dict.fromkeys([_T.div, _T.__truediv__, torch.div], "divide"),
}
_TANH = (torch.tanh, _T.tanh)
_WATCHES = (_T.register_hook, _T.register_post_accumulate_grad_hook, _T.retain_grad)
_REMEDY = "Hand it logits.clone(), or prepare with loss='reference'"


@dataclass(eq=False)
class Origin:
    """One call of a head, and all that its product follows from."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    tell: Callable[[int], None]
    """Told of it when the values are computed, with their bytes."""
    source: Any
    """What stands for the head."""
    with_gradients: bool
    requires_grad: bool
    autocast: AutocastState
    hooks: Any
    """On saved tensors: a pair of functions, or None."""
    kept: Sequence[torch.Tensor]
    """Hidden states and head, which may not be written to meanwhile."""
    versions: Sequence[int]
    """Of these."""
    is_loss_taken: bool = False
    """Whether a loss was computed in slices: no gradient goes through the logits then."""
    logits: "weakref.WeakSet[LazyLogits]" = field(default_factory=weakref.WeakSet)
    """All that follow from it: once one is read, which may be to write to it, all are computed."""

    @classmethod
    def of(
        cls, hidden: torch.Tensor, head: nn.Linear, tell: Callable[[int], None], source: Any = None
    ) -> "Origin":
        """Capture a call of ``head``, which is frozen, with ``hidden``."""
        # Nothing autocasts what has no memory.
        autocast = AutocastState.capture("cpu" if hidden.is_meta else hidden.device.type)
        if hidden.is_inference():
            hidden = hidden.clone()  # no graph keeps anybody from writing to it
        # Nobody can write to a matrix in host memory.
        own = [tensor for tensor in head.parameters() if not isinstance(tensor, HostMatrix)]
        kept = [hidden, *own]
        return cls(
            hidden=hidden,
            weight=head.weight.detach(),  # frozen, whatever is set later
            bias=None if head.bias is None else head.bias.detach(),
            shape=torch.Size((*hidden.shape[:-1], head.out_features)),
            dtype=autocast.dtype if autocast.enabled else head.weight.dtype,
            tell=tell,
            source=source,
            with_gradients=torch.is_grad_enabled(),
            requires_grad=torch.is_grad_enabled() and hidden.requires_grad,
            autocast=autocast,
            hooks=_saved_tensor_hooks(),
            kept=kept,
            versions=list(map(version_of, kept)),
        )

    def intact(self) -> torch.Tensor:
        """The hidden states.

        Raises:
            PreparedModelError: If they, or the head, were written to since the head was called.
        """
        if self.versions != list(map(version_of, self.kept)):
            raise PreparedModelError(
                "logits: expected the hidden states and the head that they are computed from, "
                "found them written to before the logits were read. Read the logits first, or "
                "prepare with loss='reference', which computes them at once"
            )
        return self.hidden

    def values(self) -> torch.Tensor:
        """Compute the product as the head does; raises as ``intact``."""
        with self.as_then(self.with_gradients, self.autocast):
            values = nn.functional.linear(self.intact(), self.weight, self.bias)
        self.tell(values.nbytes)
        return values

    @contextmanager
    def as_then(self, with_gradients: bool, autocast: AutocastState) -> Iterator[None]:
        """Restore the modes of the call, without a later inference mode, and its hooks."""
        leaves = torch.is_inference_mode_enabled() and not self.hidden.is_inference()
        are_same = self.hooks == _saved_tensor_hooks()
        with (
            nullcontext() if are_same else saved_tensors_hooks(*(self.hooks or (_itself, _itself))),
            torch.inference_mode(False) if leaves else nullcontext(),
            torch.set_grad_enabled(with_gradients),
            autocast.enter(),
        ):
            yield


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class LazyLogits(torch.Tensor):
    """See "Lazily"."""

    origin: Origin
    """What it is computed from."""
    steps: tuple[Step, ...]
    """What has become of the head's product since."""
    _compute: Callable[[], torch.Tensor] | None
    _result: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        origin: Origin,
        steps: tuple[Step, ...] = (),
        dtype: torch.dtype | None = None,
        compute: Callable[[], torch.Tensor] | None = None,
        has_gradient: bool | None = None,
    ) -> "LazyLogits":
        if has_gradient is None:
            has_gradient = origin.requires_grad
        made: LazyLogits = _T._make_wrapper_subclass(
            cls,
            origin.shape,
            dtype=dtype or origin.dtype,
            device=origin.hidden.device,
            requires_grad=has_gradient,
        )
        made.__dict__.update(
            origin=origin,
            steps=steps,
            _compute=compute or origin.values,
            _result=None,
        )
        origin.logits.add(made)
        if has_gradient:
            # A function of somebody's own that takes it without reading it in Python.
            on_plain_tensors(_T.register_hook, made, _refuse)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.origin.shape)}, is_computed={self.is_computed})"

    @property
    def is_computed(self) -> bool:
        """Whether the values were read, and may have been changed."""
        return self._result is not None

    def take_loss(self) -> Origin:
        """Return what a sliced loss is computed from; no gradient will go through the logits."""
        self.require_own_graph()
        self.origin.is_loss_taken = True
        return self.origin

    def require_own_graph(self) -> None:
        """Raise ``PreparedModelError`` if an autograd function has made it its result."""
        node = on_plain_tensors(_T.grad_fn.__get__, self)
        if node is not None:
            raise PreparedModelError(
                f"logits: expected them as the model gave them, found the result of {node}, whose "
                f"gradient would be left out. {_REMEDY}"
            )

    def computed(self) -> torch.Tensor:
        """Return the ordinary tensor; computed at the first call."""
        if self._result is None and self._compute is not None:
            self._result = self._compute()
            self._compute = None  # it holds what this follows from
        result: Any = self._result
        return result

    def _read(self) -> torch.Tensor:
        """The same for a caller that may write to it."""
        self.require_own_graph()
        for each in list(self.origin.logits):
            each.computed()
        return self.computed()

    def _noted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Apply ``func`` lazily; None if the values are needed."""
        if self.origin.hooks != _saved_tensor_hooks():
            return None  # as within torch.utils.checkpoint: what it saves is counted
        if func in _TANH and not args and not kwargs:
            return self._follower(func, args, kwargs, step=Step("tanh"))
        if func in _SCALES and len(args) == 1 and not kwargs:
            number = args[0]
            if isinstance(number, int | float) and not isinstance(number, bool):
                return self._follower(func, args, kwargs, step=Step(_SCALES[func], float(number)))
        if func is _T.contiguous and not args:
            return self
        if func is _T.view_as and args[0] is self:
            # What an autograd function (of DDP, say) hands on as it got it.
            return self._follower(_itself, (), {})
        if func in (_T.float, _T.to):
            return self._cast(func, args, kwargs)
        return None

    def _cast(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        dtype = torch.float32
        if func is _T.to:
            try:
                device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
            except (RuntimeError, TypeError):  # such as another tensor, or copy=True
                return None
            if device is not None and device != self.device:
                return None
        if dtype in (None, self.dtype):
            return self
        if dtype != torch.float32:
            return None
        return self._follower(func, args, kwargs, dtype=dtype)

    def _follower(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        step: Step | None = None,
        dtype: torch.dtype | None = None,
    ) -> "LazyLogits":
        self.require_own_graph()
        with_gradients, autocast = torch.is_grad_enabled(), self.origin.autocast.now()

        def compute() -> torch.Tensor:
            with self.origin.as_then(with_gradients, autocast):
                values: torch.Tensor = func(self.computed(), *args, **kwargs)
            return values

        steps = self.steps if step is None else (*self.steps, step)
        has_gradient = with_gradients and self.requires_grad
        return LazyLogits(self.origin, steps, dtype or self.dtype, compute, has_gradient)

    @classmethod
    @torch.compiler.disable  # it would follow the computation, and come back here
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else next(iter(kwargs.values()), None)
        if func in _FORM and isinstance(first, LazyLogits):
            if not first.is_computed or func is _T.__hash__:
                return torch._C._disabled_torch_function_impl(func, (), tuple(args), dict(kwargs))
            return func(*_values(tuple(args)), **_values(dict(kwargs)))
        _require_gradients_there(func, args, kwargs)
        if args and isinstance(first, LazyLogits) and not first.is_computed:
            noted = first._noted(func, args[1:], kwargs)
            if noted is not None:
                return noted
        return func(*_values(tuple(args)), **_values(dict(kwargs)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _refuse(func)


def _itself(values: torch.Tensor) -> torch.Tensor:
    return values


def _values(tree: Any) -> Any:
    return _pytree.tree_map(
        lambda leaf: leaf._read() if isinstance(leaf, LazyLogits) else leaf, tree
    )


def _require_gradients_there(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse to watch or take the gradient of logits that a loss in slices goes around."""
    if func in _WATCHES:
        wanted: Any = args[:1]
    elif func is torch.autograd.grad:
        wanted = kwargs.get("inputs", args[1:2])
    else:
        return
    for leaf in _pytree.tree_leaves(wanted):
        if isinstance(leaf, LazyLogits) and leaf.origin.is_loss_taken:
            raise PreparedModelError(
                "logits: expected no use of their gradient, found a hook on them, or "
                "torch.autograd.grad by them: the loss was computed in slices, without them. "
                "Prepare with loss='reference'"
            )


def _refuse(given: Any) -> None:
    if given is None:
        return  # no gradient has arrived
    raise PreparedModelError(
        "logits: expected Python code that reads them, found an autograd function or a compiled "
        f"one that takes them as they are. {_REMEDY}"
    )
