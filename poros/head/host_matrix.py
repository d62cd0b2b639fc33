"""A matrix in host memory that reports the device as its own, and is read there in parts.

Note: What it is
    A parameter whose bytes stay where they are. Shape, dtype and device are those of a resident
    parameter, so that code that reads them (``model.device``, a trainer) works unchanged. It has
    no memory on the device: a lookup (``torch.nn.functional.embedding``) brings the rows it names;
    slices of its rows and other views are matrices of this kind too; any other operator gets a copy
    on the device for as long as it takes, and says so once unless it is of a slice; what would
    write to it, or to a view, is refused.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils import _pytree

from poros.errors import PreparedModelError
from poros.head.rows import RowReader
from poros.utils.formatting import size

logger = logging.getLogger(__name__)

_ATEN = torch.ops.aten
_ALIASES = (_ATEN.detach.default, _ATEN.alias.default)
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class HostMatrix(torch.Tensor):
    """See "What it is".

    Args:
        host: The bytes: of shape (rows, columns), contiguous, on the CPU.
        reader: Brings rows to the device.
        name: The parameter's qualified name, for messages.
    """

    host: torch.Tensor
    _reader: RowReader
    _name: str
    _notes: "_Notes"
    _view: Callable[[torch.Tensor], torch.Tensor] | None

    @staticmethod
    def __new__(
        cls,
        host: torch.Tensor,
        reader: RowReader,
        name: str,
        notes: "_Notes | None" = None,
        view: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> "HostMatrix":
        form = host if view is None else view(host)
        # Views of an ordinary tensor are ordinary ones in inference mode too.
        with torch.inference_mode(False):
            matrix: HostMatrix = torch.Tensor._make_wrapper_subclass(
                cls, form.shape, strides=form.stride(), dtype=host.dtype, device=reader.device
            )
        matrix.host, matrix._reader, matrix._name = host, reader, name
        matrix._notes, matrix._view = notes or _Notes(), view
        return matrix

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HostMatrix({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _SET_DATA and isinstance(args[0], HostMatrix):
            own, new = args
            has_its_bytes = isinstance(new, HostMatrix) and new.host is own.host
            own._notes.is_replaced |= not has_its_bytes
        return torch._C._disabled_torch_function_impl(func, (), tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, HostMatrix):
            if operator is _ATEN.copy_.default and first._has_bytes_of(args[1]):
                return first  # an adapter file may hold the frozen matrices of a grown vocabulary
            if operator is _ATEN.embedding.default and first._view is None:
                return first._rows(args[1])
            if operator in _ALIASES:
                return HostMatrix(first.host, first._reader, first._name, first._notes, first._view)
            if operator is _ATEN.slice.Tensor and first._view is None:
                first.require_as_prepared()
                part = operator(first.host, *args[1:], **kwargs)
                if part.is_contiguous():
                    notes = _Notes(has_warned=True)
                    return HostMatrix(part, first._reader, first._name, notes)
            device = kwargs.get("device")
            is_host = device is not None and torch.device(device).type == "cpu"
            if operator is _ATEN._to_copy.default and is_host and first._view is None:
                return operator(first.host, **kwargs)
            if _is_view(operator):
                first.require_as_prepared()
                return first._viewed(lambda whole: operator(whole, *args[1:], **kwargs))
        return _whole(operator, args, kwargs)

    def _viewed(self, view: Callable[[torch.Tensor], Any]) -> Any:
        """A view of it, or several: copied when they are read, and read-only."""
        own = self._view

        def of(whole: torch.Tensor) -> Any:
            return view(whole if own is None else own(whole))

        def part(number: int, whole: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = of(whole)[number]
            return found

        form = of(self.host)
        given = (self.host, self._reader, self._name, self._notes)
        if isinstance(form, torch.Tensor):
            return HostMatrix(*given, of)
        return [HostMatrix(*given, partial(part, number)) for number in range(len(form))]

    def _has_bytes_of(self, tensor: Any) -> bool:
        form = tensor.shape, tensor.dtype
        if self._view is not None or form != (self.host.shape, self.host.dtype):
            return False
        if isinstance(tensor, HostMatrix):
            return tensor.host is self.host
        theirs = tensor.detach().cpu().contiguous()
        return torch.equal(theirs.view(torch.uint8), self.host.view(torch.uint8))

    def on_device(self) -> torch.Tensor:
        """Copy the matrix to the device."""
        whole = self._reader.whole(self.host)
        return whole if self._view is None else self._view(whole)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        self.require_as_prepared()
        return self._reader.rows(self._name, self.host, indices)

    def require_as_prepared(self) -> None:
        """Raise ``PreparedModelError`` if it was cast, moved, replaced or made trainable."""
        if self.dtype != self.host.dtype or self.device != self._reader.device:
            raise PreparedModelError(
                f"{self._name}: expected {self.host.dtype} on {self._reader.device} as prepared, "
                f"found it cast or moved to {self.dtype} on {self.device} (by "
                "prepare_model_for_kbit_training?); its bytes are in host memory. Call "
                "poros.restore(model), cast or move it, then prepare again"
            )
        if self._notes.is_replaced:
            raise PreparedModelError(
                f"{self._name}: expected its own bytes, found others assigned to its .data; its "
                "bytes are in host memory. Call poros.restore(model), change it, then prepare again"
            )
        if self.requires_grad:
            raise PreparedModelError(
                f"{self._name}: expected it frozen as prepared, found it made trainable; its bytes "
                "are in host memory. Call poros.restore(model), then prepare again"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PreparedModelError(
            f"{self._name}: expected a matrix that is read, found a copy or a pickle of it; it is "
            "in host memory while the model is prepared. Call poros.restore(model) first"
        )


@dataclass
class _Notes:
    """The state that a matrix and its aliases share."""

    has_warned: bool = False
    """Whether the warning about a use of the whole matrix was logged."""
    is_replaced: bool = False


def _is_view(operator: Any) -> bool:
    """Whether the operator returns a view of its input."""
    returned = [each.alias_info for each in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _whole(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operator`` on whole copies of the matrices among its arguments."""
    given = dict(zip((each.name for each in operator._schema.arguments), args, strict=False))
    given.update(kwargs)
    written = [
        given.get(argument.name)
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for matrix in _pytree.tree_leaves(written):
        if isinstance(matrix, HostMatrix):
            raise PreparedModelError(
                f"{matrix._name}: expected a matrix that is read, found {operator} writing to it; "
                "its bytes are in host memory while the model is prepared. Call "
                "poros.restore(model), change it, then prepare again"
            )

    def whole(value: Any) -> Any:
        if not isinstance(value, HostMatrix):
            return value
        value.require_as_prepared()
        if not value._notes.has_warned:
            value._notes.has_warned = True
            logger.warning(
                "poros: %s (%s) is in host memory; %s needs all of it, so it is copied to the "
                "device for as long as that takes",
                value._name,
                size(value.host.nbytes),
                operator,
            )
        return value.on_device()

    return operator(*_pytree.tree_map(whole, args), **_pytree.tree_map(whole, dict(kwargs)))
