"""Results of products that nobody reads: not computed.

When a layer is recomputed in backward, its own result is known to nobody: only the graph that leads
to it is wanted. The last projection's product and what LoRA adds to it go into that result by a sum
alone, whose gradient needs none of their values. So they stand there as tensors without values,
which are computed if anything but such a sum uses them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from poros.errors import RematerializationError

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LazyTensor(torch.Tensor):
    """A tensor of which shape, dtype and graph are there, and the values once somebody reads them.

    Args:
        shape: Of the values, which are contiguous.
        form: Computes them.
        sources: What it reads.
    """

    _form: Callable[[], torch.Tensor] | None
    _formed: torch.Tensor | None
    _sources: Sequence[tuple[torch.Tensor, int]]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        form: Any,
        sources: Sequence[torch.Tensor],
    ) -> "LazyTensor":
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        made._form, made._formed = form, None
        made._sources = [(source, source._version) for source in sources]
        return made

    @property
    def is_formed(self) -> bool:
        return self._formed is not None

    def values(self) -> torch.Tensor:
        """The values, as an ordinary tensor without a graph.

        Raises:
            RematerializationError: If the recomputation that they belong to is over, or something
                that they come from was written to since.
        """
        if self._formed is None:
            if self._form is None:
                raise RematerializationError(
                    "expected the result of a recomputed layer to be read within its recomputation "
                    "or not at all, found a use of it afterwards, and it was never computed. "
                    'adapter_kernels="peft" computes it'
                )
            if any(source._version != version for source, version in self._sources):
                raise RematerializationError(
                    "expected a layer to leave alone what goes into its result, found a tensor "
                    "written to before the result was read, which was to be computed from it. "
                    'adapter_kernels="peft" computes it at once'
                )
            with torch.no_grad():
                self._formed = self._form()
            self.forget()
        return self._formed

    def forget(self) -> None:
        """Release what the values would be computed from."""
        self._form, self._sources = None, ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if not kwargs and func in _ALIASES and not args[0].is_formed:
            (source,) = args
            return LazyTensor(source.shape, source.dtype, source.device, source.values, ())
        if not kwargs and func is torch.ops.aten.add.Tensor:
            left, right = args
            if _goes_together(left, right):
                return LazyTensor(
                    left.shape,
                    left.dtype,
                    left.device,
                    lambda: values_of(left) + values_of(right),
                    args,
                )
        plain_args, plain_kwargs = tree_map_only(
            LazyTensor, LazyTensor.values, (args, kwargs or {})
        )
        result = func(*plain_args, **plain_kwargs)
        # What is written to stays the tensor that it was, with other values.
        return args[0] if func._schema.is_mutable and isinstance(args[0], LazyTensor) else result


def _goes_together(left: Any, right: Any) -> bool:
    """Whether a sum of both can wait."""
    return (
        isinstance(left, torch.Tensor)
        and isinstance(right, torch.Tensor)
        and left.shape == right.shape
        and left.dtype == right.dtype
        and left.device == right.device
        and left.is_contiguous()
        and right.is_contiguous()
        and any(isinstance(each, LazyTensor) and not each.is_formed for each in (left, right))
    )


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Release what values of these would be computed from; they can be read no more."""
    for tensor in tensors:
        if isinstance(tensor, LazyTensor):
            tensor.forget()


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor``, computed if they were not there."""
    return tensor.values() if isinstance(tensor, LazyTensor) else tensor
