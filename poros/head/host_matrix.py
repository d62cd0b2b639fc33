"""A matrix in host memory that says of itself that it is on the device, and is read there in parts.

Note: What it is
    A parameter whose bytes stay where they are. Shape, dtype and device are those of a resident
    parameter, so that nobody who asks for them (``model.device``, a trainer) is led astray. It has
    no memory on the device: a lookup (``torch.nn.functional.embedding``) brings the rows it names;
    a slice of its rows is a matrix of this kind too; any other operator gets a whole copy on the
    device for as long as it takes, and says so once unless it is of a slice; what would write to
    it is refused.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree

from poros.errors import PreparedModelError
from poros.head.rows import RowReader

logger = logging.getLogger(__name__)

_ATEN = torch.ops.aten
_ALIASES = (_ATEN.detach.default, _ATEN.alias.default)


class HostMatrix(torch.Tensor):
    """See "What it is".

    Args:
        host: The bytes: of shape (rows, columns), contiguous, on the CPU.
        reader: Brings rows to the device.
        name: The parameter's qualified name, for messages.

    Attributes:
        host: See above.
    """

    host: torch.Tensor
    _reader: RowReader
    _name: str
    _has_said: list[str]

    @staticmethod
    def __new__(
        cls, host: torch.Tensor, reader: RowReader, name: str, said: list[str] | None = None
    ) -> "HostMatrix":
        matrix: HostMatrix = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=reader.device
        )
        matrix.host, matrix._reader, matrix._name = host, reader, name
        matrix._has_said = [] if said is None else said
        return matrix

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HostMatrix({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

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
            if operator is _ATEN.embedding.default:
                return first._rows(args[1])
            if operator in _ALIASES:
                return HostMatrix(first.host, first._reader, first._name, first._has_said)
            if operator is _ATEN.slice.Tensor:
                first._require_as_prepared()
                part = operator(first.host, *args[1:], **kwargs)
                if part.is_contiguous():
                    return HostMatrix(part, first._reader, first._name, ["a slice"])
            if operator is _ATEN._to_copy.default and _is_host(kwargs.get("device")):
                return operator(first.host, **kwargs)
        return _whole(operator, args, kwargs)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        self._require_as_prepared()
        return self._reader.rows(self._name, self.host, indices)

    def _require_as_prepared(self) -> None:
        if self.dtype != self.host.dtype or self.device != self._reader.device:
            raise PreparedModelError(
                f"{self._name}: expected {self.host.dtype} on {self._reader.device} as prepared, "
                f"found it cast or moved to {self.dtype} on {self.device} (by "
                "prepare_model_for_kbit_training?); its bytes are in host memory. Call "
                "poros.restore(model), cast or move it, then prepare again"
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


def as_parameter(matrix: HostMatrix) -> nn.Parameter:
    """The matrix as a frozen parameter."""
    return nn.Parameter(matrix, requires_grad=False)


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _whole(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operator`` on whole copies of the matrices among its arguments."""
    written = {
        argument.name
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    named = dict(
        zip((argument.name for argument in operator._schema.arguments), args, strict=False)
    )
    for name, value in {**named, **kwargs}.items():
        for matrix in _pytree.tree_leaves(value) if name in written else ():
            if not isinstance(matrix, HostMatrix):
                continue
            raise PreparedModelError(
                f"{matrix._name}: expected a matrix that is read, found {operator} writing to it; "
                "its bytes are in host memory while the model is prepared. Call "
                "poros.restore(model), change it, then prepare again"
            )

    def whole(value: Any) -> Any:
        if not isinstance(value, HostMatrix):
            return value
        value._require_as_prepared()
        if not value._has_said:
            value._has_said.append(str(operator))
            logger.warning(
                "poros: %s (%.2f GB) is in host memory; %s needs it whole, so it is copied to the "
                "device for that",
                value._name,
                value.host.nbytes / 1e9,
                operator,
            )
        return value._reader.whole(value.host)

    return operator(*_pytree.tree_map(whole, args), **_pytree.tree_map(whole, dict(kwargs)))
